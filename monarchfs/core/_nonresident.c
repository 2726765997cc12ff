/* Reads of files that are not resident (yet), without Python. See _nonresident.h.
 *
 * The threads that take requests from the kernel must not wait for a parallel file system, which may hang. So
 * reads of the source have threads of their own (core/_waiting.h), and reads of chunks that are being fetched
 * wait without a thread. If a read is left to Python while a thread is reading for it, that thread answers
 * nothing. No other thread calls the source: these threads also close its descriptors.
 *
 * Bytes of the source belong to the version that the file has after they were read. They are the answer if the
 * file had the same version when it was opened.
 */
#define _GNU_SOURCE
#include "_nonresident.h"

#include "_journal.h"
#include "_queue.h"

#include "_waiting.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BUCKETS 4096 /* a power of two */

/* See drop_pages. */
#define LAG_BYTES (4 << 20)

/* How many pieces one read may need: those of units have 256 KiB. */
#define MOST_PIECES (MOST_READ_BYTES / (256 << 10) + 1)

/* Of the file that a descriptor stands for: its number and its device do not change. */
struct version {
	uint64_t size;
	int64_t mtime_ns, ctime_ns;
};

/* Bytes in memory. `source_lock` guards the first member and the last two; the others are constant. A read may
 * need several consecutive pieces. */
struct piece {
	struct piece *next; /* of the file */
	uint64_t start;
	size_t size;
	const char *data;
	void (*release)(void *);
	void *token;
	unsigned users;
	bool over;
};

/* Under `source_lock`. Descriptors and their version do not change once they are there. */
struct file {
	struct file *next; /* in its bucket */
	struct task closing;
	uint64_t ino, size;
	int source_fd, part_fd; /* -1: none (yet) */
	struct version version; /* of the source */
	bool direct; /* missing chunks may be read from the source */
	uint64_t read_to, dropped_to; /* by a sequential reader */
	uint64_t chunk_bytes, chunks, ahead;
	char *states; /* of chunks; NULL: all are missing */
	struct piece *pieces;
	struct waiter *parked;
	unsigned reads; /* under way */
	bool stopped, used;
};

enum place {
	PARKED, /* another thread fetches its bytes */
	QUEUED, /* for a thread */
	BEGUN, /* by one */
	LEFT, /* left to Python after a thread had begun */
};

/* A read. Guarded by `source_lock`, except for the file and the range, which are constant. */
struct job {
	struct waiter waiter;
	struct task task;
	struct file *file;
	uint64_t offset;
	size_t size;
	enum place place;
	bool of_part; /* reads the part file; else the source */
	bool parked; /* was it ever */
	struct piece *pieces[MOST_PIECES]; /* from which it is answered */
	unsigned piece_count;
};

static struct file *buckets[BUCKETS];

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
		.size = (uint64_t)st.st_size,
		.mtime_ns = ns_of(st.st_mtim),
		.ctime_ns = ns_of(st.st_ctim),
	};
	return true;
}

static bool same(const struct version *one, const struct version *other)
{
	return one->size == other->size && one->mtime_ns == other->mtime_ns &&
	       one->ctime_ns == other->ctime_ns;
}

/* -- files. Under `source_lock`, like everything up to the threads */

