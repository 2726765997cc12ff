/* Names about which the source is asked at each look-up and open, while others change the files, forget the names and
 * enter them anew, and leave requests to Python: for a sanitizer. A socket is the kernel. Arguments: a directory for
 * the source, and how many requests. */
#include "../../monarchfs/core/_directories.h"
#include "../../monarchfs/core/_names.h"
#include "../../monarchfs/core/_resident.h"
#include "../../monarchfs/core/_revalidate.h"
#include "../../monarchfs/core/_waiting.h"

#include "kernel.h"

#define PARENT 1
#define DIRECTORY 3
#define TIER 0
#define AT_ONCE 8

/* A file's number is `file` plus a multiple of FILES: another one each time it is entered. `ended` is when it was over,
 * by `order`: a request that comes later is not answered with it. */
#define NUMBERS (1U << 20)

static int source_fd;
static uint64_t order, ended[NUMBERS], entered[FILES + 1], times;
static bool forgotten[NUMBERS];
static pthread_mutex_t changing[FILES + 1];

static uint64_t next_order(void)
{
	return __atomic_add_fetch(&order, 1, __ATOMIC_SEQ_CST);
}

static size_t name_of(unsigned file, char *name)
{
	return (size_t)sprintf(name, "%u", file);
}

/* Replaced or changed, so that its times are others than ever. */
static void change(unsigned file, bool replaced)
{
	char name[16], new[20];
	name_of(file, name);
	sprintf(new, "new %s", name);
	int fd = openat(source_fd, replaced ? new : name, O_WRONLY | O_CREAT, 0600);
	CHECK(fd >= 0);
	uint64_t now = __atomic_add_fetch(&times, 1, __ATOMIC_RELAXED);
	struct timespec both[2] = {{.tv_sec = 1000}, {.tv_sec = 1000 + (time_t)now}};
	CHECK(futimens(fd, both) == 0);
	close(fd);
	CHECK(!replaced || renameat(source_fd, new, source_fd, name) == 0);
}

/* As Python does it before anybody can hear of a change. */
static void forget(unsigned file)
{
	uint64_t ino = entered[file];
	if (!ino)
		return;
	names_forget_ino(ino);
	__atomic_store_n(&forgotten[ino], true, __ATOMIC_SEQ_CST);
	resident_stop(ino);
	entered[file] = 0;
}

static void enter(unsigned file)
{
	static uint64_t numbers;
	char name[16];
	struct stat st;
	size_t length = name_of(file, name);
	uint64_t ino = file + FILES * __atomic_add_fetch(&numbers, 1, __ATOMIC_RELAXED);
	CHECK(ino < NUMBERS && fstatat(source_fd, name, &st, AT_SYMLINK_NOFOLLOW) == 0);
	const struct fuse_attr attr = {.ino = ino, .size = (uint64_t)st.st_size, .blocks = (uint64_t)st.st_blocks,
		.mode = st.st_mode, .nlink = (uint32_t)st.st_nlink, .uid = st.st_uid, .gid = st.st_gid,
		.blksize = (uint32_t)st.st_blksize, .mtime = (uint64_t)st.st_mtim.tv_sec,
		.mtimensec = (uint32_t)st.st_mtim.tv_nsec, .ctime = (uint64_t)st.st_ctim.tv_sec,
		.ctimensec = (uint32_t)st.st_ctim.tv_nsec};
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	const struct replica replica = {.tier = TIER, .size = 1, .opens_until_ns = (int64_t)(now.tv_sec - 1) * 1000000000};
	CHECK(resident_put(ino, &replica, false));
	entered[file] = ino;
	names_put(PARENT, name, length, &attr, 0, st.st_ino);
}

static void *be_others(void *unused)
{
	static unsigned seeds;
	unsigned seed = __atomic_add_fetch(&seeds, 1, __ATOMIC_RELAXED);
	while (!is_over()) {
		unsigned file = 1 + (unsigned)rand_r(&seed) % FILES, what = (unsigned)rand_r(&seed) % 40;
		pthread_mutex_lock(&changing[file]);
		uint64_t before = entered[file];
		if (what < 2) {
			change(file, what);
			if (before)
				__atomic_store_n(&ended[before], next_order(), __ATOMIC_SEQ_CST);
		} else if (what < 5) {
			forget(file);
			if (before)
				__atomic_store_n(&ended[before], next_order(), __ATOMIC_SEQ_CST);
			enter(file);
		}
		pthread_mutex_unlock(&changing[file]);
		if (what == 5)
			CHECK(directories_put(DIRECTORY, PARENT, source_fd, "") == 0);
		else if (what == 6)
			waiting_leave_older(UINT64_MAX, 0);
		else if (what == 7)
			waiting_leave((uint64_t)rand_r(&seed) % requests);
		else
			usleep(50);
	}
	return unused;
}

/* The linker's --wrap: an answer is on its way. What it is about has not been forgotten: whoever forgets it waits. */
bool __real_reply_with(uint64_t unique, enum answered_by by, int error, const void *body, size_t length);

