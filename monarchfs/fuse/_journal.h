/* What was taken from the kernel and is not answered yet, in memory that outlives the worker.
 * See _journal.c. */
#ifndef MONARCHFS_JOURNAL_H
#define MONARCHFS_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What the kernel wants a buffer to hold at least is 8 KiB (FUSE_MIN_READ_BUFFER), and a write of
 * the size that INIT allowed with its headers: 4 KiB here, as the mount is read-only. */
#define JOURNAL_BUFFER_BYTES (12 * 1024)

/* Carry out a request that was left. */
typedef void (*journal_take)(const void *request, size_t length);

/* Begin to use the memory behind `fd`. 0, or -errno; -EINVAL for what is no journal. Once. */
int journal_start(int fd);

/* Whether there is a journal. */
bool journal_used(void);

/* Where the calling thread is to have requests put by read(2), of JOURNAL_BUFFER_BYTES, for its life.
 * What comes there counts as taken until journal_clear; journal_taken comes first after read(2). What
 * was left there is carried out. NULL without a journal, or where all buffers are of threads that do not
 * die. */
char *journal_buffer(journal_take take);
void journal_taken(char *buffer);
void journal_clear(char *buffer);

/* Keep a request that is answered later. False if it is too large, or there is no room: if the
 * worker dies its caller waits for ever. */
bool journal_keep(const void *request, size_t length);

/* The request `unique` is answered. */
void journal_done(uint64_t unique);

/* What earlier workers left: with `all`, which is for before the first request, everything; without, what
 * was in the hands of threads that have died since. One thread at a time. */
void journal_left(bool all, journal_take take);

#endif
