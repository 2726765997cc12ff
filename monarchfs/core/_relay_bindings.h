/* Functions of the Python module for _table.c and _resident.c. */
#ifndef MONARCHFS_KNOWN_H
#define MONARCHFS_KNOWN_H

#include "_python.h"

extern PyMethodDef known_methods[];

#endif
