/* See _revalidate.h.
 *
 * The source is asked by name, in the directory: so a file that was replaced is found out. A file is taken to be
 * unchanged if its attributes are, but for its atime; Python enters no name whose ctime is too young for that.
 *
 * The answer of the source is compared with what is known by then. That is not forgotten before the request is
 * answered (_names.c). So nothing is answered that Python has had forgotten. */
#define _GNU_SOURCE
#include "_revalidate.h"

#include "_directories.h"
#include "_journal.h"
#include "_names.h"
#include "_opens.h"
#include "_queue.h"
#include "_reply.h"
#include "_waiting.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

/* A request that waits. Constant but for the waiter and the last two, which `source_lock` guards. */
struct question {
	struct waiter waiter;
	struct task task;
	struct name name;
	struct directory *directory;
	bool asking; /* a thread is at the source */
	bool left; /* Python has the request by now */
};

static bool started;
static dev_t source_device;

void revalidate_start(uint64_t device)
{
	source_device = (dev_t)device;
	started = true;
}

/* The name to ask about; false if there is none. */
static bool name_of(const struct fuse_in_header *in, size_t length, struct name *name)
{
	size_t body = length - sizeof(*in);
	if (in->opcode == FUSE_OPEN)
		return opens_ask(in) && names_of_ino(in->nodeid, name);
	const char *asked = (const char *)(in + 1);
	if (in->opcode != FUSE_LOOKUP || body < 2 || body > sizeof(name->bytes) || asked[body - 1])
		return false;
	name->parent = in->nodeid;
	name->length = body - 1;
	memcpy(name->bytes, asked, body);
	return names_asked_about(name);
}

/* Whether the request is answered, now that the source said this. */
static bool answer(const struct question *question, const struct stat *st)
{
	const struct fuse_in_header *in = question->waiter.request;
	struct fuse_entry_out out;
	if (st->st_dev != source_device || !names_enter_same(&question->name, st, &out))
		return false;
	bool done = true;
	if (in->opcode == FUSE_OPEN)
		done = out.nodeid == in->nodeid && opens_answer_checked(in, question->waiter.started_ns);
	else if (reply_with(in->unique, BY_SOURCE, 0, &out, sizeof(out)))
		reply_time(TIME_LOOKUP_SOURCE, BY_SOURCE, question->waiter.started_ns);
	names_leave();
	return done;
}

/* As task.run. */
static void ask(struct task *task, struct scratch *scratch)
{
	struct question *question = OF_TASK(task, struct question, task);
	const struct fuse_in_header *in = question->waiter.request;
	(void)scratch;
	question->asking = true;
	pthread_mutex_unlock(&source_lock);
	uint64_t began_ns = monotonic_ns();
	struct stat st;
	int error;
	do
		error = fstatat(question->directory->fd, question->name.bytes, &st, AT_SYMLINK_NOFOLLOW) ? errno : 0;
	while (error == EINTR);
	counts_time(TIME_STAT, monotonic_ns() - began_ns);
	pthread_mutex_lock(&source_lock);
	directory_leave(question->directory);
	if (!question->left) {
		waiter_take(&question->waiter);
		pthread_mutex_unlock(&source_lock);
		if (!error && answer(question, &st))
			journal_done(in->unique);
		else
			queue_leave(in, question->waiter.length);
		pthread_mutex_lock(&source_lock);
	}
	free(question);
}

/* As waiter.left. */
static void left(struct waiter *waiter)
{
	struct question *question = (struct question *)waiter;
	question->left = true;
	if (question->asking)
		return; /* that thread frees it */
	pool_withdraw(&stat_threads, &question->task);
	directory_leave(question->directory);
	free(question);
}

/* Under `source_lock`. */
static bool enqueue(const struct name *name, const struct fuse_in_header *in, size_t length, bool kept,
		     uint64_t started_ns)
{
	bool hangs = stat_threads.stuck >= stat_threads.most_stuck;
	struct directory *directory = hangs ? NULL : directories_of(name->parent);
	struct question *question = directory ? waiter_new(sizeof(*question), in, length, started_ns) : NULL;
	if (!question)
		return false;
	question->waiter.left = left;
	question->task = (struct task){.run = ask, .group = process_group(in)};
	question->name = *name;
	question->directory = directory;
	question->asking = question->left = false;
	if (!pool_queue(&stat_threads, &question->task)) {
		free(question);
		return false;
	}
	directory_use(directory);
	waiter_add(&question->waiter, kept);
	return true;
}

bool revalidate_took(const void *request, size_t length, bool kept, uint64_t started_ns)
{
	const struct fuse_in_header *in = request;
	struct name name;
	if (!started || !name_of(in, length, &name))
		return false;
	pthread_mutex_lock(&source_lock);
	bool took = enqueue(&name, in, length, kept, started_ns);
	pthread_mutex_unlock(&source_lock);
	return took;
}
