/* Whether Lustre has a file's bytes on its servers, or only in an archive. */
#ifndef MONARCHFS_ENGINE_LAYOUT_H
#define MONARCHFS_ENGINE_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

/* Whether only an archive has the bytes. `value` is the value of the attribute lustre.lov. The same as
 * Layout.released in source/layout.py. */
bool layout_released(const unsigned char *value, size_t size);

#endif
