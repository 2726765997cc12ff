/* The request journal: requests that were taken from the kernel and are not answered yet, in memory that
 * outlives the worker.
 *
 * From Linux 6.9 on the kernel sends requests again that a dead worker took (FUSE_NOTIFY_RESEND). On earlier
 * kernels their callers would wait for ever. So each request is read straight into memory that the
 * supervisor keeps, and stays there until its answer was written. The next worker carries out those that are
 * left. So a request may be carried out twice, as with FUSE_NOTIFY_RESEND; the second answer fails (ENOENT).
 *
 * The layout is that of fuse/requests.py: a header; one buffer for each thread that reads from the
 * kernel; entries for requests that wait for their answers, found by `unique`.
 *
 * No half request is acted on, and none is lost:
 *
 *   - Each buffer has a robust lock, which its thread holds as long as it lives. The kernel releases it when
 *     the thread has left its last system call (futex_exit_release, kernel/futex/core.c). A thread that was
 *     killed may still be in read(2), which goes on writing into the buffer. So a buffer's content counts only
 *     for a thread that has got the lock. Then nothing writes any more, and read(2) gave either all of a
 *     request or nothing (the kernel itself ends a request that it cannot copy as a whole).
 *   - A thread that was killed while it handled a request may wait for its disk and not die. After read(2), and
 *     before anything else, it stores in `taken` that it has all of the request; `taken` is 0 again before the
 *     next read(2). So a copy of the buffer is whole if `taken` was the same before and after it.
 *   - A buffer is emptied after its request was answered or is in an entry. An entry is valid by its `length`,
 *     which is stored last (release), and ends with one store.
 *
 * tests/c/kills.c kills at each of these instructions; tests/c/unreapable.c has threads that live on.
 */
#include "_journal.h"

#include <linux/fuse.h>

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MAGIC 0x3271726863726e6dULL /* "mnrchrq2" */
#define HEADER_BYTES 4096
#define BUFFERS 64 /* enough for several workers, as killed ones may not be gone yet */
#define ENTRY_BYTES 512

#define TAKEN_BYTES (BUFFERS * 8)

struct header {
	uint64_t magic;
	uint32_t buffers, entries;
	uint32_t ready; /* the locks are */
	char unused[HEADER_BYTES - TAKEN_BYTES - BUFFERS * sizeof(pthread_mutex_t) - 20];
	pthread_mutex_t locks[BUFFERS];
	uint64_t taken[BUFFERS]; /* `unique` of the request that is in the buffer as a whole; else 0 */
};

_Static_assert(sizeof(struct header) == HEADER_BYTES, "as requests.py has it");

/* In how many places a request may be, and how far they lie apart. Requests that hang together have numbers that
 * follow each other; a later one steps over those. Odd, as `entry_count` is a power of two. */
#define MOST_STEPS 32
#define STEP_ENTRIES 509

