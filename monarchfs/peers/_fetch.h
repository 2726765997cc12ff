/* Small files from peers: a range of a segment, over HTTP, compared with its checksum. Parts of large files.
 *
 * A peer that is slow or fails costs one deadline, and is avoided then: for a second, and twice as long each
 * time that it fails again. Thread-safe.
 */
#ifndef MONARCHFS_FETCH_H
#define MONARCHFS_FETCH_H

#include "_places.h"

#define PEER_URL_BYTES 512
#define PEER_TOKEN_BYTES 256
#define PEER_ADDRESS_BYTES 64

enum fetch_result {
	FETCHED,
	FETCH_UNKNOWN, /* no peer is known to have it */
	FETCH_AVOIDED, /* its peer has just failed */
	FETCH_FAILED, /* refused, broken, too late */
	FETCH_WRONG, /* something else lies there */
};

struct peer_counts {
	uint64_t files, bytes, wrong, failed, nanoseconds;
};

/* 0 or -errno. Call it once before all else. */
int fetch_begin(void);

/* The peer of this number: where its tiers are served (http://HOST:PORT), "" for nobody. Its failures are
 * forgotten. 0 or -errno. */
int fetch_peer(unsigned peer, const char *url);

/* What every request has behind its path: `?...`, which is good for the address that it comes from. 0 or
 * -errno. */
int fetch_token(const char *token, const char *address);

/* All bytes of the replica of this name into `to`, of `size` bytes. */
enum fetch_result fetch_replica(const unsigned char *name, size_t size, char *to);

/* Bytes of a file below a peer's tiers, in order; `take` is false where they are not what they should be, and
 * ends it: FETCH_WRONG. FETCH_UNKNOWN: the file is not there, or ends before. */
typedef bool fetch_take(void *to, const char *data, size_t size);
enum fetch_result fetch_range(unsigned peer, const char *path, uint64_t offset, size_t size, fetch_take *take,
			      void *to);

/* A question to the peer's worker: POST of `body` to `path`, without the token, GET if `body` is NULL. At most
 * `most` bytes of the answer, allocated, to be freed. The status, or -errno; the peer counts as failed then. */
int fetch_answer(unsigned peer, const char *path, const char *body, size_t size, int64_t timeout_ns, size_t most,
		 char **answer, size_t *answer_size);

/* Whether it is being avoided now. */
bool fetch_avoided(unsigned peer);

void fetch_count(unsigned peer, struct peer_counts *counts);

#endif
