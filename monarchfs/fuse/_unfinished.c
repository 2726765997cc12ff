/* Reads of files that are not resident: from the source, without Python. See _unfinished.h.
 *
 * The threads that take requests from the kernel must not wait for a parallel file system, which
 * may hang. So these reads have threads of their own: the one that was idle last takes the next
 * (its buffer is in the cache), another is started where none is, and they end when there is nothing
 * to do. A read that takes long becomes Python's, which knows what to do about a source that hangs;
 * the thread goes on hanging, and finds nobody to answer.
 *
 * Bytes are of the version that the file has after they were read: they are answered if that is
 * what it had when it was opened.
 */
#define _GNU_SOURCE
#include "_unfinished.h"

#include "_bytes.h"
#include "_journal.h"
#include "_table.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define BUCKETS 4096 /* a power of two */
#define STACK_BYTES (128 * 1024)
#define IDLE_SECONDS 5

/* So many threads may hang in the source; then all reads are Python's. */
#define MOST_STUCK 64

struct version {
	dev_t device;
	ino_t ino;
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
};

/* A file. Under `lock`, but for what is constant: all but the last three. */
struct file {
	struct file *next; /* in its bucket */
	uint64_t ino;
	int fd;
	struct version version;
	unsigned reads; /* under way */
	bool stopped, used;
};

/* A read. Under `lock`, but for what is constant: the file, when it came, and the request. */
struct job {
	struct job *next, *previous; /* of all, in the order in which they came */
	struct file *file;
	uint64_t started_ns;
	bool begun, left, answering;
	size_t length;
	char bytes[];
};

/* A thread that waits for its next read. */
struct idle {
	struct idle *next;
	pthread_cond_t wake;
	bool woken;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct file *buckets[BUCKETS];
static struct job *oldest, *newest, *next_job; /* `next_job`: the first that was not begun */
static struct idle *idle;
static unsigned threads, most_threads, stuck, moving;
static int fuse_fd = -1;
static void (*leave)(const void *, size_t);
static struct unfinished_counts counts;

static uint64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_MONOTONIC, &now);
	return (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
}

static int64_t ns_of(struct timespec time)
{
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static bool version_of(int fd, struct version *version)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return false;
	*version = (struct version){
		.device = st.st_dev,
		.ino = st.st_ino,
		.size = (uint64_t)st.st_size,
		.mtime_ns = ns_of(st.st_mtim),
		.ctime_ns = ns_of(st.st_ctim),
	};
	return true;
}

static bool same(const struct version *one, const struct version *other)
{
	return one->device == other->device && one->ino == other->ino && one->size == other->size &&
	       one->mtime_ns == other->mtime_ns && one->ctime_ns == other->ctime_ns;
}

/* -- files. Under `lock`; what is to be closed is returned, because closing may take long */

