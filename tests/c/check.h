/* What the programs of this directory share. */
#ifndef MONARCHFS_TESTS_CHECK_H
#define MONARCHFS_TESTS_CHECK_H

#include <errno.h>
#include <fcntl.h>
#include <linux/fuse.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(condition)                                                                  \
	do {                                                                              \
		if (!(condition)) {                                                       \
			fprintf(stderr, "%s:%d: %s (%d)\n", __FILE__, __LINE__, #condition, errno); \
			abort();                                                          \
		}                                                                         \
	} while (0)

static inline void wait_a_moment(unsigned *tries, int line)
{
	if (++*tries == 30000)
		fprintf(stderr, "line %d: ", line);
	CHECK(*tries < 30000);
	usleep(1000);
}

/* Half a minute at most. A statement that follows is run again and again meanwhile. */
#define WAIT_UNTIL(condition) for (unsigned tries = 0; !(condition); wait_a_moment(&tries, __LINE__))

#define TABLE_MAGIC 0x3173666863726e6dULL
#define JOURNAL_MAGIC 0x3271726863726e6dULL

struct request {
	struct fuse_in_header in;
	struct fuse_read_in read;
};

static inline int64_t ns_of(struct timespec time)
{
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

/* Threads that are given the numbers from 1 on. */
static inline void start_threads(pthread_t *threads, unsigned count, void *(*function)(void *))
{
	for (uintptr_t n = 0; n < count; n++)
		CHECK(pthread_create(&threads[n], NULL, function, (void *)(n + 1)) == 0);
}

static inline void join_threads(pthread_t *threads, unsigned count)
{
	for (unsigned n = 0; n < count; n++)
		CHECK(pthread_join(threads[n], NULL) == 0);
}

/* Memory that outlives a worker, as the supervisor makes it. */
static inline int make_memory(size_t size, uint64_t magic, uint32_t first, uint32_t second)
{
	uint32_t counts[2] = {first, second};
	int memory = memfd_create("memory", 0);
	CHECK(ftruncate(memory, (off_t)size) == 0);
	CHECK(pwrite(memory, &magic, 8, 0) == 8 && pwrite(memory, counts, 8, 8) == 8);
	return memory;
}

static inline int make_table(unsigned slots)
{
	return make_memory(4096 + slots * 32, TABLE_MAGIC, slots, 0);
}

#endif
