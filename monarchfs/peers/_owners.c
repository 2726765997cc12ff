/* Weighted rendezvous hashing: which node owns each bucket of files, and which one stands in for it.
 *
 * The score of a node for a bucket is weight / -ln(h), with h uniform in (0, 1) from a hash of both; the node
 * with the highest score owns the bucket (Schindelhauer and Schomaker, SPAA 2005). A node that leaves gives
 * away only its own buckets, and one that joins takes only what it will own. The node with the second highest
 * score stands in: it owns the bucket if the first one leaves.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <math.h>
#include <stdint.h>

/* The finalizer of SplitMix64. */
static uint64_t mix(uint64_t x)
{
	x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
	x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
	return x ^ (x >> 31);
}

struct choice {
	double score, weight;
	uint64_t drawn;
	uint16_t node;
};

static void own(const uint64_t *seeds, const double *weights, size_t nodes, uint16_t *owners, size_t buckets)
{
	for (size_t bucket = 0; bucket < buckets; bucket++) {
		uint64_t salt = mix(bucket + 0x9e3779b97f4a7c15ULL);
		struct choice first = {.score = -1}, second = {.score = -1};
		for (size_t node = 0; node < nodes; node++) {
			struct choice made = {-1, weights[node], mix(seeds[node] ^ salt) >> 12, (uint16_t)node};
			if (made.drawn <= second.drawn && made.weight <= second.weight)
				continue; /* its score is no higher: there is no need for the logarithm */
			made.score = made.weight / -log(((double)made.drawn + 0.5) * 0x1p-52);
			if (made.score > first.score) {
				second = first;
				first = made;
			} else if (made.score > second.score) {
				second = made;
			}
		}
		owners[bucket] = first.node;
		owners[buckets + bucket] = nodes > 1 ? second.node : first.node;
	}
}

static PyObject *owners(PyObject *Py_UNUSED(self), PyObject *args)
{
	Py_buffer seeds, weights;
	Py_ssize_t buckets;
	if (!PyArg_ParseTuple(args, "y*y*n", &seeds, &weights, &buckets))
		return NULL;
	PyObject *result = NULL;
	size_t nodes = (size_t)seeds.len / sizeof(uint64_t);
	if (!nodes || nodes > UINT16_MAX || buckets < 0 || seeds.len != weights.len || seeds.len % 8)
		PyErr_SetString(PyExc_ValueError, "seeds and weights are 8 bytes for each of 1 to 65535 nodes");
	else if ((result = PyBytes_FromStringAndSize(NULL, 2 * buckets * (Py_ssize_t)sizeof(uint16_t)))) {
		uint16_t *to = (uint16_t *)PyBytes_AS_STRING(result);
		Py_BEGIN_ALLOW_THREADS
		own(seeds.buf, weights.buf, nodes, to, (size_t)buckets);
		Py_END_ALLOW_THREADS
	}
	PyBuffer_Release(&seeds);
	PyBuffer_Release(&weights);
	return result;
}

static PyMethodDef methods[] = {
	{"owners", owners, METH_VARARGS,
	 "owners(seeds, weights, buckets): 16 bits for each bucket, the place of its owner among the nodes, then\n"
	 "16 bits for each, the place of the node that stands in for the owner.\n\n"
	 "seeds: 64 bits for each node; weights: a double for each, above 0. Works without the GIL."},
	{0},
};

static PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_owners", .m_size = 0, .m_methods = methods};

PyMODINIT_FUNC PyInit__owners(void)
{
	return PyModule_Create(&module);
}
