/* The entries of small files, and their bytes in memory. See _miss_entries.h. */
#define _GNU_SOURCE
#include "_miss_entries.h"

#include "../fuse/_resident.h"

#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define BUCKETS (1U << 16)
#define MOST_ENTRIES (1U << 17) /* some 160 bytes each */
#define MOST_EVENTS 65536

struct misses misses = {.events_fd = -1};

static struct entry *buckets[BUCKETS];
static struct {
	struct entry *first, *last;
} filled;
static size_t entry_count;
static struct directory *directories[MISS_DIRECTORIES];
static unsigned generations;
static struct miss_event *first_event, **last_event = &first_event;
static unsigned event_count, events_taken = 1; /* an entry that was never opened has 0 */
static pthread_cond_t no_answers = PTHREAD_COND_INITIALIZER; /* signalled when an entry has none under way */

/* -- bytes. Under `source_lock`, like everything up to the functions for Python */

bool miss_may_read_ahead(const struct task *first)
{
	size_t size = OF_TASK(first, struct entry, task)->version.size;
	size_t taken = misses.memory[OF_PYTHON];
	return !taken || taken + size <= misses.options.memory_bytes / 2;
}

void miss_leave_bytes(struct miss_bytes *bytes)
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

bool miss_adopt(struct miss_bytes *bytes)
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

void miss_fill(struct entry *entry, struct miss_bytes *bytes)
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
	miss_leave_bytes(entry->bytes);
	entry->bytes = NULL;
}

/* -- entries */

struct entry **miss_place_of(uint64_t ino)
{
	struct entry **place = &buckets[(ino * 0x9e3779b97f4a7c15ULL) >> 48];
	while (*place && (*place)->ino != ino)
		place = &(*place)->next;
	return place;
}

void miss_report(struct entry *entry, struct miss_event told)
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

void miss_leave_waiters(struct entry *entry)
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

bool miss_queue(struct entry *entry, enum state state, uint32_t group)
{
	entry->task.group = group;
	if (!pool_queue(pool_of(state), &entry->task))
		return false;
	entry->state = (uint8_t)state;
	return true;
}

void miss_unqueue(struct entry *entry)
{
	if (entry->state == REMOTE || entry->state == READING)
		return;
	pool_withdraw(pool_of(entry->state), &entry->task);
	entry->state = REMOTE;
}

void miss_leave_entry(struct entry *entry)
{
	if (entry->gone && entry->state == REMOTE && !entry->answering) {
		empty(entry);
		free(entry);
	}
}

/* Take it out of the queue, unless a thread has begun. */
static void withdraw(struct entry *entry)
{
	miss_unqueue(entry);
	if (entry->wanted && entry->state == REMOTE)
		miss_report(entry, (struct miss_event){.error = MISS_LEFT});
	miss_leave_waiters(entry);
}

/* Take it out of the table. Its last user frees it. */
static void forget(struct entry **place)
{
	struct entry *entry = *place;
	*place = entry->next;
	entry_count--;
	withdraw(entry);
	entry->gone = true;
	miss_leave_entry(entry);
}

void miss_forget_unless_open(struct entry **place)
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

struct directory *miss_directory_of(const struct entry *entry)
{
	struct directory *directory = directories[entry->directory];
	return directory && directory->generation == entry->generation ? directory : NULL;
}

void miss_leave_directory(struct directory *directory)
{
	if (--directory->users == 0 && directory->replaced) {
		close(directory->fd); /* of O_PATH: does not block */
		free(directory);
	}
}

int misses_directory(unsigned number, int fd, const char *path)
{
	if (number >= MISS_DIRECTORIES)
		return -EINVAL;
	struct directory *directory = malloc(sizeof(*directory) + strlen(path) + 1);
	if (!directory)
		return -ENOMEM;
	*directory = (struct directory){.fd = fcntl(fd, F_DUPFD_CLOEXEC, 0), .users = 1};
	strcpy(directory->path, path);
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
		miss_leave_directory(before);
	}
	pthread_mutex_unlock(&source_lock);
	return 0;
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

static void put_down(struct entry *entry)
{
	/* While they are on their way into a tier, the next open is answered from them. */
	if (entry->gone || !entry->bytes || entry->bytes->users > 1 || !served(entry))
		return;
	if (entry->over)
		forget(miss_place_of(entry->ino));
	else
		empty(entry);
}

void miss_answered(struct entry *entry)
{
	if (--entry->answering)
		return;
	pthread_cond_broadcast(&no_answers);
	if (entry->gone)
		miss_leave_entry(entry);
	else
		put_down(entry);
	miss_make_window_room();
}

void misses_released(uint64_t ino)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = *miss_place_of(ino);
	if (entry)
		put_down(entry);
	pthread_mutex_unlock(&source_lock);
}

