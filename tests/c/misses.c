/* Files that are not cached, opened and read by the source threads while others put, forget and hold
 * them, and replace them in the source: for a sanitizer. A socket is the kernel. Arguments: a directory
 * for the source, how many requests, and whether there are no opens. */
#include "../../monarchfs/core/_directories.h"
#include "../../monarchfs/core/_misses.h"
#include "../../monarchfs/core/_waiting.h"
#include "../../monarchfs/core/_resident.h"
#include "../../monarchfs/source/_opened.h"

#include "kernel.h"

#define SIZE 5000
#define DIRECTORY 3
#define IN_PART 16 /* files in the window of which only a part was read */

static int source_fd;
static uint64_t told_opens, told_bytes;
static pthread_mutex_t replacing = PTHREAD_MUTEX_INITIALIZER;

/* `ino` stands for a file full of its number. `right`: so it is; else another file lies there. */
static void replace(uint64_t ino, bool right)
{
	char name[16], data[SIZE];
	struct stat st;
	snprintf(name, sizeof(name), "%u", (unsigned)ino);
	memset(data, right ? (int)ino : 0xff, sizeof(data));
	int fd = openat(source_fd, "new", O_WRONLY | O_CREAT | O_TRUNC, 0600);
	CHECK(fd >= 0 && write(fd, data, sizeof(data)) == SIZE && fstat(fd, &st) == 0);
	close(fd);
	struct timespec times[2] = {st.st_atim, {.tv_sec = 1000, .tv_nsec = right}};
	CHECK(utimensat(source_fd, "new", times, 0) == 0);
	CHECK(renameat(source_fd, "new", source_fd, name) == 0);
	if (!right)
		return;
	CHECK(fstatat(source_fd, name, &st, 0) == 0);
	const struct miss_version version = {st.st_ino, SIZE, ns_of(st.st_mtim), ns_of(st.st_ctim)};
	misses_put(ino, DIRECTORY, name, strlen(name), &version, 0, NULL);
}

/* Whether an event is to tell of it. Who fetches knows of that, as Python does. */
static bool fetched[FILES + 1];
static pthread_mutex_t fetching = PTHREAD_MUTEX_INITIALIZER;

/* As Python learns attributes by opening: the file may be replaced before it is read. */
static void keep_open(uint64_t ino)
{
	char name[16];
	struct stat st;
	snprintf(name, sizeof(name), "%u", (unsigned)ino);
	int fd = openat(source_fd, name, SMALL_OPEN_FLAGS);
	CHECK(fd >= 0 && fstat(fd, &st) == 0);
	int displaced = opened_keep(&st, fd);
	CHECK(displaced < 0 || close(displaced) == 0);
}

static void fetch(uint64_t ino, unsigned threads)
{
	if (threads % 2)
		keep_open(ino);
	pthread_mutex_lock(&fetching);
	if (!fetched[ino])
		misses_fetch(&ino, &(int64_t){threads % 2 ? INT64_MAX : 0}, 1, threads, &fetched[ino]);
	pthread_mutex_unlock(&fetching);
}

static void hold(uint64_t ino)
{
	pthread_mutex_lock(&fetching);
	if (!misses_exclude(ino, true))
		fetched[ino] = false;
	pthread_mutex_unlock(&fetching);
}

/* Some of these bytes may be asked for after they are no longer fresh. */
static void into_window(uint64_t ino, unsigned seed)
{
	const uint64_t inos[2] = {ino, 1 + ino % FILES};
	const int64_t fresh[2] = {seed % 3 ? INT64_MAX : 0, INT64_MAX};
	bool begun[2];
	misses_window(inos, fresh, 2, 1 + seed % 3, begun);
}

static void take_events(void)
{
	struct miss_event *event = misses_events();
	while (event) {
		struct miss_event *next = event->next;
		told_opens += event->opens;
		CHECK(!event->bytes || !event->error);
		pthread_mutex_lock(&fetching);
		fetched[event->ino] = false;
		pthread_mutex_unlock(&fetching);
		if (event->bytes) {
			for (size_t i = 0; i < SIZE; i++)
				CHECK(event->bytes->data[i] == (char)event->ino);
			told_bytes += event->bytes->size;
			misses_leave_bytes(event->bytes);
		}
		free(event);
		event = next;
	}
}

