/* Small files that are read whole, each in one call.
 *
 * As in store/_records.c: seven system calls a file, after each of which a thread of Python waits for
 * the interpreter's lock. Where anything is not as it is expected nothing is decided here.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <sys/ioctl.h>
#include <sys/stat.h>
#include <unistd.h>

/* As in posix.py, and for the reasons that stand there. */
#define FLAGS (O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_NOCTTY | O_CLOEXEC)

struct version {
	unsigned long long device, ino;
	long long size, mtime_ns, ctime_ns;
};

enum outcome { GOOD, OTHER, FAILED /* errno */ };

static bool at(const struct timespec *time, long long ns)
{
	return (__int128)time->tv_sec * 1000000000 + time->tv_nsec == ns;
}

static enum outcome compare(int fd, const struct version *version)
{
	struct stat st;
	if (fstat(fd, &st) < 0)
		return FAILED;
	bool same = S_ISREG(st.st_mode) && st.st_dev == version->device &&
		    st.st_ino == version->ino && st.st_size == version->size &&
		    at(&st.st_mtim, version->mtime_ns) && at(&st.st_ctim, version->ctime_ns);
	return same ? GOOD : OTHER;
}

static void close_keeping_errno(int fd)
{
	int error = errno;
	close(fd);
	errno = error;
}

static enum outcome open_version(int directory, const char *name, const struct version *version,
				 int *fd)
{
	do
		*fd = openat(directory, name, FLAGS);
	while (*fd < 0 && errno == EINTR);
	if (*fd < 0)
		return errno == EAGAIN ? OTHER : FAILED; /* somebody has a lease on it */
	enum outcome outcome = compare(*fd, version);
	int no = 0;
	/* Lustre's reads honour O_NONBLOCK. */
	if (outcome == GOOD && ioctl(*fd, FIONBIO, &no) < 0)
		outcome = FAILED;
	if (outcome != GOOD)
		close_keeping_errno(*fd);
	return outcome;
}

static enum outcome read_version(int fd, const struct version *version, char *to)
{
	enum outcome outcome = GOOD;
	for (long long have = 0; outcome == GOOD && have < version->size;) {
		ssize_t count = pread(fd, to + have, (size_t)(version->size - have), have);
		if (count < 0 && errno == EINTR)
			continue;
		if (count <= 0)
			outcome = count < 0 ? FAILED : OTHER;
		else
			have += count;
	}
	if (outcome == GOOD)
		outcome = compare(fd, version);
	if (outcome == GOOD && version->size)
		posix_fadvise(fd, 0, version->size, POSIX_FADV_DONTNEED);
	close_keeping_errno(fd);
	return outcome;
}

static PyObject *answer(enum outcome outcome, PyObject *good)
{
	if (outcome == GOOD)
		return good;
	Py_XDECREF(good);
	if (outcome == FAILED)
		return PyErr_SetFromErrno(PyExc_OSError);
	Py_RETURN_NONE;
}

#define VERSION "(KKLLL)"
#define INTO(v) &(v).device, &(v).ino, &(v).size, &(v).mtime_ns, &(v).ctime_ns

static PyObject *read_whole(PyObject *self, PyObject *args)
{
	(void)self;
	int directory, fd;
	const char *name;
	struct version version;
	if (!PyArg_ParseTuple(args, "iy" VERSION, &directory, &name, INTO(version)))
		return NULL;
	PyObject *data = PyBytes_FromStringAndSize(NULL, version.size);
	if (!data)
		return NULL;
	enum outcome outcome;
	Py_BEGIN_ALLOW_THREADS
	outcome = open_version(directory, name, &version, &fd);
	if (outcome == GOOD)
		outcome = read_version(fd, &version, PyBytes_AS_STRING(data));
	Py_END_ALLOW_THREADS
	return answer(outcome, data);
}

static PyObject *open_known(PyObject *self, PyObject *args)
{
	(void)self;
	int directory, fd = -1;
	const char *name;
	struct version version;
	if (!PyArg_ParseTuple(args, "iy" VERSION, &directory, &name, INTO(version)))
		return NULL;
	enum outcome outcome;
	Py_BEGIN_ALLOW_THREADS
	outcome = open_version(directory, name, &version, &fd);
	Py_END_ALLOW_THREADS
	return answer(outcome, outcome == GOOD ? PyLong_FromLong(fd) : NULL);
}

static PyObject *read_known(PyObject *self, PyObject *args)
{
	(void)self;
	int fd;
	struct version version;
	if (!PyArg_ParseTuple(args, "i" VERSION, &fd, INTO(version)))
		return NULL;
	PyObject *data = PyBytes_FromStringAndSize(NULL, version.size);
	if (!data) {
		close(fd);
		return NULL;
	}
	enum outcome outcome;
	Py_BEGIN_ALLOW_THREADS
	outcome = read_version(fd, &version, PyBytes_AS_STRING(data));
	Py_END_ALLOW_THREADS
	return answer(outcome, data);
}

static PyMethodDef methods[] = {
	{"read_whole", read_whole, METH_VARARGS,
	 "read_whole(directory, name, (st_dev, st_ino, st_size, mtime_ns, ctime_ns)): all of a regular\n"
	 "file that is of this version before and after; None where it is not, or its opener would have\n"
	 "to wait. Raises OSError."},
	{"open_known", open_known, METH_VARARGS,
	 "open_known(directory, name, version): a descriptor for read_known. As read_whole."},
	{"read_known", read_known, METH_VARARGS,
	 "read_known(fd, version): the rest of read_whole. Closes the descriptor."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.source._whole",
	.m_doc = "Small files that are read whole, each in one call.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__whole(void)
{
	return PyModule_Create(&module);
}
