/* Opens and reads of small files that are not cached. See _misses.h.
 *
 * An entry is REMOTE, AHEAD (Python wants it, nobody waits for it), QUEUED for a source thread, READING in
 * one, or has its bytes in memory:
 *
 *   request  REMOTE, AHEAD, QUEUED, READING     bytes in memory
 *   OPEN     waits for a source thread          waits, too: the version is looked at for each open
 *   READ     waits for a source thread          is answered at once
 *   fetch    becomes AHEAD, or nothing          Python is told of them
 *
 * What is AHEAD is read by threads of its own, so readers find theirs free, and has memory of its own. The
 * first request for it makes it QUEUED.
 *
 * Opening the file and comparing its version is all that an open has to ask in any mode: what is at the
 * name now is what it was known to be. Bytes are of a version that was seen before and after they were
 * read (fstat(2)). Nobody waits for the source under `source_lock`; whoever waits for it in a thread of these
 * answers first, and closes then, because close(2) may wait, too.
 */
#define _GNU_SOURCE
#include "_misses.h"

#include "_layout.h"
#include "_waiting.h"

#include "../fuse/_journal.h"
#include "../fuse/_relay.h"
#include "../fuse/_resident.h"

#include <linux/fuse.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/xattr.h>
#include <unistd.h>

#define BUCKETS (1U << 16)
#define MOST_ENTRIES (1U << 17) /* some 160 bytes each */
#define MOST_EVENTS 65536
#define LAYOUT_BYTES 4096
#define LOWEST_OF_BEST_EFFORT (2 << 13 | 7) /* ioprio_set(2) */

enum state {
	REMOTE,
	AHEAD,
	QUEUED,
	READING,
};

/* Under `source_lock`, but for what is constant: the number, the name, the version. */
struct entry {
	struct entry *next; /* in its bucket */
	struct errand errand; /* where it is AHEAD or QUEUED */
	uint64_t ino;
	struct miss_version version;
	struct waiter *waiters;
	struct miss_bytes *bytes;
	struct miss_event *wanted; /* by Python: what will tell of it */
	struct entry *older, *newer; /* of those with bytes */
	size_t answered; /* bytes of it */
	unsigned answering; /* threads */
	unsigned generation; /* of the directory */
	uint16_t directory;
	uint8_t state;
	bool held; /* Python reads it */
	bool over; /* served from memory while it is open, and then forgotten */
	bool told; /* its bytes wait for Python */
	bool gone; /* not to be found any more */
	char name[];
};

struct directory {
	int fd;
	unsigned generation;
	unsigned users;
	bool replaced;
};

static struct miss_options options;
static bool free_opens, serving;
static struct entry *buckets[BUCKETS];
static struct {
	struct entry *first, *last;
} filled;
static size_t entry_count, memory, memory_ahead;
static struct directory *directories[MISS_DIRECTORIES];
static unsigned generations;
static struct miss_event *first_event, **last_event = &first_event;
static unsigned event_count;
static int events_fd = -1;
static pthread_cond_t no_answers = PTHREAD_COND_INITIALIZER; /* of some entry are under way */

static void run(struct errand *errand, struct lane *lane);
static void run_ahead(struct errand *errand, struct lane *lane);

/* -- bytes. Under `source_lock` */

/* Whether there is memory for one more that is read ahead. */
static bool may_read_ahead(const struct errand *first)
{
	size_t size = OF_ERRAND(first, struct entry, errand)->version.size;
	return !memory_ahead || memory_ahead + size <= options.memory_bytes / 2;
}

static void leave_bytes(struct miss_bytes *bytes)
{
	if (bytes && --bytes->users == 0) {
		*(bytes->ahead ? &memory_ahead : &memory) -= bytes->size;
		free(bytes);
		(void)pool_wake(&ahead_threads);
	}
}

/* A reader has come to them; whether it is the first. */
static bool adopt(struct miss_bytes *bytes)
{
	if (!bytes->ahead)
		return false;
	bytes->ahead = false;
	memory_ahead -= bytes->size;
	memory += bytes->size;
	(void)pool_wake(&ahead_threads);
	return true;
}

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

/* -- entries. Under `source_lock` */

