/* Opens that the threads answer where the kernel reads replicas itself: with a backing file, or without
 * one for what lies in a segment, of which none is ever made.
 *
 * The kernel refuses an open that is answered otherwise than the inode's other opens (fs/fuse/iomode.c).
 * So an inode with a backing file is either delegated to the threads, and then its opens are theirs alone, or
 * Python's: see passthrough.py. Thread-safe; nothing here waits. */
#ifndef MONARCHFS_BACKED_H
#define MONARCHFS_BACKED_H

#include <stdbool.h>
#include <stdint.h>

/* fuse_open_out and FOPEN_PASSTHROUGH of linux/fuse.h since 6.9. With any flag more the open would
 * fail (fs/fuse/iomode.c). */
struct backed_open_out {
	uint64_t fh;
	uint32_t open_flags;
	uint32_t backing_id;
};
#define OPEN_PASSTHROUGH (1 << 7)

/* Opens of `ino`, of which there are none, are answered with this id, as far as resident_open allows
 * it. False where there is no memory. */
bool backed_delegate(uint64_t ino, uint32_t backing_id);

/* Not any more: how many opens there are, whose RELEASE goes to Python from now on. */
unsigned backed_reclaim(uint64_t ino);

/* How many opens without an id there are that were not Python's; their RELEASE goes to Python from now
 * on. Once its replica is none of a segment, no others are added. */
unsigned backed_cached(uint64_t ino);

/* Count an open for the request `unique`, with its handle and id (0: none); false where Python is to be
 * asked. */
bool backed_open(uint64_t ino, uint64_t unique, uint64_t *fh, uint32_t *backing_id);

#endif
