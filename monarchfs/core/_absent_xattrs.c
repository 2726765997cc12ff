/* Extended attributes that files do not have.
 *
 * `ls -l` asks for two attributes of each file, and the kernel caches no answer. Python says which inodes have no
 * such attribute. An inode number is one version of one file, so that remains true.
 *
 * The table has a bit for each inode, in ranges of 512 consecutive numbers (numbers are given out in sequence). A
 * range has one possible place, and replaces the range that is there. Python is asked again about inodes whose
 * range was replaced.
 */
#include "_absent_xattrs.h"

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <string.h>

#define RANGES 32768 /* 16 million consecutive numbers; 2.3 MB, of which only used pages are in memory */
#define RANGE_INOS 512

static struct range {
	uint64_t number;
	uint64_t bits[RANGE_INOS / 64];
} ranges[RANGES];

static struct name {
	char name[ABSENT_NAME_BYTES];
	int error;
} names[ABSENT_NAMES];

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

void absent_add(uint64_t ino)
{
	uint64_t number = ino / RANGE_INOS;
	struct range *range = &ranges[number % RANGES];
	pthread_mutex_lock(&lock);
	if (range->number != number) {
		memset(range, 0, sizeof(*range));
		range->number = number;
	}
	range->bits[ino % RANGE_INOS / 64] |= (uint64_t)1 << ino % 64;
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
	uint64_t number = ino / RANGE_INOS;
	const struct range *range = &ranges[number % RANGES];
	int error = 0;
	pthread_mutex_lock(&lock);
	bool known = range->number == number &&
		     range->bits[ino % RANGE_INOS / 64] >> ino % 64 & 1;
	for (unsigned i = 0; known && i < ABSENT_NAMES && names[i].error; i++) {
		if (strcmp(names[i].name, name) == 0) {
			error = names[i].error;
			break;
		}
	}
	pthread_mutex_unlock(&lock);
	return error;
}
