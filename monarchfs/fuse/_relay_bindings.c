/* What Python tells the threads, and asks of them: the table of open files, which files are resident,
 * and what may be read of others. */
#define PY_SSIZE_T_CLEAN
#include "_relay_bindings.h"

#include "_absent_xattrs.h"
#include "_backed.h"
#include "_counts.h"
#include "_resident.h"
#include "_table.h"
#include "_nonresident.h"

#include "../engine/_misses.h"
#include "../engine/_waiting.h"

#include <errno.h>
#include <string.h>

#define MOST_TOLD 4096

static PyObject *failed(int error)
{
	errno = error;
	return PyErr_SetFromErrno(PyExc_OSError);
}

static bool number_in(PyObject *given, uint64_t *number)
{
	*number = PyLong_AsUnsignedLongLong(given);
	return !(*number == (uint64_t)-1 && PyErr_Occurred());
}

/* -- counts */

static PyObject *numbers_object(const uint64_t *numbers, unsigned count)
{
	PyObject *found = PyTuple_New(count);
	for (unsigned i = 0; found && i < count; i++) {
		PyObject *number = PyLong_FromUnsignedLongLong(numbers[i]);
		if (!number)
			Py_CLEAR(found);
		else
			PyTuple_SET_ITEM(found, i, number);
	}
	return found;
}

static PyObject *counted(PyObject *self, PyObject *unused)
{
	struct counts now;
	(void)self;
	(void)unused;
	counts_read(&now);
	PyObject *durations = PyTuple_New(DURATIONS);
	for (unsigned i = 0; durations && i < DURATIONS; i++) {
		PyObject *took = numbers_object(now.durations[i].took, MOST_BOUNDS + 1);
		PyObject *each = took ? Py_BuildValue("KN", (unsigned long long)
								   now.durations[i].total_ns,
						      took) : NULL;
		if (!each)
			Py_CLEAR(durations);
		else
			PyTuple_SET_ITEM(durations, i, each);
	}
	PyObject *numbers = durations ? numbers_object(now.numbers, COUNTS) : NULL;
	if (!numbers)
		Py_CLEAR(durations);
	return durations ? Py_BuildValue("NN", numbers, durations) : NULL;
}

/* -- the table of open files */

static PyObject *attach(PyObject *self, PyObject *given)
{
	(void)self;
	long fd = PyLong_AsLong(given);
	if (fd == -1 && PyErr_Occurred())
		return NULL;
	int error = -table_attach((int)fd);
	if (error == EINVAL) {
		PyErr_SetString(PyExc_ValueError, "not a table of open files");
		return NULL;
	}
	if (error)
		return failed(error);
	Py_RETURN_NONE;
}

static PyObject *detach(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	table_detach();
	Py_RETURN_NONE;
}

static PyObject *add(PyObject *self, PyObject *args)
{
	unsigned long long ino, unique;
	unsigned backing_id = 0;
	uint64_t number;
	(void)self;
	if (!PyArg_ParseTuple(args, "KK|I", &ino, &unique, &backing_id))
		return NULL;
	int result = table_add(ino, unique, backing_id, OWNED | HELD, &number);
	return result < 0 ? failed(-result) : PyLong_FromUnsignedLongLong(number);
}

static PyObject *ino_or_none(uint64_t ino)
{
	if (!ino)
		Py_RETURN_NONE;
	return PyLong_FromUnsignedLongLong(ino);
}

static PyObject *end(PyObject *self, PyObject *given)
{
	uint64_t number;
	(void)self;
	if (!number_in(given, &number))
		return NULL;
	uint64_t ino = table_end(number, false, NULL);
	if (ino)
		misses_released(ino);
	return ino_or_none(ino);
}

static PyObject *ino_of(PyObject *self, PyObject *given)
{
	uint64_t number;
	(void)self;
	return number_in(given, &number) ? ino_or_none(table_ino(number)) : NULL;
}

static PyObject *own(PyObject *self, PyObject *given)
{
	uint64_t number;
	(void)self;
	return number_in(given, &number) ? PyBool_FromLong(table_own(number)) : NULL;
}

