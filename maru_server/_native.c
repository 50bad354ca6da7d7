/* The lookup of a match: hashes to rows, rules to a length, rows to locations.
 *
 * Optional: maru_server.lookup does the same with numpy where this was not built.
 * It matters less when everything is in the cache (half the time) than when it is not: a server that wakes up
 * for one message has cold caches, and a dozen numpy calls each bring their own code and data (measured with the caches
 * emptied in between, 128 pages: 25 against 62 microseconds at best). Each pass asks for memory that the next ones need
 * at independent places, so that the misses overlap.
 *
 * Reads only, and only with the GIL held: the arrays are the server's own and nobody else writes them meanwhile.
 * Limited API of Python 3.11: one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../maru_core/_packed.h"
#include "_index.h"

#define BATCH 256
#define NO_SLOT 0xFFFFFFFFu

/* As maru_core.protocol.Rule. */
enum { ALL_PAGES, TRAILING_PAGES, BLOCK_GROUPS };
/* Of a prefix; of each page for itself, if it is whole in all components; of each object for itself. */
enum { PREFIX, PAGES, OBJECTS };

/* A numpy array, with how many items of which size it has. */
typedef struct {
    Py_buffer buffer;
    size_t count;
    int is_open;
} Column;

/* What a match looks at in one component. */
enum { SLOTS, REPLICAS, HAVE, WORLD, LENGTHS, COLUMNS };
static const size_t item_bytes[COLUMNS] = {4, 4, 2, 2, 8};
static const char *const column_names[COLUMNS] = {"slots", "replicas", "have", "world", "lengths"};

typedef struct {
    Column columns[COLUMNS];
    int known;     /* 0: no page has this component */
    size_t rows;   /* that all columns have */
    Py_ssize_t rule, pages, group, covered;
    uint32_t *held; /* slot + 1 of each page that is whole, 0 where it is not */
} Component;

static int open_column(Column *column, PyObject *array, size_t item, const char *name) {
    if (PyObject_GetBuffer(array, &column->buffer, PyBUF_SIMPLE) < 0)
        return -1;
    column->is_open = 1;
    column->count = (size_t)column->buffer.len / item;
    if ((size_t)column->buffer.len % item) {
        PyErr_Format(PyExc_ValueError, "match: %s has %zd bytes", name, column->buffer.len);
        return -1;
    }
    return 0;
}

static void close_column(Column *column) {
    if (column->is_open)
        PyBuffer_Release(&column->buffer);
    column->is_open = 0;
}

/* (slots or None, replicas, have, world, lengths), or None where no page has the component. */
static int open_component(Component *component, PyObject *arrays, PyObject *rule) {
    if (rule != Py_None) {
        if (!PyArg_ParseTuple(rule, "nnn", &component->rule, &component->pages, &component->group))
            return -1;
        if (component->rule < ALL_PAGES || component->rule > BLOCK_GROUPS ||
            (component->rule != ALL_PAGES && component->pages < 1) ||
            (component->rule == BLOCK_GROUPS && (component->group < 1 || component->group > component->pages))) {
            PyErr_Format(PyExc_ValueError, "match: rule %zd of %zd and %zd pages", component->rule, component->pages,
                         component->group);
            return -1;
        }
    }
    if (arrays == Py_None)
        return 0;
    if (!PyTuple_Check(arrays) || PyTuple_Size(arrays) != COLUMNS) {
        PyErr_SetString(PyExc_TypeError, "match: a component is a tuple of 5 columns, or None");
        return -1;
    }
    component->known = 1;
    component->rows = SIZE_MAX;
    for (int i = 0; i < COLUMNS; i++) {
        PyObject *array = PyTuple_GetItem(arrays, i);
        if (i == SLOTS && array == Py_None)
            continue;
        if (open_column(&component->columns[i], array, item_bytes[i], column_names[i]) < 0)
            return -1;
        if (component->columns[i].count < component->rows)
            component->rows = component->columns[i].count;
    }
    return 0;
}

