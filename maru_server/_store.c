/* The store of a chain that nobody has yet, which most are: maru_server.new_chains.
 *
 * Optional: maru_server.pages does the same with numpy, for every chain. What a client waits for is a server that wakes up with
 * cold caches, and each numpy call brings its own code and data: a reserve of 16 pages is some sixty of them.
 *
 * All arrays are numpy's; every position is checked against their sizes before anything is changed. With the GIL held: the arrays are
 * the server's own. Words of the pool are stored in the order that maru_core.pool.format asks for, each as a whole, and for memory that
 * is coherent between hosts. Limited API of Python 3.11.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "_records.h"

static PyObject *probe(PyObject *module, PyObject *args) {
    PyObject *table, *keys, *result = NULL;
    Arrays arrays = {.opened = 0};
    MaruIndex index;
    uint64_t *entries;
    unsigned char *column;
    const char *key, *parent, *hashes;
    Py_ssize_t key_bytes, parent_bytes, hash_bytes, known;
    long long above;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#y#y#", &table, &keys, &key, &key_bytes, &parent, &parent_bytes, &hashes, &hash_bytes))
        return NULL;
    if (open_index(&arrays, &index, &entries, &column, table, keys, key, key_bytes, 0) < 0)
        goto done;
    if (parent_bytes != HASH_BYTES || hash_bytes % HASH_BYTES) {
        PyErr_SetString(PyExc_ValueError, "probe: hashes are of 32 bytes each");
        goto done;
    }
    if (look_up_chain(&index, parent, hashes, (size_t)hash_bytes / HASH_BYTES, &above, &known) == 0)
        result = Py_BuildValue("Ln", above, known);
done:
    close_arrays(&arrays);
    return result;
}

static PyObject *claim(PyObject *module, PyObject *args) {
    PyObject *generations_object, *records_object, *offsets_object, *slots_object, *out[2] = {NULL}, *result = NULL;
    Arrays arrays = {.opened = 0};
    unsigned long long floor;
    size_t generation_count, record_count, offset_count, count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOK", &generations_object, &records_object, &offsets_object, &slots_object, &floor))
        return NULL;
    uint64_t *generations = open_array(&arrays, generations_object, 8, 1, &generation_count, "generations"), *records, *offsets;
    const uint32_t *slots;
    if (generations == NULL ||
        (records = open_array(&arrays, records_object, 8 * RECORD_WORDS, 1, &record_count, "records")) == NULL ||
        (offsets = open_array(&arrays, offsets_object, 8, 0, &offset_count, "offsets")) == NULL ||
        (slots = open_array(&arrays, slots_object, 4, 0, &count, "slots")) == NULL)
        goto done;
    if (generation_count < record_count)
        record_count = generation_count;
    if (offset_count < record_count)
        record_count = offset_count;
    if (!slots_are(records, record_count, slots, count, FREE))
        goto done;
    for (int i = 0; i < 2; i++)
        if ((out[i] = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)count * 8)) == NULL)
            goto done;
    uint64_t *offset_out = (uint64_t *)PyBytes_AsString(out[0]), *generation_out = (uint64_t *)PyBytes_AsString(out[1]);
    /* All generations before the first state: nobody is ever told one that the memory does not hold. */
    for (size_t i = 0; i < count; i++) {
        uint64_t *generation = generations + slots[i];
        offset_out[i] = offsets[slots[i]];
        generation_out[i] = (*generation > floor ? *generation : floor) + 1;
        __atomic_store_n(generation, generation_out[i], __ATOMIC_RELEASE);
    }
    for (size_t i = 0; i < count; i++)
        set_state(records + (size_t)slots[i] * RECORD_WORDS, RESERVED);
    result = Py_BuildValue("OO", out[0], out[1]);
done:
    Py_XDECREF(out[0]);
    Py_XDECREF(out[1]);
    close_arrays(&arrays);
    return result;
}

