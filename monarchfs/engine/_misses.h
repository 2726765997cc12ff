/* Opens and reads of small files that are not cached (cache misses), without Python.
 *
 * Python says what an inode number stands for: a name in an open directory of the source, and a
 * version. A source thread then opens the file, reads all of it, and answers whoever waits; the bytes
 * stay in memory while the file is open, and Python gets them afterwards, many files at a time, to keep
 * them in a tier. Whatever goes wrong (another version, an error, a source that hangs) is left to
 * Python, to which the request looks as if it had just come. Thread-safe. */
#ifndef MONARCHFS_MISSES_H
#define MONARCHFS_MISSES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Larger files are Python's. */
#define MISS_MOST_BYTES (1 << 20)
#define MISS_NAME_BYTES 255
#define MISS_DIRECTORIES 4096

/* On the source's own device. */
struct miss_version {
	uint64_t ino, size;
	int64_t mtime_ns, ctime_ns;
};

/* All bytes of one file. */
struct miss_bytes {
	uint64_t ino;
	unsigned users; /* its entry, events, Python */
	bool ahead; /* nobody has asked for them but Python */
	size_t size;
	char data[];
};

/* Why an event has no bytes; else an errno. */
enum miss_error {
	MISS_CHANGED = -1, /* another version, or nothing, is at its name */
	MISS_ARCHIVED = -2,
	MISS_LEFT = -3, /* it was to be forgotten, or there was no memory: it may be asked for again */
};

/* What was served since the last call. `bytes` (NULL: none) is the receiver's to leave. */
struct miss_event {
	struct miss_event *next;
	uint64_t ino;
	unsigned opens;
	int error;
	uint64_t took_ns; /* in the source */
	struct miss_bytes *bytes;
};

struct miss_options {
	size_t memory_bytes; /* for files that readers want, and half as much for others */
	dev_t device; /* of the source */
	bool keeps; /* events have the bytes that readers wanted */
	bool layouts; /* files may lie in an archive (Lustre HSM): an open alone does not read those */
	int nice; /* of threads that read what nobody waits for; 0: as all others */
};

/* Python wants this. A descriptor that is readable while there are events, or -errno. Once only. */
int misses_start(const struct miss_options *options);

/* Begin, if Python wants it. `no_opens`: there is no OPEN, and the first READ counts as one. */
void misses_serve(bool no_opens);

/* An open directory of the source (duplicated), at `path` below its root, under a number of the caller's, below
 * MISS_DIRECTORIES; what that stood for before is closed when nobody uses it. 0 or -errno. */
int misses_directory(unsigned number, int fd, const char *path);

#define MISS_REPLICA_BYTES 16

/* Other nodes may have the bytes: whether `read` got all of the replica of this name into `to`. It waits for
 * them; `path` is that in the source, NULL: they have it already, or not at all. `asks`: the source is opened, and its version compared, all the same. */
struct miss_peers {
	bool (*read)(const unsigned char *replica, size_t size, const char *path, char *to);
	bool asks;
};

/* Of the capsule with that function. */
#define MISS_PEERS "monarchfs.peers._replicas.read"

/* Once, before misses_serve. */
void misses_peers(const struct miss_peers *peers);

/* `ino` stands for this; `replica` is what other nodes call it, or NULL. False where it cannot be known here. */
bool misses_put(uint64_t ino, unsigned directory, const char *name, size_t length,
		const struct miss_version *version, const unsigned char *replica);
bool misses_has(uint64_t ino);

/* They are not to be served any more: each is resident, or stands for nothing. No open is being answered
 * when this returns; it waits for the kernel to take answers, for nobody else. */
void misses_forget(const uint64_t *inos, size_t count);
void misses_forget_all(void);

/* Python wants all of each file, whether or not anybody asked for it. At most `threads` threads read them, not
 * the threads that readers wait for. One event tells of each, with its bytes or why there are none; none does
 * where `begun` is set to false, or `misses_exclude` ended the fetch. A reader who asks meanwhile is answered
 * from the same read. */
void misses_fetch(const uint64_t *inos, size_t count, unsigned threads, bool *begun);

/* Somebody waits for these, of what was to be fetched: they are read as what readers want is. */
void misses_hurry(const uint64_t *inos, size_t count);

/* Python begins to read the file itself (`excluded`), or ends: meanwhile nothing of it is read from the source
 * here. True if it is being read here already, or its bytes wait for Python. If false, a fetch that was
 * asked for does not happen, and no event comes. */
bool misses_exclude(uint64_t ino, bool excluded);

/* Whether the request, OPEN or READ, is answered, or will be from here. `kept`: the journal has it. */
bool misses_took(const void *request, size_t length, bool kept, uint64_t started_ns);

/* The kernel has closed a handle of `ino`. */
void misses_released(uint64_t ino);

/* What happened, oldest first, to be freed by the caller. */
struct miss_event *misses_events(void);
void misses_leave_bytes(struct miss_bytes *bytes);

#endif