/* Rows of the hashes, -1 where unknown; up to the first of those for a prefix. How many, or -1 with an exception. */
static Py_ssize_t find_rows(const MaruIndex *index, const char *hashes, Py_ssize_t asked, int mode, int64_t *rows) {
    uint32_t tags[BATCH];
    for (Py_ssize_t at = 0; at < asked; at++) {
        if (at % BATCH == 0)
            maru_tags(index, hashes + at * HASH_BYTES, (size_t)(asked - at < BATCH ? asked - at : BATCH), tags);
        rows[at] = maru_find(index, tags[at % BATCH], hashes + at * HASH_BYTES);
        if (rows[at] == -2) {
            PyErr_SetString(PyExc_ValueError, "match: a row outside the column of hashes");
            return -1;
        }
        if (rows[at] < 0 && mode == PREFIX)
            return at;
    }
    return asked;
}

/* Which pages of a component are whole, and where the object lies that a reader of this shard wants. */
static int find_held(Component *component, const int64_t *rows, Py_ssize_t count) {
    const Column *columns = component->columns;
    const uint32_t *slots = columns[SLOTS].buffer.buf, *replicas = columns[REPLICAS].buffer.buf;
    const uint16_t *have = columns[HAVE].buffer.buf, *world = columns[WORLD].buffer.buf;
    if (!component->known) {
        memset(component->held, 0, (size_t)count * sizeof *component->held);
        return 0;
    }
    for (Py_ssize_t at = 0; at < count; at++) {
        const int64_t row = rows[at];
        component->held[at] = 0;
        if (row < 0)
            continue;
        if ((size_t)row >= component->rows) {
            PyErr_Format(PyExc_ValueError, "match: row %lld is outside its columns", (long long)row);
            return -1;
        }
        /* Whole: every shard is committed. Where ranks hold replicas all want the one that there is. */
        if (have[row] && have[row] == world[row])
            component->held[at] = world[row] == 1 ? replicas[row] : columns[SLOTS].is_open ? slots[row] : 0;
    }
    return 0;
}

/* How far a component reaches by its own rule; where a prefix does not meet it, legal[length - 1] becomes 0. */
static Py_ssize_t reach(const Component *component, Py_ssize_t count, unsigned char *legal) {
    const uint32_t *held = component->held;
    const Py_ssize_t pages = component->pages, group = component->group;
    Py_ssize_t covered = 0, run = 0;
    switch (component->rule) {
    case ALL_PAGES:
        while (covered < count && held[covered])
            covered++;
        memset(legal + covered, 0, (size_t)(count - covered));
        break;
    case TRAILING_PAGES:
        for (Py_ssize_t at = 0; at < count; at++) {
            run = held[at] ? run + 1 : 0;
            if (run >= (pages < at + 1 ? pages : at + 1))
                covered = at + 1;
            else
                legal[at] = 0;
        }
        break;
    default:
        for (; pages <= count - covered; covered += pages) {
            for (run = 0; run < group && held[covered + pages - 1 - run]; run++)
                ;
            if (run < group)
                break;
        }
    }
    return covered;
}

