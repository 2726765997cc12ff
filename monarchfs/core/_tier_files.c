/* Files of tiers that are kept open for reading. See _tier_files.h. */
#define _GNU_SOURCE
#include "_tier_files.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PATH_BYTES 64 /* "xx/" + 32 digits + "." + 16 digits, and a terminating zero */

struct open_file {
	struct tier_file of;
	int fd; /* -1: the place is free */
	uint32_t reads; /* under way */
	uint32_t next; /* in its bucket, or in the list of free places */
	bool stopped; /* in no bucket, and closed when the last read ends */
	bool used; /* since the hand passed it */
};

static struct open_file *files;
static uint32_t *buckets; /* as many as files */
static uint32_t most_files, hand, first_free = NOT_OPEN;
static uid_t owner;

int files_start(unsigned most, uid_t uid)
{
	if (files)
		return -EALREADY;
	struct open_file *memory = calloc(most, sizeof(*memory));
	buckets = malloc(most * sizeof(*buckets));
	if (!memory || !buckets) {
		free(memory);
		free(buckets);
		return -ENOMEM;
	}
	for (uint32_t place = 0; place < most; place++) {
		memory[place] = (struct open_file){.fd = -1, .next = place + 1};
		buckets[place] = NOT_OPEN;
	}
	memory[most - 1].next = NOT_OPEN;
	files = memory;
	most_files = most;
	first_free = 0;
	owner = uid;
	return 0;
}

bool files_started(void)
{
	return files;
}

static uint32_t *bucket_of(uint64_t number)
{
	return &buckets[(number * 0x9e3779b97f4a7c15ULL >> 32) % most_files];
}

uint32_t files_find(const struct tier_file *file)
{
	uint32_t place = *bucket_of(file->number);
	while (place != NOT_OPEN &&
	       (files[place].of.number != file->number || files[place].of.tier != file->tier ||
		files[place].of.segment != file->segment))
		place = files[place].next;
	return place;
}

static int release_place(uint32_t place)
{
	int fd = files[place].fd;
	files[place].fd = -1;
	files[place].next = first_free;
	first_free = place;
	return fd;
}

int files_put_down(uint32_t place)
{
	if (place == NOT_OPEN)
		return -1;
	uint32_t *link = bucket_of(files[place].of.number);
	while (*link != place)
		link = &files[*link].next;
	*link = files[place].next;
	if (!files[place].reads)
		return release_place(place);
	files[place].stopped = true;
	return -1;
}

void files_put_down_all(unsigned tier)
{
	for (uint32_t place = 0; place < most_files; place++) {
		const struct open_file *file = &files[place];
		int fd = file->fd >= 0 && file->of.tier == tier && !file->stopped ?
				 files_put_down(place) :
				 -1;
		if (fd >= 0)
			close(fd);
	}
}

/* A free place, or that of a file that has not been read for long (CLOCK). */
static uint32_t find_place(int *to_close)
{
	*to_close = -1;
	for (uint32_t tries = 2 * most_files; first_free == NOT_OPEN && tries; tries--) {
		uint32_t place = hand;
		struct open_file *file = &files[place];
		hand = (hand + 1) % most_files;
		if (file->fd < 0 || file->reads || file->stopped)
			continue;
		if (file->used)
			file->used = false;
		else
			*to_close = files_put_down(place);
	}
	uint32_t place = first_free;
	if (place != NOT_OPEN)
		first_free = files[place].next;
	return place;
}

uint32_t files_add(const struct tier_file *file, int fd, int *to_close)
{
	uint32_t place = find_place(to_close);
	if (place != NOT_OPEN) {
		uint32_t *bucket = bucket_of(file->number);
		files[place] = (struct open_file){.of = *file, .fd = fd, .next = *bucket};
		*bucket = place;
	}
	return place;
}

int files_begin(uint32_t place)
{
	files[place].reads++;
	files[place].used = true;
	return files[place].fd;
}

int files_end(uint32_t place)
{
	return --files[place].reads == 0 && files[place].stopped ? release_place(place) : -1;
}

/* -- opening, without the lock */

/* Headers before Linux 5.6 and glibc 2.32 lack openat2(2) (linux/openat2.h). */
#ifndef SYS_openat2
#define SYS_openat2 437
#endif
struct how {
	uint64_t flags, mode, resolve;
};
#define NO_SYMLINKS 4 /* RESOLVE_NO_SYMLINKS */

/* As in cache/store/files.py: never through a symbolic link, and without waiting for a FIFO. */
static int open_below(int dir_fd, const char *path)
{
	const int flags = O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC;
	struct how how = {.flags = flags, .resolve = NO_SYMLINKS};
	int fd = (int)syscall(SYS_openat2, dir_fd, path, &how, sizeof(how));
	if (fd >= 0 || (errno != ENOSYS && errno != EPERM))
		return fd;
	/* The kernel is older than Linux 5.6, or a container's filter forbids the call. */
	char subdir[PATH_BYTES] = {0};
	size_t length = strcspn(path, "/");
	memcpy(subdir, path, length);
	int sub_fd = openat(dir_fd, subdir, O_PATH | O_DIRECTORY | O_NOFOLLOW | O_CLOEXEC);
	if (sub_fd < 0)
		return -1;
	fd = openat(sub_fd, path + length + 1, flags);
	close(sub_fd);
	return fd;
}

static char *hex(char *to, uint64_t number, unsigned digits)
{
	for (unsigned left = digits; left--; number >>= 4)
		to[left] = "0123456789abcdef"[number & 15];
	return to + digits;
}

int files_open(int dir_fd, const struct tier_file *file, const unsigned char *name, uint64_t checksum,
	       uint64_t *bytes)
{
	char path[PATH_BYTES], *to = path;
	if (file->segment) {
		to = hex(stpcpy(to, "segments/"), file->number, 16);
	} else {
		to = hex(to, name[0], 2);
		*to++ = '/';
		for (unsigned i = 0; i < NAME_BYTES; i++)
			to = hex(to, name[i], 2);
		*to++ = '.';
		to = hex(to, checksum, 16);
	}
	*to = 0;
	int fd = open_below(dir_fd, path);
	struct stat st = {0};
	bool good = fd >= 0 && fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && st.st_uid == owner;
	*bytes = (uint64_t)st.st_size;
	if (fd >= 0 && !good) {
		close(fd);
		return -1;
	}
	return fd;
}
