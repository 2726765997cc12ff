/* Inodes that are in use, and the resident files whose opens and reads the threads answer: inode number ->
 * complete replica.
 *
 * An inode number is one version of one file, so its replica serves any handle. Python puts replicas in and
 * takes them out. Thread-safe. Only opening and closing files of a tier blocks.
 *
 * The kernel refuses an open whose answer differs from that of the inode's other opens (fs/fuse/iomode.c): from
 * the first to the last release all are answered with one backing id, or all without. Whoever opens it, thread
 * or Python, is told here what to answer. */
#ifndef MONARCHFS_RESIDENT_H
#define MONARCHFS_RESIDENT_H

#include "_tier_files.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* The limit of replicas; Python serves any others. A test has a lower one. */
#ifndef MOST_RESIDENT
#define MOST_RESIDENT ((1 << 22) - 1)
#endif
#define ALWAYS INT64_MAX

struct replica {
	unsigned tier; /* below MOST_TIERS */
	unsigned char name[NAME_BYTES];
	uint64_t checksum;
	uint64_t size;
	uint64_t segment; /* it lies there at `offset`; 0: it has a file of its own, called `name` */
	uint64_t offset;
	int64_t opens_until_ns; /* until then (CLOCK_REALTIME), or 17 ms less, Python need not be asked about opens; later
				 * the source has to be; 0: Python is asked always */
};

/* A read of a replica: see resident_enter. */
struct reading {
	uint64_t ino;
	uint64_t start; /* where it begins in the file */
	uint64_t size;
	uint32_t stamp; /* of the replica */
	int fd;
	int place; /* among the open files; -1: `fd` is this read's own */
};

/* Begin. At most `files` descriptors are kept open. Replicas belong to `uid`. `lasting_ns` limits
 * opens_until_ns from now, so that a clock that was set back does not prolong it. `free_opens`: the kernel
 * sends no opens, and first reads count as such. `tells`: opens are noted for resident_opened. 0 or -errno;
 * once only. */
int resident_start(unsigned files, uid_t uid, int64_t lasting_ns, bool free_opens, bool tells);

/* Whether it is before this time, as opens_until_ns. */
bool resident_fresh(int64_t until_ns);

/* Set the tier's directory (duplicated); -1: nothing is read there for now. 0 or -errno. */
int resident_tier(unsigned tier, int dir_fd);

/* The threads may open and read `ino`. `seen`: it was read already. False if there are too many, or its place in
 * a segment or its size there takes more than 32 bits. */
bool resident_put(uint64_t ino, const struct replica *replica, bool seen);

/* The source was asked about it: another opens_until_ns, unless Python is asked always. */
void resident_renew(uint64_t ino, int64_t opens_until_ns);

/* From now on Python is asked about its opens. */
void resident_expire(uint64_t ino);

/* It may be read no more. Its descriptor is closed when the last read ends, that of a segment too: so the
 * segment is not kept open when its last record goes. A read of another record opens it again. */
void resident_stop(uint64_t ino);

/* The same, unless it is open or being read: then false. */
bool resident_retire(uint64_t ino);

/* Whether a replica of it that was stopped or replaced is still being read. Once this is false it stays so:
 * then the place where it lay may be overwritten. */
bool resident_reading(uint64_t ino);

/* Whether the threads may read it. */
bool resident_has(uint64_t ino);

/* Whether there is no room for another one. */
bool resident_full(void);

/* Count a use of `ino`, and the end of one; whether there is any. An open is a use. */
void resident_use(uint64_t ino);
void resident_unuse(uint64_t ino);
bool resident_used(uint64_t ino);

/* The kernel opens `ino`: count that. *backing_id is what it is to be answered with, 0: no backing file. False if
 * there is no memory. */
bool inode_open(uint64_t ino, uint32_t *backing_id);

/* The same of an open that an earlier worker has answered with this id. */
void inode_reopen(uint64_t ino, uint32_t backing_id);
void inode_close(uint64_t ino);

/* Set the backing file of `ino`. Opens are answered with it as soon as there is none that was answered without.
 * False if there is no memory, or if it has one. */
bool inode_back(uint64_t ino, uint32_t backing_id);

/* Answer no more opens with its backing file; false if it is open with it. With `at_last`, this then happens when
 * the last of these ends. */
bool inode_unback(uint64_t ino, bool at_last);

/* Whether it is known what an open is to be answered with: it is open, or has a backing file. */
bool inode_decided(uint64_t ino);

/* Whether it was opened or read since resident_put. */
bool resident_seen(uint64_t ino);

/* Begin to answer an open: count it, as resident_use does. False if Python has to be asked: so if nothing is
 * decided about a replica that the kernel could read itself, unless `undecided`. */
bool resident_open(uint64_t ino, bool undecided);

/* The same once the source was asked about the file, whatever opens_until_ns says unless it is 0. */
bool resident_open_checked(uint64_t ino, bool undecided);

/* Whether that may be, without counting. */
bool resident_may_open(uint64_t ino, bool undecided);

/* Begin a read of `ino` at `offset`. The caller ends it with resident_leave once the answer is written: until
 * then, pages in a pipe are still the file's. */
bool resident_enter(uint64_t ino, uint64_t offset, struct reading *reading);
void resident_leave(const struct reading *reading);

/* Whether the threads answer its reads, and the kernel has none of its pages: it was not opened since
 * resident_forgotten. True once. */
bool resident_cold(uint64_t ino);
void resident_forgotten(uint64_t ino);

/* The inode numbers that were opened since the last call, oldest first. Returns how many. */
size_t resident_opened(uint64_t *inos, size_t most);

#endif
