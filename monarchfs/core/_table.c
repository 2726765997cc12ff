/* The table of open files. See _table.h and handle_table.py.
 *
 * A worker may be killed between any two instructions. The next one sees what was stored before, in the order of
 * the stores below. Each handle begins and ends with one store, that of `ino`:
 *
 *   - A slot that is taken gets its next generation, and everything else, before its `ino` (release). If the
 *     worker is killed before that, the slot is still free, and its number was not given out. So no number is
 *     given out twice: each has another generation, which is stored before the number is given out.
 *   - A slot that is freed gets `ino` 0. From then on nothing else in it is valid.
 *
 * Two threads may answer one open: the kernel may send a request again under another number (RESENT) while a
 * thread is working on it, and then refuses the answer to the old number. So the slot counts the answers that
 * are on their way, and ends with the last of them if the kernel accepted none: Python has to end what is its own,
 * and no further answer gets that. The kernel may have handles open that an earlier worker added.
 */
#define _GNU_SOURCE
#include "_table.h"

#include "_counts.h"
#include "_resident.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define MAGIC 0x3173666863726e6dULL /* "mnrchfs1" */
#define HEADER_BYTES 4096
#define BUSY_SINCE 1024
#define MOST_THREADS 64

struct header {
	uint64_t magic;
	uint32_t count;
	uint32_t used;
	uint64_t beats;
	uint64_t answered;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct header *header; /* NULL: no table */
static struct slot *slots;
static size_t bytes;
static uint32_t used, *freed, freed_count; /* `used` is not in the table, because others may write there */

static uint64_t number_of(uint32_t index)
{
	return (uint64_t)slots[index].generation << 32 | index;
}

/* Under `lock`. NULL if the handle is not open. */
static struct slot *find(uint64_t number)
{
	uint32_t index = (uint32_t)number;
	if (!header || index >= used || !slots[index].ino ||
	    slots[index].generation != (uint32_t)(number >> 32))
		return NULL;
	return &slots[index];
}

void table_detach(void)
{
	pthread_mutex_lock(&lock);
	struct header *old = header;
	for (uint32_t index = 0; old && index < used; index++)
		if (slots[index].ino)
			inode_close(slots[index].ino);
	free(freed);
	freed = NULL;
	header = NULL;
	used = freed_count = 0;
	pthread_mutex_unlock(&lock);
	if (old)
		munmap(old, bytes);
}

int table_attach(int fd)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return -errno;
	size_t size = (size_t)st.st_size;
	if (size < HEADER_BYTES)
		return -EINVAL;
	struct header *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	if (memory == MAP_FAILED)
		return -errno;
	uint32_t count = memory->count;
	if (memory->magic != MAGIC || size != HEADER_BYTES + (size_t)count * sizeof(*slots) ||
	    memory->used > count) {
		munmap(memory, size);
		return -EINVAL;
	}
	/* Room for all slots: memory that is not touched costs nothing. */
	uint32_t *list = malloc(((size_t)count + 1) * sizeof(*list));
	if (!list) {
		munmap(memory, size);
		return -ENOMEM;
	}
	table_detach();
	pthread_mutex_lock(&lock);
	header = memory;
	slots = (struct slot *)((char *)memory + HEADER_BYTES);
	bytes = size;
	freed = list;
	used = memory->used;
	for (uint32_t index = used; index-- > 0;) {
		slots[index].flags = HELD;
		if (slots[index].ino)
			inode_reopen(slots[index].ino, slots[index].backing_id);
		else
			freed[freed_count++] = index;
	}
	pthread_mutex_unlock(&lock);
	return 0;
}

/* Under `lock`. The handle that an earlier worker added for the request before it died without an answer. */
static struct slot *made_before(uint64_t ino, uint64_t unique)
{
	for (uint32_t index = 0; index < used; index++)
		if (slots[index].unique == unique && slots[index].ino == ino)
			return &slots[index];
	return NULL;
}

