/* All threads of the C part at once, for a sanitizer: a socket is the kernel, and replicas come and go
 * while they are opened and read. Every other one lies in a segment, and when it was taken away, other
 * bytes are written over it: nobody may see those. Arguments: a directory for a tier, and how many requests. */
#include "../../monarchfs/core/_resident.h"
#include "../../monarchfs/core/_nonresident.h"
#include "../../monarchfs/core/_opens.h"
#include "../../monarchfs/core/_waiting.h"

#include "kernel.h"

#define SIZE 5000
#define SEGMENTS 3
#define ROOM 8192 /* of a record */
#define WRONG 0xee
#define MOST_DESCRIPTORS 4096

/* Where the record of an inode lies, under its lock. */
static struct {
	pthread_mutex_t lock;
	uint64_t offset;
} records[FILES + 1];
static pthread_mutex_t segments_lock = PTHREAD_MUTEX_INITIALIZER;
static uint64_t segment_bytes[SEGMENTS + 1];
static int segment_fds[SEGMENTS + 1];

static int tier_fd, source_fds[FILES + 1];
static struct stat source_stats[FILES + 1];
static char arrived[FILES + 1][SIZE];
static int in_use; /* pieces of those */

static void describe(uint64_t ino, struct replica *replica)
{
	*replica = (struct replica){.size = SIZE, .checksum = ino, .opens_until_ns = ALWAYS};
	memset(replica->name, (int)ino, NAME_BYTES);
}

static bool in_segment(uint64_t ino)
{
	return ino % 2;
}

static unsigned segment_of(uint64_t ino)
{
	return 1 + ino % SEGMENTS;
}

static void make_segments(void)
{
	CHECK(mkdirat(tier_fd, "segments", 0700) == 0);
	for (unsigned segment = 1; segment <= SEGMENTS; segment++) {
		char path[64];
		snprintf(path, sizeof(path), "segments/%016x", segment);
		segment_fds[segment] = openat(tier_fd, path, O_WRONLY | O_CREAT, 0600);
		CHECK(segment_fds[segment] >= 0);
	}
}

/* Under its lock: a new one, behind all others. */
static void append_record(uint64_t ino)
{
	unsigned segment = segment_of(ino);
	char data[ROOM];
	memset(data, WRONG, sizeof(data));
	memset(data, (int)ino, SIZE);
	pthread_mutex_lock(&segments_lock);
	uint64_t offset = segment_bytes[segment];
	segment_bytes[segment] += ROOM;
	pthread_mutex_unlock(&segments_lock);
	CHECK(pwrite(segment_fds[segment], data, ROOM, (off_t)offset) == ROOM);
	records[ino].offset = offset;
}

/* Under its lock: take it away from under its readers, and append it again. */
static void rewrite_record(uint64_t ino, bool ask_first)
{
	char wrong[ROOM];
	if (ask_first) {
		if (!resident_retire(ino))
			return;
		CHECK(!resident_reading(ino));
	}
	resident_stop(ino);
	while (resident_reading(ino))
		sched_yield();
	memset(wrong, WRONG, sizeof(wrong));
	CHECK(pwrite(segment_fds[segment_of(ino)], wrong, ROOM, (off_t)records[ino].offset) ==
	      ROOM);
	append_record(ino);
}

static void put(uint64_t ino)
{
	struct replica replica;
	describe(ino, &replica);
	pthread_mutex_lock(&records[ino].lock);
	if (in_segment(ino)) {
		replica.segment = segment_of(ino);
		replica.offset = records[ino].offset;
	}
	CHECK(resident_put(ino, &replica, true));
	pthread_mutex_unlock(&records[ino].lock);
}

static void make_file(uint64_t ino)
{
	char path[64], data[SIZE];
	snprintf(path, sizeof(path), "%02x", (unsigned)ino);
	CHECK(mkdirat(tier_fd, path, 0700) == 0);
	size_t at = (size_t)snprintf(path, sizeof(path), "%02x/", (unsigned)ino);
	for (unsigned i = 0; i < NAME_BYTES; i++)
		at += (size_t)snprintf(path + at, sizeof(path) - at, "%02x", (unsigned)ino);
	snprintf(path + at, sizeof(path) - at, ".%016llx", (unsigned long long)ino);
	int fd = openat(tier_fd, path, O_WRONLY | O_CREAT, 0600);
	memset(data, (int)ino, sizeof(data));
	CHECK(fd >= 0 && write(fd, data, sizeof(data)) == SIZE);
	close(fd);
	memset(arrived[ino], (int)ino, SIZE);
	snprintf(path, sizeof(path), "source %u", (unsigned)ino);
	source_fds[ino] = openat(tier_fd, path, O_RDWR | O_CREAT, 0600);
	CHECK(source_fds[ino] >= 0 && write(source_fds[ino], data, sizeof(data)) == SIZE);
	CHECK(fstat(source_fds[ino], &source_stats[ino]) == 0);
}

