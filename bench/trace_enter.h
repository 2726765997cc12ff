/* Included before each C file of a traced build (gcc -finstrument-functions): notes when which thread enters which
 * function, in a file of the process that is mapped into its memory. See bench/trace.py. */
#ifndef MONARCHFS_TRACE_ENTER_H
#define MONARCHFS_TRACE_ENTER_H
#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define TRACE_EVENTS (1U << 22)
#define TRACE_OWN __attribute__((weak, visibility("hidden"), no_instrument_function))

struct trace_event {
	uint64_t ns; /* CLOCK_MONOTONIC */
	uint32_t thread, function; /* from the beginning of the shared object on */
};

/* The first event stands for the count of the others. */
extern struct trace_event *trace_events;
extern const char __ehdr_start[] __attribute__((visibility("hidden")));
__attribute__((weak, visibility("hidden"))) struct trace_event *trace_events;

TRACE_OWN void trace_open(void);
TRACE_OWN void trace_open(void)
{
	Dl_info image;
	char path[4096];
	if (!dladdr(__ehdr_start, &image))
		return;
	const char *name = strrchr(image.dli_fname, '/');
	snprintf(path, sizeof(path), "%s/%d.%s", TRACE_DIRECTORY, (int)getpid(), name ? name + 1 : image.dli_fname);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	const size_t bytes = sizeof(struct trace_event) * (TRACE_EVENTS + 1);
	if (fd < 0)
		return;
	void *memory = ftruncate(fd, (off_t)bytes) == 0 ? mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0) :
							   MAP_FAILED;
	close(fd);
	if (memory != MAP_FAILED)
		__atomic_store_n(&trace_events, memory, __ATOMIC_RELEASE);
}

TRACE_OWN void __cyg_profile_func_exit(void *function, void *caller);
TRACE_OWN void __cyg_profile_func_exit(void *function, void *caller)
{
	(void)function;
	(void)caller;
}

TRACE_OWN void __cyg_profile_func_enter(void *function, void *caller);
TRACE_OWN void __cyg_profile_func_enter(void *function, void *caller)
{
	static __thread uint32_t thread;
	const int before = errno;
	(void)caller;
	if (!thread)
		thread = (uint32_t)syscall(SYS_gettid);
	if (!__atomic_load_n(&trace_events, __ATOMIC_ACQUIRE))
		trace_open(); /* twice at most, which does no harm: it is the same file */
	struct trace_event *events = __atomic_load_n(&trace_events, __ATOMIC_ACQUIRE);
	if (events) {
		struct timespec now;
		clock_gettime(CLOCK_MONOTONIC, &now);
		uint64_t at = __atomic_add_fetch(&events->ns, 1, __ATOMIC_RELAXED);
		if (at <= TRACE_EVENTS) {
			events[at].thread = thread;
			events[at].function = (uint32_t)((const char *)function - __ehdr_start);
			events[at].ns = (uint64_t)now.tv_sec * 1000000000 + (uint64_t)now.tv_nsec;
		}
	}
	errno = before;
}

#endif
