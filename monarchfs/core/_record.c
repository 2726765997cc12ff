/* Events of a recording: one for each request about names and bytes of files. See _record.h.
 *
 * A request is noted when it was taken from the kernel, in a table by its number, and becomes an event when it is
 * answered, by whatever thread that is. Events go through a ring to Python. No thread waits for another one: a
 * request that finds its place in the table taken, and an event that finds the ring full, are lost and counted.
 *
 * The kernel counts requests up by two, so those under way have places of their own. One that is never answered
 * keeps its place until another one needs it.
 *
 * The kernel gives the number of the thread that asks. Which process that belongs to is looked up when its first
 * request has been answered: later it may have ended.
 */
#define _GNU_SOURCE
#include "_record.h"

#include "_counts.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define PLACES (1u << 14)
#define CELLS (1u << 16)
#define THREADS (1u << 12)
#define BUSY 1 /* in the place of a request's number, all of which are even or, from io_uring, large */

enum kind {
	KIND_NONE,
	KIND_LOOKUP,
	KIND_OPEN,
	KIND_READ,
	KIND_RELEASE,
};

/* `unique` is 0 (free), BUSY (the thread that wrote that owns it), or the number of a request. */
struct place {
	uint64_t unique;
	struct record_event event;
};

/* `turn` says whose turn it is: n: the n-th event's thread writes it; n + 1: Python reads it. */
struct cell {
	uint64_t turn;
	struct record_event event;
};

bool recording_now;

static struct place *places;
static struct cell *cells;
static uint64_t head, tail; /* events read and written */
static uint64_t since_ns, lost;
static uint32_t sample_mask;
static uint64_t processes[THREADS]; /* a thread in the upper half, its process in the lower */

static void lose(void)
{
	__atomic_fetch_add(&lost, 1, __ATOMIC_RELAXED);
}

/* As insight.recording.sampled. */
static bool sampled(uint64_t ino)
{
	uint32_t mask = __atomic_load_n(&sample_mask, __ATOMIC_RELAXED);
	return !((ino * UINT64_C(0x9e3779b97f4a7c15) >> 32) & mask);
}

int record_begin(uint64_t now_ns, uint32_t sample)
{
	struct record_event rest[64];
	uint64_t before;
	if (!places)
		places = calloc(PLACES, sizeof(*places));
	if (!cells && (cells = calloc(CELLS, sizeof(*cells))))
		for (uint64_t n = 0; n < CELLS; n++)
			cells[n].turn = n;
	if (!places || !cells)
		return -ENOMEM;
	while (record_drain(rest, 64, &before))
		;
	for (unsigned n = 0; n < THREADS; n++)
		__atomic_store_n(&processes[n], 0, __ATOMIC_RELAXED);
	record_sample(sample);
	__atomic_store_n(&lost, 0, __ATOMIC_RELAXED);
	__atomic_store_n(&since_ns, now_ns, __ATOMIC_RELAXED);
	__atomic_store_n(&recording_now, true, __ATOMIC_RELEASE);
	return 0;
}

void record_sample(uint32_t sample)
{
	__atomic_store_n(&sample_mask, sample - 1, __ATOMIC_RELAXED);
}

void record_end(void)
{
	__atomic_store_n(&recording_now, false, __ATOMIC_RELEASE);
}

size_t record_drain(struct record_event *events, size_t most, uint64_t *lost_so_far)
{
	size_t count = 0;
	for (; count < most; count++, head++) {
		struct cell *cell = &cells[head % CELLS];
		if (__atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE) != head + 1)
			break;
		events[count] = cell->event;
		__atomic_store_n(&cell->turn, head + CELLS, __ATOMIC_RELEASE);
	}
	*lost_so_far = __atomic_load_n(&lost, __ATOMIC_RELAXED);
	return count;
}

static void put(const struct record_event *event)
{
	uint64_t n = __atomic_load_n(&tail, __ATOMIC_RELAXED);
	struct cell *cell;
	for (;;) {
		cell = &cells[n % CELLS];
		uint64_t turn = __atomic_load_n(&cell->turn, __ATOMIC_ACQUIRE);
		if (turn < n) {
			lose(); /* Python has not read what is there */
			return;
		}
		if (turn > n)
			n = __atomic_load_n(&tail, __ATOMIC_RELAXED);
		else if (__atomic_compare_exchange_n(&tail, &n, n + 1, false, __ATOMIC_RELAXED,
						     __ATOMIC_RELAXED))
			break;
	}
	cell->event = *event;
	__atomic_store_n(&cell->turn, n + 1, __ATOMIC_RELEASE);
}