/* Of sources and parts, in this process. */
static unsigned open_sources(void)
{
	char path[64];
	unsigned count = 0;
	struct stat st;
	for (int fd = 0; fd < MOST_DESCRIPTORS; fd++) {
		/* fstat(2) of one that another thread closes is a race to ThreadSanitizer. */
		snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
		for (uint64_t ino = 1; ino <= FILES && stat(path, &st) == 0; ino++)
			count += st.st_ino == source_stats[ino].st_ino && st.st_dev == source_stats[ino].st_dev;
	}
	return count;
}

static void release(void *bytes)
{
	__atomic_fetch_sub((int *)bytes, 1, __ATOMIC_RELAXED);
}

/* A read may need several of these. */
static void arrive(uint64_t ino, uint64_t start, size_t size)
{
	size = size < SIZE - start ? size : SIZE - start;
	__atomic_fetch_add(&in_use, 1, __ATOMIC_RELAXED);
	if (!nonresident_arrived(ino, start, arrived[ino] + start, size, release, &in_use))
		release(&in_use);
}

static void *be_cache(void *unused)
{
	unsigned seed = 2;
	while (!is_over()) {
		uint64_t ino = 1 + (uint64_t)rand_r(&seed) % FILES, told[64];
		const struct stat *source = &source_stats[ino];
		uint64_t first = (uint64_t)rand_r(&seed) % 5;
		char states[5];
		switch (rand_r(&seed) % 32) {
		case 0:
			resident_stop(ino);
			break;
		case 1:
			resident_retire(ino);
			break;
		case 2:
			resident_expire(ino);
			break;
		case 3:
			CHECK(resident_tier(0, -1) == 0);
			CHECK(resident_tier(0, tier_fd) == 0);
			break;
		case 4:
			resident_opened(told, 64);
			break;
		case 5: {
			struct counts counts;
			counts_so_far(&counts);
			break;
		}
		case 6: {
			struct slot slot;
			size_t index = 0;
			while (table_next(&index, &slot))
				CHECK(slot.ino);
			break;
		}
		case 7:
			nonresident_stop(ino);
			break;
		case 8:
			waiting_leave_older(rand_r(&seed) % 4 ? 0 : UINT64_MAX, 0);
			break;
		case 9:
			waiting_leave(rand_r(&seed) % requests << 8 | ino);
			nonresident_used(ino);
			break;
		case 10 ... 11:
			/* Sometimes of a version that it does not have. */
			nonresident_source(ino, source_fds[ino],
					  SIZE - (uint64_t)(rand_r(&seed) % 4 == 0),
					  ns_of(source->st_mtim), ns_of(source->st_ctim));
			break;
		case 21:
			opens_answer_here(rand_r(&seed) % 2, rand_r(&seed) % 2);
			break;
		case 22:
			inode_back(ino, (uint32_t)ino);
			break;
		case 23:
			inode_unback(ino, rand_r(&seed) % 2);
			inode_decided(ino);
			break;
		case 12:
			nonresident_no_source(ino);
			break;
		case 13 ... 14:
			for (int i = 0; i < 5; i++)
				states[i] = (char)(rand_r(&seed) % 3);
			nonresident_fill(ino, SIZE, 1000, states, 5);
			break;
		case 15:
			nonresident_part(ino, source_fds[ino]);
			break;
		case 16 ... 17:
			nonresident_chunks(ino, first, 5, rand_r(&seed) % 3);
			break;
		case 18:
			nonresident_ahead(ino, first);
			break;
		case 19 ... 20:
			arrive(ino, first * 1000, rand_r(&seed) % 2 ? SIZE - first * 1000 : 1000);
			break;
		case 24 ... 25:
			pthread_mutex_lock(&records[ino].lock);
			if (in_segment(ino))
				rewrite_record(ino, rand_r(&seed) % 2);
			pthread_mutex_unlock(&records[ino].lock);
			break;
		default:
			put(ino);
		}
	}
	return unused;
}

int main(int count, char **arguments)
{
	CHECK(count == 3);
	requests = (unsigned)atoi(arguments[2]);
	tier_fd = open(arguments[1], O_RDONLY | O_DIRECTORY);
	CHECK(tier_fd >= 0);
	make_segments();
	for (uint64_t ino = 1; ino <= FILES; ino++) {
		make_file(ino);
		CHECK(pthread_mutex_init(&records[ino].lock, NULL) == 0);
		append_record(ino);
	}
	first_place = 100; /* a read needs two pieces */
	CHECK(table_attach(make_table(1000)) == 0);
	CHECK(resident_start(8, geteuid(), 1, false, true) == 0);
	CHECK(resident_tier(0, tier_fd) == 0);
	struct counts counts;
	run_threads(be_cache, &counts);
	CHECK(counts.numbers[COUNT_BYTES] && counts.numbers[COUNT_QUEUED] &&
	      counts.numbers[COUNT_RESIDENT_OPENS]);
	for (enum duration of = TIME_OPEN_LOCAL; of <= TIME_READ_SOURCE; of++)
		CHECK(of == TIME_OPEN_SOURCE || counts.durations[of].total_ns);
	for (uint64_t ino = 1; ino <= FILES; ino++)
		nonresident_stop(ino);
	WAIT_UNTIL(open_sources() == FILES); /* the C part has closed its own */
	puts("done");
	fflush(stdout);
	_exit(0); /* the threads wait for the kernel */
}
