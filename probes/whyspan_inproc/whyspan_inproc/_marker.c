// SPDX-License-Identifier: Apache-2.0
/*
 * The marker: one function that does nothing, for a uprobe to watch.
 *
 * whyspan_mark_v1(kind, length, payload) is where the agent's uprobe sits. The kernel raises
 * whyspan_mark_v1_semaphore (a uprobe's reference counter) in every process that maps this file while
 * somebody watches; until then mark() returns before it touches the payload. Names, order and types of the
 * arguments are the interface; a change of them is a new name (v2), so that one agent serves old and new.
 *
 * Cost: unwatched, one load and one branch; watched, one trap into the kernel.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdint.h>

#define MAX_PAYLOAD 8192 /* bytes; equals whyspan.marks.MAX_BODY */
#define EXPORTED __attribute__((visibility("default"), used))

/*
 * volatile: the kernel writes it. A section of its own, "aw": the counter must lie in a writable, file-backed
 * mapping at a known file offset, so not in .bss; the same name as SystemTap's semaphores have.
 */
EXPORTED volatile unsigned short whyspan_mark_v1_semaphore __attribute__((section(".probes"))) = 0;

/*
 * What a uprobe costs depends on the instruction under it: a nop of one byte is emulated by every kernel,
 * most others are single-stepped. (The five-byte nop that Linux >= 6.18 optimises was measured too: within
 * the noise.)
 */
EXPORTED __attribute__((noinline)) void whyspan_mark_v1(uint32_t kind, uint32_t length, const void *payload)
{
	/* The arguments must be in their registers, and the call must not be optimised away. */
	__asm__ volatile("nop" : : "r"(kind), "r"(length), "r"(payload) : "memory");
}

static PyObject *watched(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
	return PyBool_FromLong(whyspan_mark_v1_semaphore != 0);
}

static PyObject *watchers(PyObject *Py_UNUSED(module), PyObject *Py_UNUSED(unused))
{
	return PyLong_FromLong(whyspan_mark_v1_semaphore);
}

static PyObject *mark(PyObject *Py_UNUSED(module), PyObject *args)
{
	PyObject *payload;
	Py_ssize_t length;
	unsigned int kind;
	char *bytes;

	if (!PyArg_ParseTuple(args, "IS:mark", &kind, &payload))
		return NULL;
	if (PyBytes_AsStringAndSize(payload, &bytes, &length) < 0)
		return NULL;
	if (length > MAX_PAYLOAD)
		return PyErr_Format(PyExc_ValueError, "a mark of %zd bytes; at most %d", length, MAX_PAYLOAD);
	if (whyspan_mark_v1_semaphore)
		whyspan_mark_v1(kind, (uint32_t)length, bytes);
	Py_RETURN_NONE;
}

static PyMethodDef methods[] = {
	{ "watched", watched, METH_NOARGS, "Return whether somebody watches the marker now." },
	{ "watchers", watchers, METH_NOARGS, "Return how many watch the marker now." },
	{ "mark", mark, METH_VARARGS,
	  "mark(kind, payload): show payload (bytes) to whoever watches.\n\n"
	  "Raises ValueError for more than 8192 bytes." },
	{ NULL, NULL, 0, NULL },
};

static int execute(PyObject *module)
{
	return PyModule_AddIntConstant(module, "MAX_PAYLOAD", MAX_PAYLOAD);
}

static PyModuleDef_Slot slots[] = {
	{ Py_mod_exec, execute },
	{ 0, NULL },
};

static struct PyModuleDef definition = {
	PyModuleDef_HEAD_INIT,
	.m_name = "whyspan_inproc._marker",
	.m_doc = "The marker that the agent's uprobe watches.",
	.m_size = 0,
	.m_methods = methods,
	.m_slots = slots,
};

PyMODINIT_FUNC PyInit__marker(void)
{
	return PyModuleDef_Init(&definition);
}
