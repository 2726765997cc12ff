/* Threads that take requests from the kernel, answer those about resident files, and queue the rest.
 *
 * They never hold the GIL: what Python does at the moment delays no open or read of what is local, a
 * disk that has to be waited for delays one thread, and reads run on as many cores as ask.
 *
 * What they may answer is what Python told _resident.c of. Whatever goes wrong (an unknown file, a
 * short read, an error of the disk) is left to Python, to which the request looks as if it had just
 * come.
 */
#define _GNU_SOURCE
#include "_relay.h"

#include "_backed.h"
#include "_bytes.h"
#include "_journal.h"
#include "_parking.h"
#include "_resident.h"
#include "_table.h"
#include "_unfinished.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define STACK_BYTES (512 * 1024) /* Python runs in them, too */
#define MOST_WAITING 3

/* Of each buffer for requests, so much is in memory before the first one comes (an extended
 * attribute's name is the longest that one has). The kernel ends a request with EIO that it cannot
 * copy to who takes it (fs/fuse/dev.c, fuse_dev_do_read); and for a process that was killed just
 * then it finds no new page any more (mm/gup.c), only those that are there. */
#define TOUCHED_BYTES (16 * 1024)

struct request {
	struct request *next;
	bool again;
	size_t length;
	char bytes[];
};

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static struct request *first, **last = &first;
static bool ended;
static int end_errno;

static int fuse_fd = -1, news_fd = -1;
static bool free_opens, opens_here = true;

static pthread_mutex_t idle_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t wanted = PTHREAD_COND_INITIALIZER;
static unsigned waiting, resting;
static uint64_t bounds_ns[MOST_BOUNDS];
static unsigned bounds;
static struct relay_counts counts;

/* -- answers */

uint64_t relay_now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

void relay_time(struct relay_times *times, uint64_t took_ns)
{
	unsigned bucket = 0;
	while (bucket < bounds && bounds_ns[bucket] < took_ns)
		bucket++;
	__atomic_fetch_add(&times->total_ns, took_ns, __ATOMIC_RELAXED);
	__atomic_fetch_add(&times->took[bucket], 1, __ATOMIC_RELAXED);
}

/* Fails where nobody waits any more: the caller was killed, the request was answered by an earlier
 * worker, or the mount has gone. */
static bool answer(uint64_t unique, int error, const void *body, size_t length)
{
	struct fuse_out_header out = {
		.len = (uint32_t)(sizeof(out) + length),
		.error = error,
		.unique = unique,
	};
	struct iovec parts[] = {{&out, sizeof(out)}, {(void *)body, length}};
	ssize_t sent;
	do {
		sent = writev(fuse_fd, parts, length ? 2 : 1);
	} while (sent < 0 && errno == EINTR);
	table_answered();
	return sent >= 0;
}

/* Whether the read is answered: all of it, but at the end of the file. (A short answer would cut
 * the file off for its reader.) */
static bool answer_read(const struct fuse_in_header *in, struct lane *lane, uint64_t started_ns)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	struct reading reading;
	if (!resident_enter(in->nodeid, arg->offset, &reading))
		return false;
	size_t size = 0;
	if (arg->offset < reading.size) {
		uint64_t rest = reading.size - arg->offset;
		size = rest < arg->size ? (size_t)rest : arg->size;
	}
	enum answered done =
		bytes_answer(lane, fuse_fd, in->unique, reading.fd, arg->offset, size, NULL, NULL);
	resident_leave(&reading);
	if (done == NOT_READ)
		return false;
	table_answered();
	if (done == ANSWERED) {
		__atomic_fetch_add(&counts.bytes, size, __ATOMIC_RELAXED);
		relay_time(&counts.reads, relay_now_ns() - started_ns);
	}
	return true;
}

static void put_last(const char *bytes, size_t length, bool again);

/* The kernel does not know of the open. Where Python does by now, it is told as by the kernel. */
static void unopened(uint64_t fh)
{
	struct {
		struct fuse_in_header in;
		struct fuse_release_in release;
	} end = {
		.in = {.len = sizeof(end), .opcode = FUSE_RELEASE},
		.release = {.fh = fh},
	};
	bool owned = false;
	table_end(fh, true, &owned);
	if (owned)
		put_last((const char *)&end, sizeof(end), false);
}

/* An open that an earlier worker may have answered is Python's. */
static bool answer_backed_open(const struct fuse_in_header *in, bool again, uint64_t started_ns)
{
	struct backed_open_out out = {.open_flags = OPEN_PASSTHROUGH};
	if (again || !backed_open(in->nodeid, in->unique, &out.fh, &out.backing_id))
		return false;
	if (answer(in->unique, 0, &out, sizeof(out)))
		relay_time(&counts.opens, relay_now_ns() - started_ns);
	else
		unopened(out.fh);
	return true;
}

