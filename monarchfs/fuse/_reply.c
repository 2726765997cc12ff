/* From a file to the kernel. See _reply.h.
 *
 * Larger pieces go through a pipe (splice(2)): it takes the page cache's pages themselves, so that
 * their bytes are copied once, and in the kernel. For 128 KiB that costs a third less than a buffer;
 * what is small is cheaper in one. Mapping the file would save the same copy, but then a disk that
 * fails shows in the middle of the answer, which is the reader's; here it shows before.
 *
 * What is in a pipe is still the file's: who writes to that on this node changes it there. So bytes that
 * are looked at before they are given away (`good`) are copied out of the file first.
 */
#define _GNU_SOURCE
#include "_reply.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE_BYTES 4096
#define PIPE_BYTES (1 << 20) /* what everybody may have: /proc/sys/fs/pipe-max-size */
#define SPLICED_FROM_BYTES (32 * 1024)

static void close_pipe(struct lane *lane)
{
	for (int end = 0; end < 2; end++) {
		if (lane->pipe[end] >= 0)
			close(lane->pipe[end]);
		lane->pipe[end] = -1;
	}
}

void reply_end(struct lane *lane)
{
	close_pipe(lane);
}

/* Whether there is an empty pipe for so many pages and a header. */
static bool has_pipe(struct lane *lane, size_t pages)
{
	if (lane->pipe[0] < 0 && !lane->pages) {
		if (pipe2(lane->pipe, O_CLOEXEC | O_NONBLOCK) < 0) {
			lane->pipe[0] = lane->pipe[1] = -1;
			lane->pages = 1; /* not tried again: descriptors are short */
			return false;
		}
		int bytes = fcntl(lane->pipe[0], F_SETPIPE_SZ, PIPE_BYTES);
		if (bytes < 0) /* the user has too many: a small one is left */
			bytes = fcntl(lane->pipe[0], F_GETPIPE_SZ);
		lane->pages = bytes > 0 ? (unsigned)bytes / PAGE_BYTES : 1;
	}
	return lane->pipe[0] >= 0 && pages < lane->pages;
}

/* An answer that is being made. */
struct reading {
	struct lane *lane;
	int fuse_fd, fd;
	uint64_t offset;
	size_t size;
	struct fuse_out_header out;
	bool (*good)(void *);
	void *arg;
};

static bool read_all(int fd, char *to, size_t size, uint64_t offset)
{
	while (size) {
		ssize_t got = pread(fd, to, size, (off_t)offset);
		if (got <= 0) {
			if (got < 0 && errno == EINTR)
				continue;
			return false;
		}
		to += got;
		size -= (size_t)got;
		offset += (size_t)got;
	}
	return true;
}

static enum answered through_buffer(const struct reading *of)
{
	char *buffer = of->lane->buffer;
	if (!read_all(of->fd, buffer, of->size, of->offset) || (of->good && !of->good(of->arg)))
		return NOT_READ;
	struct iovec parts[] = {{(void *)&of->out, sizeof(of->out)}, {buffer, of->size}};
	ssize_t sent;
	do {
		sent = writev(of->fuse_fd, parts, of->size ? 2 : 1);
	} while (sent < 0 && errno == EINTR);
	return sent < 0 ? NOBODY_WAITS : ANSWERED;
}

static bool fill_pipe(const struct reading *of)
{
	int end = of->lane->pipe[1];
	off_t offset = (off_t)of->offset;
	if (write(end, &of->out, sizeof(of->out)) != (ssize_t)sizeof(of->out))
		return false;
	for (size_t size = of->size; size;) {
		ssize_t got = splice(of->fd, &offset, end, NULL, size, 0);
		if (got <= 0) {
			if (got < 0 && errno == EINTR)
				continue;
			errno = got < 0 ? errno : ENODATA;
			return false;
		}
		size -= (size_t)got;
	}
	return true;
}

static enum answered through_pipe(const struct reading *of)
{
	struct lane *lane = of->lane;
	bool filled = fill_pipe(of);
	if (!filled && errno == EINVAL) { /* a file system without splice(2) */
		close_pipe(lane);
		lane->pages = 1;
		return through_buffer(of);
	}
	ssize_t sent = -1;
	while (filled &&
	       (sent = splice(lane->pipe[0], NULL, of->fuse_fd, NULL, of->out.len, 0)) < 0 &&
	       errno == EINTR)
		;
	int error = errno;
	if (sent != (ssize_t)of->out.len) {
		/* What is left in it must not come before the next answer. */
		close_pipe(lane);
		lane->pages = 0;
	}
	if (!filled || (sent < 0 && (error == ENOMEM || error == EINVAL || error == EAGAIN)))
		return NOT_READ; /* or not taken: the request still waits */
	return sent < 0 ? NOBODY_WAITS : ANSWERED;
}

enum answered reply_read_from(struct lane *lane, int fuse_fd, uint64_t unique, int fd, uint64_t offset,
			   size_t size, bool (*good)(void *), void *arg)
{
	if (size > MOST_READ_BYTES)
		return NOT_READ;
	const struct reading of = {
		.lane = lane,
		.fuse_fd = fuse_fd,
		.fd = fd,
		.offset = offset,
		.size = size,
		.out = {.len = (uint32_t)(sizeof(of.out) + size), .unique = unique},
		.good = good,
		.arg = arg,
	};
	size_t pages = (offset % PAGE_BYTES + size + PAGE_BYTES - 1) / PAGE_BYTES;
	if (!good && size >= SPLICED_FROM_BYTES && has_pipe(lane, pages))
		return through_pipe(&of);
	return through_buffer(&of);
}
