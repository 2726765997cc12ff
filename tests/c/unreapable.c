/* The journal, and threads of workers that were killed and live on: nobody acts on half of a request, and
 * each is taken up once. */
#include "../../monarchfs/core/_journal.h"

#include "check.h"

#define ENTRIES 1024
#define HANGING 100
#define SIZE (4096 + 64 * JOURNAL_BUFFER_BYTES + ENTRIES * 512)
#define OLD_OFFSET 111
#define OFFSET 222

static int journal;
static unsigned taken;
static struct request last;

static void take(const void *request, size_t length)
{
	CHECK(length == sizeof(last));
	memcpy(&last, request, length);
	taken++;
}

static void write_head(struct request *to, uint64_t unique)
{
	to->in = (struct fuse_in_header){
		.len = sizeof(*to), .opcode = FUSE_READ, .unique = unique, .nodeid = 5};
}

/* A worker whose thread is in the middle of read(2) (`half`), or has a request in hand. */
struct worker {
	pid_t pid;
	int go, went; /* pipes */
};

static void *serve(void *given)
{
	int *ends = given, half = ends[2];
	char byte = 0;
	struct request *request = (void *)journal_buffer(take);
	CHECK(request);
	write_head(request, 10);
	request->read.offset = OLD_OFFSET;
	journal_taken((void *)request);
	journal_clear((void *)request);
	write_head(request, half ? 12 : 30);
	if (!half) {
		request->read.offset = OFFSET;
		journal_taken((void *)request);
	}
	CHECK(write(ends[1], &byte, 1) == 1 && read(ends[0], &byte, 1) == 1);
	request->read.offset = OFFSET; /* as the kernel does, whatever signal waits */
	CHECK(write(ends[1], &byte, 1) == 1);
	pause();
	return NULL;
}

static struct worker begin(bool half)
{
	int go[2], went[2];
	char byte;
	CHECK(pipe(go) == 0 && pipe(went) == 0);
	pid_t pid = fork();
	CHECK(pid >= 0);
	if (pid == 0) {
		int ends[] = {go[0], went[1], half};
		pthread_t thread;
		CHECK(journal_start(journal) == 0);
		CHECK(pthread_create(&thread, NULL, serve, ends) == 0);
		pthread_join(thread, NULL);
		_exit(1);
	}
	CHECK(read(went[0], &byte, 1) == 1);
	return (struct worker){pid, go[1], went[0]};
}

static void go_on(const struct worker *worker)
{
	char byte = 0;
	CHECK(write(worker->go, &byte, 1) == 1 && read(worker->went, &byte, 1) == 1);
}

static void end(const struct worker *worker)
{
	CHECK(kill(worker->pid, SIGKILL) == 0 && waitpid(worker->pid, NULL, 0) == worker->pid);
}

static unsigned look(bool all)
{
	taken = 0;
	journal_left(all, take);
	return taken;
}

static void *take_request(void *unused)
{
	struct request *request = (void *)journal_buffer(take);
	CHECK(request);
	write_head(request, 40);
	journal_taken((void *)request);
	(void)unused;
	return request;
}

int main(void)
{
	pthread_t thread;
	journal = make_memory(SIZE, JOURNAL_MAGIC, 64, ENTRIES);
	struct worker reading = begin(true), waiting = begin(false);
	CHECK(journal_start(journal) == 0);

	CHECK(look(true) == 1 && last.in.unique == 30 && last.read.offset == OFFSET);
	journal_done(30);
	go_on(&reading); /* it has all of it now, and nobody can tell */
	CHECK(look(false) == 0);
	end(&reading);
	CHECK(look(false) == 1 && last.in.unique == 12 && last.read.offset == OFFSET);
	end(&waiting);
	CHECK(look(false) == 0);

	/* A thread of this worker: it is at its request itself. */
	taken = 0;
	CHECK(pthread_create(&thread, NULL, take_request, NULL) == 0);
	void *request = NULL;
	CHECK(pthread_join(thread, &request) == 0);
	CHECK(request && look(false) == 0);

	/* Many hang, and others come and go until their numbers have had every place. */
	for (unsigned n = 0; n < ENTRIES + HANGING; n++) {
		write_head(&last, 100 + 2 * n);
		CHECK(journal_keep(&last, sizeof(last)));
		if (n >= HANGING)
			journal_done(last.in.unique);
	}
	puts("done");
	return 0;
}
