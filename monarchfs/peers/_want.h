/* Asking the owner of a small file for it, where it is not known to have it. Thread-safe. */
#ifndef MONARCHFS_WANT_H
#define MONARCHFS_WANT_H

#include "_fetch.h"

#define OWNER_BUCKETS 65536
#define WANT_PATH_BYTES 4096
#define MOST_WANTED 128 /* in one request */

/* The owner of each bucket of names, by its number; `own` is this node's. 0 or -errno. */
int want_owners(const uint16_t *owners, unsigned own);

/* Have the owner copy a file, which lies at `path` below the source's root, if it is another node and has not
 * just failed. Threads that want files of the same owner ask together. Whether places_get has it then. */
bool want_replica(const unsigned char *name, size_t size, const char *path);

#endif
