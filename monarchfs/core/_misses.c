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
 *
 * If readers read only the headers of files of at least HEADER_FILE_BYTES, opens of these are left to Python, which reads
 * what is asked for. One in HEADER_PROBES is read as a whole, to see whether that is still so.
 *
 * A hanging source: after a second a request is left to Python, and its thread is not counted. If 256 requests
 * wait in Python, opens that no thread has begun go on waiting here, where one takes 0.3 KB (in Python 20). Files
 * that were changed less than a second ago, and those on file systems mounted below the source, are Python's.
 */
#define _GNU_SOURCE
#include "_misses.h"

#include "_directories.h"
#include "_journal.h"
#include "_opens.h"
#include "_queue.h"
#include "_resident.h"
#include "_waiting.h"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#define LOWEST_OF_BEST_EFFORT (2 << 13 | 7) /* ioprio_set(2) */
#define BUCKETS (1U << 16)
#define MOST_ENTRIES (1U << 17) /* some 160 bytes each */
#define MOST_EVENTS 65536
#define HEADER_FILE_BYTES (256U << 10) /* as in prefetch/fetch.py */
#define HEADER_SHARE 4 /* a header is less than the file's size by this */
#define HEADER_FILES 8 /* so many in a row say that readers want headers */
#define HEADER_PROBES 64

/* `source_lock` guards all of this. */

enum state {
	REMOTE,
	AHEAD, /* wanted by Python; no reader waits for it */
	WINDOW, /* the same, for the window */
	QUEUED, /* for a source thread */
	READING, /* by a source thread */
};

/* The number, the name and the version are constant. */
struct entry {
	struct entry *next; /* in its bucket */
	struct task task; /* queued while the state is AHEAD, WINDOW or QUEUED */
	uint64_t ino;
	struct miss_version version;
	struct waiter *waiters;
	struct miss_bytes *bytes;
	struct miss_event *wanted; /* the event for a fetch that Python asked for */
	struct entry *older, *newer; /* among entries with bytes */
	size_t answered; /* bytes given to readers */
	unsigned answering; /* threads that are answering with it */
	unsigned generation; /* of the directory */
	unsigned opened_in; /* the batch of events (`events_taken`) that tells of its last open */
	int64_t fresh_until_ns; /* until then an open need not ask the source for the version */
	unsigned char replica[MISS_REPLICA_BYTES]; /* its name at other nodes, if `shared` */
	uint16_t directory;
	uint8_t state;
	bool shared; /* other nodes may have it */
	bool excluded; /* Python reads the file */
	bool over; /* forgotten at the last close; until then served from memory */
	bool told; /* an event with its bytes waits for Python */
	bool gone; /* not in the table any more */
	bool unwanted; /* no reader will come for what is being read into the window */
	char name[];
};

static struct {
	struct miss_options options;
	miss_peers *read_from_peers; /* NULL: there are none */
	small_opened *take_opened; /* NULL: none is open already */
	bool free_opens;
	int events_fd;
	size_t memory[MISS_OWNERS]; /* bytes of files */
	size_t window_bytes; /* the limit of the window */
	size_t window_asked; /* its bytes that readers have asked for */
	struct miss_window window; /* but for `bytes` */
} misses = {.events_fd = -1};

static struct entry *buckets[BUCKETS];
static struct {
	struct entry *first, *last;
} filled;
static size_t entry_count;
static struct miss_event *first_event, **last_event = &first_event;
static unsigned event_count, events_taken = 1; /* an entry that was never opened has 0 */
static pthread_cond_t no_answers = PTHREAD_COND_INITIALIZER; /* signalled when an entry has none under way */

static bool serving;
static uint64_t source_ns; /* what it takes for a file, on average */
static unsigned headers_read; /* files in a row of which only the header was read */
static unsigned headers_left; /* opens that were left to Python for that */

/* -- bytes. Under `source_lock`, like everything up to the functions for Python */

