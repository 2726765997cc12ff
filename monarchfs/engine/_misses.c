/* Opens and reads of small files that are not cached. See _misses.h.
 *
 * An entry is REMOTE, AHEAD or WINDOW (Python wants it, no reader waits for it), QUEUED for a source thread,
 * READING in one, or has its bytes in memory:
 *
 *   request  REMOTE, AHEAD, WINDOW, QUEUED, READING  bytes in memory
 *   OPEN     waits for a source thread               is answered at once while the version is fresh, else waits
 *   READ     waits for a source thread               is answered at once
 *   fetch    REMOTE becomes AHEAD                    an event tells Python of them
 *   window   REMOTE becomes WINDOW                   nothing
 *   hurry    AHEAD, WINDOW become QUEUED             nothing
 *
 * Files that are AHEAD have threads and memory of their own, so readers find theirs free; files for the window, too.
 * The first request for such a file makes it QUEUED. Bytes in the window stay there until a reader has asked for
 * them and needs them no more. A file of more than MISS_MOST_BYTES is answered from the window alone.
 *
 * In any mode, an open has to ask the source no more than this: open the file by its name and compare its
 * version. Bytes belong to a version if the file had it before and after they were read (fstat(2)). No thread
 * calls the source under `source_lock`. A thread that asked the source answers first and closes the file
 * afterwards, because close(2) may block, too.
 */
#define _GNU_SOURCE
#include "_misses.h"

#include "_miss_entries.h"
#include "_small_file.h"

#include "../fuse/_journal.h"
#include "../fuse/_relay.h"
#include "../fuse/_resident.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOWEST_OF_BEST_EFFORT (2 << 13 | 7) /* ioprio_set(2) */

static bool serving;
static uint64_t source_ns; /* what it takes for a file, on average */

static void answer_read(struct entry *entry, const struct fuse_in_header *in, enum answered_by by,
			uint64_t started_ns)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	size_t size = reply_size(arg, entry->version.size);
	struct iovec parts[] = {{0}, {size ? entry->bytes->data + arg->offset : NULL, size}};
	if (reply_bytes(in->unique, by, parts, 2, started_ns))
		__atomic_fetch_add(&entry->answered, size, __ATOMIC_RELAXED);
}

/* -- the source threads */

/* What a source thread has to do, and the result. `error`: 0, an errno, or one of enum miss_error. */
struct fetch {
	struct entry *entry;
	int fd, error;
	enum miss_owner owner;
	bool must_read, may_read, asked, from_peer;
	struct miss_bytes *bytes;
};

static struct miss_bytes *new_bytes(const struct fetch *fetch)
{
	const struct entry *entry = fetch->entry;
	size_t size = (size_t)entry->version.size;
	struct miss_bytes *bytes = malloc(sizeof(*bytes) + size);
	if (bytes)
		*bytes = (struct miss_bytes){.ino = entry->ino,
					     .users = 1,
					     .size = size,
					     .owner = (uint8_t)fetch->owner,
					     .unread = fetch->owner == OF_WINDOW};
	return bytes;
}

static int read_whole(struct fetch *fetch)
{
	const struct entry *entry = fetch->entry;
	struct miss_bytes *bytes = new_bytes(fetch);
	if (!bytes)
		return ENOMEM;
	int error = small_read(fetch->fd, misses.options.device, &entry->version, bytes->data);
	if (error)
		free(bytes);
	else
		fetch->bytes = bytes;
	return error;
}

/* Read it from another node; false if that node did not have all of it. */
static bool read_from_peer(struct fetch *fetch, const struct directory *directory)
{
	const struct entry *entry = fetch->entry;
	char path[PATH_MAX];
	if (!misses.read_from_peers || !entry->shared || !(fetch->must_read || fetch->may_read))
		return false;
	int length = snprintf(path, sizeof(path), "%s%s%s", directory->path, directory->path[0] ? "/" : "",
			      entry->name);
	if (length >= (int)sizeof(path))
		return false;
	struct miss_bytes *bytes = new_bytes(fetch);
	struct miss_wanted file = {entry->replica.name, (size_t)entry->version.size, path,
				   fetch->owner == OF_PYTHON};
	if (bytes && misses.read_from_peers(&file, __atomic_load_n(&source_ns, __ATOMIC_RELAXED), bytes->data)) {
		fetch->bytes = bytes;
		return fetch->from_peer = true;
	}
	free(bytes);
	return false;
}

