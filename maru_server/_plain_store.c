/* The store of a few pages in slots that were granted ahead, from message to message: maru_server.plain_store.
 *
 * Optional: maru_server.new_chains does the same for a message that was unpacked, and everything that this leaves alone. The pool is
 * written as there, and only after everything was looked at: what is not as it should be is left alone with nothing changed.
 * With the GIL held from the first look to the last word. Limited API of Python 3.11.
 */
#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "../maru_core/_packed.h"
#include "_records.h"

typedef struct {
    uint64_t rid, session, namespace, shard, world, nbytes;
    const unsigned char *component, *parent, *hashes, *slots, *generations, *spares;
    size_t component_bytes, count, wanted;
} Plain;

static int parse(const unsigned char *data, size_t bytes, Plain *plain) {
    Reader reader = {data, data + bytes};
    size_t parent_bytes, hash_bytes, slot_bytes, generation_bytes, spare_bytes;
    /* An array of fourteen: the kind and its fields; without checksums. */
    if (!take(&reader, "\x9e\xa5Store", 7) || !take_unsigned(&reader, &plain->rid) || !take_unsigned(&reader, &plain->session) ||
        !take_unsigned(&reader, &plain->namespace) || !take_word(&reader, &plain->component, &plain->component_bytes) ||
        !take_unsigned(&reader, &plain->shard) || !take_unsigned(&reader, &plain->world) ||
        !take_bytes(&reader, &plain->parent, &parent_bytes) || !take_bytes(&reader, &plain->hashes, &hash_bytes) ||
        !take_unsigned(&reader, &plain->nbytes) || !take_bytes(&reader, &plain->slots, &slot_bytes) ||
        !take_bytes(&reader, &plain->generations, &generation_bytes) || !take(&reader, "\xc4\0", 2) ||
        !take_bytes(&reader, &plain->spares, &spare_bytes) || reader.at != reader.end)
        return 0;
    plain->count = hash_bytes / HASH_BYTES;
    plain->wanted = spare_bytes / HASH_BYTES;
    /* Numbers that no granted slot could have are somebody else's to refuse. */
    return plain->namespace <= UINT32_MAX && plain->shard <= UINT16_MAX && plain->world <= UINT16_MAX && parent_bytes == HASH_BYTES && plain->count && hash_bytes == plain->count * HASH_BYTES && slot_bytes == plain->count * 4 &&
           generation_bytes == plain->count * 8 && spare_bytes == plain->wanted * HASH_BYTES;
}

/* Of a pool's directory and the reservations in it: arrays that stay the same as long as these do, and so are opened once. */
typedef struct {
    Arrays arrays;
    uint64_t *records, *changes;
    const uint64_t *offsets, *generations, *namespace_shares, *component_shares;
    const uint32_t *holders;
    size_t slots, namespaces, components;
} Pool;

static const char POOL[] = "maru_server._plain_store.pool";

static void drop_pool(PyObject *capsule) {
    Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    close_arrays(&pool->arrays);
    PyMem_Free(pool);
}

static PyObject *open_pool(PyObject *module, PyObject *args) {
    PyObject *records, *changes, *offsets, *generations, *holders, *namespaces, *components, *capsule;
    size_t offset_count, generation_count, holder_count, change_count;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOOOOOO", &records, &changes, &offsets, &generations, &holders, &namespaces, &components))
        return NULL;
    Pool *pool = PyMem_Calloc(1, sizeof *pool);
    if (pool == NULL)
        return PyErr_NoMemory();
    Arrays *arrays = &pool->arrays;
    if ((pool->records = open_array(arrays, records, 8 * RECORD_WORDS, 1, &pool->slots, "records")) != NULL &&
        (pool->changes = open_array(arrays, changes, 8, 1, &change_count, "changes")) != NULL &&
        (pool->offsets = open_array(arrays, offsets, 8, 0, &offset_count, "offsets")) != NULL &&
        (pool->generations = open_array(arrays, generations, 8, 0, &generation_count, "generations")) != NULL &&
        (pool->holders = open_array(arrays, holders, 4, 0, &holder_count, "holders")) != NULL &&
        (pool->namespace_shares = open_array(arrays, namespaces, 8, 0, &pool->namespaces, "namespaces")) != NULL &&
        (pool->component_shares = open_array(arrays, components, 8, 0, &pool->components, "components")) != NULL) {
        if (change_count != 1 || offset_count < pool->slots || generation_count < pool->slots || holder_count < pool->slots)
            PyErr_SetString(PyExc_ValueError, "pool: the arrays do not go together");
        else if ((capsule = PyCapsule_New(pool, POOL, drop_pool)) != NULL)
            return capsule;
    }
    close_arrays(arrays);
    PyMem_Free(pool);
    return NULL;
}

