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

/* A function of one number. `object` (above) makes a Python object of its result. */
#define ASKS_OF_NUMBER(name, object)                                    \
	static PyObject *py_##name(PyObject *self, PyObject *given)     \
	{                                                               \
		uint64_t number;                                        \
		(void)self;                                             \
		return number_in(given, &number) ? object(name(number)) : NULL; \
	}

/* A function of one number, without a result. */
#define TELLS_NUMBER(name)                                          \
	static PyObject *py_##name(PyObject *self, PyObject *given) \
	{                                                           \
		uint64_t number;                                    \
		(void)self;                                         \
		if (!number_in(given, &number))                     \
			return NULL;                                \
		name(number);                                       \
		Py_RETURN_NONE;                                     \
	}

/* A function without argument and result. */
#define TELLS(name)                                                  \
	static PyObject *py_##name(PyObject *self, PyObject *unused) \
	{                                                            \
		(void)self;                                          \
		(void)unused;                                        \
		name();                                              \
		Py_RETURN_NONE;                                      \
	}

#define METHOD(name, flags) {#name, py_##name, flags, NULL}

#endif
