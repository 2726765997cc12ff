/* All threads of the C part at once, for a sanitizer: a socket is the kernel, and replicas come and go
 * while they are opened and read. Every other one lies in a segment (records.c has those written over).
 * Arguments: a directory for a tier, and how many requests. */
#include "../../monarchfs/core/_resident.h"
#include "../../monarchfs/core/_nonresident.h"
#include "../../monarchfs/core/_opens.h"
#include "../../monarchfs/core/_waiting.h"

#include "kernel.h"

#define SIZE 5000
#define SEGMENT 7
#define ROOM 8192 /* of a record */
#define MOST_DESCRIPTORS 4096

static int tier_fd, source_fds[FILES + 1];
static struct stat source_stats[FILES + 1];
static char arrived[FILES + 1][SIZE];
static int in_use; /* pieces of those */

static void put(uint64_t ino)
{
	struct replica replica = {.size = SIZE, .checksum = ino, .opens_until_ns = ALWAYS};
	memset(replica.name, (int)ino, NAME_BYTES);
	if (ino % 2) {
		replica.segment = SEGMENT;
		replica.offset = ino * ROOM;
	}
	CHECK(resident_put(ino, &replica, true));
}

static int make(const char *path, uint64_t offset, const char *data)
{
	int fd = openat(tier_fd, path, O_RDWR | O_CREAT, 0600);
	CHECK(fd >= 0 && pwrite(fd, data, SIZE, (off_t)offset) == SIZE);
	return fd;
}

static void make_file(uint64_t ino)
{
	char path[64], *data = arrived[ino];
	memset(data, (int)ino, SIZE);
	snprintf(path, sizeof(path), "segments/%016x", SEGMENT);
	close(make(path, ino * ROOM, data));
	snprintf(path, sizeof(path), "%02x", (unsigned)ino);
	CHECK(mkdirat(tier_fd, path, 0700) == 0);
	size_t at = (size_t)snprintf(path, sizeof(path), "%02x/", (unsigned)ino);
	for (unsigned i = 0; i < NAME_BYTES; i++)
		at += (size_t)snprintf(path + at, sizeof(path) - at, "%02x", (unsigned)ino);
	snprintf(path + at, sizeof(path) - at, ".%016llx", (unsigned long long)ino);
	close(make(path, 0, data));
	snprintf(path, sizeof(path), "source %u", (unsigned)ino);
	source_fds[ino] = make(path, 0, data);
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
		switch (rand_r(&seed) % 30) {
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
	CHECK(mkdirat(tier_fd, "segments", 0700) == 0);
	for (uint64_t ino = 1; ino <= FILES; ino++)
		make_file(ino);
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
