/* From a file to the kernel. See _reply.h.
 *
 * Larger replies go through a pipe (splice(2)). The pipe takes the page cache's pages themselves, so their bytes
 * are copied once, in the kernel. For 128 KiB that costs a third less than a buffer; for small replies a buffer
 * is cheaper. Mapping the file would save the same copy, but an error of the disk would then show in the middle
 * of the answer, to the reader; here it shows before.
 *
 * Pages in a pipe are still the file's: a writer on this node changes them there. So bytes that have to be
 * checked before they are sent (`good`) are copied out of the file first.
 */
#define _GNU_SOURCE
#include "_reply.h"

#include "_table.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/uio.h>
#include <unistd.h>

#define PIPE_BYTES (1 << 20) /* the limit for ordinary users: /proc/sys/fs/pipe-max-size */
#define SPLICED_FROM_BYTES (32 * 1024)

static int fuse_fd = -1;
static size_t page_bytes = 4096; /* of memory, which is what a pipe counts in */

void reply_start(int fd)
{
	fuse_fd = fd;
	page_bytes = (size_t)sysconf(_SC_PAGESIZE);
}

size_t reply_size(const struct fuse_read_in *arg, uint64_t file_size)
{
	uint64_t rest = arg->offset < file_size ? file_size - arg->offset : 0;
	return rest < arg->size ? (size_t)rest : arg->size;
}

static void close_pipe(struct scratch *scratch)
{
	for (int end = 0; end < 2; end++) {
		if (scratch->pipe[end] >= 0)
			close(scratch->pipe[end]);
		scratch->pipe[end] = -1;
	}
}

void reply_end(struct scratch *scratch)
{
	close_pipe(scratch);
}

/* Whether there is an empty pipe for so many pages and a header. */
static bool has_pipe(struct scratch *scratch, size_t pages)
{
	if (scratch->pipe[0] < 0 && !scratch->pages) {
		if (pipe2(scratch->pipe, O_CLOEXEC | O_NONBLOCK) < 0) {
			scratch->pipe[0] = scratch->pipe[1] = -1;
			scratch->pages = 1; /* not tried again: descriptors are short */
			return false;
		}
		int bytes = fcntl(scratch->pipe[0], F_SETPIPE_SZ, PIPE_BYTES);
		if (bytes < 0) /* the user has too many pipes: this one stays small */
			bytes = fcntl(scratch->pipe[0], F_GETPIPE_SZ);
		scratch->pages = bytes > 0 ? (unsigned)((size_t)bytes / page_bytes) : 1;
	}
	return scratch->pipe[0] >= 0 && pages < scratch->pages;
}

/* Write a reply; true if the kernel took it. `parts` begins with room for the header. */
static bool send_parts(uint64_t unique, int error, struct iovec *parts, int count)
{
	struct fuse_out_header out = {.len = sizeof(out), .error = error, .unique = unique};
	parts[0] = (struct iovec){&out, sizeof(out)};
	for (int part = 1; part < count; part++)
		out.len += (uint32_t)parts[part].iov_len;
	ssize_t sent;
	do {
		sent = writev(fuse_fd, parts, count);
	} while (sent < 0 && errno == EINTR);
	table_answered();
	return sent >= 0;
}

bool reply_with(uint64_t unique, enum answered_by by, int error, const void *body, size_t length)
{
	struct iovec parts[] = {{0}, {(void *)body, length}};
	bool sent = send_parts(unique, error, parts, length ? 2 : 1);
	if (sent && recording())
		record_answer(unique, by, error, body, length);
	return sent;
}

