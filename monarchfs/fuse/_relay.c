/* Threads that take requests from the kernel, answer reads of resident files, and queue the rest.
 *
 * They never hold the GIL: what Python does at the moment delays no read of what is local, a disk
 * that has to be waited for delays one thread, and reads run on as many cores as ask.
 *
 * What they may answer is what Python added: a handle of the kernel's, and a descriptor of a complete
 * replica. Whatever goes wrong (an unknown handle, a short read, an error of the disk) is left to
 * Python, to which the request looks as if it had just come.
 */
#define _GNU_SOURCE
#include "_relay.h"

#include "_parking.h"

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

/* The largest read that the kernel asks for: FUSE_MAX_MAX_PAGES (fs/fuse/fuse_i.h). */
#define MOST_READ_BYTES (256 * 4096)
#define STACK_BYTES (512 * 1024) /* Python runs in them, too */
#define FIRST_BUCKETS 1024

/* Of each buffer for requests, so much is in memory before the first one comes (an extended
 * attribute's name is the longest that one has). The kernel ends a request with EIO that it cannot
 * copy to who takes it (fs/fuse/dev.c, fuse_dev_do_read); and for a process that was killed just
 * then it finds no new page any more (mm/gup.c), only those that are there. */
#define TOUCHED_BYTES (16 * 1024)

/* A replica. Under `lock`: fd, handles, reads (under way), forgotten. */
struct file {
	int given_fd; /* Python's, which may close it as soon as the last handle is removed */
	int fd; /* ours; -1: closed, because it was forgotten */
	uint64_t size;
	unsigned handles, reads;
	bool forgotten;
	struct file *next;
};

struct handle {
	uint64_t fh;
	struct file *file;
	struct handle *next;
};

struct request {
	struct request *next;
	size_t length;
	char bytes[];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct handle **handles; /* by fh, which Python gives out in sequence */
static size_t buckets, handle_count;
static struct file **files; /* by given_fd */
static size_t file_buckets;

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static struct request *first, **last = &first;
static bool ended;
static int end_errno;

static int fuse_fd = -1, news_fd = -1;
static uint64_t bounds_ns[MOST_BOUNDS];
static unsigned bounds;
static struct relay_counts counts;

/* -- handles */

static struct file **file_place(int given_fd)
{
	struct file **place = &files[(size_t)given_fd % file_buckets];
	while (*place && ((*place)->given_fd != given_fd || (*place)->forgotten))
		place = &(*place)->next;
	return place;
}

/* Under `lock`. */
static void tidy(struct file *file)
{
	if (file->reads || (file->handles && !file->forgotten))
		return;
	/* Also with handles left: somebody waits for the room that it takes. */
	if (file->fd >= 0)
		close(file->fd);
	file->fd = -1;
	if (file->handles)
		return;
	struct file **place = &files[(size_t)file->given_fd % file_buckets];
	while (*place != file)
		place = &(*place)->next;
	*place = file->next;
	free(file);
}

static struct handle **handle_place(uint64_t fh)
{
	struct handle **place = &handles[fh & (buckets - 1)];
	while (*place && (*place)->fh != fh)
		place = &(*place)->next;
	return place;
}

static void grow(void)
{
	struct handle **more = calloc(2 * buckets, sizeof(*more));
	if (!more)
		return; /* longer chains, that is all */
	for (size_t i = 0; i < buckets; i++) {
		for (struct handle *handle = handles[i], *next; handle; handle = next) {
			next = handle->next;
			struct handle **place = &more[handle->fh & (2 * buckets - 1)];
			handle->next = *place;
			*place = handle;
		}
	}
	free(handles);
	handles = more;
	buckets *= 2;
}

static int add(uint64_t fh, int fd, uint64_t size)
{
	if (!handles) {
		handles = calloc(FIRST_BUCKETS, sizeof(*handles));
		files = calloc(FIRST_BUCKETS, sizeof(*files));
		if (!handles || !files) {
			free(handles);
			free(files);
			handles = NULL;
			return -ENOMEM;
		}
		buckets = file_buckets = FIRST_BUCKETS;
	}
	if (*handle_place(fh))
		return -EEXIST;
	struct handle *handle = malloc(sizeof(*handle));
	if (!handle)
		return -ENOMEM;
	struct file **place = file_place(fd);
	if (!*place) {
		struct file *file = malloc(sizeof(*file));
		int own = file ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : -1;
		if (own < 0) {
			int error = file ? errno : ENOMEM;
			free(file);
			free(handle);
			return -error;
		}
		*file = (struct file){.given_fd = fd, .fd = own, .size = size};
		*place = file;
	}
	(*place)->handles++;
	*handle = (struct handle){.fh = fh, .file = *place};
	if (++handle_count > buckets)
		grow();
	struct handle **end = handle_place(fh);
	*end = handle;
	return 0;
}

int relay_add(uint64_t fh, int fd, uint64_t size)
{
	pthread_mutex_lock(&lock);
	int result = add(fh, fd, size);
	pthread_mutex_unlock(&lock);
	return result;
}

void relay_remove(uint64_t fh)
{
	pthread_mutex_lock(&lock);
	struct handle **place = handles ? handle_place(fh) : NULL;
	if (place && *place) {
		struct handle *handle = *place;
		*place = handle->next;
		handle_count--;
		handle->file->handles--;
		tidy(handle->file);
		free(handle);
	}
	pthread_mutex_unlock(&lock);
}

void relay_forget(int fd)
{
	pthread_mutex_lock(&lock);
	struct file *file = handles ? *file_place(fd) : NULL;
	if (file) {
		file->forgotten = true;
		tidy(file);
	}
	pthread_mutex_unlock(&lock);
}

static struct file *enter(uint64_t fh)
{
	pthread_mutex_lock(&lock);
	struct handle *handle = handles ? *handle_place(fh) : NULL;
	struct file *file = handle && !handle->file->forgotten ? handle->file : NULL;
	if (file)
		file->reads++;
	pthread_mutex_unlock(&lock);
	return file;
}

static void leave(struct file *file)
{
	pthread_mutex_lock(&lock);
	file->reads--;
	tidy(file);
	pthread_mutex_unlock(&lock);
}

/* -- answers */

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static void count(size_t size, uint64_t took_ns)
{
	unsigned bucket = 0;
	while (bucket < bounds && bounds_ns[bucket] < took_ns)
		bucket++;
	__atomic_fetch_add(&counts.reads, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&counts.bytes, size, __ATOMIC_RELAXED);
	__atomic_fetch_add(&counts.total_ns, took_ns, __ATOMIC_RELAXED);
	__atomic_fetch_add(&counts.took[bucket], 1, __ATOMIC_RELAXED);
}

static bool read_all(int fd, char *to, size_t size, uint64_t offset)
{
	while (size) {
		ssize_t got = pread(fd, to, size, (off_t)offset);
		if (got <= 0) {
			if (got < 0 && errno == EINTR)
				continue;
			return false;
		}
		to += got;
		size -= (size_t)got;
		offset += (size_t)got;
	}
	return true;
}

/* Whether the read is answered: all of it, but at the end of the file. (A short answer would cut
 * the file off for its reader.) */
static bool answer_read(const struct fuse_in_header *in, char *data)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	uint64_t started_ns = now_ns();
	struct file *file = enter(arg->fh);
	if (!file)
		return false;
	size_t size = 0;
	if (arg->offset < file->size) {
		uint64_t rest = file->size - arg->offset;
		size = rest < arg->size ? (size_t)rest : arg->size;
	}
	struct fuse_out_header out = {
		.len = (uint32_t)(sizeof(out) + size),
		.unique = in->unique,
	};
	/* Not by splice(2): from a page cache to the kernel it was no faster than two copies. */
	bool done = size <= MOST_READ_BYTES && read_all(file->fd, data, size, arg->offset);
	leave(file);
	if (!done)
		return false;
	struct iovec parts[] = {{&out, sizeof(out)}, {data, size}};
	/* Fails where nobody waits any more: the reader was killed, or the mount has gone. */
	if (writev(fuse_fd, parts, size ? 2 : 1) >= 0)
		count(size, now_ns() - started_ns);
	return true;
}

