/* Directories of the source. See _directories.h. */
#define _GNU_SOURCE
#include "_directories.h"

#include "_waiting.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUCKETS 4096

/* Under `source_lock`. */
static struct directory *numbered[MOST_DIRECTORIES], *buckets[BUCKETS];
static unsigned generations;

static struct directory **bucket_of(uint64_t ino)
{
	return &buckets[(ino * 0x9e3779b97f4a7c15ULL) >> 52];
}

static void take_out(struct directory *directory)
{
	struct directory **place = bucket_of(directory->ino);
	while (*place != directory)
		place = &(*place)->next;
	*place = directory->next;
}

struct directory *directories_at(unsigned number)
{
	return numbered[number];
}

struct directory *directories_of(uint64_t ino)
{
	struct directory *directory = *bucket_of(ino);
	while (directory && directory->ino != ino)
		directory = directory->next;
	return directory;
}

void directory_use(struct directory *directory)
{
	directory->users++;
}

void directory_leave(struct directory *directory)
{
	if (--directory->users == 0 && directory->replaced) {
		close(directory->fd); /* of O_PATH: does not block */
		free(directory);
	}
}

int directories_put(unsigned number, uint64_t ino, int fd, const char *path)
{
	if (number >= MOST_DIRECTORIES)
		return -EINVAL;
	struct directory *directory = malloc(sizeof(*directory) + strlen(path) + 1);
	if (!directory)
		return -ENOMEM;
	*directory = (struct directory){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), .ino = ino, .users = 1};
	strcpy(directory->path, path);
	if (directory->fd < 0) {
		int error = errno;
		free(directory);
		return -error;
	}
	pthread_mutex_lock(&source_lock);
	struct directory *before = numbered[number];
	directory->generation = ++generations;
	numbered[number] = directory;
	if (before) {
		before->replaced = true;
		take_out(before);
		directory_leave(before);
	}
	struct directory **bucket = bucket_of(ino);
	directory->next = *bucket;
	*bucket = directory;
	pthread_mutex_unlock(&source_lock);
	return 0;
}
