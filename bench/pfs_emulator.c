/* A directory seen as a client of a busy parallel file system would see it: bytes come at a limited
 * rate, operations take time, other people's load comes and goes, and everything asked is counted.
 * bench/pfs.py starts it, and docs/BENCHMARKS.md says what is modelled.
 *
 *     pfs_emulator DIRECTORY MOUNTPOINT OPTIONS COUNTERS
 *     pfs_emulator weather SEED NOISE PERIOD COUNT
 *
 * COUNTERS is the number of an inherited descriptor of shared memory: uint64_t in the order of enum
 * counter. Standard input takes `struct settings`, each answered with a byte on standard output (one
 * more says that the mount is made); its end, or the parent's, unmounts and ends the program.
 *
 * No request is ever postponed by work: when it comes, the time of its answer is computed, and its
 * thread does the work and sleeps until then. */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include <fuse_lowlevel.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <math.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <time.h>
#include <unistd.h>

#define VALID_SECONDS 86400.0 /* of names and attributes: a lock that nobody revokes */
#define MOST_THREADS 128
#define MOST_IN_FLIGHT 64
#define MOST_BACKGROUND 64 /* reads ahead that the kernel sends before it waits */
#define LISTING_BYTES (1 << 20) /* of a directory in one answer of the server */
#define STEPS_OF_A_SPELL 8

enum counter {
	LOOKUP,
	GETATTR,
	OPEN,
	OPENDIR,
	READDIR,
	READ,
	XATTR,
	STATFS,
	READ_BYTES,
	COUNTERS,
};

static _Atomic uint64_t *counters;

/* -- settings and time */

struct settings {
	double bandwidth; /* bytes a second; infinite: no limit */
	double metadata_seconds;
	double read_seconds;
	double noise; /* the share that others take at worst, below 1 */
	double noise_period;
	uint64_t metadata_in_flight;
	uint64_t seed;
	uint64_t restart_noise; /* not 0: the noise begins anew now */
};