void reply_time(enum duration counted, enum answered_by by, uint64_t started_ns)
{
	static const enum count causes[] = {
		[BY_UNKNOWN] = COUNT_SOURCE_NS, [BY_MEMORY] = COUNT_MEMORY_NS,
		[BY_TIER] = COUNT_TIER_NS,	[BY_PEER] = COUNT_PEER_NS,
		[BY_SOURCE] = COUNT_SOURCE_NS,	[BY_WAITED] = COUNT_COPY_NS,
		[BY_KERNEL] = COUNT_SOURCE_NS,
	};
	uint64_t took_ns = monotonic_ns() - started_ns;
	counts_time(counted, took_ns);
	if (counted == TIME_OPEN_SOURCE || counted == TIME_READ_SOURCE)
		counts_add(causes[by], took_ns);
}

static void count_read(enum duration counted, enum answered_by by, size_t size, uint64_t started_ns)
{
	counts_add(COUNT_BYTES, size);
	reply_time(counted, by, started_ns);
}

bool reply_bytes(uint64_t unique, enum answered_by by, struct iovec *parts, int parts_count,
		 uint64_t started_ns)
{
	size_t size = 0;
	for (int part = 1; part < parts_count; part++)
		size += parts[part].iov_len;
	bool sent = send_parts(unique, 0, parts, parts_count);
	if (sent)
		count_read(TIME_READ_SOURCE, by, size, started_ns);
	if (sent && recording())
		record_answer(unique, by, 0, NULL, size);
	return sent;
}

enum answered {
	NOT_READ,
	NOBODY_WAITS,
	ANSWERED,
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

static enum answered through_buffer(struct scratch *scratch, const struct read_reply *of)
{
	if (!read_all(of->fd, scratch->buffer, of->size, of->offset) || (of->good && !of->good(of->arg)))
		return NOT_READ;
	struct iovec parts[] = {{0}, {scratch->buffer, of->size}};
	return send_parts(of->unique, 0, parts, 2) ? ANSWERED : NOBODY_WAITS;
}

static bool fill_pipe(struct scratch *scratch, const struct read_reply *of)
{
	const struct fuse_out_header out = {.len = (uint32_t)(sizeof(out) + of->size),
					    .unique = of->unique};
	off_t offset = (off_t)of->offset;
	if (write(scratch->pipe[1], &out, sizeof(out)) != (ssize_t)sizeof(out))
		return false;
	for (size_t size = of->size; size;) {
		ssize_t got = splice(of->fd, &offset, scratch->pipe[1], NULL, size, 0);
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

static enum answered through_pipe(struct scratch *scratch, const struct read_reply *of)
{
	size_t length = sizeof(struct fuse_out_header) + of->size;
	bool filled = fill_pipe(scratch, of);
	if (!filled && errno == EINVAL) { /* a file system without splice(2) */
		close_pipe(scratch);
		scratch->pages = 1;
		return through_buffer(scratch, of);
	}
	ssize_t sent = -1;
	while (filled && (sent = splice(scratch->pipe[0], NULL, fuse_fd, NULL, length, 0)) < 0 &&
	       errno == EINTR)
		;
	int error = errno;
	if (sent != (ssize_t)length) {
		/* What is left in it must not come before the next answer. */
		close_pipe(scratch);
		scratch->pages = 0;
	}
	if (!filled || (sent < 0 && (error == ENOMEM || error == EINVAL || error == EAGAIN)))
		return NOT_READ; /* or the kernel did not take it: the request still waits */
	table_answered();
	return sent < 0 ? NOBODY_WAITS : ANSWERED;
}

bool reply_from(struct scratch *scratch, const struct read_reply *of)
{
	if (of->size > MOST_READ_BYTES)
		return false;
	size_t pages = (of->offset % page_bytes + of->size + page_bytes - 1) / page_bytes;
	bool piped = !of->good && of->size >= SPLICED_FROM_BYTES && has_pipe(scratch, pages);
	enum answered done = piped ? through_pipe(scratch, of) : through_buffer(scratch, of);
	if (done == ANSWERED)
		count_read(of->counted, of->by, of->size, of->started_ns);
	if (done == ANSWERED && recording())
		record_answer(of->unique, of->by, 0, NULL, of->size);
	return done != NOT_READ;
}
