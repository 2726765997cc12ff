/* When an answer is due, and what was asked. */
#pragma once

#include <stddef.h>
#include <stdint.h>

enum counter {
	LOOKUP,
	GETATTR,
	OPEN,
	OPENDIR,
	READDIR,
	READ,
	XATTR,
	STATFS,
	READ_BYTES,
	/* What a client of Lustre would ask for that, of servers with targets. */
	ENQUEUE,
	GLIMPSE,
	CLOSE,
	SEEK,
	RECALL,
	READ_SIZES, /* of at most 4 KiB, 8 KiB, ... and 1 MiB */
	COUNTERS = READ_SIZES + 9,
};

/* As bench/pfs.py packs it. */
struct settings {
	double bandwidth; /* bytes a second; infinite: no limit */
	double metadata_seconds;
	double read_seconds;
	double noise; /* the share that others take at worst, below 1 */
	double noise_period;
	double recall_seconds;
	uint64_t metadata_in_flight;
	uint64_t seed;
	uint64_t restart_noise; /* not 0: the noise begins anew now */
	uint64_t targets; /* 64 at most; 0: files have no layouts. What it was at first counts */
	uint64_t hung, failing; /* bits of targets */
};

/* Shared memory for COUNTERS numbers; 0, or -1 with errno. */
int plan_count_in(int fd);
void plan_set(const struct settings *given);

/* Times are seconds of CLOCK_MONOTONIC. */
double plan_now(void);
void sleep_until(double when);

uint64_t plan_targets(void);
double plan_recall_seconds(void);
void plan_count(enum counter counter, uint64_t more);

/* Waits while one of these targets (bits) hangs; 0, or EIO where one fails. */
int plan_wait_for(uint64_t targets);

/* A metadata request begins: counts it, and returns when it is answered. */
double plan_metadata(enum counter counter);

/* The same for reading that began then: requests travel at once, bytes one after the other. */
double plan_read(double began, size_t bytes);

/* What others take of everything in this step of the noise. */
double plan_share(const struct settings *of, uint64_t step);
