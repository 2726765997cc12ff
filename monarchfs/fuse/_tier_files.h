/* Files of tiers that are kept open for reading: replicas, and segments. Under the lock of _resident.c, but for
 * files_open. What is to be closed is returned (-1: nothing), because closing may take long. */
#ifndef MONARCHFS_TIER_FILES_H
#define MONARCHFS_TIER_FILES_H

#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>

#define NOT_OPEN UINT32_MAX

struct tier_file {
	uint64_t number; /* of the inode, or of the segment */
	uint8_t tier;
	bool segment;
};

/* At most so many; they belong to `uid`. 0 or -errno; once only. */
int files_start(unsigned most, uid_t uid);
bool files_started(void);

/* Its place, or NOT_OPEN. */
uint32_t files_find(const struct tier_file *file);

/* It is open: its place, NOT_OPEN where all are busy. Another one may have to be closed. */
uint32_t files_add(const struct tier_file *file, int fd, int *to_close);

/* The descriptor at a place is being read, and is not any more. */
int files_begin(uint32_t place);
int files_end(uint32_t place);

/* It is not for reading any more: it ends with the last read. */
int files_put_down(uint32_t place);

/* The same, of all in a tier; they are closed. */
void files_put_down_all(unsigned tier);

/* Open one below the directory of its tier, with its size; -1 if it is not there, or somebody else's. */
int files_open(int dir_fd, const struct tier_file *file, const unsigned char *name, uint64_t checksum,
	       uint64_t *bytes);

#endif
