/* One read of a large file in the source on behalf of its copy. See _unit.h.
 *
 * The memory of blocks is used again at once, the last one first: so it is in the CPU's cache and costs no
 * page faults.
 *
 * On a network file system each read is of a whole request to a server (4 MiB, aligned): read block by block,
 * copies gave a Lustre's servers 14 times the requests of a plain reader. Elsewhere a read that took more than a
 * millisecond is followed by one twice as large, unless somebody reads the file at random. A writing thread that
 * gets nothing for 0.1 s ends its call until the source has given all, so that threads of tiers do not hang with
 * the source.
 */
#define _GNU_SOURCE
#define XXH_INLINE_ALL
#include "_unit.h"

#include "_counts.h"

#include <xxhash.h>

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define HOLE_BYTES (64U << 10)
#define FS_BLOCK_BYTES 4096U
#define PAGE_BYTES 65536 /* the largest of any kernel: Lustre reads whole pages directly */
#define SPARE_BLOCKS 64 /* free blocks that are kept */
#define BLOCK_DIGEST_BYTES (UNIT_BLOCK_BYTES / UNIT_CHECKED_BYTES * UNIT_DIGEST_BYTES)

/* If the source takes longer, the next read is larger: the source may have several servers. */
#define SLOW_NS 1000000
#define MOST_BLOCKS 64 /* in one read */

struct block {
	struct block *next; /* among the spare ones */
	unsigned users;
	char *data;
};

/* Guarded by `lock`, except for the plan and `count`, which are constant. */
struct unit {
	pthread_mutex_t lock;
	pthread_cond_t news;
	struct unit_plan plan;
	unsigned count; /* of blocks */
	unsigned arrived, written; /* so many of them, from the first on: or dropped, or not to be */
	bool over; /* nothing more arrives */
	bool stopped;
	struct unit_holes holes; /* of the reading thread */
	unsigned char *digests;
	struct {
		struct block *block; /* while it is in memory */
		enum unit_state state;
	} places[];
};

static pthread_mutex_t spare_lock = PTHREAD_MUTEX_INITIALIZER;
static struct block *spare;
static unsigned spare_count;
static size_t memory;

/* All holes: nobody frees it. */
static char zeros[UNIT_BLOCK_BYTES];
static struct block hole = {.users = 1, .data = zeros};

/* -- blocks */

static struct block *new_block(void)
{
	struct block *block;
	pthread_mutex_lock(&spare_lock);
	block = spare;
	if (block) {
		spare = block->next;
		spare_count--;
	}
	memory += UNIT_BLOCK_BYTES;
	pthread_mutex_unlock(&spare_lock);
	if (!block) {
		block = malloc(sizeof(*block));
		if (block && !(block->data = aligned_alloc(PAGE_BYTES, UNIT_BLOCK_BYTES))) {
			free(block);
			block = NULL;
		}
	}
	if (block) {
		block->users = 1;
		return block;
	}
	pthread_mutex_lock(&spare_lock);
	memory -= UNIT_BLOCK_BYTES;
	pthread_mutex_unlock(&spare_lock);
	return NULL;
}

static void use_block(struct block *block)
{
	pthread_mutex_lock(&spare_lock);
	block->users++;
	pthread_mutex_unlock(&spare_lock);
}

static void leave_block(void *given)
{
	struct block *block = given;
	pthread_mutex_lock(&spare_lock);
	bool last = --block->users == 0;
	if (last)
		memory -= UNIT_BLOCK_BYTES;
	if (last && spare_count < SPARE_BLOCKS) {
		block->next = spare;
		spare = block;
		spare_count++;
		last = false;
	}
	pthread_mutex_unlock(&spare_lock);
	if (last) {
		free(block->data);
		free(block);
	}
}

size_t unit_memory(void)
{
	pthread_mutex_lock(&spare_lock);
	size_t now = memory;
	pthread_mutex_unlock(&spare_lock);
	return now;
}

/* -- units */