static struct file **find(uint64_t ino)
{
	struct file **place = &buckets[ino % BUCKETS];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

static int drop(struct file *file)
{
	int fd = file->fd;
	free(file);
	return fd;
}

static int stop(uint64_t ino)
{
	struct file **place = find(ino), *file = *place;
	if (!file)
		return -1;
	*place = file->next;
	file->stopped = true;
	return file->reads ? -1 : drop(file);
}

static int end_read(struct file *file)
{
	return --file->reads == 0 && file->stopped ? drop(file) : -1;
}

static void close_if(int fd)
{
	if (fd >= 0)
		close(fd);
}

bool unfinished_put(uint64_t ino, int fd, uint64_t size, int64_t mtime_ns, int64_t ctime_ns)
{
	struct version version;
	if (!most_threads || !version_of(fd, &version) || version.size != size ||
	    version.mtime_ns != mtime_ns || version.ctime_ns != ctime_ns)
		return false;
	int own = fcntl(fd, F_DUPFD_CLOEXEC, 0);
	if (own < 0)
		return false;
	struct file *file = malloc(sizeof(*file));
	if (!file) {
		close(own);
		return false;
	}
	/* The kernel may read ahead of a sequential reader. It is advice: not taken, it is slower. */
	(void)posix_fadvise(own, 0, 0, POSIX_FADV_NORMAL);
	pthread_mutex_lock(&lock);
	int to_close = stop(ino);
	struct file **bucket = &buckets[ino % BUCKETS];
	*file = (struct file){.next = *bucket, .ino = ino, .fd = own, .version = version};
	*bucket = file;
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return true;
}

void unfinished_stop(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	int to_close = stop(ino);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
}

bool unfinished_used(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct file *file = *find(ino);
	bool used = file && (file->used || file->reads);
	if (file)
		file->used = false;
	pthread_mutex_unlock(&lock);
	return used;
}

/* -- reads. Under `lock` */

static void append(struct job *job)
{
	job->next = NULL;
	job->previous = newest;
	*(newest ? &newest->next : &oldest) = job;
	newest = job;
	moving++;
	if (!next_job)
		next_job = job;
}

static void take_out(struct job *job)
{
	if (next_job == job)
		next_job = job->next;
	*(job->previous ? &job->previous->next : &oldest) = job->next;
	*(job->next ? &job->next->previous : &newest) = job->previous;
	if (job->left)
		stuck--;
	else
		moving--;
}

/* To Python. The descriptor to be closed, or -1. */
static int give_up(struct job *job)
{
	int to_close = -1;
	leave(job->bytes, job->length);
	if (job->begun) {
		job->left = true; /* its thread takes it out */
		moving--;
		stuck++;
	} else {
		take_out(job);
		to_close = end_read(job->file);
		free(job);
	}
	return to_close;
}

bool unfinished_leave(uint64_t unique)
{
	int to_close = -1;
	bool found = false;
	pthread_mutex_lock(&lock);
	for (struct job *job = oldest; job && !found; job = job->next)
		if (((const struct fuse_in_header *)job->bytes)->unique == unique && !job->left &&
		    !job->answering) {
			found = true;
			to_close = give_up(job);
			break;
		}
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return found;
}

unsigned unfinished_leave_older(uint64_t before_ns)
{
	pthread_mutex_lock(&lock);
	for (struct job *job = oldest, *next; job && job->started_ns < before_ns; job = next) {
		next = job->next;
		if (!job->left && !job->answering)
			close_if(give_up(job)); /* of a file that nobody reads: of no server's concern */
	}
	unsigned rest = moving;
	pthread_mutex_unlock(&lock);
	return rest;
}

/* -- the threads */

struct asked {
	struct job *job;
	uint64_t began_ns, read_ns;
};

/* Whether what was read is what was asked for, and somebody waits for it. */
static bool is_good(void *given)
{
	struct asked *asked = given;
	struct job *job = asked->job;
	struct version now;
	asked->read_ns = now_ns() - asked->began_ns;
	if (!version_of(job->file->fd, &now) || !same(&now, &job->file->version))
		return false;
	pthread_mutex_lock(&lock);
	job->answering = !job->left;
	pthread_mutex_unlock(&lock);
	return job->answering;
}

static void carry_out(struct job *job, struct lane *lane)
{
	const struct fuse_in_header *in = (const void *)job->bytes;
	const struct fuse_read_in *arg = (const void *)(in + 1);
	struct file *file = job->file;
	uint64_t rest = file->version.size - arg->offset;
	size_t size = rest < arg->size ? (size_t)rest : arg->size;
	struct asked asked = {.job = job, .began_ns = now_ns()};
	enum answered done = bytes_answer(lane, fuse_fd, in->unique, file->fd, arg->offset, size,
					  is_good, &asked);
	if (done != NOT_READ) {
		table_answered();
		journal_done(in->unique);
		__atomic_fetch_add(&counts.bytes, size, __ATOMIC_RELAXED);
		relay_time(&counts.reads, asked.read_ns);
		relay_time(&counts.answers, now_ns() - job->started_ns);
	}
	/* The mount's own pages have it now: not to be in memory twice. */
	(void)posix_fadvise(file->fd, (off_t)arg->offset, (off_t)size, POSIX_FADV_DONTNEED);
	pthread_mutex_lock(&lock);
	if (done == NOT_READ && !job->left)
		leave(job->bytes, job->length);
	take_out(job);
	int to_close = end_read(file);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	free(job);
}

/* The next read; NULL where there was nothing to do for a while. Under `lock`. */
static struct job *wait_for_job(struct idle *self)
{
	struct timespec until;
	clock_gettime(CLOCK_MONOTONIC, &until);
	until.tv_sec += IDLE_SECONDS;
	while (!next_job) {
		self->woken = false;
		self->next = idle;
		idle = self;
		int error = 0;
		while (!self->woken && !error)
			error = pthread_cond_timedwait(&self->wake, &lock, &until);
		if (!self->woken) {
			struct idle **place = &idle;
			while (*place != self)
				place = &(*place)->next;
			*place = self->next;
			if (!next_job)
				return NULL;
		}
	}
	struct job *job = next_job;
	next_job = job->next;
	job->begun = true;
	return job;
}

static void *serve(void *unused)
{
	(void)unused;
	struct lane lane = {.pipe = {-1, -1}};
	lane.buffer = mmap(NULL, MOST_READ_BYTES, PROT_READ | PROT_WRITE,
			   MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	struct idle self = {.woken = false};
	pthread_condattr_t attributes;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&self.wake, &attributes);
	pthread_condattr_destroy(&attributes);
	for (;;) {
		pthread_mutex_lock(&lock);
		struct job *job = lane.buffer == MAP_FAILED ? NULL : wait_for_job(&self);
		threads -= !job;
		pthread_mutex_unlock(&lock);
		if (!job)
			break;
		carry_out(job, &lane);
	}
	pthread_cond_destroy(&self.wake);
	bytes_end(&lane);
	if (lane.buffer != MAP_FAILED)
		munmap(lane.buffer, MOST_READ_BYTES);
	return NULL;
}

/* Signals are for Python's main thread: those who call this have them blocked, and so has what they
 * start. */
static bool start_thread(void)
{
	pthread_t thread;
	pthread_attr_t attributes;
	pthread_attr_init(&attributes);
	pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attributes, STACK_BYTES);
	bool started = pthread_create(&thread, &attributes, serve, NULL) == 0;
	pthread_attr_destroy(&attributes);
	threads += started;
	return started;
}

