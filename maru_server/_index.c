/* Functions over the tables of maru_server.index: see _index.h for what a table is. All arrays are numpy's; every
 * position is checked against their sizes. With the GIL held: the arrays are the server's own.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_index.h"

#define BATCH 256

typedef struct {
    MaruIndex index;
    Py_buffer table, hashes;
    uint64_t *entries; /* writable */
} Opened;

static int open_index(Opened *opened, PyObject *table, PyObject *hashes, const char *key, Py_ssize_t key_bytes, int writable) {
    if (PyObject_GetBuffer(table, &opened->table, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return -1;
    if (PyObject_GetBuffer(hashes, &opened->hashes, PyBUF_SIMPLE) < 0) {
        PyBuffer_Release(&opened->table);
        return -1;
    }
    const size_t count = (size_t)opened->table.len / 8;
    if (!count || count & (count - 1) || (size_t)opened->table.len != count * 8 || opened->hashes.len % HASH_BYTES ||
        key_bytes != sizeof opened->index.key) {
        PyErr_SetString(PyExc_ValueError, "index: the table is not a power of two of u64, or hashes or key do not fit");
        PyBuffer_Release(&opened->hashes);
        PyBuffer_Release(&opened->table);
        return -1;
    }
    opened->entries = opened->table.buf;
    opened->index.entries = opened->entries;
    opened->index.mask = count - 1;
    opened->index.hashes = opened->hashes.buf;
    opened->index.rows = (size_t)opened->hashes.len / HASH_BYTES;
    memcpy(opened->index.key, key, sizeof opened->index.key);
    return 0;
}

static void close_index(Opened *opened) {
    PyBuffer_Release(&opened->hashes);
    PyBuffer_Release(&opened->table);
}

static PyObject *find(PyObject *module, PyObject *args) {
    PyObject *table, *hashes, *out_object, *result = NULL;
    Py_buffer out;
    const char *key, *wanted;
    Py_ssize_t key_bytes, wanted_bytes;
    long long absent;
    Opened opened;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#y#OL", &table, &hashes, &key, &key_bytes, &wanted, &wanted_bytes, &out_object, &absent))
        return NULL;
    if (open_index(&opened, table, hashes, key, key_bytes, 0) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) {
        close_index(&opened);
        return NULL;
    }
    const size_t count = (size_t)wanted_bytes / HASH_BYTES;
    if ((size_t)wanted_bytes != count * HASH_BYTES || (size_t)out.len != count * 8) {
        PyErr_SetString(PyExc_ValueError, "find: hashes and out do not go together");
        goto done;
    }
    int64_t *rows = out.buf;
    size_t known = 0;
    for (size_t start = 0; start < count; start += BATCH) {
        const size_t some = count - start < BATCH ? count - start : BATCH;
        uint32_t tags[BATCH];
        maru_tags(&opened.index, wanted + start * HASH_BYTES, some, tags);
        for (size_t i = 0; i < some; i++) {
            const long long row = maru_find(&opened.index, tags[i], wanted + (start + i) * HASH_BYTES);
            if (row == -2) {
                PyErr_SetString(PyExc_ValueError, "find: a row outside the column of hashes");
                goto done;
            }
            known += row >= 0;
            rows[start + i] = row >= 0 ? row : absent;
        }
    }
    result = PyLong_FromSize_t(known);
done:
    PyBuffer_Release(&out);
    close_index(&opened);
    return result;
}

/* Rows of `rows` (int64) into or out of the table; their hashes are in the column. */
static PyObject *change(PyObject *args, int insert) {
    PyObject *table, *hashes, *rows_object, *result = NULL;
    Py_buffer buffer;
    const char *key;
    Py_ssize_t key_bytes;
    Opened opened;
    if (!PyArg_ParseTuple(args, "OOy#O", &table, &hashes, &key, &key_bytes, &rows_object))
        return NULL;
    if (open_index(&opened, table, hashes, key, key_bytes, 1) < 0)
        return NULL;
    if (PyObject_GetBuffer(rows_object, &buffer, PyBUF_SIMPLE) < 0) {
        close_index(&opened);
        return NULL;
    }
    const int64_t *rows = buffer.buf;
    const size_t count = (size_t)buffer.len / 8, mask = opened.index.mask;
    uint64_t *entries = opened.entries;
    if ((size_t)buffer.len != count * 8) {
        PyErr_SetString(PyExc_ValueError, "index: rows are not int64");
        goto done;
    }
    for (size_t i = 0; i < count; i++) {
        if (rows[i] < 0 || (size_t)rows[i] >= opened.index.rows || rows[i] >= (int64_t)UINT32_MAX) {
            PyErr_Format(PyExc_ValueError, "index: row %lld is outside the column of hashes", (long long)rows[i]);
            goto done;
        }
        const uint32_t tag = maru_tag(opened.index.key, opened.index.hashes + (size_t)rows[i] * HASH_BYTES);
        const uint64_t entry = (uint64_t)tag << 32 | (uint32_t)(rows[i] + 1);
        size_t at = tag & mask, steps = 0;
        while (entries[at] && entries[at] != entry && steps++ <= mask)
            at = (at + 1) & mask;
        if (insert) {
            if (entries[at]) {
                PyErr_Format(PyExc_ValueError, "insert: row %lld is there already, or the table is full", (long long)rows[i]);
                goto done;
            }
            entries[at] = entry;
            continue;
        }
        if (entries[at] != entry) {
            PyErr_Format(PyExc_ValueError, "erase: row %lld is not there", (long long)rows[i]);
            goto done;
        }
        /* Close the gap: whatever follows and may not be found across an empty entry moves up. */
        size_t hole = at;
        for (size_t next = (hole + 1) & mask; entries[next]; next = (next + 1) & mask) {
            const size_t home = (uint32_t)(entries[next] >> 32) & mask;
            if (((next - home) & mask) >= ((next - hole) & mask)) {
                entries[hole] = entries[next];
                hole = next;
            }
        }
        entries[hole] = 0;
    }
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&buffer);
    close_index(&opened);
    return result;
}

static PyObject *insert(PyObject *module, PyObject *args) {
    (void)module;
    return change(args, 1);
}

static PyObject *erase(PyObject *module, PyObject *args) {
    (void)module;
    return change(args, 0);
}

/* The rows of page hashes; those that are not known take the next rows, in the order in which they come. */
static PyObject *intern(PyObject *module, PyObject *args) {
    PyObject *table, *hashes, *out_object, *result = NULL;
    Py_buffer out;
    const char *key, *wanted;
    Py_ssize_t key_bytes, wanted_bytes;
    unsigned long long next;
    Opened opened;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#y#OK", &table, &hashes, &key, &key_bytes, &wanted, &wanted_bytes, &out_object, &next))
        return NULL;
    if (open_index(&opened, table, hashes, key, key_bytes, 1) < 0)
        return NULL;
    if (PyObject_GetBuffer(out_object, &out, PyBUF_WRITABLE) < 0) {
        close_index(&opened);
        return NULL;
    }
    const size_t count = (size_t)wanted_bytes / HASH_BYTES, mask = opened.index.mask;
    if ((size_t)wanted_bytes != count * HASH_BYTES || (size_t)out.len != count * 8 || opened.hashes.readonly) {
        PyErr_SetString(PyExc_ValueError, "intern: hashes and out do not go together, or the column cannot be written");
        goto done;
    }
    int64_t *rows = out.buf;
    unsigned char *column = opened.hashes.buf;
    for (size_t start = 0; start < count; start += BATCH) {
        const size_t some = count - start < BATCH ? count - start : BATCH;
        uint32_t tags[BATCH];
        maru_tags(&opened.index, wanted + start * HASH_BYTES, some, tags);
        for (size_t i = 0; i < some; i++) {
            const char *hash = wanted + (start + i) * HASH_BYTES;
            long long row = maru_find(&opened.index, tags[i], hash);
            if (row == -1) {
                size_t at = tags[i] & mask, steps = 0;
                while (opened.entries[at] && steps++ <= mask)
                    at = (at + 1) & mask;
                if (opened.entries[at] || next >= opened.index.rows || next >= UINT32_MAX) {
                    PyErr_SetString(PyExc_ValueError, "intern: no room");
                    goto done;
                }
                row = (long long)next++;
                memcpy(column + (size_t)row * HASH_BYTES, hash, HASH_BYTES);
                opened.entries[at] = (uint64_t)tags[i] << 32 | (uint32_t)(row + 1);
            }
            if (row == -2) {
                PyErr_SetString(PyExc_ValueError, "intern: a row outside the column of hashes");
                goto done;
            }
            rows[start + i] = row;
        }
    }
    result = PyLong_FromUnsignedLongLong(next);
done:
    PyBuffer_Release(&out);
    close_index(&opened);
    return result;
}

/* All entries of one table into another, empty one. */
static PyObject *move(PyObject *module, PyObject *args) {
    PyObject *from_object, *to_object, *result = NULL;
    Py_buffer from, to;
    (void)module;
    if (!PyArg_ParseTuple(args, "OO", &from_object, &to_object))
        return NULL;
    if (PyObject_GetBuffer(from_object, &from, PyBUF_SIMPLE) < 0)
        return NULL;
    if (PyObject_GetBuffer(to_object, &to, PyBUF_WRITABLE) < 0) {
        PyBuffer_Release(&from);
        return NULL;
    }
    const uint64_t *old = from.buf;
    uint64_t *entries = to.buf;
    const size_t count = (size_t)from.len / 8, capacity = (size_t)to.len / 8;
    if (!capacity || capacity & (capacity - 1) || capacity < count) {
        PyErr_SetString(PyExc_ValueError, "move: the new table is no power of two, or smaller");
        goto done;
    }
    for (size_t i = 0; i < count; i++) {
        if (!old[i])
            continue;
        size_t at = (uint32_t)(old[i] >> 32) & (capacity - 1);
        while (entries[at])
            at = (at + 1) & (capacity - 1);
        entries[at] = old[i];
    }
    result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&to);
    PyBuffer_Release(&from);
    return result;
}

static PyMethodDef methods[] = {
    {"find", find, METH_VARARGS,
     "find(table, hashes, key, wanted, out, absent) -> how many are known\n\n"
     "The row (int64 in `out`) of each packed page hash in `wanted`, `absent` where it is not known."},
    {"insert", insert, METH_VARARGS, "insert(table, hashes, key, rows): index these rows by what `hashes` has for them."},
    {"erase", erase, METH_VARARGS, "erase(table, hashes, key, rows): forget these rows; `hashes` still has theirs."},
    {"intern", intern, METH_VARARGS,
     "intern(table, hashes, key, wanted, out, next) -> the row after the last one taken\n\n"
     "As find, but hashes that are not known become rows next, next + 1, ..."},
    {"move", move, METH_VARARGS, "move(old, new): all entries of one table into another, empty one."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._index", "Tables of page hashes.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__index(void) { return PyModuleDef_Init(&definition); }