struct unit *unit_new(const struct unit_plan *plan)
{
	errno = EINVAL;
	if (!plan->size || !plan->chunk_bytes || UNIT_BLOCK_BYTES % plan->chunk_bytes ||
	    plan->chunk_bytes % UNIT_CHECKED_BYTES || plan->start % plan->chunk_bytes ||
	    plan->size > UINT32_MAX)
		return NULL;
	unsigned count = (unsigned)((plan->size - 1) / UNIT_BLOCK_BYTES) + 1;
	struct unit *unit = calloc(1, sizeof(*unit) + count * sizeof(unit->places[0]));
	if (!unit || !(unit->digests = calloc(count, BLOCK_DIGEST_BYTES))) {
		free(unit);
		errno = ENOMEM;
		return NULL;
	}
	unit->plan = *plan;
	unit->count = count;
	pthread_mutex_init(&unit->lock, NULL);
	pthread_condattr_t attributes;
	pthread_condattr_init(&attributes);
	pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
	pthread_cond_init(&unit->news, &attributes);
	pthread_condattr_destroy(&attributes);
	return unit;
}

void unit_empty(struct unit *unit)
{
	pthread_mutex_lock(&unit->lock);
	for (unsigned n = 0; n < unit->count; n++) {
		if (unit->places[n].block)
			leave_block(unit->places[n].block);
		unit->places[n].block = NULL;
	}
	pthread_mutex_unlock(&unit->lock);
}

void unit_free(struct unit *unit)
{
	unit_empty(unit);
	pthread_cond_destroy(&unit->news);
	pthread_mutex_destroy(&unit->lock);
	free(unit->digests);
	free(unit);
}

static uint64_t start_of(const struct unit *unit, unsigned n)
{
	return unit->plan.start + (uint64_t)n * UNIT_BLOCK_BYTES;
}

static size_t size_of(const struct unit *unit, unsigned n)
{
	uint64_t rest = unit->plan.size - (uint64_t)n * UNIT_BLOCK_BYTES;
	return rest < UNIT_BLOCK_BYTES ? (size_t)rest : UNIT_BLOCK_BYTES;
}

static unsigned block_of(const struct unit *unit, uint64_t offset)
{
	if (offset < unit->plan.start || offset >= unit->plan.start + unit->plan.size)
		return unit->count;
	return (unsigned)((offset - unit->plan.start) / UNIT_BLOCK_BYTES);
}

/* Tell readers without Python the state of a block. Under the unit's lock, so that nothing follows unit_stop. */
static void show_state(const struct unit *unit, unsigned n, enum chunk_state state)
{
	if (!unit->plan.readers || unit->stopped)
		return;
	uint64_t first = start_of(unit, n), last = first + size_of(unit, n) - 1;
	unit->plan.readers->chunks(unit->plan.ino, first / unit->plan.chunk_bytes,
				   last / unit->plan.chunk_bytes + 1, state);
}

/* The digests of a block. */
static void digest_block(const struct unit *unit, unsigned n, const char *data, unsigned char *to)
{
	size_t size = size_of(unit, n);
	for (size_t at = 0; at < size; at += UNIT_CHECKED_BYTES, to += UNIT_DIGEST_BYTES) {
		size_t rest = size - at < UNIT_CHECKED_BYTES ? size - at : UNIT_CHECKED_BYTES;
		XXH64_canonicalFromHash((XXH64_canonical_t *)to, XXH3_64bits(data + at, rest));
	}
}

/* -- from the source */

static bool same_time(const struct timespec *one, const struct timespec *other)
{
	return one->tv_sec == other->tv_sec && one->tv_nsec == other->tv_nsec;
}

static enum unit_end look(int fd, const struct unit_version *version)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return UNIT_FAILED;
	bool same = st.st_dev == version->device && st.st_ino == version->ino &&
		    st.st_size == version->size && same_time(&st.st_mtim, &version->mtime) &&
		    same_time(&st.st_ctim, &version->ctime);
	return same ? UNIT_READ : UNIT_CHANGED;
}