/* -- the queue */

static void tell(void)
{
	uint64_t one = 1;
	/* It cannot be full: it is written to when it was empty only. */
	while (write(news_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void put(const char *bytes, size_t length)
{
	if (parking_answered(bytes, length))
		return;
	struct request *request;
	while (!(request = malloc(sizeof(*request) + length)))
		poll(NULL, 0, 10); /* somebody waits for the answer: there is nothing better to do */
	request->next = NULL;
	request->length = length;
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

long relay_next(void *buffer, int *ended_by)
{
	pthread_mutex_lock(&queue_lock);
	struct request *request = first;
	long length = request ? (long)request->length : ended ? 0 : -EAGAIN;
	*ended_by = end_errno;
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

static void *serve(void *unused)
{
	(void)unused;
	char *buffer = mmap(NULL, REQUEST_BYTES + MOST_READ_BYTES, PROT_READ | PROT_WRITE,
			    MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (buffer == MAP_FAILED) {
		end(ENOMEM);
		return NULL;
	}
	memset(buffer, 0, TOUCHED_BYTES);
	for (;;) {
		ssize_t got = read(fuse_fd, buffer, REQUEST_BYTES);
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
		const struct fuse_in_header *in = (const void *)buffer;
		if ((size_t)got < sizeof(*in)) {
			end(EIO);
			break;
		}
		/* Nothing depends on what the kernel remembers, and no answer is expected. */
		if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET)
			continue;
		if (in->opcode != FUSE_READ ||
		    (size_t)got < sizeof(*in) + sizeof(struct fuse_read_in) ||
		    !answer_read(in, buffer + REQUEST_BYTES))
			put(buffer, (size_t)got);
	}
	munmap(buffer, REQUEST_BYTES + MOST_READ_BYTES);
	return NULL;
}

int relay_start(int fd, unsigned threads, const uint64_t *some_bounds_ns, unsigned some_bounds)
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
	fuse_fd = fd;
	news_fd = news;

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
		error = pthread_create(&thread, &attributes, serve, NULL);
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
