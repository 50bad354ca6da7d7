/* The copy loop of a mover and the generation compare of a reader, without the GIL.
 *
 * Optional: maru_core.mover and maru_core.pool.view do the same in Python where this was not built. It is given
 * addresses as numbers and believes that engine memory is what its owner says it is; what it does not believe is
 * where in the pool it is told to copy: every offset is checked before the first byte moves.
 *
 * Limited API of Python 3.11: one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <pthread.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

/* Batches of at least this many bytes are written around the cache ("streamed"). A normal store first reads the line
 * it will overwrite; the pool and the engine's pages are far larger than caches, so that read is waste. Measured
 * (Xeon with AVX-512, 2 cores, 64 KiB fragments, buffers not in cache): 1 MiB 14.7 against 8.4 GB/s, 16 MiB 9.6
 * against 6.1, 256 MiB 9.5 against 6.5. glibc's memcpy streams too, but decides by the size of one call, which here is
 * one fragment. Below 1 MiB what was just written is often read next, from the cache: 28 against 20 GB/s when warm. */
#define STREAM_BATCH_BYTES (1u << 20)
/* Streaming a fragment smaller than this is mostly edges. */
#define STREAM_FRAGMENT_BYTES 1024u
/* What a thread takes at a time. Small enough that threads end together, large enough that taking costs nothing. */
#define CHUNK_BYTES (1u << 20)
#define MAX_THREADS 64

/* ------------------------------------------------------------------ copying one range */

typedef void (*copy_range)(char *to, const char *from, size_t bytes);

static void copy_plain(char *to, const char *from, size_t bytes) { memcpy(to, from, bytes); }

#if defined(__x86_64__)

/* Bytes before the next cache line: streaming stores must be aligned, and whole lines leave the core in one piece. */
static size_t edge(const char *to) { return (size_t)(-(uintptr_t)to & 63); }

__attribute__((target("avx"))) static void copy_avx(char *to, const char *from, size_t bytes) {
    size_t head = edge(to), i;
    if (bytes < STREAM_FRAGMENT_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (i = 0; i + 128 <= bytes; i += 128) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(from + i));
        __m256i b = _mm256_loadu_si256((const __m256i *)(from + i + 32));
        __m256i c = _mm256_loadu_si256((const __m256i *)(from + i + 64));
        __m256i d = _mm256_loadu_si256((const __m256i *)(from + i + 96));
        _mm256_stream_si256((__m256i *)(to + i), a);
        _mm256_stream_si256((__m256i *)(to + i + 32), b);
        _mm256_stream_si256((__m256i *)(to + i + 64), c);
        _mm256_stream_si256((__m256i *)(to + i + 96), d);
    }
    memcpy(to + i, from + i, bytes - i);
}

