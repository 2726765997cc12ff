/* Files of the source that were opened to learn their attributes. See _opened.h.
 *
 * Each inode number has one place, so an earlier file may have to leave it. */
#define _GNU_SOURCE
#include "_opened.h"

#include "../core/_counts.h"

#include <pthread.h>
#include <stdbool.h>
#include <sys/resource.h>

#define PLACES 4096U /* a power of two */
#define MOST 1024U   /* few enough that two of them seldom have the same place */
#define SHARE 8U     /* of the descriptors that the process may have */

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct {
	dev_t device;
	ino_t ino;
	uint64_t since_ns; /* 0: the place is free */
	int fd;
} places[PLACES];
static unsigned kept, stale_hand;

static unsigned place_of(ino_t ino)
{
	return (unsigned)((ino * 0x9e3779b97f4a7c15ULL) >> 52);
}

static unsigned most(void)
{
	struct rlimit limit;
	if (getrlimit(RLIMIT_NOFILE, &limit) < 0 || limit.rlim_cur / SHARE >= MOST)
		return MOST;
	return (unsigned)(limit.rlim_cur / SHARE);
}

/* Under `lock`. */
static int leave(unsigned place)
{
	places[place].since_ns = 0;
	kept--;
	return places[place].fd;
}

int opened_keep(const struct stat *st, int fd)
{
	unsigned place = place_of(st->st_ino);
	int displaced = -1;
	pthread_mutex_lock(&lock);
	if (places[place].since_ns)
		displaced = leave(place);
	else if (kept >= most())
		displaced = fd;
	if (displaced != fd) {
		places[place].device = st->st_dev;
		places[place].ino = st->st_ino;
		places[place].since_ns = monotonic_ns();
		places[place].fd = fd;
		kept++;
	}
	pthread_mutex_unlock(&lock);
	return displaced;
}

int opened_take(dev_t device, ino_t ino)
{
	unsigned place = place_of(ino);
	pthread_mutex_lock(&lock);
	bool there = places[place].since_ns && places[place].ino == ino && places[place].device == device;
	int fd = there ? leave(place) : -1;
	pthread_mutex_unlock(&lock);
	return fd;
}

int opened_take_stale(uint64_t ns)
{
	int fd = -1;
	uint64_t now_ns = monotonic_ns();
	pthread_mutex_lock(&lock);
	for (unsigned looked_at = 0; kept && fd < 0 && looked_at < PLACES; looked_at++) {
		unsigned place = stale_hand++ % PLACES;
		if (places[place].since_ns && now_ns - places[place].since_ns >= ns)
			fd = leave(place);
	}
	pthread_mutex_unlock(&lock);
	return fd;
}
