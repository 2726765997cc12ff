/* Opens that the threads answer where the kernel reads replicas itself. See _backed.h. */
#define _GNU_SOURCE
#include "_backed.h"

#include "_counts.h"
#include "_resident.h"
#include "_table.h"

#include <pthread.h>
#include <stdlib.h>

#define BUCKETS 65536 /* a power of two */

struct delegated {
	struct delegated *next;
	uint64_t ino;
	uint32_t backing_id;
};

/* Held from the look at what is delegated until the open is in the table, where Python counts it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct delegated **buckets;

static struct delegated **find(uint64_t ino)
{
	struct delegated **place = &buckets[ino % BUCKETS];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

bool backed_delegate(uint64_t ino, uint32_t backing_id)
{
	bool done = false;
	pthread_mutex_lock(&lock);
	if (!buckets)
		buckets = calloc(BUCKETS, sizeof(*buckets));
	struct delegated *delegated = buckets ? *find(ino) : NULL;
	if (buckets && !delegated && (delegated = malloc(sizeof(*delegated)))) {
		*delegated = (struct delegated){.next = buckets[ino % BUCKETS], .ino = ino};
		buckets[ino % BUCKETS] = delegated;
	}
	if (delegated) {
		delegated->backing_id = backing_id;
		done = true;
	}
	pthread_mutex_unlock(&lock);
	return done;
}

unsigned backed_reclaim(uint64_t ino)
{
	unsigned open = 0;
	pthread_mutex_lock(&lock);
	struct delegated **place = buckets ? find(ino) : NULL, *delegated = place ? *place : NULL;
	if (delegated) {
		*place = delegated->next;
		if (resident_used(ino))
			open = table_own_all(ino, delegated->backing_id);
		free(delegated);
	}
	pthread_mutex_unlock(&lock);
	return open;
}

unsigned backed_cached(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	unsigned open = resident_used(ino) ? table_own_all(ino, 0) : 0;
	pthread_mutex_unlock(&lock);
	return open;
}

bool backed_open(uint64_t ino, uint64_t unique, uint64_t *fh, uint32_t *backing_id)
{
	bool done = false;
	pthread_mutex_lock(&lock);
	const struct delegated *delegated = buckets ? *find(ino) : NULL;
	if ((delegated || resident_in_segment(ino)) && resident_open(ino)) {
		*backing_id = delegated ? delegated->backing_id : 0;
		int added = table_add(ino, unique, *backing_id, ANSWERING, fh);
		done = added == 0;
		if (added > 0) /* Python answers with it */
			table_opened(*fh, true);
		resident_unuse(ino);
		count(COUNT_BACKED_OPENS, done && *backing_id);
	}
	pthread_mutex_unlock(&lock);
	return done;
}
