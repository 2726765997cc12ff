/* Answers to OPEN: of resident files, of files with a backing file, and of files that were found in the source. */
#ifndef MONARCHFS_OPENS_H
#define MONARCHFS_OPENS_H

#include "_record.h"

#include <linux/fuse.h>

#include <stdbool.h>
#include <stdint.h>

/* Whether opens are answered here where they can be, by default they are, and whether reads then pass by the
 * page cache. */
void opens_answer_here(bool here, bool direct);

/* Answer an OPEN; false if it is not of a resident file. `again`: an earlier worker had it. */
bool opens_answer(const struct fuse_in_header *in, bool again, uint64_t started_ns);

/* Answer an OPEN of a file of the source. False if too many files are open. */
bool opens_answer_source(const struct fuse_in_header *in, enum answered_by by, uint64_t started_ns);

#endif
