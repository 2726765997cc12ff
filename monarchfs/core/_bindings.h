/* The Python functions of the data engine. */
#ifndef MONARCHFS_ENGINE_BINDINGS_H
#define MONARCHFS_ENGINE_BINDINGS_H

#include "_python.h"

/* 0, or -1 with an exception. */
int engine_add_to(PyObject *module);

#endif