static PyObject *list(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	PyObject *found = PyList_New(0);
	struct slot slot;
	uint64_t number;
	size_t index = 0;
	while (found && (number = table_next(&index, &slot))) {
		PyObject *each = Py_BuildValue("KKKI", (unsigned long long)number,
					       (unsigned long long)slot.ino,
					       (unsigned long long)slot.unique, slot.backing_id);
		if (!each || PyList_Append(found, each) < 0)
			Py_CLEAR(found);
		Py_XDECREF(each);
	}
	return found;
}

static PyObject *length(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	return PyLong_FromSize_t(table_length());
}

/* -- resident files */

static PyObject *start(PyObject *self, PyObject *args)
{
	unsigned files, uid;
	long long lasting_ns;
	int free_opens, tells;
	(void)self;
	if (!PyArg_ParseTuple(args, "IILpp", &files, &uid, &lasting_ns, &free_opens, &tells))
		return NULL;
	int error = -resident_start(files, (uid_t)uid, lasting_ns, free_opens, tells);
	if (error)
		return failed(error);
	Py_RETURN_NONE;
}

static PyObject *tier(PyObject *self, PyObject *args)
{
	unsigned number;
	int dir_fd;
	(void)self;
	if (!PyArg_ParseTuple(args, "Ii", &number, &dir_fd))
		return NULL;
	int error = -resident_tier(number, dir_fd);
	if (error)
		return failed(error);
	Py_RETURN_NONE;
}

static PyObject *put(PyObject *self, PyObject *args)
{
	unsigned long long ino, checksum, size, segment, offset;
	long long until_ns;
	struct replica replica;
	const char *name;
	Py_ssize_t name_bytes;
	int seen;
	(void)self;
	if (!PyArg_ParseTuple(args, "KIy#KKLpKK", &ino, &replica.tier, &name, &name_bytes,
			      &checksum, &size, &until_ns, &seen, &segment, &offset))
		return NULL;
	if (name_bytes != NAME_BYTES) {
		PyErr_SetString(PyExc_ValueError, "a replica's name has 16 bytes");
		return NULL;
	}
	memcpy(replica.name, name, NAME_BYTES);
	replica.checksum = checksum;
	replica.size = size;
	replica.segment = segment;
	replica.offset = offset;
	replica.opens_until_ns = until_ns;
	return PyBool_FromLong(resident_put(ino, &replica, seen));
}

static PyObject *expire(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	if (!number_in(given, &ino))
		return NULL;
	resident_expire(ino);
	Py_RETURN_NONE;
}

static PyObject *stop(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	if (!number_in(given, &ino))
		return NULL;
	resident_stop(ino);
	Py_RETURN_NONE;
}

static PyObject *retire(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(resident_retire(ino)) : NULL;
}

static PyObject *being_read(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(resident_reading(ino)) : NULL;
}

static PyObject *has(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(resident_has(ino)) : NULL;
}

static PyObject *used(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(resident_used(ino)) : NULL;
}

static PyObject *seen(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(resident_seen(ino)) : NULL;
}

static PyObject *told(PyObject *self, PyObject *unused)
{
	static uint64_t inos[MOST_TOLD]; /* under the GIL */
	(void)self;
	(void)unused;
	size_t count = resident_opened(inos, MOST_TOLD);
	PyObject *found = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; found && i < count; i++) {
		PyObject *ino = PyLong_FromUnsignedLongLong(inos[i]);
		if (!ino)
			Py_CLEAR(found);
		else
			PyList_SET_ITEM(found, (Py_ssize_t)i, ino);
	}
	return found;
}

static PyObject *delegate(PyObject *self, PyObject *args)
{
	unsigned long long ino;
	unsigned backing_id;
	(void)self;
	if (!PyArg_ParseTuple(args, "KI", &ino, &backing_id))
		return NULL;
	return PyBool_FromLong(backed_delegate(ino, backing_id));
}

static PyObject *reclaim(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyLong_FromUnsignedLong(backed_reclaim(ino)) : NULL;
}

static PyObject *cached(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyLong_FromUnsignedLong(backed_cached(ino)) : NULL;
}

/* -- files that are not resident (yet) */

static PyObject *read_source(PyObject *self, PyObject *args)
{
	unsigned long long ino, size;
	long long mtime_ns, ctime_ns;
	int fd;
	(void)self;
	if (!PyArg_ParseTuple(args, "KiKLL", &ino, &fd, &size, &mtime_ns, &ctime_ns))
		return NULL;
	return PyBool_FromLong(nonresident_source(ino, fd, size, mtime_ns, ctime_ns));
}

