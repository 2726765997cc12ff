/* A small file in the source: a name in an open directory, and a version. All of these wait for the source;
 * each returns 0, an errno, or one of enum miss_error. */
#ifndef MONARCHFS_SMALL_FILE_H
#define MONARCHFS_SMALL_FILE_H

#include <stdint.h>
#include <sys/types.h>

/* On the source's own device. */
struct miss_version {
	uint64_t ino, size;
	int64_t mtime_ns, ctime_ns;
};

/* Why there are no bytes; else an errno. */
enum miss_error {
	MISS_CHANGED = -1, /* the name has another version, or is gone */
	MISS_ARCHIVED = -2,
	MISS_LEFT = -3, /* it was forgotten, or memory was short: Python may ask again */
};
/* Open it and compare its version. *fd is -1 if it could not be opened. */
int small_open(int directory_fd, const char *name, dev_t device, const struct miss_version *version, int *fd);

/* MISS_ARCHIVED if reading it would bring it back from an archive; an errno if that is unknown. */
int small_archived(int fd);

/* Read all of it, and compare the version again. */
int small_read(int fd, dev_t device, const struct miss_version *version, char *to);

#endif