static PyObject *describe(PyObject *module, PyObject *args) {
    PyObject *records_object, *offsets_object, *generations_object, *holders_object, *tree, *slots_object, *result = NULL;
    PyObject *parent_object, *child_object, *objects_object, *pending_object, *rows_object;
    Arrays arrays = {.opened = 0};
    const char *granted, *chain;
    Py_ssize_t granted_bytes, chain_bytes;
    long long now_ns;
    unsigned long long owner, share, length;
    unsigned namespace, component, shard, world, holder;
    size_t record_count, offset_count, generation_count, holder_count, parent_count, child_count, objects_count, pending_count, row_count;
    size_t count;
    uint64_t *records, *offsets, *generations, common[RECORD_WORDS];
    const uint32_t *slots, *holders, *objects, *pending;
    const int32_t *parents, *children;
    const int64_t *rows;
    long long above;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOO!OIy#y#LLIIIIKKK", &records_object, &offsets_object, &generations_object, &holders_object,
                          &PyTuple_Type, &tree, &slots_object, &holder, &granted, &granted_bytes, &chain, &chain_bytes, &above, &now_ns, &namespace, &component, &shard, &world,
                          &length, &owner, &share))
        return NULL;
    if ((records = open_array(&arrays, records_object, 8 * RECORD_WORDS, 1, &record_count, "records")) == NULL ||
        (offsets = open_array(&arrays, offsets_object, 8, 0, &offset_count, "offsets")) == NULL ||
        (generations = open_array(&arrays, generations_object, 8, 0, &generation_count, "generations")) == NULL ||
        (holders = open_array(&arrays, holders_object, 4, 0, &holder_count, "holders")) == NULL ||
        !PyArg_ParseTuple(tree, "OOOOO", &parent_object, &child_object, &objects_object, &pending_object, &rows_object) ||
        (parents = open_array(&arrays, parent_object, 4, 0, &parent_count, "parent")) == NULL ||
        (children = open_array(&arrays, child_object, 4, 0, &child_count, "child")) == NULL ||
        (objects = open_array(&arrays, objects_object, 4, 0, &objects_count, "objects")) == NULL ||
        (pending = open_array(&arrays, pending_object, 4, 0, &pending_count, "pending")) == NULL ||
        (rows = open_array(&arrays, rows_object, 8, 0, &row_count, "rows")) == NULL ||
        (slots = open_array(&arrays, slots_object, 4, 0, &count, "slots")) == NULL)
        goto done;
    if (!count || (size_t)granted_bytes != 8 * count || (size_t)chain_bytes != (count + 1) * HASH_BYTES || offset_count < record_count ||
        generation_count < record_count || holder_count < record_count || row_count != count || component > UINT16_MAX || shard > UINT16_MAX ||
        world > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "describe: slots, generations and hashes do not go together, or a number is out of range");
        goto done;
    }
    Apart apart = {parents, children, objects, pending, parent_count};
    if (child_count < apart.rows)
        apart.rows = child_count;
    if (objects_count < apart.rows)
        apart.rows = objects_count;
    if (pending_count < apart.rows)
        apart.rows = pending_count;
    if (!are_spares(records, generations, holders, record_count, &apart, rows, slots, count, holder, granted, above)) {
        result = Py_NewRef(Py_False);
        goto done;
    }
    common_words(common, namespace, component, shard, world, length, now_ns, owner);
    write_records(records, offsets, slots, count, granted, chain, 0, common, share);
    result = Py_NewRef(Py_True);
done:
    close_arrays(&arrays);
    return result;
}

/* What is booked: a chain below a row; pages apart, each the first of a chain; or a chain of rows that had other names, apart, and are
 * of the component already. */
enum { CHAIN, APART, RENAMED };

