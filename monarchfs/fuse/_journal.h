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
#define JOURNAL_THREADS 8

/* Begin to use the memory behind `fd`, as worker `number` of the mount. 0, or -errno; -EINVAL for
 * what is no journal. Once. */
int journal_start(int fd, unsigned number);

/* Whether there is a journal. */
bool journal_used(void);

/* Where thread `thread` (below JOURNAL_THREADS) is to have a request put by read(2), of JOURNAL_BUFFER_BYTES: what is there
 * counts as taken until journal_clear. NULL without a journal, or for too high a number. */
char *journal_buffer(unsigned thread);
void journal_clear(char *buffer);

/* Keep a request that is answered later. False if it is too large, or there is no room: if the
 * worker dies its caller waits for ever. */
bool journal_keep(const void *request, size_t length);

/* The request `unique` is answered. */
void journal_done(uint64_t unique);

/* Call `take` with each request that an earlier worker left, once. All of them are kept. */
void journal_left(void (*take)(const void *request, size_t length));

#endif
