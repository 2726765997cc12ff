/* See _fetch.h.
 *
 * A read may take the mean time of all peers and four deviations (as in RFC 6298), 0.1 to 0.8 s, and at least 0.4
 * s if no reader waits. A slow peer would raise a deadline of its own. On busy processors nodes that are well are
 * late now and then: when lateness kept all readers from them for a second, eight nodes read 1.35 x the data in one
 * epoch, so it does for a tenth of a second.
 */
#include "_fetch.h"

#include "../core/_counts.h"
#include "../cache/store/_checksum.h"

#include <curl/curl.h>

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>

#define MOST_PEERS 65536
#define CONNECTIONS 32L /* that a thread keeps open */
#define FIRST_DEADLINE_NS 800000000LL
#define LEAST_DEADLINE_NS 100000000LL
#define PATIENT_DEADLINE_NS 400000000LL /* where no reader waits, at least */
#define MOST_DEADLINE_NS 800000000LL /* below the time after which Python takes a request */
#define FIRST_PAUSE_NS 1000000000LL
#define LATE_PAUSE_NS 100000000LL /* a busy node is late now and then */
#define MOST_PAUSE_NS 60000000000LL
#define PIECE_BYTES (1UL << 20) /* of a range, in one request */
#define PIECE_DEADLINE_NS 900000000LL /* a reader may wait for it */
#define FORBIDDEN 403
#define SERVER_ERROR 500 /* and above */
#define URL_BYTES (PEER_URL_BYTES + PEER_TOKEN_BYTES + 1024)

struct peer {
	char url[PEER_URL_BYTES], token[PEER_TOKEN_BYTES];
	pthread_mutex_t lock; /* guards what follows */
	int64_t pause_ns, avoided_until_ns, failed_ns;
	bool late; /* what it failed with */
	bool answers; /* its worker did, since then */
	struct peer_counts counts;
};

static pthread_rwlock_t lock = PTHREAD_RWLOCK_INITIALIZER; /* guards the list, what is in it before `lock`, and the texts below */
static struct peer *peers[MOST_PEERS];
static pthread_mutex_t times_lock = PTHREAD_MUTEX_INITIALIZER;
static int64_t smoothed_ns, deviation_ns; /* how long a file of any peer takes, as in RFC 6298 */
static char pin[PEER_PIN_BYTES]; /* CURLOPT_PINNEDPUBLICKEY; empty without TLS */
static char interface[PEER_ADDRESS_BYTES + 8]; /* CURLOPT_INTERFACE */
static pthread_key_t handle_key;
static int failures_fd = -1;

/* libcurl(3), loaded and not linked: a package for many systems cannot bring it, as it needs OpenSSL, Kerberos and
 * LDAP, which must be the system's. */
static struct {
	CURLcode (*global_init)(long flags);
	CURL *(*easy_init)(void);
	void (*easy_cleanup)(CURL *handle);
	CURLcode (*easy_perform)(CURL *handle);
	CURLcode (*easy_setopt)(CURL *handle, CURLoption option, ...);
	CURLcode (*easy_getinfo)(CURL *handle, CURLINFO info, ...);
} curl;

/* NULL, or what dlopen(3) or dlsym(3) says. */
static const char *load_curl(void)
{
	void *library = dlopen("libcurl.so.4", RTLD_NOW | RTLD_LOCAL);
	if (!library)
		return dlerror();
	const struct {
		const char *name;
		void *to;
	} symbols[] = {
		{"curl_global_init", &curl.global_init},
		{"curl_easy_init", &curl.easy_init},
		{"curl_easy_cleanup", &curl.easy_cleanup},
		{"curl_easy_perform", &curl.easy_perform},
		{"curl_easy_setopt", &curl.easy_setopt},
		{"curl_easy_getinfo", &curl.easy_getinfo},
	};
	for (size_t n = 0; n < sizeof(symbols) / sizeof(symbols[0]); n++) {
		void *symbol = dlsym(library, symbols[n].name);
		if (!symbol)
			return dlerror();
		memcpy(symbols[n].to, &symbol, sizeof(symbol));
	}
	return NULL;
}

