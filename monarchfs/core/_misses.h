/* Opens and reads of small files that are not cached (cache misses), without Python.
 *
 * Python says what an inode number stands for: a name in an open directory of the source, and a
 * version. A source thread then opens the file, reads all of it, and answers the requests that wait.
 * The bytes stay in memory while the file is open. Python gets them afterwards, many files at a time, and
 * stores them in a tier. If anything goes wrong (another version, an error, a source that hangs), the
 * request is left to Python, to which it looks as if it had just come. Thread-safe. */
#ifndef MONARCHFS_MISSES_H
#define MONARCHFS_MISSES_H

#include "_small_file.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

/* Larger files are Python's, unless they are in the window. */
#define MISS_MOST_BYTES (1 << 20)
#define MISS_NAME_BYTES 255

/* Whose memory bytes take: each has a limit of its own. */
enum miss_owner {
	OF_READERS,
	OF_PYTHON, /* read ahead of readers, to be stored: only Python has asked for them */
	OF_WINDOW, /* read ahead of readers, to be kept until they were read */
	MISS_OWNERS,
};

/* All bytes of one file. */
struct miss_bytes {
	uint64_t ino;
	unsigned users; /* references: its entry, events, Python */
	uint8_t owner;
	bool unread; /* in the window, and nobody has asked for them */
	size_t size;
	char data[];
};

/* A file that was served. The receiver releases `bytes` (NULL: none) with misses_leave_bytes. */
struct miss_event {
	struct miss_event *next;
	uint64_t ino;
	unsigned opens;
	bool spared; /* a peer gave the bytes, and the source was not asked */
	bool from_window; /* the bytes were there before the open */
	int error;
	uint64_t took_ns; /* in the source */
	struct miss_bytes *bytes;
};

struct miss_options {
	size_t memory_bytes; /* for files that readers want; half as much on top for others */
	dev_t device; /* of the source */
	bool keeps; /* events carry the bytes that readers wanted */
	bool layouts; /* files may be in an archive (Lustre HSM): opening one does not read it then */
	int nice; /* of the threads that read ahead of readers; 0: the same as all others */
};

/* Called once, by Python. Returns a descriptor that is readable while there are events, or -errno. */
int misses_start(const struct miss_options *options);

/* Begin to serve, if misses_start was called. `no_opens`: the kernel sends no OPEN; the first READ counts as
 * one. */
void misses_serve(bool no_opens);

#define MISS_REPLICA_BYTES 16

/* A file that another node may have: the name of its replica, and its path in the source. `ahead`: no reader waits
 * for it, and Python has asked its owner for it. */
struct miss_wanted {
	const unsigned char *replica;
	size_t size;
	const char *path;
	bool ahead;
};

/* Read the file into `to` from another node, and wait for that; false if not all of it came. `source_ns` is what the
 * source takes for a file, 0: not known. */
typedef bool miss_peers(const struct miss_wanted *file, uint64_t source_ns, char *to);

/* The name of the capsule with that function. */
#define MISS_PEERS "monarchfs.peers._replicas.read"

/* Once, before misses_serve. */
void misses_peers(miss_peers *read);

/* Files may be open already: those of which Python learned the attributes in that way. Once, before misses_serve. */
void misses_opened(small_opened *take);

/* Enter what `ino` stands for. Until `fresh_until_ns` (see resident_fresh) an open of bytes that are here, or that
 * another node has, need not ask the source for the version. `replica`: the name under which other nodes may have it
 * (MISS_REPLICA_BYTES); NULL: none has. False if there is no room. */
bool misses_put(uint64_t ino, unsigned directory, const char *name, size_t length, const struct miss_version *version,
		int64_t fresh_until_ns, const unsigned char *replica);

/* Whether it is entered, and still fresh if other nodes may have it. */
bool misses_has(uint64_t ino);

/* Serve these no more: each is resident, or stands for nothing. When this returns, no open of them is being
 * answered. It waits for the kernel to take answers, and for nothing else. */
void misses_forget(const uint64_t *inos, size_t count);
void misses_forget_all(void);

/* Python wants all of each file, whether or not anybody asked for it. At most `threads` threads read them, not
 * the threads that readers wait for. One event tells of each, with its bytes or why there are none; none does
 * where `begun` is set to false, or `misses_exclude` ended the fetch. A reader who asks meanwhile is answered
 * from the same read. `fresh_until_ns` of each as in misses_put. */
void misses_fetch(const uint64_t *inos, const int64_t *fresh_until_ns, size_t count, unsigned threads, bool *begun);

/* A reader waits for these files that are to be fetched: they are read like files that readers want. */
void misses_hurry(const uint64_t *inos, size_t count);

/* Python begins to read the file itself (`excluded`), or ends: meanwhile nothing of it is read from the source
 * here. True if it is being read here already, or its bytes wait for Python. If false, a fetch that was
 * asked for does not happen, and no event comes. */
bool misses_exclude(uint64_t ino, bool excluded);

/* -- the window: files that readers are about to want, in memory until they were read */

/* Since the start, but for `bytes`. */
struct miss_window {
	uint64_t bytes; /* in memory now, or being read */
	uint64_t read, read_bytes, took_ns; /* files brought here, and how long the source took for them in all */
	uint64_t waited; /* requests that waited for a file that was being read */
	uint64_t hits, hit_bytes; /* files that were asked for when they were here, or being read */
	uint64_t wasted, wasted_bytes; /* files that nobody had asked for when they were given up */
};

/* The limit of its memory; 0: it takes nothing more. */
void misses_window_limit(size_t bytes);

/* Read each file into the window, in this order, by at most `threads` threads, which have the source to themselves
 * with all others. No event tells of it, until it is opened. A file whose open is in an event that Python has not
 * taken yet is left out. `fresh_until_ns` as in misses_fetch. `begun`: whether it is there, or will be. */
void misses_window(const uint64_t *inos, const int64_t *fresh_until_ns, size_t count, unsigned threads, bool *begun);

/* Nobody will read these: give up what nobody has asked for. */
void misses_window_drop(const uint64_t *inos, size_t count);

void misses_window_state(struct miss_window *state);

/* What the source takes for a small file, on average; 0: not known. */
uint64_t misses_source_ns(void);

/* Whether readers read only the headers of files, of those of 256 KiB or more. */
bool misses_headers(void);

/* Take an OPEN or a READ: true if it is answered, or will be. `kept`: the journal has it. */
bool misses_took(const void *request, size_t length, bool kept, uint64_t started_ns);

/* The kernel has closed a handle of `ino`. */
void misses_released(uint64_t ino);

/* The events since the last call, oldest first. The caller frees them. */
struct miss_event *misses_events(void);
void misses_leave_bytes(struct miss_bytes *bytes);

#endif