static PyObject *book(PyObject *module, PyObject *args) {
    PyObject *tree, *component, *records_object, *offsets_object, *rows_object, *slots_object, *result = NULL;
    PyObject *table, *keys, *columns[7], *component_columns[4];
    Arrays arrays = {.opened = 0};
    MaruIndex index;
    uint64_t *entries;
    unsigned char *column;
    const char *key, *granted, *chain;
    Py_ssize_t key_bytes, granted_bytes, chain_bytes;
    long long above, now_ns;
    unsigned long long owner, share, length;
    unsigned namespace, component_number, shard, world;
    int mode;
    uint64_t common[RECORD_WORDS];
    size_t sizes[11], record_count, offset_count, row_count, count;
    static const size_t items[7] = {4, 4, 4, 4, 8, 1, 4}, component_items[4] = {4, 2, 2, 8};
    static const char *const names[7] = {"parent", "child", "next", "previous", "last_use", "uses", "pending"};
    static const char *const component_names[4] = {"slots", "held", "world", "length"};
    void *at[7], *of[4];
    (void)module;
    if (!PyArg_ParseTuple(args, "iO!O!OOOOy#y#LLIIIIKKK", &mode, &PyTuple_Type, &tree, &PyTuple_Type, &component, &records_object,
                          &offsets_object, &rows_object, &slots_object, &granted, &granted_bytes, &chain, &chain_bytes, &above,
                          &now_ns, &namespace, &component_number, &shard, &world, &length, &owner, &share))
        return NULL;
    if (!PyArg_ParseTuple(tree, "OOy#OOOOOOO", &table, &keys, &key, &key_bytes, &columns[0], &columns[1], &columns[2], &columns[3],
                          &columns[4], &columns[5], &columns[6]) ||
        !PyArg_ParseTuple(component, "OOOO", &component_columns[0], &component_columns[1], &component_columns[2],
                          &component_columns[3]) ||
        open_index(&arrays, &index, &entries, &column, table, keys, key, key_bytes, 1) < 0)
        goto done;
    size_t rows_max = index.rows;
    for (int i = 0; i < 11; i++) {
        void **where = i < 7 ? &at[i] : &of[i - 7];
        *where = i < 7 ? open_array(&arrays, columns[i], items[i], 1, &sizes[i], names[i])
                       : open_array(&arrays, component_columns[i - 7], component_items[i - 7], 1, &sizes[i], component_names[i - 7]);
        if (*where == NULL)
            goto done;
        if (sizes[i] < rows_max)
            rows_max = sizes[i];
    }
    int32_t *parents = at[0], *children = at[1], *next = at[2], *previous = at[3];
    int64_t *last_use = at[4];
    uint8_t *uses = at[5];
    uint32_t *pending = at[6], *held_slots = of[0];
    uint16_t *held = of[1], *worlds = of[2];
    uint64_t *lengths = of[3], *records, *offsets;
    const int64_t *rows;
    const uint32_t *slots;
    if ((records = open_array(&arrays, records_object, 8 * RECORD_WORDS, 1, &record_count, "records")) == NULL ||
        (offsets = open_array(&arrays, offsets_object, 8, 0, &offset_count, "offsets")) == NULL)
        goto done;
    if (offset_count < record_count) {
        PyErr_SetString(PyExc_ValueError, "book: not as many offsets as records");
        goto done;
    }
    if ((rows = open_array(&arrays, rows_object, 8, 0, &row_count, "rows")) == NULL)
        goto done;
    if ((slots = open_array(&arrays, slots_object, 4, 0, &count, "slots")) == NULL)
        goto done;
    if (mode < CHAIN || mode > RENAMED || !count || row_count != count || (size_t)granted_bytes != 8 * count || (size_t)chain_bytes != (count + 1) * HASH_BYTES ||
        above < -2 || above >= (long long)rows_max || (mode == APART && above != ROOT_ROW) || namespace > UINT32_MAX || component_number > UINT16_MAX || shard > UINT16_MAX ||
        world > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "book: rows, slots, generations and hashes do not go together, or a number is out of range");
        goto done;
    }
    for (size_t i = 0; i < count; i++)
        if (rows[i] < 0 || (size_t)rows[i] >= rows_max || rows[i] >= (int64_t)UINT32_MAX || rows[i] == above) {
            PyErr_Format(PyExc_ValueError, "book: row %lld is outside the columns, or its own parent", (long long)rows[i]);
            goto done;
        }
    if (mode != RENAMED && !slots_are(records, record_count, slots, count, RESERVED))
        goto done;

    /* The index: room for all was made before. */
    for (size_t start = 0; start < count; start += BATCH) {
        const size_t some = count - start < BATCH ? count - start : BATCH;
        uint32_t tags[BATCH];
        maru_tags(&index, chain + (start + 1) * HASH_BYTES, some, tags);
        for (size_t i = 0; i < some; i++) {
            const size_t row = (size_t)rows[start + i];
            size_t home = tags[i] & index.mask, steps = 0;
            while (entries[home] && steps++ <= index.mask)
                home = (home + 1) & index.mask;
            if (entries[home]) {
                PyErr_SetString(PyExc_ValueError, "book: the table is full");
                goto done;
            }
            memcpy(column + row * HASH_BYTES, chain + (start + i + 1) * HASH_BYTES, HASH_BYTES);
            entries[home] = (uint64_t)tags[i] << 32 | (uint32_t)(row + 1);
        }
    }
    /* The tree, and what the component has. */
    for (size_t i = 0; i < count; i++) {
        const size_t row = (size_t)rows[i];
        parents[row] = (int32_t)(i && mode != APART ? rows[i - 1] : above);
        children[row] = i + 1 < count && mode != APART ? (int32_t)rows[i + 1] : -1;
        next[row] = previous[row] = -1;
        last_use[row] = now_ns;
        uses[row] = 0;
        if (mode == RENAMED)
            continue;
        pending[row] += 1;
        held_slots[row] = slots[i] + 1;
        held[row] += 1;
        worlds[row] = (uint16_t)world;
        lengths[row] = length;
    }
    if (above >= 0) {
        const int32_t first = children[above];
        next[rows[0]] = first;
        if (first >= 0 && (size_t)first < rows_max)
            previous[first] = (int32_t)rows[0];
        children[above] = (int32_t)rows[0];
    }
    common_words(common, namespace, component_number, shard, world, length, now_ns, owner);
    if (mode != RENAMED)
        write_records(records, offsets, slots, count, granted, chain, mode == APART, common, share);
    result = Py_NewRef(Py_None);
