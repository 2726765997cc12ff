/* Threads that want files of peers, while catalogues come and go: each file is asked for once in a request, each
 * thread hears of its own, and never of more than the owner said. The functions below are the peers. Argument:
 * how many files each thread wants. */
#include "../../monarchfs/peers/_want.h"

#include "check.h"

#include <endian.h>

#define THREADS 8
#define PEERS 4
#define OWN 0
#define NAMES 5000
#define ROW 26

static unsigned requests, rows, in_one;
static bool avoided[PEERS], all_fail; /* what fetch_avoided says; each request fails, and its peer is avoided then */
static unsigned long each;

/* Files whose number is a multiple of 7 their owner has not; of 11, he fails. */
static void name_of(unsigned number, unsigned char *name)
{
	memset(name, 0, REPLICA_NAME_BYTES);
	name[0] = (unsigned char)(number % PEERS);
	memcpy(name + 4, &number, sizeof(number));
}

static unsigned number_of(const char *name)
{
	unsigned number;
	memcpy(&number, name + 4, sizeof(number));
	return number;
}

bool fetch_avoided(unsigned number)
{
	CHECK(number < PEERS);
	return __atomic_load_n(&avoided[number], __ATOMIC_RELAXED);
}

int fetch_answer(unsigned peer, const char *path, const char *body, size_t size, int64_t timeout_ns, size_t most,
		 bool probe, char **answer, size_t *answer_size)
{
	char *made = calloc(1, 28 + MOST_WANTED * 48);
	size_t count = 0;
	bool fails = false;
	CHECK(strcmp(path, "/ask/want") == 0 && timeout_ns > 0 && !probe && peer != OWN && made);
	for (size_t at = 0; at < size; count++) {
		uint16_t length;
		uint64_t bytes;
		CHECK(count < MOST_WANTED && at + ROW <= size);
		memcpy(&bytes, body + at + 16, sizeof(bytes));
		memcpy(&length, body + at + 24, sizeof(length));
		unsigned number = number_of(body + at);
		char expected[32];
		CHECK(le16toh(length) == (uint16_t)snprintf(expected, sizeof(expected), "d/%u", number));
		CHECK(memcmp(body + at + ROW, expected, le16toh(length)) == 0);
		CHECK(number % PEERS == peer || (avoided[number % PEERS] && (number + 1) % PEERS == peer));
		CHECK(le64toh(bytes) == number + 1);
		char *row = made + 28 + count * 48;
		uint32_t number32 = htole32(number + 1);
		uint64_t segment = htole64(number % 7 ? number + 1 : 0);
		memcpy(row, body + at, 16);
		memcpy(row + 24, &number32, sizeof(number32));
		memcpy(row + 32, &segment, sizeof(segment));
		fails |= number % 11 == 0;
		at += ROW + le16toh(length);
	}
	CHECK(count && 28 + count * 48 <= most);
	__atomic_fetch_add(&requests, 1, __ATOMIC_RELAXED);
	__atomic_fetch_add(&rows, (unsigned)count, __ATOMIC_RELAXED);
	if (count > __atomic_load_n(&in_one, __ATOMIC_RELAXED))
		__atomic_store_n(&in_one, (unsigned)count, __ATOMIC_RELAXED);
	usleep(50);
	if (fails || all_fail) {
		free(made);
		if (all_fail)
			avoided[peer] = true;
		return -ETIMEDOUT;
	}
	*answer = made;
	*answer_size = 28 + count * 48;
	return 200;
}

static bool wants_from(unsigned number, uint64_t source_ns)
{
	unsigned char name[REPLICA_NAME_BYTES];
	char path[32];
	name_of(number, name);
	snprintf(path, sizeof(path), "d/%u", number);
	return want_replica(name, number + 1, path, source_ns);
}

static bool wants(unsigned number)
{
	return wants_from(number, 0);
}

static bool is_known(unsigned number, struct place *place)
{
	unsigned char name[REPLICA_NAME_BYTES];
	name_of(number, name);
	return places_get(name, place);
}

static void *want(void *seed)
{
	unsigned random = (unsigned)(size_t)seed;
	for (unsigned long n = 0; n < each; n++) {
		unsigned number = (unsigned)rand_r(&random) % NAMES;
		struct place place;
		CHECK(!wants(number) || (number % PEERS != OWN && number % 7));
		if (is_known(number, &place))
			CHECK(place.segment == number + 1 && place.size == number + 1 && place.peer == number % PEERS);
	}
	return NULL;
}

/* How many of 160 their owner is asked for, where the source takes so long. */
static unsigned asked_of_160(uint64_t source_ns)
{
	unsigned before = rows;
	for (unsigned n = 0; n < 160; n++)
		wants_from(1, source_ns);
	return rows - before;
}