static bool answer_open(const struct fuse_in_header *in, bool again, uint64_t started_ns)
{
	const struct fuse_open_in *arg = (const void *)(in + 1);
	if (free_opens)
		return answer(in->unique, -ENOSYS, NULL, 0), true;
	if ((arg->flags & O_ACCMODE) != O_RDONLY)
		return false;
	if (!__atomic_load_n(&opens_here, __ATOMIC_RELAXED))
		return answer_backed_open(in, again, started_ns);
	if (!resident_open(in->nodeid))
		return false;
	struct fuse_open_out out = {.open_flags = FOPEN_KEEP_CACHE};
	int added = table_add(in->nodeid, again ? in->unique | RESENT : in->unique, 0, 0, &out.fh);
	if (added >= 0) {
		if (answer(in->unique, 0, &out, sizeof(out)))
			relay_time(&counts.opens, relay_now_ns() - started_ns);
		else if (!added)
			table_end(out.fh, true, NULL); /* the kernel does not know of it */
	}
	resident_unuse(in->nodeid);
	return added >= 0;
}

/* Also of a handle that is not open: an earlier worker may have ended it. */
static bool answer_release(const struct fuse_in_header *in)
{
	const struct fuse_release_in *arg = (const void *)(in + 1);
	bool owned = true;
	table_end(arg->fh, true, &owned);
	return !owned && (answer(in->unique, 0, NULL, 0), true);
}

/* Whether it is answered, or will be. `lane`: NULL: reads are not answered. `again`: an earlier
 * worker has had it. */
static bool answer_any(const struct fuse_in_header *in, size_t length, struct lane *lane,
		       bool again, uint64_t started_ns)
{
	size_t body = length - sizeof(*in);
	switch (in->opcode) {
	case FUSE_READ:
		return lane && body >= sizeof(struct fuse_read_in) &&
		       (answer_read(in, lane, started_ns) ||
			unfinished_took(in, length, lane, started_ns));
	case FUSE_OPEN:
		return body >= sizeof(struct fuse_open_in) && answer_open(in, again, started_ns);
	case FUSE_RELEASE:
		return body >= sizeof(struct fuse_release_in) && answer_release(in);
	default:
		return false;
	}
}

bool relay_answered(const void *request, size_t length, bool again)
{
	const struct fuse_in_header *in = request;
	if (!answer_any(in, length, NULL, again, relay_now_ns()))
		return false;
	journal_done(in->unique);
	return true;
}

void relay_answer_opens(bool here)
{
	__atomic_store_n(&opens_here, here, __ATOMIC_RELAXED);
}

/* -- the queue */

