/* Extended attributes that files do not have.
 *
 * `ls -l` asks for two of each file, and the kernel remembers none of the answers. Python says which
 * inodes have nothing of that kind; as a number is one version of one file, that stays so.
 *
 * A bit an inode, in blocks of 512 numbers in a row (numbers are given out one after the other). A
 * block has one place that it can be at, and takes it from another one: what is forgotten is asked of
 * Python again.
 */
#include "_absent_xattrs.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define BLOCKS 32768 /* 2.3 MB, of which what is used is in memory: 16 million numbers in a row */
#define BLOCK_INOS 512

static struct block {
	uint64_t number;
	uint64_t bits[BLOCK_INOS / 64];
} blocks[BLOCKS];

static struct name {
	char name[ABSENT_NAME_BYTES];
	int error;
} names[ABSENT_NAMES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void absent_add(uint64_t ino)
{
	uint64_t number = ino / BLOCK_INOS;
	struct block *block = &blocks[number % BLOCKS];
	pthread_mutex_lock(&lock);
	if (block->number != number) {
		memset(block, 0, sizeof(*block));
		block->number = number;
	}
	block->bits[ino % BLOCK_INOS / 64] |= (uint64_t)1 << ino % 64;
	pthread_mutex_unlock(&lock);
}

int absent_name(const char *name, int error)
{
	if (strlen(name) >= ABSENT_NAME_BYTES)
		return -ENOSPC;
	int result = -ENOSPC;
	pthread_mutex_lock(&lock);
	for (unsigned i = 0; i < ABSENT_NAMES; i++) {
		if (names[i].error && strcmp(names[i].name, name) != 0)
			continue;
		strcpy(names[i].name, name);
		names[i].error = error;
		result = 0;
		break;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

int absent_errno(uint64_t ino, const char *name)
{
	uint64_t number = ino / BLOCK_INOS;
	const struct block *block = &blocks[number % BLOCKS];
	int error = 0;
	pthread_mutex_lock(&lock);
	bool known = block->number == number &&
		     block->bits[ino % BLOCK_INOS / 64] >> ino % 64 & 1;
	for (unsigned i = 0; known && i < ABSENT_NAMES && names[i].error; i++) {
		if (strcmp(names[i].name, name) == 0) {
			error = names[i].error;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	return error;
}
