/* The table of resident files beside a plain one, with numbers that follow each other and numbers that do not; then
 * as many files as it takes, twice; then more, one after the other. Arguments: a directory, and how many steps. */
#include "../../monarchfs/core/_resident.h"

#include "check.h"

#define KNOWN 400
#define MINUTE_NS 60000000000LL
#define TIERS 3

static struct plain {
	bool resident, seen, fresh;
	struct replica replica;
	unsigned uses, opens;
	uint32_t backing_id;
	bool plain, going;
} plain[KNOWN];

static uint64_t number_of(unsigned which)
{
	return which < KNOWN / 2 ? which + 1 : (uint64_t)which * which << which % 30;
}

static int64_t until(unsigned how)
{
	struct timespec now;
	clock_gettime(CLOCK_REALTIME, &now);
	int64_t now_ns = ns_of(now);
	const int64_t times[] = {ALWAYS, now_ns + MINUTE_NS / 2, 0, now_ns, now_ns + 2 * MINUTE_NS};
	return times[how];
}

/* A few places, so that some are the same as before. */
static void put(unsigned which, unsigned *seed)
{
	struct plain *file = &plain[which];
	unsigned how = (unsigned)rand_r(seed) % 5, place = (unsigned)rand_r(seed) % 3;
	bool seen = rand_r(seed) % 4 == 0;
	struct replica replica = {.tier = (unsigned)rand_r(seed) % TIERS, .opens_until_ns = until(how)};
	if (rand_r(seed) % 2) {
		replica.segment = 1 + (uint64_t)rand_r(seed) % 4;
		replica.offset = (uint64_t)place * 4096 + (place == 2 ? UINT32_MAX - 8192 : 0);
		replica.size = 1000;
	} else {
		memset(replica.name, (int)place, NAME_BYTES);
		replica.size = (uint64_t)place << 40;
		replica.checksum = place;
	}
	CHECK(resident_put(number_of(which), &replica, seen));
	file->seen |= seen;
	file->resident = true;
	file->replica = replica;
	file->fresh = how < 2;
	struct replica wrong = replica;
	wrong.segment = 1;
	wrong.offset = 1ULL << 32;
	CHECK(!resident_put(number_of(which), &wrong, seen));
}

static void gone(struct plain *file)
{
	file->resident = file->seen = false;
}

static void close_one(struct plain *file, uint64_t ino)
{
	if (!file->opens)
		return;
	inode_close(ino);
	file->uses--;
	if (!--file->opens && file->going)
		file->backing_id = 0, file->going = false;
}

static void step(unsigned which, unsigned *seed)
{
	struct plain *file = &plain[which];
	uint64_t ino = number_of(which);
	uint32_t backing_id;
	bool open;
	switch (rand_r(seed) % 14) {
	case 0:
		resident_stop(ino);
		gone(file);
		break;
	case 1:
		CHECK(resident_retire(ino) == !file->uses);
		if (!file->uses)
			gone(file);
		break;
	case 2:
		resident_expire(ino);
		file->fresh = false;
		break;
	case 3:
		backing_id = 1 + (uint32_t)rand_r(seed) % 3;
		CHECK(inode_back(ino, backing_id) == !file->backing_id);
		file->backing_id = file->backing_id ? file->backing_id : backing_id;
		break;
	case 4:
		resident_use(ino);
		file->uses++;
		break;
	case 5:
		if (file->uses > file->opens)
			file->uses--, resident_unuse(ino);
		break;
	case 6:
		CHECK(inode_open(ino, &backing_id));
		file->uses++;
		if (!file->opens++)
			file->plain = !file->backing_id;
		CHECK(backing_id == (file->plain ? 0 : file->backing_id));
		break;
	case 7:
	case 8:
		close_one(file, ino);
		break;
	case 9:
		open = file->opens && !file->plain;
		CHECK(inode_unback(ino, true) == !open);
		file->going |= open;
		file->backing_id = open ? file->backing_id : 0;
		break;
	case 10:
		open = file->resident && file->fresh &&
		       (which % 2 || file->replica.segment || file->opens || file->backing_id);
		CHECK(resident_open(ino, which % 2) == open);
		file->uses += open;
		file->seen |= open;
		break;
	default:
		put(which, seed);
	}
	CHECK(resident_has(ino) == file->resident && resident_seen(ino) == file->seen);
	CHECK(resident_used(ino) == (file->uses > 0) && inode_decided(ino) == (file->opens || file->backing_id));
	CHECK(!resident_reading(ino));
}

static void compare(unsigned steps)
{
	unsigned seed = 3, residents = 0;
	for (unsigned done = 0; done < steps; done++)
		step((unsigned)rand_r(&seed) % KNOWN, &seed);
	for (unsigned which = 0; which < KNOWN; which++) {
		residents += plain[which].resident;
		CHECK(resident_has(number_of(which)) == plain[which].resident);
		resident_stop(number_of(which));
		while (plain[which].opens)
			close_one(&plain[which], number_of(which));
		while (plain[which].uses--)
			resident_unuse(number_of(which));
		CHECK(inode_unback(number_of(which), false) && !inode_decided(number_of(which)));
		CHECK(!resident_has(number_of(which)) && !resident_used(number_of(which)));
	}
	CHECK(residents > KNOWN / 4);
}

static void fill(uint64_t first)
{
	for (uint64_t n = 0; n <= MOST_RESIDENT; n++) {
		const struct replica replica = {.segment = 1 + n / 1000, .offset = n % 1000 * 4096, .size = n};
		CHECK(resident_put(first + n, &replica, false) == (n < MOST_RESIDENT));
	}
	for (uint64_t n = 0; n <= MOST_RESIDENT; n++)
		CHECK(resident_has(first + n) == (n < MOST_RESIDENT) && resident_retire(first + n));
	CHECK(!resident_has(first));
}

/* One at a time, more of each kind than the table takes at once. */
static void come_and_go(void)
{
	for (uint64_t n = 1; n <= 2 * MOST_RESIDENT + 2; n++) {
		const struct replica replica = {.segment = n % 2 ? n : 0};
		CHECK(resident_put(n << 8, &replica, false) && !resident_open(n << 8, true));
		resident_use(n << 8);
		resident_stop(n << 8);
		resident_unuse(n << 8);
	}
}

int main(int count, char **arguments)
{
	CHECK(count == 3);
	int tier_fd = open(arguments[1], O_RDONLY | O_DIRECTORY);
	CHECK(tier_fd >= 0 && resident_start(2, geteuid(), MINUTE_NS, false, false) == 0);
	for (unsigned tier = 0; tier < TIERS; tier++)
		CHECK(resident_tier(tier, tier_fd) == 0);
	compare((unsigned)atoi(arguments[2]));
	fill(1);
	fill(1ULL << 40);
	come_and_go();
	puts("done");
	return 0;
}
