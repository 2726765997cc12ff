/* The table of open files, in memory that outlives the worker. handle_table.py has its layout, too.
 *
 * Opens are also counted by inode (inode_open in _resident.h). Thread-safe. */
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

/* Python has a handle of this number: its RELEASE goes to Python. */
#define OWNED 1

/* The kernel has it open, or may have. */
#define HELD 2

/* An answer with it is on its way. Added once for each. */
#define ANSWERING 4

/* Begin to use the table behind `fd` (which stays the caller's), with what is open in it. Another table that was
 * in use is unmapped. 0 or -errno, -EINVAL if it is no table. */
int table_attach(int fd);
void table_detach(void);

/* Add a handle: its number, and the backing id with which the open is to be answered. If `unique` is RESENT and a
 * handle was added for it before, that one is given and 1 returned. Else 0, or -ENFILE if too many are open. `flags`:
 * ANSWERING, until the caller calls table_opened; OWNED, too, for Python. */
int table_add(uint64_t ino, uint64_t unique, uint64_t flags, uint64_t *number, uint32_t *backing_id);

/* End a handle. Returns its inode number, 0 if it was not open. With `unowned`, a handle that is OWNED does not
 * end, and *owned is set. */
uint64_t table_end(uint64_t number, bool unowned, bool *owned);

/* The kernel accepted an answer with it, or not. If it accepted none, and none is on its way, the handle ends.
 * True if Python has to end it. */
bool table_opened(uint64_t number, bool accepted);

/* The inode number of an open handle, or 0. */
uint64_t table_ino(uint64_t number);

/* Have the RELEASE of an open handle, which the kernel holds, go to Python; false if it is not open. */
bool table_own(uint64_t number);

/* The next open slot from *index on: its number (and *index behind it), 0 at the end. */
uint64_t table_next(size_t *index, struct slot *slot);
size_t table_length(void);

/* For the watchdog: `thread` has been busy since then; 0: it waits. */
void table_busy(unsigned thread, uint64_t since_ns);
void table_answered(void);

#endif
