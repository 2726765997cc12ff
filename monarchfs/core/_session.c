/* Functions of libfuse that this module replaces, where pyfuse3 has no hook between libfuse and the kernel.
 *
 * This module is loaded with RTLD_GLOBAL before pyfuse3, so that the dynamic linker resolves
 * pyfuse3's calls to the functions below to these definitions (ld.so(8), symbol lookup order);
 * where the library's own is needed it is found with dlsym(RTLD_NEXT).
 *
 *   fuse_session_fd            tells pyfuse3 what to wait for: first libfuse's descriptor, then the
 *                              queue of the threads that read the kernel's (_relay.c)
 *   fuse_session_receive_buf   takes one request, remembers its process, and handles
 *                              FUSE_INTERRUPT, for which pyfuse3 has no hook
 *   fuse_reply_open            adds a backing id, which libfuse 3.14 does not support
 *
 * pyfuse3 calls them with the GIL held, from one thread.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>
#include <linux/fuse.h>

#include <dlfcn.h>
#include <errno.h>
#include <poll.h>
#include <stdbool.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/uio.h>
#include <unistd.h>

#include "_journal.h"
#include "_relay_bindings.h"
#include "_handoff.h"
#include "_opens.h"
#include "_record.h"
#include "_relay.h"
#include "_table.h"

#include "_bindings.h"
#include "_waiting.h"

/* How often an interrupt that comes before its request is returned to the kernel. */
#define MOST_RETURNS 3
#define RETURNS_KEPT 64

/* How long requests are answered before the event loop's other tasks run. */
#define TURN_NS 3000000

static uint64_t current_unique, current_node;
static enum queued_after current_past;
static uint32_t current_opcode;
static uint32_t current_pid;
static PyObject *on_interrupt; /* callable(unique) or NULL */
static PyObject *on_request; /* callable(opcode, node id, body) or NULL */
static int waited_fd = -1; /* an epoll descriptor, so that what pyfuse3 waits for can be replaced */
static bool relaying;
static int news_fd = -1; /* readable while the threads have left requests to Python */
static struct fuse_session *session;
static bool directly; /* only pyfuse3's loop reads requests */

static struct {
	uint64_t unique;
	unsigned times;
} returned[RETURNS_KEPT];

static int real_session_fd(struct fuse_session *se)
{
	static int (*real)(struct fuse_session *);
	if (!real) {
		real = dlsym(RTLD_NEXT, "fuse_session_fd");
		if (!real)
			Py_FatalError("libfuse has no fuse_session_fd");
	}
	return real(se);
}

static int watch(int operation, int fd)
{
	struct epoll_event event = {.events = EPOLLIN};
	return epoll_ctl(waited_fd, operation, fd, &event) < 0 ? -errno : 0;
}

int fuse_session_fd(struct fuse_session *se)
{
	int fd = real_session_fd(se);
	if (directly)
		return fd;
	if (waited_fd < 0) {
		waited_fd = epoll_create1(EPOLL_CLOEXEC);
		if (waited_fd >= 0 && watch(EPOLL_CTL_ADD, fd) < 0) {
			close(waited_fd);
			waited_fd = -1;
		}
	}
	return waited_fd < 0 ? fd : waited_fd;
}

/* pyfuse3 answers a request directly after its handler has ended, and so before this is called the next
 * time. */
static void answering(uint64_t unique)
{
	static uint64_t last;
	if (last)
		journal_done(last & ~RESENT);
	last = unique;
}

/* Whether Python reports the answer. libfuse answers other requests at once, without Python. */
static bool is_handled(uint32_t opcode)
{
	switch (opcode) {
	case FUSE_LOOKUP:
	case FUSE_GETATTR:
	case FUSE_READLINK:
	case FUSE_OPEN:
	case FUSE_READ:
	case FUSE_STATFS:
	case FUSE_RELEASE:
	case FUSE_GETXATTR:
	case FUSE_LISTXATTR:
	case FUSE_FLUSH:
	case FUSE_OPENDIR:
	case FUSE_READDIRPLUS:
	case FUSE_RELEASEDIR:
	case FUSE_FSYNCDIR:
	case FUSE_ACCESS:
		return true;
	}
	return false;
}

