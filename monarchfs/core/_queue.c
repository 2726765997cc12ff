/* Requests that are left to Python. See _queue.h. */
#define _GNU_SOURCE
#include "_queue.h"

#include "_counts.h"

#include <linux/fuse.h>

#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <unistd.h>

struct request {
	struct request *next;
	enum queued_after past;
	size_t length;
	char bytes[];
};

static pthread_mutex_t queue_lock = PTHREAD_MUTEX_INITIALIZER;
static struct request *first, **last = &first;
static bool ended;
static int end_errno;
static int news_fd = -1;

int queue_start(void)
{
	if (news_fd >= 0)
		return -EALREADY;
	int news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	if (news < 0)
		return -errno;
	return news_fd = news;
}

static void wake_reader(void)
{
	uint64_t one = 1;
	/* It cannot be full: it is only written to when it was empty. */
	while (write(news_fd, &one, sizeof(one)) < 0 && errno == EINTR)
		;
}

void *queue_new(size_t size, size_t length)
{
	void *made;
	while (!(made = malloc(size + length)))
		poll(NULL, 0, 10);
	return made;
}

void queue_put(const void *bytes, size_t length, enum queued_after past)
{
	struct request *request = queue_new(sizeof(*request), length);
	*request = (struct request){.past = past, .length = length};
	memcpy(request->bytes, bytes, length);
	counts_add(COUNT_QUEUED, 1);
	pthread_mutex_lock(&queue_lock);
	bool news = !first;
	*last = request;
	last = &request->next;
	if (news)
		wake_reader();
	pthread_mutex_unlock(&queue_lock);
}

void queue_leave(const void *request, size_t length)
{
	queue_put(request, length, WAITED);
}

void queue_note_ahead(uint64_t ino, uint64_t first_chunk, uint64_t last)
{
	struct {
		struct fuse_in_header in;
		uint64_t chunks[2];
	} note = {
		.in = {.len = sizeof(note), .opcode = QUEUE_AHEAD, .nodeid = ino},
		.chunks = {first_chunk, last},
	};
	queue_put(&note, sizeof(note), NEW);
}

void queue_end(int error)
{
	pthread_mutex_lock(&queue_lock);
	if (!ended) {
		ended = true;
		end_errno = error;
		if (!first)
			wake_reader();
	}
	pthread_mutex_unlock(&queue_lock);
}

long queue_next(void *buffer, int *ended_by, enum queued_after *past)
{
	pthread_mutex_lock(&queue_lock);
	struct request *request = first;
	long length = request ? (long)request->length : ended ? 0 : -EAGAIN;
	*ended_by = end_errno;
	*past = request ? request->past : NEW;
	if (request) {
		first = request->next;
		if (!first)
			last = &first;
	}
	if (!first && !ended) {
		/* Nothing left: not readable until the next one. The end stays readable. */
		uint64_t count;
		if (read(news_fd, &count, sizeof(count)) < 0 && errno != EAGAIN)
			length = length > 0 ? length : -errno;
	}
	pthread_mutex_unlock(&queue_lock);
	if (request) {
		memcpy(buffer, request->bytes, request->length);
		free(request);
	}
	return length;
}
