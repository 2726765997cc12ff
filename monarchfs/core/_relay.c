/* Threads that take requests from the kernel, answer those about resident files, and queue the rest.
 *
 * They never hold the GIL. So Python delays no open or read of a local file, a slow disk delays one thread, and
 * reads run on as many cores as there are readers.
 *
 * They answer for the files in _resident.c. If anything goes wrong (an unknown file, a short read, an error of
 * the disk), the request is left to Python, to which it looks as if it had just come.
 *
 * A read may wait for a slow disk. Two of the threads never do: they take all other requests. When all the
 * others are at reads, further reads are put off until one of those ends. If none ends for a while, they get
 * threads of their own (_pool.c).
 */
#define _GNU_SOURCE
#include "_relay.h"

#include "_absent_xattrs.h"
#include "_reply.h"
#include "_journal.h"
#include "_handoff.h"
#include "_opens.h"
#include "_pool.h"
#include "_queue.h"
#include "_resident.h"
#include "_revalidate.h"
#include "_table.h"
#include "_nonresident.h"

#include "_misses.h"
#include "_names.h"
#include "_waiting.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define STACK_BYTES (512 * 1024) /* Python runs in them, too */
#define MOST_WAITING 3
#define NO_READERS 2 /* of the threads */
#define MOST_MORE_READERS 64
#define AHEAD_BYTES (128 * 1024) /* as far as the kernel reads ahead unless told otherwise */
#define STALLED_NS 100000000 /* a read that was put off for so long gets a thread of its own */

/* How much of each request buffer is in memory before the first request (an extended attribute's name is the
 * longest that one has). The kernel ends a request with EIO that it cannot copy to the thread that takes it
 * (fs/fuse/dev.c, fuse_dev_do_read). And if the process has just been killed, the kernel finds no new page
 * for it any more (mm/gup.c), only those that are there. */
#define TOUCHED_BYTES (16 * 1024)

/* A read that was put off. */
struct read {
	struct task task;
	uint64_t started_ns;
	size_t length;
	char bytes[];
};

static pthread_mutex_t reads_lock = PTHREAD_MUTEX_INITIALIZER;
static struct pool readers = {.lock = &reads_lock, .most = MOST_MORE_READERS};
static unsigned reading, most_reading; /* threads that are at a read; how many may be */

static int fuse_fd = -1;
static bool free_opens;

static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;
static unsigned waiting, resting;

/* -- answers */

/* Answer a read in full, or up to the end of the file; true if it is answered. (To its reader a short answer
 * would be the end of the file.) */
static bool answer_read(const struct fuse_in_header *in, struct scratch *scratch, uint64_t started_ns)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	struct reading reading;
	if (!resident_enter(in->nodeid, arg->offset, &reading))
		return false;
	const struct read_reply reply = {
		.unique = in->unique,
		.started_ns = started_ns,
		.counted = TIME_READ_LOCAL,
		.by = BY_TIER,
		.fd = reading.fd,
		.offset = reading.start + arg->offset,
		.size = reply_size(arg, reading.size),
	};
	bool answered = reply_from(scratch, &reply);
	resident_leave(&reading);
	return answered;
}

/* A handle that is not open is answered, too: an earlier worker may have ended it. */
static bool answer_release(const struct fuse_in_header *in)
{
	const struct fuse_release_in *arg = (const void *)(in + 1);
	bool owned = true;
	uint64_t ino = table_end(arg->fh, true, &owned);
	if (ino)
		misses_released(ino);
	return !owned && (reply_with(in->unique, BY_MEMORY, 0, NULL, 0), true);
}

/* Answer a look-up of a known name, which ends with a zero. */
static bool answer_lookup(const struct fuse_in_header *in, size_t body, uint64_t started_ns)
{
	const char *name = (const char *)(in + 1);
	struct fuse_entry_out out;
	if (!body || name[body - 1] || !names_enter(in->nodeid, name, body - 1, &out))
		return false;
	if (reply_with(in->unique, BY_MEMORY, 0, &out, sizeof(out)))
		reply_time(TIME_LOOKUP, BY_MEMORY, started_ns);
	names_leave();
	return true;
}