static PyObject *match(PyObject *module, PyObject *args) {
    PyObject *table_object, *keys_object, *offsets_object, *generations_object, *records_object, *arrays, *rules;
    PyObject *out[6] = {NULL}, *covered = NULL, *result = NULL;
    Column table = {0}, keys = {0}, offsets = {0}, generations = {0}, records = {0};
    const char *hashes, *key;
    Py_ssize_t hash_bytes, key_bytes, word, words, opened = 0;
    int mode, by_rules = 0;
    Component *components = NULL;
    int64_t *rows = NULL;
    uint32_t *held = NULL;
    unsigned char *legal = NULL;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOy#y#innOOOOO", &table_object, &keys_object, &key, &key_bytes, &hashes, &hash_bytes, &mode,
                          &word, &words, &offsets_object, &generations_object, &records_object, &arrays, &rules))
        return NULL;
    if (hash_bytes % HASH_BYTES || word < 0 || words <= word || mode < PREFIX || mode > OBJECTS ||
        !PyTuple_Check(arrays) || PyTuple_Size(arrays) < 1 || PyTuple_Size(arrays) > 4096 || !PyTuple_Check(rules) ||
        (PyTuple_Size(rules) && PyTuple_Size(rules) != PyTuple_Size(arrays))) {
        PyErr_SetString(PyExc_ValueError, "match: hashes, words, mode, components or rules do not fit");
        return NULL;
    }
    const Py_ssize_t asked = hash_bytes / HASH_BYTES, component_count = PyTuple_Size(arrays);
    if (open_column(&table, table_object, 8, "table") < 0 || open_column(&keys, keys_object, HASH_BYTES, "keys") < 0 ||
        open_column(&offsets, offsets_object, 8, "offsets") < 0 ||
        open_column(&generations, generations_object, 8, "generations") < 0 ||
        open_column(&records, records_object, 8, "records") < 0)
        goto done;
    MaruIndex index = {table.buffer.buf, table.count - 1, keys.buffer.buf, keys.count, {0}};
    if (!table.count || (table.count & index.mask) || key_bytes != sizeof index.key) {
        PyErr_SetString(PyExc_ValueError, "match: the table is not a power of two of u64, or the key does not fit");
        goto done;
    }
    memcpy(index.key, key, sizeof index.key);
    /* Never of no bytes: asked may be 0. */
    components = PyMem_Calloc((size_t)component_count, sizeof *components);
    rows = PyMem_Malloc((size_t)(asked + 1) * sizeof *rows);
    held = PyMem_Malloc((size_t)(asked * component_count + 1) * sizeof *held);
    legal = PyMem_Malloc((size_t)asked + 1);
    if (components == NULL || rows == NULL || held == NULL || legal == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    for (; opened < component_count; opened++) {
        Component *component = &components[opened];
        component->held = held + opened * asked;
        if (open_component(component, PyTuple_GetItem(arrays, opened),
                           PyTuple_Size(rules) ? PyTuple_GetItem(rules, opened) : Py_None) < 0) {
            opened++;
            goto done;
        }
        by_rules |= component->rule != ALL_PAGES;
    }

    const Py_ssize_t count = find_rows(&index, hashes, asked, mode, rows);
    if (count < 0)
        goto done;
    memset(legal, 1, (size_t)count);
    for (Py_ssize_t i = 0; i < component_count; i++) {
        if (find_held(&components[i], rows, count) < 0)
            goto done;
        if (mode == PREFIX)
            components[i].covered = reach(&components[i], count, legal);
        else if (mode == PAGES)
            for (Py_ssize_t at = 0; at < count; at++)
                legal[at] &= components[i].held[at] != 0;
    }

    /* The length of the prefix, or how many pages are whole; and of how many the answer has elements. */
    Py_ssize_t pages = 0, elements = count, end_count = 0;
    for (Py_ssize_t at = 0; at < count; at++)
        if (legal[at]) {
            pages = mode == PREFIX ? at + 1 : pages + 1;
            end_count++;
        }
    if (mode == PREFIX)
        elements = pages;
    for (int i = 0; i < 5; i++)
        if ((out[i] = PyBytes_FromStringAndSize(NULL, elements * component_count * (i ? 8 : 4))) == NULL)
            goto done;
    if ((out[5] = PyBytes_FromStringAndSize(NULL, mode == PREFIX && by_rules ? end_count * 4 : 0)) == NULL)
        goto done;
    /* Bytes objects that nobody else has seen yet may be written. */
    uint32_t *slot_out = (uint32_t *)PyBytes_AsString(out[0]), *end_out = (uint32_t *)PyBytes_AsString(out[5]);
    uint64_t *offset_out = (uint64_t *)PyBytes_AsString(out[1]), *generation_out = (uint64_t *)PyBytes_AsString(out[2]),
             *length_out = (uint64_t *)PyBytes_AsString(out[3]), *checksum_out = (uint64_t *)PyBytes_AsString(out[4]);
    const uint64_t *offset = offsets.buffer.buf, *generation = generations.buffer.buf, *record = records.buffer.buf;
    if (mode == PREFIX && by_rules)
        for (Py_ssize_t at = 0; at < count; at++)
            if (legal[at])
                *end_out++ = (uint32_t)(at + 1);
    for (Py_ssize_t i = 0; i < component_count; i++) {
        const uint64_t *lengths = components[i].columns[LENGTHS].buffer.buf;
        for (Py_ssize_t at = 0; at < elements; at++) {
            const uint32_t one_more = components[i].held[at];
            if (!one_more || (mode == PAGES && !legal[at])) {
                *slot_out++ = NO_SLOT;
                *offset_out++ = *generation_out++ = *length_out++ = *checksum_out++ = 0;
                continue;
            }
            const size_t slot = one_more - 1u;
            if (slot >= offsets.count || slot >= generations.count || slot >= records.count / (size_t)words) {
                PyErr_Format(PyExc_ValueError, "match: slot %zu is outside the pool", slot);
                goto done;
            }
            *slot_out++ = (uint32_t)slot;
            *offset_out++ = offset[slot];
            *generation_out++ = generation[slot];
            *length_out++ = lengths[rows[at]];
            *checksum_out++ = record[slot * (size_t)words + (size_t)word];
        }
    }
    if ((covered = PyTuple_New(mode == PREFIX ? component_count : 0)) == NULL)
        goto done;
    for (Py_ssize_t i = 0; mode == PREFIX && i < component_count; i++) {
        PyObject *reached = PyLong_FromSsize_t(components[i].covered);
        if (reached == NULL || PyTuple_SetItem(covered, i, reached) < 0)
            goto done;
    }
    result = Py_BuildValue("nOOOOOOO", mode == OBJECTS ? asked : pages, out[0], out[1], out[2], out[3], out[4], out[5], covered);
done:
    Py_XDECREF(covered);
    for (int i = 0; i < 6; i++)
        Py_XDECREF(out[i]);
    while (opened-- > 0)
        for (int i = 0; i < COLUMNS; i++)
            close_column(&components[opened].columns[i]);
    PyMem_Free(components);
    PyMem_Free(rows);
    PyMem_Free(held);
    PyMem_Free(legal);
    close_column(&records);
    close_column(&generations);
    close_column(&offsets);
    close_column(&keys);
    close_column(&table);
    return result;
}

