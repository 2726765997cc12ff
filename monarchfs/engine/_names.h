/* Names that are known, and the attributes of what they stand for: a look-up of one needs no Python.
 *
 * What Python may answer for a while without asking the source, it puts here for that while; what it
 * learns otherwise about a name or a number it has forgotten here before anybody can hear of it. Names
 * that do not exist are Python's. Thread-safe. */
#ifndef MONARCHFS_NAMES_H
#define MONARCHFS_NAMES_H

#include <linux/fuse.h>

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* In the directory `parent` the name stands for this (attr->ino), as the next `for_ns` nanoseconds will
 * show or not. The oldest name goes where there are too many. */
void names_put(uint64_t parent, const char *name, size_t length, const struct fuse_attr *attr,
	       uint64_t for_ns);

/* It is not to be answered any more: no answer is on its way when this returns. */
void names_forget(uint64_t parent, const char *name, size_t length);
void names_forget_ino(uint64_t ino);
void names_forget_all(void);

/* What a look-up is answered with now. If true, names_leave follows once the kernel has it. */
bool names_enter(uint64_t parent, const char *name, size_t length, struct fuse_entry_out *out);
void names_leave(void);

#endif