static struct place *place_of(uint64_t unique)
{
	return &places[unique / 2 % PLACES];
}

static enum kind kind_of(const struct fuse_in_header *in, size_t body)
{
	switch (in->opcode) {
	case FUSE_LOOKUP:
		return KIND_LOOKUP;
	case FUSE_OPEN:
		return sampled(in->nodeid) ? KIND_OPEN : KIND_NONE;
	case FUSE_READ:
		return body >= sizeof(struct fuse_read_in) && sampled(in->nodeid) ? KIND_READ : KIND_NONE;
	case FUSE_RELEASE:
		return sampled(in->nodeid) ? KIND_RELEASE : KIND_NONE;
	}
	return KIND_NONE;
}

void record_request(const struct fuse_in_header *in, size_t length, uint64_t begin_ns)
{
	enum kind kind = kind_of(in, length - sizeof(*in));
	if (kind == KIND_NONE)
		return;
	struct place *place = place_of(in->unique);
	uint64_t before = __atomic_exchange_n(&place->unique, BUSY, __ATOMIC_ACQUIRE);
	if (before == BUSY || (before && place->event.begin_ns >= __atomic_load_n(&since_ns, __ATOMIC_RELAXED)))
		lose();
	if (before == BUSY)
		return;
	const struct fuse_read_in *read = (const void *)(in + 1);
	place->event = (struct record_event){
		.begin_ns = begin_ns,
		.ino = kind == KIND_LOOKUP ? 0 : in->nodeid,
		.offset = kind == KIND_READ ? read->offset : 0,
		.pid = in->pid,
		.kind = (uint8_t)kind,
	};
	__atomic_store_n(&place->unique, in->unique, __ATOMIC_RELEASE);
}

/* The request, if it is known and from this recording; its place is free again. */
static bool take(uint64_t unique, struct record_event *event)
{
	struct place *place = place_of(unique);
	uint64_t expected = unique;
	if (!__atomic_compare_exchange_n(&place->unique, &expected, BUSY, false, __ATOMIC_ACQUIRE,
					 __ATOMIC_RELAXED))
		return false;
	*event = place->event;
	__atomic_store_n(&place->unique, 0, __ATOMIC_RELEASE);
	return event->begin_ns >= __atomic_load_n(&since_ns, __ATOMIC_RELAXED);
}

/* The thread itself if nothing is known of it. */
static uint32_t look_up(uint32_t thread)
{
	char path[32], status[512];
	snprintf(path, sizeof(path), "/proc/%u/status", thread);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return thread;
	ssize_t got = read(fd, status, sizeof(status) - 1);
	close(fd);
	status[got > 0 ? got : 0] = 0;
	const char *found = strstr(status, "\nTgid:");
	uint32_t process = found ? (uint32_t)strtoul(found + sizeof("\nTgid:") - 1, NULL, 10) : 0;
	return process ? process : thread;
}

static uint32_t process_of(uint32_t thread)
{
	uint64_t *place = &processes[thread % THREADS];
	uint64_t known = __atomic_load_n(place, __ATOMIC_RELAXED);
	if (!thread)
		return 0;
	if (known >> 32 == thread)
		return (uint32_t)known;
	uint32_t process = look_up(thread);
	__atomic_store_n(place, (uint64_t)thread << 32 | process, __ATOMIC_RELAXED);
	return process;
}

static void finish(struct record_event *event, enum answered_by by)
{
	if (event->kind == KIND_LOOKUP && !sampled(event->ino))
		return;
	event->by = (uint8_t)by;
	event->took_s = (float)(monotonic_ns() - event->begin_ns) * 1e-9f;
	event->pid = process_of(event->pid);
	put(event);
}

/* Whether the kernel reads the file by itself from now on. */
static bool is_kernels(int error, const void *body, size_t length)
{
	return !error && length >= sizeof(struct fuse_open_out) &&
	       ((const struct fuse_open_out *)body)->open_flags & OPEN_PASSTHROUGH;
}

void record_answer(uint64_t unique, enum answered_by by, int error, const void *body, size_t length)
{
	struct record_event event;
	if (!take(unique, &event))
		return;
	if (event.kind == KIND_READ)
		event.size = error ? 0 : (uint32_t)length;
	else if (event.kind == KIND_LOOKUP)
		event.ino = !error && length >= sizeof(uint64_t) ? ((const struct fuse_entry_out *)body)->nodeid : 0;
	else if (event.kind == KIND_OPEN && by == BY_MEMORY && is_kernels(error, body, length))
		by = BY_KERNEL;
	else if (by == BY_CHECKED && is_kernels(error, body, length))
		by = BY_CHECKED_KERNEL;
	finish(&event, by);
}