static pthread_mutex_t plan = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static struct settings settings;
static double noise_began;
static double link_free; /* when the last byte promised so far has come */
static double slot_free[MOST_IN_FLIGHT]; /* the same of each metadata request at once */

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static void sleep_until(double when)
{
	struct timespec time = {.tv_sec = (time_t)when};
	time.tv_nsec = (long)(1e9 * (when - (double)time.tv_sec));
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

/* Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), splitmix64's
 * output for a counter. */
static double random_of(uint64_t seed, uint64_t number)
{
	uint64_t x = seed + (number + 1) * 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	x ^= x >> 31;
	return (double)(x >> 11) * 0x1p-53;
}

/* What others take in this step of the noise: half of it changes each step, the other half lasts. */
static double share_in(const struct settings *of, uint64_t step)
{
	double gust = random_of(of->seed, 2 * step);
	double spell = random_of(of->seed, 2 * (step / STEPS_OF_A_SPELL) + 1);
	return of->noise * (gust + spell) / 2;
}

static uint64_t step_at(double time)
{
	return time <= noise_began ? 0 : (uint64_t)((time - noise_began) / settings.noise_period);
}

static double share_at(double time)
{
	return settings.noise > 0 ? share_in(&settings, step_at(time)) : 0;
}

/* When `bytes` have come that begin to come at `start`. */
static double transferred(double start, double bytes)
{
	if (settings.noise <= 0)
		return start + bytes / settings.bandwidth;
	for (uint64_t step = step_at(start);; step++) {
		double rate = settings.bandwidth * (1 - share_in(&settings, step));
		double end = noise_began + (double)(step + 1) * settings.noise_period;
		double needed = bytes / rate;
		if (start + needed <= end)
			return start + needed;
		if (end > start) {
			bytes -= (end - start) * rate;
			start = end;
		}
	}
}

/* A metadata request begins: counts it, and returns when it is answered. */
static double begin_metadata(enum counter counter)
{
	atomic_fetch_add_explicit(&counters[counter], 1, memory_order_relaxed);
	double begin = now();
	pthread_mutex_lock(&plan);
	uint64_t first = 0;
	for (uint64_t slot = 1; slot < settings.metadata_in_flight; slot++)
		if (slot_free[slot] < slot_free[first])
			first = slot;
	if (slot_free[first] > begin)
		begin = slot_free[first];
	double end = begin + settings.metadata_seconds / (1 - share_at(begin));
	slot_free[first] = end;
	pthread_mutex_unlock(&plan);
	return end;
}

/* The same for reading: requests travel at once, their bytes come one after the other. */
static double begin_read(size_t bytes)
{
	atomic_fetch_add_explicit(&counters[READ], 1, memory_order_relaxed);
	atomic_fetch_add_explicit(&counters[READ_BYTES], bytes, memory_order_relaxed);
	double begin = now();
	pthread_mutex_lock(&plan);
	begin += settings.read_seconds / (1 - share_at(begin));
	if (link_free > begin)
		begin = link_free;
	double end = transferred(begin, (double)bytes);
	link_free = end;
	pthread_mutex_unlock(&plan);
	return end;
}

static void set(const struct settings *given)
{
	pthread_mutex_lock(&plan);
	settings = *given;
	if (given->restart_noise)
		noise_began = now();
	pthread_mutex_unlock(&plan);
}

/* -- the files that the kernel knows */

struct node {
	struct node *next; /* in its bucket */
	struct node *parent; /* a reference */
	char *name;
	uint64_t ino;
	dev_t dev;
	uint64_t lookups;
	uint64_t references; /* the kernel's (while there are lookups), and its children's */
};

#define BUCKETS (1 << 20)

static pthread_mutex_t tree = PTHREAD_MUTEX_INITIALIZER; /* guards all nodes */
static struct node **buckets;
static struct node root = {.lookups = 1, .references = 1};

static struct node **bucket_of(uint64_t ino)
{
	return &buckets[(ino * 0x9e3779b97f4a7c15) >> 44];
}

static struct node *node_of(fuse_ino_t number)
{
	return number == FUSE_ROOT_ID ? &root : (struct node *)(uintptr_t)number;
}

static void drop(struct node *node)
{
	while (node && --node->references == 0) {
		struct node **link = bucket_of(node->ino);
		while (*link != node)
			link = &(*link)->next;
		*link = node->next;
		struct node *parent = node->parent;
		free(node->name);
		free(node);
		node = parent;
	}
}

/* Puts a component before `start`; NULL where there is no room left. */
static char *put_before(char *start, const char *path, const char *name)
{
	size_t length = strlen(name);
	if (length + 1 > (size_t)(start - path))
		return NULL;
	if (*start)
		*--start = '/';
	return memcpy(start - length, name, length);
}

/* The path of a node, or of a name in it, below the root, which is the working directory; 0 or an
 * errno. */
static int path_of(fuse_ino_t number, const char *name, char path[static PATH_MAX])
{
	char *start = path + PATH_MAX - 1;
	*start = 0;
	if (name)
		start = put_before(start, path, name);
	pthread_mutex_lock(&tree);
	for (struct node *node = node_of(number); start && node->parent; node = node->parent)
		start = put_before(start, path, node->name);
	pthread_mutex_unlock(&tree);
	if (!start)
		return ENAMETOOLONG;
	if (!*start)
		*--start = '.';
	memmove(path, start, (size_t)(path + PATH_MAX - start));
	return 0;
}

/* One lookup more of the file that is `name` in `parent`; NULL without memory. */
static struct node *looked_up(fuse_ino_t parent, const char *name, const struct stat *found)
{
	char *copy = strdup(name);
	if (!copy)
		return NULL;
	pthread_mutex_lock(&tree);
	struct node **bucket = bucket_of(found->st_ino);
	struct node *node = *bucket;
	while (node && (node->ino != found->st_ino || node->dev != found->st_dev))
		node = node->next;
	struct node *old = NULL;
	if (!node) {
		node = calloc(1, sizeof *node);
		if (!node) {
			pthread_mutex_unlock(&tree);
			free(copy);
			return NULL;
		}
		node->ino = found->st_ino;
		node->dev = found->st_dev;
		node->next = *bucket;
		*bucket = node;
	} else {
		/* It may have been renamed, or have several names: the last one is there. */
		old = node->parent;
		free(node->name);
	}
	node->name = copy;
	node->parent = node_of(parent);
	node->parent->references++;
	if (node->lookups++ == 0)
		node->references++;
	drop(old);
	pthread_mutex_unlock(&tree);
	return node;
}

static void forget(fuse_req_t req, fuse_ino_t number, uint64_t lookups)
{
	struct node *node = node_of(number);
	pthread_mutex_lock(&tree);
	node->lookups -= lookups;
	if (node->lookups == 0)
		drop(node);
	pthread_mutex_unlock(&tree);
	fuse_reply_none(req);
}

/* -- operations */

static void fail(fuse_req_t req, int error, double when)
{
	sleep_until(when);
	fuse_reply_err(req, error);
}

static void lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	double when = begin_metadata(LOOKUP);
	char path[PATH_MAX];
	struct fuse_entry_param entry = {
		.attr_timeout = VALID_SECONDS,
		.entry_timeout = VALID_SECONDS,
	};
	int error = path_of(parent, name, path);
	if (!error && lstat(path, &entry.attr))
		error = errno;
	if (error)
		return fail(req, error, when);
	struct node *node = looked_up(parent, name, &entry.attr);
	if (!node)
		return fail(req, ENOMEM, when);
	entry.ino = (uintptr_t)node;
	sleep_until(when);
	fuse_reply_entry(req, &entry);
}

