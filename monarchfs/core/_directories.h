/* Directories of the source that the threads ask for names and files, each open (O_PATH). All but `directories_put`
 * under `source_lock`. */
#ifndef MONARCHFS_DIRECTORIES_H
#define MONARCHFS_DIRECTORIES_H

#include <stdbool.h>
#include <stdint.h>

#define MOST_DIRECTORIES 4096

/* All is constant but the last three, which are _directories.c's. */
struct directory {
	int fd;
	unsigned generation;
	uint64_t ino; /* its number in the mount */
	struct directory *next; /* in its bucket */
	unsigned users;
	bool replaced;
	char path[]; /* below the source's root */
};

/* Enter an open directory (duplicated here), at `path` below the source's root, under a number that the caller chose,
 * below MOST_DIRECTORIES. The directory that had the number is closed when nobody uses it. 0 or -errno. */
int directories_put(unsigned number, uint64_t ino, int fd, const char *path);

/* The directory that has the number now; NULL: none. */
struct directory *directories_at(unsigned number);

/* The one with that number in the mount; NULL if none is entered. */
struct directory *directories_of(uint64_t ino);

/* Begin and end to use it without the lock. */
void directory_use(struct directory *directory);
void directory_leave(struct directory *directory);

#endif