/* One request from libfuse's descriptor: its length, 0 at the end, -errno. */
static ssize_t receive_here(struct fuse_session *se, void *buffer)
{
	ssize_t got = read(real_session_fd(se), buffer, REQUEST_BYTES);
	if (got >= 0)
		return got; /* 0: the other end of the socket pair of the hand-over is closed */
	int error = errno;
	if (fuse_session_exited(se) || error == ENODEV) /* ENODEV: unmounted */
		return 0;
	/* ENOENT: the request was withdrawn while it was being read. pyfuse3 waits for readability
	 * again after EINTR; the descriptor does not block, and a request that was announced may
	 * have been withdrawn. */
	return error == EAGAIN || error == ENOENT ? -EINTR : -error;
}

/* One request that the threads left to Python; returns the same. */
static ssize_t receive_queued(void *buffer)
{
	int ended_by = 0;
	long got = queue_next(buffer, &ended_by, &current_past);
	if (got == -EAGAIN)
		return -EINTR;
	return got == 0 && ended_by != ENODEV ? -ended_by : got;
}

/* Return an interrupt to the kernel, which sends it again as long as its request is not answered (fs/fuse/dev.c,
 * fuse_dev_do_write): the thread that took the request may not have queued it yet. */
static void give_back(int fd, uint64_t unique)
{
	size_t place = unique / 2 % RETURNS_KEPT;
	if (returned[place].unique != unique) {
		returned[place].unique = unique;
		returned[place].times = 0;
	}
	if (++returned[place].times > MOST_RETURNS)
		return;
	struct fuse_out_header out = {.len = sizeof(out), .error = -EAGAIN, .unique = unique};
	/* Fails if the request was answered meanwhile. */
	if (write(fd, &out, sizeof(out)) < 0)
		returned[place].times = MOST_RETURNS;
}

static void interrupted(struct fuse_session *se, const struct fuse_in_header *in)
{
	const struct fuse_interrupt_in *arg = (const void *)(in + 1);
	PyObject *known = PyObject_CallFunction(on_interrupt, "K", (unsigned long long)arg->unique);
	if (!known)
		PyErr_WriteUnraisable(on_interrupt);
	else if (relaying && known == Py_False) {
		/* Python gives the request up if its process dies, so leave it to Python before the interrupt. */
		waiting_leave(arg->unique);
		give_back(real_session_fd(se), in->unique);
	}
	Py_XDECREF(known);
}

/* Not one of the kernel's: see fuse/protocol.py. */
#define UNOPENED 0xffff

/* Notify Python of something that gets no answer. */
static void notify_python(uint32_t opcode, uint64_t node, const void *body, size_t length)
{
	if (!on_request)
		return;
	PyObject *done = PyObject_CallFunction(on_request, "IKy#", opcode, (unsigned long long)node,
					       (const char *)body, (Py_ssize_t)length);
	if (!done)
		PyErr_WriteUnraisable(on_request);
	Py_XDECREF(done);
}

/* The kernel no longer waits for the answer to an open: an earlier worker had answered it, and the handle may
 * have been released since. */
static void unopened(uint64_t fh)
{
	notify_python(UNOPENED, 0, &fh, sizeof(fh));
}

/* Whether Python answered the request at once. */
static bool answered(struct fuse_session *se, const struct fuse_in_header *in, size_t length)
{
	/* Without threads pyfuse3 answers all but listings: it cannot list without attributes. */
	if (!on_request || (!relaying && in->opcode != FUSE_READDIRPLUS))
		return false;
	if (in->opcode == FUSE_READ && ((const struct fuse_read_in *)(in + 1))->fh)
		return false; /* pyfuse3 has its handle */
	if (in->opcode == FUSE_RELEASE && !in->unique &&
	    table_held(((const struct fuse_release_in *)(in + 1))->fh))
		return true; /* not the kernel's: and that has the handle from another answer by now */
	if (in->opcode != FUSE_LOOKUP && in->opcode != FUSE_GETATTR && in->opcode != FUSE_OPEN &&
	    in->opcode != FUSE_RELEASE && in->opcode != FUSE_OPENDIR &&
	    in->opcode != FUSE_READDIRPLUS && in->opcode != FUSE_RELEASEDIR &&
	    in->opcode != FUSE_GETXATTR && in->opcode != FUSE_READ && in->opcode != FUSE_ACCESS)
		return false;
	PyObject *body = PyObject_CallFunction(on_request, "IKy#", in->opcode,
					       (unsigned long long)in->nodeid, (const char *)(in + 1),
					       (Py_ssize_t)(length - sizeof(*in)));
	const bool fails = body && PyLong_CheckExact(body);
	if (!body || (!fails && !PyBytes_Check(body))) {
		bool again = body == Py_True;
		if (!body) /* a bug; pyfuse3 meets it again, and answers EIO */
			PyErr_WriteUnraisable(on_request);
		Py_XDECREF(body);
		return again && relay_answered(in, length, current_past);
	}
	const size_t size = fails ? 0 : (size_t)PyBytes_GET_SIZE(body);
	struct fuse_out_header out = {
		.len = (uint32_t)(sizeof(out) + size),
		.error = fails ? -(int)PyLong_AsLong(body) : 0,
		.unique = in->unique,
	};
	struct iovec parts[] = {{&out, sizeof(out)}, {fails ? NULL : PyBytes_AS_STRING(body), size}};
	/* Fails if nothing waits for the answer any more. */
	ssize_t sent;
	do {
		sent = writev(real_session_fd(se), parts, 2);
	} while (sent < 0 && errno == EINTR);
	if (sent < 0 && errno == ENOENT && in->opcode == FUSE_OPEN && current_past == TAKEN &&
	    size >= sizeof(struct fuse_open_out))
		unopened(((const struct fuse_open_out *)PyBytes_AS_STRING(body))->fh);
	if (recording())
		record_answer(in->unique, BY_MEMORY, out.error, parts[1].iov_base, size);
	Py_DECREF(body);
	journal_done(in->unique);
	return true;
}

