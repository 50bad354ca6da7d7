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

#define COLUMNS 5

typedef struct {
    uint64_t rid, incarnation, pages, why;
    size_t columns[COLUMNS]; /* where each begins */
} Plain;

static int parse(const unsigned char *data, size_t bytes, Plain *plain) {
    Reader reader = {data, data + bytes};
    uint64_t covered;
    /* An array of thirteen: the kind, three numbers, five columns, the reason; held for 0.0 s, no ends, one component that reaches
     * as far as the whole. */
    if (!take(&reader, "\x9d\xa7Located", 9) || !take_unsigned(&reader, &plain->rid) || !take_unsigned(&reader, &plain->incarnation) ||
        !take_unsigned(&reader, &plain->pages) || plain->pages > bytes)
        return 0;
    for (int i = 0; i < COLUMNS; i++) {
        const unsigned char *column;
        size_t length;
        if (!take_bytes(&reader, &column, &length) || length != plain->pages * (i ? 8 : 4))
            return 0;
        plain->columns[i] = (size_t)(column - data);
    }
    return take_unsigned(&reader, &plain->why) && take(&reader, "\xcb\0\0\0\0\0\0\0\0\xc4\0\x91", 12) &&
           take_unsigned(&reader, &covered) && covered == plain->pages && reader.at == reader.end;
}

static PyObject *outline(PyObject *module, PyObject *args) {
    PyObject *data;
    char *bytes;
    Py_ssize_t count, asked;
    Plain found;
    (void)module;
    if (!PyArg_ParseTuple(args, "Sn", &data, &asked) || PyBytes_AsStringAndSize(data, &bytes, &count) < 0)
        return NULL;
    if (!parse((const unsigned char *)bytes, (size_t)count, &found) || asked < 0 || found.pages > (uint64_t)asked)
        Py_RETURN_NONE;
    return Py_BuildValue("KKKK", found.rid, found.incarnation, found.pages, found.why);
}

static PyObject *columns(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t count;
    Plain found;
    (void)module;
    if (PyBytes_AsStringAndSize(data, &bytes, &count) < 0)
        return NULL;
    if (!parse((const unsigned char *)bytes, (size_t)count, &found))
        Py_RETURN_NONE;
    const size_t *at = found.columns;
    return Py_BuildValue("nnnnn", (Py_ssize_t)at[0], (Py_ssize_t)at[1], (Py_ssize_t)at[2], (Py_ssize_t)at[3], (Py_ssize_t)at[4]);
}

static PyMethodDef methods[] = {
    {"outline", outline, METH_VARARGS,
     "outline(data, asked) -> (rid, incarnation, pages, why), or None\n\n"
     "Of a packed Located, if it can be the answer to a match for so many pages of one component, without rules or a hold."},
    {"columns", columns, METH_O,
     "columns(data) -> (slots, offsets, generations, lengths, checksums), or None\n\n"
     "Where in such a packed Located each column begins."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_core._reply", "The outline of the reply to a match.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__reply(void) { return PyModuleDef_Init(&definition); }