void misses_leave_bytes(struct miss_bytes *bytes)
{
	pthread_mutex_lock(&source_lock);
	struct entry *entry = bytes->users > 1 ? *miss_place_of(bytes->ino) : NULL;
	bool same = entry && entry->bytes == bytes;
	miss_leave_bytes(bytes);
	if (same)
		put_down(entry);
	pthread_mutex_unlock(&source_lock);
}

bool miss_make_room(size_t size)
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
			miss_leave_bytes(event->bytes);
			event->bytes = NULL;
			event->error = MISS_LEFT;
			struct entry *told = *miss_place_of(event->ino);
			if (told) /* else a caller would go on waiting for them */
				told->told = false;
		}
	}
	return *taken + size <= misses.options.memory_bytes;
}

/* -- the window */

bool miss_may_fill_window(const struct task *first)
{
	return misses.memory[OF_WINDOW] + OF_TASK(first, struct entry, task)->version.size <= misses.window_bytes;
}

void miss_make_window_room(void)
{
	const struct task *next = window_threads.first;
	if (!misses.free_opens || !next || misses.window_asked <= misses.window_bytes / 4 || miss_may_fill_window(next))
		return;
	for (struct entry *entry = filled.first, *newer; entry; entry = newer) {
		newer = entry->newer;
		if (entry->bytes->owner == OF_WINDOW && !entry->bytes->unread && entry->state == REMOTE &&
		    !entry->answering)
			empty(entry);
	}
}

/* Under `source_lock`. */
static bool into_window(struct entry *entry, int64_t fresh_until_ns)
{
	if (!entry || !miss_directory_of(entry) || entry->excluded || entry->over || entry->told || entry->wanted)
		return false;
	if (entry->opened_in == events_taken)
		return false; /* Python has not heard yet that a reader has it */
	if (!entry->bytes && entry->state == REMOTE && !miss_queue(entry, WINDOW, 0))
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
		begun[n] = misses.window_bytes && into_window(*miss_place_of(inos[n]), fresh_until_ns[n]);
	miss_make_window_room();
	pthread_mutex_unlock(&source_lock);
}

void misses_window_drop(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count; n++) {
		struct entry *entry = *miss_place_of(inos[n]);
		if (entry && entry->state == WINDOW)
			miss_unqueue(entry);
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
	miss_make_window_room();
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

/* -- for Python */

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

bool misses_put(uint64_t ino, unsigned number, const char *name, size_t length,
		const struct miss_version *version, const struct miss_replica *replica)
{
	if (misses.events_fd < 0 || !version->size || !length || length > MISS_NAME_BYTES ||
	    number >= MISS_DIRECTORIES)
		return false;
	struct entry *made = malloc(sizeof(*made) + length + 1);
	if (!made)
		return false;
	*made = (struct entry){
		.ino = ino,
		.version = *version,
		.directory = (uint16_t)number,
		.task = {.run = miss_run},
	};
	memcpy(made->name, name, length);
	made->name[length] = 0;
	if (replica) {
		made->replica = *replica;
		made->shared = true;
	}
	pthread_mutex_lock(&source_lock);
	struct entry **place = miss_place_of(ino), *known = *place;
	bool busy = known && (known->state != REMOTE || known->bytes || known->answering ||
			      known->told || known->excluded);
	bool put = directories[number] && !busy;
	if (put && known)
		forget(place);
	if (put && entry_count >= MOST_ENTRIES)
		evict();
	put = put && entry_count < MOST_ENTRIES;
	if (put) {
		place = miss_place_of(ino);
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
	const struct entry *entry = *miss_place_of(ino);
	bool has = entry && !entry->over && miss_directory_of(entry) &&
		   (!entry->shared || resident_fresh(entry->replica.fresh_until_ns));
	pthread_mutex_unlock(&source_lock);
	return has;
}

void misses_forget(const uint64_t *inos, size_t count)
{
	pthread_mutex_lock(&source_lock);
	for (size_t n = 0; n < count; n++) {
		/* From now on only readers that have it open are answered from these bytes. */
		struct entry **place;
		while (*(place = miss_place_of(inos[n])) && (*place)->answering)
			pthread_cond_wait(&no_answers, &source_lock);
		if (*place)
			miss_forget_unless_open(place);
	}
	pthread_mutex_unlock(&source_lock);
}

void misses_forget_all(void)
{
	pthread_mutex_lock(&source_lock);
	for (unsigned bucket = 0; bucket < BUCKETS; bucket++) {
		struct entry **place = &buckets[bucket], *entry;
		while ((entry = *place)) {
			miss_forget_unless_open(place);
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
		struct entry *entry = event->bytes ? *miss_place_of(event->ino) : NULL;
		if (entry)
			entry->told = false;
	}
	pthread_mutex_unlock(&source_lock);
	return events;
}