static void end_handle(void *handle)
{
	curl.easy_cleanup(handle);
}

int fetch_begin(const char **why)
{
	if ((*why = load_curl()))
		return -ENOENT;
	if (curl.global_init(CURL_GLOBAL_DEFAULT) != CURLE_OK)
		return -ENOMEM;
	if ((failures_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) < 0)
		return -errno;
	return -pthread_key_create(&handle_key, end_handle);
}

/* Made at its first use; NULL without memory. Under `lock`, for writing. */
static struct peer *peer_of(unsigned number)
{
	struct peer *peer = peers[number];
	if (!peer && (peer = calloc(1, sizeof(*peer)))) {
		pthread_mutex_init(&peer->lock, NULL);
		peers[number] = peer;
	}
	return peer;
}

int fetch_peer(unsigned number, const char *url)
{
	if (number >= MOST_PEERS || strlen(url) >= PEER_URL_BYTES)
		return -EINVAL;
	pthread_rwlock_wrlock(&lock);
	struct peer *peer = peer_of(number);
	if (peer) {
		pthread_mutex_lock(&peer->lock);
		strcpy(peer->url, url);
		peer->pause_ns = peer->avoided_until_ns = peer->failed_ns = 0;
		peer->late = false;
		pthread_mutex_unlock(&peer->lock);
	}
	pthread_rwlock_unlock(&lock);
	return peer ? 0 : -ENOMEM;
}

int fetch_token(unsigned number, const char *text)
{
	if (number >= MOST_PEERS || strlen(text) >= PEER_TOKEN_BYTES)
		return -EINVAL;
	pthread_rwlock_wrlock(&lock);
	struct peer *peer = peer_of(number);
	if (peer)
		strcpy(peer->token, text);
	pthread_rwlock_unlock(&lock);
	return peer ? 0 : -ENOMEM;
}

int fetch_address(const char *address)
{
	if (strlen(address) >= PEER_ADDRESS_BYTES)
		return -EINVAL;
	pthread_rwlock_wrlock(&lock);
	snprintf(interface, sizeof(interface), "host!%s", address);
	pthread_rwlock_unlock(&lock);
	return 0;
}

int fetch_pin(const char *digest)
{
	if (strlen(digest) >= PEER_PIN_BYTES)
		return -EINVAL;
	pthread_rwlock_wrlock(&lock);
	strcpy(pin, digest);
	pthread_rwlock_unlock(&lock);
	return 0;
}

/* -- how long a file takes: one deadline for all peers, because a slow one would raise its own */

static int64_t deadline(void)
{
	pthread_mutex_lock(&times_lock);
	int64_t ns = smoothed_ns ? smoothed_ns + 4 * deviation_ns : FIRST_DEADLINE_NS;
	pthread_mutex_unlock(&times_lock);
	return ns < LEAST_DEADLINE_NS ? LEAST_DEADLINE_NS : ns > MOST_DEADLINE_NS ? MOST_DEADLINE_NS : ns;
}

/* An outlier counts as four times the mean. The first one, which also makes the connection, is taken for one. */
static void note_time(int64_t ns)
{
	pthread_mutex_lock(&times_lock);
	if (!smoothed_ns) {
		smoothed_ns = ns / 4;
		deviation_ns = ns / 8;
	} else {
		int64_t most_ns = 4 * smoothed_ns;
		int64_t more_ns = (ns < most_ns ? ns : most_ns) - smoothed_ns;
		deviation_ns += ((more_ns < 0 ? -more_ns : more_ns) - deviation_ns) / 4;
		smoothed_ns += more_ns / 8;
	}
	pthread_mutex_unlock(&times_lock);
}

/* -- the state of a peer, under its lock */

