/* An open that the kernel hands out again, under another name, while a thread is at it: what it took of
 * the two answers lasts. The linker's --wrap has the answers looked at. */
#include "../../monarchfs/core/_opens.h"
#include "../../monarchfs/core/_resident.h"

#include "kernel.h"

#define INO 1
#define SIZE 4096
#define THREADS 4

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static uint64_t held_back, handle; /* the answer that waits; of the last one that was accepted */
static uint32_t passed_to; /* its backing id */
static bool arrived, let_go, refuse_all;
static unsigned answers;
static const uint64_t *busy_since;

/* The kernel refuses the answer that is held back. */
ssize_t __wrap_writev(int fd, const struct iovec *parts, int count)
{
	struct fuse_out_header out;
	memcpy(&out, parts[0].iov_base, sizeof(out));
	bool accepted = !refuse_all;
	(void)fd;
	pthread_mutex_lock(&lock);
	if (out.unique == held_back) {
		accepted = false;
		arrived = true;
		pthread_cond_broadcast(&changed);
		while (!let_go)
			pthread_cond_wait(&changed, &lock);
	} else if (accepted && count == 2 && parts[1].iov_len == sizeof(struct fuse_open_out)) {
		struct backed_open_out opened;
		memcpy(&opened, parts[1].iov_base, sizeof(opened));
		handle = opened.fh;
		passed_to = opened.open_flags == OPEN_PASSTHROUGH ? opened.backing_id : 0;
	}
	answers++;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	errno = ENOENT;
	return accepted ? (ssize_t)out.len : -1;
}

static void ask_open(uint64_t unique)
{
	struct fuse_open_in open_in = {.flags = O_RDONLY};
	send_request(FUSE_OPEN, unique, INO, &open_in, sizeof(open_in));
}

static void wait_for_answers(unsigned count)
{
	pthread_mutex_lock(&lock);
	while (answers < count)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
}

static void begin(uint64_t unique, bool all)
{
	pthread_mutex_lock(&lock);
	held_back = unique;
	arrived = let_go = false;
	refuse_all = all;
	answers = 0;
	handle = 0;
	pthread_mutex_unlock(&lock);
	ask_open(unique);
	pthread_mutex_lock(&lock);
	while (!arrived)
		pthread_cond_wait(&changed, &lock);
	pthread_mutex_unlock(&lock);
}

static void let_it_go(void)
{
	pthread_mutex_lock(&lock);
	let_go = true;
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&lock);
	for (int thread = 0; thread < THREADS; thread++)
		while (__atomic_load_n(&busy_since[thread], __ATOMIC_RELAXED))
			usleep(100);
}

static void make_replica(int tier_fd, struct replica *replica)
{
	char path[64], data[SIZE] = {0};
	*replica = (struct replica){.size = SIZE, .opens_until_ns = ALWAYS};
	CHECK(mkdirat(tier_fd, "00", 0700) == 0);
	snprintf(path, sizeof(path), "00/%032d.%016d", 0, 0);
	int fd = openat(tier_fd, path, O_WRONLY | O_CREAT, 0600);
	CHECK(fd >= 0 && write(fd, data, SIZE) == SIZE && close(fd) == 0);
}

static long next_of_python(void)
{
	static char buffer[REQUEST_BYTES];
	int ended_by;
	enum queued_after past;
	return queue_next(buffer, &ended_by, &past);
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	int tier_fd = open(arguments[1], O_RDONLY | O_DIRECTORY), table = make_table(100);
	uint64_t number;
	uint32_t backing_id;
	struct replica replica;
	make_replica(tier_fd, &replica);
	char *memory = mmap(NULL, 4096, PROT_READ, MAP_SHARED, table, 0);
	CHECK(memory != MAP_FAILED && table_attach(table) == 0);
	busy_since = (const uint64_t *)(memory + 1024);
	CHECK(resident_start(8, geteuid(), 1, false, false) == 0);
	CHECK(resident_tier(0, tier_fd) == 0 && resident_put(INO, &replica, true));
	connect_kernel();
	CHECK(relay_start(device, THREADS, 0, false) >= 0);

	/* The second answer is accepted, and the first then refused. */
	begin(2, false);
	ask_open(2 | RESENT);
	wait_for_answers(1);
	let_it_go();
	CHECK(handle && table_ino(handle) == INO && resident_used(INO));
	struct fuse_release_in release = {.fh = handle};
	send_request(FUSE_RELEASE, 4, INO, &release, sizeof(release));
	wait_for_answers(3);
	CHECK(!table_length() && !resident_used(INO));

	/* The same, and the handle is another open's by the time that the first is refused. */
	begin(6, false);
	ask_open(6 | RESENT);
	wait_for_answers(1);
	release.fh = handle;
	send_request(FUSE_RELEASE, 8, INO, &release, sizeof(release));
	wait_for_answers(2);
	ask_open(10);
	wait_for_answers(3);
	let_it_go();
	CHECK(handle != release.fh && table_ino(handle) == INO && table_length() == 1);
	table_end(handle, false, NULL);

	/* The kernel takes neither. */
	begin(12, true);
	ask_open(12 | RESENT);
	wait_for_answers(1);
	let_it_go();
	CHECK(!table_length() && !resident_used(INO));

	/* Where nothing is decided about a backing file, Python is asked, and may take the handle over. */
	opens_answer_here(false, false);
	ask_open(14);
	while (next_of_python() <= 0)
		usleep(100);
	CHECK(inode_back(INO, 7));
	begin(16, false);
	CHECK(table_add(INO, 16 | RESENT, OWNED | ANSWERING, &number, &backing_id) == 1 && backing_id == 7);
	CHECK(!table_opened(number, true));
	let_it_go();
	CHECK(table_ino(number) == INO && next_of_python() == -EAGAIN);
	/* While it is open with a backing file, so is every other open; then with none. */
	CHECK(!inode_unback(INO, true));
	ask_open(18);
	wait_for_answers(2);
	CHECK(handle != number && passed_to == 7);
	table_end(handle, false, NULL);
	table_end(number, false, NULL);
	CHECK(!inode_decided(INO) && inode_unback(INO, false));
	/* And without a backing file, though there is one by then. */
	opens_answer_here(true, false);
	begin(20, false);
	CHECK(inode_back(INO, 8));
	ask_open(22);
	wait_for_answers(1);
	CHECK(handle && !passed_to);
	let_it_go();
	table_end(handle, false, NULL);
	ask_open(24);
	wait_for_answers(3);
	CHECK(passed_to == 8);
	/* The kernel takes no answer, and Python has the handle by then: it has to end it, and nobody else gets it. */
	table_end(handle, false, NULL);
	begin(26, true);
	CHECK(table_add(INO, 26 | RESENT, OWNED | ANSWERING, &number, &backing_id) == 1);
	CHECK(!table_opened(number, false));
	let_it_go();
	CHECK(next_of_python() > 0 && table_ino(number) == INO);
	CHECK(table_add(INO, 26 | RESENT, OWNED | ANSWERING, &number, &backing_id) == 0);
	puts("done");
	fflush(stdout);
	_exit(0); /* the threads wait for the kernel */
}
