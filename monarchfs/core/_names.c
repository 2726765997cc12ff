/* The cache of names. See _names.h.
 *
 * A record is found by its name to be answered, and by its inode number to be forgotten, because a file may
 * have several names. Answers are written to the kernel under `lock`, by many threads at once (readers). A
 * thread that changes the table waits for those answers, and goes before later ones.
 *
 * The records lie in a ring, in order of age, without gaps. A record that is dropped keeps its place until
 * it is the oldest one. Memory that was never used costs nothing.
 *
 * A record has 48 to 64 bytes for a name of 12: times are stored as differences from the mtime, and mode, owner,
 * link count and block size as the index of a class, of which there are 255. Not here: names about which only Python
 * can ask the source, directories, whose attributes change under their number, unless they are asked about each time,
 * and names that do not exist.
 */
#define _GNU_SOURCE
#include "_names.h"

#include "_counts.h"

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#ifndef NAMES_BYTES
#define NAMES_BYTES (64U << 20) /* more than a million names of 16 bytes, whose times are all different */
#endif
#define WORD 4U
#define FIRST WORD        /* the place of the first record: 0 is none */
#define DROPPED UINT32_MAX
#define BUCKETS (1U << 18)
#define OWN_CLASS UINT8_MAX
#define FS_BLOCK_BYTES 4096
#define SECOND_NS 1000000000
#define NUMBER_BYTES 10
#define FOREVER 1 /* nanoseconds: a time long ago, so that it takes one byte */

/* What many files have in common. */
struct class {
	uint32_t mode, nlink, uid, gid, rdev, blksize;
};

/* A record. `rest` is packed: the length of the name (one byte), the parent, the name: these are its key. Then the
 * inode number, the class (one byte), the class itself if that is OWN_CLASS, and NUMBERS numbers (struct numbers).
 * All other numbers have 7 bits in each byte, the lowest first; the highest bit says that more follow. */
struct known {
	uint32_t next;        /* in its bucket; DROPPED */
	uint32_t next_of_ino; /* in that bucket */
	unsigned char rest[];
} __attribute__((packed, aligned(WORD), may_alias));

/* Most of them are small: blocks, atime and ctime are differences from what is usual. */
enum { SIZE, BLOCKS, MTIME, ATIME, CTIME, UNTIL, SOURCE_INO, NUMBERS };

#define MOST_KEY (1 + NUMBER_BYTES + UINT8_MAX)
#define MOST_REST (MOST_KEY + 1 + sizeof(struct class) + (NUMBERS + 1) * NUMBER_BYTES)

static pthread_rwlock_t lock = PTHREAD_RWLOCK_WRITER_NONRECURSIVE_INITIALIZER_NP;
static uint32_t buckets[BUCKETS], of_ino[BUCKETS]; /* the places of records in `ring` */
/* Keys are compared beyond a record's end. */
static _Alignas(struct known) unsigned char ring[NAMES_BYTES + MOST_KEY];
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

static void put_number(unsigned char **to, uint64_t number)
{
	for (; number >= 128; number >>= 7)
		*(*to)++ = (unsigned char)(number | 128);
	*(*to)++ = (unsigned char)number;
}

static uint64_t get_number(const unsigned char **from)
{
	uint64_t number = 0;
	for (unsigned shift = 0;; shift += 7) {
		unsigned char byte = *(*from)++;
		number |= (uint64_t)(byte & 127) << shift;
		if (byte < 128)
			return number;
	}
}

/* Signed ones near 0 become small. */
static uint64_t folded(uint64_t number)
{
	return number << 1 ^ (0 - (number >> 63));
}

static uint64_t unfolded(uint64_t number)
{
	return number >> 1 ^ (0 - (number & 1));
}

static size_t make_key(unsigned char key[MOST_KEY], uint64_t parent, const char *name, size_t length)
{
	unsigned char *to = key;
	*to++ = (unsigned char)length;
	put_number(&to, parent);
	memcpy(to, name, length);
	return (size_t)(to - key) + length;
}

