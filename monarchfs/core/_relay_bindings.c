/* What Python tells the threads, and asks of them: the table of open files, which files are resident,
 * and what may be read of others. */
#include "_relay_bindings.h"

#include "_absent_xattrs.h"
#include "_counts.h"
#include "_record.h"
#include "_resident.h"
#include "_table.h"
#include "_nonresident.h"

#include "_misses.h"
#include "_waiting.h"

#include <string.h>

#define MOST_TOLD 4096
#define MOST_DRAINED 8192

/* -- counts */

static const char *const number_names[COUNTS] = {
	[COUNT_QUEUED] = "queued",
	[COUNT_BYTES] = "answered_bytes",
	[COUNT_SOURCE_BYTES] = "source_bytes",
	[COUNT_AHEAD_BYTES] = "ahead_bytes",
	[COUNT_UNTOLD_OPENS] = "untold_opens",
	[COUNT_RESIDENT_OPENS] = "resident_opens",
	[COUNT_RESIDENT_BYTES] = "resident_bytes",
	[COUNT_UNLISTED_OPENS] = "unlisted_opens",
	[COUNT_BACKED_OPENS] = "backed_opens",
	[COUNT_SOURCE_NS] = "source_ns",
	[COUNT_MEMORY_NS] = "memory_ns",
	[COUNT_TIER_NS] = "tier_ns",
	[COUNT_PEER_NS] = "peer_ns",
	[COUNT_COPY_NS] = "copy_ns",
};

static const char *const duration_names[DURATIONS] = {
	[TIME_LOOKUP] = "lookup",
	[TIME_LOOKUP_SOURCE] = "lookup_source",
	[TIME_OPEN_LOCAL] = "open_local",
	[TIME_READ_LOCAL] = "read_local",
	[TIME_OPEN_SOURCE] = "open_source",
	[TIME_READ_SOURCE] = "read_source",
	[TIME_SOURCE] = "source",
	[TIME_AHEAD] = "ahead",
	[TIME_STAT] = "stat",
};

/* Steals the value. */
static bool set_item(PyObject *dict, const char *name, PyObject *value)
{
	bool set = value && PyDict_SetItemString(dict, name, value) == 0;
	Py_XDECREF(value);
	return set;
}

static PyObject *duration(const struct durations *of)
{
	PyObject *took = numbers_of(of->took, MOST_BOUNDS + 1);
	return took ? Py_BuildValue("KN", (unsigned long long)of->total_ns, took) : NULL;
}

static PyObject *py_counts_take(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	struct counts now;
	counts_take(&now);
	PyObject *numbers = PyDict_New(), *durations = PyDict_New();
	bool whole = numbers && durations;
	for (unsigned i = 0; whole && i < COUNTS; i++)
		whole = set_item(numbers, number_names[i], number_of(now.numbers[i]));
	for (unsigned i = 0; whole && i < DURATIONS; i++)
		whole = set_item(durations, duration_names[i], duration(&now.durations[i]));
	if (whole)
		return Py_BuildValue("NN", numbers, durations);
	Py_XDECREF(numbers);
	Py_XDECREF(durations);
	return NULL;
}

/* -- the table of open files */

static PyObject *py_table_attach(PyObject *Py_UNUSED(self), PyObject *given)
{
	long fd = PyLong_AsLong(given);
	if (fd == -1 && PyErr_Occurred())
		return NULL;
	int error = table_attach((int)fd);
	if (error != -EINVAL)
		return none_unless(error);
	PyErr_SetString(PyExc_ValueError, "not a table of open files");
	return NULL;
}

TELLS(table_detach)

/* A handle whose RELEASE is Python's; table_opened follows. */
static PyObject *py_table_add(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, unique;
	uint32_t backing_id;
	uint64_t number;
	if (!PyArg_ParseTuple(args, "KK", &ino, &unique))
		return NULL;
	int result = table_add(ino, unique, OWNED | ANSWERING, &number, &backing_id);
	return result < 0 ? failed(-result) : Py_BuildValue("KI", (unsigned long long)number, backing_id);
}

