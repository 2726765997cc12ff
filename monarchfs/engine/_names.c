/* The cache of names. See _names.h.
 *
 * A record is found by its name to be answered, and by its inode number to be forgotten, because a file may
 * have several names. Answers are written to the kernel under `lock`, by many threads at once (readers). A
 * thread that changes the table waits for those answers, and goes before later ones.
 *
 * The records lie in a ring, in order of age, without gaps. A record that is dropped keeps its place until
 * it is the oldest one. Memory that was never used costs nothing.
 */
#define _GNU_SOURCE
#include "_names.h"

#include "../fuse/_counts.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>

#define WORD 4
#ifndef NAMES_BYTES
#define NAMES_BYTES (64U << 20) /* a million names of 16 bytes, one of whose times is not the mtime */
#endif
#define WORDS (NAMES_BYTES / WORD)
#define FIRST 1U          /* the place of the first record: 0 is none */
#define BUCKETS (1U << 18)
#define OWN_CLASS UINT8_MAX
#define PAGE 4096
#define SECOND_NS 1000000000

/* What many files have in common. */
struct class {
	uint32_t mode, nlink, uid, gid, rdev, blksize, flags;
};

/* The upper halves of numbers. */
struct high {
	uint32_t parent, ino, size;
};

enum { /* what else a record holds, before the name */
	HAS_HIGH = 1,
	HAS_BLOCKS = 2,
	HAS_ATIME = 4,
	HAS_CTIME = 8,
	IS_DROPPED = 16,
};

struct known {
	uint32_t next, next_of_ino;  /* in their buckets */
	uint32_t parent, ino, size;  /* the lower halves */
	uint64_t until_ns;
	int64_t mtime_ns;
	uint8_t class, has, length;
	unsigned char rest[];
} __attribute__((packed, aligned(WORD), may_alias));

#define MOST_REST (sizeof(struct class) + sizeof(struct high) + 3 * sizeof(int64_t) + UINT8_MAX)

static pthread_rwlock_t lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static uint32_t buckets[BUCKETS], of_ino[BUCKETS]; /* the places of records in `ring` */
static _Alignas(PAGE) uint32_t ring[WORDS];
static uint32_t oldest = FIRST, end = FIRST; /* equal: the ring is empty */
static uint32_t top;                         /* where the older part ends, if the newer lies before it */
static struct class classes[OWN_CLASS];
static uint8_t class_count;

static struct known *at(uint32_t place)
{
	return (struct known *)(ring + place);
}

static size_t bucket_of(uint64_t number)
{
	return (number * 0x9e3779b97f4a7c15ULL) >> 46;
}

static size_t before_name(const struct known *known)
{
	return (known->class == OWN_CLASS ? sizeof(struct class) : 0) +
	       (known->has & HAS_HIGH ? sizeof(struct high) : 0) +
	       8 * (size_t)__builtin_popcount(known->has & (HAS_BLOCKS | HAS_ATIME | HAS_CTIME));
}

static struct high high_of(const struct known *known)
{
	struct high high = {0};
	if (known->has & HAS_HIGH)
		memcpy(&high, known->rest + (known->class == OWN_CLASS ? sizeof(struct class) : 0),
		       sizeof(high));
	return high;
}

static uint64_t parent_of(const struct known *known)
{
	return (uint64_t)high_of(known).parent << 32 | known->parent;
}

static uint64_t ino_of(const struct known *known)
{
	return (uint64_t)high_of(known).ino << 32 | known->ino;
}

static uint32_t words_of(const struct known *known)
{
	size_t bytes = offsetof(struct known, rest) + before_name(known) + known->length;
	return (uint32_t)((bytes + WORD - 1) / WORD);
}

/* FNV-1a. */
static uint32_t *place_of(uint64_t parent, const void *name, size_t length)
{
	uint64_t hash = 0xcbf29ce484222325ULL ^ parent;
	for (size_t i = 0; i < length; i++)
		hash = (hash ^ ((const unsigned char *)name)[i]) * 0x100000001b3ULL;
	uint32_t *place = &buckets[bucket_of(hash)];
	for (struct known *known; *place; place = &known->next) {
		known = at(*place);
		if (parent_of(known) == parent && known->length == length &&
		    memcmp(known->rest + before_name(known), name, length) == 0)
			break;
	}
	return place;
}

