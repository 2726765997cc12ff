/* Functions of libfuse that this module replaces, so that pyfuse3 keeps its session and our Python answers.
 *
 * This module is loaded with RTLD_GLOBAL before pyfuse3, so that the dynamic linker resolves
 * pyfuse3's calls to the functions below to these definitions (ld.so(8), symbol lookup order);
 * where the library's own is needed it is found with dlsym(RTLD_NEXT).
 *
 *   fuse_session_fd            tells pyfuse3 what to wait for: first libfuse's descriptor, then the
 *                              queue of the threads that read the kernel's (_relay.c)
 *   fuse_session_receive_buf   takes requests and has Python answer them; libfuse gets FUSE_INIT alone
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

/* The kernel copies a longer answer while other threads run Python. */
#define MOST_COPIED_AT_ONCE (64 * 1024)

/* How long requests are answered before the event loop's other tasks run. */
#define TURN_NS 3000000

static const struct fuse_in_header *current; /* the request that is being answered */
static size_t current_length;
static enum queued_after current_past;
static PyObject *on_interrupt; /* callable(unique) or NULL */
static PyObject *on_request, *on_known_request; /* callable(opcode, node id, body) or NULL */
static int waited_fd = -1; /* an epoll descriptor, so that what pyfuse3 waits for can be replaced */
static bool paused; /* none are taken from the threads' queue */
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
	if (!on_interrupt)
		return;
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

/* Write an answer; whether the kernel waited for it. */
static bool send_answer(uint64_t unique, enum answered_by by, int error, const void *body, size_t size)
{
	struct fuse_out_header out = {
		.len = (uint32_t)(sizeof(out) + size), .error = -error, .unique = unique};
	struct iovec parts[] = {{&out, sizeof(out)}, {(void *)body, size}};
	int fd = real_session_fd(session);
	PyThreadState *state = size > MOST_COPIED_AT_ONCE ? PyEval_SaveThread() : NULL;
	ssize_t sent;
	do {
		sent = writev(fd, parts, 2);
	} while (sent < 0 && errno == EINTR);
	bool accepted = sent >= 0 || errno != ENOENT;
	if (state)
		PyEval_RestoreThread(state);
	if (recording())
		record_answer(out.unique, by, out.error, body, size);
	journal_done(unique & ~RESENT);
	table_answered();
	return accepted;
}

static PyObject *ask_python(PyObject *handler, const struct fuse_in_header *in, size_t length)
{
	PyObject *body = PyObject_CallFunction(handler, "IKy#", in->opcode, (unsigned long long)in->nodeid,
					       (const char *)(in + 1), (Py_ssize_t)(length - sizeof(*in)));
	if (!body) /* a bug */
		PyErr_WriteUnraisable(handler);
	return body;
}

/* Send what a handler returned: bytes, or an errno. */
static void send_body(const struct fuse_in_header *in, PyObject *body)
{
	if (PyLong_Check(body)) {
		send_answer(in->unique, BY_MEMORY, (int)PyLong_AsLong(body), NULL, 0);
		return;
	}
	Py_buffer bytes;
	if (PyObject_GetBuffer(body, &bytes, PyBUF_SIMPLE) < 0) {
		PyErr_WriteUnraisable(body);
		send_answer(in->unique, BY_UNKNOWN, EIO, NULL, 0);
		return;
	}
	enum answered_by by = in->opcode == FUSE_READ ? BY_TIER : BY_MEMORY;
	bool accepted = send_answer(in->unique, by, 0, bytes.buf, (size_t)bytes.len);
	if (in->opcode == FUSE_OPEN) {
		struct fuse_release_in release = {.fh = ((const struct fuse_open_out *)bytes.buf)->fh};
		if (table_opened(release.fh, accepted))
			notify_python(FUSE_RELEASE, in->nodeid, &release, sizeof(release));
	}
	PyBuffer_Release(&bytes);
}

/* Have Python answer. False if it has begun a task for that, which has to run. */
static bool answer(const struct fuse_in_header *in, size_t length)
{
	if (in->opcode == FUSE_FORGET || in->opcode == FUSE_BATCH_FORGET)
		return true; /* nothing depends on what the kernel remembers */
	PyObject *body = on_request ? ask_python(on_request, in, length) : NULL;
	const bool done = body != Py_None;
	if (!body)
		send_answer(in->unique, BY_UNKNOWN, EIO, NULL, 0);
	else if (done)
		send_body(in, body);
	Py_XDECREF(body);
	return done;
}

