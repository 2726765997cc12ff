/* _places.h and _fetch.h for Python. See replicas.py. */
#include "../core/_python.h"

#include "_want.h"

#include "../core/_misses.h"
#include "../core/_unit.h"
#include "../core/_counts.h"

#include <stdlib.h>

static bool is_name(const Py_buffer *name)
{
	if (name->len == REPLICA_NAME_BYTES)
		return true;
	PyErr_SetString(PyExc_ValueError, "the name of a replica has 16 bytes");
	return false;
}

static PyObject *put(PyObject *Py_UNUSED(self), PyObject *args)
{
	PyObject *rows;
	unsigned peer;
	if (!PyArg_ParseTuple(args, "IO", &peer, &rows))
		return NULL;
	PyObject *sequence = PySequence_Fast(rows, "rows are a sequence");
	if (!sequence)
		return NULL;
	unsigned long kept = 0;
	for (Py_ssize_t n = 0; n < PySequence_Fast_GET_SIZE(sequence); n++) {
		Py_buffer name;
		unsigned long long segment, offset, checksum;
		unsigned size, tier;
		PyObject *row = PySequence_Fast_GET_ITEM(sequence, n);
		if (!PyTuple_Check(row) || !PyArg_ParseTuple(row, "y*KIIKK", &name, &checksum, &size, &tier, &segment, &offset)) {
			if (!PyErr_Occurred())
				PyErr_SetString(PyExc_TypeError, "a row is a tuple");
			Py_DECREF(sequence);
			return NULL;
		}
		struct place place = {segment, offset, checksum, size, (uint16_t)peer, (uint16_t)tier};
		bool good = is_name(&name);
		if (good && segment)
			kept += places_put(name.buf, &place);
		else if (good)
			places_remove(name.buf, peer);
		PyBuffer_Release(&name);
		if (!good) {
			Py_DECREF(sequence);
			return NULL;
		}
	}
	Py_DECREF(sequence);
	return PyLong_FromUnsignedLong(kept);
}

/* Without the GIL: there may be millions. */
static void remove_all(uint64_t peer)
{
	Py_BEGIN_ALLOW_THREADS
	places_remove_all((unsigned)peer);
	Py_END_ALLOW_THREADS
}

TELLS_NUMBER(remove_all)

static PyObject *available(PyObject *Py_UNUSED(self), PyObject *arg)
{
	Py_buffer name;
	if (PyObject_GetBuffer(arg, &name, PyBUF_SIMPLE) < 0)
		return NULL;
	struct place place;
	PyObject *result = NULL;
	if (is_name(&name))
		result = PyBool_FromLong(places_get(name.buf, &place) && !fetch_avoided(place.peer));
	PyBuffer_Release(&name);
	return result;
}

ASKS_OF_TWO(fetch_peer, none_unless, "Is", unsigned, const char *)
ASKS_OF_TWO(fetch_token, none_unless, "Is", unsigned, const char *)

static PyObject *pin(PyObject *Py_UNUSED(self), PyObject *digest)
{
	const char *text = PyUnicode_AsUTF8(digest);
	return text ? none_unless(fetch_pin(text)) : NULL;
}

static PyObject *address(PyObject *Py_UNUSED(self), PyObject *given)
{
	const char *text = PyUnicode_AsUTF8(given);
	return text ? none_unless(fetch_address(text)) : NULL;
}

static PyObject *owners(PyObject *Py_UNUSED(self), PyObject *args)
{
	Py_buffer given;
	unsigned own;
	if (!PyArg_ParseTuple(args, "y*I", &given, &own))
		return NULL;
	int result = -EINVAL;
	if (given.len == 2 * OWNER_BUCKETS * (Py_ssize_t)sizeof(uint16_t))
		result = want_owners(given.buf, own);
	PyBuffer_Release(&given);
	return none_unless(result);
}

