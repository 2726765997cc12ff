/* Extended attributes that files do not have. See _absent_xattrs.c. */
#ifndef MONARCHFS_ABSENT_H
#define MONARCHFS_ABSENT_H

#include <stdint.h>

#define ABSENT_NAMES 16
#define ABSENT_NAME_BYTES 64

/* Inode `ino` has none of the attributes that absent_name names, now or later. */
void absent_add(uint64_t ino);

/* Requests for the attribute `name` of files that do not have it are answered with `error`, an errno. -ENOSPC if
 * there are too many names, or this one is too long. */
int absent_name(const char *name, int error);

/* The errno with which to answer a request for the attribute `name` of inode `ino`; 0: not known. */
int absent_errno(uint64_t ino, const char *name);

#endif
