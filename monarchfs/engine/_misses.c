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
 * read (fstat(2)). Nobody waits for the source under `lock`; whoever waits for it in a thread of these
 * answers first, and closes then, because close(2) may wait, too.
 */
#define _GNU_SOURCE
#include "_misses.h"

#include "_layout.h"

#include "../fuse/_reply.h"
#include "../fuse/_journal.h"
#include "../fuse/_pool.h"
#include "../fuse/_resident.h"
#include "../fuse/_table.h"

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
#define MOST_STUCK 64 /* so many threads may hang in the source; then all of this is Python's */
#define MOST_STUCK_AHEAD 16 /* so many of those that read ahead; then nothing more is */
#define LAYOUT_BYTES 4096
#define LOWEST_OF_BEST_EFFORT (2 << 13 | 7) /* ioprio_set(2) */

/* A request. */
struct waiter {
	struct waiter *next;
	uint64_t started_ns;
	size_t length;
	char request[];
};

enum state {
	REMOTE,
	AHEAD,
	QUEUED,
	READING,
};

/* Under `lock`, but for what is constant: the number, the name, the version. */
struct entry {
	struct entry *next; /* in its bucket */
	struct entry *later, *sooner; /* of those AHEAD, QUEUED, or READING */
	uint64_t ino;
	struct miss_version version;
	struct waiter *waiters;
	struct miss_bytes *bytes;
	struct miss_event *wanted; /* by Python: what will tell of it */
	struct entry *older, *newer; /* of those with bytes */
	uint64_t began_ns; /* to be read */
	size_t answered; /* bytes of it */
	unsigned answering; /* threads */
	unsigned generation; /* of the directory */
	uint16_t directory;
	uint8_t state;
	bool held; /* Python reads it */
	bool over; /* served from memory while it is open, and then forgotten */
	bool told; /* its bytes wait for Python */
	bool ahead; /* it is read by a thread for those */
	bool stuck; /* its thread is not counted on */
	bool gone; /* not to be found any more */
	char name[];
};