/* In another thread, while the event loop's stands still: only what is known. */
static bool answered_here(const void *request, size_t length)
{
	PyObject *body = on_known_request ? ask_python(on_known_request, request, length) : NULL;
	bool done = body && body != Py_None;
	if (done)
		send_body(request, body);
	Py_XDECREF(body);
	return done;
}

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
	/* Its pages are in memory from the beginning, like those of the threads' buffers (_relay.c). */
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
	const uint64_t until_ns = monotonic_ns() + TURN_NS;
	for (bool parks = false, tasks = false;; parks = relaying && !tasks) {
		if (paused)
			return -EINTR;
		got = relaying ? receive_queued(received) : receive_here(se, received);
		if (got == -EINTR && parks && handoff_wait(answered_here, news_fd, until_ns))
			got = receive_queued(received);
		if (got == 0)
			fuse_session_exit(se);
		if (got <= 0)
			return (int)got;
		if ((size_t)got < sizeof(*in))
			return -EIO;
		current = in;
		current_length = (size_t)got;
		if (in->opcode == FUSE_INIT)
			break;
		if (in->opcode == FUSE_INTERRUPT)
			interrupted(se, in); /* never answered */
		else if (relaying && in->opcode == QUEUE_AHEAD)
			notify_python(in->opcode, in->nodeid, in + 1, (size_t)got - sizeof(*in));
		else
			tasks |= !answer(in, (size_t)got);
		/* There may be more, but other tasks have to run, too. */
		if (monotonic_ns() > until_ns)
			return -EINTR;
	}
	void *copy = realloc(buf->mem, (size_t)got);
	if (!copy)
		return -ENOMEM;
	memcpy(copy, received, (size_t)got);
	buf->mem = copy;
	buf->size = (size_t)got;
	buf->flags = 0;
	return (int)got;
}

/* Of the request that is being answered: the number under which the kernel has it; the same, or with RESENT if an
 * earlier worker has had it; the thread that waits. */
static PyObject *py_current(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	unsigned long long unique = current->unique;
	return Py_BuildValue("KKI", unique, current_past == TAKEN ? unique | RESENT : unique, current->pid);
}

/* Have the threads' code try once more to answer it; whether it does, or will. */
static bool answer_again(void)
{
	return relaying && relay_answered(current, current_length, current_past);
}

ASKS(answer_again, bool_of)

/* Answer a request that a handler took; whether the kernel waited for that. */
static PyObject *py_reply(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long unique;
	unsigned by;
	int error;
	Py_buffer body;
	if (!PyArg_ParseTuple(args, "KIiy*", &unique, &by, &error, &body))
		return NULL;
	bool accepted = send_answer(unique, (enum answered_by)by, error, error ? NULL : body.buf,
				    error ? 0 : (size_t)body.len);
	PyBuffer_Release(&body);
	return PyBool_FromLong(accepted);
}

/* Leave requests in the threads' queue, or take them again. */
static PyObject *py_pause(PyObject *Py_UNUSED(self), PyObject *given)
{
	paused = relaying && given == Py_True;
	return none_unless(relaying ? watch(paused ? EPOLL_CTL_DEL : EPOLL_CTL_ADD, news_fd) : 0);
}

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
 * it does not know the request. Without a handler (None), interrupts are passed over. */
static PyObject *py_set_interrupt_handler(PyObject *Py_UNUSED(self), PyObject *handler)
{
	return set_handler(&on_interrupt, handler);
}

/* Two handlers(opcode, node id, body) of requests. They return the body of the answer (an object with a buffer), its
 * errno (a number), or None: the first, if the request is answered otherwise, or later, with `reply`; the second, which
 * is called in other threads, too, if it does not know the answer. */
static PyObject *py_set_request_handlers(PyObject *Py_UNUSED(self), PyObject *args)
{
	PyObject *all, *known, *done;
	if (!PyArg_ParseTuple(args, "OO", &all, &known) || !(done = set_handler(&on_request, all)))
		return NULL;
	Py_DECREF(done);
	return set_handler(&on_known_request, known);
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
	METHOD(set_interrupt_handler, METH_O),
	METHOD(set_request_handlers, METH_VARARGS),
	METHOD(answer_again, METH_NOARGS),
	METHOD(reply, METH_VARARGS),
	METHOD(pause, METH_O),
	METHOD(read_directly, METH_NOARGS),
	METHOD(start_relay, METH_VARARGS),
	METHOD(journal, METH_O),
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
