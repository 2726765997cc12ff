/* Threads of a pool, whose tasks are queued and withdrawn by others while some of them hang, for a
 * sanitizer. Argument: how many tasks each of those queues. */
#define _GNU_SOURCE
#include "../../monarchfs/fuse/_pool.h"

#include "check.h"

#include <sched.h>
#include <unistd.h>

#define QUEUERS 6
#define MOST 4
#define MOST_STUCK 6

/* Under `lock`. */
struct work {
	struct task task;
	bool hangs;
	enum { QUEUED, BEGUN, DONE } state;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool pool;
static unsigned rounds, at_work, done, withdrawn, stuck, ended;

static void run(struct task *task, struct scratch *scratch)
{
	struct work *work = OF_TASK(task, struct work, task);
	CHECK(work->state == QUEUED && scratch->buffer);
	work->state = BEGUN;
	CHECK(++at_work - pool.stuck <= MOST);
	bool hangs = work->hangs;
	pthread_mutex_unlock(&lock);
	scratch->buffer[0] = 1;
	if (hangs)
		usleep(3000);
	pthread_mutex_lock(&lock);
	at_work--;
	done++;
	work->state = DONE;
}

/* Every other round it withdraws what no thread has begun. */
static void *be_queuer(void *number)
{
	unsigned seed = (unsigned)(uintptr_t)number;
	for (unsigned round = 0; round < rounds; round++) {
		struct work work = {.task = {.run = run}, .hangs = rand_r(&seed) % 16 == 0};
		pthread_mutex_lock(&lock);
		CHECK(pool_queue(&pool, &work.task));
		if (round % 2 && work.state == QUEUED) {
			pthread_mutex_unlock(&lock);
			sched_yield();
			pthread_mutex_lock(&lock);
		}
		if (round % 2 && work.state == QUEUED) {
			pool_withdraw(&pool, &work.task);
			work.state = DONE;
			withdrawn++;
		}
		while (work.state != DONE) {
			pthread_mutex_unlock(&lock);
			usleep(20);
			pthread_mutex_lock(&lock);
		}
		pthread_mutex_unlock(&lock);
	}
	__atomic_add_fetch(&ended, 1, __ATOMIC_RELAXED);
	return NULL;
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	rounds = (unsigned)atoi(arguments[1]);
	pool = (struct pool){.lock = &lock, .most = MOST, .most_stuck = MOST_STUCK};
	pthread_t threads[QUEUERS];
	for (uintptr_t i = 0; i < QUEUERS; i++)
		CHECK(pthread_create(&threads[i], NULL, be_queuer, (void *)(i + 1)) == 0);
	while (__atomic_load_n(&ended, __ATOMIC_RELAXED) < QUEUERS) {
		pthread_mutex_lock(&lock);
		pool_expire(&pool, monotonic_ns() - 1000000);
		CHECK(pool.stuck <= MOST_STUCK && pool.stuck <= pool.busy);
		stuck += pool.stuck;
		pthread_mutex_unlock(&lock);
		usleep(500);
	}
	for (int i = 0; i < QUEUERS; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	pthread_mutex_lock(&lock);
	CHECK(done + withdrawn == QUEUERS * rounds && done && stuck);
	CHECK(!pool_any(&pool) && !pool.stuck && pool.threads <= MOST + MOST_STUCK);
	pthread_mutex_unlock(&lock);
	puts("done");
	fflush(stdout);
	_exit(0);
}
