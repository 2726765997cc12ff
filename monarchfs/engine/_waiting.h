/* Requests that wait for bytes of the source, and the threads that ask the source.
 *
 * Those who bring bytes (_misses.c for small files, fuse/_nonresident.c for large ones) have one lock. A
 * request waits until one of them has its answer, or it is left to Python: because it has been waiting for
 * long, or whoever waits for it got a signal, or something went wrong. */
#ifndef MONARCHFS_WAITING_H
#define MONARCHFS_WAITING_H

#include "../fuse/_pool.h"

#include <linux/fuse.h>

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Nobody waits for the source while it holds this. */
extern pthread_mutex_t source_lock;

/* They open, read and close files of the source: for readers, and for those who want bytes ahead of them. */
extern struct pool source_threads, ahead_threads;

/* Whether so much hangs there that no more is begun. Under `source_lock`. */
bool source_hangs(void);

/* A request. Under `source_lock`, but for what is constant: the last five. */
struct waiter {
	struct waiter *older, *newer; /* of all that wait */
	struct waiter *next; /* for the same */
	bool may_stay; /* though it has been waiting for long */
	void *for_what;
	/* It was left to Python, and is in no list: to be freed. */
	void (*left)(struct waiter *waiter);
	uint64_t started_ns;
	const struct fuse_in_header *request;
	size_t length;
};

/* Begin: so many threads ask the source for readers at once. */
void waiting_start(unsigned threads);

/* One of so many bytes (a waiter, and what its owner adds), with a copy of the request behind; NULL where there
 * is no memory. */
void *waiter_new(size_t size, const void *request, size_t length, uint64_t started_ns);

/* It waits from now on; `kept`: the journal has it. Under the lock, as all below. */
void waiter_add(struct waiter *waiter, bool kept);

/* Not any more: it is the caller's, to be answered. */
void waiter_take(struct waiter *waiter);

/* Nor is it answered, but left to Python. `left` is not called. */
void waiter_leave(struct waiter *waiter);

/* -- of all that wait; without the lock */

/* Leave a request to Python; false where it does not wait here. */
bool waiting_leave(uint64_t unique);

/* The same for those that have been here since before then, but for those that may stay, when there were `most`;
 * and threads that have been at the source since before then are stuck. How many still wait. */
unsigned waiting_leave_older(uint64_t before_ns, unsigned most);

/* Whether any came since then. */
bool waiting_any_since(uint64_t since_ns);

#endif
