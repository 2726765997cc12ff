/* Functions of the Python module for _table.c and _resident.c. */
#ifndef MONARCHFS_KNOWN_H
#define MONARCHFS_KNOWN_H

#include <Python.h>

#include "_relay.h"

extern PyMethodDef known_methods[];

/* (nanoseconds that the answers took, how many took at most so long as each of the bounds). */
PyObject *durations_object(const struct relay_times *of);

#endif
