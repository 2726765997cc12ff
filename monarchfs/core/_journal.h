/* The request journal: requests that were taken from the kernel and are not answered yet, in memory that
 * outlives the worker. See _journal.c. */
#ifndef MONARCHFS_JOURNAL_H
#define MONARCHFS_JOURNAL_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kernel wants a buffer of at least 8 KiB (FUSE_MIN_READ_BUFFER), with room for a write of the size that
 * INIT allowed and its headers: 4 KiB here, as the mount is read-only. */
#define JOURNAL_BUFFER_BYTES (12 * 1024)

/* Carries out a request that an earlier worker left. */
typedef void (*journal_take)(const void *request, size_t length);

/* Begin to use the memory behind `fd`. 0 or -errno, -EINVAL if it is no journal. Once only. */
int journal_start(int fd);

/* Whether there is a journal. */
bool journal_used(void);

/* The buffer of JOURNAL_BUFFER_BYTES into which the calling thread reads requests, for its life. A request
 * there counts as taken until journal_clear. journal_taken is the first call after read(2). A request that
 * an earlier thread left there is carried out. NULL without a journal, or if threads that do not die have
 * all buffers. */
char *journal_buffer(journal_take take);
void journal_taken(char *buffer);
void journal_clear(char *buffer);

/* Keep a request that is answered later. False if it is too large, or there is no room: then its caller waits
 * for ever if the worker dies. */
bool journal_keep(const void *request, size_t length);

/* The request `unique` is answered. */
void journal_done(uint64_t unique);

/* Carry out what earlier workers left: with `all` everything, for use before the first request; without, what
 * threads had that have died since. One thread at a time. */
void journal_left(bool all, journal_take take);

#endif
