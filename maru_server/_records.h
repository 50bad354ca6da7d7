/* What the stores of chains have in common: arrays held together, the index asked about a chain, records written.
 *
 * Words of the pool are stored in the order that maru_core.pool.format asks for, each as a whole, and for memory that is coherent between
 * hosts. To be included after Python.h; with the GIL held.
 */
#ifndef MARU_RECORDS_H
#define MARU_RECORDS_H

#include "_index.h"

#define BATCH 256
#define RECORD_WORDS 16
#define ROOT_ROW (-1)
#define ABSENT (-3)

/* States of a slot, and words of a record: as maru_core.pool.format and maru_server.directory. */
enum { FREE, RESERVED, COMMITTED };
enum { LENGTH_WORD = 2, GENERATION_WORD = 3, HASH_WORD = 4, PARENT_WORD = 8, CHECKSUM_WORD = 12, LAST_USE_WORD, OWNER_WORD, CHECK_WORD };
static const uint64_t word_keys[RECORD_WORDS] = {
    0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9,
    0x85EBCA77C2B2AE63, 0x27D4EB2F165667C5, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53, 0x2545F4914F6CDD1D, 0x8CB92BA72F3D8DD7,
    0xA24BAED4963EE407, 0,                  0x9FB21C651E98DF25, 0,
};
static const uint64_t check_mix = 0xD1B54A32D192ED03, check_base = 0x6D61727570616765, place_key = 0x8EBC6AF09C88C6E3;

/* Some arrays, held together so that they are let go together. */
#define ARRAYS_MAX 17
typedef struct {
    Py_buffer buffers[ARRAYS_MAX];
    int opened;
} Arrays;

/* The array's memory, with how many items of `item` bytes it has; NULL with an exception. */
static inline void *open_array(Arrays *arrays, PyObject *array, size_t item, int writable, size_t *count, const char *name) {
    Py_buffer *buffer = &arrays->buffers[arrays->opened];
    if (arrays->opened == ARRAYS_MAX) {
        PyErr_SetString(PyExc_SystemError, "store: too many arrays");
        return NULL;
    }
    if (PyObject_GetBuffer(array, buffer, writable ? PyBUF_WRITABLE : PyBUF_SIMPLE) < 0)
        return NULL;
    arrays->opened++;
    if ((size_t)buffer->len % item) {
        PyErr_Format(PyExc_ValueError, "store: %s has %zd bytes", name, buffer->len);
        return NULL;
    }
    *count = (size_t)buffer->len / item;
    return buffer->buf;
}

static inline void close_arrays(Arrays *arrays) {
    while (arrays->opened > 0)
        PyBuffer_Release(&arrays->buffers[--arrays->opened]);
}

static inline int open_index(Arrays *arrays, MaruIndex *index, uint64_t **entries, unsigned char **column, PyObject *table, PyObject *keys,
                      const char *key, Py_ssize_t key_bytes, int writable) {
    size_t count;
    if ((*entries = open_array(arrays, table, 8, writable, &count, "table")) == NULL ||
        (*column = open_array(arrays, keys, HASH_BYTES, writable, &index->rows, "keys")) == NULL)
        return -1;
    if (!count || count & (count - 1) || key_bytes != sizeof index->key) {
        PyErr_SetString(PyExc_ValueError, "store: the table is not a power of two of u64, or the key does not fit");
        return -1;
    }
    index->entries = *entries;
    index->mask = count - 1;
    index->hashes = *column;
    memcpy(index->key, key, sizeof index->key);
    return 0;
}

/* Whether a hash comes twice, or is `parent` or the root's. -1 without memory. */
static inline int repeats(const MaruIndex *index, const char *parent, const char *hashes, size_t count) {
    static const char root[HASH_BYTES];
    size_t size = 16;
    while (size < 2 * count)
        size *= 2;
    uint16_t few[2 * BATCH], *seen = few;
    if (count > UINT16_MAX - 1)
        return 1;
    if (size > 2 * BATCH && (seen = PyMem_Malloc(size * sizeof *seen)) == NULL)
        return -1;
    memset(seen, 0, size * sizeof *seen);
    int found = 0;
    for (size_t i = 0; i < count && !found; i++) {
        const char *hash = hashes + i * HASH_BYTES;
        found = !memcmp(hash, root, HASH_BYTES) || !memcmp(hash, parent, HASH_BYTES);
        size_t at = maru_tag(index->key, hash) & (size - 1);
        for (; seen[at] && !found; at = (at + 1) & (size - 1))
            found = !memcmp(hashes + (seen[at] - 1u) * HASH_BYTES, hash, HASH_BYTES);
        if (!found)
            seen[at] = (uint16_t)(i + 1);
    }
    if (seen != few)
        PyMem_Free(seen);
    return found;
}

/* What is there of a chain that is to be stored: `above` is the row of the page before the first one (ROOT_ROW where that is the root's,
 * ABSENT where it is not known); `known` is how many of the pages are known, -1 where one comes twice, or is its own ancestor. Returns 0, or
 * -1 with an exception. */
