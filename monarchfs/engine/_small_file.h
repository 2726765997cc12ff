/* A small file in the source: a name in an open directory, and a version. All of these wait for the source;
 * each returns 0, an errno, or one of enum miss_error. */
#ifndef MONARCHFS_SMALL_FILE_H
#define MONARCHFS_SMALL_FILE_H

#include "_misses.h"

/* Open it and compare its version. *fd is -1 if it could not be opened. */
int small_open(int directory_fd, const char *name, dev_t device, const struct miss_version *version, int *fd);

/* MISS_ARCHIVED if reading it would bring it back from an archive; an errno if that is unknown. */
int small_archived(int fd);

/* Read all of it, and compare the version again. */
int small_read(int fd, dev_t device, const struct miss_version *version, char *to);

#endif