static bool answered_here(const void *request, size_t length)
{
	return answered(session, request, length);
}

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
	/* pyfuse3 keeps the content of `buf` while the request waits, so the buffer is as small as the request. Its
	 * pages are in memory from the beginning, like those of the threads' buffers (_relay.c). */
	static char *received;
	if (!received) {
		received = malloc(REQUEST_BYTES);
		if (!received)
			return -ENOMEM;
		memset(received, 0, REQUEST_BYTES);
	}
	const struct fuse_in_header *in = (const void *)received;
	ssize_t got;
	session = se;
	answering(0);
	const uint64_t until_ns = monotonic_ns() + TURN_NS;
	for (bool parks = false;; parks = relaying) {
		got = relaying ? receive_queued(received) : receive_here(se, received);
		if (got == -EINTR && parks && handoff_wait(answered_here, news_fd, until_ns))
			got = receive_queued(received);
		if (got == 0)
			fuse_session_exit(se);
		if (got <= 0)
			return (int)got;
		if ((size_t)got < sizeof(*in))
			return -EIO;
		current_unique = current_past == TAKEN ? in->unique | RESENT : in->unique;
		current_node = in->nodeid;
		current_opcode = in->opcode;
		current_pid = in->pid;
		if (in->opcode == FUSE_INTERRUPT && on_interrupt &&
		    (size_t)got >= sizeof(*in) + sizeof(struct fuse_interrupt_in))
			interrupted(se, in); /* never answered */
		else if (relaying && in->opcode == QUEUE_AHEAD)
			notify_python(in->opcode, in->nodeid, in + 1, (size_t)got - sizeof(*in));
		else if (!answered(se, in, (size_t)got))
			break;
		/* There may be more, but other tasks have to run, too. */
		if (monotonic_ns() > until_ns)
			return -EINTR;
	}
	if (relaying && !is_handled(in->opcode))
		answering(in->unique);
	void *copy = NULL;
	while (!(copy = realloc(buf->mem, (size_t)got)))
		poll(NULL, 0, 10); /* a process waits for the answer, so wait for memory */
	memcpy(copy, received, (size_t)got);
	buf->mem = copy;
	buf->size = (size_t)got;
	buf->flags = 0;
	return (int)got;
}

static uint64_t backed_fh; /* of the open that is answered next */
static int backing_id; /* 0: none */

int fuse_reply_open(fuse_req_t req, const struct fuse_file_info *fi)
{
	static int (*real)(fuse_req_t, const struct fuse_file_info *);
	if (!real) {
		real = dlsym(RTLD_NEXT, "fuse_reply_open");
		if (!real)
			Py_FatalError("libfuse has no fuse_reply_open");
	}
	int sent;
	if (!backing_id || fi->fh != backed_fh) {
		sent = real(req, fi);
	} else {
		struct backed_open_out out = {fi->fh, OPEN_PASSTHROUGH, (uint32_t)backing_id};
		backing_id = 0;
		sent = fuse_reply_buf(req, (const char *)&out, sizeof(out));
	}
	if (sent == -ENOENT && journal_used())
		unopened(fi->fh);
	return sent;
}

/* Of the request that was received last, until its handler's first checkpoint. */
static PyObject *py_current(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	return Py_BuildValue("KIIK", (unsigned long long)current_unique, current_opcode, current_pid,
			     (unsigned long long)current_node);
}

