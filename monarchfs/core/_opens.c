/* Answers to OPEN. See _opens.h. */
#define _GNU_SOURCE
#include "_opens.h"

#include "_queue.h"
#include "_reply.h"
#include "_resident.h"
#include "_table.h"

#include <fcntl.h>

static bool answers_here = true;
static uint32_t flags = FOPEN_KEEP_CACHE;

void opens_answer_here(bool here, bool direct)
{
	__atomic_store_n(&flags, direct ? FOPEN_DIRECT_IO : FOPEN_KEEP_CACHE, __ATOMIC_RELAXED);
	__atomic_store_n(&answers_here, here, __ATOMIC_RELAXED);
}

/* If the kernel took no answer with this handle, but Python owns it by now, Python gets a RELEASE as if from the
 * kernel. */
static void answer_with_handle(uint64_t unique, uint64_t fh, const void *out, size_t length,
			       enum duration counted, enum answered_by by, uint64_t started_ns)
{
	struct {
		struct fuse_in_header in;
		struct fuse_release_in release;
	} end = {
		.in = {.len = sizeof(end), .opcode = FUSE_RELEASE},
		.release = {.fh = fh},
	};
	bool accepted = reply_with(unique, by, 0, out, length);
	if (accepted)
		reply_time(counted, by, started_ns);
	if (table_opened(fh, accepted))
		queue_put(&end, sizeof(end), NEW);
}

/* O_DIRECT reads of the tier's file may need an alignment that those of the source's do not. So the kernel sends them
 * here: they may have any. */
static uint32_t flags_of(const struct fuse_in_header *in, bool backed)
{
	bool direct = ((const struct fuse_open_in *)(in + 1))->flags & O_DIRECT;
	if (backed)
		return direct ? OPEN_PASSTHROUGH | FOPEN_DIRECT_IO : OPEN_PASSTHROUGH;
	return __atomic_load_n(&flags, __ATOMIC_RELAXED);
}

/* `unique` as for table_add. False if too many files are open. */
static bool answer_open(const struct fuse_in_header *in, uint64_t unique, enum duration counted,
			enum answered_by by, uint64_t started_ns)
{
	struct backed_open_out out = {0};
	if (table_add(in->nodeid, unique, ANSWERING, &out.fh, &out.backing_id) < 0)
		return false;
	out.open_flags = flags_of(in, out.backing_id);
	answer_with_handle(in->unique, out.fh, &out, sizeof(out), counted, by, started_ns);
	return true;
}

bool opens_answer_source(const struct fuse_in_header *in, enum answered_by by, uint64_t started_ns)
{
	return answer_open(in, in->unique, TIME_OPEN_SOURCE, by, started_ns);
}

bool opens_read_only(const struct fuse_in_header *in)
{
	return (((const struct fuse_open_in *)(in + 1))->flags & O_ACCMODE) == O_RDONLY;
}

static bool undecided_too(void)
{
	return __atomic_load_n(&answers_here, __ATOMIC_RELAXED);
}

/* Of a file that resident_open has counted as open. */
static bool answer_resident(const struct fuse_in_header *in, uint64_t unique, enum answered_by by, uint64_t started_ns)
{
	bool answered = answer_open(in, unique, TIME_OPEN_LOCAL, by, started_ns);
	resident_unuse(in->nodeid);
	return answered;
}

bool opens_answer(const struct fuse_in_header *in, bool again, uint64_t started_ns)
{
	if (!opens_read_only(in) || !resident_open(in->nodeid, undecided_too()))
		return false;
	return answer_resident(in, again ? in->unique | RESENT : in->unique, BY_MEMORY, started_ns);
}

bool opens_ask(const struct fuse_in_header *in)
{
	return opens_read_only(in) && resident_may_open(in->nodeid, undecided_too());
}

bool opens_answer_checked(const struct fuse_in_header *in, uint64_t started_ns)
{
	return resident_open_checked(in->nodeid, undecided_too()) &&
	       answer_resident(in, in->unique, BY_CHECKED, started_ns);
}