static PyObject *fetch(PyObject *Py_UNUSED(self), PyObject *args)
{
	Py_buffer name;
	Py_ssize_t size;
	int patient = false;
	if (!PyArg_ParseTuple(args, "y*n|p", &name, &size, &patient))
		return NULL;
	PyObject *data = is_name(&name) ? PyBytes_FromStringAndSize(NULL, size) : NULL;
	enum fetch_result result = FETCH_UNKNOWN;
	if (data) {
		char *to = PyBytes_AS_STRING(data);
		Py_BEGIN_ALLOW_THREADS
		result = fetch_replica(name.buf, (size_t)size, patient, to);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&name);
	if (!data || result == FETCHED)
		return data;
	Py_DECREF(data);
	return PyLong_FromLong(result);
}

static PyObject *ask(PyObject *Py_UNUSED(self), PyObject *args)
{
	unsigned number;
	const char *path;
	Py_buffer body = {0};
	double seconds;
	Py_ssize_t most;
	int probe = false;
	if (!PyArg_ParseTuple(args, "Isz*dn|p", &number, &path, &body, &seconds, &most, &probe))
		return NULL;
	char *answer = NULL;
	size_t size = 0;
	int status;
	Py_BEGIN_ALLOW_THREADS
	status = fetch_answer(number, path, body.buf, (size_t)body.len, (int64_t)(seconds * 1e9), (size_t)most,
			      probe, &answer, &size);
	Py_END_ALLOW_THREADS
	if (body.obj)
		PyBuffer_Release(&body);
	if (status < 0)
		return failed(-status);
	PyObject *result = Py_BuildValue("iy#", status, answer ? answer : "", (Py_ssize_t)size);
	free(answer);
	return result;
}

static PyObject *counts(PyObject *Py_UNUSED(self), PyObject *given)
{
	uint64_t peer;
	struct peer_counts of;
	if (!number_in(given, &peer))
		return NULL;
	fetch_count((unsigned)peer, &of);
	return Py_BuildValue("KKKKKN", of.files, of.bytes, of.wrong, of.failed, of.nanoseconds,
			     bool_of(fetch_avoided((unsigned)peer)));
}

static PyObject *seconds_of(int64_t ns)
{
	return PyFloat_FromDouble((double)ns / 1e9);
}

ASKS_OF_NUMBER(fetch_retry, none_unless)
ASKS_OF_NUMBER(fetch_pause_ns, seconds_of)
ASKS(fetch_failures_fd, PyLong_FromLong)

static PyObject *known(PyObject *Py_UNUSED(self), PyObject *given)
{
	uint64_t count;
	if (!number_in(given, &count))
		return NULL;
	uint64_t *of = PyMem_Calloc(count ? count : 1, sizeof(*of));
	if (!of)
		return PyErr_NoMemory();
	Py_BEGIN_ALLOW_THREADS
	places_count(of, count);
	Py_END_ALLOW_THREADS
	PyObject *list = numbers_of(of, count);
	PyMem_Free(of);
	return list;
}

ASKS(want_bypassed, number_of)

