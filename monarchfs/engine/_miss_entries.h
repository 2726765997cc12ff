/* What is known of small files, and their bytes in memory: what the parts of _misses.c share. All of it is
 * under `source_lock`. */
#ifndef MONARCHFS_MISS_ENTRIES_H
#define MONARCHFS_MISS_ENTRIES_H

#include "_misses.h"
#include "_waiting.h"

enum state {
	REMOTE,
	AHEAD, /* Python wants it, nobody waits for it */
	QUEUED, /* for a source thread */
	READING, /* in one */
};

/* The number, the name and the version are constant. */
struct entry {
	struct entry *next; /* in its bucket */
	struct task task; /* where it is AHEAD or QUEUED */
	uint64_t ino;
	struct miss_version version;
	struct waiter *waiters;
	struct miss_bytes *bytes;
	struct miss_event *wanted; /* by Python: what will tell of it */
	struct entry *older, *newer; /* of those with bytes */
	size_t answered; /* bytes of it */
	unsigned answering; /* threads */
	unsigned generation; /* of the directory */
	unsigned char replica[MISS_REPLICA_BYTES];
	uint16_t directory;
	uint8_t state;
	bool shared; /* other nodes may have it, as `replica` */
	bool excluded; /* Python reads it */
	bool over; /* served from memory while it is open, and then forgotten */
	bool told; /* its bytes wait for Python */
	bool gone; /* not to be found any more */
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
	struct miss_peers peers;
	bool free_opens;
	int events_fd;
	size_t memory, memory_ahead; /* bytes of files; those that nobody but Python has asked for */
} misses;

/* As task.run, of those that are AHEAD or QUEUED. */
void miss_run(struct task *task, struct scratch *scratch);

/* Where the entry is, or would be, in its bucket. */
struct entry **miss_place_of(uint64_t ino);

/* The directory that it lies in; NULL if its number stands for another one by now. */
struct directory *miss_directory_of(const struct entry *entry);
void miss_leave_directory(struct directory *directory);

/* Have a thread take it, AHEAD or QUEUED. False where none comes. */
bool miss_queue(struct entry *entry, enum state state);

/* As far as none has begun. */
void miss_unqueue(struct entry *entry);

/* Python is to know this. */
void miss_report(struct entry *entry, struct miss_event told);

/* All of them are Python's. */
void miss_leave_waiters(struct entry *entry);

/* It is not needed by this thread any more. */
void miss_leave_entry(struct entry *entry);

/* Nobody finds it any more, but who has it open goes on reading what is in memory. */
void miss_forget_unless_open(struct entry **place);

/* Whether there is memory for so much more: what nobody needs just now goes, and what waits for Python is to be
 * read again. */
bool miss_make_room(size_t size);

/* Whether there is memory for the first that is read ahead. */
bool miss_may_read_ahead(const struct task *first);

/* It has bytes from now on. */
void miss_fill(struct entry *entry, struct miss_bytes *bytes);

/* A reader has come to bytes; whether it is the first. */
bool miss_adopt(struct miss_bytes *bytes);
void miss_leave_bytes(struct miss_bytes *bytes);

/* The end of an answer that was begun with `answering` raised. */
void miss_answered(struct entry *entry);

#endif