static PyObject *no_source(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	if (!number_in(given, &ino))
		return NULL;
	nonresident_no_source(ino);
	Py_RETURN_NONE;
}

static PyObject *fill(PyObject *self, PyObject *args)
{
	unsigned long long ino, size, chunk_bytes;
	const char *states;
	Py_ssize_t count;
	(void)self;
	if (!PyArg_ParseTuple(args, "KKKy#", &ino, &size, &chunk_bytes, &states, &count))
		return NULL;
	return PyBool_FromLong(nonresident_fill(ino, size, chunk_bytes, states, (size_t)count));
}

static PyObject *part(PyObject *self, PyObject *args)
{
	unsigned long long ino;
	int fd;
	(void)self;
	if (!PyArg_ParseTuple(args, "Ki", &ino, &fd))
		return NULL;
	return PyBool_FromLong(nonresident_part(ino, fd));
}

static PyObject *chunks(PyObject *self, PyObject *args)
{
	unsigned long long ino, first, last;
	unsigned state;
	(void)self;
	if (!PyArg_ParseTuple(args, "KKKI", &ino, &first, &last, &state))
		return NULL;
	nonresident_chunks(ino, first, last, (enum chunk_state)state);
	Py_RETURN_NONE;
}

static PyObject *ahead(PyObject *self, PyObject *args)
{
	unsigned long long ino, chunk;
	(void)self;
	if (!PyArg_ParseTuple(args, "KK", &ino, &chunk))
		return NULL;
	nonresident_ahead(ino, chunk);
	Py_RETURN_NONE;
}

static PyObject *units(PyObject *self, PyObject *unused)
{
	static struct nonresident_units functions = {nonresident_arrived, nonresident_chunks};
	(void)self;
	(void)unused;
	return PyCapsule_New(&functions, UNFINISHED_UNITS, NULL);
}

static PyObject *stop_unfinished(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	if (!number_in(given, &ino))
		return NULL;
	nonresident_stop(ino);
	Py_RETURN_NONE;
}

static PyObject *used_unfinished(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(nonresident_used(ino)) : NULL;
}

static PyObject *leave_older(PyObject *self, PyObject *args)
{
	unsigned long long before_ns;
	unsigned most;
	(void)self;
	if (!PyArg_ParseTuple(args, "KI", &before_ns, &most))
		return NULL;
	return PyLong_FromUnsignedLong(waiting_leave_older(before_ns, most));
}

static PyObject *any_since(PyObject *self, PyObject *given)
{
	uint64_t since_ns;
	(void)self;
	return number_in(given, &since_ns) ? PyBool_FromLong(waiting_any_since(since_ns)) : NULL;
}

/* -- attributes that files do not have */

static PyObject *add_absent(PyObject *self, PyObject *inos)
{
	(void)self;
	PyObject *each, *iterator = PyObject_GetIter(inos);
	while (iterator && (each = PyIter_Next(iterator))) {
		uint64_t ino;
		if (number_in(each, &ino))
			absent_add(ino);
		Py_DECREF(each);
		if (PyErr_Occurred())
			break;
	}
	Py_XDECREF(iterator);
	if (PyErr_Occurred())
		return NULL;
	Py_RETURN_NONE;
}

static PyObject *name_absent(PyObject *self, PyObject *args)
{
	const char *name;
	int error;
	(void)self;
	if (!PyArg_ParseTuple(args, "yi", &name, &error))
		return NULL;
	return PyBool_FromLong(absent_name(name, error) == 0);
}