static void tell(void)
{
	uint64_t one = 1;
	/* It cannot be full: it is written to when it was empty only. */
	while (write(news_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void put_last(const char *bytes, size_t length, bool again)
{
	struct request *request;
	while (!(request = malloc(sizeof(*request) + length)))
		poll(NULL, 0, 10); /* somebody waits for the answer: there is nothing better to do */
	request->next = NULL;
	request->length = length;
	request->again = again;
	memcpy(request->bytes, bytes, length);
	__atomic_fetch_add(&counts.queued, 1, __ATOMIC_RELAXED);
	pthread_mutex_lock(&queue_lock);
	bool news = !first;
	*last = request;
	last = &request->next;
	if (news)
		tell();
	pthread_mutex_unlock(&queue_lock);
}

static void put(const char *bytes, size_t length)
{
	if (parking_answered(bytes, length))
		return;
	if (((const struct fuse_in_header *)bytes)->opcode != FUSE_INTERRUPT)
		journal_keep(bytes, length);
	put_last(bytes, length, false);
}

static void put_left(const void *request, size_t length)
{
	put_last(request, length, true);
}

static void put_ahead(uint64_t ino, uint64_t first_chunk, uint64_t last)
{
	struct {
		struct fuse_in_header in;
		uint64_t chunks[2];
	} note = {
		.in = {.len = sizeof(note), .opcode = RELAY_AHEAD, .nodeid = ino},
		.chunks = {first_chunk, last},
	};
	put_last((const char *)&note, sizeof(note), false);
}

static void end(int error)
{
	pthread_mutex_lock(&queue_lock);
	if (!ended) {
		ended = true;
		end_errno = error;
		if (!first)
			tell();
	}
	pthread_mutex_unlock(&queue_lock);
}

void relay_again(void)
{
	journal_left(put_left);
}

long relay_next(void *buffer, int *ended_by, bool *again)
{
	pthread_mutex_lock(&queue_lock);
	struct request *request = first;
	long length = request ? (long)request->length : ended ? 0 : -EAGAIN;
	*ended_by = end_errno;
	*again = request && request->again;
	if (request) {
		first = request->next;
		if (!first)
			last = &first;
	}
	if (!first && !ended) {
		/* Nothing left: not readable until the next one. The end stays readable. */
		uint64_t count;
		if (read(news_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
			length = length > 0 ? length : -errno;
	}
	pthread_mutex_unlock(&queue_lock);
	if (request) {
		memcpy(buffer, request->bytes, request->length);
		free(request);
	}
	return length;
}

/* -- the threads */

/* Of the threads that have nothing to do, few wait for the kernel, which wakes the one that waits
 * longest: the others would take turns with them, each with a cold cache. */
static ssize_t take(char *buffer, size_t size)
{
	pthread_mutex_lock(&idle_lock);
	while (waiting >= MOST_WAITING) {
		resting++;
		pthread_cond_wait(&wanted, &idle_lock);
		resting--;
	}
	waiting++;
	pthread_mutex_unlock(&idle_lock);
	ssize_t got = read(fuse_fd, buffer, size);
	int error = errno;
	pthread_mutex_lock(&idle_lock);
	waiting--;
	/* Nobody rests once the end is known. */
	bool wake = resting && (!waiting || (got < 0 && error == ENODEV));
	pthread_mutex_unlock(&idle_lock);
	if (wake)
		pthread_cond_signal(&wanted);
	errno = error;
	return got;
}

static void *serve(void *number)
{
	unsigned thread = (unsigned)(uintptr_t)number;
	char *buffer = mmap(NULL, REQUEST_BYTES + MOST_READ_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED) {
		end(ENOMEM);
		return NULL;
	}
	char *request = journal_buffer(thread);
	const bool kept = request;
	const size_t most = kept ? JOURNAL_BUFFER_BYTES : REQUEST_BYTES;
	if (!kept)
		request = buffer;
	memset(request, 0, most < TOUCHED_BYTES ? most : TOUCHED_BYTES);
	struct lane lane = {.buffer = buffer + REQUEST_BYTES, .pipe = {-1, -1}};
	for (;;) {
		table_busy(thread, 0);
		ssize_t got = take(request, most);
		if (got < 0) {
			if (errno == EAGAIN) { /* somebody made the descriptor non-blocking */
				struct pollfd poller = {.fd = fuse_fd, .events = POLLIN};
				poll(&poller, 1, -1);
			} else if (errno != EINTR && errno != ENOENT) {
				/* ENOENT: the request was withdrawn while it was being read. */
				end(errno);
				break;
			}
			continue;
		}
		const struct fuse_in_header *in = (const void *)request;
		if ((size_t)got < sizeof(*in)) {
			end(EIO);
			break;
		}
		/* Nothing depends on what the kernel remembers, and no answer is expected. */
		if (in->opcode != FUSE_FORGET && in->opcode != FUSE_BATCH_FORGET) {
			uint64_t started_ns = relay_now_ns();
			table_busy(thread, started_ns);
			if (!answer_any(in, (size_t)got, &lane, false, started_ns))
				put(request, (size_t)got);
		}
		if (kept)
			journal_clear(request);
	}
	table_busy(thread, 0);
	bytes_end(&lane);
	munmap(buffer, REQUEST_BYTES + MOST_READ_BYTES);
	return NULL;
}

int relay_start(int fd, unsigned threads, unsigned waiting_reads, bool no_opens,
		const uint64_t *some_bounds_ns, unsigned some_bounds)
{
	if (news_fd >= 0)
		return -EALREADY;
	if (some_bounds > MOST_BOUNDS)
		return -EINVAL;
	bounds = some_bounds;
	memcpy(bounds_ns, some_bounds_ns, bounds * sizeof(*bounds_ns));
	int flags = fcntl(fd, F_GETFL);
	if (flags < 0 || fcntl(fd, F_SETFL, flags & ~O_NONBLOCK) < 0)
		return -errno;
	int news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (news < 0)
		return -errno;
	free_opens = no_opens;
	fuse_fd = fd;
	news_fd = news;
	relay_again();
	const struct unfinished_python python = {.leave = put_left, .ahead = put_ahead};
	unfinished_start(fd, waiting_reads, &python);

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
	if (!started) {
		fuse_fd = news_fd = -1;
		close(news);
		fcntl(fd, F_SETFL, flags);
		return -error;
	}
	return news;
}

void relay_count(struct relay_counts *to)
{
	const uint64_t *from = (const uint64_t *)&counts;
	for (size_t i = 0; i < sizeof(counts) / sizeof(*from); i++)
		((uint64_t *)to)[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}
