/* Opens that the threads answer where the kernel reads replicas itself. See _backed.h. */
#define _GNU_SOURCE
#include "_backed.h"

#include "_counts.h"
#include "_resident.h"
#include "_table.h"

#include <pthread.h>

/* Held from the check that the inode is delegated until the open is in the table, where Python counts it. */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

bool backed_delegate(uint64_t ino, uint32_t backing_id)
{
	pthread_mutex_lock(&lock);
	bool done = resident_back(ino, backing_id);
	pthread_mutex_unlock(&lock);
	return done;
}

unsigned backed_reclaim(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	uint32_t backing_id = resident_backing(ino);
	if (backing_id)
		resident_back(ino, 0);
	unsigned open = backing_id && resident_used(ino) ? table_own_all(ino, backing_id) : 0;
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
	*backing_id = resident_backing(ino);
	if ((*backing_id || resident_in_segment(ino)) && resident_open(ino)) {
		int added = table_add(ino, unique, *backing_id, ANSWERING, fh);
		done = added == 0;
		if (added > 0) /* Python answers with it */
			table_opened(*fh, true);
		resident_unuse(ino);
		counts_add(COUNT_BACKED_OPENS, done && *backing_id);
	}
	pthread_mutex_unlock(&lock);
	return done;
}
