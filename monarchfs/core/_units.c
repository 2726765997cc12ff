/* Units (_unit.h) for Python. See core/units.py. */
#include "_python.h"

#include "_unit.h"

#include <structmember.h>

struct object {
	PyObject_HEAD
	struct unit *unit;
	uint64_t start, end;
	uint64_t read_bytes, elsewhere_bytes;
	struct unit_holes holes;
	bool direct;
};

static PyObject *new(PyTypeObject *type, PyObject *args, PyObject *named)
{
	static char *names[] = {"ino",	   "start",   "size",	    "chunk_bytes",
				"version", "readers", "most_bytes", "in_requests", "sparse", NULL};
	unsigned long long ino, start, size, chunk_bytes, most_bytes = 0, device, source_ino, bytes;
	long long mtime, ctime;
	long mtime_ns, ctime_ns;
	PyObject *readers;
	int in_requests = true, sparse = false;
	if (!PyArg_ParseTupleAndKeywords(args, named, "KKKK(KKKLlLl)O|Kpp", names, &ino, &start, &size,
					 &chunk_bytes, &device, &source_ino, &bytes, &mtime,
					 &mtime_ns, &ctime, &ctime_ns, &readers, &most_bytes,
					 &in_requests, &sparse))
		return NULL;
	struct unit_plan plan = {
		.ino = ino,
		.start = start,
		.size = size,
		.chunk_bytes = chunk_bytes,
		.version = {.device = (dev_t)device, .ino = (ino_t)source_ino, .size = (off_t)bytes,
			    .mtime = {(time_t)mtime, mtime_ns}, .ctime = {(time_t)ctime, ctime_ns}},
		.most_bytes = most_bytes,
		.in_requests = in_requests,
		.sparse = sparse,
	};
	if (readers != Py_None &&
	    !(plan.readers = PyCapsule_GetPointer(readers, NONRESIDENT_UNITS)))
		return NULL;
	struct object *self = (struct object *)type->tp_alloc(type, 0);
	if (!self)
		return NULL;
	self->start = start;
	self->end = start + size;
	self->unit = unit_new(&plan);
	if (self->unit)
		return (PyObject *)self;
	int error = errno;
	Py_DECREF(self);
	return error == ENOMEM ? PyErr_NoMemory() : failed(error);
}

static void dealloc(PyObject *self)
{
	struct unit *unit = ((struct object *)self)->unit;
	if (unit)
		unit_free(unit);
	Py_TYPE(self)->tp_free(self);
}

static PyObject *do_read(PyObject *self, PyObject *args)
{
	struct object *object = (struct object *)self;
	struct unit_source source = {.direct = -1};
	unsigned long long request_bytes = 0;
	if (!PyArg_ParseTuple(args, "i|iK", &source.fd, &source.direct, &request_bytes))
		return NULL;
	source.request_bytes = request_bytes;
	enum unit_end end;
	int error;
	Py_BEGIN_ALLOW_THREADS
	end = unit_read(object->unit, &source, &object->read_bytes);
	error = errno;
	Py_END_ALLOW_THREADS
	object->direct = source.direct >= 0;
	object->holes = unit_holes(object->unit);
	return end == UNIT_FAILED ? failed(error) : PyBool_FromLong(end == UNIT_READ);
}

static PyObject *read_elsewhere(PyObject *self, PyObject *args)
{
	struct object *object = (struct object *)self;
	PyObject *capsule;
	unsigned peer;
	const char *path;
	Py_buffer given;
	if (!PyArg_ParseTuple(args, "OIsy*", &capsule, &peer, &path, &given))
		return NULL;
	unit_elsewhere *from = (unit_elsewhere *)PyCapsule_GetPointer(capsule, UNIT_ELSEWHERE);
	size_t size;
	unit_digests(object->unit, &size);
	enum elsewhere_result result = ELSEWHERE_FAILED;
	if (from && (size_t)given.len != size)
		PyErr_SetString(PyExc_ValueError, "digests are 8 bytes for each 128 KiB");
	else if (from) {
		Py_BEGIN_ALLOW_THREADS
		result = unit_read_elsewhere(object->unit, from, peer, path, given.buf,
					     &object->elsewhere_bytes);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&given);
	return PyErr_Occurred() ? NULL : PyLong_FromLong(result);
}

