/* Units: a thread that reads and one that writes for each, while others look at them, show them and stop
 * them, and the source changes now and then. Every byte that is shown, copied or written is of the version
 * that was asked for, and has its digest; all memory is given back. Arguments: a directory, how many units. */
#include "../../monarchfs/core/_unit.h"

#include "check.h"

#define XXH_INLINE_ALL
#include <xxhash.h>

#define PEOPLE 3 /* who go through units at once, each with a file of his own */
#define BLOCKS 5
#define SIZE (BLOCKS * UNIT_BLOCK_BYTES - 1234)
#define CHUNK (128U << 10)
#define WAIT_NS 2000000
#define HELD 4

static const char *directory;
static unsigned units;
static bool over;

/* What the threads that answer readers would keep. */
static struct {
	pthread_mutex_t lock;
	void (*release[HELD])(void *);
	void *token[HELD];
	const char *data[HELD];
	int expected[HELD];
	unsigned next;
} shown = {.lock = PTHREAD_MUTEX_INITIALIZER};
static int fillings[PEOPLE + 1];

/* The block before the last one is a hole. */
static void check_bytes(const char *data, uint64_t start, size_t size, int filling)
{
	for (size_t at = 0; at < size; at += 4099) {
		bool hole = (start + at) / UNIT_BLOCK_BYTES == BLOCKS - 2;
		CHECK(data[at] == (hole ? 0 : filling));
	}
}

/* Under its lock. */
static void let_go(unsigned n)
{
	if (!shown.release[n])
		return;
	CHECK(shown.data[n][0] == shown.expected[n]); /* its memory is nobody else's yet */
	shown.release[n](shown.token[n]);
	shown.release[n] = NULL;
}

static bool arrive(uint64_t ino, uint64_t start, const char *data, size_t size,
		   void (*release)(void *), void *token)
{
	check_bytes(data, start, size, __atomic_load_n(&fillings[ino], __ATOMIC_RELAXED));
	if (start == 0)
		return false;
	pthread_mutex_lock(&shown.lock);
	unsigned n = shown.next++ % HELD;
	let_go(n);
	shown.release[n] = release;
	shown.token[n] = token;
	shown.data[n] = data;
	shown.expected[n] = data[0];
	pthread_mutex_unlock(&shown.lock);
	return true;
}

static void tell(uint64_t ino, uint64_t first, uint64_t last, enum chunk_state state)
{
	CHECK(ino && ino <= PEOPLE && first < last && last <= SIZE / CHUNK + 1);
	CHECK(state == CHUNK_PRESENT || state == CHUNK_MISSING);
}

static const struct nonresident_units readers = {arrive, tell};

/* Somebody empties a unit at the moment when a block of it is shown, of which a reader keeps the first. */
static struct unit *emptied;
static void (*kept_release)(void *);
static void *kept;

static bool arrive_and_empty(uint64_t ino, uint64_t start, const char *data, size_t size, void (*release)(void *), void *token)
{
	(void)ino, (void)data, (void)size;
	unit_empty(emptied);
	kept_release = release;
	kept = start ? kept : token;
	return !start;
}

/* What another node has of each file: the bytes, and how many of them are right. */
static struct {
	char *data;
	size_t right;
} elsewhere[PEOPLE + 1];

static enum elsewhere_result give(unsigned peer, const char *path, uint64_t offset, size_t size, unit_take *take, void *to)
{
	unsigned seed = (unsigned)elsewhere[peer].right;
	CHECK(!strcmp(path, "/path") && offset + size == SIZE);
	for (size_t piece; size; offset += piece, size -= piece) {
		piece = 1 + (size_t)rand_r(&seed) % (300 << 10);
		piece = piece < size ? piece : size;
		char *copy = malloc(piece);
		CHECK(copy);
		memcpy(copy, elsewhere[peer].data + offset, piece);
		if (offset + piece > elsewhere[peer].right)
			copy[offset < elsewhere[peer].right ? elsewhere[peer].right - offset : 0] ^= 1;
		bool taken = take(to, copy, piece);
		free(copy);
		if (!taken)
			return 4;
	}
	return 0;
}

/* A unit of which another node has something. */
static void read_elsewhere(struct unit *unit, unsigned ino, size_t right)
{
	unsigned char digests[(SIZE / UNIT_CHECKED_BYTES + 1) * UNIT_DIGEST_BYTES];
	for (size_t at = 0; at < SIZE; at += UNIT_CHECKED_BYTES) {
		size_t here = SIZE - at < UNIT_CHECKED_BYTES ? SIZE - at : UNIT_CHECKED_BYTES;
		XXH64_canonicalFromHash(
			(XXH64_canonical_t *)(digests + at / UNIT_CHECKED_BYTES * UNIT_DIGEST_BYTES),
			XXH3_64bits(elsewhere[ino].data + at, here));
	}
	uint64_t bytes = 0;
	elsewhere[ino].right = right;
	int result = unit_read_elsewhere(unit, give, ino, "/path", digests, &bytes);
	CHECK(result == (right < SIZE ? 4 : 0));
	CHECK(right < SIZE ? bytes <= right && bytes % UNIT_BLOCK_BYTES == 0 : bytes == SIZE);
}

