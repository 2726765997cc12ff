/* The attributes of many names of a directory, asked for in one call.
 *
 * After each system call a thread of Python waits for the interpreter's lock, and makes the event loop wait
 * for it: both cost more than an attribute that the client has in memory.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_opened.h"

#include <errno.h>
#include <fcntl.h>
#include <stdbool.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#define NS 1000000000LL
#define MOST_SECONDS (INT64_MAX / NS - 1) /* later times, and those before as long ago, do not fit */

struct asked {
	const char *name;
	bool is_name;
	int error;
	struct stat st;
};

static double now(void)
{
	struct timespec time;
	clock_gettime(CLOCK_MONOTONIC, &time);
	return (double)time.tv_sec + (double)time.tv_nsec / NS;
}

/* Whether it can be one entry of a directory. */
static bool is_name(const char *name, Py_ssize_t length)
{
	return length && (size_t)length == strlen(name) && !strchr(name, '/') && strcmp(name, ".") != 0 &&
	       strcmp(name, "..") != 0;
}

/* By opening it: a regular file of that device stays open, if it has some bytes and no more than that. False if it cannot
 * be opened. */
static bool open_file(int directory, struct asked *asked, dev_t device, off_t most_bytes)
{
	int fd = openat(directory, asked->name, SMALL_OPEN_FLAGS);
	if (fd < 0)
		return false;
	bool known = fstat(fd, &asked->st) == 0;
	bool small = known && S_ISREG(asked->st.st_mode) && asked->st.st_dev == device && asked->st.st_size &&
		     asked->st.st_size <= most_bytes;
	if (small)
		fd = opened_keep(&asked->st, fd);
	if (fd >= 0)
		close(fd);
	return known;
}

/* How many were asked for until then: one at least. Files of at most `opens_bytes` are opened; 0: none. */
static Py_ssize_t ask(int directory, struct asked *asked, Py_ssize_t count, double until, dev_t device,
		      off_t opens_bytes)
{
	for (Py_ssize_t n = 0; n < count; n++) {
		if (!asked[n].is_name)
			continue;
		if (!opens_bytes || !open_file(directory, &asked[n], device, opens_bytes)) {
			do
				asked[n].error = fstatat(directory, asked[n].name, &asked[n].st, AT_SYMLINK_NOFOLLOW) ? errno : 0;
			while (asked[n].error == EINTR);
		}
		if (now() > until)
			return n + 1;
	}
	return count;
}

static bool fits(struct timespec time)
{
	return -MOST_SECONDS < time.tv_sec && time.tv_sec < MOST_SECONDS;
}

static long long ns_of(struct timespec time)
{
	return (long long)time.tv_sec * NS + time.tv_nsec;
}

static PyObject *answer(const struct asked *asked, unsigned long long device)
{
	const struct stat *st = &asked->st;
	if (asked->error)
		return PyLong_FromLong(asked->error);
	if (!asked->is_name || S_ISDIR(st->st_mode) || S_ISLNK(st->st_mode) || !fits(st->st_mtim) ||
	    !fits(st->st_ctim) || !fits(st->st_atim))
		Py_RETURN_NONE;
	unsigned long long st_dev = st->st_dev == device ? 0 : st->st_dev;
	return Py_BuildValue("(KKLLLLIKIIKLL)", st_dev, (unsigned long long)st->st_ino,
			     (long long)st->st_size, ns_of(st->st_mtim), ns_of(st->st_ctim),
			     ns_of(st->st_atim), (unsigned)st->st_mode,
			     (unsigned long long)st->st_nlink, (unsigned)st->st_uid,
			     (unsigned)st->st_gid, (unsigned long long)st->st_rdev,
			     (long long)st->st_blocks, (long long)st->st_blksize);
}

static PyObject *answers(const struct asked *asked, Py_ssize_t count, unsigned long long device)
{
	PyObject *results = PyList_New(count);
	for (Py_ssize_t n = 0; results && n < count; n++) {
		PyObject *result = answer(&asked[n], device);
		if (!result)
			Py_CLEAR(results);
		else
			PyList_SET_ITEM(results, n, result);
	}
	return results;
}

static PyObject *stat_each(PyObject *Py_UNUSED(self), PyObject *args)
{
	int directory;
	unsigned long long device;
	PyObject *sequence;
	double until;
	long long opens_bytes = 0;
	if (!PyArg_ParseTuple(args, "iKOd|L", &directory, &device, &sequence, &until, &opens_bytes))
		return NULL;
	PyObject *names = PySequence_Tuple(sequence), *results = NULL;
	if (!names)
		return NULL;
	Py_ssize_t count = PyTuple_GET_SIZE(names);
	struct asked *asked = PyMem_Malloc(count ? (size_t)count * sizeof(*asked) : 1);
	if (!asked) {
		PyErr_NoMemory();
		goto out;
	}
	for (Py_ssize_t n = 0; n < count; n++) {
		char *name;
		Py_ssize_t length;
		if (PyBytes_AsStringAndSize(PyTuple_GET_ITEM(names, n), &name, &length) < 0)
			goto out;
		asked[n] = (struct asked){.name = name, .is_name = is_name(name, length)};
	}
	Py_BEGIN_ALLOW_THREADS
	count = ask(directory, asked, count, until, device, opens_bytes);
	Py_END_ALLOW_THREADS
	results = answers(asked, count, device);
out:
	PyMem_Free(asked);
	Py_DECREF(names);
	return results;
}

static PyObject *take_stale(PyObject *Py_UNUSED(self), PyObject *args)
{
	double seconds;
	if (!PyArg_ParseTuple(args, "d", &seconds))
		return NULL;
	return PyLong_FromLong(opened_take_stale((uint64_t)(seconds * NS)));
}

static PyMethodDef methods[] = {
	{"stat_each", stat_each, METH_VARARGS,
	 "stat_each(directory, device, names, until, opens_bytes=0): of each name that was asked for until then\n"
	 "(time.monotonic), the fields of SourceStat, an errno, or None: it is a directory, a symbolic link,\n"
	 "of a time that needs more than 64 bits, or no name of an entry. Regular files of at most opens_bytes\n"
	 "stay open for a while, for the capsule take."},
	{"take_stale", take_stale, METH_VARARGS,
	 "take_stale(seconds): a descriptor that was kept for longer than that, to be closed; -1: there is none."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.source._stats",
	.m_doc = "The attributes of many names of a directory, asked for in one call.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__stats(void)
{
	PyObject *made = PyModule_Create(&module);
	PyObject *take = made ? PyCapsule_New((void *)opened_take, SMALL_OPENED, NULL) : NULL;
	if (made && (!take || PyModule_AddObjectRef(made, "take", take) < 0))
		Py_CLEAR(made);
	Py_XDECREF(take);
	return made;
}