/* Read `size` bytes into parts that may have room for more. */
static enum unit_end read_all(int fd, struct iovec *parts, int count, uint64_t offset, size_t size)
{
	for (;;) {
		ssize_t got = preadv(fd, parts, count, (off_t)offset);
		if (got < 0 && errno == EINTR)
			continue;
		if (got <= 0)
			return got < 0 ? UNIT_FAILED : UNIT_CHANGED;
		if ((size_t)got >= size)
			return UNIT_READ;
		offset += (size_t)got;
		size -= (size_t)got;
		while ((size_t)got >= parts->iov_len) {
			got -= (ssize_t)parts->iov_len;
			parts++;
			count--;
		}
		parts->iov_base = (char *)parts->iov_base + got;
		parts->iov_len -= (size_t)got;
	}
}

/* Read blocks [n, n + count) into memory. `blocks` belong to the caller only if this succeeds. */
static enum unit_end read_blocks(const struct unit *unit, const struct unit_source *source, unsigned n,
				 unsigned count, struct block **blocks)
{
	int fd = source->direct < 0 ? source->fd : source->direct;
	struct iovec parts[MOST_BLOCKS];
	unsigned have = 0;
	size_t size = 0;
	enum unit_end end = UNIT_FAILED;
	while (have < count && (blocks[have] = new_block())) {
		size_t here = size_of(unit, n + have);
		/* The end of a file need not be aligned, but a direct read must be. */
		size_t pages = (here + PAGE_BYTES - 1) / PAGE_BYTES;
		parts[have] = (struct iovec){blocks[have]->data, pages * PAGE_BYTES};
		size += here;
		have++;
	}
	errno = ENOMEM;
	if (have == count)
		end = read_all(fd, parts, (int)count, start_of(unit, n), size);
	if (end == UNIT_READ)
		end = look(source->fd, &unit->plan.version);
	int error = errno;
	for (unsigned each = 0; end != UNIT_READ && each < have; each++)
		leave_block(blocks[each]);
	errno = error;
	return end;
}

/* Answer the reads that wait for a block, and let later reads find it. */
static void show_block(const struct unit *unit, unsigned n, struct block *block)
{
	const struct nonresident_units *readers = unit->plan.readers;
	if (!readers)
		return;
	use_block(block);
	if (!readers->arrived(unit->plan.ino, start_of(unit, n), block->data, size_of(unit, n),
			      leave_block, block))
		leave_block(block);
}

/* A block has arrived, and its version was compared. Takes it over. Meanwhile the unit may be emptied: the block stays
 * until it is shown. */
static void put(struct unit *unit, unsigned n, struct block *block)
{
	bool full = unit->plan.most_bytes && block != &hole && unit_memory() > unit->plan.most_bytes;
	use_block(block);
	pthread_mutex_lock(&unit->lock);
	unit->places[n].block = block;
	unit->places[n].state = UNIT_IN_MEMORY;
	bool shown = !unit->stopped;
	pthread_mutex_unlock(&unit->lock);
	/* Before the writer gets it, so that a block is shown before it is written. */
	if (shown)
		show_block(unit, n, block);
	pthread_mutex_lock(&unit->lock);
	if (full) {
		if (unit->places[n].block)
			leave_block(block);
		unit->places[n].block = NULL;
		unit->places[n].state = UNIT_DROPPED;
		show_state(unit, n, CHUNK_MISSING);
	}
	unit->arrived = n + 1;
	pthread_cond_signal(&unit->news);
	pthread_mutex_unlock(&unit->lock);
	leave_block(block);
}

static unsigned next_step(unsigned step, uint64_t took_ns)
{
	if (took_ns > SLOW_NS)
		return step * 2 < MOST_BLOCKS ? step * 2 : MOST_BLOCKS;
	return step > 1 ? step / 2 : 1;
}

/* How many blocks to read at once from block n on: `step`, or up to where the next request begins. */
static unsigned count_of(const struct unit *unit, const struct unit_source *source, unsigned n, unsigned step)
{
	uint64_t rest = 0;
	if (source->request_bytes && unit->plan.in_requests)
		rest = source->request_bytes - start_of(unit, n) % source->request_bytes;
	uint64_t blocks = (rest + UNIT_BLOCK_BYTES - 1) / UNIT_BLOCK_BYTES;
	unsigned count = blocks < step ? step : blocks < MOST_BLOCKS ? (unsigned)blocks : MOST_BLOCKS;
	return count < unit->count - n ? count : unit->count - n;
}

