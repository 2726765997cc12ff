/* Threads that take requests from the kernel, answer those about resident files, and queue the rest.
 * See _relay.c. */
#ifndef MONARCHFS_RELAY_H
#define MONARCHFS_RELAY_H

#include "_counts.h"
#include "_record.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* The kernel refuses reads into a buffer smaller than the largest request that INIT allowed
 * (fs/fuse/dev.c, fuse_dev_do_read). The mount is read-only, and the reply to INIT says max_write 4096. So the
 * largest request is a path component or an attribute's name; the rest is reserve. */
#define REQUEST_BYTES (128 * 1024 + 4096)

/* The opcode of a note from _nonresident.c, which is not the kernel's and gets no answer. Two numbers follow
 * the header: the chunks of the inode that a read covers. See fast_path.Opcode. */
#define RELAY_AHEAD 0xfffe

/* Begin: from now on `threads` threads read and write `fuse_fd`, the mounted descriptor. At most
 * `waiting_reads` requests wait for the source without Python. `free_opens`: OPEN is answered with ENOSYS.
 * Returns a descriptor that is readable while the queue has something, or -errno. Once only. */
int relay_start(int fuse_fd, unsigned threads, unsigned waiting_reads, bool free_opens);

/* Whether the threads answer OPEN where they can, by default they do, and whether reads then pass by the page
 * cache. */
void relay_answer_opens(bool here, bool direct);

/* What became of a request before it was queued. */
enum relay_past {
	NEW,
	WAITED, /* with the threads, which then left it to Python */
	TAKEN, /* by an earlier worker, which may have carried it out */
};

struct fuse_in_header;

/* Answer an OPEN of a file of the source. False if too many files are open. */
bool relay_answer_open(const struct fuse_in_header *in, enum answered_by by, uint64_t started_ns);

/* Try once more with a request that was queued; true if it is answered now, or will be. */
bool relay_answered(const void *request, size_t length, enum relay_past past);

/* Copy the next request in the queue to `buffer` (of REQUEST_BYTES) and return its length. -EAGAIN if there is
 * none; 0 after the last one of a mount that has ended, with *ended_by its errno. */
long relay_next(void *buffer, int *ended_by, enum relay_past *past);

/* Queue what threads of earlier workers had that have died since, and start reads that wait behind reads that
 * hang. Called several times a second, by one thread. */
void relay_again(void);

/* Leave a request to Python. For modules that took it over from the threads; does not wait. */
void relay_leave(const void *request, size_t length);

/* Have Python fetch ahead: a read of `ino` goes from its chunk `first` to before `last`. */
void relay_note_ahead(uint64_t ino, uint64_t first, uint64_t last);

#endif
