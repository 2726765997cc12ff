/* Answers to OPEN: of resident files, and of files that were found in the source. */
#ifndef MONARCHFS_OPENS_H
#define MONARCHFS_OPENS_H

#include "_record.h"

#include <linux/fuse.h>

#include <stdbool.h>
#include <stdint.h>

/* fuse_open_out of linux/fuse.h since 6.9. Beside OPEN_PASSTHROUGH it may have FOPEN_DIRECT_IO, which sends the reads
 * here all the same: with FOPEN_KEEP_CACHE the open would fail (fs/fuse/iomode.c). */
struct backed_open_out {
	uint64_t fh;
	uint32_t open_flags;
	uint32_t backing_id;
};

/* Whether opens of resident files are answered here though nothing is decided about a backing file, by default they
 * are, and whether reads pass by the page cache. */
void opens_answer_here(bool here, bool direct);

/* Whether an OPEN asks for reading alone. */
bool opens_read_only(const struct fuse_in_header *in);

/* Answer an OPEN; false if Python has to be asked. `again`: an earlier worker had it. */
bool opens_answer(const struct fuse_in_header *in, bool again, uint64_t started_ns);

/* Whether it would be answered, had the source just been asked about the file. */
bool opens_ask(const struct fuse_in_header *in);

/* The source was asked, and has what it had: answer an OPEN of a resident file; false if Python has to. */
bool opens_answer_checked(const struct fuse_in_header *in, uint64_t started_ns);

/* Answer an OPEN of a file of the source. False if too many files are open. */
bool opens_answer_source(const struct fuse_in_header *in, enum answered_by by, uint64_t started_ns);

#endif
