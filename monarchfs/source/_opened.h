/* Files of the source that were opened to learn their attributes, until they are read: one question to the server in
 * place of two. They are kept for seconds, and no more of them than a process can spare. Thread-safe. */
#ifndef MONARCHFS_OPENED_H
#define MONARCHFS_OPENED_H

#include "../core/_small_file.h"

#include <stdint.h>
#include <sys/stat.h>

/* Take over the descriptor of a file. Returns one that the caller has to close, because there is no place for both; -1:
 * none. */
int opened_keep(const struct stat *st, int fd);

/* For the threads that read small files. */
small_opened opened_take;

/* One that was kept for longer than `ns`, which is the caller's from now on; -1: there is none. */
int opened_take_stale(uint64_t ns);

#endif
