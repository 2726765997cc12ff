/* The only way to the kernel: answers, and how long they took. */
#ifndef MONARCHFS_REPLY_H
#define MONARCHFS_REPLY_H

#include "_counts.h"
#include "_record.h"

#include <linux/fuse.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The largest read that the kernel asks for: max_pages in the reply to INIT (fuse/protocol.py). */
#define MOST_READ_BYTES (256 * 4096)

/* A thread's own buffer and pipe, reused for each reply. */
struct scratch {
	char *buffer; /* of MOST_READ_BYTES */
	int pipe[2]; /* -1: not made (yet) */
	unsigned pages; /* that fit into the pipe */
};

/* What a READ is answered with: the bytes of a file. */
struct read_reply {
	uint64_t unique;
	uint64_t started_ns;
	enum duration counted; /* as which the answer is */
	enum answered_by by;
	int fd;
	uint64_t offset;
	size_t size;
	/* Asked once they were read, and before anything is said; what it has seen then nobody changes any
	 * more. NULL: they are good. */
	bool (*good)(void *arg);
	void *arg;
};

/* The mounted descriptor. Before any answer. */
void reply_start(int fuse_fd);

/* How many bytes of a file of so many a READ is answered with. */
size_t reply_size(const struct fuse_read_in *arg, uint64_t file_size);

/* Answer with so many bytes, or an error. Fails where nobody waits any more: the caller was killed, the
 * request was answered by an earlier worker, or the mount has gone. */
bool reply_with(uint64_t unique, enum answered_by by, int error, const void *body, size_t length);

/* Count an answer that was given now. */
void reply_time(enum duration counted, enum answered_by by, uint64_t started_ns);

/* Answer a READ with bytes of the source that are in memory: parts[1] to parts[count - 1]. The first is for the header. */
bool reply_bytes(uint64_t unique, enum answered_by by, struct iovec *parts, int count, uint64_t started_ns);

/* Answer a READ with exactly these bytes of a file. Waits for the disk. False, and nothing is said, where
 * the file does not give all of them, or they are not good. */
bool reply_from(struct scratch *scratch, const struct read_reply *of);

void reply_end(struct scratch *scratch);

#endif