/* The open that is answered with this handle next has the kernel read the backing file. */
static void back_open(uint64_t fh, int id)
{
	backed_fh = fh;
	backing_id = id;
}

ASKS_OF_TWO(back_open, NONE_AFTER, "Ki", unsigned long long, int)

static PyObject *set_handler(PyObject **place, PyObject *handler)
{
	if (handler != Py_None && !PyCallable_Check(handler)) {
		PyErr_SetString(PyExc_TypeError, "the handler must be callable or None");
		return NULL;
	}
	PyObject *old = *place;
	*place = handler == Py_None ? NULL : Py_NewRef(handler);
	Py_XDECREF(old);
	Py_RETURN_NONE;
}

/* handler(unique) is called when the kernel says that the process of this request got a signal. It returns False if
 * it does not know the request. Without a handler (None), interrupts go to libfuse, which ignores them. */
static PyObject *py_set_interrupt_handler(PyObject *Py_UNUSED(self), PyObject *handler)
{
	return set_handler(&on_interrupt, handler);
}

/* handler(opcode, node id, body) is called with requests that it may answer at once. It returns the body of the
 * answer (bytes), its errno (a number), None to leave the request to pyfuse3, or True to have the threads' code try
 * again. */
static PyObject *py_set_request_handler(PyObject *Py_UNUSED(self), PyObject *handler)
{
	return set_handler(&on_request, handler);
}

/* There will be no threads: pyfuse3 waits for libfuse's descriptor. Called before pyfuse3's init. */
static PyObject *py_read_directly(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	directly = true;
	Py_RETURN_NONE;
}

/* See _relay.h. False if pyfuse3 does not wait for the right descriptor. */
static PyObject *py_start_relay(PyObject *Py_UNUSED(self), PyObject *args)
{
	int init_fd, fd;
	unsigned threads, waiting_reads, bounds = 0;
	int free_opens;
	PyObject *given;
	uint64_t bounds_ns[MOST_BOUNDS];
	if (!PyArg_ParseTuple(args, "iiIIpO!", &init_fd, &fd, &threads, &waiting_reads, &free_opens,
			      &PyTuple_Type, &given))
		return NULL;
	for (; bounds < MOST_BOUNDS && bounds < PyTuple_GET_SIZE(given); bounds++) {
		bounds_ns[bounds] = PyLong_AsUnsignedLongLong(PyTuple_GET_ITEM(given, bounds));
		if (PyErr_Occurred())
			return NULL;
	}
	if (waited_fd < 0)
		Py_RETURN_FALSE;
	counts_start(bounds_ns, bounds);
	int news = relay_start(fd, threads, waiting_reads, free_opens);
	if (news < 0)
		return failed(-news);
	relaying = true;
	news_fd = news;
	watch(EPOLL_CTL_DEL, init_fd);
	int error = watch(EPOLL_CTL_ADD, news);
	return error < 0 ? failed(-error) : bool_of(true);
}

static PyObject *py_journal(PyObject *Py_UNUSED(self), PyObject *given)
{
	long fd = PyLong_AsLong(given);
	if (fd == -1 && PyErr_Occurred())
		return NULL;
	return none_unless(journal_start((int)fd));
}

/* The handler of this request ends now, and pyfuse3 answers. With a journal only. */
TELLS_NUMBER(answering)

static void take_again(void)
{
	if (relaying)
		relay_again();
}

TELLS(take_again)

static PyObject *py_answer_opens(PyObject *Py_UNUSED(self), PyObject *args)
{
	int here, direct = false;
	if (!PyArg_ParseTuple(args, "p|p", &here, &direct))
		return NULL;
	opens_answer_here(here, direct);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	METHOD(current, METH_NOARGS),
	METHOD(back_open, METH_VARARGS),
	METHOD(set_interrupt_handler, METH_O),
	METHOD(set_request_handler, METH_O),
	METHOD(read_directly, METH_NOARGS),
	METHOD(start_relay, METH_VARARGS),
	METHOD(journal, METH_O),
	{"answered_soon", py_answering, METH_O, NULL},
	METHOD(take_again, METH_NOARGS),
	METHOD(answer_opens, METH_VARARGS),
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.core._session",
	.m_doc = "Hooks between libfuse and pyfuse3; import it through monarchfs.fuse.session only.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__session(void)
{
	PyObject *m = PyModule_Create(&module);
	if (m && (PyModule_AddFunctions(m, known_methods) < 0 || engine_add_to(m) < 0))
		Py_CLEAR(m);
	return m;
}