/* `length` is written last, and 0 where there is no request. */
struct entry {
	uint64_t length;
	char request[ENTRY_BYTES - 8];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct header *header;
static char *buffers;
static struct entry *entries;
static uint32_t entry_count;
static pthread_mutex_t picking = PTHREAD_MUTEX_INITIALIZER; /* before `lock`; for the next two */
static bool own[BUFFERS]; /* the buffer belongs to a thread of this process */
static uint64_t copied[BUFFERS]; /* `taken` when the buffer of a thread that lives on was copied */

/* Called by the first worker that uses the memory: nobody has locks in it yet. */
static int make_locks(struct header *made)
{
	pthread_mutexattr_t attributes;
	pthread_mutexattr_init(&attributes);
	pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
	pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
	int error = 0;
	for (unsigned number = 0; number < BUFFERS && !error; number++)
		error = pthread_mutex_init(&made->locks[number], &attributes);
	pthread_mutexattr_destroy(&attributes);
	if (!error)
		__atomic_store_n(&made->ready, 1, __ATOMIC_RELEASE);
	return error;
}

int journal_start(int fd)
{
	struct stat st;
	if (entries)
		return -EALREADY;
	if (fstat(fd, &st) < 0)
		return -errno;
	if ((size_t)st.st_size < HEADER_BYTES)
		return -EINVAL;
	char *memory = mmap(NULL, (size_t)st.st_size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return -errno;
	header = (void *)memory;
	size_t size = HEADER_BYTES + (size_t)BUFFERS * JOURNAL_BUFFER_BYTES +
		      (size_t)header->entries * ENTRY_BYTES;
	if (header->magic != MAGIC || header->buffers != BUFFERS || !header->entries ||
	    (size_t)st.st_size != size || (!header->ready && make_locks(header))) {
		munmap(memory, (size_t)st.st_size);
		return -EINVAL;
	}
	buffers = memory + HEADER_BYTES;
	entry_count = header->entries;
	entries = (void *)(buffers + (size_t)BUFFERS * JOURNAL_BUFFER_BYTES);
	return 0;
}

bool journal_used(void)
{
	return entries != NULL;
}

static struct fuse_in_header *request_in(unsigned number)
{
	return (void *)(buffers + (size_t)number * JOURNAL_BUFFER_BYTES);
}

static unsigned number_of(const char *buffer)
{
	return (unsigned)((size_t)(buffer - buffers) / JOURNAL_BUFFER_BYTES);
}

/* Lock the buffer. False if a thread that lives has it. */
static bool lock_buffer(unsigned number)
{
	int error = pthread_mutex_trylock(&header->locks[number]);
	if (error == EOWNERDEAD)
		error = pthread_mutex_consistent(&header->locks[number]);
	return !error;
}

void journal_taken(char *buffer)
{
	const struct fuse_in_header *in = (const void *)buffer;
	__atomic_store_n(&header->taken[number_of(buffer)], in->unique, __ATOMIC_RELEASE);
}

void journal_clear(char *buffer)
{
	struct fuse_in_header *in = (void *)buffer;
	size_t length = in->len < JOURNAL_BUFFER_BYTES ? in->len : JOURNAL_BUFFER_BYTES;
	__atomic_store_n(&header->taken[number_of(buffer)], 0, __ATOMIC_RELEASE);
	__atomic_store_n(&in->len, 0, __ATOMIC_RELEASE);
	memset(buffer, 0, length); /* no bytes of this request are left behind the next one */
}

/* Numbers rise by two, so that neighbours lie beside each other. */
static struct entry *step(uint64_t unique, unsigned number)
{
	return &entries[(unique / 2 + number * STEP_ENTRIES) % entry_count];
}

static bool holds(const struct entry *entry, uint64_t unique)
{
	return entry->length && ((const struct fuse_in_header *)entry->request)->unique == unique;
}

bool journal_keep(const void *request, size_t length)
{
	uint64_t unique = ((const struct fuse_in_header *)request)->unique;
	struct entry *place = NULL;
	if (!entries || length > sizeof(place->request))
		return false;
	pthread_mutex_lock(&lock);
	for (unsigned number = 0; number < MOST_STEPS; number++) {
		struct entry *entry = step(unique, number);
		if (holds(entry, unique)) {
			place = entry; /* kept by an earlier worker, which died before it cleared the buffer */
			break;
		}
		if (!place && !entry->length)
			place = entry;
	}
	if (place) {
		memcpy(place->request, request, length);
		__atomic_store_n(&place->length, length, __ATOMIC_RELEASE);
	}
	pthread_mutex_unlock(&lock);
	return place;
}

void journal_done(uint64_t unique)
{
	if (!entries)
		return;
	pthread_mutex_lock(&lock);
	for (unsigned number = 0; number < MOST_STEPS; number++) {
		struct entry *entry = step(unique, number);
		if (holds(entry, unique)) {
			__atomic_store_n(&entry->length, 0, __ATOMIC_RELEASE);
			break;
		}
	}
	pthread_mutex_unlock(&lock);
}

/* Copy what is left in a buffer; returns its length, 0 for nothing. `locked`: the caller has the lock. */
static size_t copy_left(unsigned number, bool locked, char *to)
{
	const struct fuse_in_header *in = request_in(number);
	uint64_t taken = __atomic_load_n(&header->taken[number], __ATOMIC_ACQUIRE);
	if (taken ? taken == copied[number] : !locked)
		return 0;
	size_t length = in->len;
	if (length < sizeof(*in) || length > JOURNAL_BUFFER_BYTES)
		return 0;
	memcpy(to, in, length);
	__atomic_thread_fence(__ATOMIC_ACQUIRE);
	if (!locked && __atomic_load_n(&header->taken[number], __ATOMIC_RELAXED) != taken)
		return 0;
	copied[number] = taken;
	in = (const void *)to;
	return in->opcode != FUSE_FORGET && in->opcode != FUSE_BATCH_FORGET &&
			       in->opcode != FUSE_INTERRUPT ?
		       length :
		       0;
}

/* Move what is left in a buffer into an entry. With `now`, or if it is too large for an entry, carry it out at once. */
static void empty(unsigned number, bool locked, bool now, journal_take take)
{
	char request[JOURNAL_BUFFER_BYTES];
	size_t length = copy_left(number, locked, request);
	if (length && (!journal_keep(request, length) || now))
		take(request, length);
	if (locked)
		journal_clear((char *)request_in(number));
}

char *journal_buffer(journal_take take)
{
	char *buffer = NULL;
	pthread_mutex_lock(&picking);
	for (unsigned number = 0; entries && !buffer && number < BUFFERS; number++) {
		if (!lock_buffer(number))
			continue;
		own[number] = true;
		empty(number, true, true, take);
		buffer = (char *)request_in(number);
	}
	pthread_mutex_unlock(&picking);
	return buffer;
}

void journal_left(bool all, journal_take take)
{
	pthread_mutex_lock(&picking);
	for (unsigned number = 0; entries && number < BUFFERS; number++) {
		bool locked = !own[number] && lock_buffer(number);
		if (!own[number])
			empty(number, locked, !all, take);
		if (locked)
			pthread_mutex_unlock(&header->locks[number]);
	}
	pthread_mutex_unlock(&picking);
	for (uint32_t i = 0; all && i < entry_count; i++) {
		const struct fuse_in_header *in = (const void *)entries[i].request;
		if (entries[i].length >= sizeof(*in) && entries[i].length == in->len)
			take(entries[i].request, entries[i].length);
	}
}
