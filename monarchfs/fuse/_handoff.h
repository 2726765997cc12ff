/* Requests that are answered while the event loop's thread waits for them. See _handoff.c. */
#ifndef MONARCHFS_PARKING_H
#define MONARCHFS_PARKING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* How the event loop's thread answers a request (a fuse_in_header and what follows); with the GIL,
 * false where it does not at once. */
typedef bool (*handoff_answer)(const void *request, size_t length);

/* The event loop's thread has just answered a request: wait for the next as long as they keep coming,
 * until `until_ns` (CLOCK_MONOTONIC) at most. Whether `news_fd` is readable. The caller holds the GIL,
 * which is free meanwhile. */
bool handoff_wait(handoff_answer answer, int news_fd, uint64_t until_ns);

/* For any other thread, without the GIL: whether a request is answered by now. */
bool handoff_answered(const void *request, size_t length);

#endif
