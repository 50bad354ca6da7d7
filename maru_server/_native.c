/* The lookup of a match: hashes to rows to locations, in one pass.
 *
 * Optional: maru_server.lookup does the same with numpy where this was not built, and for matches of several components.
 * One pass matters less when everything is in the cache (half the time) than when it is not: a server that wakes up
 * for one message has cold caches, and a dozen numpy calls each bring their own code and data (measured with the caches
 * emptied in between, 128 pages: 25 against 62 microseconds at best).
 *
 * Reads only, and only with the GIL held: the arrays are the server's own and nobody else writes them meanwhile.
 * Limited API of Python 3.11: one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <stdint.h>
#include <string.h>

#define HASH_BYTES 32
#define NO_SLOT 0xFFFFFFFFu

/* What a column is, in the order of the arguments. */
enum { SLOTS, REPLICAS, HAVE, WORLD, LENGTHS, OFFSETS, GENERATIONS, RECORDS, COLUMNS };
static const size_t item_bytes[COLUMNS] = {4, 4, 2, 2, 8, 8, 8, 8};
static const char *const column_names[COLUMNS] = {"slots",   "replicas", "have",        "world",
                                                  "lengths", "offsets",  "generations", "records"};

/* The row of a hash in the dict, -1 where it is not known, -2 with an exception. */
static long long row_of(PyObject *rows, const char *hash) {
    PyObject *key = PyBytes_FromStringAndSize(hash, HASH_BYTES), *value;
    long long row;
    if (key == NULL)
        return -2;
    value = PyDict_GetItemWithError(rows, key);
    Py_DECREF(key);
    if (value == NULL)
        return PyErr_Occurred() ? -2 : -1;
    row = PyLong_AsLongLong(value);
    return row < 0 ? -2 : row;
}

static PyObject *locate(PyObject *module, PyObject *args) {
    PyObject *rows, *objects[COLUMNS], *out[5] = {NULL}, *result = NULL;
    Py_buffer columns[COLUMNS];
    const char *hashes;
    Py_ssize_t hash_bytes, word, words;
    int sparse, opened = 0;
    size_t counts[COLUMNS];
    (void)module;
    if (!PyArg_ParseTuple(args, "Oy#pnnOOOOOOOO", &rows, &hashes, &hash_bytes, &sparse, &word, &words, &objects[SLOTS],
                          &objects[REPLICAS], &objects[HAVE], &objects[WORLD], &objects[LENGTHS], &objects[OFFSETS], &objects[GENERATIONS],
                          &objects[RECORDS]))
        return NULL;
    if (!PyDict_Check(rows) || hash_bytes % HASH_BYTES || word < 0 || words <= word) {
        PyErr_SetString(PyExc_ValueError, "locate: rows is no dict, or hashes or words do not fit");
        return NULL;
    }
    for (; opened < COLUMNS; opened++) {
        if (PyObject_GetBuffer(objects[opened], &columns[opened], PyBUF_SIMPLE) < 0)
            goto done;
        counts[opened] = (size_t)columns[opened].len / item_bytes[opened];
        if ((size_t)columns[opened].len % item_bytes[opened]) {
            PyErr_Format(PyExc_ValueError, "locate: %s has %zd bytes", column_names[opened], columns[opened].len);
            opened++;
            goto done;
        }
    }
    {
        const Py_ssize_t asked = hash_bytes / HASH_BYTES;
        const uint32_t *slots = columns[SLOTS].buf, *replicas = columns[REPLICAS].buf;
        const uint16_t *have = columns[HAVE].buf, *world = columns[WORLD].buf;
        const uint64_t *lengths = columns[LENGTHS].buf, *offsets = columns[OFFSETS].buf,
                       *generations = columns[GENERATIONS].buf, *records = columns[RECORDS].buf;
        uint32_t *slot_out;
        uint64_t *offset_out, *generation_out, *length_out, *checksum_out;
        Py_ssize_t pages = 0, at = 0;

        for (int i = 0; i < 5; i++)
            if ((out[i] = PyBytes_FromStringAndSize(NULL, asked * (i ? 8 : 4))) == NULL)
                goto done;
        /* Bytes objects that nobody else has seen yet may be written. */
        slot_out = (uint32_t *)PyBytes_AsString(out[0]);
        offset_out = (uint64_t *)PyBytes_AsString(out[1]);
        generation_out = (uint64_t *)PyBytes_AsString(out[2]);
        length_out = (uint64_t *)PyBytes_AsString(out[3]);
        checksum_out = (uint64_t *)PyBytes_AsString(out[4]);
        for (; at < asked; at++) {
            const long long row = row_of(rows, hashes + at * HASH_BYTES);
            uint32_t slot = NO_SLOT;
            if (row == -2) {
                if (!PyErr_Occurred())
                    PyErr_SetString(PyExc_ValueError, "locate: a row below zero");
                goto done;
            }
            if (row >= 0) {
                if ((size_t)row >= counts[SLOTS] || (size_t)row >= counts[REPLICAS] || (size_t)row >= counts[HAVE] ||
                    (size_t)row >= counts[WORLD] || (size_t)row >= counts[LENGTHS]) {
                    PyErr_Format(PyExc_ValueError, "locate: row %lld is outside its columns", row);
                    goto done;
                }
                /* Slot + 1, so that 0 is "nothing there". Where ranks hold replicas all want the one that there is. */
                const uint32_t held = world[row] == 1 ? replicas[row] : slots[row];
                /* Whole: every shard is committed. */
                if (have[row] && have[row] == world[row] && held)
                    slot = held - 1;
            }
            if (slot == NO_SLOT) {
                if (!sparse)
                    break;
                slot_out[at] = NO_SLOT;
                offset_out[at] = generation_out[at] = length_out[at] = checksum_out[at] = 0;
                continue;
            }
            if (slot >= counts[OFFSETS] || slot >= counts[GENERATIONS] ||
                (size_t)slot >= counts[RECORDS] / (size_t)words) {
                PyErr_Format(PyExc_ValueError, "locate: slot %u is outside the pool", slot);
                goto done;
            }
            slot_out[at] = slot;
            offset_out[at] = offsets[slot];
            generation_out[at] = generations[slot];
            length_out[at] = lengths[row];
            checksum_out[at] = records[(size_t)slot * (size_t)words + (size_t)word];
            pages++;
        }
        if (at < asked) {
            /* A prefix that ends early: shorter bytes. */
            for (int i = 0; i < 5; i++) {
                PyObject *shorter = PyBytes_FromStringAndSize(PyBytes_AsString(out[i]), at * (i ? 8 : 4));
                if (shorter == NULL)
                    goto done;
                Py_DECREF(out[i]);
                out[i] = shorter;
            }
        }
        result = Py_BuildValue("nOOOOO", pages, out[0], out[1], out[2], out[3], out[4]);
    }
done:
    for (int i = 0; i < 5; i++)
        Py_XDECREF(out[i]);
    while (opened-- > 0)
        PyBuffer_Release(&columns[opened]);
    return result;
}

static PyMethodDef methods[] = {
    {"locate", locate, METH_VARARGS,
     "locate(rows, hashes, sparse, word, words, slots, replicas, have, world, lengths, offsets, generations, records)\n"
     "-> (pages, slots, offsets, generations, lengths, checksums)\n\n"
     "Look the packed hashes up in the dict of rows and gather where each whole page lies. Stops at the first page that\n"
     "is not whole, unless sparse. The checksum is 64-bit word `word` of a slot's record of `words` words."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._native", "The lookup of a match, in one pass.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