static void get_attributes(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	(void)file;
	double when = begin_metadata(GETATTR);
	char path[PATH_MAX];
	struct stat found;
	int error = path_of(number, NULL, path);
	if (!error && lstat(path, &found))
		error = errno;
	if (error)
		return fail(req, error, when);
	sleep_until(when);
	fuse_reply_attr(req, &found, VALID_SECONDS);
}

static void read_link(fuse_req_t req, fuse_ino_t number)
{
	/* The attributes' RPC brings the target, too. */
	double when = begin_metadata(GETATTR);
	char path[PATH_MAX];
	char target[PATH_MAX];
	ssize_t length = -1;
	int error = path_of(number, NULL, path);
	if (!error && (length = readlink(path, target, sizeof target - 1)) < 0)
		error = errno;
	if (error)
		return fail(req, error, when);
	target[length] = 0;
	sleep_until(when);
	fuse_reply_readlink(req, target);
}

static void open_file(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	double when = begin_metadata(OPEN);
	char path[PATH_MAX];
	int error = path_of(number, NULL, path);
	if (!error && (file->flags & O_ACCMODE) != O_RDONLY)
		error = EROFS;
	int fd = -1;
	if (!error && (fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) < 0)
		error = errno;
	if (error)
		return fail(req, error, when);
	file->fh = (uint64_t)fd;
	file->keep_cache = 1;
	sleep_until(when);
	if (fuse_reply_open(req, file) == -ENOENT)
		close(fd); /* interrupted: no release will come */
}

static void read_file(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
		      struct fuse_file_info *file)
{
	(void)number;
	int fd = (int)file->fh;
	struct stat found;
	if (fstat(fd, &found)) {
		fuse_reply_err(req, errno);
		return;
	}
	off_t left = found.st_size > offset ? found.st_size - offset : 0;
	if ((off_t)size > left)
		size = (size_t)left;
	double when = begin_read(size);
	struct fuse_bufvec bytes = FUSE_BUFVEC_INIT(size);
	bytes.buf[0].flags = FUSE_BUF_IS_FD | FUSE_BUF_FD_SEEK;
	bytes.buf[0].fd = fd;
	bytes.buf[0].pos = offset;
	sleep_until(when);
	fuse_reply_data(req, &bytes, FUSE_BUF_SPLICE_MOVE);
}

static void release(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	(void)number;
	close((int)file->fh);
	fuse_reply_err(req, 0);
}

struct listing {
	DIR *stream;
	struct dirent *entry; /* read, and not yet handed out */
	off_t offset; /* where the stream is */
	size_t left; /* bytes that the last answer of the server still has */
};

static void open_directory(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	double when = begin_metadata(OPENDIR);
	char path[PATH_MAX];
	int error = path_of(number, NULL, path);
	struct listing *listing = calloc(1, sizeof *listing);
	if (!listing)
		error = ENOMEM;
	if (!error && !(listing->stream = opendir(path)))
		error = errno;
	if (error) {
		free(listing);
		return fail(req, error, when);
	}
	file->fh = (uintptr_t)listing;
	file->keep_cache = 1;
	file->cache_readdir = 1;
	sleep_until(when);
	if (fuse_reply_open(req, file) == -ENOENT) {
		closedir(listing->stream);
		free(listing);
	}
}

