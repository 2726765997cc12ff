/* What the threads have done so far: counts and durations. Lock-free. */
#ifndef MONARCHFS_COUNTS_H
#define MONARCHFS_COUNTS_H

#include <stdint.h>
#include <time.h>

#define MOST_BOUNDS 32

enum count {
	COUNT_QUEUED, /* requests left to Python */
	COUNT_BYTES, /* in answers to READ */
	COUNT_SOURCE_BYTES, /* asked of the source for readers */
	COUNT_AHEAD_BYTES, /* asked of the source ahead of readers */
	COUNT_UNTOLD_OPENS, /* opens of small files that no event reports */
	COUNT_RESIDENT_OPENS, /* by resident_open and, where there are no opens, first reads */
	COUNT_RESIDENT_BYTES, /* the sizes of those files */
	COUNT_UNLISTED_OPENS, /* those of them that resident_opened did not report */
	COUNT_BACKED_OPENS, /* answered with a backing id */
	COUNT_SOURCE_NS, /* TIME_OPEN_SOURCE and TIME_READ_SOURCE by who answered */
	COUNT_MEMORY_NS,
	COUNT_TIER_NS,
	COUNT_PEER_NS,
	COUNT_COPY_NS, /* a copy that was under way */
	COUNTS,
};

enum duration {
	TIME_LOOKUP, /* answers, as the next five */
	TIME_LOOKUP_SOURCE,
	TIME_OPEN_LOCAL,
	TIME_READ_LOCAL,
	TIME_OPEN_SOURCE,
	TIME_READ_SOURCE,
	TIME_SOURCE, /* small files opened, and read if that was wanted; reads of large ones */
	TIME_AHEAD, /* small files read ahead of readers */
	TIME_STAT, /* of names in the source */
	DURATIONS,
};

struct durations {
	uint64_t total_ns;
	uint64_t took[MOST_BOUNDS + 1]; /* how many took at most that bound; the last: longer */
};

struct counts {
	uint64_t numbers[COUNTS];
	struct durations durations[DURATIONS];
};

/* `bounds_ns`: the bounds of durations.took, rising; at most MOST_BOUNDS. Called before threads start. */
void counts_start(const uint64_t *bounds_ns, unsigned bounds);

void counts_add(enum count of, uint64_t more);

/* Count one that took so long. */
void counts_time(enum duration of, uint64_t took_ns);

/* What was counted since this was called last. */
void counts_take(struct counts *to);

static inline uint64_t monotonic_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

#endif