static size_t key_bytes(const struct known *known)
{
	const unsigned char *from = known->rest + 1;
	get_number(&from);
	return (size_t)(from - known->rest) + known->rest[0];
}

static uint64_t ino_of(const struct known *known)
{
	const unsigned char *from = known->rest + key_bytes(known);
	return get_number(&from);
}

/* What comes after the key. Returns the record's end. */
static const unsigned char *parse(const struct known *known, uint64_t *ino, struct class *class,
				  uint64_t numbers[NUMBERS])
{
	const unsigned char *from = known->rest + key_bytes(known);
	*ino = get_number(&from);
	uint8_t number = *from++;
	if (number == OWN_CLASS) {
		memcpy(class, from, sizeof(*class));
		from += sizeof(*class);
	} else {
		*class = classes[number];
	}
	for (unsigned i = 0; i < NUMBERS; i++)
		numbers[i] = get_number(&from);
	return from;
}

/* Up to the next record. */
static uint32_t whole(const struct known *known, const unsigned char *known_end)
{
	size_t bytes = (size_t)(known_end - (const unsigned char *)known);
	return (uint32_t)(bytes + WORD - 1) / WORD * WORD;
}

static uint32_t bytes_of(const struct known *known)
{
	uint64_t ino, numbers[NUMBERS];
	struct class class;
	return whole(known, parse(known, &ino, &class, numbers));
}

/* FNV-1a. */
static uint32_t *place_of(const unsigned char *key, size_t length)
{
	uint64_t hash = 0xcbf29ce484222325ULL;
	for (size_t i = 0; i < length; i++)
		hash = (hash ^ key[i]) * 0x100000001b3ULL;
	uint32_t *place = &buckets[bucket_of(hash)];
	while (*place && memcmp(at(*place)->rest, key, length) != 0)
		place = &at(*place)->next;
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
	known->next = DROPPED;
}

static void drop_known(const struct known *known)
{
	drop(place_of(known->rest, key_bytes(known)));
}

static bool wrapped(void)
{
	return end < oldest;
}

/* The oldest record goes. */
static void pass(void)
{
	struct known *known = at(oldest);
	uint32_t bytes = bytes_of(known);
	if (known->next != DROPPED)
		drop_known(known);
	oldest += bytes;
	if (wrapped() && oldest == top)
		oldest = FIRST;
}

/* Where a record of that size goes. The ring wraps as soon as the part before the oldest record is the
 * larger one: memory that was used is used again. */
static uint32_t make_room(uint32_t bytes)
{
	for (;;) {
		while (oldest != end && at(oldest)->next == DROPPED)
			pass();
		if (oldest == end)
			oldest = end = FIRST;
		if (wrapped()) {
			if (end + bytes < oldest)
				break;
			pass();
		} else if (end + bytes <= NAMES_BYTES && oldest - FIRST <= end - oldest + bytes) {
			break;
		} else if (oldest > FIRST + bytes) {
			top = end;
			end = FIRST;
		} else {
			pass();
		}
	}
	end += bytes;
	return end - bytes;
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
	return size / FS_BLOCK_BYTES * 8 + (size % FS_BLOCK_BYTES ? 8 : 0);
}

/* Append what comes after the key to `to`. Returns its end; NULL if a time does not fit. */
static unsigned char *pack(unsigned char *to, const struct fuse_attr *attr, uint64_t until_ns, uint64_t source_ino)
{
	int64_t mtime_ns, atime_ns, ctime_ns;
	if (!to_ns(attr->mtime, attr->mtimensec, &mtime_ns) ||
	    !to_ns(attr->atime, attr->atimensec, &atime_ns) ||
	    !to_ns(attr->ctime, attr->ctimensec, &ctime_ns))
		return NULL;
	const struct class class = {attr->mode, attr->nlink, attr->uid,
				    attr->gid,  attr->rdev,  attr->blksize};
	const uint64_t numbers[NUMBERS] = {
		[SIZE] = attr->size,
		[BLOCKS] = folded(attr->blocks - usual_blocks(attr->size)),
		[MTIME] = folded((uint64_t)mtime_ns),
		[ATIME] = folded((uint64_t)atime_ns - (uint64_t)mtime_ns),
		[CTIME] = folded((uint64_t)ctime_ns - (uint64_t)mtime_ns),
		[UNTIL] = until_ns,
		[SOURCE_INO] = source_ino,
	};
	put_number(&to, attr->ino);
	*to = class_of(&class);
	if (*to++ == OWN_CLASS) {
		memcpy(to, &class, sizeof(class));
		to += sizeof(class);
	}
	for (unsigned i = 0; i < NUMBERS; i++)
		put_number(&to, numbers[i]);
	return to;
}

