/* A pool of threads for calls that may block for long. */
#ifndef MONARCHFS_POOL_H
#define MONARCHFS_POOL_H

#include "_reply.h"

#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What a thread is to do. Its owner may free it or queue it again once `run` is called. */
struct task {
	struct task *next, *previous;
	uint32_t group; /* of process_group, or 0 */
	uint32_t round; /* see pool_add */
	/* Called with the pool's lock held, and returns with it held. */
	void (*run)(struct task *task, struct scratch *scratch);
};

/* The structure that has the task as a member. */
#define OF_TASK(task, type, member) ((type *)((char *)(task) - offsetof(type, member)))

struct worker;

#define POOL_GROUPS 64

/* Guarded by `lock`, which belongs to the caller and guards the caller's tasks, too. */
struct pool {
	pthread_mutex_t *lock;
	/* Whether the first task may begin; NULL: it always may. It changes nothing, and wakes no thread of this pool. */
	bool (*may)(const struct task *first);
	/* What each thread calls first; may be NULL. */
	void (*begin)(void);
	unsigned most; /* threads, not counting stuck ones */
	unsigned most_stuck;
	struct task *first, *last; /* the queue */
	uint32_t round;		   /* of the task that left it last */
	uint32_t rounds[POOL_GROUPS]; /* of each group's newest task */
	struct worker *idle, *working;
	unsigned threads, busy, stuck;
	bool asking; /* `may` is being asked */
};

/* Whether tasks are queued. Needs no lock. */
bool pool_any(const struct pool *pool);

/* The task group of who sent a request: its process group, which is a job's step, or what a shell has
 * started. Two groups may have the same number. */
uint32_t process_group(const struct fuse_in_header *in);

/* Queue a task behind those of its group, and in turn with other groups'. False if no thread can be had: then it is not queued. */
bool pool_queue(struct pool *pool, struct task *task);

/* Queue it without waking a thread: pool_wake and pool_expire do that. */
void pool_add(struct pool *pool, struct task *task);

/* Take a queued task out of the queue. */
void pool_withdraw(struct pool *pool, struct task *task);

/* Wake or start a thread if the first task may begin; false if no thread can be had. */
bool pool_wake(struct pool *pool);

/* Mark threads as stuck whose task began before then. Other threads do what they would have done next. */
void pool_expire(struct pool *pool, uint64_t before_ns);

#endif
