/* Events of requests that some threads take and others answer, while they are drained and recordings begin and end,
 * for a sanitizer. Argument: how many requests each thread takes in a recording. */
#include "../../monarchfs/core/_counts.h"
#include "../../monarchfs/core/_record.h"

#include "check.h"

#define THREADS 4
#define RECORDINGS 5
#define DRAINED 256
#define NO_PROCESS (1u << 30) /* above all numbers of processes */

static unsigned requests;
static uint64_t left_over[THREADS]; /* a request for the next thread to answer; 0: none */
static unsigned finished;

static uint64_t hash(uint64_t unique)
{
	return unique * 31 + 7;
}

static void take(uint64_t unique, unsigned thread)
{
	struct {
		struct fuse_in_header in;
		struct fuse_read_in read;
	} request = {
		.in = {.opcode = FUSE_READ, .unique = unique, .nodeid = hash(unique), .pid = NO_PROCESS + thread},
		.read = {.offset = unique},
	};
	if (recording())
		record_request(&request.in, sizeof(request), monotonic_ns());
}

static void answer(uint64_t unique)
{
	if (unique && recording())
		record_answer(unique, BY_TIER, 0, NULL, (size_t)(unique % 1000));
}

static void *be_thread(void *number)
{
	unsigned thread = (unsigned)(uintptr_t)number - 1;
	for (uint64_t n = 0; n < requests; n++) {
		uint64_t unique = 2 * (n * THREADS + thread + 1);
		take(unique, thread);
		if (n % 3)
			answer(unique);
		else
			answer(__atomic_exchange_n(&left_over[thread], unique, __ATOMIC_ACQ_REL));
		answer(__atomic_exchange_n(&left_over[(thread + 1) % THREADS], 0, __ATOMIC_ACQ_REL));
	}
	__atomic_add_fetch(&finished, 1, __ATOMIC_ACQ_REL);
	return NULL;
}

static size_t drain(bool *seen)
{
	struct record_event events[DRAINED];
	uint64_t lost;
	size_t count = record_drain(events, DRAINED, &lost);
	for (size_t n = 0; n < count; n++) {
		const struct record_event *event = &events[n];
		uint64_t number = event->offset / 2;
		CHECK(event->ino == hash(event->offset) && event->size == event->offset % 1000);
		CHECK(event->pid == NO_PROCESS + (number - 1) % THREADS && event->by == BY_TIER && event->took_s >= 0);
		CHECK(!seen[number]);
		seen[number] = true;
	}
	return count;
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	requests = (unsigned)atoi(arguments[1]);
	bool *seen = calloc(requests * THREADS + 1, sizeof(*seen));
	CHECK(seen);
	for (unsigned recording = 0; recording < RECORDINGS; recording++) {
		pthread_t threads[THREADS];
		uint64_t events = 0, lost = 0;
		memset(seen, 0, requests * THREADS + 1);
		finished = 0;
		CHECK(record_begin(monotonic_ns(), 1) == 0);
		start_threads(threads, THREADS, be_thread);
		if (recording % 2) { /* it ends in the middle; what it has is whole */
			while (events < requests)
				events += drain(seen);
			record_end();
		}
		while (__atomic_load_n(&finished, __ATOMIC_ACQUIRE) < THREADS) {
			events += drain(seen);
			sched_yield();
		}
		join_threads(threads, THREADS);
		for (unsigned n = 0; n < THREADS; n++)
			answer(__atomic_exchange_n(&left_over[n], 0, __ATOMIC_ACQ_REL));
		for (size_t more; (more = drain(seen));)
			events += more;
		struct record_event none;
		record_drain(&none, 0, &lost);
		CHECK(recording % 2 || events + lost >= (uint64_t)requests * THREADS);
		CHECK(recording % 2 || lost < requests);
		record_end();
	}
	free(seen);
	puts("done");
	return 0;
}
