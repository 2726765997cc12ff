/* One read of a large file in the source on behalf of its copy (a unit): read, checksummed and
 * written block by block, by two threads at once.
 *
 * One thread reads (unit_read): reads that wait for a block are answered from memory as soon as the version was
 * compared. The other thread (unit_write) never delays that. It takes blocks that have arrived; until then they
 * stay in memory, and can be read. A block is a few chunks of a file, and so small that it is still in the
 * CPU's cache when it is written. Thread-safe; one thread reads and one writes at a time. */
#ifndef MONARCHFS_UNIT_H
#define MONARCHFS_UNIT_H

#include "_nonresident.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#define UNIT_BLOCK_BYTES (256U << 10)
#define UNIT_DIGEST_BYTES 8 /* of each CHECKED_BYTES, big-endian: see cache/store/checksum.py */
#define UNIT_CHECKED_BYTES (128U << 10)

struct unit;

/* The version of the file in the source. */
struct unit_version {
	dev_t device;
	ino_t ino;
	off_t size;
	struct timespec mtime, ctime;
};

struct unit_plan {
	uint64_t ino; /* the mount's */
	uint64_t start, size, chunk_bytes;
	struct unit_version version;
	size_t most_bytes; /* 0: no limit. Blocks that arrive while all units have more in memory are dropped */
	const struct nonresident_units *readers; /* NULL: none */
	bool sparse; /* the source is asked where it has holes: these are not read */
	bool in_requests; /* all that a request to a server brings is read at once, if that is known */
};

/* NULL where there is no memory; errno is EINVAL where the plan is none. */
struct unit *unit_new(const struct unit_plan *plan);

/* Only `readers` may still be using it. */
void unit_free(struct unit *unit);

enum unit_end {
	UNIT_READ,
	UNIT_CHANGED, /* another version, or fewer bytes than it should have */
	UNIT_FAILED, /* errno */
};

/* Descriptors of the file in the source: `direct` is one of O_DIRECT, that is read instead of `fd`, or -1.
 * `request_bytes`: what one request to a server brings, so that reading less at once is no faster; 0: not known. */
struct unit_source {
	int fd, direct;
	uint64_t request_bytes;
};

enum elsewhere_result {
	ELSEWHERE_READ,
	ELSEWHERE_GONE, /* the file is not there, or ends early */
	ELSEWHERE_WRONG,
	ELSEWHERE_FAILED,
};

/* Gives the bytes [offset, offset + size) of a file that another node has, in order and in pieces of any size,
 * until `take` is false: then they are wrong. */
typedef bool unit_take(void *to, const char *data, size_t size);
typedef enum elsewhere_result unit_elsewhere(unsigned peer, const char *path, uint64_t offset, size_t size, unit_take *take, void *to);
#define UNIT_ELSEWHERE "monarchfs.core.unit_elsewhere"

/* Read it from elsewhere, compare each block with its digests (of all of the unit), and answer those who wait. What
 * this does not bring, unit_read does. `bytes`: how much came. */
enum elsewhere_result unit_read_elsewhere(struct unit *unit, unit_elsewhere *from, unsigned peer, const char *path,
			const unsigned char *digests, uint64_t *bytes);

/* Read what has not arrived, and answer those who wait. `bytes`: how much the source gave. `source->direct` becomes -1 where
 * the file cannot be read in that way. */
enum unit_end unit_read(struct unit *unit, struct unit_source *source, uint64_t *bytes);

/* Of what unit_read did, where the plan is `sparse`. */
struct unit_holes {
	uint64_t bytes; /* of blocks that were not read: there is nothing but zeros */
	uint64_t hole_end; /* the hole in which the unit ends goes on to there; 0: it does not end in one */
	uint64_t data_end; /* there is no hole before this, from the last block that was read on; 0: not known */
};

struct unit_holes unit_holes(const struct unit *unit);

/* Write what has arrived to `fd`, at the same offsets; runs of zeros stay holes. Returns 1 if nothing more will
 * arrive, 0 if nothing arrived for `wait_ns`, or -errno. */
int unit_write(struct unit *unit, int fd, int64_t wait_ns);

/* Readers may use the file from now on: show them the blocks that have arrived. */
void unit_show(struct unit *unit);

/* Nothing more arrives, as at the end of unit_read. */
void unit_finish(struct unit *unit);

/* Nothing more of it is written, or shown to readers. */
void unit_stop(struct unit *unit);

/* Drop what is in memory: nothing needs it any more, and no thread is writing it. */
void unit_empty(struct unit *unit);

/* Copy the bytes from `offset` on that are in memory, at most `size`. Returns how many. */
size_t unit_copy(struct unit *unit, uint64_t offset, size_t size, char *to);

enum unit_state {
	UNIT_NOT_THERE,
	UNIT_IN_MEMORY,
	UNIT_STORED, /* written */
	UNIT_DROPPED, /* for want of memory */
};

/* The state of the block with this byte. */
enum unit_state unit_state(struct unit *unit, uint64_t offset);

/* How many bytes of blocks unit_write will take. */
uint64_t unit_needed(struct unit *unit);

/* The digests of the pieces that were written: UNIT_DIGEST_BYTES for each. */
const unsigned char *unit_digests(struct unit *unit, size_t *size);

/* How many bytes all units have in memory. */
size_t unit_memory(void);

#endif
