/* What the programs of this directory share. */
#ifndef MONARCHFS_TESTS_CHECK_H
#define MONARCHFS_TESTS_CHECK_H

#include <errno.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                  \
	do {                                                                              \
		if (!(condition)) {                                                       \
			fprintf(stderr, "%s:%d: %s (%d)\n", __FILE__, __LINE__, #condition, errno); \
			abort();                                                          \
		}                                                                         \
	} while (0)

#endif
