/* Threads that take requests from the kernel, answer reads of resident files, and queue the rest.
 * See _relay.c. */
#ifndef MONARCHFS_RELAY_H
#define MONARCHFS_RELAY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kernel refuses reads into a buffer smaller than the largest request that INIT allowed
 * (fs/fuse/dev.c, fuse_dev_do_read). The mount is read-only and the reply to INIT says max_write
 * 4096, so that requests are a path component or an attribute name at most; the rest is reserve. */
#define REQUEST_BYTES (128 * 1024 + 4096)

#define MOST_BOUNDS 32

struct relay_counts {
	uint64_t reads; /* answered */
	uint64_t bytes; /* in those answers */
	uint64_t queued; /* requests left to Python */
	uint64_t total_ns; /* that the answers took */
	uint64_t took[MOST_BOUNDS + 1]; /* answers that took at most so long; the last: longer */
};

/* Begin: `fuse_fd` is the mounted descriptor, read and written by `threads` threads from now on.
 * `bounds_ns`: of relay_counts.took, rising. Returns a descriptor that is readable while the queue
 * has something, or -errno. Once only. */
int relay_start(int fuse_fd, unsigned threads, const uint64_t *bounds_ns, unsigned bounds);

/* The next request that is not for the threads, copied to `buffer` (of REQUEST_BYTES): its length;
 * 0 after the last one of a mount that has ended, with *ended_by its errno; -EAGAIN for none. */
long relay_next(void *buffer, int *ended_by);

/* Reads of handle `fh` may be answered from `fd`, a complete file of `size` bytes. 0 or -errno. */
int relay_add(uint64_t fh, int fd, uint64_t size);

/* No longer. A read that is under way still is answered. */
void relay_remove(uint64_t fh);

/* The same for all handles that were added with this descriptor. */
void relay_forget(int fd);

void relay_count(struct relay_counts *counts);

#endif