static struct entry **place_of(uint64_t ino)
{
	struct entry **place = &buckets[(ino * 0x9e3779b97f4a7c15ULL) >> 48];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

/* Python is to know this. */
static void tell(struct entry *entry, struct miss_event told)
{
	struct miss_event *event = entry->wanted;
	struct miss_bytes *bytes = told.bytes;
	entry->wanted = NULL;
	if (!event && (event_count < MOST_EVENTS || bytes))
		event = malloc(sizeof(*event));
	if (!event) {
		count(COUNT_UNTOLD_OPENS, told.opens);
		return;
	}
	if (bytes)
		bytes->users++;
	told.ino = entry->ino;
	*event = told;
	entry->told |= bytes != NULL;
	bool news = !first_event;
	*last_event = event;
	last_event = &event->next;
	event_count++;
	uint64_t one = 1;
	/* It cannot be full: it is written to when there was nothing only. */
	while (news && write(events_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

static void leave_waiters(struct entry *entry)
{
	struct waiter *waiter;
	while ((waiter = entry->waiters)) {
		entry->waiters = waiter->next;
		waiter_leave(waiter);
		free(waiter);
	}
}

static bool queue(struct entry *entry, enum state state)
{
	struct pool *pool = state == AHEAD ? &ahead_threads : &source_threads;
	entry->errand.run = state == AHEAD ? run_ahead : run;
	if (!pool_queue(pool, &entry->errand))
		return false;
	entry->state = (uint8_t)state;
	return true;
}

static void unqueue(struct entry *entry)
{
	if (entry->state == QUEUED)
		pool_withdraw(&source_threads, &entry->errand);
	else if (entry->state == AHEAD)
		pool_withdraw(&ahead_threads, &entry->errand);
	if (entry->state != READING)
		entry->state = REMOTE;
}

/* It is not needed by this thread any more. */
static void leave_entry(struct entry *entry)
{
	if (entry->gone && entry->state == REMOTE && !entry->answering) {
		empty(entry);
		free(entry);
	}
}

/* It is not asked for, as far as no thread has begun. */
static void withdraw(struct entry *entry)
{
	unqueue(entry);
	if (entry->wanted && entry->state == REMOTE)
		tell(entry, (struct miss_event){.error = MISS_LEFT});
	leave_waiters(entry);
}

/* Nobody finds it any more; it is freed by who still uses it. */
static void forget(struct entry **place)
{
	struct entry *entry = *place;
	*place = entry->next;
	entry_count--;
	withdraw(entry);
	entry->gone = true;
	leave_entry(entry);
}

/* The same, but who has it open goes on reading what is in memory. */
static void forget_unless_open(struct entry **place)
{
	struct entry *entry = *place;
	/* An open that is just being answered is in the table of open files only then. */
	bool open = !free_opens && (entry->answering || resident_used(entry->ino));
	if (!entry->bytes || !open) {
		forget(place);
		return;
	}
	withdraw(entry);
	entry->over = true;
}

/* -- directories. Under `source_lock` */

static void leave_directory(struct directory *directory)
{
	if (--directory->users == 0 && directory->replaced) {
		close(directory->fd); /* of O_PATH: asks nobody */
		free(directory);
	}
}

int misses_directory(unsigned number, int fd)
{
	if (number >= MISS_DIRECTORIES)
		return -EINVAL;
	struct directory *directory = malloc(sizeof(*directory));
	if (!directory)
		return -ENOMEM;
	*directory = (struct directory){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), .users = 1};
	if (directory->fd < 0) {
		int error = errno;
		free(directory);
		return -error;
	}
	pthread_mutex_lock(&source_lock);
	struct directory *before = directories[number];
	directory->generation = ++generations;
	directories[number] = directory;
	if (before) {
		before->replaced = true;
		leave_directory(before);
	}
	pthread_mutex_unlock(&source_lock);
	return 0;
}

/* -- events */

struct miss_event *misses_events(void)
{
	uint64_t count;
	pthread_mutex_lock(&source_lock);
	struct miss_event *events = first_event;
	first_event = NULL;
	last_event = &first_event;
	event_count = 0;
	while (events && read(events_fd, &count, sizeof(count)) < 0 && errno == EINTR)
		;
	for (const struct miss_event *event = events; event; event = event->next) {
		struct entry *entry = event->bytes ? *place_of(event->ino) : NULL;
		if (entry)
			entry->told = false;
	}
	pthread_mutex_unlock(&source_lock);
	return events;
}

/* -- answers */

static void answer_read(struct entry *entry, const struct fuse_in_header *in, uint64_t started_ns)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	size_t size = 0;
	if (arg->offset < entry->version.size) {
		uint64_t rest = entry->version.size - arg->offset;
		size = rest < arg->size ? (size_t)rest : arg->size;
	}
	struct iovec parts[] = {{0}, {size ? entry->bytes->data + arg->offset : NULL, size}};
	if (reply_bytes(in->unique, parts, 2, TIME_READ_SOURCE, started_ns))
		__atomic_fetch_add(&entry->answered, size, __ATOMIC_RELAXED);
}

/* Whether its bytes are of no use to readers any more. Under `source_lock`. */
static bool served(const struct entry *entry)
{
	if (entry->state != REMOTE || entry->answering)
		return false;
	if (entry->bytes->ahead)
		return true;
	return free_opens ? entry->answered >= entry->version.size :
				    !resident_used(entry->ino);
}

/* Under `source_lock`. */
static void put_down(struct entry *entry)
{
	/* While they are on their way into a tier, the next one to open it is answered from them. */
	if (entry->gone || !entry->bytes || entry->bytes->users > 1 || !served(entry))
		return;
	if (entry->over)
		forget(place_of(entry->ino));
	else
		empty(entry);
}

/* The end of an answer that was begun with `answering` raised. Under `source_lock`. */
static void answered(struct entry *entry)
{
	if (--entry->answering)
		return;
	pthread_cond_broadcast(&no_answers);
	if (entry->gone)
		leave_entry(entry);
	else
		put_down(entry);
}

void misses_released(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *place_of(ino);
	if (entry)
		put_down(entry);
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

/* -- the source threads */

static int64_t ns_of(struct timespec time)
{
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static int compare(int fd, const struct miss_version *version)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return errno;
	bool same = S_ISREG(st.st_mode) && st.st_dev == options.device &&
		    st.st_ino == version->ino && (uint64_t)st.st_size == version->size &&
		    ns_of(st.st_mtim) == version->mtime_ns &&
		    ns_of(st.st_ctim) == version->ctime_ns;
	return same ? 0 : MISS_CHANGED;
}

/* Whether reading the file has it brought back from an archive (MISS_ARCHIVED), or who knows (errno). */
static int archived(int fd)
{
	unsigned char layout[LAYOUT_BYTES];
	ssize_t size = fgetxattr(fd, "lustre.lov", layout, sizeof(layout));
	if (size < 0)
		return errno == ENODATA || errno == EOPNOTSUPP ? 0 : errno;
	return layout_released(layout, (size_t)size) ? MISS_ARCHIVED : 0;
}

/* What a source thread is to do, and what came of it. `error`: 0, an errno, or of enum miss_error. */
struct fetch {
	struct entry *entry;
	int fd, error;
	bool must_read, may_read, ahead;
	struct miss_bytes *bytes;
};

/* Opened, and of the version. */
static int open_version(struct fetch *fetch, int directory_fd, int flags)
{
	do
		fetch->fd = openat(directory_fd, fetch->entry->name, flags);
	while (fetch->fd < 0 && errno == EINTR);
	if (fetch->fd < 0) /* what says that another thing lies there, or none */
		return errno == ENOENT || errno == ELOOP || errno == ENXIO ? MISS_CHANGED : errno;
	return compare(fetch->fd, &fetch->entry->version);
}

static int read_whole(struct fetch *fetch)
{
	size_t size = (size_t)fetch->entry->version.size;
	struct miss_bytes *bytes = malloc(sizeof(*bytes) + size);
	if (!bytes)
		return ENOMEM;
	*bytes = (struct miss_bytes){.ino = fetch->entry->ino, .users = 1, .size = size};
	int error = 0;
	for (size_t done = 0; done < size && !error;) {
		ssize_t got = pread(fetch->fd, bytes->data + done, size - done, (off_t)done);
		if (got > 0)
			done += (size_t)got;
		else if (got == 0)
			error = MISS_CHANGED;
		else if (errno != EINTR)
			error = errno;
	}
	if (!error)
		error = compare(fetch->fd, &fetch->entry->version);
	if (error)
		free(bytes);
	else
		fetch->bytes = bytes;
	return error;
}

static int carry_out(struct fetch *fetch, int directory_fd)
{
	/* O_NONBLOCK: should it be a FIFO by now, opening it must not wait for a writer. Lustre's reads
	 * honour it, so it does not stay. */
	const int flags =
		O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC;
	int error = open_version(fetch, directory_fd, flags);
	if (error || !(fetch->must_read || fetch->may_read))
		return error;
	/* An open alone does not read that. */
	if (!fetch->must_read && options.layouts && (error = archived(fetch->fd)))
		return error;
	return fcntl(fetch->fd, F_SETFL, flags & ~O_NONBLOCK) == 0 ? read_whole(fetch) : errno;
}

static void count_fetch(const struct fetch *fetch, uint64_t took_ns)
{
	if (fetch->bytes)
		count(fetch->ahead ? COUNT_AHEAD_BYTES : COUNT_SOURCE_BYTES, fetch->bytes->size);
	count_duration(fetch->ahead ? TIME_AHEAD : TIME_SOURCE, took_ns);
}

/* Those who wait are answered, or become Python's. Under `source_lock`, but not while the kernel is told. */
static void deliver(struct fetch *fetch, uint64_t took_ns)
{
	struct entry *entry = fetch->entry;
	struct waiter *waiters = entry->waiters, *waiter;
	bool good = !fetch->error && !entry->gone && entry->bytes;
	bool keeps = options.keeps || entry->wanted;
	unsigned opens = 0;
	if (!good) {
		leave_waiters(entry);
		if (entry->wanted && !queue(entry, AHEAD)) /* an open found no memory */
			tell(entry, (struct miss_event){.error = MISS_LEFT});
		leave_entry(entry);
		return;
	}
	entry->waiters = NULL;
	entry->answering++;
	for (waiter = waiters; waiter; waiter = waiter->next) {
		opens += waiter->request->opcode == FUSE_OPEN;
		waiter_take(waiter);
	}
	if (free_opens)
		opens = fetch->bytes && waiters;
	if (waiters && entry->bytes)
		adopt(entry->bytes);
	/* Before the answers: who has read a file finds that Python knows of it. */
	if (opens || fetch->bytes)
		tell(entry, (struct miss_event){.opens = opens,
						.took_ns = took_ns,
						.bytes = keeps ? fetch->bytes : NULL});
	pthread_mutex_unlock(&source_lock);
	while ((waiter = waiters)) {
		const struct fuse_in_header *in = waiter->request;
		waiters = waiter->next;
		bool done = true;
		if (in->opcode == FUSE_READ)
			answer_read(entry, in, waiter->started_ns);
		else
			done = relay_answer_open(in, TIME_OPEN_SOURCE, waiter->started_ns);
		if (done)
			journal_done(in->unique);
		else
			relay_leave(waiter->request, waiter->length);
		free(waiter);
	}
	pthread_mutex_lock(&source_lock);
	answered(entry);
}

/* Whether there is memory for so much more: what nobody needs just now goes, and what waits for Python
 * is to be read again. Under `source_lock`. */
static bool make_room(size_t size)
{
	struct entry *entry = filled.first;
	struct miss_event *event = first_event;
	while (entry && memory + size > options.memory_bytes) {
		struct entry *newer = entry->newer;
		if (entry->bytes->ahead)
			; /* is not counted there */
		else if (free_opens ? entry->state == REMOTE && !entry->answering : served(entry))
			empty(entry);
		entry = newer;
	}
	for (; event && memory + size > options.memory_bytes; event = event->next) {
		if (event->bytes && !event->bytes->ahead) {
			leave_bytes(event->bytes);
			event->bytes = NULL;
			event->error = MISS_LEFT;
			struct entry *told = *place_of(event->ino);
			if (told) /* else who wants it would wait for them */
				told->told = false;
		}
	}
	return memory + size <= options.memory_bytes;
}

static bool reads_any(const struct entry *entry)
{
	const struct waiter *waiter = entry->waiters;
	while (waiter && waiter->request->opcode != FUSE_READ)
		waiter = waiter->next;
	return waiter;
}

/* The end of a fetch: who waits is told. Under `source_lock`. */
static void end_fetch(struct fetch *fetch, uint64_t took_ns)
{
	struct entry *entry = fetch->entry;
	if (fetch->bytes && !entry->gone)
		fill(entry, fetch->bytes);
	else if (fetch->bytes)
		leave_bytes(fetch->bytes);
	if (entry->wanted && entry->gone)
		tell(entry, (struct miss_event){.error = MISS_LEFT});
	if (fetch->error && !entry->gone) {
		tell(entry, (struct miss_event){.error = fetch->error, .took_ns = took_ns});
		forget_unless_open(place_of(entry->ino));
	} else {
		/* Without bytes it is Python's: what is open has to stay in memory. */
		deliver(fetch, took_ns);
	}
}

/* Whether the number of its directory still stands for that. Under `source_lock`. */
static bool is_placed(const struct entry *entry)
{
	const struct directory *directory = directories[entry->directory];
	return directory && directory->generation == entry->generation;
}

/* Open it, and read it if that is wanted and there is memory. Under `source_lock`, but not meanwhile. */
static void carry(struct entry *entry, bool is_ahead)
{
	entry->state = REMOTE;
	if (!is_placed(entry)) {
		end_fetch(&(struct fetch){.entry = entry, .error = MISS_LEFT}, 0);
		return;
	}
	struct directory *directory = directories[entry->directory];
	struct fetch fetch = {.entry = entry, .fd = -1, .ahead = is_ahead};
	size_t size = entry->version.size;
	fetch.must_read = !entry->bytes && reads_any(entry);
	fetch.may_read = is_ahead || (!entry->bytes && make_room(size));
	bool reads = fetch.must_read || fetch.may_read;
	size_t *counted = is_ahead ? &memory_ahead : &memory;
	*counted += reads ? size : 0;
	entry->state = READING;
	for (struct waiter *waiter = entry->waiters; waiter; waiter = waiter->next)
		waiter->may_stay = false;
	directory->users++;
	pthread_mutex_unlock(&source_lock);

	uint64_t began_ns = monotonic_ns();
	fetch.error = carry_out(&fetch, directory->fd);
	uint64_t took_ns = monotonic_ns() - began_ns;
	count_fetch(&fetch, took_ns);

	pthread_mutex_lock(&source_lock);
	leave_directory(directory);
	entry->state = REMOTE;
	if (fetch.bytes)
		fetch.bytes->ahead = is_ahead;
	else if (reads)
		*counted -= size;
	bool has_bytes = fetch.bytes;
	end_fetch(&fetch, took_ns);
	if (fetch.fd < 0)
		return;
	pthread_mutex_unlock(&source_lock);
	/* The mount's pages have them now: not to be in memory twice. */
	if (has_bytes)
		(void)posix_fadvise(fetch.fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fetch.fd);
	pthread_mutex_lock(&source_lock);
}

static void run(struct errand *errand, struct lane *lane)
{
	(void)lane;
	carry(OF_ERRAND(errand, struct entry, errand), false);
}

static void run_ahead(struct errand *errand, struct lane *lane)
{
	(void)lane;
	carry(OF_ERRAND(errand, struct entry, errand), true);
}

/* Where nobody waits, those who read go first. */
static void lower(void)
{
	if (!options.nice)
		return;
	int now = getpriority(PRIO_PROCESS, 0); /* the calling thread's */
	if (setpriority(PRIO_PROCESS, 0, now > options.nice ? now : options.nice) == 0)
		syscall(SYS_ioprio_set, 1, 0, LOWEST_OF_BEST_EFFORT);
}

/* -- for those who take requests */

static bool is_open_for_reading(const void *arg)
{
	return (((const struct fuse_open_in *)arg)->flags & O_ACCMODE) == O_RDONLY;
}

/* Nobody waits for it any more: it need not be asked for, or not now. Under `source_lock`. */
static void dequeue(struct entry *entry)
{
	if (entry->state == QUEUED && !entry->waiters) {
		unqueue(entry);
		if (entry->wanted && !queue(entry, AHEAD))
			tell(entry, (struct miss_event){.error = MISS_LEFT});
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

/* Have it wait for a source thread. Under `source_lock`. */
static bool enqueue(struct entry *entry, const struct fuse_in_header *in, size_t length, bool kept,
		    uint64_t started_ns)
{
	if (!is_placed(entry) || source_hangs())
		return false;
	struct waiter *waiter = waiter_new(sizeof(*waiter), in, length, started_ns);
	if (!waiter)
		return false;
	bool was_ahead = entry->state == AHEAD;
	if (was_ahead)
		unqueue(entry);
	if (entry->state == REMOTE && !queue(entry, QUEUED)) {
		if (was_ahead && !queue(entry, AHEAD))
			tell(entry, (struct miss_event){.error = MISS_LEFT});
		free(waiter);
		return false;
	}
	/* Of an open the kernel tells when who waits for it gets a signal. So it may go on waiting here for a
	 * thread, which takes less memory; a read may not (O_DIRECT). */
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
	if (entry->held || entry->over)
		return false;
	if (in->opcode == FUSE_OPEN &&
	    (!is_open_for_reading(arg) || (!entry->bytes && !make_room(entry->version.size))))
		return false; /* what is open has to stay in memory */
	return enqueue(entry, in, length, kept, started_ns);
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
	bool here = entry && reads && entry->bytes;
	bool took = here || (entry && takes(entry, in, length, kept, started_ns));
	if (here) {
		entry->answering++;
		if (adopt(entry->bytes) && free_opens)
			tell(entry, (struct miss_event){.opens = 1});
		pthread_mutex_unlock(&source_lock);
		answer_read(entry, in, started_ns);
		if (kept)
			journal_done(in->unique);
		pthread_mutex_lock(&source_lock);
		answered(entry);
	}
	pthread_mutex_unlock(&source_lock);
	return took;
}

/* -- for Python */

/* Some entry that nobody needs goes. Under `source_lock`. */
static void evict(void)
{
	static unsigned hand;
	for (unsigned tries = 0; tries < BUCKETS; tries++) {
		struct entry **place = &buckets[hand++ % BUCKETS];
		for (struct entry *entry; (entry = *place); place = &entry->next) {
			if (entry->state == REMOTE && !entry->bytes && !entry->answering &&
			    !entry->told && !entry->held) {
				forget(place);
				return;
			}
		}
	}
}

bool misses_put(uint64_t ino, unsigned number, const char *name, size_t length,
		const struct miss_version *version)
{
	if (events_fd < 0 || !version->size || version->size > MISS_MOST_BYTES || !length ||
	    length > MISS_NAME_BYTES || number >= MISS_DIRECTORIES)
		return false;
	struct entry *made = malloc(sizeof(*made) + length + 1);
	if (!made)
		return false;
	*made = (struct entry){
		.ino = ino,
		.version = *version,
		.directory = (uint16_t)number,
	};
	memcpy(made->name, name, length);
	made->name[length] = 0;
	pthread_mutex_lock(&source_lock);
	struct entry **place = place_of(ino), *known = *place;
	bool busy = known && (known->state != REMOTE || known->bytes || known->answering ||
			      known->told || known->held);
	bool put = directories[number] && !busy;
	if (put && known)
		forget(place);
	if (put && entry_count >= MOST_ENTRIES)
		evict();
	put = put && entry_count < MOST_ENTRIES;
	if (put) {
		place = place_of(ino);
		made->generation = directories[number]->generation;
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
	bool has = entry && !entry->over && is_placed(entry);
	pthread_mutex_unlock(&source_lock);
	return has;
}

void misses_forget(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count; n++) {
		/* Nothing is answered from these bytes afterwards, but to who has them open. */
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

/* Under `source_lock`. */
static bool fetch(struct entry *entry)
{
	bool known = serving && entry && is_placed(entry) && !entry->held && !entry->over &&
		     !entry->wanted;
	if (!known || entry->told)
		return known;
	struct miss_event *event = entry->wanted = malloc(sizeof(*event));
	if (!event)
		return false;
	if (entry->bytes) {
		tell(entry, (struct miss_event){.bytes = entry->bytes});
	} else if (entry->state == REMOTE && !queue(entry, AHEAD)) {
		entry->wanted = NULL;
		free(event);
		return false;
	}
	return true;
}

void misses_fetch(const uint64_t *inos, size_t count, unsigned threads, bool *begun)
{
	pthread_mutex_lock(&source_lock);
	ahead_threads.most = threads;
	for (size_t n = 0; n < count; n++)
		begun[n] = fetch(*place_of(inos[n]));
	pthread_mutex_unlock(&source_lock);
}

bool misses_hold(uint64_t ino, bool held)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *place_of(ino);
	if (entry && held && entry->state == AHEAD) {
		unqueue(entry);
		free(entry->wanted);
		entry->wanted = NULL;
	}
	bool busy = entry && (entry->state != REMOTE || entry->told);
	if (entry)
		entry->held = held;
	pthread_mutex_unlock(&source_lock);
	return busy;
}

int misses_start(const struct miss_options *given)
{
	pthread_mutex_lock(&source_lock);
	int result = events_fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -EALREADY;
	if (result >= 0) {
		options = *given;
		ahead_threads.may = may_read_ahead;
		ahead_threads.begin = lower;
		events_fd = result;
	} else if (events_fd < 0) {
		result = -errno;
	}
	pthread_mutex_unlock(&source_lock);
	return result;
}

void misses_serve(bool no_opens)
{
	pthread_mutex_lock(&source_lock);
	free_opens = no_opens;
	serving = events_fd >= 0 && source_threads.most;
	pthread_mutex_unlock(&source_lock);
}