/* Because of a request that began then. Those that were under way when it was first avoided say nothing new. */
static void avoid(struct peer *peer, bool late, int64_t began_ns)
{
	int64_t now_ns = (int64_t)monotonic_ns();
	int64_t pause_ns = 2 * peer->pause_ns, least_ns = late ? LATE_PAUSE_NS : FIRST_PAUSE_NS;
	if (began_ns < peer->failed_ns)
		return;
	peer->failed_ns = now_ns;
	if (pause_ns < least_ns)
		pause_ns = least_ns;
	peer->late = late;
	peer->answers = false;
	peer->pause_ns = pause_ns < MOST_PAUSE_NS ? pause_ns : MOST_PAUSE_NS;
	peer->avoided_until_ns = now_ns + peer->pause_ns;
	(void)eventfd_write(failures_fd, 1);
}

static void welcome(struct peer *peer)
{
	peer->late = false;
	peer->pause_ns = peer->avoided_until_ns = 0;
}

static void note_failure(struct peer *peer, bool late, int64_t began_ns)
{
	pthread_mutex_lock(&peer->lock);
	avoid(peer, late, began_ns);
	peer->counts.failed++;
	pthread_mutex_unlock(&peer->lock);
}

/* Of another result than FETCH_FAILED. `ns` is 0 for a part of a large file, which says nothing about the time that
 * small ones take. `late`: a reader would not have waited so long. */
static void note_result(struct peer *peer, enum fetch_result result, size_t size, int64_t ns, bool late)
{
	pthread_mutex_lock(&peer->lock);
	if (late)
		avoid(peer, true, (int64_t)monotonic_ns() - ns);
	else
		welcome(peer);
	peer->counts.nanoseconds += (uint64_t)ns;
	peer->counts.wrong += result == FETCH_WRONG;
	peer->counts.files += result == FETCHED && ns;
	peer->counts.bytes += result == FETCHED ? size : 0;
	pthread_mutex_unlock(&peer->lock);
	if (ns)
		note_time(ns);
}

/* Its worker answered, which says that it is there, and nothing about how long a file takes. */
static void note_answer(struct peer *peer)
{
	pthread_mutex_lock(&peer->lock);
	peer->answers = true;
	if (peer->late)
		peer->avoided_until_ns = (int64_t)monotonic_ns();
	else
		welcome(peer);
	pthread_mutex_unlock(&peer->lock);
}

/* Whether a request may go to the peer now. After a failure a `probe` finds out whether it is back. Others wait for
 * that, because a reader may wait for them: but once where it was only late, which a busy node is now and then. */
static bool is_open(const struct peer *peer, bool probe)
{
	if (!peer->url[0] || (int64_t)monotonic_ns() < peer->avoided_until_ns)
		return false;
	return !peer->pause_ns || probe || (peer->late && (peer->answers || peer->pause_ns <= LATE_PAUSE_NS));
}

/* Whether the peer may be asked. After a failure, one request at a time tries whether it is back. */
static bool may_ask(struct peer *peer, int64_t deadline_ns, bool probe)
{
	pthread_mutex_lock(&peer->lock);
	bool may = is_open(peer, probe);
	if (may && peer->pause_ns)
		peer->avoided_until_ns = (int64_t)monotonic_ns() + deadline_ns;
	pthread_mutex_unlock(&peer->lock);
	return may;
}

/* -- one request */

struct answer {
	char *to;
	size_t size, got;
};

static size_t take_answer(char *data, size_t one, size_t size, void *to)
{
	(void)one;
	struct answer *answer = to;
	if (size > answer->size - answer->got)
		return 0; /* ends the transfer */
	memcpy(answer->to + answer->got, data, size);
	answer->got += size;
	return size;
}

/* A peer is who has the key that is pinned: nobody signs certificates. */
static void expect_key(CURL *request)
{
	pthread_rwlock_rdlock(&lock);
	if (pin[0]) {
		curl.easy_setopt(request, CURLOPT_PINNEDPUBLICKEY, pin);
		curl.easy_setopt(request, CURLOPT_SSL_VERIFYPEER, 0L);
		curl.easy_setopt(request, CURLOPT_SSL_VERIFYHOST, 0L);
	}
	pthread_rwlock_unlock(&lock);
}

