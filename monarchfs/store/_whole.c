/* New files that are written whole, many in one call.
 *
 * A small file takes four system calls. After each of them a thread of Python waits for the
 * interpreter's lock, which costs more than the call: so here it is given up once for all of them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define FLAGS (O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC)

struct file {
	int directory;
	const char *name;
	const char *staged;
	Py_buffer data;
	long long allocated; /* after a failure -1 */
	int error;
	bool made; /* and perhaps still there */
};

static int put(struct file *file, int fd)
{
	const char *from = file->data.buf;
	for (Py_ssize_t left = file->data.len; left > 0;) {
		ssize_t count = write(fd, from, (size_t)left);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			return errno;
		if (count == 0)
			return EIO;
		from += count;
		left -= count;
	}
	struct stat st;
	if (fstat(fd, &st) < 0)
		return errno;
	file->allocated = (long long)st.st_blocks * 512;
	return 0;
}

static void make(struct file *file, int staging, mode_t mode)
{
	struct stat st;
	if (fstatat(staging, file->staged, &st, AT_SYMLINK_NOFOLLOW) == 0 || errno != ENOENT) {
		file->error = EEXIST;
		return;
	}
	int fd;
	do
		fd = openat(file->directory, file->name, FLAGS, mode);
	while (fd < 0 && errno == EINTR);
	if (fd < 0) {
		file->error = errno;
		return;
	}
	file->made = true;
	file->error = put(file, fd);
	if (file->error && ftruncate(fd, 0) < 0) {
		/* The next one may have no room: the caller removes it later. */
	}
	/* What a file system says of what was written before (NFS, quotas). */
	if (close(fd) < 0 && !file->error && errno != EINTR)
		file->error = errno;
}

static PyObject *results_of(const struct file *files, Py_ssize_t count)
{
	PyObject *results = PyList_New(count);
	for (Py_ssize_t n = 0; results && n < count; n++) {
		PyObject *result =
			files[n].error
				? Py_BuildValue("(iO)", files[n].error, files[n].made ? Py_True : Py_False)
				: PyLong_FromLongLong(files[n].allocated);
		if (!result)
			Py_CLEAR(results);
		else
			PyList_SET_ITEM(results, n, result);
	}
	return results;
}

static PyObject *write_each(PyObject *self, PyObject *args)
{
	(void)self;
	int staging, mode;
	PyObject *sequence;
	if (!PyArg_ParseTuple(args, "iiO", &staging, &mode, &sequence))
		return NULL;
	PyObject *wanted = PySequence_Tuple(sequence); /* it keeps the names */
	if (!wanted)
		return NULL;
	Py_ssize_t count = PyTuple_GET_SIZE(wanted), have = 0;
	PyObject *results = NULL;
	struct file *files = PyMem_Calloc(count ? (size_t)count : 1, sizeof(*files));
	if (!files) {
		PyErr_NoMemory();
		goto out;
	}
	for (; have < count; have++) {
		struct file *file = &files[have];
		if (!PyArg_ParseTuple(PyTuple_GET_ITEM(wanted, have), "issy*", &file->directory,
				      &file->name, &file->staged, &file->data))
			goto out;
	}
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t n = 0; n < count; n++)
		make(&files[n], staging, (mode_t)mode);
	Py_END_ALLOW_THREADS
	results = results_of(files, count);
out:
	for (Py_ssize_t n = 0; n < have; n++)
		PyBuffer_Release(&files[n].data);
	PyMem_Free(files);
	Py_DECREF(wanted);
	return results;
}

static PyMethodDef methods[] = {
	{"write_each", write_each, METH_VARARGS,
	 "write_each(staging, mode, files): make each file, of (directory, name, staged name, data), in its\n"
	 "directory, where there is none of that name, nor one of the staged name in the directory\n"
	 "staging. Directories are descriptors. Returns for each its allocated bytes, or (errno, whether\n"
	 "an incomplete one lies there now)."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.store._whole",
	.m_doc = "New files that are written whole, many in one call.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__whole(void)
{
	return PyModule_Create(&module);
}
