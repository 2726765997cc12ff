/* The checksum of a replica's bytes, as in checksum.py. */
#ifndef MONARCHFS_CHECKSUM_H
#define MONARCHFS_CHECKSUM_H

#define XXH_INLINE_ALL
#include <xxhash.h>

#define CHECKED_BLOCK_BYTES (128U << 10)

static inline uint64_t checksum(const char *data, size_t size)
{
	XXH64_canonical_t digests[64];
	XXH3_state_t state;
	unsigned count = 0;
	XXH3_64bits_reset(&state);
	for (size_t at = 0; at < size; at += CHECKED_BLOCK_BYTES) {
		size_t length = size - at < CHECKED_BLOCK_BYTES ? size - at : CHECKED_BLOCK_BYTES;
		XXH64_canonicalFromHash(&digests[count++], XXH3_64bits(data + at, length));
		if (count == sizeof(digests) / sizeof(*digests) || at + length == size) {
			XXH3_64bits_update(&state, digests, count * sizeof(*digests));
			count = 0;
		}
	}
	return XXH3_64bits_digest(&state);
}

#endif