static void took_at_once(unsigned number)
{
	unsigned char name[REPLICA_NAME_BYTES];
	name_of(number, name);
	for (unsigned n = 0; n < 500; n++)
		want_took(name, 1);
}

static void bypass(void)
{
	CHECK(asked_of_160(0) == 160 && !want_bypassed());
	CHECK(asked_of_160(1000000000) == 160 && !want_bypassed()); /* slower than the peers */
	CHECK(asked_of_160(1) == 10 && want_bypassed() == 150);
	took_at_once(1); /* it has nearly all by now */
	for (unsigned n = 0; n < 30; n++)
		wants_from(33, 10); /* the same owner's, who fails: says nothing about the time it takes */
	CHECK(want_bypassed() == 150);
	CHECK(asked_of_160(100000000) == 160 && want_bypassed() == 150);
	CHECK(asked_of_160(1) == 10 && want_bypassed() == 300);
	wants(2);
	took_at_once(2);
	wants_from(2, 10); /* another owner takes no longer for that */
	CHECK(want_bypassed() == 300);
}

static unsigned peer_of(unsigned number)
{
	struct place place;
	CHECK(is_known(number, &place));
	return place.peer;
}

/* The next peer stands in for one that is avoided. */
static void stand_in(void)
{
	unsigned before = requests;
	avoided[1] = true;
	CHECK(wants(5) && peer_of(5) == 2 && requests == before + 1);
	avoided[1] = false;
	CHECK(wants(5) && peer_of(5) == 1 && requests == before + 2);
	avoided[3] = true; /* this node stands in: it reads the source */
	CHECK(!wants(15) && requests == before + 2);
	avoided[3] = false;
	avoided[1] = avoided[2] = true;
	CHECK(!wants(9) && requests == before + 2);
	avoided[1] = avoided[2] = false;
	all_fail = true; /* each is asked once */
	CHECK(!wants(NAMES + 1) && requests == before + 4 && avoided[1] && avoided[2]);
	all_fail = avoided[1] = avoided[2] = false;
}

static void *forget(void *ended)
{
	unsigned random = 99;
	while (!__atomic_load_n((bool *)ended, __ATOMIC_RELAXED)) {
		unsigned char name[REPLICA_NAME_BYTES];
		unsigned number = (unsigned)rand_r(&random) % NAMES;
		name_of(number, name);
		places_remove(name, number % PEERS);
		if (number < 5)
			places_remove_all(number % PEERS);
		sched_yield();
	}
	return NULL;
}

static void bound(void)
{
	unsigned char name[REPLICA_NAME_BYTES];
	struct place place = {.segment = 1, .peer = 1};
	for (unsigned n = 0; n <= MOST_OF_PEER; n++) {
		name_of(n, name);
		CHECK(places_put(name, &place) == (n < MOST_OF_PEER));
	}
	place.peer = 2;
	CHECK(places_put(name, &place));
	name_of(0, name);
	place.peer = 1;
	CHECK(places_put(name, &place)); /* known already */
	place.peer = 2;
	CHECK(places_put(name, &place));
	place.peer = 1;
	name_of(MOST_OF_PEER, name);
	CHECK(places_put(name, &place));
}

int main(int count, char **arguments)
{
	static uint16_t owners[2 * OWNER_BUCKETS];
	pthread_t threads[THREADS], forgetting;
	bool ended = false;
	uint64_t known[PEERS];
	CHECK(count == 2);
	each = strtoul(arguments[1], NULL, 10);
	CHECK(!want_replica((const unsigned char *)"0123456789abcdef", 1, "d/1", 0)); /* nobody owns anything yet */
	for (unsigned bucket = 0; bucket < OWNER_BUCKETS; bucket++) {
		owners[bucket] = (uint16_t)((bucket >> 8) % PEERS);
		owners[OWNER_BUCKETS + bucket] = (uint16_t)(((bucket >> 8) + 1) % PEERS);
	}
	CHECK(want_owners(owners, OWN) == 0);
	CHECK(pthread_create(&forgetting, NULL, forget, &ended) == 0);
	start_threads(threads, THREADS, want);
	join_threads(threads, THREADS);
	__atomic_store_n(&ended, true, __ATOMIC_RELAXED);
	CHECK(pthread_join(forgetting, NULL) == 0);
	CHECK(requests && rows > requests && in_one > 1); /* several asked together */
	bypass();
	stand_in();
	places_count(known, PEERS);
	CHECK(!known[OWN] && known[1]);
	places_remove_all(1);
	bound();
	for (unsigned peer = 0; peer < PEERS; peer++)
		places_remove_all(peer);
	places_count(known, PEERS);
	CHECK(!known[0] && !known[1] && !known[2] && !known[3]);
	puts("done");
	return 0;
}