/* Put the blocks from n on that lie in a hole of the source; `count`: how many, at most all. Where it does not tell
 * of holes, or what it tells makes no sense, there are none. */
static enum unit_end put_holes(struct unit *unit, int fd, unsigned n, unsigned *count)
{
	uint64_t start = start_of(unit, n), end = unit->plan.start + unit->plan.size;
	uint64_t size = (uint64_t)unit->plan.version.size;
	*count = 0;
	if (!unit->plan.sparse || start < unit->holes.data_end)
		return UNIT_READ;
	off_t found = lseek(fd, (off_t)start, SEEK_DATA);
	uint64_t data = found >= 0 ? (uint64_t)found : errno == ENXIO ? size : 0;
	if (data < start || data > size) {
		unit->holes.data_end = INT64_MAX; /* not to be asked again */
		return UNIT_READ;
	}
	unsigned blocks = data >= end ? unit->count - n : (unsigned)((data - start) / UNIT_BLOCK_BYTES);
	if (!blocks) {
		found = lseek(fd, (off_t)data, SEEK_HOLE);
		unit->holes.data_end = found > (off_t)data ? (uint64_t)found : size;
		return UNIT_READ;
	}
	/* What it has told is of the version that it has now. */
	enum unit_end same = look(fd, &unit->plan.version);
	if (same != UNIT_READ)
		return same;
	for (; *count < blocks; ++*count) {
		unit->holes.bytes += size_of(unit, n + *count);
		use_block(&hole);
		put(unit, n + *count, &hole);
	}
	unit->holes.hole_end = data >= end ? data : 0;
	return UNIT_READ;
}

/* No block that lies after the data is read with them. */
static unsigned count_before_hole(const struct unit *unit, unsigned n, unsigned count)
{
	uint64_t start = start_of(unit, n), data_end = unit->holes.data_end;
	if (!unit->plan.sparse || data_end <= start)
		return count;
	uint64_t blocks = (data_end - start + UNIT_BLOCK_BYTES - 1) / UNIT_BLOCK_BYTES;
	return blocks < count ? (unsigned)blocks : count;
}

static enum unit_end read_each(struct unit *unit, struct unit_source *source, uint64_t *bytes)
{
	struct block *blocks[MOST_BLOCKS];
	enum unit_end end;
	unsigned count, step = 1;
	for (unsigned n = unit->arrived; n < unit->count; n += count) {
		end = put_holes(unit, source->fd, n, &count);
		if (end != UNIT_READ)
			return end;
		if (count)
			continue;
		uint64_t began_ns = monotonic_ns();
		count = count_before_hole(unit, n, count_of(unit, source, n, step));
		end = read_blocks(unit, source, n, count, blocks);
		if (end == UNIT_FAILED && errno == EINVAL && source->direct >= 0) {
			source->direct = -1; /* the file system needs another alignment */
			count = 0;
			continue;
		}
		if (end != UNIT_READ)
			return end;
		step = next_step(step, monotonic_ns() - began_ns);
		for (unsigned each = 0; each < count; each++) {
			*bytes += size_of(unit, n + each);
			put(unit, n + each, blocks[each]);
		}
	}
	return UNIT_READ;
}

enum unit_end unit_read(struct unit *unit, struct unit_source *source, uint64_t *bytes)
{
	*bytes = 0;
	uint64_t start = start_of(unit, unit->arrived);
	/* Another thread may be reading what follows. And pages that the kernel reads ahead, and drops because
	 * memory is short, are read twice. */
	(void)posix_fadvise(source->fd, 0, 0, POSIX_FADV_RANDOM);
	enum unit_end end = read_each(unit, source, bytes);
	int error = errno;
	/* The tier or the mount's own pages have the bytes now. */
	if (*bytes && source->direct < 0)
		(void)posix_fadvise(source->fd, (off_t)start, (off_t)(*bytes + unit->holes.bytes),
				    POSIX_FADV_DONTNEED);
	unit_finish(unit);
	errno = error;
	return end;
}

