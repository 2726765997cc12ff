/* Requests that are left to Python, in the order in which they were left. Thread-safe. */
#ifndef MONARCHFS_QUEUE_H
#define MONARCHFS_QUEUE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kernel refuses reads into a buffer smaller than the largest request that INIT allowed
 * (fs/fuse/dev.c, fuse_dev_do_read). The mount is read-only, and the reply to INIT says max_write 4096. So the
 * largest request is a path component or an attribute's name; the rest is reserve. */
#define REQUEST_BYTES (128 * 1024 + 4096)

/* The opcode of a note from _nonresident.c, which is not the kernel's and gets no answer. Two numbers follow
 * the header: the chunks of the inode that a read covers. See fuse/protocol.py. */
#define QUEUE_AHEAD 0xfffe

/* What became of a request before it was queued. */
enum queued_after {
	NEW,
	WAITED, /* with the threads, which then left it to Python */
	TAKEN, /* by an earlier worker, which may have carried it out */
};

/* Begin. Returns a descriptor that is readable while the queue has something, or -errno. Once only. */
int queue_start(void);

/* Memory for `size` bytes and a request of so many. A process waits for the answer, so this waits for memory. */
void *queue_new(size_t size, size_t length);

void queue_put(const void *bytes, size_t length, enum queued_after past);

/* Leave a request to Python that waited with the threads; does not wait. */
void queue_leave(const void *request, size_t length);

/* Have Python fetch ahead: a read of `ino` goes from its chunk `first` to before `last`. */
void queue_note_ahead(uint64_t ino, uint64_t first, uint64_t last);

/* The mount has ended with this errno: nothing comes any more. */
void queue_end(int error);

/* Copy the next request to `buffer` (of REQUEST_BYTES) and return its length. -EAGAIN if there is none; 0 after
 * the last one of a mount that has ended, with *ended_by its errno. */
long queue_next(void *buffer, int *ended_by, enum queued_after *past);

#endif
