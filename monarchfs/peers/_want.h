/* Asks the owner of a small file for it, if it is not known to have it. Thread-safe. */
#ifndef MONARCHFS_WANT_H
#define MONARCHFS_WANT_H

#include "_fetch.h"

#define OWNER_BUCKETS 65536
#define WANT_PATH_BYTES 4096
#define MOST_WANTED 128 /* in one request */
#define SOON_NS 200000000ULL /* a peer that failed within this leaves a reader the time to ask another one */

/* The owner of each bucket of names, by its number, then the node that stands in for the owner of each; `own` is
 * this node's number. 0 or -errno. */
int want_owners(const uint16_t *owners, unsigned own);

/* Have the owner copy the file at `path` below the source's root, or the node that stands in if the owner has
 * just failed. It must be another node, and worth the time: on average, it takes at most four times as long for a
 * file as the source (`source_ns`, 0: not known). Threads that want files of the same node ask together. Returns
 * whether places_get has it then. */
bool want_replica(const unsigned char *name, size_t size, const char *path, uint64_t source_ns);

/* Note how long a reader waited for a file that a peer had. */
void want_took(const unsigned char *name, uint64_t ns);

/* For how many files the owner was not asked, because that was not worth the time. */
uint64_t want_bypassed(void);

#endif
