/* Threads of a pool, whose tasks are queued and withdrawn by others while some of them hang, for a
 * sanitizer. Argument: how many tasks each of those queues. */
#include "../../monarchfs/core/_pool.h"

#include "check.h"

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
		work.task.group = (uint32_t)rand_r(&seed);
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

/* The group of the task that is next in the queue, which is taken out. */
static uint32_t next_group(struct pool *queue)
{
	struct task *first = queue->first;
	CHECK(first);
	pool_withdraw(queue, first);
	return first->group;
}

/* One that wants a thing at a time is next but one, however many another one has in the queue. */
static void check_turns(void)
{
	static struct task greedy[1000], other[4], third;
	struct pool queue = {.lock = &lock, .round = UINT32_MAX - 500}; /* no threads; rounds wrap around */
	for (int i = 0; i < 1000; i++) {
		greedy[i].group = 1;
		pool_add(&queue, &greedy[i]);
	}
	for (int i = 0; i < 100; i++)
		CHECK(queue.first == &greedy[i] && next_group(&queue) == 1);
	for (int i = 0; i < 300; i++) {
		other[0] = (struct task){.group = 2};
		pool_add(&queue, &other[0]);
		if (next_group(&queue) == 1)
			CHECK(next_group(&queue) == 2);
	}
	/* With several at a time they are served in turn, and in order within a group. */
	unsigned left = 0;
	for (struct task *task = queue.first; task; task = task->next)
		left++;
	for (int i = 0; i < 4; i++) {
		other[i] = (struct task){.group = 2};
		pool_add(&queue, &other[i]);
	}
	third.group = 3;
	pool_add(&queue, &third);
	unsigned of[4] = {0};
	struct task *next_other = other;
	for (int i = 0; i < 10; i++) {
		if (queue.first->group == 2)
			CHECK(queue.first == next_other++);
		of[next_group(&queue)]++;
	}
	CHECK(of[2] == 4 && of[3] == 1 && of[1] == 5);
	for (unsigned i = 5; i < left; i++)
		CHECK(next_group(&queue) == 1);
	CHECK(!pool_any(&queue) && !queue.last);
}

static bool go_on;
static unsigned waiting, ran;

static void wait_to_go_on(struct task *task, struct scratch *scratch)
{
	(void)task;
	(void)scratch;
	waiting++;
	while (!go_on) {
		pthread_mutex_unlock(&lock);
		usleep(100);
		pthread_mutex_lock(&lock);
	}
	waiting--;
}

static void count_it(struct task *task, struct scratch *scratch)
{
	(void)task;
	(void)scratch;
	ran++;
}

static bool is(const unsigned *number, unsigned value)
{
	pthread_mutex_lock(&lock);
	bool same = *number == value;
	pthread_mutex_unlock(&lock);
	return same;
}

static void queue_at_once(struct task *task, void (*function)(struct task *, struct scratch *))
{
	*task = (struct task){.run = function};
	pthread_mutex_lock(&lock);
	CHECK(pool_queue(&pool, task));
	pthread_mutex_unlock(&lock);
}

/* All threads hang, until the last task is done. */
static void run_while_all_hang(void)
{
	struct task hanging[MOST], task;
	for (unsigned i = 0; i < MOST; i++)
		queue_at_once(&hanging[i], wait_to_go_on);
	WAIT_UNTIL(is(&waiting, MOST));
	queue_at_once(&task, count_it);
	pthread_mutex_lock(&lock);
	pool_expire(&pool, UINT64_MAX);
	pthread_mutex_unlock(&lock);
	WAIT_UNTIL(is(&ran, 1));
	pthread_mutex_lock(&lock);
	go_on = true;
	pthread_mutex_unlock(&lock);
	WAIT_UNTIL(is(&pool.busy, 0));
	CHECK(is(&waiting, 0));
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	check_turns();
	rounds = (unsigned)atoi(arguments[1]);
	pool = (struct pool){.lock = &lock, .most = MOST, .most_stuck = MOST_STUCK};
	pthread_t threads[QUEUERS];
	start_threads(threads, QUEUERS, be_queuer);
	while (__atomic_load_n(&ended, __ATOMIC_RELAXED) < QUEUERS) {
		pthread_mutex_lock(&lock);
		pool_expire(&pool, monotonic_ns() - 1000000);
		CHECK(pool.stuck <= MOST_STUCK && pool.stuck <= pool.busy);
		stuck += pool.stuck;
		pthread_mutex_unlock(&lock);
		usleep(500);
	}
	join_threads(threads, QUEUERS);
	pthread_mutex_lock(&lock);
	CHECK(done + withdrawn == QUEUERS * rounds && done && stuck);
	CHECK(!pool_any(&pool) && !pool.stuck && pool.threads <= MOST + MOST_STUCK);
	pthread_mutex_unlock(&lock);
	run_while_all_hang();
	puts("done");
	fflush(stdout);
	_exit(0);
}
