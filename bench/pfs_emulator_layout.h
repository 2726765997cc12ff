/* Where the bytes of a file lie: on which storage targets, or in an archive (Lustre's HSM).
 *
 * A file of the directory behind may say so itself, in LAYOUT_ATTRIBUTE: "STRIPES STRIPE_BYTES FIRST",
 * and " released" where only the archive has it. Else it has one stripe. Stripe n lies on target
 * (FIRST + n) modulo the number of targets. */
#pragma once

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/stat.h>
#include <sys/types.h>

#define LAYOUT_ATTRIBUTE "user.pfs.layout"
#define LUSTRE_ATTRIBUTE "lustre.lov"

struct layout {
	uint32_t stripes, stripe_bytes, first;
	bool released;
};

/* Of what `found` describes at `path`; `targets` is not 0. */
struct layout layout_of(const char *path, const struct stat *found, uint64_t targets);

/* The targets of these bytes, as bits; of a released file none. */
uint64_t layout_targets(const struct layout *layout, uint64_t targets, off_t offset, size_t size);

/* Writes what lustre.lov says (struct lov_mds_md_v1) into `value`, of XATTR_SIZE_MAX bytes; its length, or
 * -E2BIG. */
ssize_t layout_value(const struct layout *layout, uint64_t targets, char *value);

/* A read needs what only the archive has. Returns when it is there (CLOCK_MONOTONIC), `seconds` after the first
 * one needed it, which is `first`. From then on the file is not released any more. */
double layout_recall(const struct stat *found, double now, double seconds, bool *first);
