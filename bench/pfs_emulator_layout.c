#define _GNU_SOURCE
#include "pfs_emulator_layout.h"

#include <errno.h>
#include <inttypes.h>
#include <limits.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/xattr.h>

#define STRIPE_BYTES (1U << 20)
#define MAGIC 0x0BD10BD0U /* LOV_MAGIC_V1 */
#define RAID0 1U
#define RELEASED 0x80000000U /* LOV_PATTERN_F_RELEASED */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards the list */
static struct file {
	struct file *next;
	dev_t dev;
	ino_t ino;
	double ready;
} *recalled;

/* Under the lock. */
static struct file *find_recalled(const struct stat *found)
{
	struct file *file = recalled;
	while (file && (file->ino != found->st_ino || file->dev != found->st_dev))
		file = file->next;
	return file;
}

double layout_recall(const struct stat *found, double now, double seconds, bool *first)
{
	double ready = now + seconds;
	pthread_mutex_lock(&lock);
	struct file *file = find_recalled(found);
	*first = !file;
	if (file) {
		ready = file->ready;
	} else if ((file = malloc(sizeof *file))) {
		*file = (struct file){recalled, found->st_dev, found->st_ino, ready};
		recalled = file;
	}
	pthread_mutex_unlock(&lock);
	return ready;
}

struct layout layout_of(const char *path, const struct stat *found, uint64_t targets)
{
	struct layout layout = {1, STRIPE_BYTES, (uint32_t)(found->st_ino % targets), false};
	char text[128];
	char word[16] = "";
	ssize_t length = lgetxattr(path, LAYOUT_ATTRIBUTE, text, sizeof text - 1);
	if (length < 0)
		return layout;
	text[length] = 0;
	sscanf(text, "%" SCNu32 " %" SCNu32 " %" SCNu32 " %15s", &layout.stripes, &layout.stripe_bytes,
	       &layout.first, word);
	if (strcmp(word, "released") == 0) {
		pthread_mutex_lock(&lock);
		layout.released = !find_recalled(found);
		pthread_mutex_unlock(&lock);
	}
	return layout;
}

uint64_t layout_targets(const struct layout *layout, uint64_t targets, off_t offset, size_t size)
{
	uint64_t found = 0;
	if (layout->released || !size)
		return 0;
	uint64_t first = (uint64_t)offset / layout->stripe_bytes;
	uint64_t last = ((uint64_t)offset + size - 1) / layout->stripe_bytes;
	for (uint64_t n = first; n <= last && n - first < layout->stripes; n++)
		found |= 1ULL << ((layout->first + n % layout->stripes) % targets);
	return found;
}

static void put(char *to, size_t size, uint64_t number)
{
	for (size_t n = 0; n < size; n++)
		to[n] = (char)(number >> 8 * n);
}

ssize_t layout_value(const struct layout *layout, uint64_t targets, char *value)
{
	/* A released file has no objects. */
	uint32_t objects = layout->released ? 0 : layout->stripes;
	size_t length = 32 + 24 * (size_t)objects;
	if (length > XATTR_SIZE_MAX)
		return -E2BIG;
	memset(value, 0, length);
	put(value, 4, MAGIC);
	put(value + 4, 4, RAID0 | (layout->released ? RELEASED : 0));
	put(value + 24, 4, layout->stripe_bytes);
	put(value + 28, 2, objects);
	for (uint32_t n = 0; n < objects; n++)
		put(value + 32 + 24 * (size_t)n + 20, 4, (layout->first + n) % targets);
	return (ssize_t)length;
}
