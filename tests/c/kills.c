/* A worker that is killed at any instruction of what it does to memory that outlives it, and what the
 * next one finds. It is stepped through, and after each step its memory is copied and taken over.
 * Arguments: `table` or `journal`. */
#include "../../monarchfs/core/_journal.h"
#include "../../monarchfs/core/_table.h"

#include "check.h"

#include <linux/futex.h>

#include <sys/ptrace.h>

#define MOST_BYTES (32 * 1024)
#define MOST_STEPS 200000

static int original, copy;

static void copy_memory(size_t size)
{
	static char bytes[MOST_BYTES];
	CHECK(size <= sizeof(bytes));
	CHECK(pread(original, bytes, size, 0) == (ssize_t)size);
	CHECK(pwrite(copy, bytes, size, 0) == (ssize_t)size);
}

/* Have `work` stepped through by `look`, which is called after each instruction; how many there are. */
static unsigned step_through(void (*prepare)(void), void (*work)(void), void (*look)(void))
{
	pid_t worker = fork();
	int status;
	CHECK(worker >= 0);
	if (worker == 0) {
		CHECK(ptrace(PTRACE_TRACEME, 0, 0, 0) == 0);
		prepare();
		raise(SIGSTOP);
		work();
		_exit(0);
	}
	CHECK(waitpid(worker, &status, 0) == worker && WIFSTOPPED(status));
	CHECK(ptrace(PTRACE_SETOPTIONS, worker, 0, PTRACE_O_EXITKILL) == 0);
	unsigned steps = 0;
	while (steps < MOST_STEPS) {
		CHECK(ptrace(PTRACE_SINGLESTEP, worker, 0, 0) == 0);
		CHECK(waitpid(worker, &status, 0) == worker);
		if (!WIFSTOPPED(status))
			break;
		CHECK(WSTOPSIG(status) == SIGTRAP);
		steps++;
		look();
	}
	CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
	return steps;
}

/* -- the table of open files */

#define SLOTS 6
#define TABLE_BYTES (4096 + SLOTS * 32)
#define HANDLES 12

/* What became of each handle: in memory of both. */
static struct handle {
	uint64_t number, ino;
	enum { NONE, OPEN, ENDING, ENDED } state;
} *handles;

static void prepare_table(void)
{
	CHECK(table_attach(original) == 0);
}

static void use_table(void)
{
	for (unsigned i = 0; i < HANDLES; i++) {
		struct handle *handle = &handles[i];
		uint64_t number;
		uint32_t backing_id;
		CHECK(table_add(100 + i, 2 * i + 2, OWNED | HELD, &number, &backing_id) == 0);
		handle->number = number;
		handle->ino = 100 + i;
		handle->state = OPEN;
		if (i % 3 == 1)
			continue;
		handle->state = ENDING;
		CHECK(table_end(number, false, NULL) == handle->ino);
		handle->state = ENDED;
	}
}

static void look_at_table(void)
{
	uint64_t number;
	uint32_t backing_id;
	copy_memory(TABLE_BYTES);
	CHECK(table_attach(copy) == 0);
	for (unsigned i = 0; i < HANDLES && handles[i].state; i++) {
		uint64_t ino = table_ino(handles[i].number);
		CHECK(handles[i].state == ENDED || ino == handles[i].ino ||
		      (handles[i].state == ENDING && !ino));
		CHECK(handles[i].state != ENDED || !ino);
	}
	while (table_add(1, 1000, OWNED | HELD, &number, &backing_id) == 0)
		for (unsigned i = 0; i < HANDLES; i++)
			CHECK(!handles[i].state || handles[i].number != number);
}

/* -- the journal of requests */

#define ENTRIES 4
#define REQUESTS 6
#define HEADER_BYTES 4096
#define BUFFERS 64
#define ENTRIES_AT (HEADER_BYTES + BUFFERS * JOURNAL_BUFFER_BYTES)
#define JOURNAL_BYTES (ENTRIES_AT + ENTRIES * 512)
#define LOCKS_AT (HEADER_BYTES - BUFFERS * (8 + sizeof(pthread_mutex_t)))

static struct {
	bool answered[REQUESTS], done[REQUESTS];
	unsigned given[REQUESTS];
} *seen;
static int kernel, device;
static char *buffer;

