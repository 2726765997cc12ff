/* See _want.h. A request consists of rows: name, size, length of the path (little-endian), path. The answer is a
 * page as in catalogue.py.
 *
 * Worth the time: an owner that takes more than four times what the source takes for a file, on average, is not
 * asked to copy one for a reader, but for every 16th, which finds out whether that has changed. Each owner has a
 * mean of its own; failures do not count in it, or one bad node would keep readers from all others. The factor
 * weighs readers' time against the bytes of the source: with 2, nodes on a busy machine read up to 1.5 x the data.
 */
#include "_want.h"

#include "../core/_counts.h"

#include <endian.h>
#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#define ROW_BYTES (REPLICA_NAME_BYTES + 8 + 2)
#define ANSWER_HEADER_BYTES 28
#define ANSWER_ROW_BYTES 48
#define ANSWER_NS 700000000LL /* below the time after which Python takes a request */
#define MOST_ASKING 4 /* requests to one owner at once */
#define WANT_PATH "/ask/want"
#define WORTH_TIMES 4 /* times what the source takes */
#define TRY_EVERY 16 /* one request in so many tries whether it is worth the time again */

struct want {
	struct want *next;
	const unsigned char *name;
	const char *path;
	size_t size, length;
	bool done, failed;
};

struct owner {
	struct want *first, **last; /* not asked for yet */
	unsigned asking; /* threads that ask now */
	uint64_t mean_ns; /* what it takes for a file, whether it has it or copies it first; 0: not known */
	uint64_t tries;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* guards all that follows */
static pthread_cond_t answered = PTHREAD_COND_INITIALIZER;
static uint16_t *owners; /* of each bucket; then who stands in for each */
static unsigned own_number;
static struct owner *queues; /* by the number of the peer */
static uint64_t bypassed;

int want_owners(const uint16_t *given, unsigned own)
{
	size_t size = (size_t)2 * OWNER_BUCKETS * sizeof(*owners);
	uint16_t *made = malloc(size);
	if (!made)
		return -ENOMEM;
	memcpy(made, given, size);
	pthread_mutex_lock(&lock);
	if (!queues)
		queues = calloc(1 << 16, sizeof(*queues));
	if (queues) {
		free(owners);
		owners = made;
		own_number = own;
	}
	pthread_mutex_unlock(&lock);
	if (queues)
		return 0;
	free(made);
	return -ENOMEM;
}

/* Take the first `most` of a queue, or all. Under `lock`. */
static struct want *take(struct owner *owner, unsigned most)
{
	struct want *first = owner->first, **end = &owner->first;
	while (most-- && *end)
		end = &(*end)->next;
	owner->first = *end;
	if (!*end)
		owner->last = &owner->first;
	*end = NULL;
	return first;
}

static char *encode(const struct want *wants, size_t *size)
{
	*size = 0;
	for (const struct want *want = wants; want; want = want->next)
		*size += ROW_BYTES + want->length;
	char *body = malloc(*size), *to = body;
	for (const struct want *want = wants; want && body; want = want->next) {
		uint64_t bytes = htole64(want->size);
		uint16_t length = htole16((uint16_t)want->length);
		memcpy(to, want->name, REPLICA_NAME_BYTES);
		memcpy(to + REPLICA_NAME_BYTES, &bytes, sizeof(bytes));
		memcpy(to + REPLICA_NAME_BYTES + 8, &length, sizeof(length));
		memcpy(to + ROW_BYTES, want->path, want->length);
		to += ROW_BYTES + want->length;
	}
	return body;
}

static void note(unsigned peer, const char *answer, size_t size)
{
	for (size_t at = ANSWER_HEADER_BYTES; at + ANSWER_ROW_BYTES <= size; at += ANSWER_ROW_BYTES) {
		const char *row = answer + at;
		uint64_t checksum, segment, offset;
		uint32_t bytes, tier;
		memcpy(&checksum, row + 16, 8);
		memcpy(&bytes, row + 24, 4);
		memcpy(&tier, row + 28, 4);
		memcpy(&segment, row + 32, 8);
		memcpy(&offset, row + 40, 8);
		struct place place = {
			.segment = le64toh(segment),
			.offset = le64toh(offset),
			.checksum = le64toh(checksum),
			.size = le32toh(bytes),
			.peer = (uint16_t)peer,
			.tier = (uint16_t)le32toh(tier),
		};
		places_put((const unsigned char *)row, &place); /* ignores segment 0 */
	}
}

/* Whether it answered. */
static bool ask(unsigned peer, const struct want *wants)
{
	size_t size, answer_size = 0;
	char *answer = NULL, *body = encode(wants, &size);
	if (!body)
		return false;
	size_t most = ANSWER_HEADER_BYTES + MOST_WANTED * ANSWER_ROW_BYTES;
	bool good = fetch_answer(peer, WANT_PATH, body, size, ANSWER_NS, most, false, &answer, &answer_size) == 200;
	if (good)
		note(peer, answer, answer_size);
	free(answer);
	free(body);
	return good;
}

/* Wait until this thread or another one has asked for it. Under `lock`. */
static void wait_for(struct want *want, unsigned peer)
{
	struct owner *owner = &queues[peer];
	if (!owner->first)
		owner->last = &owner->first;
	*owner->last = want;
	owner->last = &want->next;
	while (!want->done) {
		if (owner->asking >= MOST_ASKING || !owner->first) {
			pthread_cond_wait(&answered, &lock);
			continue;
		}
		struct want *wants = take(owner, MOST_WANTED);
		owner->asking++;
		pthread_mutex_unlock(&lock);
		bool good = ask(peer, wants);
		pthread_mutex_lock(&lock);
		owner->asking--;
		while (wants) {
			struct want *next = wants->next; /* read before: its thread may go when it is done */
			wants->failed = !good;
			wants->done = true;
			wants = next;
		}
		pthread_cond_broadcast(&answered);
	}
}

/* The number of the node to ask for a file: the owner, the node that stands in, or this one for nobody. Under
 * `lock`, as the next two. */
static unsigned whom_to_ask(const unsigned char *name)
{
	unsigned bucket = (unsigned)name[0] << 8 | name[1];
	unsigned owner = owners ? owners[bucket] : own_number;
	if (owner == own_number || !fetch_avoided(owner))
		return owner;
	unsigned other = owners[OWNER_BUCKETS + bucket];
	return other == own_number || fetch_avoided(other) ? own_number : other;
}

/* An outlier counts as four times the mean. The first one, which also makes the connection, is taken for one. */
static void note_time(struct owner *owner, uint64_t ns)
{
	uint64_t most_ns = 4 * owner->mean_ns;
	if (!owner->mean_ns)
		owner->mean_ns = ns / 4;
	else
		owner->mean_ns += (ns > most_ns ? most_ns : ns) / 16 - owner->mean_ns / 16;
}

static bool is_worth(struct owner *owner, uint64_t source_ns)
{
	if (!source_ns || owner->mean_ns <= WORTH_TIMES * source_ns || ++owner->tries % TRY_EVERY == 0)
		return true;
	bypassed++;
	return false;
}

/* Ask a peer, if it is one, and worth the time. Under `lock`. */
static bool consult(struct want *want, unsigned peer, uint64_t source_ns, uint64_t *took_ns)
{
	if (peer == own_number || !is_worth(&queues[peer], source_ns))
		return false;
	uint64_t began_ns = monotonic_ns();
	want->next = NULL;
	want->done = want->failed = false;
	wait_for(want, peer);
	*took_ns = monotonic_ns() - began_ns;
	if (!want->failed) /* no mean has to say who fails */
		note_time(&queues[peer], *took_ns);
	return true;
}

void want_took(const unsigned char *name, uint64_t ns)
{
	struct place place;
	if (!places_get(name, &place))
		return;
	pthread_mutex_lock(&lock);
	if (queues)
		note_time(&queues[place.peer], ns);
	pthread_mutex_unlock(&lock);
}

uint64_t want_bypassed(void)
{
	pthread_mutex_lock(&lock);
	uint64_t count = bypassed;
	pthread_mutex_unlock(&lock);
	return count;
}

bool want_replica(const unsigned char *name, size_t size, const char *path, uint64_t source_ns)
{
	struct want want = {.name = name, .path = path, .size = size, .length = strlen(path)};
	struct place place;
	if (want.length > WANT_PATH_BYTES)
		return false;
	pthread_mutex_lock(&lock);
	uint64_t took_ns = 0;
	bool others = consult(&want, whom_to_ask(name), source_ns, &took_ns);
	/* Who fails is avoided for a while. */
	if (others && want.failed && took_ns < SOON_NS)
		consult(&want, whom_to_ask(name), source_ns, &took_ns);
	pthread_mutex_unlock(&lock);
	return others && places_get(name, &place);
}