/* An update that gets lost does not matter. */
static void note_source(uint64_t took_ns)
{
	uint64_t mean_ns = __atomic_load_n(&source_ns, __ATOMIC_RELAXED);
	__atomic_store_n(&source_ns, mean_ns ? mean_ns - mean_ns / 16 + took_ns / 16 : took_ns, __ATOMIC_RELAXED);
}

static int carry_out(struct fetch *fetch, const struct directory *directory)
{
	const struct entry *entry = fetch->entry;
	bool fresh = entry->shared && resident_fresh(entry->replica.fresh_until_ns);
	if (fresh && read_from_peer(fetch, directory))
		return 0;
	fetch->asked = true;
	uint64_t began_ns = monotonic_ns();
	int error = small_open(directory->fd, entry->name, misses.options.device, &entry->version,
			       &fetch->fd);
	if (error || !(fetch->must_read || fetch->may_read))
		return error;
	uint64_t opened_ns = monotonic_ns() - began_ns;
	if (!fresh && read_from_peer(fetch, directory))
		return 0;
	began_ns = monotonic_ns() - opened_ns;
	/* An open does not bring back an archived file. */
	if (!fetch->must_read && misses.options.layouts && (error = small_archived(fetch->fd)))
		return error;
	error = read_whole(fetch);
	if (!error)
		note_source(monotonic_ns() - began_ns);
	return error;
}

/* If Python wants it, though nobody else does. Under `source_lock`. */
static void queue_again(struct entry *entry)
{
	if (entry->wanted && !miss_queue(entry, AHEAD, 0))
		miss_report(entry, (struct miss_event){.error = MISS_LEFT});
}

static void count_fetch(const struct fetch *fetch, uint64_t took_ns)
{
	if (fetch->bytes && !fetch->from_peer)
		counts_add(fetch->owner == OF_READERS ? COUNT_SOURCE_BYTES : COUNT_AHEAD_BYTES, fetch->bytes->size);
	if (fetch->asked)
		counts_time(fetch->owner == OF_READERS ? TIME_SOURCE : TIME_AHEAD, took_ns);
}

/* Answer the requests that wait, or leave them to Python. Under `source_lock`, which is released while answers are
 * written. */
static void deliver(struct fetch *fetch, uint64_t took_ns)
{
	struct entry *entry = fetch->entry;
	struct waiter *waiters = entry->waiters, *waiter;
	bool good = !fetch->error && !entry->gone && entry->bytes;
	bool of_window = entry->bytes && entry->bytes->owner == OF_WINDOW;
	/* Python looked for room before it had files read into the window. */
	bool keeps = entry->wanted || (misses.options.keeps && !of_window);
	unsigned opens = 0;
	if (!good) {
		miss_leave_waiters(entry);
		queue_again(entry); /* an open found no memory */
		miss_leave_entry(entry);
		return;
	}
	entry->waiters = NULL;
	entry->answering++;
	for (waiter = waiters; waiter; waiter = waiter->next) {
		opens += waiter->request->opcode == FUSE_OPEN;
		misses.window.waited += fetch->bytes && of_window;
		waiter_take(waiter);
	}
	if (misses.free_opens)
		opens = fetch->bytes && waiters;
	if (waiters && entry->bytes)
		miss_adopt(entry->bytes);
	/* Before the answers: when a reader has read the file, Python knows of it. */
	if (opens || (fetch->bytes && (keeps || !of_window)))
		miss_report(entry, (struct miss_event){.opens = opens,
						.spared = fetch->from_peer && !fetch->asked,
						.from_window = of_window,
						.took_ns = took_ns,
						.bytes = keeps ? fetch->bytes : NULL});
	uint64_t began_ns = monotonic_ns() - took_ns;
	pthread_mutex_unlock(&source_lock);
	while ((waiter = waiters)) {
		const struct fuse_in_header *in = waiter->request;
		enum answered_by by = waiter->started_ns > began_ns ? BY_WAITED
				      : fetch->from_peer	      ? BY_PEER
								      : BY_SOURCE;
		waiters = waiter->next;
		bool done = true;
		if (in->opcode == FUSE_READ)
			answer_read(entry, in, by, waiter->started_ns);
		else
			done = relay_answer_open(in, by, waiter->started_ns);
		if (done)
			journal_done(in->unique);
		else
			relay_leave(waiter->request, waiter->length);
		free(waiter);
	}
	pthread_mutex_lock(&source_lock);
	miss_answered(entry);
}