static struct request request_of(unsigned number)
{
	return (struct request){
		.in = {.len = sizeof(struct request), .opcode = FUSE_READ, .unique = 2 * number + 2},
		.read = {.offset = 1000 + number, .size = 7},
	};
}

static void give(const void *bytes, size_t length)
{
	struct request request;
	CHECK(length == sizeof(request));
	memcpy(&request, bytes, length);
	unsigned number = (unsigned)(request.in.unique / 2 - 1);
	CHECK(number < REQUESTS);
	struct request right = request_of(number);
	CHECK(!memcmp(&request, &right, sizeof(right)));
	seen->given[number]++;
}

static void prepare_journal(void)
{
	CHECK(journal_start(original) == 0);
	buffer = journal_buffer(give);
	CHECK(buffer);
}

static void use_journal(void)
{
	for (unsigned number = 0; number < REQUESTS; number++) {
		CHECK(read(device, buffer, JOURNAL_BUFFER_BYTES) == sizeof(struct request));
		journal_taken(buffer);
		if (number % 2) {
			CHECK(journal_keep(buffer, sizeof(struct request)));
			journal_clear(buffer);
			seen->answered[number] = true;
			journal_done(2 * number + 2);
		} else {
			seen->answered[number] = true;
			journal_clear(buffer);
		}
		seen->done[number] = true;
	}
}

static void take_over_journal(void)
{
	CHECK(journal_start(copy) == 0);
	journal_left(true, give);
	_exit(0);
}

static void look_at_journal(void)
{
	struct request next;
	ssize_t left = recv(device, &next, sizeof(next), MSG_PEEK | MSG_DONTWAIT);
	unsigned taken = left < 0 ? REQUESTS : (unsigned)(next.in.unique / 2 - 1);
	uint32_t lock;
	char entries[ENTRIES * 512];
	copy_memory(HEADER_BYTES + JOURNAL_BUFFER_BYTES);
	CHECK(pread(original, entries, sizeof(entries), ENTRIES_AT) == sizeof(entries));
	CHECK(pwrite(copy, entries, sizeof(entries), ENTRIES_AT) == sizeof(entries));
	/* As the kernel would, of a thread that dies. */
	CHECK(pread(copy, &lock, sizeof(lock), LOCKS_AT) == sizeof(lock));
	CHECK(lock & FUTEX_TID_MASK);
	lock = FUTEX_OWNER_DIED;
	CHECK(pwrite(copy, &lock, sizeof(lock), LOCKS_AT) == sizeof(lock));
	memset(seen->given, 0, sizeof(seen->given));
	pid_t next_worker = fork();
	int status;
	CHECK(next_worker >= 0);
	if (next_worker == 0)
		take_over_journal();
	CHECK(waitpid(next_worker, &status, 0) == next_worker && status == 0);
	for (unsigned number = 0; number < REQUESTS; number++) {
		CHECK(seen->given[number] <= 1);
		CHECK(seen->given[number] || number >= taken || seen->answered[number]);
		CHECK(!seen->given[number] || (number < taken && !seen->done[number]));
	}
}

static void *shared(size_t size)
{
	void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	CHECK(memory != MAP_FAILED);
	return memory;
}

int main(int count, char **arguments)
{
	unsigned steps;
	CHECK(count == 2);
	if (!strcmp(arguments[1], "table")) {
		original = make_table(SLOTS);
		copy = make_table(SLOTS);
		handles = shared(HANDLES * sizeof(*handles));
		steps = step_through(prepare_table, use_table, look_at_table);
	} else {
		int ends[2];
		original = make_memory(JOURNAL_BYTES, JOURNAL_MAGIC, BUFFERS, ENTRIES);
		copy = make_memory(JOURNAL_BYTES, JOURNAL_MAGIC, BUFFERS, ENTRIES);
		seen = shared(sizeof(*seen));
		CHECK(socketpair(AF_UNIX, SOCK_SEQPACKET, 0, ends) == 0);
		kernel = ends[0];
		device = ends[1];
		for (unsigned number = 0; number < REQUESTS; number++) {
			struct request request = request_of(number);
			CHECK(send(kernel, &request, sizeof(request), 0) == sizeof(request));
		}
		steps = step_through(prepare_journal, use_journal, look_at_journal);
	}
	CHECK(steps > 500);
	printf("done\n");
	return 0;
}