static void copy_sse2(char *to, const char *from, size_t bytes) {
    size_t head = edge(to), i;
    if (bytes < STREAM_FRAGMENT_BYTES) {
        memcpy(to, from, bytes);
        return;
    }
    memcpy(to, from, head);
    to += head, from += head, bytes -= head;
    for (i = 0; i + 64 <= bytes; i += 64) {
        __m128i a = _mm_loadu_si128((const __m128i *)(from + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(from + i + 16));
        __m128i c = _mm_loadu_si128((const __m128i *)(from + i + 32));
        __m128i d = _mm_loadu_si128((const __m128i *)(from + i + 48));
        _mm_stream_si128((__m128i *)(to + i), a);
        _mm_stream_si128((__m128i *)(to + i + 16), b);
        _mm_stream_si128((__m128i *)(to + i + 32), c);
        _mm_stream_si128((__m128i *)(to + i + 48), d);
    }
    memcpy(to + i, from + i, bytes - i);
}

static copy_range streaming_copy(void) { return __builtin_cpu_supports("avx") ? copy_avx : copy_sse2; }
/* Streamed stores are not ordered by ordinary fences: each thread that made some waits for them itself. */
static void streams_done(void) { _mm_sfence(); }

#else

static copy_range streaming_copy(void) { return copy_plain; }
static void streams_done(void) {}

#endif

/* ------------------------------------------------------------------ copying a batch */

/* One batch, seen as one run of bytes: object after object, in each fragment after fragment. Threads take chunks of
 * that run. On the heap and counted, because a helper that the scheduler starts late may look at it when the call that
 * made it has returned; the caller waits for chunks that were taken, never for a thread to start. */
typedef struct {
    char *pool;               /* address of the data region */
    uint64_t data_offset;     /* where the region starts in the pool */
    const uint64_t *offsets;  /* n: of the objects in the pool */
    const uint64_t *addresses; /* n * f: of the fragments in the engine */
    const uint64_t *sizes;    /* f */
    uint64_t *starts;         /* f + 1: where each fragment starts in its object; the last is the object's size */
    size_t fragments;
    uint64_t total;           /* bytes of the batch */
    int to_pool;
    copy_range copy;
    atomic_uint_fast64_t next; /* first byte that nobody has taken */
    pthread_mutex_t mutex;    /* of the two below */
    pthread_cond_t all_done;
    uint64_t done;            /* bytes copied */
    int users;                /* threads that may still look */
} batch;

static void batch_free(batch *b) {
    pthread_mutex_destroy(&b->mutex);
    pthread_cond_destroy(&b->all_done);
    free(b->starts);
    free(b);
}

static void batch_range(const batch *b, uint64_t position, uint64_t end) {
    const uint64_t object_bytes = b->starts[b->fragments];
    uint64_t object = position / object_bytes, within = position % object_bytes;
    size_t fragment = 0;
    while (b->starts[fragment + 1] <= within)
        fragment++;
    while (position < end) {
        uint64_t inside = within - b->starts[fragment];
        uint64_t bytes = b->sizes[fragment] - inside;
        char *slot = b->pool + (b->offsets[object] - b->data_offset) + within;
        char *engine = (char *)(uintptr_t)(b->addresses[object * b->fragments + fragment] + inside);
        if (bytes > end - position)
            bytes = end - position;
        if (b->to_pool)
            b->copy(slot, engine, bytes);
        else
            b->copy(engine, slot, bytes);
        position += bytes;
        within += bytes;
        if (within == b->starts[fragment + 1] && ++fragment == b->fragments) {
            fragment = 0;
            within = 0;
            object++;
        }
    }
}

static void batch_work(batch *b) {
    for (;;) {
        uint64_t start = atomic_fetch_add(&b->next, CHUNK_BYTES);
        uint64_t end = start + CHUNK_BYTES < b->total ? start + CHUNK_BYTES : b->total;
        if (start >= b->total)
            return;
        batch_range(b, start, end);
        streams_done();
        pthread_mutex_lock(&b->mutex);
        b->done += end - start;
        if (b->done == b->total)
            pthread_cond_signal(&b->all_done);
        pthread_mutex_unlock(&b->mutex);
    }
}

static void batch_leave(batch *b) {
    int last;
    pthread_mutex_lock(&b->mutex);
    last = --b->users == 0;
    pthread_mutex_unlock(&b->mutex);
    if (last)
        batch_free(b);
}

static void *helper(void *argument) {
    batch *b = argument;
    batch_work(b);
    batch_leave(b);
    return NULL;
}

static void batch_run(batch *b, int threads) {
    pthread_attr_t attributes;
    if (threads > 1 && pthread_attr_init(&attributes) == 0) {
        pthread_attr_setdetachstate(&attributes, PTHREAD_CREATE_DETACHED);
        for (int i = 1; i < threads && (uint64_t)i * CHUNK_BYTES < b->total; i++) {
            pthread_t thread;
            pthread_mutex_lock(&b->mutex);
            b->users++;
            pthread_mutex_unlock(&b->mutex);
            if (pthread_create(&thread, &attributes, helper, b) != 0) {
                batch_leave(b); /* no thread to be had: the rest is this one's */
                break;
            }
        }
        pthread_attr_destroy(&attributes);
    }
    batch_work(b);
    pthread_mutex_lock(&b->mutex);
    while (b->done < b->total)
        pthread_cond_wait(&b->all_done, &b->mutex);
    pthread_mutex_unlock(&b->mutex);
}

/* ------------------------------------------------------------------ Python */

/* A contiguous buffer of u64 (or u32) items; sets an exception if it is not. */
static int get_items(PyObject *object, Py_buffer *view, size_t item, const char *name, int flags) {
    if (PyObject_GetBuffer(object, view, flags) < 0)
        return -1;
    if ((size_t)view->len % item != 0 || (uintptr_t)view->buf % item != 0) {
        PyErr_Format(PyExc_ValueError, "%s: not an aligned array of %d-byte items", name, (int)item);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

static batch *batch_new(const uint64_t *offsets, size_t objects, const uint64_t *addresses, const uint64_t *sizes,
                        size_t fragments, uint64_t data_offset, uint64_t data_bytes, uint64_t extent_bytes) {
    batch *b = calloc(1, sizeof *b);
    if (b != NULL)
        b->starts = malloc((fragments + 1) * sizeof *b->starts);
    if (b == NULL || b->starts == NULL) {
        free(b);
        PyErr_NoMemory();
        return NULL;
    }
    pthread_mutex_init(&b->mutex, NULL);
    pthread_cond_init(&b->all_done, NULL);
    b->starts[0] = 0;
    for (size_t f = 0; f < fragments; f++) {
        if (sizes[f] == 0 || sizes[f] > data_bytes - b->starts[f]) {
            PyErr_Format(PyExc_ValueError, "fragment %zu has %llu bytes, more than the pool or none", f,
                         (unsigned long long)sizes[f]);
            batch_free(b);
            return NULL;
        }
        b->starts[f + 1] = b->starts[f] + sizes[f];
    }
    for (size_t i = 0; i < objects; i++) {
        /* An object lies in one extent; below data_offset the difference wraps to a huge number. */
        uint64_t relative = offsets[i] - data_offset;
        uint64_t bytes = b->starts[fragments];
        if (relative >= data_bytes || bytes > extent_bytes || relative % extent_bytes > extent_bytes - bytes) {
            PyErr_Format(PyExc_ValueError, "object %zu: %llu bytes at offset %llu do not lie in an extent", i,
                         (unsigned long long)bytes, (unsigned long long)offsets[i]);
            batch_free(b);
            return NULL;
        }
    }
    for (size_t i = 0; i < objects * fragments; i++)
        if (addresses[i] == 0) {
            PyErr_Format(PyExc_ValueError, "object %zu has a fragment at address 0", i / fragments);
            batch_free(b);
            return NULL;
        }
    b->offsets = offsets;
    b->addresses = addresses;
    b->sizes = sizes;
    b->fragments = fragments;
    b->data_offset = data_offset;
    b->total = b->starts[fragments] * objects;
    b->users = 1;
    return b;
}

static PyObject *move_batch(PyObject *module, PyObject *args) {
    unsigned long long pool, data_offset, data_bytes, extent_bytes;
    PyObject *offsets_object, *addresses_object, *sizes_object, *result = NULL;
    Py_buffer offsets, addresses, sizes;
    int threads, to_pool;
    size_t objects, fragments;
    (void)module;
    if (!PyArg_ParseTuple(args, "KKKKOOOip", &pool, &data_offset, &data_bytes, &extent_bytes, &offsets_object,
                          &addresses_object, &sizes_object, &threads, &to_pool))
        return NULL;
    if (get_items(offsets_object, &offsets, 8, "offsets", PyBUF_SIMPLE) < 0)
        return NULL;
    if (get_items(addresses_object, &addresses, 8, "addresses", PyBUF_SIMPLE) < 0)
        goto release_offsets;
    if (get_items(sizes_object, &sizes, 8, "sizes", PyBUF_SIMPLE) < 0)
        goto release_addresses;
    objects = (size_t)offsets.len / 8;
    fragments = (size_t)sizes.len / 8;
    if (fragments == 0 || (size_t)addresses.len / 8 != objects * fragments || extent_bytes == 0) {
        PyErr_Format(PyExc_ValueError, "%zu objects of %zu fragments do not fit %zu addresses", objects, fragments,
                     (size_t)addresses.len / 8);
    } else {
        batch *b = batch_new(offsets.buf, objects, addresses.buf, sizes.buf, fragments, data_offset, data_bytes,
                             extent_bytes);
        if (b != NULL) {
            b->pool = (char *)(uintptr_t)pool;
            b->to_pool = to_pool;
            b->copy = b->total >= STREAM_BATCH_BYTES ? streaming_copy() : copy_plain;
            Py_BEGIN_ALLOW_THREADS;
            batch_run(b, threads > MAX_THREADS ? MAX_THREADS : threads);
            batch_leave(b);
            /* Store: the bytes are in memory before anyone is told of them. Load: the copy is made before the
             * generations are looked at again. */
            atomic_thread_fence(to_pool ? memory_order_release : memory_order_acquire);
            Py_END_ALLOW_THREADS;
            result = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&sizes);
release_addresses:
    PyBuffer_Release(&addresses);
release_offsets:
    PyBuffer_Release(&offsets);
    return result;
}

static PyObject *compare(PyObject *module, PyObject *args) {
    PyObject *generations_object, *slots_object, *expected_object, *out_object = Py_None, *result = NULL;
    Py_buffer generations, slots, expected, out;
    (void)module;
    if (!PyArg_ParseTuple(args, "OOO|O", &generations_object, &slots_object, &expected_object, &out_object))
        return NULL;
    if (get_items(generations_object, &generations, 8, "generations", PyBUF_SIMPLE) < 0)
        return NULL;
    if (get_items(slots_object, &slots, 4, "slots", PyBUF_SIMPLE) < 0)
        goto release_generations;
    if (get_items(expected_object, &expected, 8, "expected generations", PyBUF_SIMPLE) < 0)
        goto release_slots;
    out.buf = NULL;
    if (out_object != Py_None && get_items(out_object, &out, 1, "result", PyBUF_WRITABLE) < 0)
        goto release_expected;
    {
        const _Atomic uint64_t *present = generations.buf;
        const uint64_t count = (uint64_t)generations.len / 8;
        const size_t wanted = (size_t)slots.len / 4;
        const uint32_t *slot = slots.buf;
        const uint64_t *generation = expected.buf;
        if ((size_t)expected.len / 8 != wanted || (out.buf != NULL && (size_t)out.len != wanted)) {
            PyErr_Format(PyExc_ValueError, "%zu slots and %zu generations", wanted, (size_t)expected.len / 8);
        } else {
            int all = 1;
            atomic_thread_fence(memory_order_acquire);
            for (size_t i = 0; i < wanted; i++) {
                int same = slot[i] < count &&
                           atomic_load_explicit(&present[slot[i]], memory_order_relaxed) == generation[i];
                all &= same;
                if (out.buf != NULL)
                    ((uint8_t *)out.buf)[i] = (uint8_t)same;
            }
            result = PyBool_FromLong(all);
        }
    }
    if (out.buf != NULL)
        PyBuffer_Release(&out);
release_expected:
    PyBuffer_Release(&expected);
release_slots:
    PyBuffer_Release(&slots);
release_generations:
    PyBuffer_Release(&generations);
    return result;
}

static PyMethodDef methods[] = {
    {"move_batch", move_batch, METH_VARARGS,
     "move_batch(pool, data_offset, data_bytes, extent_bytes, offsets, addresses, sizes, threads, to_pool)\n\n"
     "Copy n objects of f fragments between engine memory and the pool. ValueError, and no byte moved, if any\n"
     "object does not lie in an extent of the data region, which is mapped at address pool."},
    {"compare", compare, METH_VARARGS,
     "compare(generations, slots, expected, result=None) -> bool\n\n"
     "Whether generations[slots] == expected everywhere, and where, into a u8 array; False for slots out of range."},
    {NULL, NULL, 0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_core._native", "Copying and comparing without the GIL.", 0, methods,
    NULL, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
