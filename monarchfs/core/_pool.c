/* A pool of threads for calls that may block for long. See _pool.h.
 *
 * The thread that became idle last is woken first, because its buffer is in the CPU's cache. If none is
 * idle, another one is started. A thread ends when it was idle for IDLE_SECONDS.
 *
 * Groups take turns, so that one with many requests does not make another one wait for all of them. A task is of
 * the round after that of its group's newest one, or of the present round if its group has nothing queued. The
 * queue is in the order of rounds (start-time fair queueing).
 *
 * The rule for `may`: it only looks. It changes nothing, and nobody wakes a pool from within its `may`: waking takes
 * threads from the list of idle ones, and so would whoever has asked. What makes room for a task does so before it wakes
 * the pool. Each thread is in one of the two lists, or on its way from one to the other: it was woken or has not
 * begun. Builds without NDEBUG, those of tests/c, check both.
 */
#define _GNU_SOURCE
#include "_pool.h"

#include "_counts.h"

#include <assert.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

/* 24 KiB of it are used where a peer is asked over TLS, of which the handshake takes 9 (libcurl, OpenSSL 3.0). */
#define STACK_BYTES (128 * 1024)
#define IDLE_SECONDS 5

/* No group has so many tasks in the queue. Rounds wrap around. */
#define MOST_AHEAD (1u << 20)

/* A thread, in one of the two lists. */
struct worker {
	struct worker *next;
	pthread_cond_t wake;
	bool woken;
	bool stuck;
	uint64_t began_ns; /* its present task */
};

/* The argument of a new thread. */
struct start {
	struct pool *pool;
	char *buffer;
};

/* -- tasks */

bool pool_any(const struct pool *pool)
{
	return __atomic_load_n(&pool->first, __ATOMIC_SEQ_CST);
}

static void set_first(struct pool *pool, struct task *task)
{
	__atomic_store_n(&pool->first, task, __ATOMIC_SEQ_CST);
}

void pool_add(struct pool *pool, struct task *task)
{
	uint32_t *newest = &pool->rounds[task->group % POOL_GROUPS];
	task->round = *newest = *newest - pool->round < MOST_AHEAD ? *newest + 1 : pool->round;
	struct task *previous = pool->last;
	while (previous && (int32_t)(previous->round - task->round) > 0)
		previous = previous->previous;
	task->previous = previous;
	task->next = previous ? previous->next : pool->first;
	*(task->next ? &task->next->previous : &pool->last) = task;
	if (previous)
		previous->next = task;
	else
		set_first(pool, task);
}

void pool_withdraw(struct pool *pool, struct task *task)
{
	if (task->previous) {
		task->previous->next = task->next;
	} else {
		pool->round = task->round;
		set_first(pool, task->next);
	}
	*(task->next ? &task->next->previous : &pool->last) = task->previous;
}

uint32_t process_group(const struct fuse_in_header *in)
{
	/* The kernel names the thread; 0: it is not in our process namespace. */
	return in->pid ? (uint32_t)getpgid((pid_t)in->pid) : 0;
}

bool pool_queue(struct pool *pool, struct task *task)
{
	pool_add(pool, task);
	if (pool_wake(pool))
		return true;
	pool_withdraw(pool, task);
	return false;
}

/* Whether a thread may begin the first task. */
static bool may_begin(struct pool *pool)
{
	if (!pool->first || pool->busy - pool->stuck >= pool->most)
		return false;
	if (!pool->may)
		return true;
	pool->asking = true;
	bool may = pool->may(pool->first);
	pool->asking = false;
	return may;
}

/* -- threads */

static void leave_list(struct worker **place, const struct worker *self)
{
	while (*place != self)
		place = &(*place)->next;
	*place = self->next;
}

/* Whether both lists have an end, and all threads in them are there. Under the lock. */
static __attribute__((unused)) bool is_sound(const struct pool *pool)
{
	unsigned idle = 0, working = 0;
	for (const struct worker *worker = pool->idle; worker; worker = worker->next)
		if (++idle > pool->threads || worker->woken)
			return false;
	for (const struct worker *worker = pool->working; worker; worker = worker->next)
		if (++working > pool->busy)
			return false;
	return working == pool->busy && idle + working <= pool->threads;
}

/* Wait until a task may begin. False after IDLE_SECONDS without one. Under the lock. */
static bool wait_for_work(struct pool *pool, struct worker *self)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += IDLE_SECONDS;
	while (!may_begin(pool)) {
		self->woken = false;
		self->next = pool->idle;
		pool->idle = self;
		assert(is_sound(pool));
		int error = 0;
		while (!self->woken && !error)
			error = pthread_cond_timedwait(&self->wake, pool->lock, &until);
		if (!self->woken) {
			leave_list(&pool->idle, self);
			return may_begin(pool);
		}
	}
	return true;
}

/* Under the lock. */
static void do_first(struct pool *pool, struct worker *self, struct scratch *scratch)
{
	struct task *task = pool->first;
	pool_withdraw(pool, task);
	self->began_ns = monotonic_ns();
	self->next = pool->working;
	pool->working = self;
	pool->busy++;
	task->run(task, scratch);
	leave_list(&pool->working, self);
	pool->busy--;
	pool->stuck -= self->stuck;
	self->stuck = false;
}

static void *serve(void *given)
{
	struct start start = *(struct start *)given;
	struct pool *pool = start.pool;
	struct scratch scratch = {.buffer = start.buffer, .pipe = {-1, -1}};
	struct worker self = {.woken = false};
	pthread_condattr_t attributes;
	free(given);
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&self.wake, &attributes);
	pthread_condattr_destroy(&attributes);
	if (pool->begin)
		pool->begin();
	pthread_mutex_lock(pool->lock);
	while (wait_for_work(pool, &self))
		do_first(pool, &self, &scratch);
	pool->threads--;
	pthread_mutex_unlock(pool->lock);
	pthread_cond_destroy(&self.wake);
	reply_end(&scratch);
	munmap(scratch.buffer, MOST_READ_BYTES);
	return NULL;
}

/* All signals are blocked in the new thread: they are for Python's main thread. */
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

bool pool_wake(struct pool *pool)
{
	assert(!pool->asking && is_sound(pool));
	if (!may_begin(pool))
		return true; /* a thread that ends its task, or whoever makes room, begins it */
	struct worker *first = pool->idle;
	if (first) {
		pool->idle = first->next;
		first->woken = true;
		assert(is_sound(pool));
		pthread_cond_signal(&first->wake);
		return true;
	}
	return pool->threads - pool->stuck >= pool->most || start_thread(pool) ||
	       pool->threads > pool->stuck;
}

void pool_expire(struct pool *pool, uint64_t before_ns)
{
	unsigned places = 1; /* there may have been no thread before */
	for (struct worker *worker = pool->working; worker; worker = worker->next) {
		if (!worker->stuck && worker->began_ns < before_ns &&
		    pool->stuck < pool->most_stuck) {
			worker->stuck = true;
			pool->stuck++;
			places++;
		}
	}
	while (places--)
		(void)pool_wake(pool);
}