/* Returns until when it is good. */
static uint64_t unpack(const struct known *known, struct fuse_attr *attr, uint64_t *source_ino)
{
	uint64_t ino, numbers[NUMBERS];
	struct class class;
	parse(known, &ino, &class, numbers);
	uint64_t mtime_ns = unfolded(numbers[MTIME]);
	*attr = (struct fuse_attr){
		.ino = ino,
		.size = numbers[SIZE],
		.blocks = unfolded(numbers[BLOCKS]) + usual_blocks(numbers[SIZE]),
		.mode = class.mode,
		.nlink = class.nlink,
		.uid = class.uid,
		.gid = class.gid,
		.rdev = class.rdev,
		.blksize = class.blksize,
	};
	from_ns((int64_t)mtime_ns, &attr->mtime, &attr->mtimensec);
	from_ns((int64_t)(mtime_ns + unfolded(numbers[ATIME])), &attr->atime, &attr->atimensec);
	from_ns((int64_t)(mtime_ns + unfolded(numbers[CTIME])), &attr->ctime, &attr->ctimensec);
	*source_ino = numbers[SOURCE_INO];
	return numbers[UNTIL];
}

void names_put(uint64_t parent, const char *name, size_t length, const struct fuse_attr *attr,
	       uint64_t for_ns, uint64_t source_ino)
{
	union {
		struct known known;
		unsigned char bytes[sizeof(struct known) + MOST_REST + WORD];
	} new;
	struct known *known = &new.known;
	if (length > UINT8_MAX)
		return;
	uint64_t until_ns = for_ns < NAMES_FOREVER_NS ? monotonic_ns() + for_ns : FOREVER;
	size_t key = make_key(known->rest, parent, name, length);
	pthread_rwlock_wrlock(&lock);
	uint32_t *place = place_of(known->rest, key), put = *place;
	if (put)
		drop(place);
	const unsigned char *after = pack(known->rest + key, attr, until_ns, source_ino);
	if (after) {
		uint32_t bytes = whole(known, after);
		if (!put || bytes_of(at(put)) != bytes)
			put = make_room(bytes);
		place = place_of(known->rest, key);
		known->next = *place;
		*place = put;
		place = &of_ino[bucket_of(attr->ino)];
		known->next_of_ino = *place;
		*place = put;
		memcpy(at(put), known, bytes);
	}
	pthread_rwlock_unlock(&lock);
}

