/* Hash tables of numbered items. A table's items lie in one array, which moves when it grows: a pointer to an item is
 * good until the next items_make. The place of an item that was dropped is given to the next one. Not
 * thread-safe. */
#ifndef MONARCHFS_ITEMS_H
#define MONARCHFS_ITEMS_H

#include <stdint.h>

#define ITEM_BUCKETS (1U << 18)

/* What each item begins with. */
struct item {
	uint64_t number;
	uint32_t next;  /* in its bucket, or of those that were dropped; 0: none */
	uint32_t count; /* the owner's */
};

struct items {
	/* Constant. */
	uint32_t bytes; /* of an item */
	uint32_t most;
	/* Changing. */
	unsigned char *array; /* NULL: none yet */
	uint32_t room; /* items in the array */
	uint32_t used, dropped;
	uint32_t buckets[ITEM_BUCKETS];
};

/* NULL: there is none. */
void *items_find(const struct items *items, uint64_t number);

/* The item with that number, a new one of zeros if there was none. NULL: there are too many, or there is no memory. */
void *items_make(struct items *items, uint64_t number);

void items_drop(struct items *items, void *item);

/* Where an item lies: at most `most`, and never 0. */
uint32_t items_place(const struct items *items, const void *item);
void *items_at(const struct items *items, uint32_t place);

#endif