static void drop(uint32_t *place)
{
	uint32_t dropped = *place;
	struct known *known = at(dropped);
	*place = known->next;
	place = &of_ino[bucket_of(ino_of(known))];
	while (*place != dropped)
		place = &at(*place)->next_of_ino;
	*place = known->next_of_ino;
	known->has |= IS_DROPPED;
}

static void drop_known(const struct known *known)
{
	drop(place_of(parent_of(known), known->rest + before_name(known), known->length));
}

static bool wrapped(void)
{
	return end < oldest;
}

/* The oldest record goes. */
static void pass(void)
{
	struct known *known = at(oldest);
	if (!(known->has & IS_DROPPED))
		drop_known(known);
	oldest += words_of(known);
	if (wrapped() && oldest == top)
		oldest = FIRST;
}

/* Where a record of so many words goes. The ring wraps as soon as the part before the oldest record is the
 * larger one: memory that was used is used again. */
static uint32_t make_room(uint32_t words)
{
	for (;;) {
		while (oldest != end && at(oldest)->has & IS_DROPPED)
			pass();
		if (oldest == end)
			oldest = end = FIRST;
		if (wrapped()) {
			if (end + words < oldest)
				break;
			pass();
		} else if (end + words <= WORDS && oldest - FIRST <= end - oldest + words) {
			break;
		} else if (oldest > FIRST + words) {
			top = end;
			end = FIRST;
		} else {
			pass();
		}
	}
	end += words;
	return end - words;
}

/* The index of the class; OWN_CLASS if there are too many. */
static uint8_t class_of(const struct class *class)
{
	uint8_t number = 0;
	while (number < class_count && memcmp(&classes[number], class, sizeof(*class)) != 0)
		number++;
	if (number == class_count && class_count < OWN_CLASS)
		classes[class_count++] = *class;
	return number;
}

/* Whether the time fits into 64 bits of nanoseconds. */
static bool to_ns(uint64_t seconds, uint32_t rest_ns, int64_t *ns)
{
	return !__builtin_mul_overflow((int64_t)seconds, SECOND_NS, ns) &&
	       !__builtin_add_overflow(*ns, rest_ns, ns);
}

static void from_ns(int64_t ns, uint64_t *seconds, uint32_t *rest_ns)
{
	int64_t rest = ns % SECOND_NS + (ns % SECOND_NS < 0 ? SECOND_NS : 0);
	*seconds = (uint64_t)((ns - rest) / SECOND_NS);
	*rest_ns = (uint32_t)rest;
}

static uint64_t usual_blocks(uint64_t size)
{
	return size / PAGE * 8 + (size % PAGE ? 8 : 0);
}

static void append(struct known *known, uint8_t flag, const void *value)
{
	memcpy(known->rest + before_name(known), value, 8);
	known->has |= flag;
}

static bool pack(struct known *known, uint64_t parent, const struct fuse_attr *attr)
{
	int64_t mtime_ns, atime_ns, ctime_ns;
	if (!to_ns(attr->mtime, attr->mtimensec, &mtime_ns) ||
	    !to_ns(attr->atime, attr->atimensec, &atime_ns) ||
	    !to_ns(attr->ctime, attr->ctimensec, &ctime_ns))
		return false;
	const struct class class = {attr->mode, attr->nlink,   attr->uid,  attr->gid,
				    attr->rdev, attr->blksize, attr->flags};
	const struct high high = {(uint32_t)(parent >> 32), (uint32_t)(attr->ino >> 32),
				  (uint32_t)(attr->size >> 32)};
	known->parent = (uint32_t)parent;
	known->ino = (uint32_t)attr->ino;
	known->size = (uint32_t)attr->size;
	known->mtime_ns = mtime_ns;
	known->class = class_of(&class);
	if (known->class == OWN_CLASS)
		memcpy(known->rest, &class, sizeof(class));
	if (high.parent || high.ino || high.size) {
		memcpy(known->rest + before_name(known), &high, sizeof(high));
		known->has |= HAS_HIGH;
	}
	if (attr->blocks != usual_blocks(attr->size))
		append(known, HAS_BLOCKS, &attr->blocks);
	if (atime_ns != mtime_ns)
		append(known, HAS_ATIME, &atime_ns);
	if (ctime_ns != mtime_ns)
		append(known, HAS_CTIME, &ctime_ns);
	return true;
}

