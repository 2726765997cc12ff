/* What Python tells the data engine, and hears from it. See core/misses.py. */
#include "_bindings.h"

#include "_directories.h"
#include "_misses.h"
#include "_names.h"
#include "_revalidate.h"

/* The bytes of a file, as a buffer. */
struct file_bytes {
	PyObject_HEAD
	struct miss_bytes *bytes;
};

static int get_buffer(PyObject *self, Py_buffer *view, int flags)
{
	struct miss_bytes *bytes = ((struct file_bytes *)self)->bytes;
	return PyBuffer_FillInfo(view, self, bytes->data, (Py_ssize_t)bytes->size, 1, flags);
}

static Py_ssize_t length_of(PyObject *self)
{
	return (Py_ssize_t)((struct file_bytes *)self)->bytes->size;
}

static void dealloc(PyObject *self)
{
	misses_leave_bytes(((struct file_bytes *)self)->bytes);
	Py_TYPE(self)->tp_free(self);
}

static PyBufferProcs buffer = {.bf_getbuffer = get_buffer};
static PySequenceMethods sequence = {.sq_length = length_of};
static PyTypeObject file_bytes_type = {
	PyVarObject_HEAD_INIT(NULL, 0)
	.tp_name = "monarchfs.core._session.FileBytes",
	.tp_doc = "The bytes of a file, read-only; for memoryview.",
	.tp_basicsize = sizeof(struct file_bytes),
	.tp_flags = Py_TPFLAGS_DEFAULT,
	.tp_dealloc = dealloc,
	.tp_as_buffer = &buffer,
	.tp_as_sequence = &sequence,
};

static PyObject *py_misses_start(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long memory_bytes, device;
	int keeps, layouts, nice;
	if (!PyArg_ParseTuple(args, "KKppi", &memory_bytes, &device, &keeps, &layouts, &nice))
		return NULL;
	const struct miss_options options = {
		.memory_bytes = memory_bytes,
		.device = (dev_t)device,
		.keeps = keeps,
		.layouts = layouts,
		.nice = nice,
	};
	int fd = misses_start(&options);
	return fd < 0 ? failed(-fd) : PyLong_FromLong(fd);
}

TELLS_NUMBER(revalidate_start)

static PyObject *py_directories_put(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned number;
	unsigned long long ino;
	int fd;
	const char *path;
	if (!PyArg_ParseTuple(args, "IKiy", &number, &ino, &fd, &path))
		return NULL;
	return none_unless(directories_put(number, ino, fd, path));
}

static PyObject *py_misses_put(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned long long ino, source_ino, size;
	long long mtime_ns, ctime_ns, fresh_until_ns;
	unsigned number;
	const char *name, *replica = NULL;
	Py_ssize_t length, replica_bytes = 0;
	if (!PyArg_ParseTuple(args, "KIy#KKLLL|y#", &ino, &number, &name, &length, &source_ino, &size,
			      &mtime_ns, &ctime_ns, &fresh_until_ns, &replica, &replica_bytes))
		return NULL;
	if (replica && replica_bytes != MISS_REPLICA_BYTES) {
		PyErr_SetString(PyExc_ValueError, "the name of a replica has 16 bytes");
		return NULL;
	}
	const struct miss_version version = {source_ino, size, mtime_ns, ctime_ns};
	return PyBool_FromLong(misses_put(ino, number, name, (size_t)length, &version, fresh_until_ns,
					  (const unsigned char *)replica));
}

/* It gets a function of another module, in a capsule of that name. */
#define TELLS_FUNCTION(name, type, capsule_name) \
	static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *capsule) \
	{ \
		type *function = (type *)PyCapsule_GetPointer(capsule, capsule_name); \
		if (!function) \
			return NULL; \
		name(function); \
		Py_RETURN_NONE; \
	}

TELLS_FUNCTION(misses_peers, miss_peers, MISS_PEERS)
TELLS_FUNCTION(misses_opened, small_opened, SMALL_OPENED)

ASKS_OF_NUMBER(misses_has, bool_of)
TELLS(misses_forget_all)

