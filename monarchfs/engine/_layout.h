/* Where Lustre has the bytes of a file, as far as it matters here. */
#ifndef MONARCHFS_ENGINE_LAYOUT_H
#define MONARCHFS_ENGINE_LAYOUT_H

#include <stdbool.h>
#include <stddef.h>

/* Whether an archive has the bytes, and the file system none: `value` is what the attribute lustre.lov
 * holds. As Layout.released of source/layout.py. */
bool layout_released(const unsigned char *value, size_t size);

#endif