/* As pool.may: whether there is memory for the first file in the queue of those read ahead. */
static bool may_read_ahead(const struct task *first)
{
	size_t size = OF_TASK(first, struct entry, task)->version.size;
	size_t taken = misses.memory[OF_PYTHON];
	return !taken || taken + size <= misses.options.memory_bytes / 2;
}

/* The same of those for the window. */
static bool may_fill_window(const struct task *first)
{
	return misses.memory[OF_WINDOW] + OF_TASK(first, struct entry, task)->version.size <= misses.window_bytes;
}

static void leave_bytes(struct miss_bytes *bytes)
{
	if (bytes && --bytes->users == 0) {
		misses.memory[bytes->owner] -= bytes->size;
		if (bytes->unread) {
			misses.window.wasted++;
			misses.window.wasted_bytes += bytes->size;
		} else if (bytes->owner == OF_WINDOW) {
			misses.window_asked -= bytes->size;
		}
		(void)pool_wake(bytes->owner == OF_WINDOW ? &window_threads : &ahead_threads);
		free(bytes);
	}
}

/* A reader uses bytes that were read ahead. True for the first reader. Those of the window stay there. */
static bool adopt(struct miss_bytes *bytes)
{
	if (bytes->owner == OF_PYTHON) {
		bytes->owner = OF_READERS;
		misses.memory[OF_PYTHON] -= bytes->size;
		misses.memory[OF_READERS] += bytes->size;
		(void)pool_wake(&ahead_threads);
		return true;
	}
	if (!bytes->unread)
		return false;
	bytes->unread = false;
	misses.window_asked += bytes->size;
	misses.window.hits++;
	misses.window.hit_bytes += bytes->size;
	return true;
}

/* Give the entry its bytes. */
static void fill(struct entry *entry, struct miss_bytes *bytes)
{
	entry->bytes = bytes;
	entry->answered = 0;
	entry->older = filled.last;
	entry->newer = NULL;
	*(filled.last ? &filled.last->newer : &filled.first) = entry;
	filled.last = entry;
}

static void empty(struct entry *entry)
{
	if (!entry->bytes)
		return;
	*(entry->older ? &entry->older->newer : &filled.first) = entry->newer;
	*(entry->newer ? &entry->newer->older : &filled.last) = entry->older;
	leave_bytes(entry->bytes);
	entry->bytes = NULL;
}

/* -- entries */

