/* Inodes in use, and the resident files whose opens and reads the threads answer. See _resident.h. */
#define _GNU_SOURCE
#include "_resident.h"

#include "_counts.h"
#include "_items.h"
#include "_tier_files.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NEIGHBOURS 16 /* files with following numbers, which lie together: the index gives them out in sequence */
#define RING 65536 /* opens that wait for resident_opened, a power of two */
#define MOST_AT_ONE 200 /* threads that read one inode */
#define MOST_USED (2 * MOST_RESIDENT)
#define TICK_BITS 24
#define ALWAYS_TICKS UINT32_MAX
#define BEFORE_NS ((int64_t)1 << 54) /* half a year: by as much the clock may be set back */

/* A resident file. */
struct file {
	uint32_t size, offset;   /* of a record in a segment */
	uint32_t opens_until;    /* as opens_until_ns, in ticks of 2^TICK_BITS ns from `base_ns` on */
	uint32_t place : 22;     /* of its segment in `segments`, or of what lies alone in `alone` */
	uint32_t tier : 6;
	uint32_t resident : 1;   /* else there is no such file, and all is 0 */
	uint32_t seen : 1;       /* was read, or opened */
	uint32_t in_segment : 1; /* it has no file of its own */
	uint32_t warm : 1;       /* opened since the kernel forgot it, so the kernel may have its pages */
};

/* The number is that of the first file, divided by NEIGHBOURS; the count is that of the resident files. */
struct neighbours {
	struct item item;
	struct file files[NEIGHBOURS];
};

/* Of an inode that is in use, being read or backed, resident or not. The count is that of its uses. */
struct use {
	struct item item;
	uint32_t stamp; /* changes with each replica */
	uint32_t opens; /* the kernel's */
	uint32_t backing_id;
	uint8_t readers; /* threads that read the replica, counted from before they open it */
	uint8_t former; /* the same for earlier replicas */
	bool plain; /* the kernel's opens were answered without a backing id */
	bool going; /* the backing id, with the last of these */
};

/* Of an inode: a replica with a file of its own. */
struct alone {
	struct item item;
	unsigned char name[NAME_BYTES];
	uint64_t checksum, size;
};

_Static_assert(sizeof(struct file) == 16, "a million files would take too much memory");
_Static_assert(MOST_TIERS <= 1 << 6 && MOST_RESIDENT < 1 << 22, "they fit into the fields of a file");

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct items groups = {.bytes = sizeof(struct neighbours), .most = MOST_RESIDENT};
static struct items uses = {.bytes = sizeof(struct use), .most = MOST_USED};
static struct items alone = {.bytes = sizeof(struct alone), .most = MOST_RESIDENT};
static struct items segments = {.bytes = sizeof(struct item), .most = MOST_RESIDENT}; /* their files are counted */
static uint32_t resident_total, stamps;
static struct {
	int fd; /* of its directory, if it is known */
	bool known, served;
} tiers[MOST_TIERS];
static int64_t span_ns, base_ns;
static bool by_first_reads, telling;
static uint64_t ring[RING], ring_head, ring_tail;

static int64_t now_ns(void)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* Earlier by less than a tick. Whoever opens a file more than 1.7 years after the start asks Python. */
static uint32_t to_ticks(int64_t until_ns)
{
	if (until_ns == ALWAYS)
		return ALWAYS_TICKS;
	int64_t ticks = until_ns > base_ns ? (until_ns - base_ns) >> TICK_BITS : 0;
	return ticks < ALWAYS_TICKS ? (uint32_t)ticks : ALWAYS_TICKS - 1;
}

static int64_t from_ticks(uint32_t ticks)
{
	if (ticks == ALWAYS_TICKS)
		return ALWAYS;
	return ticks ? base_ns + ((int64_t)ticks << TICK_BITS) : 0;
}

/* -- resident files and their use. Under `lock` */

/* NULL if it is not resident. */
static struct file *look_up(uint64_t ino)
{
	struct neighbours *group = items_find(&groups, ino / NEIGHBOURS);
	struct file *file = group ? &group->files[ino % NEIGHBOURS] : NULL;
	return file && file->resident ? file : NULL;
}

static struct use *use_of(uint64_t ino)
{
	return items_find(&uses, ino);
}

static void tidy(struct use *use)
{
	if (!use->item.count && !use->readers && !use->former && !use->backing_id)
		items_drop(&uses, use);
}

/* It gets another replica, or none: from now on readers of the earlier one are counted apart. */
static void renew(uint64_t ino)
{
	struct use *use = use_of(ino);
	if (!use)
		return;
	use->stamp = ++stamps;
	use->former += use->readers;
	use->readers = 0;
}