/* What was opened here is read here, whatever becomes of the file meanwhile. */
static void check_not_open(const struct fuse_in_header *in)
{
	const struct fuse_read_in *arg = (const void *)(in + 1);
	CHECK(in->opcode != FUSE_READ || !arg->fh || table_ino(arg->fh) != in->nodeid);
}

/* The linker's --wrap: others come in between where an open is to be answered. */
bool __real_opens_answer_source(const struct fuse_in_header *in, enum answered_by by,
			      uint64_t started_ns);
/* Opens that are being answered from memory, with what they came after. */
static struct {
	uint64_t ino, order;
} answering[16];
static uint64_t order;
static pthread_mutex_t answering_lock = PTHREAD_MUTEX_INITIALIZER;

bool __wrap_opens_answer_source(const struct fuse_in_header *in, enum answered_by by,
			      uint64_t started_ns)
{
	unsigned at = 0;
	pthread_mutex_lock(&answering_lock);
	while (answering[at].ino)
		CHECK(++at < sizeof(answering) / sizeof(*answering));
	answering[at].ino = in->nodeid;
	answering[at].order = ++order;
	pthread_mutex_unlock(&answering_lock);
	usleep(in->unique >> 8 & 1 ? 300 : 0);
	const bool done = __real_opens_answer_source(in, by, started_ns);
	pthread_mutex_lock(&answering_lock);
	answering[at].ino = 0;
	pthread_mutex_unlock(&answering_lock);
	return done;
}

/* No open is answered afterwards that came before. Rather one that is being answered than `ino`. */
static void forget(uint64_t ino)
{
	pthread_mutex_lock(&answering_lock);
	const uint64_t now = ++order;
	for (unsigned at = 0; at < sizeof(answering) / sizeof(*answering); at++)
		ino = answering[at].ino ? answering[at].ino : ino;
	pthread_mutex_unlock(&answering_lock);
	misses_forget((uint64_t[]){ino, 1 + ino % FILES}, 2);
	pthread_mutex_lock(&answering_lock);
	for (unsigned at = 0; at < sizeof(answering) / sizeof(*answering); at++)
		CHECK(answering[at].ino != ino || answering[at].order > now);
	pthread_mutex_unlock(&answering_lock);
}

static void *be_others(void *unused)
{
	unsigned seed = 2;
	while (!is_over()) {
		uint64_t ino = 1 + (uint64_t)rand_r(&seed) % FILES;
		switch (rand_r(&seed) % 40) {
		case 0:
			forget(ino);
			break;
		case 1:
			misses_forget_all();
			break;
		case 2:
			hold(ino);
			break;
		case 3 ... 4:
			misses_exclude(ino, false);
			misses_has(ino);
			break;
		case 5:
			CHECK(directories_put(DIRECTORY, 1, source_fd, "") == 0);
			break;
		case 6:
			waiting_leave_older(rand_r(&seed) % 4 ? 0 : UINT64_MAX, rand_r(&seed) % 2);
			break;
		case 7:
			waiting_leave(rand_r(&seed) % requests << 8 | ino);
			waiting_any_since(0);
			break;
		case 8: {
			struct counts counts;
			counts_so_far(&counts);
			break;
		}
		case 9 ... 13:
			fetch(ino, 1 + rand_r(&seed) % 3);
			break;
		case 14:
			misses_hurry((uint64_t[]){ino, 1 + ino % FILES}, 2);
			break;
		case 15 ... 17:
			into_window(ino, rand_r(&seed));
			break;
		case 18 ... 19:
			misses_window_drop((uint64_t[]){ino, 1 + ino % FILES}, 2);
			break;
		case 20:
			misses_window_limit(rand_r(&seed) % 4 ? 10 * SIZE : 0);
			break;
		default:
			pthread_mutex_lock(&replacing);
			replace(ino, rand_r(&seed) % 4);
			pthread_mutex_unlock(&replacing);
			usleep(50);
		}
	}
	return unused;
}

static bool all_are_told(void)
{
	bool any = false;
	take_events();
	for (uint64_t ino = 1; ino <= FILES; ino++)
		any |= fetched[ino];
	return !any;
}

static struct miss_window window(void)
{
	struct miss_window state;
	misses_window_state(&state);
	return state;
}

/* All files are right, and known. */
static void replace_all(void)
{
	for (uint64_t ino = 1; ino <= FILES; ino++) {
		misses_exclude(ino, false);
		replace(ino, true);
	}
}