bool __wrap_reply_with(uint64_t unique, enum answered_by by, int error, const void *body, size_t length)
{
	uint64_t ino = 0;
	if (length == sizeof(struct fuse_entry_out))
		memcpy(&ino, body, sizeof(ino));
	usleep(unique % 4 ? 0 : 200);
	CHECK(!__atomic_load_n(&forgotten[ino], __ATOMIC_SEQ_CST));
	return __real_reply_with(unique, by, error, body, length);
}

struct asked {
	uint64_t ino, order; /* what an OPEN is of; when it was sent */
	unsigned file;
};

static void send_any(unsigned *seed, uint64_t unique, struct asked *asked, const uint64_t *known)
{
	unsigned file = 1 + (unsigned)rand_r(seed) % FILES;
	*asked = (struct asked){.order = __atomic_load_n(&order, __ATOMIC_SEQ_CST), .file = file};
	char name[16];
	size_t length = name_of(file, name);
	const struct fuse_open_in open_in = {.flags = O_RDONLY};
	if (known[file] && rand_r(seed) % 2) {
		asked->ino = known[file];
		send_request(FUSE_OPEN, unique, asked->ino, &open_in, sizeof(open_in));
	} else {
		send_request(FUSE_LOOKUP, unique, PARENT, name, length + 1);
	}
}

/* In place of kernel.h's, which asks for no names. */
static void *look_up_and_open(void *unused)
{
	unsigned seed = 7, sent = 0, done = 0, free_slots = AT_ONCE;
	struct asked asked[AT_ONCE];
	uint64_t known[FILES + 1] = {0};
	bool taken[AT_ONCE] = {false};
	while (done < requests) {
		for (unsigned slot = 0; sent < requests && free_slots && slot < AT_ONCE; slot++) {
			if (taken[slot])
				continue;
			taken[slot] = true;
			free_slots--;
			send_any(&seed, (uint64_t)sent++ * AT_ONCE + slot, &asked[slot], known);
		}
		char message[512];
		struct fuse_out_header out;
		ssize_t got = recv(kernel, message, sizeof(message), 0);
		CHECK(got >= (ssize_t)sizeof(out));
		memcpy(&out, message, sizeof(out));
		if (out.unique == UINT64_MAX)
			continue; /* of a release */
		unsigned slot = out.unique % AT_ONCE;
		CHECK(taken[slot] && !out.error);
		uint64_t ino = 0, fh;
		size_t size = (size_t)got - sizeof(out);
		if (size == sizeof(struct fuse_entry_out)) {
			memcpy(&ino, message + sizeof(out), sizeof(ino));
			CHECK(ino % FILES == asked[slot].file % FILES && !asked[slot].ino);
			known[asked[slot].file] = ino;
		} else if (size) {
			CHECK(size == sizeof(struct fuse_open_out) && (ino = asked[slot].ino));
			memcpy(&fh, message + sizeof(out), sizeof(fh));
			const struct fuse_release_in release_in = {.fh = fh};
			send_request(FUSE_RELEASE, UINT64_MAX, ino, &release_in, sizeof(release_in));
		}
		uint64_t over_at = __atomic_load_n(&ended[ino], __ATOMIC_SEQ_CST);
		CHECK(!ino || !over_at || over_at > asked[slot].order);
		taken[slot] = false;
		free_slots++;
		done++;
	}
	pthread_mutex_lock(&queue);
	over = true;
	pthread_mutex_unlock(&queue);
	return unused;
}

static uint64_t count_of(const struct counts *counts, enum duration of)
{
	uint64_t sum = 0;
	for (unsigned i = 0; i <= MOST_BOUNDS; i++)
		sum += counts->durations[of].took[i];
	return sum;
}

int main(int count, char **arguments)
{
	CHECK(count == 3);
	struct stat st;
	struct counts counts;
	requests = (unsigned)atoi(arguments[2]);
	CHECK((source_fd = open(arguments[1], O_RDONLY | O_DIRECTORY)) >= 0 && fstat(source_fd, &st) == 0);
	CHECK(table_attach(make_table(1000)) == 0);
	CHECK(resident_start(8, geteuid(), 0, false, false) == 0 && resident_tier(TIER, source_fd) == 0);
	CHECK(directories_put(DIRECTORY, PARENT, source_fd, "") == 0);
	revalidate_start(st.st_dev);
	for (unsigned file = 1; file <= FILES; file++) {
		pthread_mutex_init(&changing[file], NULL);
		change(file, true);
		enter(file);
	}
	kernel_thread = look_up_and_open;
	run_threads(be_others, &counts);
	uint64_t names = count_of(&counts, TIME_LOOKUP_SOURCE), opens = count_of(&counts, TIME_OPEN_LOCAL);
	CHECK(names > requests / 8 && opens > 0 && count_of(&counts, TIME_STAT) >= names + opens);
	puts("done");
	fflush(stdout);
	_exit(0); /* the threads wait for the kernel */
}