struct work {
	struct unit *unit;
	struct unit_source source;
	int part;
	enum unit_end end;
	uint64_t bytes;
	int written;
	unsigned ino;
	size_t right; /* so many bytes another node has, 0: it has none */
};

/* A direct read may need another alignment, and any read may give less than was asked for. */
ssize_t read_badly(int fd, const struct iovec *parts, int count, off_t offset)
{
	static unsigned calls;
	unsigned call = __atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED);
	if (call % 7 == 0 && fcntl(fd, F_GETFL) & O_DIRECT) {
		errno = EINVAL;
		return -1;
	}
	return preadv64(fd, parts, call % 5 ? count : 1, offset);
}

/* A source may not know of holes, or tell nonsense. */
off_t seek_badly(int fd, off_t offset, int whence)
{
	static unsigned calls;
	switch (__atomic_add_fetch(&calls, 1, __ATOMIC_RELAXED) % 11) {
	case 0:
		errno = EINVAL;
		return -1;
	case 1:
		return SIZE + 1;
	case 2:
		return offset ? offset - 1 : 0;
	default:
		return lseek64(fd, offset, whence);
	}
}

static void *read_it(void *given)
{
	struct work *work = given;
	if (work->right)
		read_elsewhere(work->unit, work->ino, work->right);
	work->end = unit_read(work->unit, &work->source, &work->bytes);
	unit_finish(work->unit);
	return NULL;
}

static void *write_it(void *given)
{
	struct work *work = given;
	while ((work->written = unit_write(work->unit, work->part, WAIT_NS)) == 0)
		;
	return NULL;
}

static void fill(int fd, int filling, char *data)
{
	memset(data, filling, SIZE);
	memset(data + (BLOCKS - 2) * UNIT_BLOCK_BYTES, 0, UNIT_BLOCK_BYTES);
	CHECK(pwrite(fd, data, SIZE, 0) == SIZE);
	CHECK(fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (BLOCKS - 2) * UNIT_BLOCK_BYTES,
			UNIT_BLOCK_BYTES) == 0);
}

/* Make it another version. Every other time only the time of change says so. */
static void change(int fd, unsigned n)
{
	struct stat before, now;
	CHECK(fstat(fd, &before) == 0);
	const struct timespec mtime = n % 2 ? before.st_mtim : (struct timespec){1, n};
	do
		CHECK(futimens(fd, (struct timespec[]){mtime, mtime}) == 0 && fstat(fd, &now) == 0);
	while (now.st_ctim.tv_sec == before.st_ctim.tv_sec && now.st_ctim.tv_nsec == before.st_ctim.tv_nsec);
}

static struct unit *plan(uint64_t ino, int fd, bool scarce, bool sparse)
{
	struct stat st;
	CHECK(fstat(fd, &st) == 0);
	const struct unit_plan plan = {
		.ino = ino, .size = SIZE, .chunk_bytes = CHUNK, .readers = &readers,
		.most_bytes = scarce ? 2 * UNIT_BLOCK_BYTES : 0, .sparse = sparse,
		.version = {st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim},
	};
	struct unit *unit = unit_new(&plan);
	CHECK(unit);
	return unit;
}

/* What was written is what it should be. */
static void look_at(const struct work *work, int filling, char *data)
{
	size_t size;
	const unsigned char *digests = unit_digests(work->unit, &size);
	CHECK(size == (SIZE / UNIT_CHECKED_BYTES + 1) * UNIT_DIGEST_BYTES);
	for (uint64_t at = 0; at < SIZE; at += UNIT_CHECKED_BYTES) {
		size_t here = SIZE - at < UNIT_CHECKED_BYTES ? SIZE - at : UNIT_CHECKED_BYTES;
		if (unit_state(work->unit, at) != UNIT_STORED)
			continue;
		CHECK(pread(work->part, data, here, (off_t)at) == (ssize_t)here);
		check_bytes(data, at, here, filling);
		XXH64_canonical_t digest;
		XXH64_canonicalFromHash(&digest, XXH3_64bits(data, here));
		CHECK(!memcmp(digests + at / UNIT_CHECKED_BYTES * UNIT_DIGEST_BYTES, &digest,
			      UNIT_DIGEST_BYTES));
	}
}

