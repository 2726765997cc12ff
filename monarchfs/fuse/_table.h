/* The table of open files, in memory that outlives the worker. Its layout is slots.py's.
 *
 * What is open is counted for each inode, too (resident_use in _resident.h). Thread-safe. */
#ifndef MONARCHFS_TABLE_H
#define MONARCHFS_TABLE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* FUSE_UNIQUE_RESEND (linux/fuse.h, since 6.9). */
#define RESENT ((uint64_t)1 << 63)

struct slot {
	uint64_t ino; /* 0: free. Written last */
	uint64_t unique;
	uint32_t generation;
	uint32_t backing_id;
	uint64_t flags; /* of the worker that uses the table now */
};

/* Python has something under this number: its RELEASE goes there. */
#define OWNED 1

/* The kernel holds it, or may. */
#define HELD 2

/* An answer with it is on its way; so many times. */
#define ANSWERING 4

/* Begin with what is open in the table behind `fd` (which stays the caller's). Another table that
 * was in use is given back. 0 or -errno; -EINVAL for what is no table. */
int table_attach(int fd);
void table_detach(void);

/* A new handle, its number in *number; the one that was made for the request `unique` before, if it is
 * RESENT and there is one: then 1. Else 0, -ENFILE where too many are open. `flags`: OWNED | HELD for
 * Python; ANSWERING for a thread, which calls table_opened then. */
int table_add(uint64_t ino, uint64_t unique, uint32_t backing_id, uint64_t flags,
	      uint64_t *number);

/* End a handle; its inode number, 0 if it was not open. With `unowned`, nothing is done with one
 * that is OWNED, and *owned is set. */
uint64_t table_end(uint64_t number, bool unowned, bool *owned);

/* The kernel accepted an answer with it, or did not wait for that. If it took none, and none is on its
 * way, the handle ends; true where that is for Python to do, unless it is held by then. */
bool table_opened(uint64_t number, bool accepted);
bool table_held(uint64_t number);

/* The inode number of an open handle, or 0. */
uint64_t table_ino(uint64_t number);

/* Have the RELEASE of an open handle, which the kernel holds, go to Python; false if it is not open. */
bool table_own(uint64_t number);

/* The same for all handles of `ino` with this backing id that are not Python's yet; how many. Looks at
 * each handle. */
unsigned table_own_all(uint64_t ino, uint32_t backing_id);

/* The next open slot from *index on: its number (and *index behind it), 0 at the end. */
uint64_t table_next(size_t *index, struct slot *slot);
size_t table_length(void);

/* For whoever watches this process. `thread` has been busy since then, 0: it waits. */
void table_busy(unsigned thread, uint64_t since_ns);
void table_answered(void);

#endif