static PyObject *plain(PyObject *module, PyObject *args) {
    PyObject *data, *capsule;
    char *bytes;
    Py_ssize_t size, most;
    Plain asked;
    uint32_t first;
    (void)module;
    if (!PyArg_ParseTuple(args, "SOn", &data, &capsule, &most) || PyBytes_AsStringAndSize(data, &bytes, &size) < 0)
        return NULL;
    const Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (pool == NULL)
        return NULL;
    if (most < 0 || !parse((const unsigned char *)bytes, (size_t)size, &asked) || asked.count > (size_t)most || asked.wanted > (size_t)most)
        Py_RETURN_NONE;
    memcpy(&first, asked.slots, sizeof first);
    if (first >= pool->slots || !pool->holders[first])
        Py_RETURN_NONE;
    return Py_BuildValue("KKs#KKKnnk", asked.session, asked.namespace, asked.component, (Py_ssize_t)asked.component_bytes, asked.shard,
                         asked.world, asked.nbytes, (Py_ssize_t)asked.count, (Py_ssize_t)asked.wanted,
                         (unsigned long)pool->holders[first]);
}

static PyObject *store(PyObject *module, PyObject *args) {
    PyObject *capsule, *table, *keys, *tree[4], *rows_object, *slots_object, *world_object, *length_object, *reply = NULL, *result = NULL;
    Arrays arrays = {.opened = 0};
    MaruIndex index;
    uint64_t *entries, common[RECORD_WORDS];
    unsigned char *column;
    const char *data, *key, *granted;
    Py_ssize_t data_bytes, key_bytes, granted_bytes, known;
    unsigned long long incarnation, owner;
    unsigned holder, component;
    long long now_ns, above;
    Plain asked;
    size_t sizes[4], row_count, slot_count, world_count, length_count;
    static const char *const names[4] = {"parent", "child", "objects", "pending"};
    const void *of[4];
    const int64_t *rows;
    const uint32_t *slots;
    const uint16_t *worlds;
    const uint64_t *lengths;
    (void)module;
    if (!PyArg_ParseTuple(args, "y#KO(OOy#)(OOOO)OOy#IOOILK", &data, &data_bytes, &incarnation, &capsule, &table, &keys, &key, &key_bytes,
                          &tree[0], &tree[1], &tree[2], &tree[3], &rows_object, &slots_object, &granted, &granted_bytes, &holder,
                          &world_object, &length_object, &component, &now_ns, &owner))
        return NULL;
    const Pool *pool = PyCapsule_GetPointer(capsule, POOL);
    if (pool == NULL)
        return NULL;
    if (!parse((const unsigned char *)data, (size_t)data_bytes, &asked) || !holder || asked.namespace >= pool->namespaces ||
        component >= pool->components || component > UINT16_MAX) {
        PyErr_SetString(PyExc_ValueError, "store: the request is not a plain one, or a number is out of range");
        return NULL;
    }
    if (open_index(&arrays, &index, &entries, &column, table, keys, key, key_bytes, 0) < 0)
        goto done;
    Apart apart = {.rows = SIZE_MAX};
    for (int i = 0; i < 4; i++) {
        if ((of[i] = open_array(&arrays, tree[i], 4, 0, &sizes[i], names[i])) == NULL)
            goto done;
        if (sizes[i] < apart.rows)
            apart.rows = sizes[i];
    }
    apart.parents = of[0], apart.children = of[1], apart.objects = of[2], apart.pending = of[3];
    if ((rows = open_array(&arrays, rows_object, 8, 0, &row_count, "rows")) == NULL ||
        (slots = open_array(&arrays, slots_object, 4, 0, &slot_count, "slots")) == NULL ||
        (worlds = open_array(&arrays, world_object, 2, 0, &world_count, "world")) == NULL ||
        (lengths = open_array(&arrays, length_object, 8, 0, &length_count, "length")) == NULL)
        goto done;
    if (row_count != slot_count || (size_t)granted_bytes != 8 * slot_count) {
        PyErr_SetString(PyExc_ValueError, "store: rows, slots and generations of the reservation do not go together");
        goto done;
    }
    /* Where in the reservation the run of slots begins, with the generations that were granted. */
    const size_t count = asked.count;
    size_t at = 0;
    while (at + count <= slot_count && memcmp(slots + at, asked.slots, 4 * count))
        at++;
    if (at + count > slot_count || memcmp(granted + 8 * at, asked.generations, 8 * count))
        goto left;
    /* What they were granted for: all of a reservation are alike. */
    const int64_t first = rows[at];
    if (first < 0 || (size_t)first >= world_count || (size_t)first >= length_count || worlds[first] != asked.world ||
        lengths[first] != asked.nbytes)
        goto left;
    /* New pages, and the names of new spares, all at once: they follow each other in the message only by chance. */
    char chain[(2 * BATCH + 1) * HASH_BYTES];
    if (count + asked.wanted > 2 * BATCH)
        goto left;
    memcpy(chain, asked.parent, HASH_BYTES);
    memcpy(chain + HASH_BYTES, asked.hashes, count * HASH_BYTES);
    memcpy(chain + (count + 1) * HASH_BYTES, asked.spares, asked.wanted * HASH_BYTES);
    if (look_up_chain(&index, chain, chain + HASH_BYTES, count + asked.wanted, &above, &known) < 0)
        goto done;
    if (known || above < ROOT_ROW ||
        !are_spares(pool->records, pool->generations, pool->holders, pool->slots, &apart, rows + at, slots + at, count, holder,
                    (const char *)asked.generations, above))
        goto left;

    /* All objects are made before the first word is written: nothing can fail after it. */
    const size_t reply_bytes = 8 + unsigned_bytes(asked.rid) + unsigned_bytes(incarnation) + 1 + 6;
    if ((reply = PyBytes_FromStringAndSize(NULL, (Py_ssize_t)reply_bytes)) == NULL ||
        (result = Py_BuildValue("nLy#y#O", (Py_ssize_t)at, above, chain, (Py_ssize_t)((count + 1) * HASH_BYTES), asked.generations,
                                (Py_ssize_t)(8 * count), reply)) == NULL)
        goto done;
    unsigned char *to = PUT_TEXT((unsigned char *)PyBytes_AsString(reply), "\x97\xa6Stored");
    to = put_unsigned(put_unsigned(to, asked.rid), incarnation);
    (void)PUT_TEXT(to, "\0\xc4\0\xc4\0\xc4\0"); /* stored, and no spares */
    common_words(common, (unsigned)asked.namespace, component, (unsigned)asked.shard, (unsigned)asked.world, asked.nbytes, now_ns, owner);
    write_records(pool->records, pool->offsets, slots + at, count, (const char *)asked.generations, chain, 0, common,
                  pool->namespace_shares[asked.namespace] + pool->component_shares[component]);
    for (size_t i = 0; i < count; i++)
        set_state(pool->records + (size_t)slots[at + i] * RECORD_WORDS, COMMITTED);
    __atomic_store_n(pool->changes, *pool->changes + 1, __ATOMIC_RELEASE);
    goto done;
left:
    result = Py_NewRef(Py_None);
done:
    Py_XDECREF(reply);
    close_arrays(&arrays);
    return result;
}

