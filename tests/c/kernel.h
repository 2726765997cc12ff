/* A kernel that asks for files at random, and looks at every byte of the answers: a file is full of its
 * number. The program says how many requests there are, and what is asked (`ask`). */
#ifndef MONARCHFS_TESTS_KERNEL_H
#define MONARCHFS_TESTS_KERNEL_H

#include "../../monarchfs/fuse/_counts.h"
#include "../../monarchfs/fuse/_handoff.h"
#include "../../monarchfs/fuse/_relay.h"
#include "../../monarchfs/fuse/_table.h"
#include "check.h"

#include <linux/fuse.h>

#include <pthread.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FILES 40
#define READ_BYTES 1000
#define MOST_ASKED 8 /* at once */

static int kernel, device; /* the ends of a socket */
static unsigned requests;
static bool over;
static pthread_mutex_t queue = PTHREAD_MUTEX_INITIALIZER;

/* There is no Python. */
bool handoff_answered(const void *request, size_t length)
{
	(void)request;
	(void)length;
	return false;
}

static bool is_over(void)
{
	pthread_mutex_lock(&queue);
	bool done = over;
	pthread_mutex_unlock(&queue);
	return done;
}

static int64_t ns_of(struct timespec time)
{
	return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static void send_request(uint32_t opcode, uint64_t unique, uint64_t ino, const void *body, size_t size)
{
	char message[256];
	struct fuse_in_header in = {.len = (uint32_t)(sizeof(in) + size), .opcode = opcode,
				    .unique = unique, .nodeid = ino};
	memcpy(message, &in, sizeof(in));
	memcpy(message + sizeof(in), body, size);
	CHECK(send(kernel, message, in.len, 0) == (ssize_t)in.len);
}

/* One request: `unique` with the inode number in its lowest byte, 0 there where nothing is read. */
static void ask(unsigned *seed, uint64_t unique, uint64_t *handles);

/* The kernel: `requests` of them, and every byte of the answers. */
static void *be_kernel(void *unused)
{
	unsigned seed = 1, asked = 0, answered = 0;
	uint64_t handles[FILES + 1] = {0};
	while (answered < requests) {
		while (asked < requests && asked - answered < MOST_ASKED)
			ask(&seed, ++asked, handles);
		char message[8192];
		ssize_t got = recv(kernel, message, sizeof(message), 0);
		struct fuse_out_header out;
		CHECK(got >= (ssize_t)sizeof(out));
		memcpy(&out, message, sizeof(out));
		uint64_t ino = out.unique & 255;
		size_t size = (size_t)got - sizeof(out);
		answered++;
		if (size == sizeof(struct fuse_open_out)) {
			struct fuse_open_out opened;
			memcpy(&opened, message + sizeof(out), sizeof(opened));
			struct fuse_release_in release_in = {.fh = handles[ino]};
			if (handles[ino]) {
				send_request(FUSE_RELEASE, 0, ino, &release_in, sizeof(release_in));
				answered--;
			}
			handles[ino] = opened.fh;
		} else if (size) {
			CHECK(size == READ_BYTES);
			for (size_t i = 0; i < size; i++)
				CHECK(message[sizeof(out) + i] == (char)ino);
		}
	}
	(void)unused;
	pthread_mutex_lock(&queue);
	over = true;
	pthread_mutex_unlock(&queue);
	return NULL;
}

/* The table of open files, and the threads that answer, each `parts` in a thread beside them until all
 * have ended. */
static void attach_table(void)
{
	int table = memfd_create("table", 0);
	uint64_t head[2] = {0x3173666863726e6dULL, 1000};
	CHECK(ftruncate(table, 4096 + 1000 * 32) == 0);
	CHECK(pwrite(table, head, sizeof(head), 0) == sizeof(head));
	CHECK(table_attach(table) == 0);
}

static void run_threads(bool no_opens, void *(*parts[4])(void *), struct counts *counts)
{
	uint64_t bounds[] = {1000, 1000000};
	int ends[2];
	pthread_t threads[4];
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
	kernel = ends[0];
	device = ends[1];
	counts_start(bounds, 2);
	CHECK(relay_start(device, 4, 6, no_opens) >= 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&threads[i], NULL, parts[i], NULL) == 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_join(threads[i], NULL) == 0);
	counts_read(counts);
}

#endif