static bool reads_any(const struct entry *entry)
{
	const struct waiter *waiter = entry->waiters;
	while (waiter && waiter->request->opcode != FUSE_READ)
		waiter = waiter->next;
	return waiter;
}

/* The end of a source thread's work on the entry. Under `source_lock`. */
static void end_fetch(struct fetch *fetch, uint64_t took_ns)
{
	struct entry *entry = fetch->entry;
	if (fetch->bytes && !entry->gone)
		miss_fill(entry, fetch->bytes);
	else if (fetch->bytes)
		miss_leave_bytes(fetch->bytes);
	if (entry->wanted && entry->gone)
		miss_report(entry, (struct miss_event){.error = MISS_LEFT});
	if (fetch->error && !entry->gone) {
		miss_report(entry, (struct miss_event){.error = fetch->error, .took_ns = took_ns});
		miss_forget_unless_open(miss_place_of(entry->ino));
	} else {
		/* Without its bytes an open is left to Python: an open file has to stay in memory. */
		deliver(fetch, took_ns);
	}
}

static void count_window(const struct fetch *fetch, uint64_t took_ns)
{
	if (fetch->bytes && fetch->owner == OF_WINDOW) {
		misses.window.read++;
		misses.window.read_bytes += fetch->bytes->size;
		misses.window.took_ns += took_ns;
	}
}

/* Open it, and read it if that is wanted and there is memory. `source_lock` is released meanwhile. */
static void carry(struct entry *entry, enum miss_owner owner)
{
	struct directory *directory = miss_directory_of(entry);
	entry->state = REMOTE;
	if (!directory) {
		end_fetch(&(struct fetch){.entry = entry, .error = MISS_LEFT}, 0);
		return;
	}
	struct fetch fetch = {.entry = entry, .fd = -1, .owner = owner};
	size_t size = entry->version.size;
	fetch.must_read = !entry->bytes && reads_any(entry);
	fetch.may_read = owner != OF_READERS || (!entry->bytes && miss_make_room(size));
	bool reads = fetch.must_read || fetch.may_read;
	size_t *counted = &misses.memory[owner];
	*counted += reads ? size : 0;
	entry->state = READING;
	if (owner == OF_WINDOW)
		miss_make_window_room();
	for (struct waiter *waiter = entry->waiters; waiter; waiter = waiter->next)
		waiter->may_stay = false;
	directory->users++;
	pthread_mutex_unlock(&source_lock);

	uint64_t began_ns = monotonic_ns();
	fetch.error = carry_out(&fetch, directory);
	uint64_t took_ns = monotonic_ns() - began_ns;
	count_fetch(&fetch, took_ns);

	pthread_mutex_lock(&source_lock);
	count_window(&fetch, took_ns);
	miss_leave_directory(directory);
	entry->state = REMOTE;
	if (!fetch.bytes && reads)
		*counted -= size;
	bool has_bytes = fetch.bytes;
	end_fetch(&fetch, took_ns);
	if (fetch.fd < 0)
		return;
	pthread_mutex_unlock(&source_lock);
	/* The mount's pages have the bytes now: they should not be in memory twice. */
	if (has_bytes)
		(void)posix_fadvise(fetch.fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fetch.fd);
	pthread_mutex_lock(&source_lock);
}

void miss_run(struct task *task, struct scratch *scratch)
{
	struct entry *entry = OF_TASK(task, struct entry, task);
	(void)scratch;
	carry(entry, entry->state == WINDOW ? OF_WINDOW : entry->waiters ? OF_READERS : OF_PYTHON);
}

