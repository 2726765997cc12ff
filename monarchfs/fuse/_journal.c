/* What was taken from the kernel and is not answered yet, in memory that outlives the worker.
 *
 * From Linux 6.9 on the kernel hands out again what a dead worker took (FUSE_NOTIFY_RESEND). Before
 * that, callers of such requests would wait for ever. So each request is read straight into memory
 * that the supervisor keeps, and stays there until its answer was written: whoever comes next
 * carries out what is left. A request may be carried out twice then, as with the kernel's way; the
 * second answer fails (ENOENT).
 *
 * The layout is that of fuse/requests.py: a header; one buffer for each thread that reads from the
 * kernel; entries for requests that wait for their answers, found by `unique`.
 */
#include "_journal.h"

#include <linux/fuse.h>

#include <errno.h>
#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MAGIC 0x3171726863726e6dULL /* "mnrchrq1" */
#define HEADER_BYTES 4096
#define BUFFERS 64 /* several workers' after each other: one may be killed and still not be gone */
#define ENTRY_BYTES 512

struct header {
	uint64_t magic;
	uint32_t buffers, entries;
};

/* A request lies at most so many entries after its place. */
#define MOST_STEPS 32

/* `length` is written last, and 0 where there is no request. */
struct entry {
	uint64_t length;
	char request[ENTRY_BYTES - 8];
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static char *buffers;
static struct entry *entries;
static uint32_t entry_count;
static unsigned first_buffer; /* of this worker's threads */

int journal_start(int fd, unsigned number)
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
	const struct header *header = (const void *)memory;
	size_t size = HEADER_BYTES + (size_t)BUFFERS * JOURNAL_BUFFER_BYTES +
		      (size_t)header->entries * ENTRY_BYTES;
	if (header->magic != MAGIC || header->buffers != BUFFERS || !header->entries ||
	    (size_t)st.st_size != size) {
		munmap(memory, (size_t)st.st_size);
		return -EINVAL;
	}
	buffers = memory + HEADER_BYTES;
	entries = (void *)(buffers + (size_t)BUFFERS * JOURNAL_BUFFER_BYTES);
	entry_count = header->entries;
	first_buffer = number * JOURNAL_THREADS % BUFFERS;
	return 0;
}

bool journal_used(void)
{
	return entries != NULL;
}

static char *buffer_of(unsigned number)
{
	return buffers + (size_t)number * JOURNAL_BUFFER_BYTES;
}

char *journal_buffer(unsigned thread)
{
	return entries && thread < JOURNAL_THREADS ? buffer_of(first_buffer + thread) : NULL;
}

void journal_clear(char *buffer)
{
	struct fuse_in_header *in = (void *)buffer;
	__atomic_store_n(&in->len, 0, __ATOMIC_RELEASE);
}

/* Numbers rise by two, so that neighbours lie beside each other. */
static struct entry *step(uint64_t unique, unsigned number)
{
	return &entries[(unique / 2 + number) % entry_count];
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
			place = entry; /* kept by an earlier worker, that died before it said so */
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

void journal_left(void (*take)(const void *request, size_t length))
{
	if (!entries)
		return;
	for (unsigned number = 0; number < BUFFERS; number++) {
		char *buffer = buffer_of(number);
		const struct fuse_in_header *in = (const void *)buffer;
		/* Half of a request: it was not taken, or read(2) had not come back yet. */
		if (in->len < sizeof(*in) || in->len > JOURNAL_BUFFER_BYTES)
			continue;
		if (in->opcode != FUSE_FORGET && in->opcode != FUSE_BATCH_FORGET &&
		    in->opcode != FUSE_INTERRUPT)
			journal_keep(buffer, in->len);
		journal_clear(buffer);
	}
	for (uint32_t i = 0; i < entry_count; i++) {
		const struct fuse_in_header *in = (const void *)entries[i].request;
		if (entries[i].length >= sizeof(*in) && entries[i].length == in->len)
			take(entries[i].request, entries[i].length);
	}
}
