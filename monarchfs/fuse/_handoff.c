/* Requests that are answered while the event loop's thread waits for them.
 *
 * Who asks for one thing after the other (find, ls -l, an open for each file) asks for the next a few
 * microseconds after an answer. On its way to the event loop a request wakes first the thread that
 * takes it from the kernel, then the loop's, which has a turn of the loop to go: that is most of what
 * a look-up costs. So the loop's thread, when it has answered one, waits here for a moment; whoever
 * takes the next answers it with the same Python code, and nobody else is woken.
 *
 * It is as if the loop's thread did it: that stands still meanwhile, where it would have taken the
 * request itself, and `lock` lets one in at a time. What the code must not do is to wake tasks of
 * trio, which knows its own thread by name: so only requests that read what is known come here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_handoff.h"

#include "_counts.h"

#include <linux/fuse.h>

#include <poll.h>
#include <pthread.h>

/* So long is waited for the next. The kernel adds 50 us to it (PR_SET_TIMERSLACK). */
#define NEXT_NS 200000

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static handoff_answer answer_now; /* under `lock`; NULL: nobody is parked */
static unsigned answered; /* under `lock` */
static bool leaving; /* nobody may get in any more, so that the one who leaves does not starve */
static unsigned waiting; /* for `lock`, or have it, of those who want to answer */

/* No more wait for each other: the other threads answer reads meanwhile. */
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
	    in->opcode != FUSE_GETXATTR)
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
