/* A kernel that asks for files at random, and looks at every byte of the answers: a file is full of its
 * number. The program says how many requests there are, and where reads begin. */
#ifndef MONARCHFS_TESTS_KERNEL_H
#define MONARCHFS_TESTS_KERNEL_H

#include "../../monarchfs/core/_counts.h"
#include "../../monarchfs/core/_handoff.h"
#include "../../monarchfs/core/_relay.h"
#include "../../monarchfs/core/_table.h"
#include "check.h"

#define FILES 40
#define READ_BYTES 1000
#define MOST_ASKED 8 /* at once */

static int kernel, device; /* the ends of a socket */
static unsigned requests;
static bool no_opens, over;
static uint64_t first_place; /* where a read begins, or a multiple of READ_BYTES behind it */
static unsigned places = 1;
static pthread_mutex_t queue = PTHREAD_MUTEX_INITIALIZER;

/* What the program does with what comes to Python, and when nothing comes; may be NULL. */
static void (*look_at_request)(const struct fuse_in_header *in);
static void (*when_idle)(void);

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
static void ask(unsigned *seed, uint64_t unique, uint64_t *handles)
{
	uint64_t ino = 1 + (uint64_t)rand_r(seed) % FILES;
	struct fuse_read_in read_in = {.fh = handles[ino],
				       .offset = first_place + (uint64_t)rand_r(seed) % places * READ_BYTES,
				       .size = READ_BYTES};
	struct fuse_open_in open_in = {.flags = O_RDONLY};
	struct fuse_release_in release_in = {.fh = handles[ino]};
	switch (no_opens ? 3 : rand_r(seed) % 4) {
	case 0:
		send_request(FUSE_OPEN, unique << 8 | ino, ino, &open_in, sizeof(open_in));
		break;
	case 1:
		send_request(FUSE_RELEASE, unique << 8, ino, &release_in, sizeof(release_in));
		handles[ino] = 0;
		break;
	default:
		send_request(FUSE_READ, unique << 8 | ino, ino, &read_in, sizeof(read_in));
	}
}

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
	pthread_mutex_lock(&queue);
	over = true;
	pthread_mutex_unlock(&queue);
	return unused;
}

/* What comes to Python is answered with nothing. */
static void *be_python(void *unused)
{
	char *buffer = malloc(REQUEST_BYTES);
	while (!is_over()) {
		int ended_by;
		enum queued_after past;
		long got = queue_next(buffer, &ended_by, &past);
		const struct fuse_in_header *in = (const void *)buffer;
		if (got > 0 && in->opcode == QUEUE_AHEAD)
			continue; /* a note, which gets no answer */
		if (got > 0 && !relay_answered(buffer, (size_t)got, past)) {
			struct fuse_out_header out = {.len = sizeof(out), .unique = in->unique};
			if (look_at_request)
				look_at_request(in);
			CHECK(send(device, &out, sizeof(out), 0) == sizeof(out));
		} else if (got <= 0) {
			if (when_idle)
				when_idle();
			usleep(200);
		}
	}
	free(buffer);
	return unused;
}

static void connect_kernel(void)
{
	int ends[2];
	CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
	kernel = ends[0];
	device = ends[1];
}

/* The counts since the program began: what was taken is added up. */
static void counts_so_far(struct counts *to)
{
	static struct counts sums;
	struct counts more;
	counts_take(&more);
	for (size_t i = 0; i < sizeof(more) / sizeof(uint64_t); i++)
		((uint64_t *)to)[i] = __atomic_add_fetch((uint64_t *)&sums + i, ((uint64_t *)&more)[i], __ATOMIC_RELAXED);
}

/* A program may have one of its own. */
static void *(*kernel_thread)(void *) = be_kernel;

/* The threads that answer, beside the kernel, Python and twice `others`, until all of these have ended. */
static void run_threads(void *(*others)(void *), struct counts *counts)
{
	uint64_t bounds[] = {1000, 1000000};
	void *(*const parts[])(void *) = {kernel_thread, be_python, others, others};
	pthread_t threads[4];
	connect_kernel();
	counts_start(bounds, 2);
	CHECK(relay_start(device, 4, 6, no_opens) >= 0);
	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&threads[i], NULL, parts[i], NULL) == 0);
	join_threads(threads, 4);
	counts_so_far(counts);
}

#endif