/* ------------------------------------------------------------ the plainest match, from message to message
 *
 * Nearly every match asks for a prefix in one component, without rules or a hold. For a server that wakes up for it, what Python
 * does between two lines of it costs more than the lookup: so this goes from the bytes of the request to those of the reply
 * at once. Anything else, and anything that is not packed as maru_core.protocol packs it, is left to maru_server.engine_messages.
 */
typedef struct {
    uint64_t rid, session, namespace, shard;
    const unsigned char *component, *hashes;
    size_t component_bytes, hash_bytes;
} Plain;

static int parse_plain(const unsigned char *data, size_t count, Plain *plain) {
    Reader reader = {data, data + count};
    /* An array of ten: the kind, six fields, and the defaults of the last three. */
    if (!take(&reader, "\x9a\xa5Match", 7) || !take_unsigned(&reader, &plain->rid) || !take_unsigned(&reader, &plain->session) ||
        !take_unsigned(&reader, &plain->namespace) || !take(&reader, "\x91", 1) ||
        !take_word(&reader, &plain->component, &plain->component_bytes))
        return 0;
    return take_unsigned(&reader, &plain->shard) && take_bytes(&reader, &plain->hashes, &plain->hash_bytes) &&
           plain->hash_bytes && plain->hash_bytes % HASH_BYTES == 0 && take(&reader, "\xc2\x90\xc0", 3) &&
           reader.at == reader.end;
}

static PyObject *plain(PyObject *module, PyObject *data) {
    char *bytes;
    Py_ssize_t count;
    Plain asked;
    (void)module;
    if (PyBytes_AsStringAndSize(data, &bytes, &count) < 0)
        return NULL;
    if (!parse_plain((const unsigned char *)bytes, (size_t)count, &asked))
        Py_RETURN_NONE;
    return Py_BuildValue("KKs#Kn", asked.session, asked.namespace, asked.component, (Py_ssize_t)asked.component_bytes, asked.shard,
                         (Py_ssize_t)(asked.hash_bytes / HASH_BYTES));
}