static PyMethodDef methods[] = {
	{"put", put, METH_VARARGS,
	 "put(peer, rows): the replicas (name, checksum, size, tier, segment, offset) that a peer has; segment 0:\n"
	 "that it has no more. How many were entered."},
	{"remove_all", py_remove_all, METH_O, "remove_all(peer): it has none any more."},
	{"available", available, METH_O, "available(name): whether a peer has it that is not avoided."},
	{"peer", py_fetch_peer, METH_VARARGS, "peer(number, url): where it serves its tiers; '': nowhere. Raises OSError."},
	{"pin", pin, METH_O, "pin(digest): the public key that peers must have; \"\" without TLS. Raises OSError."},
	{"token", py_fetch_token, METH_VARARGS, "token(number, text): what each request to a peer has behind its path. Raises OSError."},
	{"address", address, METH_O, "address(text): where all requests come from. Raises OSError."},
	{"owners", owners, METH_VARARGS,
	 "owners(numbers, own): the owner of each bucket of names, 16 bits each, then who stands in for each, and this\n"
	 "node's number. Raises OSError."},
	{"fetch", fetch, METH_VARARGS,
	 "fetch(name, size, patient=False): the bytes of a replica, or why not: enum fetch_result in _fetch.h. Waits for\n"
	 "the peer. patient: no reader waits."},
	{"ask", ask, METH_VARARGS,
	 "ask(peer, path, body, seconds, most, probe=False): status and bytes of the answer of the peer's worker; POST\n"
	 "unless body is None. Waits for the peer. Raises OSError: EAGAIN while it is avoided. probe: no reader waits, so\n"
	 "it may find out whether the peer is back."},
	{"retry", py_fetch_retry, METH_O, "retry(peer): a probe may ask it now, and a second after it fails again. Raises OSError."},
	{"failures_fd", py_fetch_failures_fd, METH_NOARGS, "failures_fd(): an eventfd(2) to which each failure of a peer is added."},
	{"pause", py_fetch_pause_ns, METH_O, "pause(peer): the seconds for which a probe has to wait."},
	{"counts", counts, METH_O,
	 "counts(peer): files, bytes, wrong, failed, nanoseconds, whether it is avoided."},
	{"bypassed", py_want_bypassed, METH_NOARGS, "bypassed(): how many files their owners were not asked for, because that takes too long."},
	{"known", known, METH_O, "known(count): how many replicas each of so many peers is known to have."},
	{0},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_replicas", .m_size = 0, .m_methods = methods};

/* For the threads that read what is not local: see struct miss_peers. */
static bool read_replica(const struct miss_wanted *file, uint64_t source_ns, char *to)
{
	uint64_t began_ns = monotonic_ns();
	enum fetch_result result = fetch_replica(file->replica, file->size, file->ahead, to);
	/* Python has had the owner copy what is read ahead, but the owner may have failed since. */
	bool lost = result == FETCH_AVOIDED || result == FETCH_FAILED;
	bool soon = file->ahead || monotonic_ns() - began_ns < SOON_NS;
	if (result == FETCHED && !file->ahead)
		want_took(file->replica, monotonic_ns() - began_ns);
	else if (result != FETCHED && (lost || !file->ahead) && soon &&
		 want_replica(file->replica, file->size, file->path, source_ns))
		result = fetch_replica(file->replica, file->size, file->ahead, to);
	return result == FETCHED;
}

/* For units: see unit_elsewhere. */
static enum elsewhere_result read_range(unsigned peer, const char *path, uint64_t offset, size_t size, unit_take *take,
					void *to)
{
	switch (fetch_range(peer, path, offset, size, take, to)) {
	case FETCHED:
		return ELSEWHERE_READ;
	case FETCH_UNKNOWN:
		return ELSEWHERE_GONE;
	case FETCH_WRONG:
		return ELSEWHERE_WRONG;
	case FETCH_AVOIDED:
	case FETCH_FAILED:
		break;
	}
	return ELSEWHERE_FAILED;
}

static bool add_function(PyObject *module_made, const char *name, void *function, const char *type)
{
	PyObject *capsule = PyCapsule_New(function, type, NULL);
	bool added = capsule && PyModule_AddObjectRef(module_made, name, capsule) == 0;
	Py_XDECREF(capsule);
	return added;
}

PyMODINIT_FUNC PyInit__replicas(void)
{
	const char *why;
	int result = fetch_begin(&why);
	if (why) {
		PyErr_SetString(PyExc_ImportError, why);
		return NULL;
	}
	if (result < 0)
		return failed(-result);
	PyObject *made = PyModule_Create(&module);
	if (made && !(add_function(made, "read", (void *)read_replica, MISS_PEERS) &&
		      add_function(made, "range", (void *)read_range, UNIT_ELSEWHERE)))
		Py_CLEAR(made);
	return made;
}
