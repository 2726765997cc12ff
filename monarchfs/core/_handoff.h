/* Requests that another thread answers in place of the event loop's. See _handoff.c. */
#ifndef MONARCHFS_HANDOFF_H
#define MONARCHFS_HANDOFF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Answers a request (a fuse_in_header and what follows), with the GIL held. False if it cannot at once. */
typedef bool (*handoff_answer)(const void *request, size_t length);

/* Called by the event loop's thread when it has answered a request: wait for the next ones as long as they keep
 * coming, until `until_ns` (CLOCK_MONOTONIC) at most. True if `news_fd` is readable. The caller holds the
 * GIL; it is released meanwhile. */
bool handoff_wait(handoff_answer answer, int news_fd, uint64_t until_ns);

/* Called by any other thread, without the GIL: try to answer a request. True if it was answered. */
bool handoff_answered(const void *request, size_t length);

#endif
