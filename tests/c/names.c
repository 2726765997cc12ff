/* Names that are looked up while others put, replace and forget them: for a sanitizer. Whoever looks one
 * up sees what it stands for until he is done, and never what had been forgotten before. The argument:
 * how many look-ups. NAMES_BYTES is the room for names. */
#include "../../monarchfs/core/_names.h"

#include "check.h"

#include <stdatomic.h>

#define NAMES 50
#define MORE (NAMES_BYTES / 36) /* than there is room for */
#define KNOWN 3000              /* the names of `compare` */
#define DIRECTORY 7
#define HOUR_NS 3600000000000ULL
#define LOOKERS 3

static unsigned lookups;
static _Atomic uint64_t stands_for[NAMES]; /* 0: nothing that may be answered */
static _Atomic bool over;
static _Atomic unsigned found;

int __real_madvise(void *from, size_t bytes, int advice);
/* The linker's --wrap: madvise(2) takes whole pages, and would clear what shares the last one with the names. */
int __wrap_madvise(void *from, size_t bytes, int advice)
{
	const size_t page = (size_t)sysconf(_SC_PAGESIZE);
	CHECK((uintptr_t)from % page == 0 && bytes % page == 0);
	return __real_madvise(from, bytes, advice);
}

long __real_sysconf(int name);
/* With -DPAGE_OF: as on a kernel with larger pages. */
long __wrap_sysconf(int name)
{
#ifdef PAGE_OF
	if (name == _SC_PAGESIZE)
		return PAGE_OF;
#endif
	return __real_sysconf(name);
}

static size_t name_of(unsigned number, char *name)
{
	return (size_t)snprintf(name, 16, "name %06u", number);
}

static void put(unsigned number, uint64_t ino)
{
	char name[16];
	const struct fuse_attr attr = {.ino = ino, .size = ino * 3};
	names_put(DIRECTORY, name, name_of(number, name), &attr, HOUR_NS, 0);
}

static bool enter(uint64_t parent, unsigned number, struct fuse_entry_out *out)
{
	char name[16];
	return names_enter(parent, name, name_of(number, name), out);
}

static void forget(unsigned number)
{
	char name[16];
	names_forget(DIRECTORY, name, name_of(number, name));
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
	return unused;
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
	CHECK(kept > MORE / 5 * 4 && kept < MORE);
	CHECK(!enter(DIRECTORY + 1, MORE - 1, &out));
	CHECK(!enter(DIRECTORY + (1ULL << 32), MORE - 1, &out));
	put(MORE - 1, 5);
	CHECK(enter(DIRECTORY, MORE - 1, &out) && out.nodeid == 5);
	names_leave();
	names_forget_all();
	CHECK(!enter(DIRECTORY, MORE - 1, &out));
}

static struct fuse_attr should_be[KNOWN]; /* ino 0: unknown */

static size_t long_name_of(unsigned number, char *name)
{
	size_t length = name_of(number, name), whole = number % 10 ? length : 16 + number % 240;
	for (; length < whole; length++)
		name[length] = 'x';
	return length;
}

/* Whether it is known; what is known is true. */
static bool is_known(unsigned number)
{
	char name[256];
	struct fuse_entry_out out;
	if (!names_enter(DIRECTORY, name, long_name_of(number, name), &out))
		return false;
	CHECK(should_be[number].ino && out.nodeid == should_be[number].ino);
	CHECK(memcmp(&out.attr, &should_be[number], sizeof(out.attr)) == 0);
	names_leave();
	return true;
}

static struct fuse_attr any_attr(unsigned *seed, uint64_t ino)
{
	uint64_t size = (uint64_t)rand_r(seed) << (unsigned)rand_r(seed) % 20;
	if (rand_r(seed) % 4 == 0)
		size >>= 20;
	uint64_t time = (uint64_t)rand_r(seed) - (rand_r(seed) % 8 ? 0 : 4000000000);
	struct fuse_attr attr = {
		.ino = ino, .size = size, .blocks = (size + 4095) / 4096 * 8, .mode = 0100644,
		.nlink = 1, .blksize = 4096, .mtime = time, .ctime = time, .atime = time,
	};
	if (rand_r(seed) % 2)
		attr.uid = (uint32_t)rand_r(seed) % 600; /* more than there are classes */
	if (rand_r(seed) % 4 == 0)
		attr.blocks += 8;
	if (rand_r(seed) % 4 == 0)
		attr.atimensec = (uint32_t)rand_r(seed) % 1000000000;
	if (rand_r(seed) % 4 == 0)
		attr.ctime++;
	if (rand_r(seed) % 4 == 0)
		attr.mtimensec = 999999999;
	return attr;
}

/* Some names stand for the same file; some numbers take more than 32 bits. */
static uint64_t number_of(uint64_t step)
{
	uint64_t number = step - step % 3 + 1;
	return number % 5 ? number : number << 30;
}

/* With a plain table. */
static void compare(void)
{
	char name[256];
	unsigned seed = 5, known = 0;
	for (uint64_t step = 1; step < 40 * KNOWN; step++) {
		unsigned number = (unsigned)rand_r(&seed) % KNOWN;
		switch (rand_r(&seed) % 10) {
		case 0:
			names_forget(DIRECTORY, name, long_name_of(number, name));
			should_be[number].ino = 0;
			CHECK(!is_known(number));
			break;
		case 1:
			for (unsigned i = 0; i < KNOWN && should_be[number].ino; i++)
				if (i != number && should_be[i].ino == should_be[number].ino)
					should_be[i].ino = 0;
			names_forget_ino(should_be[number].ino);
			should_be[number].ino = 0;
			CHECK(!is_known(number));
			break;
		case 2:
			is_known(number);
			break;
		case 3:
			should_be[number] = (struct fuse_attr){.ino = step, .mtime = 10000000000};
			names_put(DIRECTORY, name, long_name_of(number, name), &should_be[number],
				  HOUR_NS, 0);
			should_be[number].ino = 0; /* such a time does not fit */
			CHECK(!is_known(number));
			break;
		default:
			should_be[number] = any_attr(&seed, number_of(step));
			names_put(DIRECTORY, name, long_name_of(number, name), &should_be[number],
				  HOUR_NS, 0);
			CHECK(is_known(number));
		}
		if (step % (10 * KNOWN) == 0) {
			for (unsigned i = 0; i < KNOWN; i++)
				known += is_known(i);
			names_forget_all();
			memset(should_be, 0, sizeof(should_be));
		}
	}
	CHECK(known > KNOWN / 2);
	names_forget_all();
}

int main(int count, char **arguments)
{
	CHECK(count == 2);
	lookups = (unsigned)atoi(arguments[1]);
	fill();
	compare();
	pthread_t lookers[LOOKERS], changer;
	CHECK(pthread_create(&changer, NULL, change, NULL) == 0);
	start_threads(lookers, LOOKERS, look_up);
	join_threads(lookers, LOOKERS);
	over = true;
	CHECK(pthread_join(changer, NULL) == 0);
	CHECK(found);
	names_forget_all();
	puts("done");
	return 0;
}