static inline int look_up_chain(const MaruIndex *index, const char *parent, const char *hashes, size_t count, long long *above,
                                Py_ssize_t *known) {
    static const char root[HASH_BYTES];
    const int repeated = repeats(index, parent, hashes, count);
    if (repeated < 0) {
        PyErr_NoMemory();
        return -1;
    }
    *known = repeated ? -1 : 0;
    *above = ROOT_ROW;
    if (memcmp(parent, root, HASH_BYTES) && (*above = maru_find(index, maru_tag(index->key, parent), parent)) == -1)
        *above = ABSENT;
    for (size_t start = 0; start < count && !repeated && *above != -2; start += BATCH) {
        const size_t some = count - start < BATCH ? count - start : BATCH;
        uint32_t tags[BATCH];
        maru_tags(index, hashes + start * HASH_BYTES, some, tags);
        for (size_t i = 0; i < some && *above != -2; i++) {
            const long long row = maru_find(index, tags[i], hashes + (start + i) * HASH_BYTES);
            *known += row >= 0;
            if (row == -2)
                *above = -2;
        }
    }
    if (*above == -2) {
        PyErr_SetString(PyExc_ValueError, "store: a row outside the column of hashes");
        return -1;
    }
    return 0;
}

static inline void set_state(uint64_t *record, uint32_t state) { __atomic_store_n((uint32_t *)record, state, __ATOMIC_RELEASE); }

static inline uint32_t get_state(const uint64_t *record) { return *(const uint32_t *)record; }

/* Whether all slots lie within the tables and are in this state. */
static inline int slots_are(const uint64_t *records, size_t slot_count, const uint32_t *slots, size_t count, uint32_t state) {
    for (size_t i = 0; i < count; i++) {
        if (slots[i] >= slot_count) {
            PyErr_Format(PyExc_ValueError, "store: slot %u is outside the pool", (unsigned)slots[i]);
            return 0;
        }
        __builtin_prefetch(records + (size_t)slots[i] * RECORD_WORDS);
    }
    for (size_t i = 0; i < count; i++)
        if (get_state(records + (size_t)slots[i] * RECORD_WORDS) != state) {
            PyErr_Format(PyExc_AssertionError, "store: slot %u is in state %u and not %u", (unsigned)slots[i],
                         (unsigned)get_state(records + (size_t)slots[i] * RECORD_WORDS), (unsigned)state);
            return 0;
        }
    return 1;
}

static inline uint64_t record_check(const uint64_t *body) {
    uint64_t check = check_base;
    for (int word = 0; word < RECORD_WORDS; word++) {
        uint64_t masked = body[word];
        if (word == 0)
            masked &= 0xFFFFFFFF00000000; /* not the state */
        else if (word == 1)
            masked &= 0xFFFFFFFF0000FFFF; /* not the flags */
        else if (word == LAST_USE_WORD || word == CHECK_WORD)
            continue;
        masked *= word_keys[word];
        masked ^= masked >> 32;
        check += masked * check_mix;
    }
    return check;
}

/* What is the same in all records of a batch; what each has by itself is zero. */
static inline void common_words(uint64_t *body, unsigned namespace, unsigned component, unsigned shard, unsigned world, uint64_t length,
                         long long now_ns, uint64_t owner) {
    memset(body, 0, RECORD_WORDS * sizeof *body);
    body[0] = RESERVED | (uint64_t)component << 32 | (uint64_t)shard << 48;
    body[1] = (uint64_t)world | (uint64_t)namespace << 32;
    body[LENGTH_WORD] = length;
    body[LAST_USE_WORD] = (uint64_t)now_ns;
    body[OWNER_WORD] = owner;
}

/* Records of reserved slots, of which nothing is believed but that they are taken. `chain` is the hash of the page before the first, and
 * those of the pages: of a chain, or apart, each the first of one. */
static inline void write_records(uint64_t *records, const uint64_t *offsets, const uint32_t *slots, size_t count, const char *granted,
                          const char *chain, int apart, const uint64_t *common, uint64_t share) {
    for (size_t i = 0; i < count; i++) {
        uint64_t body[RECORD_WORDS], *record = records + (size_t)slots[i] * RECORD_WORDS;
        memcpy(body, common, sizeof body);
        memcpy(body + GENERATION_WORD, granted + 8 * i, 8);
        memcpy(body + HASH_WORD, chain + (i + 1) * HASH_BYTES, HASH_BYTES);
        memcpy(body + PARENT_WORD, chain + (apart ? 0 : i) * HASH_BYTES, HASH_BYTES);
        body[CHECK_WORD] = record_check(body) + offsets[slots[i]] * place_key + share;
        for (int word = 0; word < RECORD_WORDS; word++)
            __atomic_store_n(record + word, body[word], __ATOMIC_RELEASE);
    }
}

/* What the tree says of pages whose slots were granted ahead. */
typedef struct {
    const int32_t *parents, *children;
    const uint32_t *objects, *pending;
    size_t rows; /* that all of these have */
} Apart;

/* Whether slots are still what a reservation was granted ahead, number `holder`, with generations `granted`; and whether their pages, which
 * are to have other names and another parent, each hang at the root, nothing hangs on them, and none of them is that parent. All arrays by
 * slot have `slot_count` items. */
static inline int are_spares(const uint64_t *records, const uint64_t *generations, const uint32_t *holders, size_t slot_count,
                             const Apart *apart, const int64_t *rows, const uint32_t *slots, size_t count, uint32_t holder,
                             const char *granted, long long above) {
    for (size_t i = 0; i < count; i++) {
        uint64_t generation;
        memcpy(&generation, granted + 8 * i, 8);
        if (slots[i] >= slot_count || holders[slots[i]] != holder || generations[slots[i]] != generation ||
            get_state(records + (size_t)slots[i] * RECORD_WORDS) != RESERVED || rows[i] < 0 || (size_t)rows[i] >= apart->rows ||
            rows[i] == above || apart->parents[rows[i]] != ROOT_ROW || apart->children[rows[i]] >= 0 || apart->objects[rows[i]] ||
            apart->pending[rows[i]] != 1)
            return 0;
    }
    return 1;
}

#endif
