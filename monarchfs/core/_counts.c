/* What the threads have done so far. See _counts.h. */
#define _GNU_SOURCE
#include "_counts.h"

#include <stddef.h>
#include <string.h>

static uint64_t bounds_ns[MOST_BOUNDS];
static unsigned bounds;
static struct counts counts;

void counts_start(const uint64_t *given_ns, unsigned given)
{
	bounds = given;
	memcpy(bounds_ns, given_ns, given * sizeof(*bounds_ns));
}

void counts_add(enum count of, uint64_t more)
{
	__atomic_fetch_add(&counts.numbers[of], more, __ATOMIC_RELAXED);
}

void counts_time(enum duration of, uint64_t took_ns)
{
	struct durations *durations = &counts.durations[of];
	unsigned bucket = 0;
	while (bucket < bounds && bounds_ns[bucket] < took_ns)
		bucket++;
	__atomic_fetch_add(&durations->total_ns, took_ns, __ATOMIC_RELAXED);
	__atomic_fetch_add(&durations->took[bucket], 1, __ATOMIC_RELAXED);
}

void counts_take(struct counts *to)
{
	uint64_t *from = (uint64_t *)&counts;
	for (size_t i = 0; i < sizeof(counts) / sizeof(*from); i++)
		((uint64_t *)to)[i] = __atomic_exchange_n(&from[i], 0, __ATOMIC_RELAXED);
}
