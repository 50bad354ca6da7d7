/* What a client looks at, of the reply to the plainest match, when it only asks how much is there.
 *
 * Optional: maru_core.locations decodes the whole reply where this was not built, or where this says None. A client that wakes up with
 * cold caches is spared five arrays that it may never want.
 *
 * Limited API of Python 3.11: one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_packed.h"

/* A byte string of exactly so many bytes. */
static int skip_bytes(Reader *reader, uint64_t count) {
    const unsigned char *bytes;
    size_t length;
    return take_bytes(reader, &bytes, &length) && length == count;
}

static PyObject *outline(PyObject *module, PyObject *args) {
    PyObject *data;
    char *bytes;
    Py_ssize_t count, asked;
    uint64_t rid, incarnation, pages, why, covered;
    (void)module;
    if (!PyArg_ParseTuple(args, "Sn", &data, &asked) || PyBytes_AsStringAndSize(data, &bytes, &count) < 0)
        return NULL;
    Reader reader = {(const unsigned char *)bytes, (const unsigned char *)bytes + count};
    /* An array of thirteen: the kind, three numbers, five columns, the reason; held for 0.0 s, no ends, one component that reaches
     * as far as the whole. */
    if (!take(&reader, "\x9d\xa7Located", 9) || !take_unsigned(&reader, &rid) || !take_unsigned(&reader, &incarnation) ||
        !take_unsigned(&reader, &pages) || asked < 0 || pages > (uint64_t)asked || !skip_bytes(&reader, pages * 4) ||
        !skip_bytes(&reader, pages * 8) || !skip_bytes(&reader, pages * 8) || !skip_bytes(&reader, pages * 8) ||
        !skip_bytes(&reader, pages * 8) || !take_unsigned(&reader, &why) ||
        !take(&reader, "\xcb\0\0\0\0\0\0\0\0\xc4\0\x91", 12) || !take_unsigned(&reader, &covered) || covered != pages ||
        reader.at != reader.end)
        Py_RETURN_NONE;
    return Py_BuildValue("KKKK", rid, incarnation, pages, why);
}

static PyMethodDef methods[] = {
    {"outline", outline, METH_VARARGS,
     "outline(data, asked) -> (rid, incarnation, pages, why), or None\n\n"
     "Of a packed Located, if it can be the answer to a match for so many pages of one component, without rules or a hold."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_core._reply", "The outline of the reply to a match.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__reply(void) { return PyModuleDef_Init(&definition); }
