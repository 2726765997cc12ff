/* The entries of small files, and their bytes in memory: shared by the parts of _misses.c. `source_lock`
 * guards all of it. */
#ifndef MONARCHFS_MISS_ENTRIES_H
#define MONARCHFS_MISS_ENTRIES_H

#include "_misses.h"
#include "_waiting.h"

enum state {
	REMOTE,
	AHEAD, /* wanted by Python; no reader waits for it */
	WINDOW, /* the same, for the window */
	QUEUED, /* for a source thread */
	READING, /* by a source thread */
};

/* The number, the name and the version are constant. */
struct entry {
	struct entry *next; /* in its bucket */
	struct task task; /* queued while the state is AHEAD, WINDOW or QUEUED */
	uint64_t ino;
	struct miss_version version;
	struct waiter *waiters;
	struct miss_bytes *bytes;
	struct miss_event *wanted; /* the event for a fetch that Python asked for */
	struct entry *older, *newer; /* among entries with bytes */
	size_t answered; /* bytes given to readers */
	unsigned answering; /* threads that are answering with it */
	unsigned generation; /* of the directory */
	unsigned opened_in; /* the batch of events (`events_taken`) that tells of its last open */
	struct miss_replica replica;
	int64_t fresh_until_ns; /* until then an open need not ask the source for the version */
	uint16_t directory;
	uint8_t state;
	bool shared; /* other nodes may have it, as `replica` */
	bool excluded; /* Python reads the file */
	bool over; /* forgotten at the last close; until then served from memory */
	bool told; /* an event with its bytes waits for Python */
	bool gone; /* not in the table any more */
	bool unwanted; /* no reader will come for what is being read into the window */
	char name[];
};

struct directory {
	int fd;
	unsigned generation;
	unsigned users;
	bool replaced;
	char path[]; /* below the source's root */
};

extern struct misses {
	struct miss_options options;
	miss_peers *read_from_peers; /* NULL: there are none */
	bool free_opens;
	int events_fd;
	size_t memory[MISS_OWNERS]; /* bytes of files */
	size_t window_bytes; /* the limit of the window */
	size_t window_asked; /* its bytes that readers have asked for */
	struct miss_window window; /* but for `bytes` */
} misses;

/* The task of an entry that is AHEAD, WINDOW or QUEUED. */
void miss_run(struct task *task, struct scratch *scratch);

/* The link in the bucket that points to the entry, or would. */
struct entry **miss_place_of(uint64_t ino);

/* The entry's directory; NULL if its number stands for another directory by now. */
struct directory *miss_directory_of(const struct entry *entry);
void miss_leave_directory(struct directory *directory);

/* Queue the entry for a thread, as a task of the group. False if no thread can be had. */
bool miss_queue(struct entry *entry, enum state state, uint32_t group);

/* Take it out of the queue, unless a thread has begun. */
void miss_unqueue(struct entry *entry);

/* Queue an event for Python. */
void miss_report(struct entry *entry, struct miss_event told);

/* Leave all requests that wait for the entry to Python. */
void miss_leave_waiters(struct entry *entry);

/* This thread is done with the entry: free it if it is gone and nobody else uses it. */
void miss_leave_entry(struct entry *entry);

/* Take the entry out of the table, unless it is open: then its readers go on reading from memory. */
void miss_forget_unless_open(struct entry **place);

/* Make room in memory for so many bytes; false if there is none. Bytes that nobody needs now are dropped.
 * Bytes that wait for Python are dropped too, and have to be read again. */
bool miss_make_room(size_t size);

/* Whether there is memory for the first file in the queue of those read ahead; of those for the window. As pool.may. */
bool miss_may_read_ahead(const struct task *first);
bool miss_may_fill_window(const struct task *first);

/* Without opens nobody says that a reader is done with a file of which it did not read all. If such files have much of
 * the window, they make room for the next one. To be called when there is a next one, when the window has grown, and
 * when a file was read. */
void miss_make_window_room(void);

/* Give the entry its bytes. */
void miss_fill(struct entry *entry, struct miss_bytes *bytes);

/* A reader uses bytes that were read ahead. True for the first reader. Those of the window stay there. */
bool miss_adopt(struct miss_bytes *bytes);
void miss_leave_bytes(struct miss_bytes *bytes);

/* End an answer: the caller had raised `answering`. */
void miss_answered(struct entry *entry);

#endif