#define LOCATED "\x9d\xa7Located"
#define HELD_FOR_NO_TIME "\xcb\0\0\0\0\0\0\0\0"
#define NO_ENDS_ONE_COMPONENT "\xc4\0\x91"

/* What of a pool's directory a reply is made of: arrays that stay the same as long as the directory does, and so are opened once. */
typedef struct {
    Column offsets, generations, records;
    size_t word, words;
} Pool;

static const char POOL[] = "maru_server._native.pool";

static void drop_pool(Pool *pool) {
    close_column(&pool->offsets);
    close_column(&pool->generations);
    close_column(&pool->records);
    PyMem_Free(pool);
}

static void drop_capsule(PyObject *capsule) { drop_pool(PyCapsule_GetPointer(capsule, POOL)); }

static PyObject *open_pool(PyObject *module, PyObject *args) {
    PyObject *offsets, *generations, *records, *capsule;
    Py_ssize_t word, words;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOnn", &offsets, &generations, &records, &word, &words))
        return NULL;
    if (word < 0 || words <= word) {
        PyErr_SetString(PyExc_ValueError, "pool: the word is not within a record");
        return NULL;
    }
    Pool *pool = PyMem_Calloc(1, sizeof *pool);
    if (pool == NULL)
        return PyErr_NoMemory();
    pool->word = (size_t)word;
    pool->words = (size_t)words;
    if (open_column(&pool->offsets, offsets, 8, "offsets") < 0 || open_column(&pool->generations, generations, 8, "generations") < 0 ||
        open_column(&pool->records, records, 8, "records") < 0 || (capsule = PyCapsule_New(pool, POOL, drop_capsule)) == NULL) {
        drop_pool(pool);
        return NULL;
    }
    return capsule;
}

static PyObject *answer(PyObject *module, PyObject *args) {
    PyObject *capsule, *table_object, *keys_object, *arrays, *why, *tree;
    PyObject *reply = NULL, *result = NULL;
    Column table = {0}, keys = {0};
    const char *data, *key;
    Py_ssize_t data_bytes, key_bytes;
    unsigned long long incarnation;
    Component component = {0};
    int64_t *rows = NULL;
    Plain asked;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#KOOOy#OOO", &data, &data_bytes, &incarnation, &capsule, &table_object, &keys_object, &key,
                          &key_bytes, &arrays, &why, &tree))
        return NULL;
    const Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (pool == NULL)
        return NULL;
    if (!parse_plain((const unsigned char *)data, (size_t)data_bytes, &asked) || arrays == Py_None) {
        PyErr_SetString(PyExc_ValueError, "answer: request or component do not fit");
        return NULL;
    }
    if (open_column(&table, table_object, 8, "table") < 0 || open_column(&keys, keys_object, HASH_BYTES, "keys") < 0 ||
        open_component(&component, arrays, Py_None) < 0)
        goto done;
    MaruIndex index = {table.buffer.buf, table.count - 1, keys.buffer.buf, keys.count, {0}};
    if (!table.count || (table.count & index.mask) || key_bytes != sizeof index.key) {
        PyErr_SetString(PyExc_ValueError, "answer: the table is not a power of two of u64, or the key does not fit");
        goto done;
    }
    memcpy(index.key, key, sizeof index.key);
    const size_t pages_asked = asked.hash_bytes / HASH_BYTES;
    rows = PyMem_Malloc(pages_asked * (sizeof *rows + sizeof *component.held));
    if (rows == NULL) {
        PyErr_NoMemory();
        goto done;
    }
    component.held = (uint32_t *)(rows + pages_asked);
    const Py_ssize_t known = find_rows(&index, (const char *)asked.hashes, (Py_ssize_t)pages_asked, PREFIX, rows);
    if (known < 0 || find_held(&component, rows, known) < 0)
        goto done;
    size_t pages = 0;
    while (pages < (size_t)known && component.held[pages])
        pages++;
    unsigned long reason = 0;
    if (pages < pages_asked) {
        PyObject *said = PyObject_CallFunction(why, "Oy#", tree, (const char *)asked.hashes + pages * HASH_BYTES, (Py_ssize_t)HASH_BYTES);
        if (said == NULL)
            goto done;
        reason = PyLong_AsUnsignedLong(said);
        Py_DECREF(said);
        if (PyErr_Occurred())
            goto done;
    }

    const size_t reply_bytes = sizeof(LOCATED HELD_FOR_NO_TIME NO_ENDS_ONE_COMPONENT) - 1 + unsigned_bytes(asked.rid) +
                               unsigned_bytes(incarnation) + unsigned_bytes(reason) + 2 * unsigned_bytes(pages) +
                               bytes_bytes(pages * 4) + 4 * bytes_bytes(pages * 8);
    if ((reply = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)reply_bytes)) == NULL)
        goto done;
    /* A bytes object that nobody else has seen yet may be written. */
    unsigned char *at = PUT_TEXT((unsigned char *)PyBytes_AsString(reply), LOCATED);
    at = put_unsigned(put_unsigned(put_unsigned(at, asked.rid), incarnation), pages);
    unsigned char *columns[5];
    for (int i = 0; i < 5; i++) {
        columns[i] = put_bytes_head(at, pages * (i ? 8 : 4));
        at = columns[i] + pages * (i ? 8 : 4);
    }
    at = put_unsigned(at, reason);
    at = PUT_TEXT(at, HELD_FOR_NO_TIME);
    (void)put_unsigned(PUT_TEXT(at, NO_ENDS_ONE_COMPONENT), pages);

    const uint64_t *offset = pool->offsets.buffer.buf, *generation = pool->generations.buffer.buf;
    const uint64_t *record = pool->records.buffer.buf, *lengths = component.columns[LENGTHS].buffer.buf;
    for (size_t page = 0; page < pages; page++) {
        const uint32_t slot = component.held[page] - 1u;
        if (slot >= pool->offsets.count || slot >= pool->generations.count || slot >= pool->records.count / pool->words) {
            PyErr_Format(PyExc_ValueError, "answer: slot %u is outside the pool", slot);
            goto done;
        }
        memcpy(columns[0] + page * 4, &slot, 4);
        memcpy(columns[1] + page * 8, &offset[slot], 8);
        memcpy(columns[2] + page * 8, &generation[slot], 8);
        memcpy(columns[3] + page * 8, &lengths[rows[page]], 8);
        memcpy(columns[4] + page * 8, &record[slot * pool->words + pool->word], 8);
    }
    result = Py_BuildValue("nkO", (Py_ssize_t)pages, reason, reply);
