/* Hash tables of numbered items. See _items.h. */
#define _GNU_SOURCE
#include "_items.h"

#include <stddef.h>
#include <string.h>
#include <sys/mman.h>

static uint32_t bucket_of(uint64_t number)
{
	return (uint32_t)(number * 0x9e3779b97f4a7c15ULL >> 48) % ITEM_BUCKETS;
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

void *items_make(struct items *items, uint64_t number)
{
	struct item *item = items_find(items, number);
	if (item)
		return item;
	if (!items->array) {
		void *memory = mmap(NULL, ((size_t)items->most + 1) * items->bytes,
				    PROT_READ | PROT_WRITE,
				    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
		if (memory == MAP_FAILED)
			return NULL;
		items->array = memory;
	}
	uint32_t place = items->dropped, *bucket = &items->buckets[bucket_of(number)];
	if (!place && items->used == items->most)
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