static void all_into_window(void)
{
	for (uint64_t ino = 1; ino <= FILES; ino++)
		into_window(ino, 2);
}

/* What the window has when it was emptied. */
static uint64_t left_in_window(void)
{
	for (uint64_t ino = 1; ino <= FILES; ino++)
		misses_window_drop(&ino, 1);
	return window().bytes;
}

static void be_patient(struct timeval patience)
{
	CHECK(setsockopt(kernel, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience)) == 0);
}

/* Ask, and wait for the answer; 0: there is none, Python had to give it. */
static size_t answer_to(uint32_t opcode, uint64_t ino, const void *body, size_t size, void *answer)
{
	static uint64_t asked = 1ULL << 40;
	char message[8192];
	struct fuse_out_header out;
	send_request(opcode, ++asked << 8, ino, body, size);
	do {
		ssize_t got = recv(kernel, message, sizeof(message), 0);
		if (got < 0)
			return 0;
		CHECK(got >= (ssize_t)sizeof(out));
		memcpy(&out, message, sizeof(out));
	} while (out.unique != asked << 8);
	memcpy(answer, message + sizeof(out), out.len - sizeof(out));
	return out.len - sizeof(out);
}

/* Ask for a file as a reader does: to its end where there are no opens. */
static void ask_for_file(uint64_t ino)
{
	char answer[8192];
	struct fuse_open_out opened;
	struct fuse_open_in open_in = {.flags = O_RDONLY};
	struct fuse_read_in read_in = {.size = SIZE};
	if (no_opens) {
		answer_to(FUSE_READ, ino, &read_in, sizeof(read_in), answer);
	} else if (answer_to(FUSE_OPEN, ino, &open_in, sizeof(open_in), &opened)) {
		struct fuse_release_in release_in = {.fh = opened.fh};
		answer_to(FUSE_RELEASE, ino, &release_in, sizeof(release_in), answer);
	}
}

static bool window_is_idle(void)
{
	pthread_mutex_lock(&source_lock);
	bool idle = !window_threads.first && !window_threads.busy;
	pthread_mutex_unlock(&source_lock);
	return idle;
}

static void wait_for_window(uint64_t files)
{
	WAIT_UNTIL(window_is_idle() && window().read >= files);
	CHECK(window().read == files);
}

/* What is in memory, but no longer fresh, is opened in the source: there lies another file by now. */
static void open_what_is_not_fresh(void)
{
	const struct fuse_open_in open_in = {.flags = O_RDONLY};
	struct fuse_open_out opened;
	misses_forget_all();
	take_events();
	misses_exclude(1, false);
	replace(1, true);
	const uint64_t read = window().read;
	misses_window(&(uint64_t){1}, &(int64_t){0}, 1, 1, &(bool){false});
	wait_for_window(read + 1);
	replace(1, false);
	CHECK(!answer_to(FUSE_OPEN, 1, &open_in, sizeof(open_in), &opened));
}

/* In the window, with as much room as there is, all can be had without the source; and nothing is left of it but
 * files that are open: they keep their bytes. */
static void use_the_window(void)
{
	const size_t held = window().bytes; /* `be_kernel` has left some open */
	const size_t most = held + FILES / 4 * SIZE;
	misses_window_limit(most);
	replace_all();
	all_into_window();
	WAIT_UNTIL(window().bytes == most) {
		CHECK(window().bytes <= most);
		take_events(); /* whose bytes keep files out of the window; others may be asked for late */
		all_into_window();
	}
	const struct miss_window full = window();
	CHECK(full.read > full.hits + full.wasted);
	for (uint64_t ino = 1; ino <= FILES && window().hits == full.hits; ino++)
		ask_for_file(ino);
	CHECK(window().hits > full.hits);
	WAIT_UNTIL(left_in_window() <= held);
	const struct miss_window left = window();
	CHECK(left.bytes == held && left.read == left.hits + left.wasted && left.wasted > full.wasted);
}

/* What waits for room in the window is copied without it, once Python wants that. */
static void copy_what_waits_for_room(void)
{
	misses_window_limit(1);
	replace_all();
	all_into_window();
	for (uint64_t ino = 1; ino <= FILES; ino++)
		fetch(ino, 2);
	left_in_window();
	WAIT_UNTIL(all_are_told());
	misses_window_limit(10 * SIZE);
}

