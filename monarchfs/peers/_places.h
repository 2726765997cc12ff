/* Which peer has a small file, and where: from the catalogues that peers send.
 *
 * A file is known by the name of its replica, a hash of its version. Hints only: what a peer sends is compared
 * with the checksum. Thread-safe.
 */
#ifndef MONARCHFS_PLACES_H
#define MONARCHFS_PLACES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define REPLICA_NAME_BYTES 16
#ifndef MOST_OF_PEER /* a test does with fewer */
#define MOST_OF_PEER (1U << 24) /* 1.6 GB: only a peer that lies has so many */
#endif

/* A replica in a segment of a peer's tier. */
struct place {
	uint64_t segment; /* not 0 */
	uint64_t offset;
	uint64_t checksum; /* as in cache/store/checksum.py */
	uint32_t size;
	uint16_t peer;
	uint16_t tier;
};

/* Replaces what was known. False if there is no memory, or the peer has MOST_OF_PEER already. */
bool places_put(const unsigned char *name, const struct place *place);

/* Does nothing if another peer has it. */
void places_remove(const unsigned char *name, unsigned peer);
void places_remove_all(unsigned peer);

bool places_get(const unsigned char *name, struct place *place);

/* How many each of `count` peers has. */
void places_count(uint64_t *of_peers, size_t count);

#endif
