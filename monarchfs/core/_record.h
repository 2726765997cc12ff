/* Which requests came and who answered them, for as long as somebody records that. See _record.c. */
#ifndef MONARCHFS_RECORD_H
#define MONARCHFS_RECORD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define OPEN_PASSTHROUGH (1 << 7) /* FOPEN_PASSTHROUGH of linux/fuse.h since 6.9 */

struct fuse_in_header;

/* As insight.recording.AnsweredBy. */
enum answered_by {
	BY_UNKNOWN,
	BY_MEMORY,
	BY_TIER,
	BY_PEER,
	BY_SOURCE,
	BY_WAITED,
	BY_KERNEL,
	BY_CHECKED, /* from here, after the source was asked */
	BY_CHECKED_KERNEL,
};

/* As insight.recording.EVENT. */
struct record_event {
	uint64_t begin_ns, ino, offset;
	float took_s;
	uint32_t size, pid;
	uint8_t kind, by, none[2];
};

extern bool recording_now; /* for `recording` alone */

static inline bool recording(void)
{
	return __builtin_expect(__atomic_load_n(&recording_now, __ATOMIC_ACQUIRE), false);
}

/* Begin; with `sample` (a power of two) only what is about one of so many inode numbers. 0 or -ENOMEM. Python
 * calls this and the next three, from one thread. */
int record_begin(uint64_t now_ns, uint32_t sample);

/* From now on. */
void record_sample(uint32_t sample);

void record_end(void);

/* Move the oldest events to `events`. Returns how many; *lost is how many found no room since the beginning. */
size_t record_drain(struct record_event *events, size_t most, uint64_t *lost);

/* A request was taken from the kernel. While `recording`, as the next two. Does not wait. */
void record_request(const struct fuse_in_header *in, size_t length, uint64_t begin_ns);

/* It has been answered; `length` is that of `body`, which only a READ has no need of. */
void record_answer(uint64_t unique, enum answered_by by, int error, const void *body, size_t length);

#endif