void names_forget(uint64_t parent, const char *name, size_t length)
{
	unsigned char key[MOST_KEY];
	if (length > UINT8_MAX)
		return;
	length = make_key(key, parent, name, length);
	pthread_rwlock_wrlock(&lock);
	uint32_t *place = place_of(key, length);
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

/* Give the memory back. madvise(2) clears whole pages, of 4 to 64 KiB: others have a part of those at the ends. */
static void clear_ring(void)
{
	const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
	const uintptr_t from = ((uintptr_t)ring + page - 1) / page * page;
	const uintptr_t to = ((uintptr_t)ring + sizeof(ring)) / page * page;
	if (from < to)
		madvise((void *)from, to - from, MADV_DONTNEED);
}

void names_forget_all(void)
{
	pthread_rwlock_wrlock(&lock);
	if (oldest != end) {
		memset(buckets, 0, sizeof(buckets));
		memset(of_ino, 0, sizeof(of_ino));
		clear_ring();
		oldest = end = FIRST;
		class_count = 0;
	}
	pthread_rwlock_unlock(&lock);
}

/* As unpack; 0 if the name is not known. Under `lock`. */
static uint64_t look_up(uint64_t parent, const char *name, size_t length, struct fuse_attr *attr, uint64_t *source_ino)
{
	unsigned char key[MOST_KEY];
	*source_ino = 0;
	if (length > UINT8_MAX)
		return 0;
	uint32_t place = *place_of(key, make_key(key, parent, name, length));
	return place ? unpack(at(place), attr, source_ino) : 0;
}

bool names_enter(uint64_t parent, const char *name, size_t length, struct fuse_entry_out *out)
{
	*out = (struct fuse_entry_out){0};
	pthread_rwlock_rdlock(&lock);
	uint64_t source_ino, left_ns = 0, until_ns = look_up(parent, name, length, &out->attr, &source_ino);
	if (until_ns == FOREVER)
		left_ns = NAMES_FOREVER_NS;
	else if (until_ns)
		left_ns = until_ns - monotonic_ns();
	if (left_ns - 1 >= NAMES_FOREVER_NS) { /* it is too late */
		pthread_rwlock_unlock(&lock);
		return false;
	}
	out->nodeid = out->attr.ino;
	out->entry_valid = out->attr_valid = left_ns / SECOND_NS;
	out->entry_valid_nsec = out->attr_valid_nsec = (uint32_t)(left_ns % SECOND_NS);
	return true;
}

bool names_asked_about(const struct name *name)
{
	struct fuse_attr attr;
	uint64_t source_ino;
	pthread_rwlock_rdlock(&lock);
	look_up(name->parent, name->bytes, name->length, &attr, &source_ino);
	pthread_rwlock_unlock(&lock);
	return source_ino;
}

bool names_of_ino(uint64_t ino, struct name *found)
{
	uint64_t source_ino = 0;
	pthread_rwlock_rdlock(&lock);
	for (uint32_t place = of_ino[bucket_of(ino)]; place && !source_ino; place = at(place)->next_of_ino) {
		struct fuse_attr attr;
		unpack(at(place), &attr, &source_ino);
		if (attr.ino != ino)
			source_ino = 0;
		if (!source_ino)
			continue;
		const unsigned char *from = at(place)->rest;
		found->length = *from++;
		found->parent = get_number(&from);
		memcpy(found->bytes, from, found->length);
		found->bytes[found->length] = 0;
	}
	pthread_rwlock_unlock(&lock);
	return source_ino;
}

/* Whether its attributes are those of a record, but for the atime, which reading changes. */
static bool is_same(const struct stat *st, const struct fuse_attr *attr, uint64_t source_ino)
{
	return st->st_ino == source_ino && st->st_mode == attr->mode && (uint64_t)st->st_size == attr->size &&
	       (uint64_t)st->st_mtim.tv_sec == attr->mtime && (uint32_t)st->st_mtim.tv_nsec == attr->mtimensec &&
	       (uint64_t)st->st_ctim.tv_sec == attr->ctime && (uint32_t)st->st_ctim.tv_nsec == attr->ctimensec &&
	       st->st_uid == attr->uid && st->st_gid == attr->gid && st->st_nlink == attr->nlink &&
	       (uint64_t)st->st_blocks == attr->blocks && (uint32_t)st->st_blksize == attr->blksize;
}

bool names_enter_same(const struct name *name, const struct stat *st, struct fuse_entry_out *out)
{
	uint64_t source_ino;
	*out = (struct fuse_entry_out){0};
	pthread_rwlock_rdlock(&lock);
	look_up(name->parent, name->bytes, name->length, &out->attr, &source_ino);
	if (!source_ino || !is_same(st, &out->attr, source_ino)) {
		pthread_rwlock_unlock(&lock);
		return false;
	}
	out->nodeid = out->attr.ino;
	out->attr.atime = (uint64_t)st->st_atim.tv_sec;
	out->attr.atimensec = (uint32_t)st->st_atim.tv_nsec;
	out->attr_valid = NAMES_ASKED_SECONDS;
	return true;
}

void names_leave(void)
{
	pthread_rwlock_unlock(&lock);
}
