/* What the modules share that make Python functions of C functions. The Python functions have the same names;
 * the C declarations describe them; their types are in _session.pyi. */
#ifndef MONARCHFS_PYTHON_H
#define MONARCHFS_PYTHON_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <errno.h>
#include <stdbool.h>
#include <stdint.h>

static inline PyObject *failed(int error)
{
	errno = error;
	return PyErr_SetFromErrno(PyExc_OSError);
}

/* For a function that returns 0 or -errno. */
static inline PyObject *none_unless(int error)
{
	if (error < 0)
		return failed(-error);
	Py_RETURN_NONE;
}

static inline PyObject *bool_of(bool value)
{
	return PyBool_FromLong(value);
}

static inline PyObject *number_of(uint64_t value)
{
	return PyLong_FromUnsignedLongLong(value);
}

/* 0: none. */
static inline PyObject *ino_of(uint64_t ino)
{
	if (!ino)
		Py_RETURN_NONE;
	return number_of(ino);
}

static inline bool number_in(PyObject *given, uint64_t *number)
{
	*number = PyLong_AsUnsignedLongLong(given);
	return !(*number == (uint64_t)-1 && PyErr_Occurred());
}

/* A list of numbers. */
static inline PyObject *numbers_of(const uint64_t *numbers, size_t count)
{
	PyObject *list = PyList_New((Py_ssize_t)count);
	for (size_t i = 0; list && i < count; i++) {
		PyObject *number = number_of(numbers[i]);
		if (!number)
			Py_CLEAR(list);
		else
			PyList_SET_ITEM(list, (Py_ssize_t)i, number);
	}
	return list;
}

/* The Python functions py_NAME of simple C functions. `object` (above) makes a Python object of the result; */
#define NONE_AFTER(call) ((call), Py_NewRef(Py_None)) /* of a function without one. */

#define ASKS(name, object)                                                               \
	static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *Py_UNUSED(none)) \
	{                                                                                \
		return object(name());                                                   \
	}

#define ASKS_OF_NUMBER(name, object)                                           \
	static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *given) \
	{                                                                      \
		uint64_t number;                                               \
		return number_in(given, &number) ? object(name(number)) : NULL; \
	}

/* Of two arguments, of these types, as `format` has them parsed. */
#define ASKS_OF_TWO(name, object, format, type, other)                        \
	static PyObject *py_##name(PyObject *Py_UNUSED(self), PyObject *args) \
	{                                                                     \
		type first;                                                   \
		other second;                                                 \
		if (!PyArg_ParseTuple(args, format, &first, &second))         \
			return NULL;                                          \
		return object(name(first, second));                           \
	}

#define TELLS(name) ASKS(name, NONE_AFTER)
#define TELLS_NUMBER(name) ASKS_OF_NUMBER(name, NONE_AFTER)

#define METHOD(name, flags) {#name, py_##name, flags, NULL}

#endif