/* The link in the bucket that points to the entry, or would. */
static struct entry **place_of(uint64_t ino)
{
	struct entry **place = &buckets[(ino * 0x9e3779b97f4a7c15ULL) >> 48];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

/* Queue an event for Python. */
static void report(struct entry *entry, struct miss_event told)
{
	struct miss_event *event = entry->wanted;
	struct miss_bytes *bytes = told.bytes;
	entry->wanted = NULL;
	if (!event && (event_count < MOST_EVENTS || bytes))
		event = malloc(sizeof(*event));
	if (!event) {
		counts_add(COUNT_UNTOLD_OPENS, told.opens);
		return;
	}
	if (bytes)
		bytes->users++;
	told.ino = entry->ino;
	*event = told;
	entry->told |= bytes != NULL;
	if (told.opens)
		entry->opened_in = events_taken;
	bool news = !first_event;
	*last_event = event;
	last_event = &event->next;
	event_count++;
	uint64_t one = 1;
	/* It cannot be full: it is only written to when there was no event. */
	while (news && write(misses.events_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

/* Leave all requests that wait for the entry to Python. */
static void leave_waiters(struct entry *entry)
{
	struct waiter *waiter;
	while ((waiter = entry->waiters)) {
		entry->waiters = waiter->next;
		waiter_leave(waiter);
		free(waiter);
	}
}

static struct pool *pool_of(enum state state)
{
	return state == AHEAD ? &ahead_threads : state == WINDOW ? &window_threads : &source_threads;
}

/* Queue the entry for a thread, as a task of the group. False if no thread can be had. */
static bool queue(struct entry *entry, enum state state, uint32_t group)
{
	entry->task.group = group;
	if (!pool_queue(pool_of(state), &entry->task))
		return false;
	entry->state = (uint8_t)state;
	return true;
}

/* Take it out of the queue, unless a thread has begun. */
static void unqueue(struct entry *entry)
{
	if (entry->state == REMOTE || entry->state == READING)
		return;
	pool_withdraw(pool_of(entry->state), &entry->task);
	entry->state = REMOTE;
}

/* This thread is done with the entry: free it if it is gone and nobody else uses it. */
static void leave_entry(struct entry *entry)
{
	if (entry->gone && entry->state == REMOTE && !entry->answering) {
		empty(entry);
		free(entry);
	}
}

/* Take it out of the queue, unless a thread has begun. */
static void withdraw(struct entry *entry)
{
	unqueue(entry);
	if (entry->wanted && entry->state == REMOTE)
		report(entry, (struct miss_event){.error = MISS_LEFT});
	leave_waiters(entry);
}

/* Take it out of the table. Its last user frees it. */
static void forget(struct entry **place)
{
	struct entry *entry = *place;
	*place = entry->next;
	entry_count--;
	withdraw(entry);
	entry->gone = true;
	leave_entry(entry);
}

/* Take the entry out of the table, unless it is open: then its readers go on reading from memory. */
static void forget_unless_open(struct entry **place)
{
	struct entry *entry = *place;
	/* An open that is being answered is in the table of open files only after its answer. */
	bool open = !misses.free_opens && (entry->answering || resident_used(entry->ino));
	if (!entry->bytes || !open) {
		forget(place);
		return;
	}
	withdraw(entry);
	entry->over = true;
}

/* -- directories */

/* The entry's directory; NULL if its number stands for another directory by now. */
static struct directory *directory_of(const struct entry *entry)
{
	struct directory *directory = directories_at(entry->directory);
	return directory && directory->generation == entry->generation ? directory : NULL;
}

/* -- how long bytes stay */

/* Whether readers need its bytes no more. */
static bool served(const struct entry *entry)
{
	if (entry->state != REMOTE || entry->answering)
		return false;
	if (entry->bytes->owner == OF_PYTHON)
		return true;
	if (entry->bytes->unread)
		return entry->unwanted;
	return misses.free_opens ? entry->answered >= entry->version.size :
				    !resident_used(entry->ino);
}

/* Without opens nobody says that a reader is done with a file of which it did not read all. If such files have much of
 * the window, they make room for the next one. To be called when there is a next one, when the window has grown, and
 * when a file was read. */
static void make_window_room(void)
{
	const struct task *next = window_threads.first;
	if (!misses.free_opens || !next || misses.window_asked <= misses.window_bytes / 4 || may_fill_window(next))
		return;
	for (struct entry *entry = filled.first, *newer; entry; entry = newer) {
		newer = entry->newer;
		if (entry->bytes->owner == OF_WINDOW && !entry->bytes->unread && entry->state == REMOTE &&
		    !entry->answering)
			empty(entry);
	}
}

static void put_down(struct entry *entry)
{
	/* While they are on their way into a tier, the next open is answered from them. */
	if (entry->gone || !entry->bytes || entry->bytes->users > 1 || !served(entry))
		return;
	if (entry->over)
		forget(place_of(entry->ino));
	else
		empty(entry);
}

/* End an answer: the caller had raised `answering`. */
static void answered(struct entry *entry)
{
	if (--entry->answering)
		return;
	pthread_cond_broadcast(&no_answers);
	if (entry->gone)
		leave_entry(entry);
	else
		put_down(entry);
	make_window_room();
}

/* How much of a file was read since it was opened. */
static void note_read(struct entry *entry)
{
	size_t read = __atomic_load_n(&entry->answered, __ATOMIC_RELAXED);
	if (!entry->bytes || !read)
		return;
	bool counts = entry->bytes->size >= HEADER_FILE_BYTES;
	if (counts && read >= entry->bytes->size / HEADER_SHARE)
		headers_read = 0;
	else if (entry->over || resident_used(entry->ino))
		return; /* more of it was read from the tier, perhaps, or will be */
	else
		headers_read += counts;
	__atomic_store_n(&entry->answered, 0, __ATOMIC_RELAXED);
}

void misses_released(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *place_of(ino);
	if (entry) {
		note_read(entry);
		put_down(entry);
	}
	pthread_mutex_unlock(&source_lock);
}

void misses_leave_bytes(struct miss_bytes *bytes)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = bytes->users > 1 ? *place_of(bytes->ino) : NULL;
	bool same = entry && entry->bytes == bytes;
	leave_bytes(bytes);
	if (same)
		put_down(entry);
	pthread_mutex_unlock(&source_lock);
}

/* Make room in memory for so many bytes; false if there is none. Bytes that nobody needs now are dropped.
 * Bytes that wait for Python are dropped too, and have to be read again. */
static bool make_room(size_t size)
{
	struct entry *entry = filled.first;
	struct miss_event *event = first_event;
	const size_t *taken = &misses.memory[OF_READERS];
	while (entry && *taken + size > misses.options.memory_bytes) {
		struct entry *newer = entry->newer;
		if (entry->bytes->owner != OF_READERS)
			; /* is not counted there */
		else if (misses.free_opens ? entry->state == REMOTE && !entry->answering : served(entry))
			empty(entry);
		entry = newer;
	}
	for (; event && *taken + size > misses.options.memory_bytes; event = event->next) {
		if (event->bytes && event->bytes->owner == OF_READERS) {
			leave_bytes(event->bytes);
			event->bytes = NULL;
			event->error = MISS_LEFT;
			struct entry *told = *place_of(event->ino);
			if (told) /* else a caller would go on waiting for them */
				told->told = false;
		}
	}
	return *taken + size <= misses.options.memory_bytes;
}

/* -- the window */

/* Under `source_lock`. */
static bool into_window(struct entry *entry, int64_t fresh_until_ns)
{
	if (!entry || !directory_of(entry) || entry->excluded || entry->over || entry->told || entry->wanted)
		return false;
	if (entry->opened_in == events_taken)
		return false; /* Python has not heard yet that a reader has it */
	if (!entry->bytes && entry->state == REMOTE && !queue(entry, WINDOW, 0))
		return false;
	entry->fresh_until_ns = fresh_until_ns;
	entry->unwanted = false;
	return entry->state != AHEAD;
}

void misses_window(const uint64_t *inos, const int64_t *fresh_until_ns, size_t count, unsigned threads, bool *begun)
{
	pthread_mutex_lock(&source_lock);
	window_threads.most = threads;
	for (size_t n = 0; n < count; n++)
		begun[n] = misses.window_bytes && into_window(*place_of(inos[n]), fresh_until_ns[n]);
	make_window_room();
	pthread_mutex_unlock(&source_lock);
}

void misses_window_drop(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count; n++) {
		struct entry *entry = *place_of(inos[n]);
		if (entry && entry->state == WINDOW)
			unqueue(entry);
		if (entry)
			entry->unwanted = true;
		if (entry && entry->bytes && entry->bytes->unread && entry->state == REMOTE && !entry->answering)
			empty(entry);
	}
	pthread_mutex_unlock(&source_lock);
}

void misses_window_limit(size_t bytes)
{
	pthread_mutex_lock(&source_lock);
	misses.window_bytes = bytes;
	make_window_room();
	(void)pool_wake(&window_threads);
	pthread_mutex_unlock(&source_lock);
}

void misses_window_state(struct miss_window *state)
{
	pthread_mutex_lock(&source_lock);
	*state = misses.window;
	state->bytes = misses.memory[OF_WINDOW];
	pthread_mutex_unlock(&source_lock);
}

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
	bool fresh, must_read, may_read, asked, from_peer;
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
	struct miss_wanted file = {entry->replica, (size_t)entry->version.size, path,
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

/* Whether it was opened before, with this version. An open of a reader's may have to ask for the name. */
static bool is_open(struct fetch *fetch)
{
	const struct entry *entry = fetch->entry;
	dev_t device = misses.options.device;
	if (!misses.take_opened || (fetch->owner == OF_READERS && !fetch->fresh))
		return false;
	fetch->fd = misses.take_opened(device, entry->version.ino);
	if (fetch->fd < 0 || small_compare(fetch->fd, device, &entry->version) == 0)
		return fetch->fd >= 0;
	close(fetch->fd);
	return false;
}

static int carry_out(struct fetch *fetch, const struct directory *directory)
{
	const struct entry *entry = fetch->entry;
	bool fresh = entry->shared && fetch->fresh;
	if (fresh && read_from_peer(fetch, directory))
		return 0;
	fetch->asked = true;
	uint64_t began_ns = monotonic_ns();
	int error = is_open(fetch) ? 0
				   : small_open(directory->fd, entry->name, misses.options.device, &entry->version,
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
	if (entry->wanted && !queue(entry, AHEAD, 0))
		report(entry, (struct miss_event){.error = MISS_LEFT});
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
		leave_waiters(entry);
		queue_again(entry); /* an open found no memory */
		leave_entry(entry);
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
		adopt(entry->bytes);
	/* Before the answers: when a reader has read the file, Python knows of it. */
	if (opens || (fetch->bytes && (keeps || !of_window)))
		report(entry, (struct miss_event){.opens = opens,
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
			done = opens_answer_source(in, by, waiter->started_ns);
		if (done)
			journal_done(in->unique);
		else
			queue_leave(waiter->request, waiter->length);
		free(waiter);
	}
	pthread_mutex_lock(&source_lock);
	answered(entry);
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
		fill(entry, fetch->bytes);
	else if (fetch->bytes)
		leave_bytes(fetch->bytes);
	if (entry->wanted && entry->gone)
		report(entry, (struct miss_event){.error = MISS_LEFT});
	if (fetch->error && !entry->gone) {
		report(entry, (struct miss_event){.error = fetch->error, .took_ns = took_ns});
		forget_unless_open(place_of(entry->ino));
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
	struct directory *directory = directory_of(entry);
	entry->state = REMOTE;
	if (!directory) {
		end_fetch(&(struct fetch){.entry = entry, .error = MISS_LEFT}, 0);
		return;
	}
	struct fetch fetch = {.entry = entry, .fd = -1, .owner = owner};
	fetch.fresh = resident_fresh(entry->fresh_until_ns);
	size_t size = entry->version.size;
	fetch.must_read = !entry->bytes && reads_any(entry);
	fetch.may_read = owner != OF_READERS || (!entry->bytes && make_room(size));
	bool reads = fetch.must_read || fetch.may_read;
	size_t *counted = &misses.memory[owner];
	*counted += reads ? size : 0;
	entry->state = READING;
	if (owner == OF_WINDOW)
		make_window_room();
	for (struct waiter *waiter = entry->waiters; waiter; waiter = waiter->next)
		waiter->may_stay = false;
	directory_use(directory);
	pthread_mutex_unlock(&source_lock);

	uint64_t began_ns = monotonic_ns();
	fetch.error = carry_out(&fetch, directory);
	uint64_t took_ns = monotonic_ns() - began_ns;
	count_fetch(&fetch, took_ns);

	pthread_mutex_lock(&source_lock);
	count_window(&fetch, took_ns);
	directory_leave(directory);
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

static void run(struct task *task, struct scratch *scratch)
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

/* No request waits for the entry any more: it need not be read, or not now. Under `source_lock`. */
static void dequeue(struct entry *entry)
{
	if (entry->state == QUEUED && !entry->waiters) {
		unqueue(entry);
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
	if (!directory_of(entry) || source_hangs())
		return false;
	struct waiter *waiter = waiter_new(sizeof(*waiter), in, length, started_ns);
	if (!waiter)
		return false;
	if (entry->state == AHEAD || entry->state == WINDOW)
		unqueue(entry);
	if (entry->state == REMOTE && !queue(entry, QUEUED, process_group(in))) {
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
static bool reads_headers(void)
{
	return headers_read >= HEADER_FILES;
}

/* Under `source_lock`. */
static bool takes(struct entry *entry, const struct fuse_in_header *in, size_t length, bool kept,
		  uint64_t started_ns)
{
	if (entry->excluded || entry->over)
		return false;
	bool large = entry->version.size > MISS_MOST_BYTES;
	if (large && !entry->bytes && entry->state != READING)
		return false;
	bool opens = in->opcode == FUSE_OPEN;
	if (opens && reads_headers() && entry->version.size >= HEADER_FILE_BYTES && !entry->bytes &&
	    entry->state == REMOTE && ++headers_left % HEADER_PROBES)
		return false;
	if (opens &&
	    (!opens_read_only(in) || (!entry->bytes && !large && !make_room(entry->version.size))))
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
	return !entry->excluded && !entry->over && opens_read_only(in) && resident_fresh(entry->fresh_until_ns);
}

/* Answer it from memory; false if an open has to be left to Python. `source_lock` is released meanwhile. */
static bool answer_here(struct entry *entry, const struct fuse_in_header *in, uint64_t started_ns)
{
	bool opens = in->opcode == FUSE_OPEN, from_window = entry->bytes->owner == OF_WINDOW, done = true;
	entry->answering++;
	bool first = adopt(entry->bytes);
	/* Before the answer: when a reader has read the file, Python knows of it. */
	if (opens || (first && misses.free_opens))
		report(entry, (struct miss_event){.opens = 1, .from_window = from_window});
	pthread_mutex_unlock(&source_lock);
	if (opens)
		done = opens_answer_source(in, BY_MEMORY, started_ns);
	else
		answer_read(entry, in, BY_MEMORY, started_ns);
	pthread_mutex_lock(&source_lock);
	answered(entry);
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
	struct entry *entry = *place_of(in->nodeid);
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
	bool known = serving && entry && directory_of(entry) && !entry->excluded && !entry->over &&
		     !entry->wanted;
	if (known)
		entry->fresh_until_ns = fresh_until_ns;
	if (!known || entry->told)
		return known;
	struct miss_event *event = entry->wanted = malloc(sizeof(*event));
	if (!event)
		return false;
	if (entry->bytes) {
		report(entry, (struct miss_event){.bytes = entry->bytes});
		return true;
	}
	if (entry->state == WINDOW)
		unqueue(entry); /* for which there is room on a tier need not wait for room in the window */
	if (entry->state == REMOTE && !queue(entry, AHEAD, 0)) {
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
		begun[n] = fetch(*place_of(inos[n]), fresh_until_ns[n]);
	pthread_mutex_unlock(&source_lock);
}

void misses_hurry(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count && !source_hangs(); n++) {
		struct entry *entry = *place_of(inos[n]);
		if (!entry || (entry->state != AHEAD && entry->state != WINDOW))
			continue;
		unqueue(entry);
		if (!queue(entry, QUEUED, 0))
			queue_again(entry);
	}
	pthread_mutex_unlock(&source_lock);
}

bool misses_exclude(uint64_t ino, bool excluded)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *place_of(ino);
	if (entry && excluded && (entry->state == AHEAD || entry->state == WINDOW)) {
		unqueue(entry);
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

void misses_opened(small_opened *take)
{
	pthread_mutex_lock(&source_lock);
	misses.take_opened = take;
	pthread_mutex_unlock(&source_lock);
}

int misses_start(const struct miss_options *given)
{
	pthread_mutex_lock(&source_lock);
	int result = misses.events_fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -EALREADY;
	if (result >= 0) {
		misses.options = *given;
		ahead_threads.may = may_read_ahead;
		ahead_threads.begin = lower;
		window_threads.may = may_fill_window;
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

bool misses_headers(void)
{
	pthread_mutex_lock(&source_lock);
	bool headers = reads_headers();
	pthread_mutex_unlock(&source_lock);
	return headers;
}

void misses_serve(bool no_opens)
{
	pthread_mutex_lock(&source_lock);
	misses.free_opens = no_opens;
	serving = misses.events_fd >= 0 && source_threads.most;
	pthread_mutex_unlock(&source_lock);
}

/* Forget some entry that is not in use. */
static void evict(void)
{
	static unsigned hand;
	for (unsigned tries = 0; tries < BUCKETS; tries++) {
		struct entry **place = &buckets[hand++ % BUCKETS];
		for (struct entry *entry; (entry = *place); place = &entry->next) {
			if (entry->state == REMOTE && !entry->bytes && !entry->answering &&
			    !entry->told && !entry->excluded) {
				forget(place);
				return;
			}
		}
	}
}

bool misses_put(uint64_t ino, unsigned number, const char *name, size_t length, const struct miss_version *version,
		int64_t fresh_until_ns, const unsigned char *replica)
{
	if (misses.events_fd < 0 || !version->size || !length || length > MISS_NAME_BYTES ||
	    number >= MOST_DIRECTORIES)
		return false;
	struct entry *made = malloc(sizeof(*made) + length + 1);
	if (!made)
		return false;
	*made = (struct entry){
		.ino = ino,
		.version = *version,
		.directory = (uint16_t)number,
		.fresh_until_ns = fresh_until_ns,
		.shared = replica,
		.task = {.run = run},
	};
	memcpy(made->name, name, length);
	made->name[length] = 0;
	if (replica)
		memcpy(made->replica, replica, MISS_REPLICA_BYTES);
	pthread_mutex_lock(&source_lock);
	struct entry **place = place_of(ino), *known = *place;
	bool busy = known && (known->state != REMOTE || known->bytes || known->answering ||
			      known->told || known->excluded);
	const struct directory *directory = directories_at(number);
	bool put = directory && !busy;
	if (put && known)
		forget(place);
	if (put && entry_count >= MOST_ENTRIES)
		evict();
	put = put && entry_count < MOST_ENTRIES;
	if (put) {
		place = place_of(ino);
		made->generation = directory->generation;
		made->next = *place;
		*place = made;
		entry_count++;
	}
	pthread_mutex_unlock(&source_lock);
	if (!put)
		free(made);
	return put || busy;
}

bool misses_has(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	const struct entry *entry = *place_of(ino);
	bool has = entry && !entry->over && directory_of(entry) &&
		   (!entry->shared || resident_fresh(entry->fresh_until_ns));
	pthread_mutex_unlock(&source_lock);
	return has;
}

void misses_forget(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count; n++) {
		/* From now on only readers that have it open are answered from these bytes. */
		struct entry **place;
		while (*(place = place_of(inos[n])) && (*place)->answering)
			pthread_cond_wait(&no_answers, &source_lock);
		if (*place)
			forget_unless_open(place);
	}
	pthread_mutex_unlock(&source_lock);
}

void misses_forget_all(void)
{
	pthread_mutex_lock(&source_lock);
	for (unsigned bucket = 0; bucket < BUCKETS; bucket++) {
		struct entry **place = &buckets[bucket], *entry;
		while ((entry = *place)) {
			forget_unless_open(place);
			if (*place == entry)
				place = &entry->next;
		}
	}
	pthread_mutex_unlock(&source_lock);
}

struct miss_event *misses_events(void)
{
	uint64_t count;
	pthread_mutex_lock(&source_lock);
	struct miss_event *events = first_event;
	first_event = NULL;
	last_event = &first_event;
	event_count = 0;
	events_taken++;
	while (events && read(misses.events_fd, &count, sizeof(count)) < 0 && errno == EINTR)
		;
	for (const struct miss_event *event = events; event; event = event->next) {
		struct entry *entry = event->bytes ? *place_of(event->ino) : NULL;
		if (entry)
			entry->told = false;
	}
	pthread_mutex_unlock(&source_lock);
	return events;
}