static PyObject *do_write(PyObject *self, PyObject *args)
{
	struct object *object = (struct object *)self;
	int fd, done;
	double seconds;
	if (!PyArg_ParseTuple(args, "id", &fd, &seconds))
		return NULL;
	Py_BEGIN_ALLOW_THREADS
	done = unit_write(object->unit, fd, (int64_t)(seconds * 1e9));
	Py_END_ALLOW_THREADS
	return done < 0 ? failed(-done) : bool_of(done);
}

static PyObject *show(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct object *object = (struct object *)self;
	Py_BEGIN_ALLOW_THREADS
	unit_show(object->unit);
	Py_END_ALLOW_THREADS
	Py_RETURN_NONE;
}

/* A method without arguments and result, whose C function does not block. */
#define UNIT_METHOD(name)                                            \
	static PyObject *name(PyObject *self, PyObject *Py_UNUSED(unused)) \
	{                                                            \
		unit_##name(((struct object *)self)->unit);          \
		Py_RETURN_NONE;                                      \
	}

UNIT_METHOD(finish)
UNIT_METHOD(stop)
UNIT_METHOD(empty)

static PyObject *peek(PyObject *self, PyObject *args)
{
	struct object *object = (struct object *)self;
	unsigned long long offset, end;
	if (!PyArg_ParseTuple(args, "KK", &offset, &end))
		return NULL;
	end = end < object->end ? end : object->end;
	size_t size = offset < end ? (size_t)(end - offset) : 0;
	PyObject *bytes = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)size);
	if (bytes && size)
		_PyBytes_Resize(&bytes, (Py_ssize_t)unit_copy(object->unit, offset, size,
							      PyBytes_AS_STRING(bytes)));
	return bytes;
}

static PyObject *needed(PyObject *self, PyObject *Py_UNUSED(unused))
{
	struct object *object = (struct object *)self;
	uint64_t bytes;
	Py_BEGIN_ALLOW_THREADS
	bytes = unit_needed(object->unit);
	Py_END_ALLOW_THREADS
	return PyLong_FromUnsignedLongLong(bytes);
}

/* The ranges of blocks in a state, as [(start, end)]. */
static PyObject *ranges(const struct object *object, enum unit_state state)
{
	PyObject *found = PyList_New(0);
	uint64_t at = object->start;
	while (found && at < object->end) {
		uint64_t start = at;
		while (at < object->end && unit_state(object->unit, at) == state)
			at += UNIT_BLOCK_BYTES;
		if (at == start) {
			at += UNIT_BLOCK_BYTES;
			continue;
		}
		PyObject *range = Py_BuildValue("KK", (unsigned long long)start,
						(unsigned long long)(at < object->end ? at : object->end));
		if (!range || PyList_Append(found, range) < 0)
			Py_CLEAR(found);
		Py_XDECREF(range);
	}
	return found;
}

static PyObject *stored(PyObject *self, PyObject *Py_UNUSED(unused))
{
	return ranges((struct object *)self, UNIT_STORED);
}

static PyObject *dropped(PyObject *self, PyObject *Py_UNUSED(unused))
{
	return ranges((struct object *)self, UNIT_DROPPED);
}

static PyObject *is_stored(PyObject *self, PyObject *given)
{
	uint64_t offset;
	if (!number_in(given, &offset))
		return NULL;
	return PyBool_FromLong(unit_state(((struct object *)self)->unit, offset) == UNIT_STORED);
}

static PyObject *digests(PyObject *self, PyObject *args)
{
	struct object *object = (struct object *)self;
	unsigned long long start, end;
	if (!PyArg_ParseTuple(args, "KK", &start, &end))
		return NULL;
	if (start < object->start || start > end || end > object->end ||
	    (start - object->start) % UNIT_CHECKED_BYTES)
		return failed(EINVAL);
	size_t size;
	const unsigned char *all = unit_digests(object->unit, &size);
	size_t from = (size_t)((start - object->start) / UNIT_CHECKED_BYTES);
	size_t count = (size_t)((end - start + UNIT_CHECKED_BYTES - 1) / UNIT_CHECKED_BYTES);
	return PyBytes_FromStringAndSize((const char *)all + from * UNIT_DIGEST_BYTES,
					 (Py_ssize_t)(count * UNIT_DIGEST_BYTES));
}