struct directory {
	int fd;
	unsigned generation;
	unsigned users;
	bool replaced;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct miss_options options;
static int fuse_fd;
static bool free_opens;
static void (*leave)(const void *request, size_t length);
static struct entry *buckets[BUCKETS];
static struct {
	struct entry *first, *last;
} ahead, queue, reading, filled;
static size_t entry_count, memory, memory_ahead;
static unsigned stuck, waiting;
static unsigned active_ahead, stuck_ahead; /* threads */
static struct directory *directories[MISS_DIRECTORIES];
static unsigned generations;
static struct miss_event *first_event, **last_event = &first_event;
static unsigned event_count;
static int events_fd = -1;
static pthread_cond_t no_answers = PTHREAD_COND_INITIALIZER; /* of some entry are under way */
static struct miss_counts counts;

static bool any(void);
static void take(struct lane *lane);
static struct pool pool = {.lock = &lock, .any = any, .take = take};

static bool any_ahead(void);
static bool queue_ahead(struct entry *entry);
static void take_ahead(struct lane *lane);
static void lower(void);
static struct pool pool_ahead = {
	.lock = &lock, .any = any_ahead, .take = take_ahead, .begin = lower};

/* -- bytes. Under `lock` */

/* There may be more to be read ahead. */
static bool wake_ahead(void)
{
	return !any_ahead() || pool_wake(&pool_ahead, stuck_ahead);
}

static void leave_bytes(struct miss_bytes *bytes)
{
	if (bytes && --bytes->users == 0) {
		*(bytes->ahead ? &memory_ahead : &memory) -= bytes->size;
		free(bytes);
		wake_ahead();
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
	wake_ahead();
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

/* -- entries. Under `lock` */

static struct entry **place_of(uint64_t ino)
{
	struct entry **place = &buckets[(ino * 0x9e3779b97f4a7c15ULL) >> 48];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

static void add_to(struct entry **first, struct entry **last, struct entry *entry)
{
	entry->later = NULL;
	entry->sooner = *last;
	*(*last ? &(*last)->later : first) = entry;
	*last = entry;
}

static void take_from(struct entry **first, struct entry **last, struct entry *entry)
{
	*(entry->sooner ? &entry->sooner->later : first) = entry->later;
	*(entry->later ? &entry->later->sooner : last) = entry->sooner;
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
		__atomic_fetch_add(&counts.lost, told.opens, __ATOMIC_RELAXED);
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
		leave(waiter->request, waiter->length);
		free(waiter);
		waiting--;
	}
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
	if (entry->state == QUEUED)
		take_from(&queue.first, &queue.last, entry);
	else if (entry->state == AHEAD)
		take_from(&ahead.first, &ahead.last, entry);
	if (entry->state != READING)
		entry->state = REMOTE;
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

/* -- directories. Under `lock` */

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
	pthread_mutex_lock(&lock);
	struct directory *before = directories[number];
	directory->generation = ++generations;
	directories[number] = directory;
	if (before) {
		before->replaced = true;
		leave_directory(before);
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

/* -- events */

struct miss_event *misses_events(void)
{
	uint64_t count;
	pthread_mutex_lock(&lock);
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
	pthread_mutex_unlock(&lock);
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
	struct fuse_out_header out = {.len = (uint32_t)(sizeof(out) + size), .unique = in->unique};
	struct iovec parts[] = {{&out, sizeof(out)},
				{size ? entry->bytes->data + arg->offset : NULL, size}};
	ssize_t sent;
	do {
		sent = writev(fuse_fd, parts, size ? 2 : 1);
	} while (sent < 0 && errno == EINTR);
	table_answered();
	if (sent >= 0) { /* else nobody waits any more */
		__atomic_fetch_add(&counts.bytes, size, __ATOMIC_RELAXED);
		__atomic_fetch_add(&entry->answered, size, __ATOMIC_RELAXED);
		relay_time(&counts.reads, relay_now_ns() - started_ns);
	}
}

/* Whether its bytes are of no use to readers any more. Under `lock`. */
static bool served(const struct entry *entry)
{
	if (entry->state != REMOTE || entry->answering)
		return false;
	if (entry->bytes->ahead)
		return true;
	return free_opens ? entry->answered >= entry->version.size :
				    !resident_used(entry->ino);
}

/* Under `lock`. */
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

/* The end of an answer that was begun with `answering` raised. Under `lock`. */
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
	pthread_mutex_lock(&lock);
	struct entry *entry = *place_of(ino);
	if (entry)
		put_down(entry);
	pthread_mutex_unlock(&lock);
}

void misses_leave_bytes(struct miss_bytes *bytes)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = bytes->users > 1 ? *place_of(bytes->ino) : NULL;
	bool same = entry && entry->bytes == bytes;
	leave_bytes(bytes);
	if (same)
		put_down(entry);
	pthread_mutex_unlock(&lock);
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
	bool must_read, may_read;
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

/* Under `lock`. */
static void count_fetch(const struct fetch *fetch, uint64_t took_ns)
{
	bool for_readers = !fetch->entry->ahead;
	if (fetch->bytes)
		__atomic_fetch_add(for_readers ? &counts.source_bytes : &counts.ahead_bytes,
				   fetch->bytes->size, __ATOMIC_RELAXED);
	relay_time(for_readers ? &counts.source : &counts.ahead, took_ns);
}

/* Those who wait are answered, or become Python's. Under `lock`, but not while the kernel is told. */
static void deliver(struct fetch *fetch, uint64_t took_ns)
{
	struct entry *entry = fetch->entry;
	struct waiter *waiters = entry->waiters, *waiter;
	bool good = !fetch->error && !entry->gone && entry->bytes;
	bool keeps = options.keeps || entry->wanted;
	unsigned opens = 0;
	if (!good) {
		leave_waiters(entry);
		if (entry->wanted) /* an open found no memory */
			queue_ahead(entry);
		leave_entry(entry);
		return;
	}
	entry->waiters = NULL;
	entry->answering++;
	for (waiter = waiters; waiter; waiter = waiter->next) {
		opens += ((const struct fuse_in_header *)waiter->request)->opcode == FUSE_OPEN;
		waiting--;
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
	pthread_mutex_unlock(&lock);
	while ((waiter = waiters)) {
		const struct fuse_in_header *in = (const void *)waiter->request;
		waiters = waiter->next;
		bool done = true;
		if (in->opcode == FUSE_READ)
			answer_read(entry, in, waiter->started_ns);
		else
			done = relay_answer_open(in, &counts.opens, waiter->started_ns);
		if (done)
			journal_done(in->unique);
		else
			leave(waiter->request, waiter->length);
		free(waiter);
	}
	pthread_mutex_lock(&lock);
	answered(entry);
}

static bool any(void)
{
	return queue.first;
}

/* Whether there is memory for so much more: what nobody needs just now goes, and what waits for Python
 * is to be read again. Under `lock`. */
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
	while (waiter && ((const struct fuse_in_header *)waiter->request)->opcode != FUSE_READ)
		waiter = waiter->next;
	return waiter;
}

/* The end of a fetch: who waits is told. Under `lock`. */
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

/* Whether the number of its directory still stands for that. Under `lock`. */
static bool is_placed(const struct entry *entry)
{
	const struct directory *directory = directories[entry->directory];
	return directory && directory->generation == entry->generation;
}

/* Open it, and read it if that is wanted and there is memory. Under `lock`, and not any more afterwards. */
static void carry(struct entry *entry, bool is_ahead)
{
	if (!is_placed(entry)) {
		entry->state = REMOTE;
		end_fetch(&(struct fetch){.entry = entry, .error = MISS_LEFT}, 0);
		pthread_mutex_unlock(&lock);
		return;
	}
	struct directory *directory = directories[entry->directory];
	struct fetch fetch = {.entry = entry, .fd = -1};
	size_t size = entry->version.size;
	fetch.must_read = !entry->bytes && reads_any(entry);
	fetch.may_read = is_ahead || (!entry->bytes && make_room(size));
	bool reads = fetch.must_read || fetch.may_read;
	size_t *counted = is_ahead ? &memory_ahead : &memory;
	*counted += reads ? size : 0;
	entry->state = READING;
	entry->ahead = is_ahead;
	active_ahead += is_ahead;
	entry->began_ns = relay_now_ns();
	add_to(&reading.first, &reading.last, entry);
	directory->users++;
	pthread_mutex_unlock(&lock);

	fetch.error = carry_out(&fetch, directory->fd);
	uint64_t took_ns = relay_now_ns() - entry->began_ns;

	pthread_mutex_lock(&lock);
	count_fetch(&fetch, took_ns);
	leave_directory(directory);
	take_from(&reading.first, &reading.last, entry);
	entry->state = REMOTE;
	*(is_ahead ? &stuck_ahead : &stuck) -= entry->stuck;
	active_ahead -= is_ahead;
	entry->ahead = entry->stuck = false;
	if (fetch.bytes)
		fetch.bytes->ahead = is_ahead;
	else if (reads)
		*counted -= size;
	end_fetch(&fetch, took_ns);
	pthread_mutex_unlock(&lock);
	if (fetch.fd >= 0) {
		/* The mount's pages have them now: not to be in memory twice. */
		if (fetch.bytes)
			(void)posix_fadvise(fetch.fd, 0, 0, POSIX_FADV_DONTNEED);
		close(fetch.fd);
	}
}

static void take(struct lane *lane)
{
	(void)lane;
	struct entry *entry = queue.first;
	take_from(&queue.first, &queue.last, entry);
	carry(entry, false);
}

/* -- what nobody waits for. Under `lock` */

static bool any_ahead(void)
{
	size_t most = options.memory_bytes / 2;
	return ahead.first && active_ahead - stuck_ahead < pool_ahead.most &&
	       (!memory_ahead || memory_ahead + ahead.first->version.size <= most);
}

static void take_ahead(struct lane *lane)
{
	(void)lane;
	struct entry *entry = ahead.first;
	take_from(&ahead.first, &ahead.last, entry);
	carry(entry, true);
}

/* Have a thread come to it. */
static bool queue_ahead(struct entry *entry)
{
	entry->state = AHEAD;
	add_to(&ahead.first, &ahead.last, entry);
	return wake_ahead();
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

/* Under `lock`. */
static bool add_waiter(struct entry *entry, const void *request, size_t length, uint64_t started_ns)
{
	struct waiter *waiter = malloc(sizeof(*waiter) + length);
	if (!waiter)
		return false;
	*waiter = (struct waiter){.started_ns = started_ns, .length = length};
	memcpy(waiter->request, request, length);
	struct waiter **last = &entry->waiters;
	while (*last)
		last = &(*last)->next;
	*last = waiter;
	waiting++;
	return true;
}

/* Have it wait for a source thread. Under `lock`. */
static bool enqueue(struct entry *entry, const void *request, size_t length, bool kept,
		    uint64_t started_ns)
{
	if (!is_placed(entry) || stuck >= MOST_STUCK)
		return false;
	if (!add_waiter(entry, request, length, started_ns))
		return false;
	if (entry->state == AHEAD) {
		take_from(&ahead.first, &ahead.last, entry);
		entry->state = REMOTE;
	}
	if (entry->state == REMOTE) {
		entry->state = QUEUED;
		add_to(&queue.first, &queue.last, entry);
		if (!pool_wake(&pool, stuck)) {
			take_from(&queue.first, &queue.last, entry);
			entry->state = REMOTE;
			free(entry->waiters);
			entry->waiters = NULL;
			waiting--;
			return false;
		}
	}
	if (!kept)
		journal_keep(request, length);
	return true;
}

/* Under `lock`. */
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
	if (!pool.most ||
	    body < (reads ? sizeof(struct fuse_read_in) : sizeof(struct fuse_open_in)))
		return false;
	pthread_mutex_lock(&lock);
	struct entry *entry = *place_of(in->nodeid);
	bool here = entry && reads && entry->bytes;
	bool took = here || (entry && takes(entry, in, length, kept, started_ns));
	if (here) {
		entry->answering++;
		if (adopt(entry->bytes) && free_opens)
			tell(entry, (struct miss_event){.opens = 1});
		pthread_mutex_unlock(&lock);
		answer_read(entry, in, started_ns);
		if (kept)
			journal_done(in->unique);
		pthread_mutex_lock(&lock);
		answered(entry);
	}
	pthread_mutex_unlock(&lock);
	return took;
}

/* -- for Python */

/* Have a waiter carried out by Python. Under `lock`. */
static void leave_one(struct waiter **place)
{
	struct waiter *waiter = *place;
	*place = waiter->next;
	leave(waiter->request, waiter->length);
	free(waiter);
	waiting--;
}

/* Nobody waits for it any more: it need not be asked for, or not now. Under `lock`. */
static void dequeue(struct entry *entry)
{
	if (entry->state == QUEUED && !entry->waiters) {
		take_from(&queue.first, &queue.last, entry);
		entry->state = REMOTE;
		if (entry->wanted)
			queue_ahead(entry);
	}
}

static struct waiter **find_waiter(struct entry *entry, uint64_t unique)
{
	struct waiter **place = &entry->waiters;
	while (*place && ((const struct fuse_in_header *)(*place)->request)->unique != unique)
		place = &(*place)->next;
	return place;
}

bool misses_leave(uint64_t unique)
{
	bool found = false;
	pthread_mutex_lock(&lock);
	struct entry *lists[] = {queue.first, reading.first};
	for (unsigned list = 0; list < 2; list++) {
		for (struct entry *entry = lists[list], *later; entry && !found; entry = later) {
			struct waiter **place = find_waiter(entry, unique);
			later = entry->later;
			if ((found = *place)) {
				leave_one(place);
				dequeue(entry);
			}
		}
	}
	pthread_mutex_unlock(&lock);
	return found;
}

/* Of an open the kernel tells when who waits for it gets a signal. So it may go on waiting here for a
 * thread, which takes less memory; a read may not (O_DIRECT). */
static bool may_stay(const struct entry *entry, const struct waiter *waiter)
{
	return entry->state == QUEUED &&
	       ((const struct fuse_in_header *)waiter->request)->opcode == FUSE_OPEN;
}

static void leave_those_before(struct entry *entry, uint64_t before_ns, unsigned *most)
{
	bool left = false;
	for (struct waiter **place = &entry->waiters; *place;) {
		if ((*place)->started_ns >= before_ns || (!*most && may_stay(entry, *place))) {
			place = &(*place)->next;
			continue;
		}
		*most -= *most > 0;
		leave_one(place);
		left = true;
	}
	if (entry->state == READING && !entry->stuck) {
		if (entry->ahead && entry->began_ns < before_ns && stuck_ahead < MOST_STUCK_AHEAD) {
			entry->stuck = true;
			stuck_ahead++;
			wake_ahead();
		} else if (left && !entry->ahead) {
			entry->stuck = true;
			stuck++;
		}
	}
	dequeue(entry);
}

unsigned misses_leave_older(uint64_t before_ns, unsigned most)
{
	pthread_mutex_lock(&lock);
	struct entry *lists[] = {queue.first, reading.first};
	for (unsigned list = 0; before_ns && list < 2; list++) {
		for (struct entry *entry = lists[list], *later; entry; entry = later) {
			later = entry->later;
			leave_those_before(entry, before_ns, &most);
		}
	}
	unsigned rest = waiting;
	pthread_mutex_unlock(&lock);
	return rest;
}

bool misses_any_since(uint64_t since_ns)
{
	bool found = false;
	pthread_mutex_lock(&lock);
	if (queue.last)
		found = queue.last->waiters->started_ns >= since_ns;
	/* One for each thread, and nobody may wait for some of them. */
	for (const struct entry *entry = reading.last; entry && !found; entry = entry->sooner)
		found = entry->waiters && entry->waiters->started_ns >= since_ns;
	pthread_mutex_unlock(&lock);
	return found;
}

/* Some entry that nobody needs goes. Under `lock`. */
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
	pthread_mutex_lock(&lock);
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
	pthread_mutex_unlock(&lock);
	if (!put)
		free(made);
	return put || busy;
}

bool misses_has(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	const struct entry *entry = *place_of(ino);
	bool has = entry && !entry->over && is_placed(entry);
	pthread_mutex_unlock(&lock);
	return has;
}

void misses_forget(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&lock);
	for (size_t n = 0; n < count; n++) {
		/* Nothing is answered from these bytes afterwards, but to who has them open. */
		struct entry **place;
		while (*(place = place_of(inos[n])) && (*place)->answering)
			pthread_cond_wait(&no_answers, &lock);
		if (*place)
			forget_unless_open(place);
	}
	pthread_mutex_unlock(&lock);
}

void misses_forget_all(void)
{
	pthread_mutex_lock(&lock);
	for (unsigned bucket = 0; bucket < BUCKETS; bucket++) {
		struct entry **place = &buckets[bucket], *entry;
		while ((entry = *place)) {
			forget_unless_open(place);
			if (*place == entry)
				place = &entry->next;
		}
	}
	pthread_mutex_unlock(&lock);
}

/* Under `lock`. */
static bool fetch(struct entry *entry)
{
	bool known = pool.most && entry && is_placed(entry) && !entry->held && !entry->over &&
		     !entry->wanted;
	if (!known || entry->told)
		return known;
	struct miss_event *event = entry->wanted = malloc(sizeof(*event));
	if (!event)
		return false;
	if (entry->bytes) {
		tell(entry, (struct miss_event){.bytes = entry->bytes});
	} else if (entry->state == REMOTE && !queue_ahead(entry)) {
		take_from(&ahead.first, &ahead.last, entry);
		entry->state = REMOTE;
		entry->wanted = NULL;
		free(event);
		return false;
	}
	return true;
}

void misses_fetch(const uint64_t *inos, size_t count, unsigned threads, bool *begun)
{
	pthread_mutex_lock(&lock);
	pool_ahead.most = threads;
	for (size_t n = 0; n < count; n++)
		begun[n] = fetch(*place_of(inos[n]));
	pthread_mutex_unlock(&lock);
}

bool misses_hold(uint64_t ino, bool held)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = *place_of(ino);
	if (entry && held && entry->state == AHEAD) {
		take_from(&ahead.first, &ahead.last, entry);
		entry->state = REMOTE;
		free(entry->wanted);
		entry->wanted = NULL;
	}
	bool busy = entry && (entry->state != REMOTE || entry->told);
	if (entry)
		entry->held = held;
	pthread_mutex_unlock(&lock);
	return busy;
}

int misses_start(const struct miss_options *given)
{
	pthread_mutex_lock(&lock);
	int result = events_fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -EALREADY;
	if (result >= 0) {
		options = *given;
		events_fd = result;
	} else if (events_fd < 0) {
		result = -errno;
	}
	pthread_mutex_unlock(&lock);
	return result;
}

void misses_serve(int fd, unsigned threads, bool no_opens,
		  void (*python)(const void *request, size_t length))
{
	pthread_mutex_lock(&lock);
	fuse_fd = fd;
	free_opens = no_opens;
	leave = python;
	pool.most = events_fd < 0 ? 0 : threads;
	pthread_mutex_unlock(&lock);
}

void misses_count(struct miss_counts *to)
{
	const uint64_t *from = (const uint64_t *)&counts;
	for (size_t i = 0; i < sizeof(counts) / sizeof(*from); i++)
		((uint64_t *)to)[i] = __atomic_load_n(&from[i], __ATOMIC_RELAXED);
}
