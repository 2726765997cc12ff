/* A directory seen as a client of a busy parallel file system would see it: bytes come at a limited
 * rate, operations take time, other people's load comes and goes, and everything asked is counted.
 * bench/pfs.py starts it, and docs/BENCHMARKS.md says what is modelled.
 *
 *     pfs_emulator DIRECTORY MOUNTPOINT OPTIONS COUNTERS
 *     pfs_emulator weather SEED NOISE PERIOD COUNT
 *
 * COUNTERS is the number of an inherited descriptor of shared memory: uint64_t in the order of enum
 * counter. Standard input takes `struct settings`, each answered with a byte on standard output, the
 * first when the mount is made. The input's end, or the parent's, unmounts and ends the program.
 *
 * When a request comes, the time of its answer is computed; its thread does the work meanwhile, and
 * sleeps until then. */
#define FUSE_USE_VERSION 312
#define _GNU_SOURCE
#include "pfs_emulator_layout.h"
#include "pfs_emulator_plan.h"
#include "pfs_emulator_tree.h"

#include <fuse_lowlevel.h>

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/xattr.h>
#include <unistd.h>

#ifndef VALID_SECONDS
#define VALID_SECONDS 86400.0 /* of names and attributes: a lock that nobody revokes */
#endif
#define MOST_THREADS 128
#define MOST_BACKGROUND 64 /* reads ahead that the kernel sends before it waits */
#define MOST_HUNG 1024 /* the same two, where targets may hang */
#define LISTING_BYTES (1 << 20) /* of a directory in one answer of the server */
#define PRIORITY -10
#define READ_BYTES_AT_ONCE (1 << 20)

/* -- operations */

static void fail(fuse_req_t req, int error, double when)
{
	sleep_until(when);
	fuse_reply_err(req, error);
}

/* The layout of a file, if files have one. */
static bool has_layout(const char *path, const struct stat *found, struct layout *layout)
{
	uint64_t targets = plan_targets();
	if (!targets || !S_ISREG(found->st_mode))
		return false;
	*layout = layout_of(path, found, targets);
	return true;
}

/* Waits for the archive, and for the targets that have these bytes; 0 or an errno. */
static int wait_for_bytes(struct layout layout, const struct stat *found, off_t offset, size_t size)
{
	if (layout.released) {
		bool first;
		double when = layout_recall(found, plan_now(), plan_recall_seconds(), &first);
		plan_count(RECALL, first);
		sleep_until(when);
		layout.released = false;
	}
	return plan_wait_for(layout_targets(&layout, plan_targets(), offset, size));
}

/* The size of a file is asked of each of its targets; what only an archive has is counted as one block. */
static int glimpse(const char *path, struct stat *found)
{
	struct layout layout;
	if (!has_layout(path, found, &layout))
		return 0;
	if (layout.released) {
		found->st_blocks = 1;
		return 0;
	}
	plan_count(GLIMPSE, layout.stripes);
	uint64_t all = (uint64_t)layout.stripes * layout.stripe_bytes;
	return plan_wait_for(layout_targets(&layout, plan_targets(), 0, all));
}

static void lookup(fuse_req_t req, fuse_ino_t parent, const char *name)
{
	double when = plan_metadata(LOOKUP);
	struct layout layout;
	plan_count(ENQUEUE, 1);
	char path[PATH_MAX];
	struct fuse_entry_param entry = {
		.attr_timeout = VALID_SECONDS,
		.entry_timeout = VALID_SECONDS,
	};
	int error = tree_path(parent, name, path);
	if (!error && lstat(path, &entry.attr))
		error = errno;
	if (error)
		return fail(req, error, when);
	/* The metadata server does not know how large it is. */
	if (has_layout(path, &entry.attr, &layout)) {
		entry.attr_timeout = layout.released ? VALID_SECONDS : 0;
		entry.attr.st_blocks = layout.released ? 1 : entry.attr.st_blocks;
	}
	entry.ino = tree_look_up(parent, name, &entry.attr);
	if (!entry.ino)
		return fail(req, ENOMEM, when);
	tree_looked_up(entry.ino, fuse_req_ctx(req)->pid);
	sleep_until(when);
	fuse_reply_entry(req, &entry);
}

