/* Threads that take requests from the kernel, answer those about resident files, and queue the rest.
 * See _relay.c. */
#ifndef MONARCHFS_RELAY_H
#define MONARCHFS_RELAY_H

#include "_queue.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Begin: from now on `threads` threads read and write `fuse_fd`, the mounted descriptor. At most
 * `waiting_reads` requests wait for the source without Python. `free_opens`: OPEN is answered with ENOSYS.
 * Returns the descriptor of queue_start, or -errno. Once only: a start that failed is final. */
int relay_start(int fuse_fd, unsigned threads, unsigned waiting_reads, bool free_opens);

/* Try once more with a request that was queued; true if it is answered now, or will be. */
bool relay_answered(const void *request, size_t length, enum queued_after past);

/* Queue what threads of earlier workers had that have died since, and start reads that wait behind reads that
 * hang. Called several times a second, by one thread. */
void relay_again(void);

#endif