done:
    close_arrays(&arrays);
    return result;
}

static PyObject *commit(PyObject *module, PyObject *args) {
    PyObject *records_object, *changes_object, *slots_object, *result = NULL;
    Arrays arrays = {.opened = 0};
    size_t record_count, changes_count, count;
    uint64_t *records, *changes;
    const uint32_t *slots;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO", &records_object, &changes_object, &slots_object))
        return NULL;
    if ((records = open_array(&arrays, records_object, 8 * RECORD_WORDS, 1, &record_count, "records")) == NULL ||
        (changes = open_array(&arrays, changes_object, 8, 1, &changes_count, "changes")) == NULL ||
        (slots = open_array(&arrays, slots_object, 4, 0, &count, "slots")) == NULL)
        goto done;
    if (changes_count != 1) {
        PyErr_SetString(PyExc_ValueError, "commit: changes is one word");
        goto done;
    }
    if (!slots_are(records, record_count, slots, count, RESERVED))
        goto done;
    for (size_t i = 0; i < count; i++)
        set_state(records + (size_t)slots[i] * RECORD_WORDS, COMMITTED);
    __atomic_store_n(changes, *changes + 1, __ATOMIC_RELEASE);
    result = Py_NewRef(Py_None);
done:
    close_arrays(&arrays);
    return result;
}

static PyObject *publish(PyObject *module, PyObject *args) {
    PyObject *columns[5], *rows_object, *result = NULL;
    Arrays arrays = {.opened = 0};
    long long now_ns;
    size_t sizes[5], rows_max = SIZE_MAX, count;
    static const size_t items[5] = {4, 4, 4, 8, 2};
    static const char *const names[5] = {"child", "objects", "pending", "last_use", "have"};
    void *at[5];
    const int64_t *rows;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOL", &columns[0], &columns[1], &columns[2], &columns[3], &columns[4], &rows_object, &now_ns))
        return NULL;
    for (int i = 0; i < 5; i++) {
        if ((at[i] = open_array(&arrays, columns[i], items[i], i > 0, &sizes[i], names[i])) == NULL)
            goto done;
        if (sizes[i] < rows_max)
            rows_max = sizes[i];
    }
    if ((rows = open_array(&arrays, rows_object, 8, 0, &count, "rows")) == NULL)
        goto done;
    const int32_t *children = at[0];
    uint32_t *objects = at[1], *pending = at[2];
    int64_t *last_use = at[3];
    uint16_t *have = at[4];
    for (size_t i = 0; i < count; i++)
        if (rows[i] < 0 || (size_t)rows[i] >= rows_max) {
            PyErr_Format(PyExc_ValueError, "publish: row %lld is outside the columns", (long long)rows[i]);
            goto done;
        }
    if ((result = PyList_New(0)) == NULL)
        goto done;
    for (size_t i = 0; i < count; i++) {
        const size_t row = (size_t)rows[i];
        have[row] += 1;
        objects[row] += 1;
        pending[row] -= 1;
        last_use[row] = now_ns;
    }
    for (size_t i = 0; i < count; i++) {
        if (children[rows[i]] >= 0)
            continue;
        PyObject *row = PyLong_FromLongLong(rows[i]);
        if (row == NULL || PyList_Append(result, row) < 0) {
            Py_XDECREF(row);
            Py_CLEAR(result);
            break;
        }
        Py_DECREF(row);
    }
done:
    close_arrays(&arrays);
    return result;
}

