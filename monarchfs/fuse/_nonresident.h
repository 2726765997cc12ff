/* Reads of files that are not resident (yet), without Python: from the source, from the part that is
 * local, and from what is just being fetched.
 *
 * Python tells what may be read where, chunk by chunk. What else is asked of such a file, and whatever
 * goes wrong (another version, an error, a short read), is Python's, to which the request looks as if
 * it had just come. An inode number is one version of one file. Thread-safe. */
#ifndef MONARCHFS_UNFINISHED_H
#define MONARCHFS_UNFINISHED_H

#include "_reply.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a chunk. The first three are those of prefetch/chunks.py. */
enum chunk_state {
	CHUNK_MISSING,
	CHUNK_CLAIMED, /* being fetched */
	CHUNK_PRESENT, /* in the part */
	CHUNK_ARRIVED, /* in memory, and on its way into the part */
};

#define NO_CHUNK UINT64_MAX

/* What is missing of `ino` may be read from the source behind `fd` (duplicated), as long as its version
 * is this. False where it is being read as another one, or there is no memory or descriptor for it. */
bool nonresident_source(uint64_t ino, int fd, uint64_t size, int64_t mtime_ns, int64_t ctime_ns);

/* Not any more. What is under way is answered. */
void nonresident_no_source(uint64_t ino);

/* It is being copied, and these are the states of its chunks: one byte for each. */
bool nonresident_fill(uint64_t ino, uint64_t size, uint64_t chunk_bytes, const char *states,
		     size_t count);

/* The file with what is present, duplicated. */
bool nonresident_part(uint64_t ino, int fd);

/* The chunks [first, last) are in this state now. */
void nonresident_chunks(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state);

/* The next read that goes as far as this chunk is to be told of: Python fetches ahead. NO_CHUNK: none
 * is. */
void nonresident_ahead(uint64_t ino, uint64_t chunk);

/* These bytes of it were fetched: those who wait for them are answered, and others, too, until the
 * state of these chunks changes. False where they are not needed; else they have to stay until `release`
 * is called with `token`, under a lock: it must not wait. */
bool nonresident_arrived(uint64_t ino, uint64_t start, const char *data, size_t size,
			void (*release)(void *), void *token);

/* What those need of this who fetch (engine/_unit.c). */
struct nonresident_units {
	bool (*arrived)(uint64_t ino, uint64_t start, const char *data, size_t size,
			void (*release)(void *), void *token);
	void (*chunks)(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state);
};

/* Of the capsule in which they get it. */
#define UNFINISHED_UNITS "monarchfs.fuse._session.nonresident_units"

/* Nothing of it is to be read here any more. What is under way is answered. */
void nonresident_stop(uint64_t ino);

/* Whether it was read since this was asked the last time. */
bool nonresident_used(uint64_t ino);

/* Whether the request, a READ, is answered, or will be from here. */
bool nonresident_took(const void *request, size_t length, struct scratch *scratch, uint64_t started_ns);

#endif
