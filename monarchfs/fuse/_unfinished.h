/* Reads of files that are not resident: from the source, without Python.
 *
 * Python tells which files have nothing local, and that nothing of them will be kept, with a
 * descriptor and the version that it stands for. What else is asked of such a file, and whatever goes
 * wrong (another version, an error, a short read), is Python's, to which the request looks as if it
 * had just come. Thread-safe. */
#ifndef MONARCHFS_UNFINISHED_H
#define MONARCHFS_UNFINISHED_H

#include "_relay.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct unfinished_counts {
	uint64_t bytes; /* in answers, and asked of the source */
	struct relay_times answers; /* from the request to its answer */
	struct relay_times reads; /* the part of it that the source took */
};

/* Begin: at most `threads` wait for the source at once, but for those that hang there; `leave` gives
 * a request to Python. 0 or -EALREADY. */
int unfinished_start(int fuse_fd, unsigned threads,
		     void (*leave)(const void *request, size_t length));

/* `ino` may be read from the source behind `fd` (duplicated), whose version is this: false if it is
 * not, or there is no memory or descriptor for it. */
bool unfinished_put(uint64_t ino, int fd, uint64_t size, int64_t mtime_ns, int64_t ctime_ns);

/* Not any more. What is under way is answered. */
void unfinished_stop(uint64_t ino);

/* Whether it was read since this was asked the last time. */
bool unfinished_used(uint64_t ino);

/* Whether the request, a READ, is answered from here later on. */
bool unfinished_took(const void *request, size_t length, uint64_t started_ns);

/* Give a request to Python that was taken; false where there is none, or it is being answered. */
bool unfinished_leave(uint64_t unique);

/* The same for all that have been here since before then; how many are left that have not. */
unsigned unfinished_leave_older(uint64_t before_ns);

void unfinished_count(struct unfinished_counts *counts);

#endif