/* Answer for a file that does not have the attribute. The name ends with a zero. */
static bool answer_getxattr(const struct fuse_in_header *in, size_t body)
{
	const char *name = (const char *)(in + 1) + sizeof(struct fuse_getxattr_in);
	if (body <= sizeof(struct fuse_getxattr_in) ||
	    !memchr(name, 0, body - sizeof(struct fuse_getxattr_in)))
		return false;
	int error = absent_errno(in->nodeid, name);
	return error && (reply_with(in->unique, BY_MEMORY, -error, NULL, 0), true);
}

/* Take any request: true if it is answered, or will be. If `scratch` is NULL, requests that would have to wait
 * are not taken. `again`: an earlier worker had it. */
static bool answer_any(const struct fuse_in_header *in, size_t length, struct scratch *scratch,
		       bool again, uint64_t started_ns)
{
	size_t body = length - sizeof(*in);
	switch (in->opcode) {
	case FUSE_READ:
		return scratch && body >= sizeof(struct fuse_read_in) &&
		       (answer_read(in, scratch, started_ns) ||
			nonresident_took(in, length, scratch, started_ns) ||
			misses_took(in, length, false, started_ns));
	case FUSE_OPEN:
		if (body < sizeof(struct fuse_open_in))
			return false;
		if (free_opens) /* the kernel sends no more */
			return reply_with(in->unique, BY_KERNEL, -ENOSYS, NULL, 0), true;
		return opens_answer(in, again, started_ns);
	case FUSE_RELEASE:
		return body >= sizeof(struct fuse_release_in) && answer_release(in);
	case FUSE_LOOKUP:
		return answer_lookup(in, body, started_ns);
	case FUSE_GETXATTR:
		return answer_getxattr(in, body);
	case FUSE_IOCTL: /* there are none; the kernel does not remember ENOSYS, and isatty(3) asks at each open() of Python */
		return reply_with(in->unique, BY_MEMORY, -ENOTTY, NULL, 0), true;
	default:
		return false;
	}
}

/* Take a request about which the source has to be asked. `kept`: the journal has it. */
static bool asks_source(const struct fuse_in_header *in, size_t length, bool kept, uint64_t started_ns)
{
	return (in->opcode == FUSE_OPEN && misses_took(in, length, kept, started_ns)) ||
	       revalidate_took(in, length, kept, started_ns);
}

bool relay_answered(const void *request, size_t length, enum queued_after past)
{
	const struct fuse_in_header *in = request;
	uint64_t started_ns = monotonic_ns();
	if (answer_any(in, length, NULL, past == TAKEN, started_ns)) {
		journal_done(in->unique);
		return true;
	}
	/* What waits there stays in the journal. */
	return past == NEW && (asks_source(in, length, true, started_ns) ||
			       (in->opcode == FUSE_READ && misses_took(in, length, true, started_ns)));
}

/* -- what is left to Python */

static void put(const char *bytes, size_t length)
{
	if (handoff_answered(bytes, length))
		return;
	if (((const struct fuse_in_header *)bytes)->opcode != FUSE_INTERRUPT)
		journal_keep(bytes, length);
	queue_put(bytes, length, NEW);
}

static void put_again(const void *request, size_t length)
{
	queue_put(request, length, TAKEN);
}

/* -- reads for more threads */

/* As task.run. */
static void take_read(struct task *task, struct scratch *scratch)
{
	struct read *read = OF_TASK(task, struct read, task);
	const struct fuse_in_header *in = (const void *)read->bytes;
	pthread_mutex_unlock(&reads_lock);
	if (answer_read(in, scratch, read->started_ns))
		journal_done(in->unique);
	else if (!nonresident_took(in, read->length, scratch, read->started_ns) &&
		 !misses_took(in, read->length, false, read->started_ns))
		put(read->bytes, read->length);
	free(read);
	pthread_mutex_lock(&reads_lock);
}