struct unit_holes unit_holes(const struct unit *unit)
{
	return unit->holes;
}

/* -- from elsewhere */

/* Where the next bytes go. */
struct intake {
	struct unit *unit;
	const unsigned char *digests;
	struct block *block; /* NULL: none of the next one has come */
	size_t have;
};

static bool is_right(const struct unit *unit, unsigned n, const struct intake *intake)
{
	unsigned char found[BLOCK_DIGEST_BYTES];
	size_t count = (size_of(unit, n) - 1) / UNIT_CHECKED_BYTES + 1;
	digest_block(unit, n, intake->block->data, found);
	return !memcmp(found, intake->digests + n * BLOCK_DIGEST_BYTES, count * UNIT_DIGEST_BYTES);
}

static bool take(void *to, const char *data, size_t size)
{
	struct intake *intake = to;
	struct unit *unit = intake->unit;
	while (size) {
		unsigned n = unit->arrived;
		if (n == unit->count || (!intake->block && !(intake->block = new_block())))
			return false;
		size_t piece = size_of(unit, n) - intake->have;
		piece = piece < size ? piece : size;
		memcpy(intake->block->data + intake->have, data, piece);
		intake->have += piece;
		data += piece;
		size -= piece;
		if (intake->have < size_of(unit, n))
			continue;
		if (!is_right(unit, n, intake))
			return false;
		put(unit, n, intake->block);
		intake->block = NULL;
		intake->have = 0;
	}
	return true;
}

enum elsewhere_result unit_read_elsewhere(struct unit *unit, unit_elsewhere *from, unsigned peer, const char *path,
					  const unsigned char *digests, uint64_t *bytes)
{
	struct intake intake = {.unit = unit, .digests = digests};
	uint64_t start = start_of(unit, unit->arrived), end = unit->plan.start + unit->plan.size;
	if (start >= end) /* all has arrived, and the last block ends before the next one would start */
		return ELSEWHERE_READ;
	enum elsewhere_result result = from(peer, path, start, (size_t)(end - start), take, &intake);
	if (intake.block)
		leave_block(intake.block);
	uint64_t reached = start_of(unit, unit->arrived);
	*bytes += (reached < end ? reached : end) - start;
	return result;
}

/* -- to the tier */

static bool is_hole(const char *data, size_t size)
{
	/* Comparing the first and the last byte is nearly always enough. */
	return !data[0] && !data[size - 1] && !memcmp(data, data + 1, size - 1);
}

static int write_all(int fd, const char *from, size_t size, uint64_t offset)
{
	while (size) {
		ssize_t put = pwrite(fd, from, size, (off_t)offset);
		if (put < 0 && errno == EINTR)
			continue;
		if (put <= 0)
			return put < 0 ? errno : EIO;
		from += put;
		size -= (size_t)put;
		offset += (size_t)put;
	}
	return 0;
}

/* As in cache/store/files.py, for a range that was never written. */
static int write_sparse(int fd, const char *data, size_t size, uint64_t offset)
{
	size_t start = 0;
	int error = 0;
	for (size_t at = 0; at < size && !error; at += HOLE_BYTES) {
		size_t piece = size - at < HOLE_BYTES ? size - at : HOLE_BYTES;
		if (is_hole(data + at, piece)) {
			error = write_all(fd, data + start, at - start, offset + start);
			start = at + piece;
		}
	}
	return error ? error : write_all(fd, data + start, size - start, offset + start);
}


/* Wait for the next block that has to be written. Returns 1 and its number, 0 if none came in time, -1 if none
 * will come. Under the unit's lock. */
static int next_block(struct unit *unit, const struct timespec *until, unsigned *n)
{
	int error = 0;
	for (;;) {
		while (unit->written < unit->arrived && !unit->places[unit->written].block)
			unit->written++;
		*n = unit->written;
		if (unit->stopped)
			return -1;
		if (unit->written < unit->arrived)
			return 1;
		if (unit->over)
			return -1;
		if (error)
			return 0;
		error = pthread_cond_timedwait(&unit->news, &unit->lock, until);
	}
}

