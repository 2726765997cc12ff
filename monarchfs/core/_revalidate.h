/* Look-ups and opens for which the source has to be asked each time (--freshness open), without Python.
 *
 * Python puts names here with what the source said of them (_names.h), and says which directories are open
 * (_directories.h). A source thread then asks for the attributes of the name. If they are what was known, the request
 * is answered. If anything is otherwise, or the source does not answer, the request is left to Python, to which it
 * looks as if it had just come. Thread-safe. */
#ifndef MONARCHFS_REVALIDATE_H
#define MONARCHFS_REVALIDATE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* Begin. `device`: the source's st_dev. Before the threads; without it nothing is taken. */
void revalidate_start(uint64_t device);

/* Take a LOOKUP of such a name, or an OPEN of a resident file that has one: true if it is answered, or will be. `kept`:
 * the journal has it. */
bool revalidate_took(const void *request, size_t length, bool kept, uint64_t started_ns);

#endif
