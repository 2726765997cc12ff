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

/* O_NONBLOCK: if it is a FIFO by now, opening it must not wait for a writer. */
#define SMALL_OPEN_FLAGS (O_RDONLY | O_NOFOLLOW | O_NOCTTY | O_CLOEXEC | O_NONBLOCK)

/* The descriptor of a file that was opened to learn its attributes, which is the caller's from now on; -1: there is
 * none. */
typedef int small_opened(dev_t device, ino_t ino);

/* The name of the capsule with that function. */
#define SMALL_OPENED "monarchfs.source._stats.take"

/* Open it and compare its version. *fd is -1 if it could not be opened. */
int small_open(int directory_fd, const char *name, dev_t device, const struct miss_version *version, int *fd);

/* Compare the version of an open file. */
int small_compare(int fd, dev_t device, const struct miss_version *version);

/* MISS_ARCHIVED if reading it would bring it back from an archive; an errno if that is unknown. */
int small_archived(int fd);

/* Read all of it, and compare the version again. */
int small_read(int fd, dev_t device, const struct miss_version *version, char *to);

#endif