/* The calling thread's handle. Its requests come `from` an address. */
static CURL *handle(const char *from)
{
	CURL *known = pthread_getspecific(handle_key);
	if (known) {
		curl.easy_setopt(known, CURLOPT_INTERFACE, from);
		return known;
	}
	known = curl.easy_init();
	if (!known)
		return NULL;
	curl.easy_setopt(known, CURLOPT_INTERFACE, from);
	curl.easy_setopt(known, CURLOPT_WRITEFUNCTION, take_answer);
	curl.easy_setopt(known, CURLOPT_NOSIGNAL, 1L);
	expect_key(known);
	curl.easy_setopt(known, CURLOPT_NOPROXY, "*");
	curl.easy_setopt(known, CURLOPT_BUFFERSIZE, 131072L);
	curl.easy_setopt(known, CURLOPT_MAXCONNECTS, CONNECTIONS);
	if (pthread_setspecific(handle_key, known) != 0) {
		curl.easy_cleanup(known);
		return NULL;
	}
	return known;
}

/* Ask the thread's handle for a range. */
static CURLcode get_range(CURL *request, const char *url, uint64_t offset, size_t size, int64_t deadline_ns,
			  long *status)
{
	char range[64];
	snprintf(range, sizeof(range), "%llu-%llu", (unsigned long long)offset, (unsigned long long)(offset + size - 1));
	curl.easy_setopt(request, CURLOPT_URL, url);
	curl.easy_setopt(request, CURLOPT_RANGE, range);
	curl.easy_setopt(request, CURLOPT_TIMEOUT_MS, (long)(deadline_ns / 1000000));
	CURLcode code = curl.easy_perform(request);
	*status = 0;
	curl.easy_getinfo(request, CURLINFO_RESPONSE_CODE, status);
	return code;
}

/* Of the peer: it says nothing about what was asked. It has another key, or its nginx is left without a worker. */
static bool is_failure(long status)
{
	return status == FORBIDDEN || status >= SERVER_ERROR;
}

/* The peer, if it may be asked; the URL, and the address to ask from. */
static struct peer *locate(unsigned number, const char *path, char *url, size_t room, char *from, int64_t deadline_ns,
			   bool probe)
{
	pthread_rwlock_rdlock(&lock);
	struct peer *peer = number < MOST_PEERS ? peers[number] : NULL; /* never freed */
	if (peer && !may_ask(peer, deadline_ns, probe))
		peer = NULL;
	strcpy(from, interface);
	/* The token begins with a question mark, and may follow a query. */
	const char *before = strchr(path, '?') ? "&" : "?";
	if (peer && (size_t)snprintf(url, room, "%s%s%s%s", peer->url, path, before, peer->token[0] ? peer->token + 1 : "") >=
			    room)
		peer = NULL;
	pthread_rwlock_unlock(&lock);
	return peer;
}

static enum fetch_result ask(const char *url, const char *from, const struct place *place, int64_t deadline_ns, char *to)
{
	struct answer answer = {.to = to, .size = place->size};
	CURL *request = handle(from);
	long status;
	if (!request)
		return FETCH_FAILED;
	curl.easy_setopt(request, CURLOPT_WRITEDATA, &answer);
	CURLcode code = get_range(request, url, place->offset, place->size, deadline_ns, &status);
	if (code != CURLE_OK && code != CURLE_WRITE_ERROR)
		return FETCH_FAILED;
	if (is_failure(status))
		return FETCH_FAILED;
	if (status != 206 || answer.got != place->size)
		return FETCH_WRONG;
	return checksum(to, place->size) == place->checksum ? FETCHED : FETCH_WRONG;
}