static PyMethodDef object_methods[] = {
	{"read", do_read, METH_VARARGS,
	 "read(fd, direct=-1, request_bytes=0): read it from the source; False where that has another version, or not\n"
	 "all of these bytes: what came before is good all the same. direct is a descriptor with O_DIRECT that is to\n"
	 "be read instead, where that can be done. request_bytes, if they are known, are what a request to a server\n"
	 "brings: at least as many are read at once. Raises the source's OSError."},
	{"read_elsewhere", read_elsewhere, METH_VARARGS,
	 "read_elsewhere(read, peer, path, digests): read it from another node, before read, which reads the rest;\n"
	 "all blocks are compared with digests. read is a capsule. READ, or why not all came: GONE (the file is not\n"
	 "there, or ends early), WRONG, FAILED."},
	{"write", do_write, METH_VARARGS,
	 "write(fd, seconds): write what arrives to a part file; False where nothing did for so long, and there is\n"
	 "more to come. Raises OSError of the tier."},
	{"show", show, METH_NOARGS,
	 "Those who read the file without Python have just been told of it: of this, too."},
	{"finish", finish, METH_NOARGS, "Nothing more arrives, as at the end of read."},
	{"stop", stop, METH_NOARGS, "Nothing more of it is written, or shown to anybody."},
	{"empty", empty, METH_NOARGS, "Nobody needs its bytes any more, and nobody writes them."},
	{"peek", peek, METH_VARARGS,
	 "peek(offset, end): the bytes from offset on, as far as they are in memory: perhaps none."},
	{"needed", needed, METH_NOARGS, "How many bytes of blocks it takes to write what is in memory."},
	{"stored", stored, METH_NOARGS, "The ranges that were written, as (start, end)."},
	{"dropped", dropped, METH_NOARGS, "The ranges for which there was no memory."},
	{"is_stored", is_stored, METH_O, "is_stored(offset): whether this byte was written."},
	{"digests", digests, METH_VARARGS,
	 "digests(start, end): the digests of the blocks of store.checksum in a range that was written."},
	{NULL, NULL, 0, NULL},
};

#define MEMBER(name, type, doc) {#name, type, offsetof(struct object, name), READONLY, doc}

static PyMemberDef object_values[] = {
	MEMBER(start, T_ULONGLONG, NULL),
	MEMBER(end, T_ULONGLONG, NULL),
	MEMBER(direct, T_BOOL, "Whether it was read past the source's page cache."),
	MEMBER(elsewhere_bytes, T_ULONGLONG, "How much other nodes gave."),
	MEMBER(read_bytes, T_ULONGLONG, "How much the source gave."),
	{"hole_bytes", T_ULONGLONG, offsetof(struct object, holes.bytes), READONLY,
	 "How much was not read, because it lies in holes."},
	{"hole_end", T_ULONGLONG, offsetof(struct object, holes.hole_end), READONLY,
	 "The hole in which it ends goes on to there; 0: it does not end in one."},
	{"data_end", T_ULONGLONG, offsetof(struct object, holes.data_end), READONLY,
	 "No hole begins before this, from what was read last on; 0: that is not known."},
	{NULL, 0, 0, 0, NULL},
};

static PyTypeObject object_type = {
	PyVarObject_HEAD_INIT(NULL, 0)
	.tp_name = "monarchfs.core._units.Unit",
	.tp_doc = "See units.Unit.",
	.tp_basicsize = sizeof(struct object),
	.tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
	.tp_new = new,
	.tp_dealloc = dealloc,
	.tp_methods = object_methods,
	.tp_members = object_values,
};

ASKS(unit_memory, number_of)

static PyMethodDef methods[] = {
	{"memory_bytes", py_unit_memory, METH_NOARGS, "What all units have in memory."},
	{NULL, NULL, 0, NULL},
};

static struct PyModuleDef module = {
	PyModuleDef_HEAD_INIT,
	.m_name = "monarchfs.core._units",
	.m_doc = "Reads of large files in the source on behalf of their copies; see units.py.",
	.m_size = -1,
	.m_methods = methods,
};

PyMODINIT_FUNC PyInit__units(void)
{
	PyObject *m = PyModule_Create(&module);
	if (m && (PyType_Ready(&object_type) < 0 ||
		  PyModule_AddObjectRef(m, "Unit", (PyObject *)&object_type) < 0 ||
		  PyModule_AddIntConstant(m, "READ", ELSEWHERE_READ) < 0 ||
		  PyModule_AddIntConstant(m, "GONE", ELSEWHERE_GONE) < 0 ||
		  PyModule_AddIntConstant(m, "WRONG", ELSEWHERE_WRONG) < 0 ||
		  PyModule_AddIntConstant(m, "FAILED", ELSEWHERE_FAILED) < 0))
		Py_CLEAR(m);
	return m;
}
