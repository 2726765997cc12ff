/* The resident files whose opens and reads the threads answer. See _resident.h. */
#define _GNU_SOURCE
#include "_resident.h"

#include "_counts.h"
#include "_tier_files.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* Places for inodes: four times the limit of replicas, because open files without a replica are counted here,
 * too. Memory that is not touched costs nothing. Neighbouring numbers are kept together, 64 to a page, because
 * the index gives them out in sequence. */
#define PLACES (1U << 22)
#define BLOCK_BITS 6
#define RING 65536 /* opens that wait for resident_opened, a power of two */
#define MOST_AT_ONE 200 /* threads that read one inode */

struct entry {
	uint64_t ino; /* 0: no entry */
	uint64_t size, checksum;
	int64_t opens_until_ns;
	union {
		unsigned char name[NAME_BYTES];
		struct {
			uint64_t segment, offset;
		};
	};
	uint32_t uses; /* opens */
	uint32_t stamp; /* changes with each replica */
	uint32_t backing_id;
	uint8_t tier;
	bool resident : 1; /* else the entry only counts opens */
	bool seen : 1; /* was read, or opened */
	bool in_segment : 1; /* it has no file of its own */
	bool warm : 1; /* opened since the kernel forgot it, so the kernel may have its pages */
	uint8_t readers; /* threads that read the replica, counted from before they open it */
	uint8_t former; /* the same for earlier replicas */
};

_Static_assert(sizeof(struct entry) == 64, "two cache lines' worth is too much");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *entries;
static uint32_t entry_count, resident_total, stamps;
static struct {
	int fd; /* of its directory, if it is known */
	bool known, served;
} tiers[MOST_TIERS];
static int64_t span_ns;
static bool by_first_reads, telling;
static uint64_t ring[RING], ring_head, ring_tail;

/* -- entries: open addressing, removal by shifting back. Under `lock` */

static uint32_t home_of(uint64_t ino)
{
	uint64_t block = (ino >> BLOCK_BITS) * 0x9e3779b97f4a7c15ULL;
	return (uint32_t)(block >> 48 << BLOCK_BITS | (ino & ((1 << BLOCK_BITS) - 1))) &
	       (PLACES - 1);
}

static struct entry *look_up(uint64_t ino)
{
	if (!entries || !ino)
		return NULL;
	uint32_t place = home_of(ino);
	while (entries[place].ino && entries[place].ino != ino)
		place = (place + 1) & (PLACES - 1);
	return entries[place].ino ? &entries[place] : NULL;
}