static bool window_threads_ended(void)
{
	pthread_mutex_lock(&source_lock);
	bool ended = !window_threads.threads;
	CHECK(!ended || !window_threads.idle);
	pthread_mutex_unlock(&source_lock);
	return ended;
}

/* A file whose open is in an event is read into the window only after Python took that event. */
static void come_before_python(const uint64_t *inos)
{
	bool begun[1];
	misses_window_limit(FILES * SIZE);
	misses_window(inos, &(int64_t){INT64_MAX}, 1, 1, begun);
	CHECK(!begun[0]);
	take_events();
	misses_window(inos, &(int64_t){INT64_MAX}, 1, 1, begun);
	CHECK(begun[0]);
}

/* The window is full of files that were read in part, its threads are idle, and one file more is wanted. Without
 * opens all of these files make room for it, and each wakes a thread. Then all threads end, and are started again. */
static void make_room_for_one(void)
{
	char answer[8192];
	bool begun[FILES];
	int64_t fresh[FILES] = {0};
	uint64_t inos[FILES];
	const struct fuse_read_in read_in = {.size = READ_BYTES};
	be_patient((struct timeval){.tv_sec = 30});
	misses_forget_all();
	take_events();
	misses_window_limit(IN_PART * SIZE);
	replace_all();
	for (uint64_t n = 0; n < FILES; n++)
		inos[n] = n + 1;
	WAIT_UNTIL(!window().bytes); /* answers may be under way */
	const uint64_t read = window().read;
	misses_window(inos, fresh, IN_PART, IN_PART / 2, begun);
	wait_for_window(read + IN_PART);
	for (unsigned n = 0; n < IN_PART; n++)
		CHECK(answer_to(FUSE_READ, inos[n], &read_in, sizeof(read_in), answer) == READ_BYTES);
	misses_window(inos + IN_PART, fresh, 1, IN_PART / 2, begun);
	wait_for_window(read + IN_PART + 1);
	WAIT_UNTIL(window_threads_ended());
	misses_window(inos + IN_PART + 1, fresh, IN_PART / 2, IN_PART / 2, begun);
	wait_for_window(read + IN_PART + 1 + IN_PART / 2);
	come_before_python(inos);
}

/* Twice as much is read as there is memory, and Python takes nothing up meanwhile. */
static void be_short_of_memory(void)
{
	be_patient((struct timeval){.tv_usec = 100000});
	misses_forget_all();
	take_events();
	CHECK(directories_put(DIRECTORY, 1, source_fd, "") == 0);
	replace_all();
	for (uint64_t ino = 1; ino <= FILES; ino++)
		ask_for_file(ino);
	take_events();
}

int main(int count, char **arguments)
{
	CHECK(count == 4);
	requests = (unsigned)atoi(arguments[2]);
	no_opens = atoi(arguments[3]);
	source_fd = open(arguments[1], O_RDONLY | O_DIRECTORY);
	CHECK(source_fd >= 0);
	struct stat st;
	CHECK(table_attach(make_table(1000)) == 0);
	CHECK(resident_start(8, geteuid(), 1, no_opens, false) == 0);
	CHECK(fstat(source_fd, &st) == 0);
	const struct miss_options options = {
		.memory_bytes = 20 * SIZE, .device = st.st_dev, .keeps = true};
	CHECK(misses_start(&options) >= 0);
	misses_opened(opened_take);
	misses_window_limit(10 * SIZE);
	CHECK(directories_put(DIRECTORY, 1, source_fd, "") == 0);
	replace_all();
	places = SIZE / READ_BYTES;
	look_at_request = check_not_open;
	when_idle = take_events;
	struct counts counts;
	run_threads(be_others, &counts);
	take_events();
	CHECK(counts.numbers[COUNT_BYTES] && counts.numbers[COUNT_SOURCE_BYTES] && told_opens && told_bytes);
	WAIT_UNTIL(all_are_told());
	be_short_of_memory();
	for (uint64_t ino = 1; ino <= FILES; ino++)
		fetch(ino, 2);
	WAIT_UNTIL(all_are_told());
	counts_so_far(&counts);
	CHECK(counts.numbers[COUNT_AHEAD_BYTES]);
	use_the_window();
	copy_what_waits_for_room();
	if (no_opens)
		make_room_for_one();
	else
		open_what_is_not_fresh();
	puts("done");
	fflush(stdout);
	_exit(0); /* the threads wait for the kernel */
}
