/* The few places where pyfuse3 does not let us between libfuse and the kernel.
 *
 * This module is loaded with RTLD_GLOBAL before pyfuse3, so that the dynamic linker resolves
 * pyfuse3's calls to the functions below to these definitions (ld.so(8), symbol lookup order);
 * where the library's own is needed it is found with dlsym(RTLD_NEXT).
 *
 *   fuse_session_receive_buf   reads one request, remembers whose it is, and takes out
 *                              FUSE_INTERRUPT, for which pyfuse3 has no hook
 *   fuse_add_direntry_plus     lets a directory entry carry no attributes (node id 0)
 *
 * pyfuse3 calls both with the GIL held, from one thread.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#define FUSE_USE_VERSION 314
#include <fuse_lowlevel.h>
#include <linux/fuse.h>

#include <dlfcn.h>
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* The kernel refuses reads into a buffer smaller than the largest request that INIT allowed
 * (fs/fuse/dev.c, fuse_dev_do_read). The mount is read-only and the reply to INIT says max_write
 * 4096, so that requests are a path component or an attribute name at most; the rest is reserve. */
#define REQUEST_BYTES (128 * 1024 + 4096)

/* EntryAttributes.generation with this value marks an entry without attributes. */
#define NO_ATTRIBUTES UINT64_MAX

static uint64_t current_unique;
static uint32_t current_opcode;
static uint32_t current_pid;
static PyObject *on_interrupt; /* callable(unique) or NULL */

int fuse_session_receive_buf(struct fuse_session *se, struct fuse_buf *buf)
{
	int fd = fuse_session_fd(se);

	if (!buf->mem) {
		buf->mem = malloc(REQUEST_BYTES);
		if (!buf->mem)
			return -ENOMEM;
	}
	for (;;) {
		ssize_t got = read(fd, buf->mem, REQUEST_BYTES);
		if (got < 0) {
			int error = errno;
			if (fuse_session_exited(se))
				return 0;
			/* ENOENT: the request was withdrawn while it was being read. */
			if (error == ENOENT)
				continue;
			if (error == ENODEV) { /* unmounted */
				fuse_session_exit(se);
				return 0;
			}
			/* pyfuse3 waits for readability again after EINTR; the descriptor does not
			 * block, and a request that was announced may have been withdrawn. */
			return error == EAGAIN ? -EINTR : -error;
		}
		if (got == 0) { /* the other end of the socket pair of the hand-over is closed */
			fuse_session_exit(se);
			return 0;
		}
		if ((size_t)got < sizeof(struct fuse_in_header))
			return -EIO;

		const struct fuse_in_header *in = buf->mem;
		if (in->opcode == FUSE_INTERRUPT && on_interrupt &&
		    (size_t)got >= sizeof(*in) + sizeof(struct fuse_interrupt_in)) {
			const struct fuse_interrupt_in *arg = (const void *)(in + 1);
			PyObject *done = PyObject_CallFunction(on_interrupt, "K",
							       (unsigned long long)arg->unique);
			if (done)
				Py_DECREF(done);
			else
				PyErr_WriteUnraisable(on_interrupt);
			continue; /* an interrupt is never answered */
		}
		current_unique = in->unique;
		current_opcode = in->opcode;
		current_pid = in->pid;
		buf->size = (size_t)got;
		buf->flags = 0;
		return (int)got;
	}
}

size_t fuse_add_direntry_plus(fuse_req_t req, char *buf, size_t bufsize, const char *name,
			      const struct fuse_entry_param *e, off_t off)
{
	static size_t (*real)(fuse_req_t, char *, size_t, const char *,
			      const struct fuse_entry_param *, off_t);
	if (!real) {
		real = dlsym(RTLD_NEXT, "fuse_add_direntry_plus");
		if (!real)
			Py_FatalError("libfuse has no fuse_add_direntry_plus");
	}
	if (e->generation != NO_ATTRIBUTES)
		return real(req, buf, bufsize, name, e, off);
	/* fs/fuse/readdir.c, fuse_direntplus_link: node id 0 means that no attributes are given.
	 * The entry still shows its inode number (attr.st_ino) and type to readdir(3). */
	struct fuse_entry_param bare;
	memset(&bare, 0, sizeof(bare));
	bare.attr.st_ino = e->attr.st_ino;
	bare.attr.st_mode = e->attr.st_mode;
	return real(req, buf, bufsize, name, &bare, off);
}

static PyObject *current(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return Py_BuildValue("KII", (unsigned long long)current_unique, current_opcode, current_pid);
}

static PyObject *set_interrupt_handler(PyObject *self, PyObject *handler)
{
	(void)self;
	if (handler != Py_None && !PyCallable_Check(handler)) {
		PyErr_SetString(PyExc_TypeError, "the handler must be callable or None");
		return NULL;
	}
	PyObject *old = on_interrupt;
	on_interrupt = handler == Py_None ? NULL : Py_NewRef(handler);
	Py_XDECREF(old);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{"current", current, METH_NOARGS,
	 "The request that was received last: (unique, opcode, pid) of its fuse_in_header.\n\n"
	 "Valid in a handler until its first checkpoint."},
	{"set_interrupt_handler", set_interrupt_handler, METH_O,
	 "Call handler(unique) when the kernel says that the process waiting for request `unique`\n"
	 "got a signal (FUSE_INTERRUPT). None: interrupts go to libfuse, which ignores them."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.fuse._session",
	.m_doc = "Hooks between libfuse and pyfuse3; import it through monarchfs.fuse.session only.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__session(void)
{
	PyObject *m = PyModule_Create(&module);
	if (m && PyModule_AddObject(m, "NO_ATTRIBUTES",
				    PyLong_FromUnsignedLongLong(NO_ATTRIBUTES)) < 0) {
		Py_DECREF(m);
		return NULL;
	}
	return m;
}