static struct entry *make(uint64_t ino)
{
	struct entry *known = look_up(ino);
	if (known)
		return known;
	if (!ino || entry_count >= PLACES / 2)
		return NULL;
	if (!entries) {
		void *memory = mmap(NULL, PLACES * sizeof(*entries), PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (memory == MAP_FAILED)
			return NULL;
		entries = memory;
	}
	uint32_t place = home_of(ino);
	while (entries[place].ino)
		place = (place + 1) & (PLACES - 1);
	entry_count++;
	entries[place] = (struct entry){.ino = ino};
	return &entries[place];
}

static void unmake(struct entry *entry)
{
	uint32_t hole = (uint32_t)(entry - entries);
	entry_count--;
	for (uint32_t next = hole;;) {
		next = (next + 1) & (PLACES - 1);
		if (!entries[next].ino)
			break;
		/* It may fill the hole, unless the hole is before its home. */
		uint32_t home = home_of(entries[next].ino);
		if (((next - home) & (PLACES - 1)) >= ((next - hole) & (PLACES - 1))) {
			entries[hole] = entries[next];
			hole = next;
		}
	}
	entries[hole].ino = 0;
}

static void tidy(struct entry *entry)
{
	if (!entry->resident && !entry->uses && !entry->readers && !entry->former && !entry->backing_id)
		unmake(entry);
}

/* It gets another replica, or none: from now on readers of the earlier one are counted apart. */
static void renew(struct entry *entry)
{
	entry->stamp = ++stamps;
	entry->former += entry->readers;
	entry->readers = 0;
}

/* A thread has ended its read of the replica with that stamp. */
static void leave(struct entry *entry, uint32_t stamp)
{
	if (entry->stamp == stamp)
		entry->readers--;
	else
		entry->former--;
	tidy(entry);
}

/* -- the file of the replica or of its segment */

static struct tier_file file_of(const struct entry *entry)
{
	return (struct tier_file){
		.tier = entry->tier,
		.segment = entry->in_segment,
		.number = entry->in_segment ? entry->segment : entry->ino,
	};
}

static void close_if(int fd)
{
	if (fd >= 0)
		close(fd);
}

/* -- for Python */

int resident_start(unsigned some, uid_t uid, int64_t lasting_ns, bool free_opens,
		   bool tells)
{
	if (!some)
		return -EINVAL;
	pthread_mutex_lock(&lock);
	int error = files_start(some, uid);
	span_ns = lasting_ns;
	by_first_reads = free_opens;
	telling = tells;
	pthread_mutex_unlock(&lock);
	return error;
}

/* Whether both are the same directory. */
static bool alike(int one, int other)
{
	struct stat a, b;
	return fstat(one, &a) == 0 && fstat(other, &b) == 0 && a.st_dev == b.st_dev &&
	       a.st_ino == b.st_ino;
}

int resident_tier(unsigned tier, int dir_fd)
{
	if (tier >= MOST_TIERS)
		return -EINVAL;
	int own = -1;
	/* The earlier descriptor is not closed: a thread may be using it. */
	if (dir_fd >= 0 && !(tiers[tier].known && alike(dir_fd, tiers[tier].fd))) {
		own = fcntl(dir_fd, F_DUPFD_CLOEXEC, 0);
		if (own < 0)
			return -errno;
	}
	pthread_mutex_lock(&lock);
	if (own >= 0) {
		tiers[tier].fd = own;
		tiers[tier].known = true;
	}
	tiers[tier].served = dir_fd >= 0;
	if (own >= 0 || dir_fd < 0)
		files_put_down_all(tier);
	pthread_mutex_unlock(&lock);
	return 0;
}

static struct entry as_entry(uint64_t ino, const struct replica *replica)
{
	struct entry entry = {.ino = ino, .size = replica->size, .checksum = replica->checksum,
			      .tier = (uint8_t)replica->tier, .in_segment = replica->segment != 0};
	if (entry.in_segment) {
		entry.segment = replica->segment;
		entry.offset = replica->offset;
	} else {
		memcpy(entry.name, replica->name, NAME_BYTES);
	}
	return entry;
}

static bool same(const struct entry *one, const struct entry *other)
{
	return one->tier == other->tier && one->size == other->size &&
	       one->checksum == other->checksum && one->in_segment == other->in_segment &&
	       !memcmp(one->name, other->name, NAME_BYTES);
}

/* Under `lock`: its replica may be read no more. */
static int take_away(struct entry *entry)
{
	const struct tier_file file = file_of(entry);
	int to_close = entry->resident ? files_put_down(files_find(&file)) : -1;
	resident_total -= entry->resident;
	entry->resident = false;
	renew(entry);
	return to_close;
}

bool resident_put(uint64_t ino, const struct replica *replica, bool seen)
{
	int to_close = -1;
	if (replica->tier >= MOST_TIERS ||
	    (replica->segment &&
	     (replica->size > INT64_MAX || replica->offset > INT64_MAX - replica->size)))
		return false;
	const struct entry new = as_entry(ino, replica);
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	if (files_started() && ((entry && entry->resident) || resident_total < MOST_RESIDENT))
		entry = make(ino);
	else
		entry = NULL;
	if (entry && !(entry->resident && same(entry, &new))) {
		to_close = take_away(entry);
		resident_total++;
		entry->resident = true;
		entry->tier = new.tier;
		entry->size = new.size;
		entry->checksum = new.checksum;
		entry->in_segment = new.in_segment;
		memcpy(entry->name, new.name, NAME_BYTES);
	}
	if (entry) {
		entry->opens_until_ns = replica->opens_until_ns;
		entry->seen |= seen;
	}
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return entry;
}

void resident_expire(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	if (entry)
		entry->opens_until_ns = 0;
	pthread_mutex_unlock(&lock);
}

static int stop(struct entry *entry)
{
	int to_close = take_away(entry);
	tidy(entry);
	return to_close;
}

void resident_stop(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	int to_close = entry ? stop(entry) : -1;
	pthread_mutex_unlock(&lock);
	close_if(to_close);
}

bool resident_retire(uint64_t ino)
{
	int to_close = -1;
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	bool busy = entry && (entry->uses || entry->readers || entry->former);
	if (entry && !busy)
		to_close = stop(entry);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return !busy;
}

/* What is known of it now. */
static struct entry look_at(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	const struct entry *entry = look_up(ino);
	const struct entry now = entry ? *entry : (struct entry){0};
	pthread_mutex_unlock(&lock);
	return now;
}

bool resident_reading(uint64_t ino)
{
	return look_at(ino).former;
}

bool resident_has(uint64_t ino)
{
	return look_at(ino).resident;
}

bool resident_in_segment(uint64_t ino)
{
	const struct entry now = look_at(ino);
	return now.resident && now.in_segment;
}

bool resident_used(uint64_t ino)
{
	return look_at(ino).uses;
}

bool resident_seen(uint64_t ino)
{
	return look_at(ino).seen;
}

uint32_t resident_backing(uint64_t ino)
{
	return look_at(ino).backing_id;
}

void resident_use(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = make(ino);
	if (entry)
		entry->uses++;
	pthread_mutex_unlock(&lock);
}

void resident_unuse(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	if (entry && entry->uses) {
		entry->uses--;
		tidy(entry);
	}
	pthread_mutex_unlock(&lock);
}

bool resident_back(uint64_t ino, uint32_t backing_id)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = backing_id ? make(ino) : look_up(ino);
	if (entry) {
		entry->backing_id = backing_id;
		tidy(entry);
	}
	pthread_mutex_unlock(&lock);
	return entry;
}

