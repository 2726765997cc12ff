/* The files that the kernel knows: numbers for paths. */
#pragma once

#include <limits.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define TREE_ROOT 1

/* 0, or -1 without memory. */
int tree_begin(void);

/* The path of a file, or of a name in it, below the root; 0 or an errno. */
int tree_path(uint64_t number, const char *name, char path[static PATH_MAX]);

/* The number of the file that is `name` in `parent`, which the kernel knows once more; 0 without
 * memory. A file has one number, however many names it has. */
uint64_t tree_look_up(uint64_t parent, const char *name, const struct stat *found);
void tree_forget(uint64_t number, uint64_t lookups);

/* The thread that looked the file up; the next one to ask gets 0. */
void tree_looked_up(uint64_t number, pid_t thread);
pid_t tree_take_thread(uint64_t number);
