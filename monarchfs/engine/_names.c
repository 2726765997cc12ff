/* The cache of names. See _names.h.
 *
 * An entry is found by its name to be answered, and by its inode number to be forgotten, because a file may
 * have several names. Answers are written to the kernel under `lock`, by many threads at once (readers). A
 * thread that changes the table waits for those answers, and goes before later ones.
 */
#define _GNU_SOURCE
#include "_names.h"

#include "../fuse/_counts.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define MOST_NAMES (1U << 17) /* some 200 bytes each */
#define BUCKETS (1U << 16)
#define SECOND_NS 1000000000U

struct known {
	struct known *next, *next_of_ino; /* in their buckets */
	uint64_t parent, until_ns;
	struct fuse_attr attr;
	uint32_t place; /* in `ring` */
	uint8_t length;
	char name[];
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static struct known *buckets[BUCKETS], *of_ino[BUCKETS];
static struct known *ring[MOST_NAMES]; /* in order of age, with gaps */
static uint32_t oldest; /* the place of the oldest one, where the next one is put */

static size_t bucket_of(uint64_t number)
{
	return (number * 0x9e3779b97f4a7c15ULL) >> 48;
}

/* FNV-1a. */
static struct known **place_of(uint64_t parent, const char *name, size_t length)
{
	uint64_t hash = 0xcbf29ce484222325ULL ^ parent;
	for (size_t i = 0; i < length; i++)
		hash = (hash ^ (unsigned char)name[i]) * 0x100000001b3ULL;
	struct known **place = &buckets[bucket_of(hash)];
	while (*place && ((*place)->parent != parent || (*place)->length != length ||
			  memcmp((*place)->name, name, length) != 0))
		place = &(*place)->next;
	return place;
}

static void drop(struct known **place)
{
	struct known *known = *place, **other = &of_ino[bucket_of(known->attr.ino)];
	*place = known->next;
	while (*other != known)
		other = &(*other)->next_of_ino;
	*other = known->next_of_ino;
	ring[known->place] = NULL;
	free(known);
}

static void drop_known(const struct known *known)
{
	drop(place_of(known->parent, known->name, known->length));
}

void names_put(uint64_t parent, const char *name, size_t length, const struct fuse_attr *attr,
	       uint64_t for_ns)
{
	struct known *known = length <= UINT8_MAX ? malloc(sizeof(*known) + length) : NULL;
	if (known) {
		*known = (struct known){.parent = parent, .until_ns = monotonic_ns() + for_ns,
					.attr = *attr, .length = (uint8_t)length};
		memcpy(known->name, name, length);
	}
	pthread_rwlock_wrlock(&lock);
	struct known **place = place_of(parent, name, length);
	if (*place)
		drop(place);
	if (known) {
		if (ring[oldest])
			drop_known(ring[oldest]);
		place = place_of(parent, name, length);
		*place = known;
		place = &of_ino[bucket_of(attr->ino)];
		known->next_of_ino = *place;
		*place = known;
		known->place = oldest;
		ring[oldest] = known;
		oldest = (oldest + 1) % MOST_NAMES;
	}
	pthread_rwlock_unlock(&lock);
}

void names_forget(uint64_t parent, const char *name, size_t length)
{
	pthread_rwlock_wrlock(&lock);
	struct known **place = place_of(parent, name, length);
	if (*place)
		drop(place);
	pthread_rwlock_unlock(&lock);
}

void names_forget_ino(uint64_t ino)
{
	pthread_rwlock_wrlock(&lock);
	for (struct known *known = of_ino[bucket_of(ino)], *next; known; known = next) {
		next = known->next_of_ino;
		if (known->attr.ino == ino)
			drop_known(known);
	}
	pthread_rwlock_unlock(&lock);
}

void names_forget_all(void)
{
	pthread_rwlock_wrlock(&lock);
	for (uint32_t place = 0; place < MOST_NAMES; place++)
		if (ring[place])
			drop_known(ring[place]);
	pthread_rwlock_unlock(&lock);
}

bool names_enter(uint64_t parent, const char *name, size_t length, struct fuse_entry_out *out)
{
	pthread_rwlock_rdlock(&lock);
	const struct known *known = *place_of(parent, name, length);
	uint64_t now_ns = known ? monotonic_ns() : 0;
	if (!known || known->until_ns <= now_ns) {
		pthread_rwlock_unlock(&lock);
		return false;
	}
	uint64_t seconds = (known->until_ns - now_ns) / SECOND_NS;
	uint32_t rest_ns = (uint32_t)((known->until_ns - now_ns) % SECOND_NS);
	*out = (struct fuse_entry_out){
		.nodeid = known->attr.ino,
		.entry_valid = seconds,
		.entry_valid_nsec = rest_ns,
		.attr_valid = seconds,
		.attr_valid_nsec = rest_ns,
		.attr = known->attr,
	};
	return true;
}

void names_leave(void)
{
	pthread_rwlock_unlock(&lock);
}
