/* Requests that wait for bytes of the source, and the threads that ask the source. See _waiting.h. */
#define _GNU_SOURCE
#include "_waiting.h"

#include "_journal.h"
#include "_queue.h"

#include <stdlib.h>
#include <string.h>

/* How many threads may hang in the source; with more, requests are left to Python at once. */
#define MOST_STUCK 64
#define MOST_STUCK_AHEAD 16

pthread_mutex_t source_lock = PTHREAD_MUTEX_INITIALIZER;
struct pool source_threads = {.lock = &source_lock, .most_stuck = MOST_STUCK};
struct pool stat_threads = {.lock = &source_lock, .most_stuck = MOST_STUCK};
struct pool ahead_threads = {.lock = &source_lock, .most_stuck = MOST_STUCK_AHEAD};
struct pool window_threads = {.lock = &source_lock, .most_stuck = MOST_STUCK_AHEAD};

static struct waiter *oldest, *newest;
static unsigned waiting;

void waiting_start(unsigned threads)
{
	pthread_mutex_lock(&source_lock);
	source_threads.most = stat_threads.most = threads;
	pthread_mutex_unlock(&source_lock);
}

bool source_hangs(void)
{
	return source_threads.stuck >= MOST_STUCK;
}

void *waiter_new(size_t size, const void *request, size_t length, uint64_t started_ns)
{
	struct waiter *waiter = malloc(size + length);
	if (waiter) {
		char *copy = (char *)waiter + size;
		memcpy(copy, request, length);
		*waiter = (struct waiter){
			.started_ns = started_ns, .request = (void *)copy, .length = length};
	}
	return waiter;
}

void waiter_add(struct waiter *waiter, bool kept)
{
	waiter->newer = NULL;
	waiter->older = newest;
	*(newest ? &newest->newer : &oldest) = waiter;
	newest = waiter;
	waiting++;
	if (!kept)
		journal_keep(waiter->request, waiter->length);
}

void waiter_take(struct waiter *waiter)
{
	*(waiter->older ? &waiter->older->newer : &oldest) = waiter->newer;
	*(waiter->newer ? &waiter->newer->older : &newest) = waiter->older;
	waiting--;
}

void waiter_leave(struct waiter *waiter)
{
	waiter_take(waiter);
	queue_leave(waiter->request, waiter->length);
}

bool waiting_leave(uint64_t unique)
{
	pthread_mutex_lock(&source_lock);
	struct waiter *waiter = oldest;
	while (waiter && waiter->request->unique != unique)
		waiter = waiter->newer;
	if (waiter) {
		waiter_leave(waiter);
		waiter->left(waiter);
	}
	pthread_mutex_unlock(&source_lock);
	return waiter;
}

unsigned waiting_leave_older(uint64_t before_ns, unsigned most)
{
	pthread_mutex_lock(&source_lock);
	struct waiter *waiter = oldest, *newer;
	for (; waiter && waiter->started_ns < before_ns; waiter = newer) {
		newer = waiter->newer;
		if (!most && waiter->may_stay)
			continue;
		most -= most > 0;
		waiter_leave(waiter);
		waiter->left(waiter);
	}
	pool_expire(&source_threads, before_ns);
	pool_expire(&stat_threads, before_ns);
	pool_expire(&ahead_threads, before_ns);
	pool_expire(&window_threads, before_ns);
	unsigned rest = waiting;
	pthread_mutex_unlock(&source_lock);
	return rest;
}

bool waiting_any_since(uint64_t since_ns)
{
	pthread_mutex_lock(&source_lock);
	bool any = newest && newest->started_ns >= since_ns;
	pthread_mutex_unlock(&source_lock);
	return any;
}