done:
    Py_XDECREF(reply);
    for (int i = 0; i < COLUMNS; i++)
        close_column(&component.columns[i]);
    PyMem_Free(rows);
    close_column(&keys);
    close_column(&table);
    return result;
}

static PyMethodDef methods[] = {
    {"match", match, METH_VARARGS,
     "match(table, keys, key, hashes, mode, word, words, offsets, generations, records, components, rules)\n"
     "-> (pages, slots, offsets, generations, lengths, checksums, ends, covered)\n\n"
     "Look the packed hashes up in a tree's index and gather where each page lies. `components` has a tuple (slots or\n"
     "None, replicas, have, world, lengths) for each, or None; `rules` a tuple (rule, pages, group) or None for each, or nothing.\n"
     "`mode` is 0 for the longest prefix that meets the rules, 1 for each page that is whole in all components, 2 for each object.\n"
     "The checksum is 64-bit word `word` of a slot's record of `words` words."},
    {"plain", plain, METH_O,
     "plain(data) -> (session, namespace, component, shard, pages), or None\n\n"
     "What a request asks for, if it is the plainest match: a prefix, of at least one page, in one component, without rules or a hold."},
    {"pool", open_pool, METH_VARARGS,
     "pool(offsets, generations, records, word, words) -> capsule\n\n"
     "What answer needs of a pool's directory. The checksum is 64-bit word `word` of a slot's record of `words` words."},
    {"answer", answer, METH_VARARGS,
     "answer(data, incarnation, pool, table, keys, key, component, why, tree) -> (pages, reason, reply)\n\n"
     "The packed reply to the plainest match `data`, how many pages it has and the reason why not more: `why(tree, page)` is asked of\n"
     "the first page that is missing. `component` as of match, and not None."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._native", "The lookup of a match.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