static void put_off(const char *bytes, size_t length, uint64_t started_ns)
{
	struct read *read = queue_new(sizeof(*read), length);
	*read = (struct read){
		.task = {.run = take_read}, .started_ns = started_ns, .length = length};
	memcpy(read->bytes, bytes, length);
	journal_keep(bytes, length);
	pthread_mutex_lock(&reads_lock);
	pool_add(&readers, &read->task);
	pthread_mutex_unlock(&reads_lock);
}

/* Called after each decrement of `reading`: begin reads that were put off, as far as more are allowed. A thread
 * that puts a read off stores it before it looks at `reading`. A thread that ends one looks for such reads
 * after the decrement. So one of them sees the other. */
static void read_on(struct scratch *scratch)
{
	while (pool_any(&readers)) {
		bool may = __atomic_add_fetch(&reading, 1, __ATOMIC_SEQ_CST) <= most_reading;
		pthread_mutex_lock(&reads_lock);
		struct task *first = may ? readers.first : NULL;
		if (first) {
			pool_withdraw(&readers, first);
			first->run(first, scratch);
		}
		pthread_mutex_unlock(&reads_lock);
		if (__atomic_sub_fetch(&reading, 1, __ATOMIC_SEQ_CST) >= most_reading)
			break;
	}
}

/* Begin them in threads of their own if no read ends in time. */
static void give_threads_to_reads(void)
{
	pthread_mutex_lock(&reads_lock);
	uint64_t stalled_ns = monotonic_ns() - STALLED_NS;
	for (struct task *task = readers.first;
	     task && OF_TASK(task, struct read, task)->started_ns < stalled_ns &&
	     pool_wake(&readers);)
		task = task->next;
	pthread_mutex_unlock(&reads_lock);
}

static void read_or_put(const char *request, size_t length, struct scratch *scratch, uint64_t started_ns)
{
	const struct fuse_in_header *in = (const void *)request;
	if (__atomic_add_fetch(&reading, 1, __ATOMIC_SEQ_CST) > most_reading)
		put_off(request, length, started_ns);
	else if (!answer_any(in, length, scratch, false, started_ns))
		put(request, length);
	__atomic_sub_fetch(&reading, 1, __ATOMIC_SEQ_CST);
	read_on(scratch);
}

/* Who has opened a file will read it. The disk begins while that request is on its way. */
static void read_ahead(uint64_t ino, struct scratch *scratch)
{
	struct reading ahead;
	if (__atomic_add_fetch(&reading, 1, __ATOMIC_SEQ_CST) <= most_reading &&
	    resident_enter(ino, 0, &ahead)) {
		readahead(ahead.fd, (off_t)ahead.start, ahead.size < AHEAD_BYTES ? ahead.size : AHEAD_BYTES);
		resident_leave(&ahead);
	}
	__atomic_sub_fetch(&reading, 1, __ATOMIC_SEQ_CST);
	read_on(scratch);
}

/* The kernel has dropped inodes, and with them their pages. No answer is expected. */
static void forget(const struct fuse_in_header *in, size_t body)
{
	const struct fuse_batch_forget_in *batch = (const void *)(in + 1);
	const struct fuse_forget_one *one = (const void *)(batch + 1);
	if (in->opcode == FUSE_FORGET)
		resident_forgotten(in->nodeid);
	else
		for (; body >= sizeof(*batch) + sizeof(*one); body -= sizeof(*one))
			resident_forgotten((one++)->nodeid);
}

void relay_again(void)
{
	give_threads_to_reads();
	journal_left(false, put_again);
}

/* -- the threads */

/* Few idle threads wait for the kernel. It wakes the one that has waited longest, so all of them would take
 * turns, each with a cold cache. A thread that answers a request at once counts as waiting meanwhile: the
 * process that it answers may run before this thread is back, and its next request would wake another
 * thread, and in the end all of them. */
static void begin_waiting(void)
{
	pthread_mutex_lock(&idle_lock);
	while (waiting >= MOST_WAITING) {
		resting++;
		pthread_cond_wait(&wanted, &idle_lock);
		resting--;
	}
	waiting++;
	pthread_mutex_unlock(&idle_lock);
}

