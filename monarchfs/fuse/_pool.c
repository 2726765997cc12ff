/* Threads for work that may wait long. See _pool.h.
 *
 * The one that was idle last goes first, because its buffer is in the cache; another is started where
 * none is idle, and each ends when there was nothing to do for a while.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>

#define STACK_BYTES (128 * 1024)
#define IDLE_SECONDS 5

/* A thread that waits for something to do. */
struct waiting {
	struct waiting *next;
	pthread_cond_t wake;
	bool woken;
};

/* What a thread begins with. */
struct start {
	struct pool *pool;
	char *buffer;
};

/* Whether there is something to do; not where there was nothing for a while. Under the lock. */
static bool wait_for_work(struct pool *pool, struct waiting *self)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += IDLE_SECONDS;
	while (!pool->any()) {
		self->woken = false;
		self->next = pool->idle;
		pool->idle = self;
		int error = 0;
		while (!self->woken && !error)
			error = pthread_cond_timedwait(&self->wake, pool->lock, &until);
		if (!self->woken) {
			struct waiting **place = &pool->idle;
			while (*place != self)
				place = &(*place)->next;
			*place = self->next;
			return pool->any();
		}
	}
	return true;
}

static void *serve(void *given)
{
	struct start start = *(struct start *)given;
	struct pool *pool = start.pool;
	struct lane lane = {.buffer = start.buffer, .pipe = {-1, -1}};
	struct waiting self = {.woken = false};
	pthread_condattr_t attributes;
	free(given);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&self.wake, &attributes);
	pthread_condattr_destroy(&attributes);
	if (pool->begin)
		pool->begin();
	pthread_mutex_lock(pool->lock);
	while (wait_for_work(pool, &self)) {
		pool->take(&lane);
		pthread_mutex_lock(pool->lock);
	}
	pool->threads--;
	pthread_mutex_unlock(pool->lock);
	pthread_cond_destroy(&self.wake);
	reply_end(&lane);
	munmap(lane.buffer, MOST_READ_BYTES);
	return NULL;
}

/* With every signal blocked: they are for Python's main thread. */
static bool start_with(struct start *start)
{
	pthread_t thread;
	pthread_attr_t attributes;
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	bool started = pthread_create(&thread, &attributes, serve, start) == 0;
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	return started;
}

static bool start_thread(struct pool *pool)
{
	struct start *start = malloc(sizeof(*start));
	if (!start)
		return false;
	*start = (struct start){pool, mmap(NULL, MOST_READ_BYTES, PROT_READ | PROT_WRITE,
					   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0)};
	if (start->buffer != MAP_FAILED) {
		if (start_with(start)) {
			pool->threads++;
			return true;
		}
		munmap(start->buffer, MOST_READ_BYTES);
	}
	free(start);
	return false;
}

bool pool_wake(struct pool *pool, unsigned stuck)
{
	struct waiting *first = pool->idle;
	if (first) {
		pool->idle = first->next;
		first->woken = true;
		pthread_cond_signal(&first->wake);
		return true;
	}
	return pool->threads - stuck >= pool->most || start_thread(pool) || pool->threads > stuck;
}
