/* From a file to the kernel: the bytes of answers to READ. */
#ifndef MONARCHFS_BYTES_H
#define MONARCHFS_BYTES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The largest read that the kernel asks for: FUSE_MAX_MAX_PAGES (fs/fuse/fuse_i.h). */
#define MOST_READ_BYTES (256 * 4096)

/* One thread's means. */
struct lane {
	char *buffer; /* of MOST_READ_BYTES */
	int pipe[2]; /* -1: none (yet) */
	unsigned pages; /* that fit into it */
};

enum answered {
	NOT_READ, /* nothing was said to the kernel: the file did not give all of these bytes, or they
		   * are not good */
	NOBODY_WAITS,
	ANSWERED,
};

/* Answer request `unique` of `fuse_fd` with exactly `size` bytes of `fd` at `offset`. Waits for the
 * disk. `good` (NULL: they are) is asked once they were read, and before anything is said; what it has
 * seen then nobody changes any more. */
enum answered reply_read_from(struct lane *lane, int fuse_fd, uint64_t unique, int fd, uint64_t offset,
			   size_t size, bool (*good)(void *), void *arg);

void reply_end(struct lane *lane);

#endif