/* The kernel asks for a page or a few at a time; the server is only asked when what it sent last, up
 * to LISTING_BYTES, has been handed out, and it says where the directory ends. */
static void read_directory(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
			   struct fuse_file_info *file)
{
	(void)number;
	struct listing *listing = (struct listing *)(uintptr_t)file->fh;
	if (offset != listing->offset) {
		seekdir(listing->stream, offset);
		listing->entry = NULL;
		listing->offset = offset;
		listing->left = 0;
	}
	char *answer = malloc(size);
	if (!answer) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	size_t used = 0;
	int error = 0;
	for (;;) {
		if (!listing->entry) {
			errno = 0;
			listing->entry = readdir(listing->stream);
			if (!listing->entry) {
				error = errno;
				break;
			}
		}
		struct dirent *entry = listing->entry;
		struct stat kind = {.st_ino = entry->d_ino, .st_mode = DTTOIF(entry->d_type)};
		size_t needs = fuse_add_direntry(req, answer + used, size - used, entry->d_name, &kind,
						 entry->d_off);
		if (needs > size - used)
			break;
		used += needs;
		listing->offset = entry->d_off;
		listing->entry = NULL;
	}
	if (used > listing->left || (error && used == 0)) {
		sleep_until(begin_metadata(READDIR));
		listing->left = LISTING_BYTES;
	}
	listing->left -= used;
	if (error && used == 0)
		fuse_reply_err(req, error);
	else
		fuse_reply_buf(req, answer, used);
	free(answer);
}

static void release_directory(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	(void)number;
	struct listing *listing = (struct listing *)(uintptr_t)file->fh;
	closedir(listing->stream);
	free(listing);
	fuse_reply_err(req, 0);
}

/* Both kinds of answer: the value, or with no size its length. */
static void reply_attribute(fuse_req_t req, const char *value, ssize_t length, size_t size)
{
	if (length < 0)
		fuse_reply_err(req, (int)-length);
	else if (size == 0)
		fuse_reply_xattr(req, (size_t)length);
	else
		fuse_reply_buf(req, value, (size_t)length);
}

static void get_attribute(fuse_req_t req, fuse_ino_t number, const char *name, size_t size)
{
	double when = begin_metadata(XATTR);
	char path[PATH_MAX];
	char value[XATTR_SIZE_MAX];
	ssize_t length = -path_of(number, NULL, path);
	if (!length && (length = lgetxattr(path, name, value, size)) < 0)
		length = -errno;
	sleep_until(when);
	reply_attribute(req, value, length, size);
}

static void list_attributes(fuse_req_t req, fuse_ino_t number, size_t size)
{
	double when = begin_metadata(XATTR);
	char path[PATH_MAX];
	char names[XATTR_LIST_MAX];
	ssize_t length = -path_of(number, NULL, path);
	if (!length && (length = llistxattr(path, names, size)) < 0)
		length = -errno;
	sleep_until(when);
	reply_attribute(req, names, length, size);
}

static void stat_fs(fuse_req_t req, fuse_ino_t number)
{
	(void)number;
	double when = begin_metadata(STATFS);
	struct statvfs found;
	if (statvfs(".", &found))
		return fail(req, errno, when);
	sleep_until(when);
	fuse_reply_statfs(req, &found);
}

static void init(void *data, struct fuse_conn_info *connection)
{
	(void)data;
	/* A listing brings no attributes on Lustre: each name is asked for. */
	connection->want &= ~(unsigned)(FUSE_CAP_READDIRPLUS | FUSE_CAP_READDIRPLUS_AUTO);
	connection->want |= connection->capable &
			    (FUSE_CAP_SPLICE_WRITE | FUSE_CAP_SPLICE_MOVE | FUSE_CAP_CACHE_SYMLINKS |
			     FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ);
	connection->max_background = MOST_BACKGROUND;
	connection->congestion_threshold = MOST_BACKGROUND;
}

static const struct fuse_lowlevel_ops operations = {
	.init = init,
	.lookup = lookup,
	.forget = forget,
	.getattr = get_attributes,
	.readlink = read_link,
	.open = open_file,
	.read = read_file,
	.release = release,
	.opendir = open_directory,
	.readdir = read_directory,
	.releasedir = release_directory,
	.getxattr = get_attribute,
	.listxattr = list_attributes,
	.statfs = stat_fs,
};

