/* Reads from peers over HTTP: small files (ranges of segments, checked by checksum) and parts of large files.
 *
 * A peer that fails is avoided for a second, one that is late costs one deadline and is avoided for a tenth of a
 * second; each for twice as long after each further failure. No reader waits to find out whether it is back, but once
 * where it was late: requests do that for which no reader waits (`probe`, `patient`). Thread-safe.
 */
#ifndef MONARCHFS_FETCH_H
#define MONARCHFS_FETCH_H

#include "_places.h"

#define PEER_URL_BYTES 512
#define PEER_TOKEN_BYTES 256
#define PEER_ADDRESS_BYTES 64
#define PEER_PIN_BYTES 64

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

/* 0 or -errno. Call it once before all else. -ENOENT: libcurl cannot be loaded, for the reason in `why`. */
int fetch_begin(const char **why);

/* Set where the peer of this number serves its tiers (http://HOST:PORT or https://...), "" for nobody. Forgets its failures. 0 or
 * -errno. */
int fetch_peer(unsigned peer, const char *url);

/* Set the token that each request to the peer has behind its path (`?...`). 0 or -errno. */
int fetch_token(unsigned peer, const char *token);

/* Set the address that all requests come from. 0 or -errno. */
int fetch_address(const char *address);

/* Set the digest of the public key that peers must have, as in CURLOPT_PINNEDPUBLICKEY: before the first request
 * over https. 0 or -errno. */
int fetch_pin(const char *digest);

/* Read all bytes of the replica of this name into `to`, of `size` bytes. `patient`: no reader waits. */
enum fetch_result fetch_replica(const unsigned char *name, size_t size, bool patient, char *to);

/* Read bytes of a file below a peer's tiers, in order. If `take` returns false, the bytes are wrong, and this
 * ends: FETCH_WRONG. FETCH_UNKNOWN: the file is not there, or ends early. */
typedef bool fetch_take(void *to, const char *data, size_t size);
enum fetch_result fetch_range(unsigned peer, const char *path, uint64_t offset, size_t size, fetch_take *take,
			      void *to);

/* Ask the peer's worker: POST `body` to `path` (given without the token), or GET if `body` is NULL. The caller
 * frees the answer, at most `most` bytes. Returns the status, or -errno; then the peer counts as failed. `probe`: no
 * reader waits for it, so it may find out whether the peer is back. */
int fetch_answer(unsigned peer, const char *path, const char *body, size_t size, int64_t timeout_ns, size_t most,
		 bool probe, char **answer, size_t *answer_size);

/* Whether the peer is being avoided now, or nobody knows where it is. */
bool fetch_avoided(unsigned peer);

/* A probe may ask a peer that failed now, and a second after it fails again. 0 or -errno. */
int fetch_retry(unsigned peer);

/* An eventfd(2) to which each failure is added, for who probes. */
int fetch_failures_fd(void);

/* For how long a probe has to wait. */
int64_t fetch_pause_ns(unsigned peer);

void fetch_count(unsigned peer, struct peer_counts *counts);

#endif
