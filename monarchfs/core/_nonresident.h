/* Reads of files that are not resident (yet), without Python: from the source, from the part file, and
 * from what is being fetched.
 *
 * Python says what may be read where, chunk by chunk. All other requests are left to Python, and so is a read
 * if anything goes wrong (another version, an error, a short read): to Python it looks as if it had just
 * come. An inode number is one version of one file. Thread-safe. */
#ifndef MONARCHFS_NONRESIDENT_H
#define MONARCHFS_NONRESIDENT_H

#include "_reply.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Of a chunk. The first three are those of prefetch/chunks.py. */
enum chunk_state {
	CHUNK_MISSING,
	CHUNK_CLAIMED, /* being fetched */
	CHUNK_PRESENT, /* in the part file */
	CHUNK_ARRIVED, /* in memory, on its way into the part file */
};

#define NO_CHUNK UINT64_MAX

/* Chunks of `ino` that are missing may be read from the source through `fd` (duplicated), as long as its version
 * is this one. False if it is being read as another version, or memory or descriptors are short. */
bool nonresident_source(uint64_t ino, int fd, uint64_t size, int64_t mtime_ns, int64_t ctime_ns);

/* They may be read there no more. Reads under way are answered. */
void nonresident_no_source(uint64_t ino);

/* It is being copied. `states` has one byte for each of its chunks. */
bool nonresident_fill(uint64_t ino, uint64_t size, uint64_t chunk_bytes, const char *states,
		     size_t count);

/* `fd` (duplicated) is the part file, with the chunks that are present. */
bool nonresident_part(uint64_t ino, int fd);

/* The chunks [first, last) are in this state now. */
void nonresident_chunks(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state);

/* Python fetches ahead of readers: note the next read that reaches this chunk, once. NO_CHUNK: note
 * none. */
void nonresident_ahead(uint64_t ino, uint64_t chunk);

/* These bytes were fetched. Reads that wait for them are answered from them, and so are later reads, until the
 * state of these chunks changes. False if they are not needed. Else they have to stay until `release` is
 * called with `token`. It is called under a lock, and must not wait. */
bool nonresident_arrived(uint64_t ino, uint64_t start, const char *data, size_t size,
			void (*release)(void *), void *token);

/* The functions that core/_unit.c needs of this module. */
struct nonresident_units {
	bool (*arrived)(uint64_t ino, uint64_t start, const char *data, size_t size,
			void (*release)(void *), void *token);
	void (*chunks)(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state);
};

/* The name of the capsule with those functions. */
#define NONRESIDENT_UNITS "monarchfs.core._session.nonresident_units"

/* Nothing of it may be read here any more. Reads under way are answered. */
void nonresident_stop(uint64_t ino);

/* Whether it was read since the last call. */
bool nonresident_used(uint64_t ino);

/* Take a READ: true if it is answered, or will be. */
bool nonresident_took(const void *request, size_t length, struct scratch *scratch, uint64_t started_ns);

#endif
