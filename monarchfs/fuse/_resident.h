/* Which files the threads may answer about by themselves: inode number -> complete replica.
 *
 * An inode number is one version of one file, so its replica serves whoever reads it, whatever the
 * handle. Python puts replicas in and takes them out. Thread-safe; nothing here blocks but for
 * opening and closing files of a tier. */
#ifndef MONARCHFS_RESIDENT_H
#define MONARCHFS_RESIDENT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Replicas known, at most; more are Python's. 64 bytes each. */
#define MOST_RESIDENT 1000000
#define MOST_TIERS 64
#define NAME_BYTES 16
#define ALWAYS INT64_MAX

struct replica {
	unsigned tier; /* below MOST_TIERS */
	unsigned char name[NAME_BYTES];
	uint64_t checksum;
	uint64_t size;
	uint64_t segment; /* that it lies in, at `offset`; 0: it is a file of its own, called `name` */
	uint64_t offset;
	int64_t opens_until_ns; /* opens need not be asked about until then, CLOCK_REALTIME; 0: all */
};

/* A replica that is being read: see resident_enter. */
struct reading {
	uint64_t ino;
	uint64_t start; /* where it begins in the file */
	uint64_t size;
	uint32_t stamp; /* of the replica */
	int fd;
	int place; /* among the open files; -1: this reader's own */
};

/* Begin. At most `files` descriptors are kept open; replicas belong to `uid`. `lasting_ns`: opens
 * are never good for longer than that, so a clock that was set back ends them. `free_opens`: there
 * are none, and first reads count as such. `tells`: for resident_opened. 0 or -errno; once only. */
int resident_start(unsigned files, uid_t uid, int64_t lasting_ns, bool free_opens, bool tells);

/* The tier's directory (duplicated); -1: nothing is read there for now. 0 or -errno. */
int resident_tier(unsigned tier, int dir_fd);

/* `ino` may be read from, and opened, by the threads. `seen`: its first read was. False where there
 * are too many, and for a place that no file has. */
bool resident_put(uint64_t ino, const struct replica *replica, bool seen);

/* Its opens are to be asked about from now on. */
void resident_expire(uint64_t ino);

/* It is not to be read any more; its descriptor is closed as soon as nobody is reading. That of a
 * segment, too: so it is not kept open when its last record goes, and who reads another one opens it
 * again. */
void resident_stop(uint64_t ino);

/* The same, unless it is open or being read: then false. */
bool resident_retire(uint64_t ino);

/* Whether a replica of it that was stopped, or another one put in its place, is still being read. Once
 * that is false it stays so: what lay there may be overwritten. */
bool resident_reading(uint64_t ino);

/* Whether it may be read here. */
bool resident_has(uint64_t ino);

/* The same, and it lies in a segment. */
bool resident_in_segment(uint64_t ino);

/* It is open once more, once less; whether it is. */
void resident_use(uint64_t ino);
void resident_unuse(uint64_t ino);
bool resident_used(uint64_t ino);

/* Whether it was opened or read since it was put. */
bool resident_seen(uint64_t ino);

/* The id of its backing file, with which threads answer its opens; 0: they have none. It stays until another
 * one is set, whatever becomes of the replica. False where there is no memory. */
bool resident_back(uint64_t ino, uint32_t backing_id);
uint32_t resident_backing(uint64_t ino);

/* Count an open, and use it once; false where Python is to be asked. */
bool resident_open(uint64_t ino);

/* A descriptor for reading `ino` at `offset`; each needs a resident_leave, once the answer is written:
 * what is on its way in a pipe is still the file's. */
bool resident_enter(uint64_t ino, uint64_t offset, struct reading *reading);
void resident_leave(const struct reading *reading);

/* Inode numbers that were opened since the last call, oldest first; how many. */
size_t resident_opened(uint64_t *inos, size_t most);

#endif