/* Have somebody carry out what waits. Under `lock`. False where there will be nobody. */
static bool wake_one(void)
{
	struct idle *self = idle;
	if (self) {
		idle = self->next;
		self->woken = true;
		pthread_cond_signal(&self->wake);
		return true;
	}
	return threads - stuck >= most_threads || start_thread() || threads > stuck;
}

bool unfinished_took(const void *request, size_t length, uint64_t started_ns)
{
	const struct fuse_in_header *in = request;
	const struct fuse_read_in *arg = (const void *)(in + 1);
	if (!most_threads)
		return false;
	struct job *job = NULL;
	pthread_mutex_lock(&lock);
	struct file *file = *find(in->nodeid);
	if (file && arg->offset < file->version.size && stuck < MOST_STUCK &&
	    (job = malloc(sizeof(*job) + length))) {
		*job = (struct job){.file = file, .started_ns = started_ns, .length = length};
		memcpy(job->bytes, request, length);
		append(job);
		if (wake_one()) {
			journal_keep(request, length);
			file->used = true;
			file->reads++;
		} else {
			take_out(job);
			free(job);
			job = NULL;
		}
	}
	pthread_mutex_unlock(&lock);
	return job;
}

int unfinished_start(int fd, unsigned some, void (*to_python)(const void *, size_t))
{
	pthread_mutex_lock(&lock);
	int result = most_threads ? -EALREADY : 0;
	if (!result) {
		fuse_fd = fd;
		leave = to_python;
		most_threads = some;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

void unfinished_count(struct unfinished_counts *to)
{
	const uint64_t *from = (const uint64_t *)&counts;
	for (size_t i = 0; i < sizeof(counts) / sizeof(*from); i++)
		((uint64_t *)to)[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}
