/* Opens that the threads answer where the kernel reads replicas itself: with a backing file, or without
 * one if the replica lies in a segment, for which none is ever registered.
 *
 * The kernel refuses an open whose answer differs from that of the inode's other opens (fs/fuse/iomode.c).
 * So the opens of an inode with a backing file belong either to the threads alone, if it is delegated to them,
 * or to Python: see passthrough.py. Thread-safe; nothing here waits. */
#ifndef MONARCHFS_BACKED_H
#define MONARCHFS_BACKED_H

#include <stdbool.h>
#include <stdint.h>

/* fuse_open_out and FOPEN_PASSTHROUGH of linux/fuse.h since 6.9. With any other flag the open would fail
 * (fs/fuse/iomode.c). */
struct backed_open_out {
	uint64_t fh;
	uint32_t open_flags;
	uint32_t backing_id;
};
#define OPEN_PASSTHROUGH (1 << 7)

/* Delegate `ino`, which is not open: the threads answer its opens with this id, as far as resident_open
 * allows. False if there is no memory. */
bool backed_delegate(uint64_t ino, uint32_t backing_id);

/* Reclaim it. Returns how many opens there are; their RELEASE goes to Python from now on. */
unsigned backed_reclaim(uint64_t ino);

/* Take over the threads' opens without an id. Returns how many there are; their RELEASE goes to Python from now
 * on. When its replica lies in no segment any more, no further ones are added. */
unsigned backed_cached(uint64_t ino);

/* Answer an open for the request `unique`: count it, and return its handle and id (0: none). False if Python
 * has to be asked. */
bool backed_open(uint64_t ino, uint64_t unique, uint64_t *fh, uint32_t *backing_id);

#endif