static void unpack(const struct known *known, struct fuse_attr *attr)
{
	const unsigned char *rest = known->rest;
	struct class class;
	int64_t atime_ns = known->mtime_ns, ctime_ns = known->mtime_ns;
	if (known->class == OWN_CLASS) {
		memcpy(&class, rest, sizeof(class));
		rest += sizeof(class);
	} else {
		class = classes[known->class];
	}
	uint64_t size = (uint64_t)high_of(known).size << 32 | known->size;
	rest += known->has & HAS_HIGH ? sizeof(struct high) : 0;
	*attr = (struct fuse_attr){
		.ino = ino_of(known),
		.size = size,
		.blocks = usual_blocks(size),
		.mode = class.mode,
		.nlink = class.nlink,
		.uid = class.uid,
		.gid = class.gid,
		.rdev = class.rdev,
		.blksize = class.blksize,
		.flags = class.flags,
	};
	if (known->has & HAS_BLOCKS) {
		memcpy(&attr->blocks, rest, 8);
		rest += 8;
	}
	if (known->has & HAS_ATIME) {
		memcpy(&atime_ns, rest, 8);
		rest += 8;
	}
	if (known->has & HAS_CTIME)
		memcpy(&ctime_ns, rest, 8);
	from_ns(known->mtime_ns, &attr->mtime, &attr->mtimensec);
	from_ns(atime_ns, &attr->atime, &attr->atimensec);
	from_ns(ctime_ns, &attr->ctime, &attr->ctimensec);
}

void names_put(uint64_t parent, const char *name, size_t length, const struct fuse_attr *attr,
	       uint64_t for_ns)
{
	uint64_t until_ns = monotonic_ns() + for_ns;
	union {
		struct known known;
		unsigned char bytes[sizeof(struct known) + MOST_REST];
	} new;
	struct known *known = &new.known;
	pthread_rwlock_wrlock(&lock);
	uint32_t *place = place_of(parent, name, length), put = *place;
	if (put)
		drop(place);
	*known = (struct known){.until_ns = until_ns};
	if (length <= UINT8_MAX && pack(known, parent, attr)) {
		known->length = (uint8_t)length;
		memcpy(known->rest + before_name(known), name, length);
		uint32_t words = words_of(known);
		if (!put || words_of(at(put)) != words)
			put = make_room(words);
		place = place_of(parent, name, length);
		known->next = *place;
		*place = put;
		place = &of_ino[bucket_of(attr->ino)];
		known->next_of_ino = *place;
		*place = put;
		memcpy(at(put), known, words * (size_t)WORD);
	}
	pthread_rwlock_unlock(&lock);
}

void names_forget(uint64_t parent, const char *name, size_t length)
{
	pthread_rwlock_wrlock(&lock);
	uint32_t *place = place_of(parent, name, length);
	if (*place)
		drop(place);
	pthread_rwlock_unlock(&lock);
}

void names_forget_ino(uint64_t ino)
{
	pthread_rwlock_wrlock(&lock);
	for (uint32_t place = of_ino[bucket_of(ino)], next; place; place = next) {
		next = at(place)->next_of_ino;
		if (ino_of(at(place)) == ino)
			drop_known(at(place));
	}
	pthread_rwlock_unlock(&lock);
}

void names_forget_all(void)
{
	pthread_rwlock_wrlock(&lock);
	if (oldest != end) {
		memset(buckets, 0, sizeof(buckets));
		memset(of_ino, 0, sizeof(of_ino));
		madvise(ring, sizeof(ring), MADV_DONTNEED); /* gives the memory back */
		oldest = end = FIRST;
		class_count = 0;
	}
	pthread_rwlock_unlock(&lock);
}

bool names_enter(uint64_t parent, const char *name, size_t length, struct fuse_entry_out *out)
{
	pthread_rwlock_rdlock(&lock);
	uint32_t place = *place_of(parent, name, length);
	uint64_t now_ns = place ? monotonic_ns() : 0;
	uint64_t until_ns = place ? at(place)->until_ns : 0;
	if (until_ns <= now_ns) {
		pthread_rwlock_unlock(&lock);
		return false;
	}
	uint64_t seconds = (until_ns - now_ns) / SECOND_NS;
	uint32_t rest_ns = (uint32_t)((until_ns - now_ns) % SECOND_NS);
	*out = (struct fuse_entry_out){
		.nodeid = ino_of(at(place)),
		.entry_valid = seconds,
		.entry_valid_nsec = rest_ns,
		.attr_valid = seconds,
		.attr_valid_nsec = rest_ns,
	};
	unpack(at(place), &out->attr);
	return true;
}

void names_leave(void)
{
	pthread_rwlock_unlock(&lock);
}