enum fetch_result fetch_replica(const unsigned char *name, size_t size, bool patient, char *to)
{
	struct place place;
	if (!places_get(name, &place))
		return FETCH_UNKNOWN;
	if (place.size != size) {
		places_remove(name, place.peer);
		return FETCH_WRONG;
	}
	char path[64], url[URL_BYTES], from[sizeof(interface)];
	int64_t reader_ns = deadline();
	int64_t deadline_ns = patient && reader_ns < PATIENT_DEADLINE_NS ? PATIENT_DEADLINE_NS : reader_ns;
	snprintf(path, sizeof(path), "/tier/%u/segments/%016llx", place.tier, (unsigned long long)place.segment);
	struct peer *peer = locate(place.peer, path, url, sizeof(url), from, deadline_ns, patient);
	if (!peer)
		return FETCH_AVOIDED;
	int64_t began_ns = (int64_t)monotonic_ns();
	enum fetch_result result = ask(url, from, &place, deadline_ns, to);
	int64_t took_ns = (int64_t)monotonic_ns() - began_ns;
	if (result == FETCH_FAILED)
		note_failure(peer, took_ns >= deadline_ns * 9 / 10, began_ns);
	else
		note_result(peer, result, size, took_ns, took_ns > reader_ns);
	if (result == FETCH_WRONG)
		places_remove(name, place.peer);
	return result;
}

struct passed {
	fetch_take *take;
	void *to;
	size_t bytes;
};

static size_t pass(char *data, size_t one, size_t size, void *given)
{
	(void)one;
	struct passed *passed = given;
	passed->bytes += size;
	return passed->take(passed->to, data, size) ? size : 0;
}

enum fetch_result fetch_range(unsigned number, const char *path, uint64_t offset, size_t size, fetch_take *take,
			      void *to)
{
	char url[URL_BYTES], from[sizeof(interface)];
	struct peer *peer = locate(number, path, url, sizeof(url), from, PIECE_DEADLINE_NS, false);
	CURL *request = peer ? handle(from) : NULL;
	long status;
	if (!request)
		return FETCH_AVOIDED;
	int64_t began_ns = (int64_t)monotonic_ns();
	CURLcode code;
	size_t asked = 0;
	struct passed passed = {.take = take, .to = to};
	curl.easy_setopt(request, CURLOPT_WRITEFUNCTION, pass);
	curl.easy_setopt(request, CURLOPT_WRITEDATA, &passed);
	curl.easy_setopt(request, CURLOPT_FAILONERROR, 1L);
	do {
		size_t piece = size - asked < PIECE_BYTES ? size - asked : PIECE_BYTES;
		code = get_range(request, url, offset + asked, piece, PIECE_DEADLINE_NS, &status);
		asked += piece;
	} while (code == CURLE_OK && status == 206 && passed.bytes == asked && asked < size);
	curl.easy_setopt(request, CURLOPT_FAILONERROR, 0L);
	curl.easy_setopt(request, CURLOPT_WRITEFUNCTION, take_answer);
	enum fetch_result result = FETCH_FAILED;
	if (code == CURLE_OK && status == 206)
		result = passed.bytes == size ? FETCHED : FETCH_UNKNOWN;
	else if (code == CURLE_OK || code == CURLE_WRITE_ERROR)
		result = FETCH_WRONG;
	else if (code == CURLE_HTTP_RETURNED_ERROR && (status == 404 || status == 416))
		result = FETCH_UNKNOWN;
	if (result == FETCH_FAILED)
		note_failure(peer, false, began_ns);
	else
		note_result(peer, result, size, 0, false);
	return result;
}

/* The bytes of an answer whose size is not known yet. */
struct text {
	char *bytes;
	size_t size, room, most;
};

static size_t append(char *data, size_t one, size_t size, void *to)
{
	(void)one;
	struct text *text = to;
	if (size > text->most - text->size)
		return 0;
	if (text->size + size > text->room) {
		size_t room = (text->size + size) * 2;
		char *bytes = realloc(text->bytes, room);
		if (!bytes)
			return 0;
		text->bytes = bytes;
		text->room = room;
	}
	memcpy(text->bytes + text->size, data, size);
	text->size += size;
	return size;
}

static int error_of(CURL *request, CURLcode code)
{
	long error = 0;
	switch (code) {
	case CURLE_OPERATION_TIMEDOUT:
		return -ETIMEDOUT;
	case CURLE_WRITE_ERROR:
		return -EMSGSIZE;
	case CURLE_SSL_PINNEDPUBKEYNOTMATCH:
		return -EKEYREJECTED;
	case CURLE_SSL_CONNECT_ERROR:
		return -EPROTO;
	case CURLE_COULDNT_CONNECT:
		curl.easy_getinfo(request, CURLINFO_OS_ERRNO, &error);
		return error ? -(int)error : -ECONNREFUSED;
	default:
		return -ECONNREFUSED;
	}
}