size_t resident_opened(uint64_t *inos, size_t most)
{
	size_t got = 0;
	pthread_mutex_lock(&lock);
	while (got < most && ring_tail != ring_head)
		inos[got++] = ring[ring_tail++ % RING];
	pthread_mutex_unlock(&lock);
	return got;
}

/* -- for the threads */

/* Under `lock`. */
static void opened(struct entry *entry)
{
	entry->seen = true;
	counts_add(COUNT_RESIDENT_OPENS, 1);
	counts_add(COUNT_RESIDENT_BYTES, entry->size);
	if (!telling)
		return;
	if (ring_head - ring_tail < RING)
		ring[ring_head++ % RING] = entry->ino;
	else
		counts_add(COUNT_UNLISTED_OPENS, 1);
}

static int64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

bool resident_fresh(int64_t until_ns)
{
	if (until_ns == ALWAYS || !until_ns)
		return until_ns;
	int64_t left_ns = until_ns - now_ns();
	return left_ns > 0 && left_ns <= span_ns;
}

/* Under `lock`. */
static struct entry *readable(uint64_t ino)
{
	struct entry *entry = look_up(ino);
	return entry && entry->resident && tiers[entry->tier].served ? entry : NULL;
}

bool resident_open(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = readable(ino);
	if (entry && !resident_fresh(entry->opens_until_ns))
		entry = NULL;
	if (entry) {
		entry->uses++;
		opened(entry);
	}
	pthread_mutex_unlock(&lock);
	return entry;
}

bool resident_cold(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = readable(ino);
	bool cold = entry && !entry->warm && !entry->backing_id;
	if (cold)
		entry->warm = true;
	pthread_mutex_unlock(&lock);
	return cold;
}

void resident_forgotten(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct entry *entry = look_up(ino);
	if (entry)
		entry->warm = false;
	pthread_mutex_unlock(&lock);
}

static int open_replica(int dir_fd, const struct entry *wanted)
{
	const struct tier_file file = file_of(wanted);
	uint64_t bytes;
	int fd = files_open(dir_fd, &file, wanted->name, wanted->checksum, &bytes);
	bool fits = wanted->in_segment ? bytes >= wanted->offset + wanted->size :
					 bytes == wanted->size;
	if (fd < 0 || fits)
		return fd;
	close(fd);
	return -1;
}

/* Under `lock`: a read of the entry's replica, in the file at that place, or in one of its own. */
static void begin(const struct entry *entry, uint32_t place, int fd, struct reading *reading)
{
	*reading = (struct reading){
		.ino = entry->ino,
		.start = entry->in_segment ? entry->offset : 0,
		.size = entry->size,
		.stamp = entry->stamp,
		.fd = fd,
		.place = -1,
	};
	if (place == NOT_OPEN)
		return;
	reading->fd = files_begin(place);
	reading->place = (int)place;
}

/* Under `lock`: begin a read with a descriptor that was opened without the lock. False if the replica has been
 * removed or replaced meanwhile. */
static bool take(uint64_t ino, uint32_t stamp, int fd, struct reading *reading, int *to_close)
{
	struct entry *entry = look_up(ino); /* it is there: this thread is counted */
	if (!entry->resident || entry->stamp != stamp || !tiers[entry->tier].served ||
	    fd < 0) {
		leave(entry, stamp);
		return false;
	}
	const struct tier_file file = file_of(entry);
	uint32_t place = files_find(&file);
	if (place != NOT_OPEN)
		*to_close = fd; /* another thread was faster */
	else
		place = files_add(&file, fd, to_close);
	begin(entry, place, fd, reading);
	return true;
}

bool resident_enter(uint64_t ino, uint64_t offset, struct reading *reading)
{
	int dir_fd = -1, to_close = -1;
	struct entry wanted;
	bool entered = false;
	pthread_mutex_lock(&lock);
	struct entry *entry = readable(ino);
	if (entry && by_first_reads && (!offset || !entry->seen))
		opened(entry);
	if (entry && entry->readers + entry->former >= MOST_AT_ONE)
		entry = NULL;
	if (entry) {
		const struct tier_file file = file_of(entry);
		uint32_t place = files_find(&file);
		entered = place != NOT_OPEN;
		entry->readers++;
		wanted = *entry;
		dir_fd = tiers[entry->tier].fd;
		if (entered)
			begin(entry, place, -1, reading);
	}
	pthread_mutex_unlock(&lock);
	if (entered || !entry)
		return entered;
	int fd = open_replica(dir_fd, &wanted);
	pthread_mutex_lock(&lock);
	entered = take(ino, wanted.stamp, fd, reading, &to_close);
	pthread_mutex_unlock(&lock);
	close_if(entered ? to_close : fd);
	return entered;
}

void resident_leave(const struct reading *reading)
{
	int to_close = reading->fd;
	pthread_mutex_lock(&lock);
	if (reading->place >= 0)
		to_close = files_end((uint32_t)reading->place);
	leave(look_up(reading->ino), reading->stamp);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
}
