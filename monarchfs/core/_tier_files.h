/* Files of tiers that are kept open for reading: replicas and segments. All but files_open are called under the
 * lock of _resident.c. They return the descriptor that the caller has to close (-1: none), because closing may
 * take long. */
#ifndef MONARCHFS_TIER_FILES_H
#define MONARCHFS_TIER_FILES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define MOST_TIERS 64
#define NAME_BYTES 16 /* of a replica */
#define NOT_OPEN UINT32_MAX

struct tier_file {
	uint64_t number; /* of the inode, or of the segment */
	uint8_t tier;
	bool segment;
};

/* Begin: at most `most` files are open, and they belong to `uid`. 0 or -errno; once only. */
int files_start(unsigned most, uid_t uid);
bool files_started(void);

/* The place of an open file, or NOT_OPEN. */
uint32_t files_find(const struct tier_file *file);

/* Add an open file. Returns its place, NOT_OPEN if all are busy. Another file may have to be closed. */
uint32_t files_add(const struct tier_file *file, int fd, int *to_close);

/* Begin and end a read of the descriptor at a place. */
int files_begin(uint32_t place);
int files_end(uint32_t place);

/* It is read no more: it is closed when the last read ends. */
int files_put_down(uint32_t place);

/* The same for all files of a tier; this closes them. */
void files_put_down_all(unsigned tier);

/* Open a file below the directory of its tier, and get its size. -1 if it is not there or another user's. */
int files_open(int dir_fd, const struct tier_file *file, const unsigned char *name, uint64_t checksum,
	       uint64_t *bytes);

#endif