/* The numbers in a list, to be freed; NULL with an exception. */
static uint64_t *numbers_in(PyObject *given)
{
	if (!PyList_Check(given)) {
		PyErr_SetString(PyExc_TypeError, "not a list");
		return NULL;
	}
	Py_ssize_t count = PyList_GET_SIZE(given);
	uint64_t *numbers = malloc(count ? (size_t)count * sizeof(*numbers) : 1);
	if (!numbers)
		PyErr_NoMemory();
	for (Py_ssize_t n = 0; numbers && n < count; n++) {
		if (!number_in(PyList_GET_ITEM(given, n), &numbers[n])) {
			free(numbers);
			return NULL;
		}
	}
	return numbers;
}

/* A function of a list of numbers, without a result. */
#define TELLS_NUMBERS(name)                                                    \
	static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *given) \
	{                                                                      \
		uint64_t *numbers = numbers_in(given);                         \
		if (!numbers)                                                  \
			return NULL;                                           \
		name(numbers, (size_t)PyList_GET_SIZE(given));                 \
		free(numbers);                                                 \
		Py_RETURN_NONE;                                                \
	}

TELLS_NUMBERS(misses_forget)
TELLS_NUMBERS(misses_hurry)
TELLS_NUMBERS(misses_window_drop)

ASKS_OF_TWO(misses_exclude, bool_of, "Kp", unsigned long long, int)

typedef void begin_reading(const uint64_t *inos, const int64_t *fresh_until_ns, size_t count, unsigned threads,
			   bool *begun);

/* Begins to read files: (their numbers, the times until which they are fresh, threads). Those of which it does not. */
static PyObject *begin(begin_reading *read, PyObject *args)
{
	PyObject *given, *given_until;
	unsigned threads;
	if (!PyArg_ParseTuple(args, "O!O!I", &PyList_Type, &given, &PyList_Type, &given_until, &threads))
		return NULL;
	size_t count = (size_t)PyList_GET_SIZE(given);
	if (count != (size_t)PyList_GET_SIZE(given_until)) {
		PyErr_SetString(PyExc_ValueError, "each number has a time");
		return NULL;
	}
	uint64_t *inos = numbers_in(given), *until = inos ? numbers_in(given_until) : NULL;
	bool *begun = until ? PyMem_Malloc(count + 1) : NULL;
	PyObject *refused = NULL;
	if (begun) {
		read(inos, (int64_t *)until, count, threads, begun);
		refused = PyList_New(0);
	} else if (!PyErr_Occurred()) {
		PyErr_NoMemory();
	}
	for (size_t n = 0; refused && n < count; n++)
		if (!begun[n] && PyList_Append(refused, PyList_GET_ITEM(given, (Py_ssize_t)n)) < 0)
			Py_CLEAR(refused);
	PyMem_Free(begun);
	free(until);
	free(inos);
	return refused;
}

static PyObject *py_misses_fetch(PyObject *Py_UNUSED(self), PyObject *args)
{
	return begin(misses_fetch, args);
}

static PyObject *py_misses_window(PyObject *Py_UNUSED(self), PyObject *args)
{
	return begin(misses_window, args);
}

TELLS_NUMBER(misses_window_limit)

static PyObject *py_misses_window_state(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	struct miss_window now;
	misses_window_state(&now);
	return Py_BuildValue("KKKKKKKKK", (unsigned long long)now.bytes, (unsigned long long)now.read,
			     (unsigned long long)now.read_bytes, (unsigned long long)now.took_ns,
			     (unsigned long long)now.waited, (unsigned long long)now.hits, (unsigned long long)now.hit_bytes,
			     (unsigned long long)now.wasted, (unsigned long long)now.wasted_bytes);
}

ASKS(misses_source_ns, number_of)

ASKS(misses_headers, bool_of)

/* Takes the bytes over. */
static PyObject *object_of(struct miss_bytes *bytes)
{
	if (!bytes)
		Py_RETURN_NONE;
	struct file_bytes *object = PyObject_New(struct file_bytes, &file_bytes_type);
	if (object)
		object->bytes = bytes;
	else
		misses_leave_bytes(bytes);
	return (PyObject *)object;
}

static PyObject *py_misses_events(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(unused))
{
	PyObject *found = PyList_New(0);
	struct miss_event *event = misses_events();
	while (event) {
		struct miss_event *next = event->next;
		PyObject *bytes = object_of(event->bytes), *each = NULL;
		if (bytes && found)
			each = Py_BuildValue("KIOOiKO", (unsigned long long)event->ino, event->opens,
					     event->spared ? Py_True : Py_False, bytes, event->error,
					     (unsigned long long)event->took_ns,
					     event->from_window ? Py_True : Py_False);
		if (!each || PyList_Append(found, each) < 0)
			Py_CLEAR(found); /* the rest is let go of */
		Py_XDECREF(each);
		Py_XDECREF(bytes);
		free(event);
		event = next;
	}
	return found;
}