static struct file **find(uint64_t ino)
{
	struct file **place = &buckets[ino % BUCKETS];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

static void destroy(struct file *file)
{
	if (file->source_fd >= 0) {
		(void)posix_fadvise(file->source_fd, 0, 0, POSIX_FADV_DONTNEED);
		close(file->source_fd);
	}
	if (file->part_fd >= 0)
		close(file->part_fd);
	free(file->states);
	free(file);
}

/* Runs in one of the threads, because closing may take long. */
static void close_file(struct task *task, struct scratch *scratch)
{
	(void)scratch;
	pthread_mutex_unlock(&source_lock);
	destroy(OF_TASK(task, struct file, closing));
	pthread_mutex_lock(&source_lock);
}

static void put_away(struct piece *piece)
{
	piece->release(piece->token);
	free(piece);
}

/* No further reads are answered from the pieces with bytes of [start, end). */
static void end_pieces(struct file *file, uint64_t start, uint64_t end)
{
	struct piece **place = &file->pieces, *piece;
	while ((piece = *place)) {
		if (piece->start >= end || piece->start + piece->size <= start) {
			place = &piece->next;
			continue;
		}
		*place = piece->next;
		piece->over = true;
		if (!piece->users)
			put_away(piece);
	}
}

static struct piece *find_piece(const struct file *file, uint64_t at)
{
	struct piece *piece = file->pieces;
	while (piece && (at < piece->start || at >= piece->start + piece->size))
		piece = piece->next;
	return piece;
}

/* Let a read use the pieces that have all of its bytes. False if there are none. */
static bool find_pieces(struct job *job)
{
	uint64_t at = job->offset, end = job->offset + job->size;
	for (job->piece_count = 0; at < end; job->piece_count++) {
		struct piece *piece =
			job->piece_count < MOST_PIECES ? find_piece(job->file, at) : NULL;
		job->pieces[job->piece_count < MOST_PIECES ? job->piece_count : 0] = piece;
		if (!piece) {
			job->piece_count = 0;
			return false;
		}
		at = piece->start + piece->size;
	}
	for (unsigned n = 0; n < job->piece_count; n++)
		job->pieces[n]->users++;
	return true;
}

static void leave_piece(struct piece *piece)
{
	if (--piece->users == 0 && piece->over)
		put_away(piece);
}

static void leave_pieces(const struct job *job)
{
	for (unsigned n = 0; n < job->piece_count; n++)
		leave_piece(job->pieces[n]);
}

static struct file *make(uint64_t ino, uint64_t size)
{
	struct file **place = find(ino), *file = *place;
	if (file || !source_threads.most)
		return file;
	file = malloc(sizeof(*file));
	if (file) {
		*file = (struct file){
			.ino = ino, .size = size, .source_fd = -1, .part_fd = -1, .ahead = NO_CHUNK};
		*place = file;
	}
	return file;
}

static void end_read(struct file *file)
{
	if (--file->reads || !file->stopped)
		return;
	if (file->source_fd < 0 && file->part_fd < 0) {
		destroy(file);
		return;
	}
	file->closing.run = close_file;
	pool_add(&source_threads, &file->closing);
	(void)pool_wake(&source_threads); /* else waiting_leave_older */
}

/* -- reads */

static void unpark(struct job *job)
{
	struct waiter **place = &job->file->parked;
	while (*place != &job->waiter)
		place = &(*place)->next;
	*place = job->waiter.next;
}

/* As waiter.left. */
static void left(struct waiter *waiter)
{
	struct job *job = (struct job *)waiter;
	if (job->place == BEGUN) {
		job->place = LEFT; /* its thread frees it */
		return;
	}
	if (job->place == QUEUED)
		pool_withdraw(&source_threads, &job->task);
	else
		unpark(job);
	end_read(job->file);
	free(job);
}

static void give_up(struct job *job)
{
	waiter_leave(&job->waiter);
	left(&job->waiter);
}

/* -- the threads */

struct asked {
	struct job *job;
	uint64_t began_ns, read_ns;
};

static struct read_reply answer_to(const struct job *job)
{
	const struct file *file = job->file;
	return (struct read_reply){
		.unique = job->waiter.request->unique,
		.started_ns = job->waiter.started_ns,
		.counted = TIME_READ_SOURCE,
		.by = job->parked ? BY_WAITED : job->of_part ? BY_TIER : BY_SOURCE,
		.fd = job->of_part ? file->part_fd : file->source_fd,
		.offset = job->offset,
		.size = job->size,
	};
}

/* Whether the bytes are the right ones, and a process still waits for them. */
static bool is_good(void *given)
{
	struct asked *asked = given;
	struct job *job = asked->job;
	struct version now;
	asked->read_ns = monotonic_ns() - asked->began_ns;
	if (!job->of_part &&
	    (!version_of(job->file->source_fd, &now) || !same(&now, &job->file->version)))
		return false;
	pthread_mutex_lock(&source_lock);
	bool wanted = job->place == BEGUN;
	if (wanted)
		waiter_take(&job->waiter);
	pthread_mutex_unlock(&source_lock);
	return wanted;
}

/* Drop pages of the source that were read: the mount's own pages have the bytes now, and they should not be in
 * memory twice. A reader's requests overtake each other here. For a late one the kernel would read ahead again
 * what an earlier one has dropped, so pages are dropped some way behind. */
static void drop_pages(const struct job *job)
{
	struct file *file = job->file;
	uint64_t end = job->offset + job->size, from = job->offset, to = end;
	pthread_mutex_lock(&source_lock);
	if (from + LAG_BYTES >= file->read_to && from <= file->read_to + LAG_BYTES) {
		file->read_to = end > file->read_to ? end : file->read_to;
		from = file->dropped_to;
		to = file->read_to > LAG_BYTES ? file->read_to - LAG_BYTES : 0;
		if (to < from + MOST_READ_BYTES)
			to = from; /* more at once costs less */
		file->dropped_to = to;
	} else {
		file->read_to = file->dropped_to = end;
	}
	pthread_mutex_unlock(&source_lock);
	if (from < to)
		(void)posix_fadvise(file->source_fd, (off_t)from, (off_t)(to - from),
				    POSIX_FADV_DONTNEED);
}

static void count_source(const struct job *job, uint64_t took_ns)
{
	counts_add(COUNT_SOURCE_BYTES, job->size);
	counts_time(TIME_SOURCE, took_ns);
}

/* As task.run. */
static void carry_out(struct task *task, struct scratch *scratch)
{
	struct job *job = OF_TASK(task, struct job, task);
	struct asked asked = {.job = job, .began_ns = monotonic_ns()};
	struct read_reply reply = answer_to(job);
	reply.good = is_good;
	reply.arg = &asked;
	job->place = BEGUN;
	pthread_mutex_unlock(&source_lock);
	bool answered = reply_from(scratch, &reply);
	if (answered)
		journal_done(reply.unique);
	if (answered && !job->of_part) {
		count_source(job, asked.read_ns);
		drop_pages(job);
	}
	pthread_mutex_lock(&source_lock);
	if (!answered && job->place == BEGUN)
		waiter_leave(&job->waiter);
	end_read(job->file);
	free(job);
}

/* -- for the threads that take requests */

static bool in_state(const struct job *job, enum chunk_state state, bool all)
{
	const struct file *file = job->file;
	uint64_t last = (job->offset + job->size - 1) / file->chunk_bytes;
	for (uint64_t chunk = job->offset / file->chunk_bytes; chunk <= last; chunk++)
		if ((file->states[chunk] == (char)state) != all)
			return !all;
	return all;
}

static bool all_are(const struct job *job, enum chunk_state state)
{
	return in_state(job, state, true);
}

static bool some_are(const struct job *job, enum chunk_state state)
{
	return in_state(job, state, false);
}

/* Whether missing bytes are being fetched or written: some of a read's bytes may be in the part file, and the others
 * still in memory. */
static bool will_be_there(const struct job *job)
{
	return !some_are(job, CHUNK_MISSING) &&
	       (some_are(job, CHUNK_CLAIMED) || some_are(job, CHUNK_ARRIVED));
}

/* Whether a read can be answered here, and from what. Under `source_lock`. */
static bool is_ours(struct job *job)
{
	const struct file *file = job->file;
	job->place = QUEUED;
	job->of_part = false;
	if (!file->states)
		return file->direct && !source_hangs();
	job->of_part = file->part_fd >= 0 && all_are(job, CHUNK_PRESENT);
	if (job->of_part || find_pieces(job))
		return true;
	if (file->direct && !source_hangs() && all_are(job, CHUNK_MISSING))
		return true;
	job->place = PARKED;
	return will_be_there(job);
}

/* Note once that a reader has come this far. Python then says from which chunk on to note again. Under
 * `source_lock`. */
static void look_ahead(const struct job *job)
{
	struct file *file = job->file;
	if (file->ahead == NO_CHUNK || !file->states)
		return;
	uint64_t last = (job->offset + job->size - 1) / file->chunk_bytes + 1;
	if (last >= file->ahead) {
		file->ahead = NO_CHUNK;
		queue_note_ahead(file->ino, job->offset / file->chunk_bytes, last);
	}
}

static void answer_from_memory(const struct job *job)
{
	struct iovec parts[1 + MOST_PIECES];
	uint64_t at = job->offset, end = job->offset + job->size;
	for (unsigned n = 0; n < job->piece_count; n++) {
		const struct piece *piece = job->pieces[n];
		uint64_t stop = piece->start + piece->size < end ? piece->start + piece->size : end;
		parts[1 + n] = (struct iovec){(void *)(piece->data + (at - piece->start)), stop - at};
		at = stop;
	}
	reply_bytes(job->waiter.request->unique, job->parked ? BY_WAITED : BY_MEMORY, parts,
		    (int)(1 + job->piece_count), job->waiter.started_ns);
}

/* The thread that takes a request reads local chunks itself. True if the read is answered. */
static bool read_here(const struct job *job, struct scratch *scratch)
{
	bool answered = true;
	if (job->piece_count) {
		answer_from_memory(job);
	} else {
		const struct read_reply reply = answer_to(job);
		answered = reply_from(scratch, &reply);
	}
	if (answered)
		journal_done(job->waiter.request->unique);
	pthread_mutex_lock(&source_lock);
	leave_pieces(job);
	end_read(job->file);
	pthread_mutex_unlock(&source_lock);
	return answered;
}

/* Under `source_lock`. */
static bool keep(const struct job *like)
{
	const struct waiter *of = &like->waiter;
	struct job *job = waiter_new(sizeof(*job), of->request, of->length, of->started_ns);
	if (!job)
		return false;
	const struct waiter waiter = job->waiter;
	*job = *like;
	job->waiter = waiter;
	job->waiter.left = left;
	job->task.run = carry_out;
	job->task.group = process_group(of->request);
	job->parked = job->place == PARKED;
	if (job->parked) {
		job->waiter.next = job->file->parked;
		job->file->parked = &job->waiter;
	} else if (!pool_queue(&source_threads, &job->task)) {
		free(job);
		return false;
	}
	waiter_add(&job->waiter, false);
	return true;
}

bool nonresident_took(const void *request, size_t length, struct scratch *scratch, uint64_t started_ns)
{
	const struct fuse_in_header *in = request;
	const struct fuse_read_in *arg = (const void *)(in + 1);
	if (!source_threads.most || !arg->size)
		return false;
	struct job job = {
		.waiter = {.started_ns = started_ns, .request = request, .length = length},
		.offset = arg->offset,
	};
	bool here = false;
	pthread_mutex_lock(&source_lock);
	job.file = *find(in->nodeid);
	bool took = job.file && arg->offset < job.file->size;
	if (took) {
		job.size = reply_size(arg, job.file->size);
		took = is_ours(&job);
	}
	if (took) {
		look_ahead(&job);
		here = job.of_part || job.piece_count;
		took = here || keep(&job);
	}
	if (took) {
		job.file->used = true;
		job.file->reads++;
	}
	pthread_mutex_unlock(&source_lock);
	return here ? read_here(&job, scratch) : took;
}

/* -- for Python */

/* Under `source_lock`. Go on with parked reads of the chunks [first, last), or leave them to Python. */
static void look_at_parked(struct file *file, uint64_t first, uint64_t last)
{
	for (struct waiter *waiter = file->parked, *next; waiter; waiter = next) {
		struct job *job = (struct job *)waiter;
		next = waiter->next;
		if (job->offset >= last * file->chunk_bytes ||
		    job->offset + job->size <= first * file->chunk_bytes)
			continue;
		job->of_part = file->part_fd >= 0 && all_are(job, CHUNK_PRESENT);
		if (!job->of_part && will_be_there(job))
			continue;
		if (job->of_part && pool_queue(&source_threads, &job->task)) {
			unpark(job);
			job->place = QUEUED;
		} else {
			give_up(job);
		}
	}
}

static void stop(uint64_t ino)
{
	struct file **place = find(ino), *file = *place;
	if (!file)
		return;
	*place = file->next;
	file->reads++; /* for this function */
	end_pieces(file, 0, file->size);
	while (file->parked)
		give_up((struct job *)file->parked);
	file->stopped = true;
	if (file->reads == 1 && file->part_fd >= 0) {
		/* At once, so that its blocks are free when it is removed. It still exists, so this is fast. */
		close(file->part_fd);
		file->part_fd = -1;
	}
	end_read(file);
}

/* Only while many descriptors are left: opens must not fail for want of them. */
static int duplicate(int fd)
{
	struct rlimit limit;
	/* The lowest free number; closing a copy of `fd` may take long. */
	int next = open("/", O_PATH | O_CLOEXEC);
	if (next < 0)
		return -1;
	close(next);
	if (getrlimit(RLIMIT_NOFILE, &limit) == 0 && (rlim_t)next >= limit.rlim_cur / 2)
		return -1;
	return fcntl(fd, F_DUPFD_CLOEXEC, 0);
}

bool nonresident_source(uint64_t ino, int fd, uint64_t size, int64_t mtime_ns, int64_t ctime_ns)
{
	/* Each read compares the version. Here it cannot be asked for: the caller must not wait for the source. */
	const struct version version = {.size = size, .mtime_ns = mtime_ns, .ctime_ns = ctime_ns};
	pthread_mutex_lock(&source_lock);
	struct file *file = make(ino, size);
	if (file && file->source_fd < 0) {
		file->source_fd = duplicate(fd);
		file->version = version;
		/* Lets the kernel read ahead of a sequential reader. If it refuses, reads are slower. */
		if (file->source_fd >= 0)
			(void)posix_fadvise(file->source_fd, 0, 0, POSIX_FADV_NORMAL);
	}
	bool done = file && file->source_fd >= 0 && same(&file->version, &version);
	if (file)
		file->direct = done;
	if (file && !done && !file->states)
		stop(ino);
	pthread_mutex_unlock(&source_lock);
	return done;
}

void nonresident_stop(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	stop(ino);
	pthread_mutex_unlock(&source_lock);
}

void nonresident_no_source(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	if (file && file->states)
		file->direct = false;
	else
		stop(ino);
	pthread_mutex_unlock(&source_lock);
}

bool nonresident_fill(uint64_t ino, uint64_t size, uint64_t chunk_bytes, const char *states,
		     size_t count)
{
	if (!chunk_bytes || !count || count != (size - 1) / chunk_bytes + 1)
		return false;
	char *own = malloc(count);
	if (!own)
		return false;
	memcpy(own, states, count);
	pthread_mutex_lock(&source_lock);
	stop(ino);
	struct file *file = make(ino, size);
	if (file) {
		file->chunk_bytes = chunk_bytes;
		file->chunks = count;
		file->states = own;
	}
	pthread_mutex_unlock(&source_lock);
	if (!file)
		free(own);
	return file;
}

bool nonresident_part(uint64_t ino, int fd)
{
	int own = duplicate(fd);
	if (own < 0)
		return false;
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	bool taken = file && file->states && file->part_fd < 0;
	if (taken)
		file->part_fd = own;
	pthread_mutex_unlock(&source_lock);
	if (!taken)
		close(own);
	return taken;
}

void nonresident_chunks(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state)
{
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	if (file && file->states && first < last && last <= file->chunks) {
		memset(file->states + first, state, last - first);
		end_pieces(file, first * file->chunk_bytes, last * file->chunk_bytes);
		if (state != CHUNK_CLAIMED)
			look_at_parked(file, first, last);
	}
	pthread_mutex_unlock(&source_lock);
}

void nonresident_ahead(uint64_t ino, uint64_t chunk)
{
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	if (file)
		file->ahead = chunk;
	pthread_mutex_unlock(&source_lock);
}

/* A parked read of some of these bytes that has all of its bytes now; it uses the pieces. Under `source_lock`. */
static struct job *find_parked(const struct file *file, uint64_t start, uint64_t end)
{
	for (struct waiter *waiter = file->parked; waiter; waiter = waiter->next) {
		struct job *job = (struct job *)waiter;
		if (job->offset < end && job->offset + job->size > start && find_pieces(job))
			return job;
	}
	return NULL;
}

/* Answer the reads that wait for these bytes. `source_lock` is released meanwhile. */
static void answer_parked(const struct file *file, uint64_t start, uint64_t end)
{
	struct job *job;
	while ((job = find_parked(file, start, end))) {
		unpark(job);
		waiter_take(&job->waiter);
		pthread_mutex_unlock(&source_lock);
		answer_from_memory(job);
		journal_done(job->waiter.request->unique);
		pthread_mutex_lock(&source_lock);
		leave_pieces(job);
		end_read(job->file);
		free(job);
	}
}

bool nonresident_arrived(uint64_t ino, uint64_t start, const char *data, size_t size,
			void (*release)(void *), void *token)
{
	struct piece *piece = NULL;
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	if (file && file->states && size && start % file->chunk_bytes == 0 &&
	    start + size <= file->size && !find_piece(file, start))
		piece = malloc(sizeof(*piece));
	if (piece) {
		uint64_t first = start / file->chunk_bytes;
		uint64_t last = (start + size - 1) / file->chunk_bytes + 1;
		*piece = (struct piece){.next = file->pieces, .start = start, .size = size,
					.data = data, .release = release, .token = token,
					.users = 1};
		file->pieces = piece;
		file->reads++; /* for this function */
		for (uint64_t chunk = first; chunk < last; chunk++)
			if (file->states[chunk] == CHUNK_CLAIMED)
				file->states[chunk] = CHUNK_ARRIVED;
		answer_parked(file, start, start + size);
		look_at_parked(file, first, last);
		leave_piece(piece);
		end_read(file);
	}
	pthread_mutex_unlock(&source_lock);
	return piece;
}

bool nonresident_used(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	struct file *file = *find(ino);
	bool used = file && (file->used || file->reads);
	if (file)
		file->used = false;
	pthread_mutex_unlock(&source_lock);
	return used;
}