/* A thread has ended its read of the replica with that stamp. */
static void leave(struct use *use, uint32_t stamp)
{
	if (use->stamp == stamp)
		use->readers--;
	else
		use->former--;
	tidy(use);
}

/* But for `opens_until_ns`, and the name and checksum of what lies in a segment. */
static struct replica replica_of(const struct file *file)
{
	struct replica replica = {.tier = file->tier};
	if (file->in_segment) {
		const struct item *segment = items_at(&segments, file->place);
		replica.segment = segment->number;
		replica.offset = file->offset;
		replica.size = file->size;
	} else {
		const struct alone *own = items_at(&alone, file->place);
		memcpy(replica.name, own->name, NAME_BYTES);
		replica.checksum = own->checksum;
		replica.size = own->size;
	}
	return replica;
}

/* The file of the replica or of its segment. */
static struct tier_file file_of(uint64_t ino, const struct replica *replica)
{
	return (struct tier_file){
		.tier = (uint8_t)replica->tier,
		.segment = replica->segment != 0,
		.number = replica->segment ? replica->segment : ino,
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
	base_ns = now_ns() - BEFORE_NS;
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

/* A segment is never written again where it was: a place in it has one content. */
static bool same(const struct replica *one, const struct replica *other)
{
	if (one->tier != other->tier || one->size != other->size || one->segment != other->segment)
		return false;
	return one->segment ? one->offset == other->offset :
			      one->checksum == other->checksum &&
				      !memcmp(one->name, other->name, NAME_BYTES);
}

/* Under `lock`: the replica of a resident file may be read no more. */
static int take_away(uint64_t ino, struct file *file)
{
	const struct replica replica = replica_of(file);
	const struct tier_file its = file_of(ino, &replica);
	int to_close = files_put_down(files_find(&its));
	struct items *places = file->in_segment ? &segments : &alone;
	struct item *place = items_at(places, file->place);
	if (--place->count == 0)
		items_drop(places, place);
	*file = (struct file){0};
	resident_total--;
	struct neighbours *group = items_find(&groups, ino / NEIGHBOURS);
	if (--group->item.count == 0)
		items_drop(&groups, group);
	renew(ino);
	return to_close;
}

/* Under `lock`: a file that is not resident becomes it. NULL if there is no memory. */
static struct file *add(uint64_t ino, const struct replica *replica)
{
	struct items *places = replica->segment ? &segments : &alone;
	struct neighbours *group = items_make(&groups, ino / NEIGHBOURS);
	struct item *place = group ? items_make(places, replica->segment ? replica->segment : ino) :
				     NULL;
	if (!place) {
		if (group && !group->item.count)
			items_drop(&groups, group);
		return NULL;
	}
	struct file *file = &group->files[ino % NEIGHBOURS];
	*file = (struct file){.place = items_place(places, place), .tier = replica->tier,
			      .resident = 1, .in_segment = replica->segment != 0};
	if (file->in_segment) {
		file->offset = (uint32_t)replica->offset;
		file->size = (uint32_t)replica->size;
	} else {
		struct alone *own = (struct alone *)place;
		memcpy(own->name, replica->name, NAME_BYTES);
		own->checksum = replica->checksum;
		own->size = replica->size;
	}
	place->count++;
	group->item.count++;
	resident_total++;
	return file;
}

bool resident_put(uint64_t ino, const struct replica *replica, bool seen)
{
	int to_close = -1;
	if (!ino || replica->tier >= MOST_TIERS ||
	    (replica->segment && (replica->size > UINT32_MAX || replica->offset > UINT32_MAX)))
		return false;
	pthread_mutex_lock(&lock);
	struct file *file = files_started() ? look_up(ino) : NULL;
	const struct file before = file ? *file : (struct file){0};
	const struct replica known = file ? replica_of(file) : (struct replica){0};
	if (file && !same(&known, replica)) {
		to_close = take_away(ino, file);
		file = NULL;
	}
	if (!file && files_started() && resident_total < MOST_RESIDENT)
		file = add(ino, replica);
	if (file) {
		file->opens_until = to_ticks(replica->opens_until_ns);
		file->seen |= seen | before.seen;
		file->warm |= before.warm;
	}
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return file;
}

void resident_renew(uint64_t ino, int64_t opens_until_ns)
{
	pthread_mutex_lock(&lock);
	struct file *file = look_up(ino);
	if (file && file->opens_until)
		file->opens_until = to_ticks(opens_until_ns);
	pthread_mutex_unlock(&lock);
}

void resident_expire(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct file *file = look_up(ino);
	if (file)
		file->opens_until = 0;
	pthread_mutex_unlock(&lock);
}

void resident_stop(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct file *file = look_up(ino);
	int to_close = file ? take_away(ino, file) : -1;
	pthread_mutex_unlock(&lock);
	close_if(to_close);
}

bool resident_retire(uint64_t ino)
{
	int to_close = -1;
	pthread_mutex_lock(&lock);
	const struct use *use = use_of(ino);
	bool busy = use && (use->item.count || use->readers || use->former);
	struct file *file = busy ? NULL : look_up(ino);
	if (file)
		to_close = take_away(ino, file);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
	return !busy;
}

/* What is known of the file, and of its use, now. */
static struct file file_now(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	const struct file *file = look_up(ino);
	const struct file now = file ? *file : (struct file){0};
	pthread_mutex_unlock(&lock);
	return now;
}

static struct use use_now(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	const struct use *use = use_of(ino);
	const struct use now = use ? *use : (struct use){0};
	pthread_mutex_unlock(&lock);
	return now;
}

bool resident_reading(uint64_t ino)
{
	return use_now(ino).former;
}

bool resident_has(uint64_t ino)
{
	return file_now(ino).resident;
}

bool resident_full(void)
{
	pthread_mutex_lock(&lock);
	bool full = resident_total == MOST_RESIDENT;
	pthread_mutex_unlock(&lock);
	return full;
}

bool resident_used(uint64_t ino)
{
	return use_now(ino).item.count;
}

bool resident_seen(uint64_t ino)
{
	return file_now(ino).seen;
}

void resident_use(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct use *use = items_make(&uses, ino);
	if (use)
		use->item.count++;
	pthread_mutex_unlock(&lock);
}

/* Under `lock`. */
static void end_use(struct use *use)
{
	if (use && use->item.count) {
		use->item.count--;
		tidy(use);
	}
}

void resident_unuse(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	end_use(use_of(ino));
	pthread_mutex_unlock(&lock);
}

bool inode_open(uint64_t ino, uint32_t *backing_id)
{
	pthread_mutex_lock(&lock);
	struct use *use = items_make(&uses, ino);
	if (use) {
		use->item.count++;
		if (!use->opens++)
			use->plain = !use->backing_id;
		*backing_id = use->plain ? 0 : use->backing_id;
	}
	pthread_mutex_unlock(&lock);
	return use;
}

void inode_reopen(uint64_t ino, uint32_t backing_id)
{
	pthread_mutex_lock(&lock);
	struct use *use = items_make(&uses, ino);
	if (use) {
		use->item.count++;
		use->opens++;
		use->plain = !backing_id;
		if (backing_id)
			use->backing_id = backing_id;
	}
	pthread_mutex_unlock(&lock);
}

void inode_close(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct use *use = use_of(ino);
	if (use && use->opens && !--use->opens && use->going) {
		use->backing_id = 0;
		use->going = false;
	}
	end_use(use);
	pthread_mutex_unlock(&lock);
}

bool inode_back(uint64_t ino, uint32_t backing_id)
{
	pthread_mutex_lock(&lock);
	struct use *use = items_make(&uses, ino);
	bool backed = use && !use->backing_id;
	if (backed)
		use->backing_id = backing_id;
	pthread_mutex_unlock(&lock);
	return backed;
}

bool inode_unback(uint64_t ino, bool at_last)
{
	pthread_mutex_lock(&lock);
	struct use *use = use_of(ino);
	bool open = use && use->opens && !use->plain;
	if (open) {
		use->going |= at_last;
	} else if (use) {
		use->backing_id = 0;
		tidy(use);
	}
	pthread_mutex_unlock(&lock);
	return !open;
}

/* Under `lock`. */
static bool is_decided(const struct use *use)
{
	return use && (use->opens || use->backing_id);
}

bool inode_decided(uint64_t ino)
{
	const struct use use = use_now(ino);
	return is_decided(&use);
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
static void opened(uint64_t ino, struct file *file)
{
	file->seen = true;
	counts_add(COUNT_RESIDENT_OPENS, 1);
	counts_add(COUNT_RESIDENT_BYTES, replica_of(file).size);
	if (!telling)
		return;
	if (ring_head - ring_tail < RING)
		ring[ring_head++ % RING] = ino;
	else
		counts_add(COUNT_UNLISTED_OPENS, 1);
}

bool resident_fresh(int64_t until_ns)
{
	if (until_ns == ALWAYS || !until_ns)
		return until_ns;
	int64_t left_ns = until_ns - now_ns();
	return left_ns > 0 && left_ns <= span_ns;
}

/* Under `lock`. */
static struct file *readable(uint64_t ino)
{
	struct file *file = look_up(ino);
	return file && tiers[file->tier].served ? file : NULL;
}

/* Under `lock`. NULL where Python has to answer an open, whether or not the source was asked. */
static struct file *openable(uint64_t ino, bool undecided)
{
	struct file *file = readable(ino);
	bool may = file && file->opens_until && (undecided || file->in_segment || is_decided(use_of(ino)));
	return may ? file : NULL;
}

/* `checked`: the source was asked. */
static bool open_file(uint64_t ino, bool undecided, bool checked)
{
	pthread_mutex_lock(&lock);
	struct file *file = openable(ino, undecided);
	bool may = file && (checked || resident_fresh(from_ticks(file->opens_until)));
	struct use *use = may ? items_make(&uses, ino) : NULL;
	if (use) {
		use->item.count++;
		opened(ino, file);
	}
	pthread_mutex_unlock(&lock);
	return use;
}

bool resident_open(uint64_t ino, bool undecided)
{
	return open_file(ino, undecided, false);
}

bool resident_open_checked(uint64_t ino, bool undecided)
{
	return open_file(ino, undecided, true);
}

bool resident_may_open(uint64_t ino, bool undecided)
{
	pthread_mutex_lock(&lock);
	bool may = openable(ino, undecided);
	pthread_mutex_unlock(&lock);
	return may;
}

bool resident_cold(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct file *file = readable(ino);
	const struct use *use = use_of(ino);
	bool cold = file && !file->warm && !(use && use->backing_id && !use->plain);
	if (cold)
		file->warm = true;
	pthread_mutex_unlock(&lock);
	return cold;
}

void resident_forgotten(uint64_t ino)
{
	pthread_mutex_lock(&lock);
	struct file *file = look_up(ino);
	if (file)
		file->warm = false;
	pthread_mutex_unlock(&lock);
}

static int open_replica(int dir_fd, const struct tier_file *file, const struct replica *wanted)
{
	uint64_t bytes;
	int fd = files_open(dir_fd, file, wanted->name, wanted->checksum, &bytes);
	bool fits = file->segment ? bytes >= wanted->offset + wanted->size : bytes == wanted->size;
	if (fd < 0 || fits)
		return fd;
	close(fd);
	return -1;
}

/* Under `lock`: begin a read with a descriptor that was opened without the lock. False if the replica has been
 * removed or replaced meanwhile. */
static bool take(const struct tier_file *file, int fd, struct reading *reading, int *to_close)
{
	struct use *use = use_of(reading->ino); /* it is there: this thread is counted */
	if (use->stamp != reading->stamp || !tiers[file->tier].served || fd < 0) {
		leave(use, reading->stamp);
		return false;
	}
	uint32_t place = files_find(file);
	if (place != NOT_OPEN)
		*to_close = fd; /* another thread was faster */
	else
		place = files_add(file, fd, to_close);
	reading->fd = place == NOT_OPEN ? fd : files_begin(place);
	reading->place = place == NOT_OPEN ? -1 : (int)place;
	return true;
}

bool resident_enter(uint64_t ino, uint64_t offset, struct reading *reading)
{
	int dir_fd = -1, to_close = -1;
	struct replica wanted;
	struct tier_file its;
	bool entered = false;
	pthread_mutex_lock(&lock);
	struct file *file = readable(ino);
	if (file && by_first_reads && (!offset || !file->seen))
		opened(ino, file);
	struct use *use = file ? items_make(&uses, ino) : NULL;
	if (use && use->readers + use->former >= MOST_AT_ONE)
		use = NULL;
	if (use) {
		wanted = replica_of(file);
		its = file_of(ino, &wanted);
		dir_fd = tiers[its.tier].fd;
		use->readers++;
		*reading = (struct reading){.ino = ino, .start = wanted.offset, .size = wanted.size,
					    .stamp = use->stamp, .fd = -1, .place = -1};
		uint32_t place = files_find(&its);
		entered = place != NOT_OPEN;
		if (entered) {
			reading->fd = files_begin(place);
			reading->place = (int)place;
		}
	}
	pthread_mutex_unlock(&lock);
	if (entered || !use)
		return entered;
	int fd = open_replica(dir_fd, &its, &wanted);
	pthread_mutex_lock(&lock);
	entered = take(&its, fd, reading, &to_close);
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
	leave(use_of(reading->ino), reading->stamp);
	pthread_mutex_unlock(&lock);
	close_if(to_close);
}
