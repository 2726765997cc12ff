/* A small file in the source: a name in an open directory, and a version. All of these wait for the source;
 * each returns 0, an errno, or one of enum miss_error. */
#ifndef MONARCHFS_SMALL_FILE_H
#define MONARCHFS_SMALL_FILE_H

#include "_misses.h"

/* Open it, and look whether it has the version. *fd is -1 where it could not be opened. */
int small_open(int directory_fd, const char *name, dev_t device, const struct miss_version *version, int *fd);

/* Whether reading it has it brought back from an archive (MISS_ARCHIVED), or who knows (errno). */
int small_archived(int fd);

/* Read all of it, and look at the version again. */
int small_read(int fd, dev_t device, const struct miss_version *version, char *to);

#endif