/* -- the program */

/* False at the end of the input. */
static bool receive(struct settings *message)
{
	size_t got = 0;
	while (got < sizeof *message) {
		ssize_t part = read(0, (char *)message + got, sizeof *message - got);
		if (part <= 0)
			return false;
		got += (size_t)part;
	}
	return true;
}

static void answer(void)
{
	/* Who does not read any more has gone, which the input says. */
	if (write(1, "\n", 1) < 0)
		return;
}

/* Unmounts lazily, whatever is under way: the kernel fails it once this process is gone. One thread
 * comes here first, the others wait for its end. */
static _Noreturn void end(struct fuse_session *session, int result)
{
	static pthread_mutex_t once = PTHREAD_MUTEX_INITIALIZER;
	pthread_mutex_lock(&once);
	fuse_session_unmount(session);
	_exit(result);
}

/* A child of the parent may hold the other end of the pipe, so that only its own end is sure. */
static void *obey(void *given)
{
	struct fuse_session *session = given;
	pid_t parent = getppid();
	for (;;) {
		struct pollfd input = {.fd = 0, .events = POLLIN};
		int ready = poll(&input, 1, 1000);
		struct settings message;
		if (ready > 0 && receive(&message)) {
			set(&message);
			answer();
		} else if (ready > 0 || getppid() != parent) {
			end(session, 0);
		}
	}
}

static int weather(char **arguments)
{
	struct settings of = {
		.seed = strtoull(arguments[0], NULL, 10),
		.noise = strtod(arguments[1], NULL),
		.noise_period = strtod(arguments[2], NULL),
	};
	uint64_t count = strtoull(arguments[3], NULL, 10);
	for (uint64_t step = 0; step < count; step++)
		printf("%.17g %.17g\n", (double)step * of.noise_period, share_in(&of, step));
	return 0;
}

static int failed(const char *what)
{
	fprintf(stderr, "pfs_emulator: %s: %s\n", what, strerror(errno));
	return 1;
}

static int serve(struct fuse_session *session)
{
	struct fuse_loop_config *loop = fuse_loop_cfg_create();
	fuse_loop_cfg_set_clone_fd(loop, 1);
	fuse_loop_cfg_set_max_threads(loop, MOST_THREADS);
	fuse_loop_cfg_set_idle_threads(loop, MOST_THREADS);
	sigset_t all, before;
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &before);
	pthread_t control;
	errno = pthread_create(&control, NULL, obey, session);
	pthread_sigmask(SIG_SETMASK, &before, NULL);
	if (errno)
		return failed("control");
	answer();
	return fuse_session_loop_mt(session, loop) < 0;
}

int main(int count, char **arguments)
{
	if (count == 6 && strcmp(arguments[1], "weather") == 0)
		return weather(arguments + 2);
	if (count != 5) {
		fprintf(stderr, "usage: pfs_emulator DIRECTORY MOUNTPOINT OPTIONS COUNTERS\n");
		return 2;
	}
	signal(SIGPIPE, SIG_IGN);
	/* Threads inherit it: the usual 50 us would be a tenth of a metadata operation. */
	prctl(PR_SET_TIMERSLACK, 1);
	if (chdir(arguments[1]))
		return failed(arguments[1]);
	counters = mmap(NULL, COUNTERS * sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED,
			atoi(arguments[4]), 0);
	if (counters == MAP_FAILED)
		return failed("counters");
	buckets = calloc(BUCKETS, sizeof *buckets);
	if (!buckets)
		return failed("memory");
	struct settings first;
	if (!receive(&first)) {
		fprintf(stderr, "pfs_emulator: no settings on standard input\n");
		return 2;
	}
	set(&first);
	char *options[] = {arguments[0], "-o", arguments[3]};
	struct fuse_args given = FUSE_ARGS_INIT(3, options);
	struct fuse_session *session =
		fuse_session_new(&given, &operations, sizeof operations, NULL);
	if (!session || fuse_set_signal_handlers(session))
		return 1;
	if (fuse_session_mount(session, arguments[2]))
		return 1;
	end(session, serve(session));
}