/* Threads that read ahead give way to readers. */
static void lower(void)
{
	if (!misses.options.nice)
		return;
	int now = getpriority(PRIO_PROCESS, 0); /* the calling thread's */
	if (setpriority(PRIO_PROCESS, 0, now > misses.options.nice ? now : misses.options.nice) == 0)
		syscall(SYS_ioprio_set, 1, 0, LOWEST_OF_BEST_EFFORT);
}

/* -- for the threads that take requests */

static bool is_open_for_reading(const void *arg)
{
	return (((const struct fuse_open_in *)arg)->flags & O_ACCMODE) == O_RDONLY;
}

/* No request waits for the entry any more: it need not be read, or not now. Under `source_lock`. */
static void dequeue(struct entry *entry)
{
	if (entry->state == QUEUED && !entry->waiters) {
		miss_unqueue(entry);
		queue_again(entry);
	}
}

/* As waiter.left. */
static void left(struct waiter *waiter)
{
	struct entry *entry = waiter->for_what;
	struct waiter **place = &entry->waiters;
	while (*place != waiter)
		place = &(*place)->next;
	*place = waiter->next;
	free(waiter);
	dequeue(entry);
}

/* Make a request wait for a source thread. Under `source_lock`. */
static bool enqueue(struct entry *entry, const struct fuse_in_header *in, size_t length, bool kept,
		    uint64_t started_ns)
{
	if (!miss_directory_of(entry) || source_hangs())
		return false;
	struct waiter *waiter = waiter_new(sizeof(*waiter), in, length, started_ns);
	if (!waiter)
		return false;
	if (entry->state == AHEAD || entry->state == WINDOW)
		miss_unqueue(entry);
	if (entry->state == REMOTE && !miss_queue(entry, QUEUED, process_group(in))) {
		queue_again(entry);
		free(waiter);
		return false;
	}
	/* If a process that waits for an open gets a signal, the kernel tells us. So an open may go on waiting here
	 * for a thread, which takes less memory. A read may not (O_DIRECT). */
	waiter->may_stay = entry->state == QUEUED && in->opcode == FUSE_OPEN;
	waiter->for_what = entry;
	waiter->left = left;
	struct waiter **last = &entry->waiters;
	while (*last)
		last = &(*last)->next;
	*last = waiter;
	waiter_add(waiter, kept);
	return true;
}

/* Under `source_lock`. */
static bool takes(struct entry *entry, const struct fuse_in_header *in, size_t length, bool kept,
		  uint64_t started_ns)
{
	const void *arg = in + 1;
	if (entry->excluded || entry->over)
		return false;
	bool large = entry->version.size > MISS_MOST_BYTES;
	if (large && !entry->bytes && entry->state != READING)
		return false;
	if (in->opcode == FUSE_OPEN &&
	    (!is_open_for_reading(arg) || (!entry->bytes && !large && !miss_make_room(entry->version.size))))
		return false; /* an open file has to stay in memory */
	return enqueue(entry, in, length, kept, started_ns);
}

/* Whether a request can be answered without the source. Under `source_lock`. */
static bool is_here(const struct entry *entry, const struct fuse_in_header *in)
{
	if (!entry || !entry->bytes)
		return false;
	if (in->opcode == FUSE_READ)
		return true;
	return !entry->excluded && !entry->over && is_open_for_reading(in + 1) && resident_fresh(entry->fresh_until_ns);
}

/* Answer it from memory; false if an open has to be left to Python. `source_lock` is released meanwhile. */
static bool answer_here(struct entry *entry, const struct fuse_in_header *in, uint64_t started_ns)
{
	bool opens = in->opcode == FUSE_OPEN, from_window = entry->bytes->owner == OF_WINDOW, done = true;
	entry->answering++;
	bool first = miss_adopt(entry->bytes);
	/* Before the answer: when a reader has read the file, Python knows of it. */
	if (opens || (first && misses.free_opens))
		miss_report(entry, (struct miss_event){.opens = 1, .from_window = from_window});
	pthread_mutex_unlock(&source_lock);
	if (opens)
		done = relay_answer_open(in, BY_MEMORY, started_ns);
	else
		answer_read(entry, in, BY_MEMORY, started_ns);
	pthread_mutex_lock(&source_lock);
	miss_answered(entry);
	return done;
}