static void *be_one(void *given)
{
	uint64_t ino = (uintptr_t)given;
	unsigned seed = (unsigned)ino;
	unsigned found_holes = 0;
	char path[256], *data = malloc(SIZE);
	snprintf(path, sizeof(path), "%s/source%u", directory, (unsigned)ino);
	int source = open(path, O_RDWR | O_CREAT, 0600), direct = open(path, O_RDONLY | O_DIRECT);
	snprintf(path, sizeof(path), "%s/part%u", directory, (unsigned)ino);
	int part = open(path, O_RDWR | O_CREAT, 0600);
	elsewhere[ino].data = malloc(SIZE);
	CHECK(data && elsewhere[ino].data && source >= 0 && part >= 0);
	for (unsigned n = 0; n < units; n++) {
		int filling = 1 + rand_r(&seed) % 100, fate = rand_r(&seed) % 10;
		__atomic_store_n(&fillings[ino], filling, __ATOMIC_RELAXED);
		fill(source, filling, data);
		CHECK(ftruncate(part, 0) == 0 && ftruncate(part, SIZE) == 0);
		struct work work = {plan(ino, source, fate == 1, n % 3), {source, n % 2 ? direct : -1}, part, UNIT_READ, 0, 0, (unsigned)ino, 0};
		if (fate >= 8)
			work.right = fate == 8 ? SIZE : 1 + (size_t)rand_r(&seed) % SIZE;
		memcpy(elsewhere[ino].data, data, SIZE);
		if (fate == 2) /* another version: the bytes are the same, so that none may be wrong */
			change(source, n);
		pthread_t reader, writer;
		CHECK(!pthread_create(&writer, NULL, write_it, &work));
		CHECK(!pthread_create(&reader, NULL, read_it, &work));
		if (fate == 3)
			unit_stop(work.unit);
		if (fate == 4)
			unit_show(work.unit);
		size_t got = unit_copy(work.unit, 1000, UNIT_BLOCK_BYTES, data);
		check_bytes(data, 1000, got, filling);
		pthread_join(reader, NULL);
		pthread_join(writer, NULL);
		CHECK(work.end == (fate == 2 ? UNIT_CHANGED : UNIT_READ));
		CHECK(work.written == 1);
		uint64_t holes = unit_holes(work.unit).bytes;
		CHECK(holes == 0 || (n % 3 && holes == UNIT_BLOCK_BYTES));
		found_holes += holes != 0;
		CHECK(fate == 9 ? work.bytes + holes <= SIZE :
		      work.bytes + holes == (fate == 2 || fate == 8 ? 0 : SIZE));
		look_at(&work, filling, data);
		struct stat st;
		CHECK(fstat(part, &st) == 0 && (uint64_t)st.st_blocks * 512 <= SIZE - UNIT_BLOCK_BYTES + 8192);
		for (uint64_t at = 0; fate != 1 && fate != 2 && fate != 3 && at < SIZE; at += CHUNK)
			CHECK(unit_state(work.unit, at) == UNIT_STORED);
		unit_free(work.unit);
	}
	CHECK(found_holes || units < 20);
	close(source);
	if (direct >= 0)
		close(direct);
	close(part);
	free(elsewhere[ino].data);
	free(data);
	return NULL;
}

/* A block is given back once, whoever empties the unit while it arrives; and a unit of which all has arrived takes
 * nothing from elsewhere. `scarce`: more is in memory than may be. */
static void empty_while_blocks_arrive(bool scarce)
{
	static const struct nonresident_units emptying = {arrive_and_empty, tell};
	char path[256], *data = malloc(SIZE);
	unsigned char digests[(SIZE / UNIT_CHECKED_BYTES + 1) * UNIT_DIGEST_BYTES] = {0};
	uint64_t bytes;
	struct stat st;
	snprintf(path, sizeof(path), "%s/emptied", directory);
	struct unit_source source = {open(path, O_RDWR | O_CREAT, 0600), -1};
	CHECK(data && source.fd >= 0);
	fill(source.fd, 1, data);
	CHECK(fstat(source.fd, &st) == 0);
	const struct unit_plan plan = {
		.ino = 1, .size = SIZE, .chunk_bytes = CHUNK, .readers = &emptying, .most_bytes = scarce,
		.version = {st.st_dev, st.st_ino, st.st_size, st.st_mtim, st.st_ctim},
	};
	CHECK((emptied = unit_new(&plan)));
	CHECK(unit_read(emptied, &source, &bytes) == UNIT_READ && bytes == SIZE);
	CHECK(kept && unit_memory() == UNIT_BLOCK_BYTES); /* the reader's */
	kept_release(kept);
	bytes = 0;
	CHECK(unit_read_elsewhere(emptied, give, 1, "/path", digests, &bytes) == ELSEWHERE_READ && !bytes);
	unit_free(emptied);
	CHECK(unit_memory() == 0);
	close(source.fd);
	free(data);
}

static void *let_go_of_some(void *unused)
{
	unsigned n = 0;
	while (!__atomic_load_n(&over, __ATOMIC_RELAXED)) {
		pthread_mutex_lock(&shown.lock);
		let_go(n++ % HELD);
		pthread_mutex_unlock(&shown.lock);
		usleep(100);
	}
	return unused;
}

int main(int count, char **arguments)
{
	CHECK(count == 3);
	directory = arguments[1];
	units = (unsigned)atoi(arguments[2]);
	empty_while_blocks_arrive(false);
	empty_while_blocks_arrive(true);
	pthread_t people[PEOPLE], other;
	CHECK(!pthread_create(&other, NULL, let_go_of_some, NULL));
	start_threads(people, PEOPLE, be_one);
	join_threads(people, PEOPLE);
	__atomic_store_n(&over, true, __ATOMIC_RELAXED);
	pthread_join(other, NULL);
	for (unsigned n = 0; n < HELD; n++)
		let_go(n);
	CHECK(unit_memory() == 0);
	puts("done");
	return 0;
}