/* -- names */

#define NS 1000000000

/* Seconds rounded down, as the kernel has times before 1970. */
static void set_time(long long ns, uint64_t *seconds, uint32_t *rest_ns)
{
	long long rest = ns % NS + (ns % NS < 0 ? NS : 0);
	*seconds = (uint64_t)((ns - rest) / NS);
	*rest_ns = (uint32_t)rest;
}

static PyObject *py_names_put(PyObject *self, PyObject *args)
{
	unsigned long long parent, device, source_ino, ino, size, rdev, blocks;
	long long mtime_ns, ctime_ns, atime_ns;
	unsigned mode, nlink, uid, gid, blksize;
	const char *name;
	Py_ssize_t length;
	double seconds;
	int asked_about;
	PyObject *rest[5];
	(void)self;
	/* types.Node and types.SourceStat. */
	if (!PyArg_ParseTuple(args, "Ky#dp(K(KKKLLLIIIIKKI)OOOOO)", &parent, &name, &length,
			      &seconds, &asked_about, &ino, &device, &source_ino, &size, &mtime_ns, &ctime_ns,
			      &atime_ns, &mode, &nlink, &uid, &gid, &rdev, &blocks, &blksize,
			      &rest[0], &rest[1], &rest[2], &rest[3], &rest[4])) {
		if (!PyErr_ExceptionMatches(PyExc_OverflowError))
			return NULL;
		PyErr_Clear(); /* a time after the year 2262 */
		Py_RETURN_NONE;
	}
	struct fuse_attr attr = {
		.ino = ino,
		.size = size,
		.blocks = blocks,
		.mode = mode,
		.nlink = nlink,
		.uid = uid,
		.gid = gid,
		.rdev = (uint32_t)rdev,
		.blksize = blksize,
	};
	set_time(atime_ns, &attr.atime, &attr.atimensec);
	set_time(mtime_ns, &attr.mtime, &attr.mtimensec);
	set_time(ctime_ns, &attr.ctime, &attr.ctimensec);
	names_put(parent, name, (size_t)length, &attr, (uint64_t)(seconds * NS), asked_about ? source_ino : 0);
	Py_RETURN_NONE;
}

static PyObject *py_names_forget(PyObject *self, PyObject *args)
{
	unsigned long long parent;
	const char *name;
	Py_ssize_t length;
	(void)self;
	if (!PyArg_ParseTuple(args, "Ky#", &parent, &name, &length))
		return NULL;
	names_forget(parent, name, (size_t)length);
	Py_RETURN_NONE;
}

TELLS_NUMBER(names_forget_ino)
TELLS(names_forget_all)

static PyMethodDef methods[] = {
	METHOD(directories_put, METH_VARARGS),
	METHOD(revalidate_start, METH_O),
	METHOD(misses_start, METH_VARARGS),
	METHOD(misses_put, METH_VARARGS),
	METHOD(misses_peers, METH_O),
	METHOD(misses_opened, METH_O),
	METHOD(misses_has, METH_O),
	METHOD(misses_forget, METH_O),
	METHOD(misses_forget_all, METH_NOARGS),
	METHOD(misses_exclude, METH_VARARGS),
	METHOD(misses_hurry, METH_O),
	METHOD(misses_fetch, METH_VARARGS),
	METHOD(misses_events, METH_NOARGS),
	METHOD(misses_window, METH_VARARGS),
	METHOD(misses_window_drop, METH_O),
	METHOD(misses_window_limit, METH_O),
	METHOD(misses_window_state, METH_NOARGS),
	METHOD(misses_source_ns, METH_NOARGS),
	METHOD(misses_headers, METH_NOARGS),
	METHOD(names_put, METH_VARARGS),
	METHOD(names_forget, METH_VARARGS),
	METHOD(names_forget_ino, METH_O),
	METHOD(names_forget_all, METH_NOARGS),
	{NULL, NULL, 0, NULL},
};

int engine_add_to(PyObject *module)
{
	if (PyType_Ready(&file_bytes_type) < 0)
		return -1;
	return PyModule_AddFunctions(module, methods);
}
