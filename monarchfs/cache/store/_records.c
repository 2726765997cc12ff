/* Records of segments, checksummed and written, or punched out, many in one call.
 *
 * After each system call a thread of Python waits for the interpreter's lock, which costs more than
 * to write a small record: so here it is given up once for all of them.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_checksum.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

struct record {
	int fd;
	long long offset;
	Py_buffer data;
	uint64_t checksum;
	int error;
};

static int put_record(const struct record *record)
{
	const char *from = record->data.buf;
	off_t at = record->offset;
	for (Py_ssize_t left = record->data.len; left > 0;) {
		ssize_t count = pwrite(record->fd, from, (size_t)left, at);
		if (count < 0 && errno == EINTR)
			continue;
		if (count < 0)
			return errno;
		if (count == 0)
			return EIO;
		from += count;
		at += count;
		left -= count;
	}
	return 0;
}

static PyObject *put_each(PyObject *Py_UNUSED(self), PyObject *sequence)
{
	PyObject *wanted = PySequence_Tuple(sequence);
	if (!wanted)
		return NULL;
	Py_ssize_t count = PyTuple_GET_SIZE(wanted), have = 0;
	PyObject *results = NULL;
	struct record *records = PyMem_Calloc(count ? (size_t)count : 1, sizeof(*records));
	if (!records) {
		PyErr_NoMemory();
		goto out;
	}
	for (; have < count; have++) {
		struct record *record = &records[have];
		if (!PyArg_ParseTuple(PyTuple_GET_ITEM(wanted, have), "iLy*", &record->fd,
				      &record->offset, &record->data))
			goto out;
	}
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t n = 0; n < count; n++) {
		records[n].checksum = checksum(records[n].data.buf, (size_t)records[n].data.len);
		records[n].error = put_record(&records[n]);
	}
	Py_END_ALLOW_THREADS
	results = PyList_New(count);
	for (Py_ssize_t n = 0; results && n < count; n++) {
		PyObject *result = Py_BuildValue("(iK)", records[n].error,
						 (unsigned long long)records[n].checksum);
		if (!result)
			Py_CLEAR(results);
		else
			PyList_SET_ITEM(results, n, result);
	}
out:
	for (Py_ssize_t n = 0; n < have; n++)
		PyBuffer_Release(&records[n].data);
	PyMem_Free(records);
	Py_DECREF(wanted);
	return results;
}

struct range {
	long long offset;
	long long length;
};

static int punch_range(int fd, const struct range *range)
{
	int failed;
	do
		failed = fallocate(fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, range->offset,
				   range->length);
	while (failed && errno == EINTR);
	return failed ? errno : 0;
}

static PyObject *punch(PyObject *Py_UNUSED(self), PyObject *args)
{
	int fd, error = 0;
	PyObject *sequence;
	if (!PyArg_ParseTuple(args, "iO", &fd, &sequence))
		return NULL;
	PyObject *wanted = PySequence_Tuple(sequence);
	if (!wanted)
		return NULL;
	Py_ssize_t count = PyTuple_GET_SIZE(wanted);
	PyObject *result = NULL;
	struct range *ranges = PyMem_Calloc(count ? (size_t)count : 1, sizeof(*ranges));
	if (!ranges) {
		PyErr_NoMemory();
		goto out;
	}
	for (Py_ssize_t n = 0; n < count; n++) {
		if (!PyArg_ParseTuple(PyTuple_GET_ITEM(wanted, n), "LL", &ranges[n].offset,
				      &ranges[n].length))
			goto out;
	}
	Py_BEGIN_ALLOW_THREADS
	for (Py_ssize_t n = 0; n < count; n++) {
		int failed = punch_range(fd, &ranges[n]);
		error = error ? error : failed;
	}
	Py_END_ALLOW_THREADS
	result = PyLong_FromLong(error);
out:
	PyMem_Free(ranges);
	Py_DECREF(wanted);
	return result;
}

static PyMethodDef methods[] = {
	{"put_each", put_each, METH_O,
	 "put_each(records): write each record, of (descriptor, offset, data), whole. Returns for each 0\n"
	 "or an errno, and its checksum."},
	{"punch", punch, METH_VARARGS,
	 "punch(descriptor, ranges): give the room of each (offset, length) of a file back. Returns 0 or\n"
	 "the first errno; the others are tried all the same."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.cache.store._records",
	.m_doc = "Records of segments, checksummed and written, or punched out, many in one call.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__records(void)
{
	return PyModule_Create(&module);
}