static int add(uint64_t ino, uint64_t unique, uint32_t backing_id, uint64_t flags, uint64_t *number)
{
	if (!header)
		return -ENFILE;
	if (unique & RESENT) {
		unique &= ~RESENT;
		struct slot *before = made_before(ino, unique);
		if (before) {
			before->flags = (before->flags | (flags & OWNED)) + (flags & ANSWERING);
			*number = number_of((uint32_t)(before - slots));
			return 1;
		}
	}
	uint32_t index;
	if (freed_count) {
		index = freed[--freed_count];
	} else if (used < header->count) {
		index = used++;
		header->used = used;
	} else {
		return -ENFILE;
	}
	struct slot *slot = &slots[index];
	slot->unique = unique;
	slot->generation = slot->generation == UINT32_MAX ? 1 : slot->generation + 1;
	slot->backing_id = backing_id;
	slot->flags = flags;
	__atomic_store_n(&slot->ino, ino, __ATOMIC_RELEASE);
	*number = number_of(index);
	return 0;
}

int table_add(uint64_t ino, uint64_t unique, uint64_t flags, uint64_t *number, uint32_t *backing_id)
{
	/* First, so that neither the replica nor its backing file is taken away between the two. */
	if (!inode_open(ino, backing_id))
		return -ENFILE;
	pthread_mutex_lock(&lock);
	int result = add(ino, unique, *backing_id, flags, number);
	pthread_mutex_unlock(&lock);
	if (result)
		inode_close(ino);
	counts_add(COUNT_BACKED_OPENS, !result && *backing_id);
	return result;
}

/* Under `lock`. Returns its inode number. */
static uint64_t end(struct slot *slot)
{
	uint64_t ino = slot->ino;
	__atomic_store_n(&slot->ino, 0, __ATOMIC_RELEASE);
	freed[freed_count++] = (uint32_t)(slot - slots);
	return ino;
}

uint64_t table_end(uint64_t number, bool unowned, bool *owned)
{
	pthread_mutex_lock(&lock);
	struct slot *slot = find(number);
	if (owned)
		*owned = slot && slot->flags & OWNED;
	uint64_t ino = slot && !(unowned && slot->flags & OWNED) ? end(slot) : 0;
	pthread_mutex_unlock(&lock);
	if (ino)
		inode_close(ino);
	return ino;
}

bool table_opened(uint64_t number, bool accepted)
{
	bool owned = false;
	uint64_t ino = 0;
	pthread_mutex_lock(&lock);
	struct slot *slot = find(number); /* NULL if the kernel has released it already */
	if (slot) {
		slot->flags = (slot->flags | (accepted ? HELD : 0)) - ANSWERING;
		bool over = slot->flags < ANSWERING && !(slot->flags & HELD);
		owned = over && slot->flags & OWNED;
		slot->unique = owned ? 0 : slot->unique;
		ino = over && !owned ? end(slot) : 0;
	}
	pthread_mutex_unlock(&lock);
	if (ino)
		inode_close(ino);
	return owned;
}

uint64_t table_ino(uint64_t number)
{
	pthread_mutex_lock(&lock);
	const struct slot *slot = find(number);
	uint64_t ino = slot ? slot->ino : 0;
	pthread_mutex_unlock(&lock);
	return ino;
}

bool table_own(uint64_t number)
{
	pthread_mutex_lock(&lock);
	struct slot *slot = find(number);
	if (slot)
		slot->flags |= OWNED | HELD;
	pthread_mutex_unlock(&lock);
	return slot;
}

uint64_t table_next(size_t *index, struct slot *slot)
{
	uint64_t number = 0;
	pthread_mutex_lock(&lock);
	for (; !number && header && *index < used; ++*index) {
		*slot = slots[*index];
		if (slot->ino)
			number = number_of((uint32_t)*index);
	}
	pthread_mutex_unlock(&lock);
	return number;
}

size_t table_length(void)
{
	pthread_mutex_lock(&lock);
	size_t length = used - freed_count;
	pthread_mutex_unlock(&lock);
	return length;
}

void table_busy(unsigned thread, uint64_t since_ns)
{
	struct header *now = header;
	if (now && thread < MOST_THREADS)
		__atomic_store_n((uint64_t *)((char *)now + BUSY_SINCE) + thread, since_ns,
				 __ATOMIC_RELAXED);
}

void table_answered(void)
{
	struct header *now = header;
	if (now)
		__atomic_fetch_add(&now->answered, 1, __ATOMIC_RELAXED);
}