static void forget(fuse_req_t req, fuse_ino_t number, uint64_t lookups)
{
	tree_forget(number, lookups);
	fuse_reply_none(req);
}

static void get_attributes(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	(void)file;
	double when = plan_metadata(GETATTR);
	char path[PATH_MAX];
	struct stat found;
	int error = tree_path(number, NULL, path);
	tree_take_thread(number);
	if (!error && lstat(path, &found))
		error = errno;
	if (!error)
		error = glimpse(path, &found);
	if (error)
		return fail(req, error, when);
	sleep_until(when);
	fuse_reply_attr(req, &found, VALID_SECONDS);
}

static void read_link(fuse_req_t req, fuse_ino_t number)
{
	/* The attributes' RPC brings the target, too. */
	double when = plan_metadata(GETATTR);
	char path[PATH_MAX];
	char target[PATH_MAX];
	ssize_t length = -1;
	int error = tree_path(number, NULL, path);
	if (!error && (length = readlink(path, target, sizeof target - 1)) < 0)
		error = errno;
	if (error)
		return fail(req, error, when);
	target[length] = 0;
	sleep_until(when);
	fuse_reply_readlink(req, target);
}

struct opened {
	int fd;
	bool has_layout;
	struct layout layout;
	struct stat found;
};

static void close_file(struct opened *opened)
{
	close(opened->fd);
	free(opened);
}

static void open_file(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	double when = plan_metadata(OPEN);
	char path[PATH_MAX];
	struct opened *opened = NULL;
	int error = tree_path(number, NULL, path);
	/* A look-up with the intent to open is one request. */
	if (tree_take_thread(number) != fuse_req_ctx(req)->pid)
		plan_count(ENQUEUE, 1);
	if (!error && (file->flags & O_ACCMODE) != O_RDONLY)
		error = EROFS;
	int fd = -1;
	if (!error && (fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW)) < 0)
		error = errno;
	if (!error && !(opened = calloc(1, sizeof *opened))) {
		error = ENOMEM;
		close(fd);
	}
	if (error)
		return fail(req, error, when);
	opened->fd = fd;
	fstat(fd, &opened->found);
	opened->has_layout = has_layout(path, &opened->found, &opened->layout);
	file->fh = (uintptr_t)opened;
	file->keep_cache = 1;
	sleep_until(when);
	if (fuse_reply_open(req, file) == -ENOENT)
		close_file(opened); /* interrupted: no release will come */
}

static struct opened *opened_of(const struct fuse_file_info *file)
{
	return (struct opened *)(uintptr_t)file->fh;
}

/* Copied while it waits: splice would need a larger pipe than a process without CAP_SYS_RESOURCE may
 * have, and without one libfuse allocates and frees as much for each answer. */
static void read_file(fuse_req_t req, fuse_ino_t number, size_t size, off_t offset,
		      struct fuse_file_info *file)
{
	(void)number;
	const struct opened *opened = opened_of(file);
	static _Thread_local char *buffer;
	if (!buffer && !(buffer = malloc(READ_BYTES_AT_ONCE))) {
		fuse_reply_err(req, ENOMEM);
		return;
	}
	int error = opened->has_layout ? wait_for_bytes(opened->layout, &opened->found, offset, size) : 0;
	double began = plan_now();
	ssize_t got = error ? -1 : pread(opened->fd, buffer, size, offset);
	if (got < 0) {
		fuse_reply_err(req, error ? error : errno);
		return;
	}
	sleep_until(plan_read(began, (size_t)got));
	fuse_reply_buf(req, buffer, (size_t)got);
}