int unit_write(struct unit *unit, int fd, int64_t wait_ns)
{
	int found, error = 0;
	unsigned n;
	pthread_mutex_lock(&unit->lock);
	for (;;) {
		int64_t until_ns = (int64_t)monotonic_ns() + wait_ns;
		struct timespec until = {until_ns / 1000000000, until_ns % 1000000000};
		found = next_block(unit, &until, &n);
		if (found <= 0)
			break;
		struct block *block = unit->places[n].block;
		pthread_mutex_unlock(&unit->lock);
		digest_block(unit, n, block->data, unit->digests + n * BLOCK_DIGEST_BYTES);
		error = write_sparse(fd, block->data, size_of(unit, n), start_of(unit, n));
		pthread_mutex_lock(&unit->lock);
		if (error)
			break;
		unit->places[n].block = NULL;
		unit->places[n].state = UNIT_STORED;
		unit->written = n + 1;
		show_state(unit, n, CHUNK_PRESENT);
		leave_block(block);
	}
	pthread_mutex_unlock(&unit->lock);
	return error ? -error : found < 0;
}

uint64_t unit_needed(struct unit *unit)
{
	uint64_t needed = 0;
	pthread_mutex_lock(&unit->lock);
	for (unsigned n = unit->written; n < unit->arrived; n++) {
		const struct block *block = unit->places[n].block;
		size_t size = block ? size_of(unit, n) : 0;
		for (size_t at = 0; at < size; at += HOLE_BYTES) {
			size_t piece = size - at < HOLE_BYTES ? size - at : HOLE_BYTES;
			if (!is_hole(block->data + at, piece))
				needed += (piece + FS_BLOCK_BYTES - 1) / FS_BLOCK_BYTES *
					  FS_BLOCK_BYTES;
		}
	}
	pthread_mutex_unlock(&unit->lock);
	return needed;
}

/* -- for others */

void unit_show(struct unit *unit)
{
	pthread_mutex_lock(&unit->lock);
	for (unsigned n = 0; n < unit->count && !unit->stopped; n++) {
		if (unit->places[n].state == UNIT_STORED)
			show_state(unit, n, CHUNK_PRESENT);
		else if (unit->places[n].block)
			show_block(unit, n, unit->places[n].block);
	}
	pthread_mutex_unlock(&unit->lock);
}

void unit_finish(struct unit *unit)
{
	pthread_mutex_lock(&unit->lock);
	unit->over = true;
	pthread_cond_signal(&unit->news);
	pthread_mutex_unlock(&unit->lock);
}

void unit_stop(struct unit *unit)
{
	pthread_mutex_lock(&unit->lock);
	unit->stopped = true;
	pthread_cond_signal(&unit->news);
	pthread_mutex_unlock(&unit->lock);
}

size_t unit_copy(struct unit *unit, uint64_t offset, size_t size, char *to)
{
	size_t done = 0;
	pthread_mutex_lock(&unit->lock);
	while (done < size) {
		unsigned n = block_of(unit, offset + done);
		const struct block *block = n < unit->count ? unit->places[n].block : NULL;
		if (!block)
			break;
		size_t skip = (size_t)(offset + done - start_of(unit, n));
		size_t here = size_of(unit, n) - skip;
		if (here > size - done)
			here = size - done;
		memcpy(to + done, block->data + skip, here);
		done += here;
	}
	pthread_mutex_unlock(&unit->lock);
	return done;
}

enum unit_state unit_state(struct unit *unit, uint64_t offset)
{
	unsigned n = block_of(unit, offset);
	if (n == unit->count)
		return UNIT_NOT_THERE;
	pthread_mutex_lock(&unit->lock);
	enum unit_state state = unit->places[n].state;
	pthread_mutex_unlock(&unit->lock);
	return state;
}

const unsigned char *unit_digests(struct unit *unit, size_t *size)
{
	*size = (size_t)((unit->plan.size - 1) / UNIT_CHECKED_BYTES + 1) * UNIT_DIGEST_BYTES;
	return unit->digests;
}