bool misses_took(const void *request, size_t length, bool kept, uint64_t started_ns)
{
	const struct fuse_in_header *in = request;
	size_t body = length - sizeof(*in);
	bool reads = in->opcode == FUSE_READ;
	if (!serving ||
	    body < (reads ? sizeof(struct fuse_read_in) : sizeof(struct fuse_open_in)))
		return false;
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *miss_place_of(in->nodeid);
	bool here = is_here(entry, in);
	bool took = here ? answer_here(entry, in, started_ns) : entry && takes(entry, in, length, kept, started_ns);
	pthread_mutex_unlock(&source_lock);
	if (here && took && kept)
		journal_done(in->unique);
	return took;
}

/* -- for Python */

/* Under `source_lock`. */
static bool fetch(struct entry *entry, int64_t fresh_until_ns)
{
	bool known = serving && entry && miss_directory_of(entry) && !entry->excluded && !entry->over &&
		     !entry->wanted;
	if (known)
		entry->fresh_until_ns = fresh_until_ns;
	if (!known || entry->told)
		return known;
	struct miss_event *event = entry->wanted = malloc(sizeof(*event));
	if (!event)
		return false;
	if (entry->bytes) {
		miss_report(entry, (struct miss_event){.bytes = entry->bytes});
	} else if (entry->state == REMOTE && !miss_queue(entry, AHEAD, 0)) {
		entry->wanted = NULL;
		free(event);
		return false;
	}
	return true;
}

void misses_fetch(const uint64_t *inos, const int64_t *fresh_until_ns, size_t count, unsigned threads, bool *begun)
{
	pthread_mutex_lock(&source_lock);
	ahead_threads.most = threads;
	for (size_t n = 0; n < count; n++)
		begun[n] = fetch(*miss_place_of(inos[n]), fresh_until_ns[n]);
	pthread_mutex_unlock(&source_lock);
}

void misses_hurry(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count && !source_hangs(); n++) {
		struct entry *entry = *miss_place_of(inos[n]);
		if (!entry || (entry->state != AHEAD && entry->state != WINDOW))
			continue;
		miss_unqueue(entry);
		if (!miss_queue(entry, QUEUED, 0))
			queue_again(entry);
	}
	pthread_mutex_unlock(&source_lock);
}

bool misses_exclude(uint64_t ino, bool excluded)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *miss_place_of(ino);
	if (entry && excluded && (entry->state == AHEAD || entry->state == WINDOW)) {
		miss_unqueue(entry);
		free(entry->wanted);
		entry->wanted = NULL;
	}
	bool busy = entry && (entry->state != REMOTE || entry->told);
	if (entry)
		entry->excluded = excluded;
	pthread_mutex_unlock(&source_lock);
	return busy;
}

void misses_peers(miss_peers *read)
{
	pthread_mutex_lock(&source_lock);
	misses.read_from_peers = read;
	pthread_mutex_unlock(&source_lock);
}

int misses_start(const struct miss_options *given)
{
	pthread_mutex_lock(&source_lock);
	int result = misses.events_fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -EALREADY;
	if (result >= 0) {
		misses.options = *given;
		ahead_threads.may = miss_may_read_ahead;
		ahead_threads.begin = lower;
		window_threads.may = miss_may_fill_window;
		misses.events_fd = result;
	} else if (misses.events_fd < 0) {
		result = -errno;
	}
	pthread_mutex_unlock(&source_lock);
	return result;
}

uint64_t misses_source_ns(void)
{
	return __atomic_load_n(&source_ns, __ATOMIC_RELAXED);
}

void misses_serve(bool no_opens)
{
	pthread_mutex_lock(&source_lock);
	misses.free_opens = no_opens;
	serving = misses.events_fd >= 0 && source_threads.most;
	pthread_mutex_unlock(&source_lock);
}