int fetch_answer(unsigned number, const char *path, const char *body, size_t size, int64_t timeout_ns,
		 size_t most, bool probe, char **answer, size_t *answer_size)
{
	char url[URL_BYTES], from[sizeof(interface)];
	struct peer *peer = locate(number, path, url, sizeof(url), from, timeout_ns, probe);
	if (!peer)
		return -EAGAIN;
	struct text text = {.most = most};
	CURL *request = handle(from);
	if (!request)
		return -ENOMEM;
	curl.easy_setopt(request, CURLOPT_URL, url);
	curl.easy_setopt(request, CURLOPT_RANGE, NULL);
	curl.easy_setopt(request, CURLOPT_WRITEFUNCTION, append);
	curl.easy_setopt(request, CURLOPT_WRITEDATA, &text);
	curl.easy_setopt(request, CURLOPT_TIMEOUT_MS, (long)(timeout_ns / 1000000));
	if (body) {
		curl.easy_setopt(request, CURLOPT_POSTFIELDSIZE, (long)size);
		curl.easy_setopt(request, CURLOPT_POSTFIELDS, body);
	}
	int64_t began_ns = (int64_t)monotonic_ns();
	CURLcode code = curl.easy_perform(request);
	long status = 0;
	curl.easy_getinfo(request, CURLINFO_RESPONSE_CODE, &status);
	curl.easy_setopt(request, CURLOPT_HTTPGET, 1L);
	curl.easy_setopt(request, CURLOPT_WRITEFUNCTION, take_answer);
	if (code == CURLE_OK) {
		if (is_failure(status))
			note_failure(peer, false, began_ns);
		else
			note_answer(peer);
		*answer = text.bytes;
		*answer_size = text.size;
		return (int)status;
	}
	free(text.bytes);
	note_failure(peer, false, began_ns);
	return error_of(request, code);
}

/* NULL: nobody has said where it is. It is never freed. */
static struct peer *known_peer(unsigned number)
{
	pthread_rwlock_rdlock(&lock);
	struct peer *peer = number < MOST_PEERS ? peers[number] : NULL;
	pthread_rwlock_unlock(&lock);
	return peer;
}

int fetch_retry(unsigned number)
{
	struct peer *peer = known_peer(number);
	if (!peer)
		return -EINVAL;
	pthread_mutex_lock(&peer->lock);
	if (peer->pause_ns) {
		peer->pause_ns = FIRST_PAUSE_NS / 2;
		peer->late = false;
		peer->avoided_until_ns = (int64_t)monotonic_ns();
	}
	pthread_mutex_unlock(&peer->lock);
	return 0;
}

int fetch_failures_fd(void)
{
	return failures_fd;
}

int64_t fetch_pause_ns(unsigned number)
{
	struct peer *peer = known_peer(number);
	if (!peer)
		return 0;
	pthread_mutex_lock(&peer->lock);
	int64_t left_ns = peer->avoided_until_ns - (int64_t)monotonic_ns();
	pthread_mutex_unlock(&peer->lock);
	return left_ns > 0 ? left_ns : 0;
}

bool fetch_avoided(unsigned number)
{
	struct peer *peer = known_peer(number);
	if (!peer)
		return true;
	pthread_mutex_lock(&peer->lock);
	bool avoided = !is_open(peer, false);
	pthread_mutex_unlock(&peer->lock);
	return avoided;
}

void fetch_count(unsigned number, struct peer_counts *counts)
{
	memset(counts, 0, sizeof(*counts));
	struct peer *peer = known_peer(number);
	if (!peer)
		return;
	pthread_mutex_lock(&peer->lock);
	*counts = peer->counts;
	pthread_mutex_unlock(&peer->lock);
}