static PyObject *remembered(PyObject *module, PyObject *args) {
    PyObject *prints_object, *notes_object, *result = NULL;
    Arrays arrays = {.opened = 0};
    unsigned long long salt;
    const char *hashes;
    Py_ssize_t hash_bytes;
    size_t print_count, note_count;
    const uint64_t *prints;
    const uint8_t *notes;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOKy#", &prints_object, &notes_object, &salt, &hashes, &hash_bytes))
        return NULL;
    if ((prints = open_array(&arrays, prints_object, 8, 0, &print_count, "prints")) == NULL ||
        (notes = open_array(&arrays, notes_object, 1, 0, &note_count, "notes")) == NULL)
        goto done;
    if (!print_count || print_count & (print_count - 1) || note_count != print_count || hash_bytes % HASH_BYTES) {
        PyErr_SetString(PyExc_ValueError, "remembered: the table is not a power of two, or hashes are not of 32 bytes each");
        goto done;
    }
    const size_t count = (size_t)hash_bytes / HASH_BYTES;
    uint64_t words[2];
    for (size_t i = 0; i < count; i++) {
        memcpy(words, hashes + i * HASH_BYTES, sizeof words);
        __builtin_prefetch(&prints[(words[0] ^ salt) & (print_count - 1)]);
    }
    Py_ssize_t found = 0;
    for (size_t i = 0; i < count; i++) {
        memcpy(words, hashes + i * HASH_BYTES, sizeof words);
        const size_t at = (words[0] ^ salt) & (print_count - 1);
        found += prints[at] == (words[1] ^ salt) && notes[at];
    }
    result = PyLong_FromSsize_t(found);
done:
    close_arrays(&arrays);
    return result;
}

static PyMethodDef methods[] = {
    {"remembered", remembered, METH_VARARGS,
     "remembered(prints, notes, salt, hashes) -> of how many page hashes there is a note; see maru_server.ghosts."},
    {"probe", probe, METH_VARARGS,
     "probe(table, keys, key, parent, hashes) -> (above, known)\n\n"
     "`above` is the row of the page hash `parent`, -1 where that is the root's and -3 where it is not known; `known` says how many of the\n"
     "packed hashes are known, -1 where one comes twice, or is the parent or the root's."},
    {"claim", claim, METH_VARARGS,
     "claim(generations, records, offsets, slots, floor) -> (offsets, generations)\n\n"
     "Take free slots: new generations above `floor` first, then states; where they lie and what they are, packed."},
    {"book", book, METH_VARARGS,
     "book(mode, (table, keys, key, parent, child, next, previous, last_use, uses, pending), (slots, held, world, length), records, offsets,\n"
     "     rows, slots, generations, chain, above, now_ns, namespace, component, shard, world, nbytes, owner, share)\n\n"
     "Make claimed slots the objects of unused rows: a chain below row `above` (mode 0), or apart, each the first page of a chain (1); or give\n"
     "other names to rows that are in no index now and were apart, as a chain below `above` (2). `chain` is the parent's hash and those of\n"
     "the pages; `share` is what the names of namespace and component add to the check of a record."},
    {"describe", describe, METH_VARARGS,
     "describe(records, offsets, generations, holders, (parent, child, objects, pending, rows), slots, holder, granted, chain, above, now_ns, namespace, component, shard, world,\n"
     "         nbytes, owner, share) -> bool\n\n"
     "Write the records of a chain into reserved slots; False, with nothing written, where one of them is not the reservation's any more\n"
     "(`holders` has the number of each slot's, `granted` the generations that it gave), or where its page is not apart, has more than this object, or is row `above`,\n"
     "below which the chain is to hang."},
    {"commit", commit, METH_VARARGS, "commit(records, changes, slots): publish reserved slots, without checksums."},
    {"publish", publish, METH_VARARGS,
     "publish(child, objects, pending, last_use, have, rows, now_ns) -> rows without children\n\n"
     "The reserved objects of these distinct rows are committed."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._store", "The store of a chain of new pages.", 0, methods, NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__store(void) { return PyModuleDef_Init(&definition); }
