/* Threads for work that may wait long, of which there may be many at once. */
#ifndef MONARCHFS_POOL_H
#define MONARCHFS_POOL_H

#include "_reply.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Something that a thread is to do. It belongs to who made it, again once `run` is called. */
struct errand {
	struct errand *next, *previous;
	/* Called under the pool's lock, and returns so. */
	void (*run)(struct errand *errand, struct lane *lane);
};

/* What has it as a member. */
#define OF_ERRAND(errand, type, member) ((type *)((char *)(errand) - offsetof(type, member)))

struct worker;

/* Under `lock`, which is the caller's and guards his errands, too. */
struct pool {
	pthread_mutex_t *lock;
	/* Whether the first one may be begun; NULL: it may. */
	bool (*may)(const struct errand *first);
	/* What each thread does first, if anything. */
	void (*begin)(void);
	unsigned most; /* threads, but for those that are stuck */
	unsigned most_stuck;
	struct errand *first, *last; /* that no thread has begun */
	struct worker *idle, *working;
	unsigned threads, busy, stuck;
};

/* Whether there is any that no thread has begun. Also without the lock. */
bool pool_any(const struct pool *pool);

/* Have it done, behind all others. False where nobody will come: then it is not queued. */
bool pool_queue(struct pool *pool, struct errand *errand);

/* The same, but that somebody comes is up to pool_wake and pool_expire. */
void pool_add(struct pool *pool, struct errand *errand);

/* No thread has begun it: it is not to be done. */
void pool_withdraw(struct pool *pool, struct errand *errand);

/* Have a thread come and look, if one may begin; false where none will. */
bool pool_wake(struct pool *pool);

/* Threads that have been at an errand since before then are stuck: others do what they would have done
 * next. */
void pool_expire(struct pool *pool, uint64_t before_ns);

#endif
