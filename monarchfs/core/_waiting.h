/* Requests that wait for bytes of the source, and the threads that ask the source.
 *
 * The modules that bring the bytes (_misses.c for small files, core/_nonresident.c for large ones) share
 * one lock. A request waits until one of them answers it, or until it is left to Python: because it has
 * waited for too long, its process got a signal, or something went wrong. */
#ifndef MONARCHFS_WAITING_H
#define MONARCHFS_WAITING_H

#include "_pool.h"

#include <linux/fuse.h>

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* No thread calls the source while it holds this. */
extern pthread_mutex_t source_lock;

/* The threads that open, read and close files of the source: for readers, for Python ahead of readers, and for the
 * window. Those that ask for attributes have places of their own: no look-up waits for reads. */
extern struct pool source_threads, ahead_threads, window_threads, stat_threads;

/* Whether so many calls hang that no more are begun. Under `source_lock`. */
bool source_hangs(void);

/* A request. Guarded by `source_lock`, except the last five members, which are constant. */
struct waiter {
	struct waiter *older, *newer; /* among all that wait */
	struct waiter *next; /* among those that wait for the same */
	bool may_stay; /* though it has waited for long */
	void *for_what;
	/* Called when it was left to Python and is in no list any more; frees it. */
	void (*left)(struct waiter *waiter);
	uint64_t started_ns;
	const struct fuse_in_header *request;
	size_t length;
};

/* Begin. `threads` is how many read in the source for readers at a time, and how many ask for attributes. */
void waiting_start(unsigned threads);

/* A structure of `size` bytes that begins with a waiter, with a copy of the request behind it; NULL if there
 * is no memory. */
void *waiter_new(size_t size, const void *request, size_t length, uint64_t started_ns);

/* It waits from now on. `kept`: the journal has it. Under the lock, like the next two. */
void waiter_add(struct waiter *waiter, bool kept);

/* It waits no more: the caller answers it. */
void waiter_take(struct waiter *waiter);

/* It waits no more, and is left to Python. `left` is not called. */
void waiter_leave(struct waiter *waiter);

/* -- about all that wait; without the lock */

/* Leave a request to Python; false where it does not wait here. */
bool waiting_leave(uint64_t unique);

/* Leave requests to Python that have waited since before then. Once it has left `most`, those that may stay
 * do so. Threads that have been at the source since before then are stuck. Returns how many still wait. */
unsigned waiting_leave_older(uint64_t before_ns, unsigned most);

/* Whether a request came since then. */
bool waiting_any_since(uint64_t since_ns);

#endif
