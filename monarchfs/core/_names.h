/* A cache of names and attributes: a look-up of one of these names needs no Python.
 *
 * Python puts a name here for as long as it may answer it without asking the source. When Python learns
 * anything else about a name or an inode number, it first has it forgotten here, before anybody can hear of
 * the change. Names that do not exist are Python's. Thread-safe. */
#ifndef MONARCHFS_NAMES_H
#define MONARCHFS_NAMES_H

#include <linux/fuse.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>

#define NAMES_FOREVER_NS (365ULL * 86400 * 1000000000) /* FOREVER_SECONDS in metadata/freshness.py */
#define NAMES_ASKED_SECONDS 1 /* OPEN_ATTRIBUTES_SECONDS there */

struct name {
	uint64_t parent;
	size_t length;
	char bytes[UINT8_MAX + 1]; /* ends with a zero */
};

/* In the directory `parent` the name stands for attr->ino, for the next `for_ns` nanoseconds; NAMES_FOREVER_NS or
 * more: until it is forgotten, and each answer is good for NAMES_FOREVER_NS. `source_ino`: its number in the source, if
 * the threads may ask the source whether that still holds (_revalidate.h); else 0. If there are too many names, the
 * oldest one goes. */
void names_put(uint64_t parent, const char *name, size_t length, const struct fuse_attr *attr,
	       uint64_t for_ns, uint64_t source_ino);

/* Answer it no more. When this returns, no answer is on its way. */
void names_forget(uint64_t parent, const char *name, size_t length);
void names_forget_ino(uint64_t ino);
void names_forget_all(void);

/* Fill in the answer to a look-up. If true, the caller calls names_leave once the kernel has the answer. */
bool names_enter(uint64_t parent, const char *name, size_t length, struct fuse_entry_out *out);
void names_leave(void);

/* Whether the threads may ask the source about the name. */
bool names_asked_about(const struct name *name);

/* Fill in a name of the inode about which they may; false if there is none. */
bool names_of_ino(uint64_t ino, struct name *found);

/* As names_enter, for a name of which the source has just said this; false if something else was known. */
bool names_enter_same(const struct name *name, const struct stat *st, struct fuse_entry_out *out);

#endif