PyMethodDef known_methods[] = {
	{"absent_add", add_absent, METH_O,
	 "absent_add(inos): they have none of the attributes that absent_name names."},
	{"absent_name", name_absent, METH_VARARGS,
	 "absent_name(name, error): the errno of that attribute, for those. False: too many names."},
	{"table_attach", attach, METH_O,
	 "table_attach(fd): begin with what is open in that table (slots.py). Raises ValueError for\n"
	 "what is none, OSError."},
	{"table_detach", detach, METH_NOARGS, "Give the table's memory back; what is open stays so."},
	{"table_add", add, METH_VARARGS,
	 "table_add(ino, unique, backing_id=0): the number of a handle whose RELEASE is Python's.\n"
	 "Raises OSError ENFILE."},
	{"table_end", end, METH_O, "table_end(number): its inode number, None if it was not open."},
	{"table_ino", ino_of, METH_O, "table_ino(number): its inode number, None if it is not open."},
	{"table_own", own, METH_O,
	 "table_own(number): its RELEASE is Python's from now on. False if it is not open."},
	{"table_list", list, METH_NOARGS, "What is open: [(number, ino, unique, backing id)]."},
	{"table_length", length, METH_NOARGS, "How many files are open."},
	{"resident_start", start, METH_VARARGS,
	 "resident_start(files, uid, lasting_ns, free_opens, tells): see _resident.h. Raises OSError."},
	{"resident_tier", tier, METH_VARARGS,
	 "resident_tier(tier, dir_fd): a tier's directory; -1: nothing is read there for now. Raises\n"
	 "OSError."},
	{"resident_put", put, METH_VARARGS,
	 "resident_put(ino, tier, name, checksum, size, opens_until_ns, seen, segment, offset): the\n"
	 "threads may read it, where it lies in that segment (0: in a file of its own). False where\n"
	 "they know too many."},
	{"resident_expire", expire, METH_O, "resident_expire(ino): its opens are to be asked about."},
	{"resident_stop", stop, METH_O, "resident_stop(ino): it is not to be read any more."},
	{"resident_retire", retire, METH_O,
	 "resident_retire(ino): the same, and False, where it is open or being read."},
	{"resident_reading", being_read, METH_O,
	 "resident_reading(ino): whether a replica of it that was stopped is still being read."},
	{"resident_has", has, METH_O, "resident_has(ino): whether the threads may read it."},
	{"resident_used", used, METH_O, "resident_used(ino): whether it is open."},
	{"resident_seen", seen, METH_O,
	 "resident_seen(ino): whether it was opened or read since it was put."},
	{"resident_opened", told, METH_NOARGS,
	 "Inode numbers that the threads opened since the last call, at most 4096, oldest first."},
	{"backed_delegate", delegate, METH_VARARGS,
	 "backed_delegate(ino, backing_id): opens of it, of which there are none, are answered with this id."},
	{"backed_reclaim", reclaim, METH_O,
	 "backed_reclaim(ino): not any more. How many there are, whose RELEASE is Python's now."},
	{"backed_cached", cached, METH_O,
	 "backed_cached(ino): how many opens without an id there are, whose RELEASE is Python's now, and\n"
	 "was not before."},
	{"nonresident_source", read_source, METH_VARARGS,
	 "nonresident_source(ino, fd, size, mtime_ns, ctime_ns): what is missing may be read from the\n"
	 "source, as long as it has this version. False where that cannot be done."},
	{"nonresident_no_source", no_source, METH_O, "nonresident_no_source(ino): not any more."},
	{"nonresident_fill", fill, METH_VARARGS,
	 "nonresident_fill(ino, size, chunk_bytes, states): it is being copied; a byte a chunk."},
	{"nonresident_part", part, METH_VARARGS,
	 "nonresident_part(ino, fd): the file with what is present, once."},
	{"nonresident_chunks", chunks, METH_VARARGS,
	 "nonresident_chunks(ino, first, last, state): of the chunks [first, last)."},
	{"nonresident_ahead", ahead, METH_VARARGS,
	 "nonresident_ahead(ino, chunk): the next read that goes as far as this is told of."},
	{"nonresident_units", units, METH_NOARGS,
	 "nonresident_units(): how what is fetched gets to those who wait; for engine.units."},
	{"nonresident_stop", stop_unfinished, METH_O,
	 "nonresident_stop(ino): it is not to be read any more."},
	{"nonresident_used", used_unfinished, METH_O,
	 "nonresident_used(ino): whether it was read since this was asked the last time."},
	{"waiting_leave_older", leave_older, METH_VARARGS,
	 "waiting_leave_older(before_ns, most): requests that have been waiting since before then\n"
	 "(CLOCK_MONOTONIC) are Python's now, see _waiting.h. How many others wait."},
	{"waiting_any_since", any_since, METH_O,
	 "waiting_any_since(since_ns): whether a request waits that came since then."},
	{"counts", counted, METH_NOARGS,
	 "What the threads have done: (numbers, durations), see _counts.h; each duration is (ns in all,\n"
	 "how many took at most so long as each of the bounds)."},
	{NULL, NULL, 0, NULL},
};
