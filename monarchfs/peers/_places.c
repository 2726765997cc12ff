/* See _places.h. Open addressing with linear probing; removal leaves no tombstones (Knuth, 6.4, algorithm R). */
#include "_places.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define FEWEST 1024

struct row {
	unsigned char name[REPLICA_NAME_BYTES];
	struct place place; /* segment 0: free */
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER;
static struct row *rows;
static size_t room, used; /* `room` is a power of two, or 0 */
static uint32_t of_peer[1 << 16];

/* All under `lock`. */

static size_t home(const unsigned char *name)
{
	uint64_t hash; /* the name is a hash already */
	memcpy(&hash, name, sizeof(hash));
	return (size_t)hash & (room - 1);
}

/* Where it is, or the free row where it would be. */
static struct row *find(const unsigned char *name)
{
	size_t at = home(name);
	while (rows[at].place.segment && memcmp(rows[at].name, name, REPLICA_NAME_BYTES) != 0)
		at = (at + 1) & (room - 1);
	return &rows[at];
}

static bool grow(void)
{
	struct row *before = rows;
	size_t count = room;
	struct row *after = calloc(room ? room * 2 : FEWEST, sizeof(*after));
	if (!after)
		return false;
	rows = after;
	room = room ? room * 2 : FEWEST;
	for (size_t n = 0; n < count; n++)
		if (before[n].place.segment)
			*find(before[n].name) = before[n];
	free(before);
	return true;
}

/* Close the gap: rows behind it may belong before it. */
static void remove_row(size_t gap)
{
	used--;
	of_peer[rows[gap].place.peer]--;
	for (size_t at = gap;;) {
		rows[gap].place.segment = 0;
		size_t from;
		do {
			at = (at + 1) & (room - 1);
			if (!rows[at].place.segment)
				return;
			from = home(rows[at].name);
		} while (gap <= at ? gap < from && from <= at : gap < from || from <= at);
		rows[gap] = rows[at];
		gap = at;
	}
}

bool places_put(const unsigned char *name, const struct place *place)
{
	bool put = place->segment != 0;
	pthread_rwlock_wrlock(&lock);
	if (put && (used + 1) * 4 > room * 3)
		put = grow();
	struct row *row = put ? find(name) : NULL;
	if (put && row->place.segment && row->place.peer == place->peer) {
		row->place = *place;
	} else if (put && (put = of_peer[place->peer] < MOST_OF_PEER)) {
		if (row->place.segment)
			of_peer[row->place.peer]--;
		else
			used++;
		of_peer[place->peer]++;
		memcpy(row->name, name, REPLICA_NAME_BYTES);
		row->place = *place;
	}
	pthread_rwlock_unlock(&lock);
	return put;
}

void places_remove(const unsigned char *name, unsigned peer)
{
	pthread_rwlock_wrlock(&lock);
	struct row *row = room ? find(name) : NULL;
	if (row && row->place.segment && row->place.peer == peer)
		remove_row((size_t)(row - rows));
	pthread_rwlock_unlock(&lock);
}

void places_remove_all(unsigned peer)
{
	pthread_rwlock_wrlock(&lock);
	for (size_t n = 0; n < room;) {
		if (rows[n].place.segment && rows[n].place.peer == peer)
			remove_row(n); /* look here again: a later row may be here now, or one that was looked at */
		else
			n++;
	}
	pthread_rwlock_unlock(&lock);
}

bool places_get(const unsigned char *name, struct place *place)
{
	pthread_rwlock_rdlock(&lock);
	const struct row *row = room ? find(name) : NULL;
	bool known = row && row->place.segment;
	if (known)
		*place = row->place;
	pthread_rwlock_unlock(&lock);
	return known;
}

void places_count(uint64_t *of_peers, size_t count)
{
	pthread_rwlock_rdlock(&lock);
	for (size_t n = 0; n < count; n++)
		of_peers[n] = n < sizeof(of_peer) / sizeof(*of_peer) ? of_peer[n] : 0;
	pthread_rwlock_unlock(&lock);
}