/* `ends`: no thread sleeps once the mount's end is known. */
static void end_waiting(bool ends)
{
	pthread_mutex_lock(&idle_lock);
	waiting--;
	bool wake = resting && (!waiting || ends);
	pthread_mutex_unlock(&idle_lock);
	if (wake)
		pthread_cond_signal(&wanted);
}

static void *serve(void *number)
{
	unsigned thread = (unsigned)(uintptr_t)number;
	char *buffer = mmap(NULL, REQUEST_BYTES + MOST_READ_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED) {
		queue_end(ENOMEM);
		return NULL;
	}
	char *request = journal_buffer(put_again);
	const bool kept = request;
	const size_t most = kept ? JOURNAL_BUFFER_BYTES : REQUEST_BYTES;
	if (!kept)
		request = buffer;
	memset(request, 0, most < TOUCHED_BYTES ? most : TOUCHED_BYTES);
	struct scratch scratch = {.buffer = buffer + REQUEST_BYTES, .pipe = {-1, -1}};
	bool waits = false;
	for (;;) {
		table_busy(thread, 0);
		if (!waits)
			begin_waiting();
		waits = true;
		ssize_t got = read(fuse_fd, request, most);
		if (got < 0) {
			if (errno == EAGAIN) { /* somebody made the descriptor non-blocking */
				struct pollfd poller = {.fd = fuse_fd, .events = POLLIN};
				poll(&poller, 1, -1);
			} else if (errno != EINTR && errno != ENOENT) {
				/* ENOENT: the request was withdrawn while it was being read. */
				queue_end(errno);
				break;
			}
			continue;
		}
		if (kept)
			journal_taken(request);
		const struct fuse_in_header *in = (const void *)request;
		if ((size_t)got < sizeof(*in)) {
			queue_end(EIO);
			break;
		}
		if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET) {
			forget(in, (size_t)got - sizeof(*in));
		} else {
			uint64_t started_ns = monotonic_ns();
			table_busy(thread, started_ns);
			if (recording())
				record_request(in, (size_t)got, started_ns);
			bool reads = in->opcode == FUSE_READ &&
				     (size_t)got >= sizeof(*in) + sizeof(struct fuse_read_in);
			bool done = !reads && (answer_any(in, (size_t)got, NULL, false, started_ns) ||
					       asks_source(in, (size_t)got, false, started_ns));
			bool ahead = done && in->opcode == FUSE_OPEN && !free_opens &&
				     resident_cold(in->nodeid);
			if (!done || ahead) {
				end_waiting(false);
				waits = false;
				if (ahead)
					read_ahead(in->nodeid, &scratch);
				else if (reads)
					read_or_put(request, (size_t)got, &scratch, started_ns);
				else
					put(request, (size_t)got);
			}
		}
		if (kept)
			journal_clear(request);
	}
	table_busy(thread, 0);
	end_waiting(true);
	reply_end(&scratch);
	munmap(buffer, REQUEST_BYTES + MOST_READ_BYTES);
	return NULL;
}

int relay_start(int fd, unsigned threads, unsigned waiting_reads, bool no_opens)
{
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
		return -errno;
	int news = queue_start();
	if (news < 0)
		return news;
	most_reading = threads > NO_READERS ? threads - NO_READERS : 1;
	free_opens = no_opens;
	fuse_fd = fd;
	reply_start(fd);
	journal_left(true, put_again);
	waiting_start(waiting_reads);
	misses_serve(no_opens);

	sigset_t all, before; /* signals are for Python's main thread */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	int error = 0;
	unsigned started = 0;
	for (; started < threads; started++) {
		pthread_t thread;
		error = pthread_create(&thread, &attributes, serve, (void *)(uintptr_t)started);
		if (error)
			break;
	}
	pthread_attr_destroy(&attributes);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (!started)
		fcntl(fd, F_SETFL, flags);
	return started ? news : -error;
}
