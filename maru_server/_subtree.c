/* The walk of maru_server.tree.PrefixTree.below: pages and all that continues them, whatever the shape of the tree. All arrays
 * are numpy's; every position is checked against their sizes. With the GIL held: the arrays are the server's own.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <stdlib.h>

typedef struct {
    const int32_t *child, *next, *parent;
    size_t rows;
    unsigned char *done; /* a bit per row that was listed, and so all below it */
} Tree;

static inline int is_done(const Tree *tree, int32_t row) { return tree->done[row >> 3] >> (row & 7) & 1; }

/* From this row on among siblings, the first that is not yet done: -1 at the end, -2 outside the columns. */
static inline int32_t undone(const Tree *tree, int32_t row) {
    while (row >= 0) {
        if ((size_t)row >= tree->rows)
            return -2;
        if (!is_done(tree, row))
            return row;
        row = tree->next[row];
    }
    return -1;
}

/* Lists `top` and what is below it and not yet done, children first, no more rows than `room`. Returns how many were listed, -1
 * where there are more (`room` of them are then listed, in no order), -2 where the columns contradict themselves. */
static long long walk(const Tree *tree, int32_t top, int64_t *out, size_t room) {
    size_t entered = 1, listed = 0;
    int32_t row = top;
    if (!room)
        return -1;
    for (;;) {
        int32_t below = undone(tree, tree->child[row]);
        if (below == -2)
            return -2;
        while (below < 0) { /* all below it is listed */
            out[listed++] = row;
            tree->done[row >> 3] |= (unsigned char)(1 << (row & 7));
            if (row == top)
                return (long long)listed;
            const int32_t above = tree->parent[row];
            below = undone(tree, tree->next[row]);
            if (below == -2 || above < 0 || (size_t)above >= tree->rows)
                return -2;
            if (below < 0)
                row = above;
        }
        if (entered == room) {
            /* What was entered and is not listed lies between here and the top. */
            for (int32_t at = tree->parent[below]; listed < room; at = tree->parent[at]) {
                if (at < 0 || (size_t)at >= tree->rows)
                    return -2;
                out[listed++] = at;
                if (at == top)
                    break;
            }
            return listed == room ? -1 : -2;
        }
        entered++;
        row = below;
    }
}

static int open_column(PyObject *object, Py_buffer *buffer, size_t item) {
    if (PyObject_GetBuffer(object, buffer, PyBUF_SIMPLE) < 0)
        return -1;
    if ((size_t)buffer->len % item == 0)
        return 0;
    PyBuffer_Release(buffer);
    PyErr_SetString(PyExc_ValueError, "below: an array of another type");
    return -1;
}

static PyObject *below(PyObject *module, PyObject *args) {
    PyObject *objects[5], *result = NULL;
    Py_buffer child, next, parent, tops, out;
    Tree tree = {0};
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOO", &objects[0], &objects[1], &objects[2], &objects[3], &objects[4]))
        return NULL;
    if (open_column(objects[0], &child, sizeof *tree.child) < 0)
        return NULL;
    if (open_column(objects[1], &next, sizeof *tree.next) < 0)
        goto no_next;
    if (open_column(objects[2], &parent, sizeof *tree.parent) < 0)
        goto no_parent;
    if (open_column(objects[3], &tops, sizeof(int64_t)) < 0)
        goto no_tops;
    if (PyObject_GetBuffer(objects[4], &out, PyBUF_WRITABLE) < 0)
        goto no_out;
    if (child.len != next.len || child.len != parent.len || out.len % sizeof(int64_t)) {
        PyErr_SetString(PyExc_ValueError, "below: columns of different lengths, or out is not int64");
        goto done;
    }
    tree.child = child.buf;
    tree.next = next.buf;
    tree.parent = parent.buf;
    tree.rows = (size_t)child.len / sizeof *tree.child;
    tree.done = calloc(tree.rows / 8 + 1, 1);
    if (!tree.done) {
        PyErr_NoMemory();
        goto done;
    }
    const int64_t *rows = tops.buf;
    int64_t *listed = out.buf;
    const size_t count = (size_t)tops.len / sizeof *rows, room = (size_t)out.len / sizeof *listed;
    size_t used = 0;
    for (size_t i = 0; i < count; i++) {
        if (rows[i] < 0 || (size_t)rows[i] >= tree.rows) {
            PyErr_SetString(PyExc_ValueError, "below: a row outside the columns");
            goto done;
        }
        if (is_done(&tree, (int32_t)rows[i]))
            continue;
        const long long more = walk(&tree, (int32_t)rows[i], listed + used, room - used);
        if (more == -2) {
            PyErr_SetString(PyExc_ValueError, "below: the columns contradict themselves");
            goto done;
        }
        if (more == -1) {
            used = room;
            break;
        }
        used += (size_t)more;
    }
    result = PyLong_FromSize_t(used);
done:
    free(tree.done);
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&tops);
no_tops:
    PyBuffer_Release(&parent);
no_parent:
    PyBuffer_Release(&next);
no_next:
    PyBuffer_Release(&child);
    return result;
}

static PyMethodDef methods[] = {
    {"below", below, METH_VARARGS,
     "below(child, next, parent, rows, out) -> how many were listed\n\n"
     "Lists these rows and all below them in `out` (int64), each once and before its parent. Where they are more than `out` holds, it\n"
     "is full of some of them, in no order."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._subtree", "A walk over a prefix tree.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__subtree(void) { return PyModuleDef_Init(&definition); }
