/* What Python tells the data engine, and hears from it. See engine/misses.py. */
#define PY_SSIZE_T_CLEAN
#include "_bindings.h"

#include "_misses.h"
#include "_names.h"

#include <errno.h>

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
	.tp_name = "monarchfs.fuse._session.FileBytes",
	.tp_doc = "The bytes of a file, read-only; for memoryview.",
	.tp_basicsize = sizeof(struct file_bytes),
	.tp_flags = Py_TPFLAGS_DEFAULT,
	.tp_dealloc = dealloc,
	.tp_as_buffer = &buffer,
	.tp_as_sequence = &sequence,
};

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

static PyObject *start(PyObject *self, PyObject *args)
{
	unsigned long long memory_bytes, device;
	int keeps, layouts, nice;
	(void)self;
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

static PyObject *directory(PyObject *self, PyObject *args)
{
	unsigned number;
	int fd;
	(void)self;
	if (!PyArg_ParseTuple(args, "Ii", &number, &fd))
		return NULL;
	int error = -misses_directory(number, fd);
	if (error)
		return failed(error);
	Py_RETURN_NONE;
}

static PyObject *put(PyObject *self, PyObject *args)
{
	unsigned long long ino, source_ino, size;
	long long mtime_ns, ctime_ns;
	unsigned number;
	const char *name;
	Py_ssize_t length;
	(void)self;
	if (!PyArg_ParseTuple(args, "KIy#KKLL", &ino, &number, &name, &length, &source_ino, &size,
			      &mtime_ns, &ctime_ns))
		return NULL;
	const struct miss_version version = {source_ino, size, mtime_ns, ctime_ns};
	return PyBool_FromLong(misses_put(ino, number, name, (size_t)length, &version));
}

static PyObject *has(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	return number_in(given, &ino) ? PyBool_FromLong(misses_has(ino)) : NULL;
}

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

static PyObject *forget(PyObject *self, PyObject *given)
{
	(void)self;
	uint64_t *inos = numbers_in(given);
	if (!inos)
		return NULL;
	misses_forget(inos, (size_t)PyList_GET_SIZE(given));
	free(inos);
	Py_RETURN_NONE;
}

static PyObject *forget_all(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	misses_forget_all();
	Py_RETURN_NONE;
}

static PyObject *hold(PyObject *self, PyObject *args)
{
	unsigned long long ino;
	int held;
	(void)self;
	if (!PyArg_ParseTuple(args, "Kp", &ino, &held))
		return NULL;
	return PyBool_FromLong(misses_hold(ino, held));
}

static PyObject *fetch(PyObject *self, PyObject *args)
{
	PyObject *given;
	unsigned threads;
	(void)self;
	if (!PyArg_ParseTuple(args, "O!I", &PyList_Type, &given, &threads))
		return NULL;
	size_t count = (size_t)PyList_GET_SIZE(given);
	uint64_t *inos = numbers_in(given);
	bool *begun = malloc(count + 1);
	PyObject *refused = inos ? PyList_New(0) : NULL;
	if (!begun && inos)
		PyErr_NoMemory();
	if (!begun)
		Py_CLEAR(refused);
	if (refused)
		misses_fetch(inos, count, threads, begun);
	for (size_t n = 0; refused && n < count; n++)
		if (!begun[n] &&
		    PyList_Append(refused, PyList_GET_ITEM(given, (Py_ssize_t)n)) < 0)
			Py_CLEAR(refused);
	free(begun);
	free(inos);
	return refused;
}

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

static PyObject *events(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	PyObject *found = PyList_New(0);
	struct miss_event *event = misses_events();
	while (event) {
		struct miss_event *next = event->next;
		PyObject *bytes = object_of(event->bytes), *each = NULL;
		if (bytes && found)
			each = Py_BuildValue("KIOiK", (unsigned long long)event->ino, event->opens,
					     bytes, event->error,
					     (unsigned long long)event->took_ns);
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

static PyObject *names_put_node(PyObject *self, PyObject *args)
{
	unsigned long long parent, device, source_ino, ino, size, rdev, blocks;
	long long mtime_ns, ctime_ns, atime_ns;
	unsigned mode, nlink, uid, gid, blksize;
	const char *name;
	Py_ssize_t length;
	double seconds;
	PyObject *rest[5];
	(void)self;
	/* types.Node and types.SourceStat. */
	if (!PyArg_ParseTuple(args, "Ky#d(K(KKKLLLIIIIKKI)OOOOO)", &parent, &name, &length,
			      &seconds, &ino, &device, &source_ino, &size, &mtime_ns, &ctime_ns,
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
	names_put(parent, name, (size_t)length, &attr, (uint64_t)(seconds * NS));
	Py_RETURN_NONE;
}

static PyObject *names_forget_name(PyObject *self, PyObject *args)
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

static PyObject *names_forget_node(PyObject *self, PyObject *given)
{
	uint64_t ino;
	(void)self;
	if (!number_in(given, &ino))
		return NULL;
	names_forget_ino(ino);
	Py_RETURN_NONE;
}

static PyObject *names_forget_each(PyObject *self, PyObject *unused)
{
	(void)self;
	(void)unused;
	names_forget_all();
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{"misses_start", start, METH_VARARGS,
	 "misses_start(memory_bytes, device, keeps, layouts, nice): see _misses.h. A descriptor that is\n"
	 "readable while there are events. Raises OSError."},
	{"misses_directory", directory, METH_VARARGS,
	 "misses_directory(number, fd): an open directory of the source. Raises OSError."},
	{"misses_put", put, METH_VARARGS,
	 "misses_put(ino, directory, name, source ino, size, mtime_ns, ctime_ns): what it stands for.\n"
	 "False where it cannot be known."},
	{"misses_has", has, METH_O, "misses_has(ino): whether it is known."},
	{"misses_forget", forget, METH_O, "misses_forget([ino]): they are not to be served any more."},
	{"misses_forget_all", forget_all, METH_NOARGS, "The same, of all."},
	{"misses_hold", hold, METH_VARARGS,
	 "misses_hold(ino, held): Python reads it, or not any more. Whether it was busy."},
	{"misses_fetch", fetch, METH_VARARGS,
	 "misses_fetch([ino], threads): have them read by so many threads, see _misses.h. A list of those of\n"
	 "which no event will tell."},
	{"misses_events", events, METH_NOARGS,
	 "What was served since the last call, oldest first: [(ino, opens, bytes or None, error, ns in the\n"
	 "source)]."},
	{"names_put", names_put_node, METH_VARARGS,
	 "names_put(parent, name, seconds, node): look-ups are answered with the node for so long. Nothing\n"
	 "is done with one whose times have no 64 bits."},
	{"names_forget", names_forget_name, METH_VARARGS,
	 "names_forget(parent, name): it is not answered any more."},
	{"names_forget_ino", names_forget_node, METH_O,
	 "names_forget_ino(ino): the same of all names that stand for it."},
	{"names_forget_all", names_forget_each, METH_NOARGS, "The same, of all."},
	{NULL, NULL, 0, NULL},
};

int engine_add_to(PyObject *module)
{
	if (PyType_Ready(&file_bytes_type) < 0)
		return -1;
	return PyModule_AddFunctions(module, methods);
}
