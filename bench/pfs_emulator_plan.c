#define _GNU_SOURCE
#include "pfs_emulator_plan.h"

#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <sys/mman.h>
#include <time.h>

#define MOST_IN_FLIGHT 64
#define STEPS_OF_A_SPELL 8

static _Atomic uint64_t *counters;

int plan_count_in(int fd)
{
	void *shared = mmap(NULL, COUNTERS * sizeof *counters, PROT_READ | PROT_WRITE, MAP_SHARED,
			    fd, 0);
	if (shared == MAP_FAILED)
		return -1;
	counters = shared;
	return 0;
}

static pthread_mutex_t plan = PTHREAD_MUTEX_INITIALIZER; /* guards what follows */
static pthread_cond_t changed = PTHREAD_COND_INITIALIZER;
static struct settings settings;
static double noise_began;
static double link_free; /* when the last byte promised so far has come */
static double slot_free[MOST_IN_FLIGHT]; /* the same of each metadata request at once */

double plan_now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

void sleep_until(double when)
{
	struct timespec time = {.tv_sec = (time_t)when};
	time.tv_nsec = (long)(1e9 * (when - (double)time.tv_sec));
	while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &time, NULL) == EINTR)
		;
}

/* Steele, Lea, Flood: Fast splittable pseudorandom number generators (OOPSLA 2014), splitmix64's
 * output for a counter. */
static double random_of(uint64_t seed, uint64_t number)
{
	uint64_t x = seed + (number + 1) * 0x9e3779b97f4a7c15;
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
	x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
	x ^= x >> 31;
	return (double)(x >> 11) * 0x1p-53;
}

/* Half of it changes each step, the other half lasts. */
double plan_share(const struct settings *of, uint64_t step)
{
	double gust = random_of(of->seed, 2 * step);
	double spell = random_of(of->seed, 2 * (step / STEPS_OF_A_SPELL) + 1);
	return of->noise * (gust + spell) / 2;
}

static uint64_t step_at(double time)
{
	return time <= noise_began ? 0 : (uint64_t)((time - noise_began) / settings.noise_period);
}

static double share_at(double time)
{
	return settings.noise > 0 ? plan_share(&settings, step_at(time)) : 0;
}

/* When `bytes` have come that begin to come at `start`. */
static double transferred(double start, double bytes)
{
	if (settings.noise <= 0)
		return start + bytes / settings.bandwidth;
	for (uint64_t step = step_at(start);; step++) {
		double rate = settings.bandwidth * (1 - plan_share(&settings, step));
		double end = noise_began + (double)(step + 1) * settings.noise_period;
		double needed = bytes / rate;
		if (start + needed <= end)
			return start + needed;
		if (end > start) {
			bytes -= (end - start) * rate;
			start = end;
		}
	}
}

void plan_count(enum counter counter, uint64_t more)
{
	atomic_fetch_add_explicit(&counters[counter], more, memory_order_relaxed);
}

uint64_t plan_targets(void)
{
	pthread_mutex_lock(&plan);
	uint64_t targets = settings.targets;
	pthread_mutex_unlock(&plan);
	return targets;
}

double plan_recall_seconds(void)
{
	pthread_mutex_lock(&plan);
	double seconds = settings.recall_seconds;
	pthread_mutex_unlock(&plan);
	return seconds;
}

int plan_wait_for(uint64_t targets)
{
	pthread_mutex_lock(&plan);
	while (settings.hung & targets)
		pthread_cond_wait(&changed, &plan);
	int error = settings.failing & targets ? EIO : 0;
	pthread_mutex_unlock(&plan);
	return error;
}

double plan_metadata(enum counter counter)
{
	plan_count(counter, 1);
	double begin = plan_now();
	pthread_mutex_lock(&plan);
	uint64_t first = 0;
	for (uint64_t slot = 1; slot < settings.metadata_in_flight; slot++)
		if (slot_free[slot] < slot_free[first])
			first = slot;
	if (slot_free[first] > begin)
		begin = slot_free[first];
	double end = begin + settings.metadata_seconds / (1 - share_at(begin));
	slot_free[first] = end;
	pthread_mutex_unlock(&plan);
	return end;
}

static enum counter size_class(size_t bytes)
{
	enum counter class = READ_SIZES;
	for (size_t most = 4096; most < bytes && class < COUNTERS - 1; most *= 2)
		class++;
	return class;
}

double plan_read(double begin, size_t bytes)
{
	plan_count(READ, 1);
	plan_count(READ_BYTES, bytes);
	plan_count(size_class(bytes), 1);
	pthread_mutex_lock(&plan);
	begin += settings.read_seconds / (1 - share_at(begin));
	if (link_free > begin)
		begin = link_free;
	double end = transferred(begin, (double)bytes);
	link_free = end;
	pthread_mutex_unlock(&plan);
	return end;
}

void plan_set(const struct settings *given)
{
	pthread_mutex_lock(&plan);
	settings = *given;
	if (given->restart_noise)
		noise_began = plan_now();
	pthread_cond_broadcast(&changed);
	pthread_mutex_unlock(&plan);
}
