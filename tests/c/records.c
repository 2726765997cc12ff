/* Records of segments, read by threads as the relay does it while others take them away and write over
 * them: no answer has a byte of that. A socket is the kernel; splice(2), by the linker's --wrap, has it take
 * what is in a pipe at once, as the kernel does. Arguments: a directory for a tier, and how many answers each
 * thread gives. */
#include "../../monarchfs/core/_reply.h"
#include "../../monarchfs/core/_resident.h"

#include "check.h"

#define RECORDS 6
#define SIZE 110000
#define ROOM 114688
#define PLACES 3 /* of a record: in use by turns */
#define READERS 3
#define REWRITERS 2
#define WRONG 0xee

static pthread_mutex_t locks[RECORDS + 1];
static unsigned places[RECORDS + 1];
static unsigned answers, reading = READERS;
static int segment_fd, kernel;

ssize_t __real_splice(int in, off_t *in_offset, int out, off_t *out_offset, size_t size, unsigned flags);
ssize_t __wrap_splice(int in, off_t *in_offset, int out, off_t *out_offset, size_t size, unsigned flags)
{
	static __thread char message[ROOM];
	if (in_offset) /* from a file */
		return __real_splice(in, in_offset, out, out_offset, size, flags);
	CHECK(size <= sizeof(message));
	for (size_t have = 0; have < size;) {
		ssize_t got = read(in, message + have, size - have);
		CHECK(got > 0);
		have += (size_t)got;
	}
	return send(out, message, size, 0);
}

static uint64_t offset_of(unsigned record)
{
	return (uint64_t)(record * PLACES + places[record]) * ROOM;
}

static void write_over(unsigned record, int with)
{
	static __thread char data[ROOM];
	memset(data, WRONG, sizeof(data));
	memset(data, with, SIZE);
	CHECK(pwrite(segment_fd, data, ROOM, (off_t)offset_of(record)) == ROOM);
}

static void put(unsigned record)
{
	struct replica replica = {.checksum = record, .size = SIZE, .opens_until_ns = ALWAYS,
				  .segment = 7, .offset = offset_of(record)};
	CHECK(resident_put(record, &replica, true));
}

/* Take a record away, by one of three ways, write over it, and have it at another place. */
static void rewrite(unsigned record, unsigned way)
{
	unsigned before = places[record], next = (before + 1) % PLACES;
	if (way == 0 && !resident_retire(record))
		return;
	if (way == 1)
		resident_stop(record);
	places[record] = next;
	write_over(record, (int)record);
	put(record);
	while (resident_reading(record))
		sched_yield();
	places[record] = before;
	write_over(record, WRONG);
	places[record] = next;
}

static void *be_cache(void *number)
{
	unsigned seed = (unsigned)(uintptr_t)number;
	while (__atomic_load_n(&reading, __ATOMIC_RELAXED)) {
		unsigned record = 1 + (unsigned)rand_r(&seed) % RECORDS;
		pthread_mutex_lock(&locks[record]);
		rewrite(record, (unsigned)rand_r(&seed) % 3);
		pthread_mutex_unlock(&locks[record]);
	}
	return NULL;
}

/* One of somebody's. */
static void check_answer(void)
{
	static __thread char message[ROOM];
	struct fuse_out_header out;
	ssize_t got = recv(kernel, message, sizeof(message), 0);
	CHECK(got > (ssize_t)sizeof(out));
	memcpy(&out, message, sizeof(out));
	CHECK(out.len == got && !out.error);
	for (ssize_t i = sizeof(out); i < got; i++)
		CHECK(message[i] == (char)out.unique);
}

/* Half of them through a pipe. */
static void *be_reader(void *number)
{
	unsigned seed = 100 + (unsigned)(uintptr_t)number, given = 0;
	struct scratch scratch = {.buffer = malloc(MOST_READ_BYTES), .pipe = {-1, -1}};
	while (given < answers) {
		unsigned record = 1 + (unsigned)rand_r(&seed) % RECORDS;
		struct reading read;
		if (!resident_enter(record, 0, &read))
			continue;
		uint64_t offset = (uint64_t)rand_r(&seed) % (SIZE / 2);
		size_t size = rand_r(&seed) % 2 ? SIZE - offset : 20000;
		CHECK(read.size == SIZE);
		const struct read_reply reply = {.unique = record, .fd = read.fd,
						 .offset = read.start + offset, .size = size};
		CHECK(reply_from(&scratch, &reply));
		resident_leave(&read);
		check_answer();
		given++;
	}
	reply_end(&scratch);
	free(scratch.buffer);
	__atomic_sub_fetch(&reading, 1, __ATOMIC_RELAXED);
	return NULL;
}

int main(int count, char **arguments)
{
	CHECK(count == 3);
	int tier_fd = open(arguments[1], O_RDONLY | O_DIRECTORY);
	answers = (unsigned)atoi(arguments[2]);
	CHECK(tier_fd >= 0 && mkdirat(tier_fd, "segments", 0700) == 0);
	segment_fd = openat(tier_fd, "segments/0000000000000007", O_WRONLY | O_CREAT, 0600);
	CHECK(segment_fd >= 0);
	CHECK(ftruncate(segment_fd, (off_t)(RECORDS + 1) * PLACES * ROOM) == 0);
	int ends[2], room = 1 << 20;
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
	CHECK(setsockopt(ends[1], SOL_SOCKET, SO_SNDBUF, &room, sizeof(room)) == 0);
	kernel = ends[0];
	reply_start(ends[1]);
	CHECK(resident_start(2, geteuid(), 1, false, false) == 0);
	CHECK(resident_tier(0, tier_fd) == 0);
	for (unsigned record = 1; record <= RECORDS; record++) {
		CHECK(pthread_mutex_init(&locks[record], NULL) == 0);
		write_over(record, (int)record);
		put(record);
	}
	pthread_t readers[READERS], rewriters[REWRITERS];
	start_threads(readers, READERS, be_reader);
	start_threads(rewriters, REWRITERS, be_cache);
	join_threads(readers, READERS);
	join_threads(rewriters, REWRITERS);
	for (unsigned record = 1; record <= RECORDS; record++)
		CHECK(!resident_reading(record) && resident_retire(record));
	puts("done");
	return 0;
}
