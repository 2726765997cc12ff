/* Threads for work that may wait long, of which there may be many at once. */
#ifndef MONARCHFS_POOL_H
#define MONARCHFS_POOL_H

#include "_reply.h"

#include <pthread.h>
#include <stdbool.h>

struct waiting;

/* One that nobody else changes. `lock` is the caller's, and guards what there is to do, too. */
struct pool {
	pthread_mutex_t *lock;
	/* Whether there is anything to do. Under `lock`. */
	bool (*any)(void);
	/* Do one such thing: called under `lock`, which is released when it returns. */
	void (*take)(struct lane *lane);
	/* What each does first, if anything. */
	void (*begin)(void);
	unsigned most;
	unsigned threads;
	struct waiting *idle;
};

/* Have one of them come and look. Under its lock. `stuck` of them are not to be counted on. False where
 * nobody will come. */
bool pool_wake(struct pool *pool, unsigned stuck);

#endif