static void release(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	(void)number;
	plan_count(CLOSE, 1);
	close_file(opened_of(file));
	fuse_reply_err(req, 0);
}

/* Each target is asked. */
static void seek(fuse_req_t req, fuse_ino_t number, off_t offset, int whence, struct fuse_file_info *file)
{
	(void)number;
	const struct opened *opened = opened_of(file);
	size_t all = (size_t)opened->found.st_size;
	plan_count(SEEK, 1);
	int error = opened->has_layout ? wait_for_bytes(opened->layout, &opened->found, 0, all) : 0;
	off_t found = error ? -1 : lseek(opened->fd, offset, whence);
	if (found < 0)
		fuse_reply_err(req, error ? error : errno);
	else
		fuse_reply_lseek(req, found);
}

struct listing {
	DIR *stream;
	struct dirent *entry; /* read, and not yet handed out */
	off_t offset; /* where the stream is */
	size_t left; /* bytes that the last answer of the server still has */
};

static void open_directory(fuse_req_t req, fuse_ino_t number, struct fuse_file_info *file)
{
	double when = plan_metadata(OPENDIR);
	plan_count(ENQUEUE, 1);
	char path[PATH_MAX];
	int error = tree_path(number, NULL, path);
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
		sleep_until(plan_metadata(READDIR));
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

static ssize_t lustre_value(const char *path, char *value)
{
	struct stat found;
	struct layout layout;
	if (lstat(path, &found))
		return -errno;
	return has_layout(path, &found, &layout) ? layout_value(&layout, plan_targets(), value) : -ENODATA;
}

static ssize_t attribute_value(const char *path, const char *name, char *value)
{
	if (plan_targets() && strcmp(name, LUSTRE_ATTRIBUTE) == 0)
		return lustre_value(path, value);
	if (strcmp(name, LAYOUT_ATTRIBUTE) == 0)
		return -ENODATA;
	ssize_t length = lgetxattr(path, name, value, XATTR_SIZE_MAX);
	return length < 0 ? -errno : length;
}

static void get_attribute(fuse_req_t req, fuse_ino_t number, const char *name, size_t size)
{
	/* A client knows the layout of what it has opened. */
	bool known = plan_targets() && strcmp(name, LUSTRE_ATTRIBUTE) == 0;
	double when = known ? plan_now() : plan_metadata(XATTR);
	char path[PATH_MAX];
	char value[XATTR_SIZE_MAX];
	plan_count(ENQUEUE, !known);
	ssize_t length = -tree_path(number, NULL, path);
	if (!length)
		length = attribute_value(path, name, value);
	if (size && length > (ssize_t)size)
		length = -ERANGE;
	sleep_until(when);
	reply_attribute(req, value, length, size);
}

/* As Lustre lists them: with its own one, without ours. */
static ssize_t shown_names(const char *path, char *names, ssize_t length)
{
	char own[XATTR_SIZE_MAX];
	ssize_t kept = 0;
	for (ssize_t at = 0; at < length;) {
		ssize_t size = (ssize_t)strlen(names + at) + 1;
		if (strcmp(names + at, LAYOUT_ATTRIBUTE)) {
			memmove(names + kept, names + at, (size_t)size);
			kept += size;
		}
		at += size;
	}
	if (plan_targets() && lustre_value(path, own) > 0) {
		memcpy(names + kept, LUSTRE_ATTRIBUTE, sizeof LUSTRE_ATTRIBUTE);
		kept += (ssize_t)sizeof LUSTRE_ATTRIBUTE;
	}
	return kept;
}

static void list_attributes(fuse_req_t req, fuse_ino_t number, size_t size)
{
	double when = plan_metadata(XATTR);
	plan_count(ENQUEUE, 1);
	char path[PATH_MAX];
	char names[XATTR_LIST_MAX + sizeof LUSTRE_ATTRIBUTE];
	ssize_t length = -tree_path(number, NULL, path);
	if (!length && (length = llistxattr(path, names, XATTR_LIST_MAX)) < 0)
		length = -errno;
	if (length >= 0)
		length = shown_names(path, names, length);
	if (size && length > (ssize_t)size)
		length = -ERANGE;
	sleep_until(when);
	reply_attribute(req, names, length, size);
}

static void stat_fs(fuse_req_t req, fuse_ino_t number)
{
	(void)number;
	double when = plan_metadata(STATFS);
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
	/* Nothing changes, and a read of one target need not ask the others for the size. */
	connection->want &= ~(unsigned)FUSE_CAP_AUTO_INVAL_DATA;
	connection->want |= connection->capable & (FUSE_CAP_CACHE_SYMLINKS |
						   FUSE_CAP_PARALLEL_DIROPS | FUSE_CAP_ASYNC_READ);
	connection->max_read = READ_BYTES_AT_ONCE;
	connection->max_background = plan_targets() ? MOST_HUNG : MOST_BACKGROUND;
	connection->congestion_threshold = connection->max_background;
}

static const struct fuse_lowlevel_ops operations = {
	.init = init,
	.lookup = lookup,
	.forget = forget,
	.getattr = get_attributes,
	.readlink = read_link,
	.open = open_file,
	.read = read_file,
	.lseek = seek,
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

/* Who started this. It may end before a thread first runs. */
static pid_t parent;

/* A child of the parent may hold the other end of the pipe, so that only its own end is sure. */
static void *obey(void *given)
{
	struct fuse_session *session = given;
	for (;;) {
		struct pollfd input = {.fd = 0, .events = POLLIN};
		int ready = poll(&input, 1, 1000);
		struct settings message;
		if (ready > 0 && receive(&message)) {
			plan_set(&message);
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
		printf("%.17g %.17g\n", (double)step * of.noise_period, plan_share(&of, step));
	return 0;
}

static int failed(const char *what)
{
	fprintf(stderr, "pfs_emulator: %s: %s\n", what, strerror(errno));
	return 1;
}

/* Each file that is open in the mount is open here. */
static void open_as_many_as_may_be(void)
{
	struct rlimit files;
	if (getrlimit(RLIMIT_NOFILE, &files) == 0) {
		files.rlim_cur = files.rlim_max;
		setrlimit(RLIMIT_NOFILE, &files);
	}
}

static int serve(struct fuse_session *session)
{
	struct fuse_loop_config *loop = fuse_loop_cfg_create();
	fuse_loop_cfg_set_clone_fd(loop, 1);
	fuse_loop_cfg_set_max_threads(loop, plan_targets() ? MOST_HUNG : MOST_THREADS);
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
	parent = getppid();
	signal(SIGPIPE, SIG_IGN);
	/* Threads inherit it: the usual 50 us would be a tenth of a metadata operation. */
	prctl(PR_SET_TIMERSLACK, 1);
	/* A server does not wait for the processors of its clients; only root may say so. */
	setpriority(PRIO_PROCESS, 0, PRIORITY);
	open_as_many_as_may_be();
	if (chdir(arguments[1]))
		return failed(arguments[1]);
	if (plan_count_in(atoi(arguments[4])))
		return failed("counters");
	if (tree_begin())
		return failed("memory");
	struct settings first;
	if (!receive(&first)) {
		fprintf(stderr, "pfs_emulator: no settings on standard input\n");
		return 2;
	}
	plan_set(&first);
	char most[32];
	snprintf(most, sizeof most, "-omax_read=%d", READ_BYTES_AT_ONCE);
	char *options[] = {arguments[0], most, "-o", arguments[3]};
	struct fuse_args given = FUSE_ARGS_INIT(4, options);
	struct fuse_session *session =
		fuse_session_new(&given, &operations, sizeof operations, NULL);
	if (!session || fuse_set_signal_handlers(session))
		return 1;
	if (fuse_session_mount(session, arguments[2]))
		return 1;
	end(session, serve(session));
}
