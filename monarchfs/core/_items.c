/* Hash tables of numbered items. See _items.h. */
#define _GNU_SOURCE
#include "_items.h"

#include <stddef.h>
#include <stdbool.h>
#include <string.h>
#include <sys/mman.h>

#define FIRST_ROOM 4096

static uint32_t bucket_of(uint64_t number)
{
	return (uint32_t)(number * 0x9e3779b97f4a7c15ULL >> 32) % ITEM_BUCKETS;
}

void *items_at(const struct items *items, uint32_t place)
{
	return items->array + (size_t)place * items->bytes;
}

uint32_t items_place(const struct items *items, const void *item)
{
	return (uint32_t)((size_t)((const unsigned char *)item - items->array) / items->bytes);
}

void *items_find(const struct items *items, uint64_t number)
{
	for (uint32_t place = items->buckets[bucket_of(number)]; place;) {
		struct item *item = items_at(items, place);
		if (item->number == number)
			return item;
		place = item->next;
	}
	return NULL;
}

/* Make room for twice as many; what is new is 0. False if there are too many, or there is no memory. */
static bool grow(struct items *items)
{
	if (items->room == items->most)
		return false;
	uint64_t room = items->room ? 2 * (uint64_t)items->room : FIRST_ROOM;
	if (room > items->most)
		room = items->most;
	size_t before = ((size_t)items->room + 1) * items->bytes;
	size_t after = ((size_t)room + 1) * items->bytes;
	void *memory = items->array ?
			       mremap(items->array, before, after, MREMAP_MAYMOVE) :
			       mmap(NULL, after, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	if (memory == MAP_FAILED)
		return false;
	items->array = memory;
	items->room = (uint32_t)room;
	return true;
}

void *items_make(struct items *items, uint64_t number)
{
	struct item *item = items_find(items, number);
	if (item)
		return item;
	uint32_t place = items->dropped, *bucket = &items->buckets[bucket_of(number)];
	if (!place && items->used == items->room && !grow(items))
		return NULL;
	if (!place)
		place = ++items->used;
	item = items_at(items, place);
	items->dropped = item->next; /* 0 in an unused one */
	memset(item, 0, items->bytes);
	item->number = number;
	item->next = *bucket;
	*bucket = place;
	return item;
}

void items_drop(struct items *items, void *dropped)
{
	struct item *item = dropped;
	uint32_t *link = &items->buckets[bucket_of(item->number)], place = *link;
	for (; items_at(items, place) != dropped; place = *link)
		link = &((struct item *)items_at(items, place))->next;
	*link = item->next;
	item->next = items->dropped;
	items->dropped = place;
}