static PyMethodDef methods[] = {
    {"pool", open_pool, METH_VARARGS,
     "pool(records, changes, offsets, generations, holders, namespace_shares, component_shares) -> capsule\n\n"
     "What the others need of a pool's directory; `holders` has the number of each slot's reservation, the shares what the names of\n"
     "namespaces and components add to the check of a record."},
    {"plain", plain, METH_VARARGS,
     "plain(data, pool, most) -> (session, namespace, component, shard, world, nbytes, pages, spares, holder), or None\n\n"
     "What a packed request asks for, if it is a Store of at most so many pages, and spares, without checksums, into slots of which the\n"
     "first is reserved."},
    {"store", store, METH_VARARGS,
     "store(data, incarnation, pool, (table, keys, key), (parent, child, objects, pending), rows, slots, generations, holder, world, length,\n"
     "      component, now_ns, owner) -> (at, above, chain, generations, reply), or None\n\n"
     "Publish the pages of such a request. `rows`, `slots` and packed `generations` are those of reservation `holder`, `world` and `length`\n"
     "columns of the component. None, with nothing changed, where the slots are not a run of the reservation's or were not granted for such\n"
     "pages, or the chain is not all new below the root or a page that is known. Else where in the reservation the run begins, the row of\n"
     "the page before, the chain's hashes after that one's, the generations, and the packed reply of one that gets no spares."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_server._plain_store", "Stores in slots granted ahead, from message to message.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__plain_store(void) { return PyModuleDef_Init(&definition); }
