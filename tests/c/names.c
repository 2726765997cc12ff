/* Names that are looked up while others put, replace and forget them: for a sanitizer. Whoever looks one
 * up sees what it stands for until he is done, and never what had been forgotten before. The argument:
 * how many look-ups. */
#define _GNU_SOURCE
#include "../../monarchfs/engine/_names.h"

#include "check.h"

#include <pthread.h>
#include <stdatomic.h>
#include <string.h>

#define NAMES 50
#define MORE 140000 /* than there is room for */
#define DIRECTORY 7
#define HOUR_NS 3600000000000ULL
#define LOOKERS 3

static unsigned lookups;
static _Atomic uint64_t stands_for[NAMES]; /* 0: nothing that may be answered */
static _Atomic bool over;
static _Atomic unsigned found;

static size_t name_of(unsigned number, char *name)
{
	return (size_t)snprintf(name, 16, "name %u", number);
}

static void put(unsigned number, uint64_t ino)
{
	char name[16];
	size_t length = name_of(number, name);
	const struct fuse_attr attr = {.ino = ino, .size = ino * 3};
	names_put(DIRECTORY, name, length, &attr, HOUR_NS);
}

static bool enter(uint64_t parent, unsigned number, struct fuse_entry_out *out)
{
	char name[16];
	size_t length = name_of(number, name);
	return names_enter(parent, name, length, out);
}

static void forget(unsigned number)
{
	char name[16];
	size_t length = name_of(number, name);
	names_forget(DIRECTORY, name, length);
}

static void *look_up(void *seed_of)
{
	unsigned seed = (unsigned)(uintptr_t)seed_of;
	struct fuse_entry_out out;
	for (unsigned i = 0; i < lookups || !found; i++) { /* on a busy machine `change` begins late */
		unsigned number = (unsigned)rand_r(&seed) % NAMES;
		if (!enter(DIRECTORY, number, &out))
			continue;
		CHECK(out.nodeid == stands_for[number] && out.attr.ino == out.nodeid);
		CHECK(out.attr.size == out.nodeid * 3);
		CHECK(out.entry_valid && out.entry_valid <= 3600);
		names_leave();
		found++;
	}
	return NULL;
}

/* The only one that changes them: two names stand for each number. */
static void *change(void *unused)
{
	unsigned seed = 99;
	for (uint64_t ino = 100; !over; ino++) {
		unsigned number = (unsigned)rand_r(&seed) % (NAMES / 2), other = number + NAMES / 2;
		switch (rand_r(&seed) % 8) {
		case 0:
			names_forget_all();
			for (unsigned i = 0; i < NAMES; i++)
				stands_for[i] = 0;
			break;
		case 1:
			names_forget_ino(stands_for[number]);
			stands_for[number] = 0;
			stands_for[other] = 0;
			break;
		default:
			forget(number);
			forget(other);
			stands_for[number] = stands_for[other] = ino;
			put(number, ino);
			put(other, ino);
		}
	}
	(void)unused;
	return NULL;
}

/* The oldest go. */
static void fill(void)
{
	struct fuse_entry_out out;
	unsigned kept = 0;
	for (unsigned number = 0; number < MORE; number++)
		put(number, number + 1);
	for (unsigned number = 0; number < MORE; number++) {
		if (!enter(DIRECTORY, number, &out)) {
			CHECK(!kept);
			continue;
		}
		CHECK(out.nodeid == number + 1);
		names_leave();
		kept++;
	}
	CHECK(kept == 1 << 17);
	CHECK(!enter(DIRECTORY + 1, MORE - 1, &out));
	put(MORE - 1, 5);
	CHECK(enter(DIRECTORY, MORE - 1, &out) && out.nodeid == 5);
	names_leave();
	names_forget_all();
	CHECK(!enter(DIRECTORY, MORE - 1, &out));
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	lookups = (unsigned)atoi(arguments[1]);
	fill();
	pthread_t lookers[LOOKERS], changer;
	CHECK(pthread_create(&changer, NULL, change, NULL) == 0);
	for (uintptr_t i = 0; i < LOOKERS; i++)
		CHECK(pthread_create(&lookers[i], NULL, look_up, (void *)(i + 1)) == 0);
	for (int i = 0; i < LOOKERS; i++)
		CHECK(pthread_join(lookers[i], NULL) == 0);
	over = true;
	CHECK(pthread_join(changer, NULL) == 0);
	CHECK(found);
	names_forget_all();
	puts("done");
	return 0;
}
