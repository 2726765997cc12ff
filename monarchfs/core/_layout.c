/* The layout of a file on Lustre, little-endian. See _layout.h, and source/layout.py for the formats. */
#include "_layout.h"

#include <stdint.h>

#define V1 0x0BD10BD0u
#define V3 0x0BD30BD0u
#define COMPOSITE 0x0BD60BD0u
#define RELEASED 0x80000000u /* LOV_PATTERN_F_RELEASED */
#define PLAIN_BYTES 32
#define COMPOSITE_BYTES 32
#define COMPONENT_BYTES 48

static uint32_t number(const unsigned char *at)
{
	return at[0] | (uint32_t)at[1] << 8 | (uint32_t)at[2] << 16 | (uint32_t)at[3] << 24;
}

static bool plain_released(const unsigned char *value, size_t size)
{
	return size >= PLAIN_BYTES && (number(value) == V1 || number(value) == V3) &&
	       number(value + 4) & RELEASED;
}

bool layout_released(const unsigned char *value, size_t size)
{
	if (size < COMPOSITE_BYTES || number(value) != COMPOSITE)
		return plain_released(value, size);
	/* Of several components all are, or the file is not. */
	size_t count = value[14] | (size_t)value[15] << 8;
	if (size < COMPOSITE_BYTES + count * COMPONENT_BYTES)
		return false;
	for (size_t n = 0; n < count; n++) {
		const unsigned char *component = value + COMPOSITE_BYTES + n * COMPONENT_BYTES;
		size_t offset = number(component + 24), length = number(component + 28);
		if (offset > size || length > size - offset ||
		    !plain_released(value + offset, length))
			return false;
	}
	return count;
}