static PyObject *py_table_opened(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long number;
	int accepted;
	if (!PyArg_ParseTuple(args, "Kp", &number, &accepted))
		return NULL;
	return bool_of(table_opened(number, accepted));
}

static PyObject *py_table_end(PyObject *Py_UNUSED(self), PyObject *given)
{
	uint64_t number;
	if (!number_in(given, &number))
		return NULL;
	uint64_t ino = table_end(number, false, NULL);
	if (ino)
		misses_released(ino);
	return ino_of(ino);
}

ASKS_OF_NUMBER(table_ino, ino_of)
ASKS_OF_NUMBER(table_own, bool_of)

/* [(number, ino, unique, backing id)]. */
static PyObject *py_table_list(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
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

ASKS(table_length, number_of)

/* -- resident files */

static PyObject *py_resident_start(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned files, uid;
	long long lasting_ns;
	int free_opens, tells;
	if (!PyArg_ParseTuple(args, "IILpp", &files, &uid, &lasting_ns, &free_opens, &tells))
		return NULL;
	return none_unless(resident_start(files, (uid_t)uid, lasting_ns, free_opens, tells));
}

ASKS_OF_TWO(resident_tier, none_unless, "Ii", unsigned, int)

static PyObject *py_resident_put(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, checksum, size, segment, offset;
	long long until_ns;
	struct replica replica;
	const char *name;
	Py_ssize_t name_bytes;
	int seen;
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

ASKS_OF_TWO(resident_renew, NONE_AFTER, "KL", unsigned long long, long long)
TELLS_NUMBER(resident_expire)
TELLS_NUMBER(resident_stop)
ASKS_OF_NUMBER(resident_retire, bool_of)
ASKS_OF_NUMBER(resident_reading, bool_of)
ASKS_OF_NUMBER(resident_has, bool_of)
ASKS(resident_full, bool_of)
ASKS_OF_NUMBER(resident_used, bool_of)
ASKS_OF_NUMBER(resident_seen, bool_of)

static PyObject *py_resident_opened(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none))
{
	static uint64_t inos[MOST_TOLD]; /* under the GIL */
	return numbers_of(inos, resident_opened(inos, MOST_TOLD));
}

TELLS_NUMBER(resident_use)
TELLS_NUMBER(resident_unuse)
ASKS_OF_TWO(inode_back, bool_of, "KI", unsigned long long, unsigned)
ASKS_OF_TWO(inode_unback, bool_of, "Kp", unsigned long long, int)
ASKS_OF_NUMBER(inode_decided, bool_of)

/* -- files that are not resident (yet) */

static PyObject *py_nonresident_source(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, size;
	long long mtime_ns, ctime_ns;
	int fd;
	if (!PyArg_ParseTuple(args, "KiKLL", &ino, &fd, &size, &mtime_ns, &ctime_ns))
		return NULL;
	return PyBool_FromLong(nonresident_source(ino, fd, size, mtime_ns, ctime_ns));
}

TELLS_NUMBER(nonresident_no_source)

static PyObject *py_nonresident_fill(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, size, chunk_bytes;
	const char *states;
	Py_ssize_t count;
	if (!PyArg_ParseTuple(args, "KKKy#", &ino, &size, &chunk_bytes, &states, &count))
		return NULL;
	return PyBool_FromLong(nonresident_fill(ino, size, chunk_bytes, states, (size_t)count));
}

ASKS_OF_TWO(nonresident_part, bool_of, "Ki", unsigned long long, int)

static PyObject *py_nonresident_chunks(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, first, last;
	unsigned state;
	if (!PyArg_ParseTuple(args, "KKKI", &ino, &first, &last, &state))
		return NULL;
	nonresident_chunks(ino, first, last, (enum chunk_state)state);
	Py_RETURN_NONE;
}

ASKS_OF_TWO(nonresident_ahead, NONE_AFTER, "KK", unsigned long long, unsigned long long)

static PyObject *py_nonresident_units(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	static struct nonresident_units functions = {nonresident_arrived, nonresident_chunks};
	return PyCapsule_New(&functions, NONRESIDENT_UNITS, NULL);
}

TELLS_NUMBER(nonresident_stop)
ASKS_OF_NUMBER(nonresident_used, bool_of)

ASKS_OF_TWO(waiting_leave_older, number_of, "KI", unsigned long long, unsigned)
ASKS_OF_NUMBER(waiting_any_since, bool_of)

/* -- attributes that files do not have */

static PyObject *py_absent_add(PyObject *Py_UNUSED(self), PyObject *inos)
{
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

static PyObject *py_absent_name(PyObject *Py_UNUSED(self), PyObject *args)
{
	const char *name;
	int error;
	if (!PyArg_ParseTuple(args, "yi", &name, &error))
		return NULL;
	return PyBool_FromLong(absent_name(name, error) == 0);
}

/* -- recordings */

/* Returns when it began, on CLOCK_MONOTONIC. */
static PyObject *py_record_begin(PyObject *Py_UNUSED(self), PyObject *given)
{
	uint64_t sample, now_ns = monotonic_ns();
	if (!number_in(given, &sample))
		return NULL;
	int error = record_begin(now_ns, (uint32_t)sample);
	return error < 0 ? failed(-error) : number_of(now_ns);
}

TELLS_NUMBER(record_sample)
TELLS(record_end)

/* The oldest events, packed, and how many were lost so far. */
static PyObject *py_record_drain(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	static struct record_event events[MOST_DRAINED]; /* under the GIL */
	uint64_t lost;
	size_t count = record_drain(events, MOST_DRAINED, &lost);
	return Py_BuildValue("y#K", (const char *)events, (Py_ssize_t)(count * sizeof(*events)),
			     (unsigned long long)lost);
}

PyMethodDef known_methods[] = {
	METHOD(absent_add, METH_O),
	METHOD(absent_name, METH_VARARGS),
	METHOD(table_attach, METH_O),
	METHOD(table_detach, METH_NOARGS),
	METHOD(table_add, METH_VARARGS),
	METHOD(table_opened, METH_VARARGS),
	METHOD(table_end, METH_O),
	METHOD(table_ino, METH_O),
	METHOD(table_own, METH_O),
	METHOD(table_list, METH_NOARGS),
	METHOD(table_length, METH_NOARGS),
	METHOD(resident_start, METH_VARARGS),
	METHOD(resident_tier, METH_VARARGS),
	METHOD(resident_put, METH_VARARGS),
	METHOD(resident_renew, METH_VARARGS),
	METHOD(resident_expire, METH_O),
	METHOD(resident_stop, METH_O),
	METHOD(resident_retire, METH_O),
	METHOD(resident_reading, METH_O),
	METHOD(resident_has, METH_O),
	METHOD(resident_full, METH_NOARGS),
	METHOD(resident_used, METH_O),
	METHOD(resident_seen, METH_O),
	METHOD(resident_opened, METH_NOARGS),
	METHOD(resident_use, METH_O),
	METHOD(resident_unuse, METH_O),
	METHOD(inode_back, METH_VARARGS),
	METHOD(inode_unback, METH_VARARGS),
	METHOD(inode_decided, METH_O),
	METHOD(nonresident_source, METH_VARARGS),
	METHOD(nonresident_no_source, METH_O),
	METHOD(nonresident_fill, METH_VARARGS),
	METHOD(nonresident_part, METH_VARARGS),
	METHOD(nonresident_chunks, METH_VARARGS),
	METHOD(nonresident_ahead, METH_VARARGS),
	METHOD(nonresident_units, METH_NOARGS),
	METHOD(nonresident_stop, METH_O),
	METHOD(nonresident_used, METH_O),
	METHOD(waiting_leave_older, METH_VARARGS),
	METHOD(waiting_any_since, METH_O),
	METHOD(counts_take, METH_NOARGS),
	METHOD(record_begin, METH_O),
	METHOD(record_sample, METH_O),
	METHOD(record_end, METH_NOARGS),
	METHOD(record_drain, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};
