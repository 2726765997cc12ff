/* Requests that another thread answers in place of the event loop's.
 *
 * A program that asks for one thing after the other (find, ls -l, an open for each file) sends its next request
 * a few microseconds after an answer. A request for the event loop wakes the thread that takes it from the
 * kernel, then the loop's thread, and then waits for a turn of the loop: that is most of the cost of a
 * look-up. So when the loop's thread has answered a request, it waits here for a moment. Meanwhile the thread
 * that takes the next request answers it with the same Python code, and no other thread is woken.
 *
 * To that code it is as if the loop's thread ran it: that thread stands still where it would have taken the
 * request itself, and `lock` admits one thread at a time. The code must not wake tasks of trio, which
 * compares the thread: so only requests that read what is known come here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_handoff.h"

#include "_counts.h"

#include <linux/fuse.h>

#include <poll.h>
#include <pthread.h>

/* How long to wait for the next request. Between two look-ups a program may open, read and close a file, which
 * other threads answer. The kernel adds 50 us (PR_SET_TIMERSLACK). */
#define NEXT_NS 600000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static handoff_answer answer_now; /* under `lock`; NULL: nobody is parked */
static unsigned answered; /* under `lock` */
static bool leaving; /* no thread is admitted any more, so that the loop's thread does not starve */
static unsigned waiting; /* threads that want to answer, and wait for `lock` or hold it */

/* No more threads wait for `lock`: the others answer reads meanwhile. */
#define MOST_WAITING 3

bool handoff_wait(handoff_answer answer, int news_fd, uint64_t until_ns)
{
	struct pollfd news = {.fd = news_fd, .events = POLLIN};
	const struct timespec next = {.tv_nsec = NEXT_NS};
	int ready;
	Py_BEGIN_ALLOW_THREADS
	pthread_mutex_lock(&lock);
	answer_now = answer;
	for (unsigned before = answered - 1; before != answered && monotonic_ns() < until_ns;) {
		before = answered;
		pthread_mutex_unlock(&lock);
		ready = ppoll(&news, 1, &next, NULL);
		__atomic_store_n(&leaving, true, __ATOMIC_RELAXED);
		pthread_mutex_lock(&lock);
		__atomic_store_n(&leaving, false, __ATOMIC_RELAXED);
		if (ready)
			break; /* something is queued, or a signal came */
	}
	answer_now = NULL;
	pthread_mutex_unlock(&lock);
	ready = poll(&news, 1, 0); /* it may have been queued since */
	Py_END_ALLOW_THREADS
	return ready > 0;
}

bool handoff_answered(const void *request, size_t length)
{
	static __thread PyThreadState *state;
	const struct fuse_in_header *in = request;
	if (in->opcode != FUSE_LOOKUP && in->opcode != FUSE_GETATTR && in->opcode != FUSE_OPENDIR &&
	    in->opcode != FUSE_READDIRPLUS && in->opcode != FUSE_RELEASEDIR &&
	    in->opcode != FUSE_GETXATTR && in->opcode != FUSE_ACCESS)
		return false;
	if (__atomic_load_n(&leaving, __ATOMIC_RELAXED))
		return false;
	bool done = false;
	if (__atomic_add_fetch(&waiting, 1, __ATOMIC_RELAXED) <= MOST_WAITING) {
		pthread_mutex_lock(&lock);
		if (answer_now) {
			if (!state)
				state = PyThreadState_New(PyInterpreterState_Main());
			PyEval_AcquireThread(state);
			done = answer_now(request, length);
			PyEval_ReleaseThread(state);
			answered += done;
		}
		pthread_mutex_unlock(&lock);
	}
	__atomic_sub_fetch(&waiting, 1, __ATOMIC_RELAXED);
	return done;
}
