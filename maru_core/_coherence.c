/* Cache lines written back and dropped by hand, for memory that hosts share and their caches do not agree on.
 *
 * Only instructions are here, and which of them this CPU has. When each is needed, and in which order with the fences, is
 * maru_core/pool/coherence.py, which refuses such pools where this was not built: silence would be wrong bytes.
 *
 * x86-64 (Intel SDM vol. 2): CLWB writes a dirty line back and may keep it; CLFLUSHOPT and CLFLUSH write it back and drop it.
 * CLWB and CLFLUSHOPT are ordered with older stores to the same line and with fences, and with nothing else: not with each
 * other, not with loads. aarch64: DC CVAC cleans a line to the point of coherency, DC CIVAC cleans and drops it; user space
 * may where the kernel sets SCTLR_EL1.UCI, as Linux does.
 *
 * It is given addresses as numbers and touches what is mapped there; its caller knows what that is.
 *
 * Limited API of Python 3.11: one build serves every later Python.
 */
#define PY_SSIZE_T_CLEAN
#define _GNU_SOURCE
#include <Python.h>

#include <stdint.h>
#include <string.h>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <setjmp.h>
#include <signal.h>
#else
#error "no instructions are known that write back the cache lines of this CPU: pools with coherence=software are refused"
#endif

/* In the order in which they are preferred for writing back. */
enum { CLWB, CLFLUSHOPT, CLFLUSH, DC_CVAC, DC_CIVAC, KINDS };

typedef struct {
    const char *name;
    int cleans; /* may be used to write back */
    int drops;  /* may be used to invalidate */
    int here;   /* this CPU has it */
} kind;

static kind kinds[KINDS] = {
    {"clwb", 1, 0, 0},    {"clflushopt", 1, 1, 0}, {"clflush", 1, 1, 0},
    {"dc cvac", 1, 0, 0}, {"dc civac", 1, 1, 0},
};
static size_t line_bytes;

/* ------------------------------------------------------------------ one run of lines */

#if defined(__x86_64__)

/* Each named in assembly, so that the file needs no flags of one CPU: whether it may run is asked at start. */
static void line_clwb(char *p) { __asm__ volatile("clwb %0" : "+m"(*(volatile char *)p)); }
static void line_clflushopt(char *p) { __asm__ volatile("clflushopt %0" : "+m"(*(volatile char *)p)); }
static void line_clflush(char *p) { __asm__ volatile("clflush %0" : "+m"(*(volatile char *)p)); }

static void probe(void) {
    unsigned a, b, c, d;
    if (__get_cpuid(1, &a, &b, &c, &d) && (d >> 19 & 1)) {
        kinds[CLFLUSH].here = 1;
        line_bytes = (b >> 8 & 0xff) * 8;
    }
    if (__get_cpuid_count(7, 0, &a, &b, &c, &d)) {
        kinds[CLFLUSHOPT].here = b >> 23 & 1;
        kinds[CLWB].here = b >> 24 & 1;
    }
}

/* What was written back before comes before every store after. */
static void fence_stores(void) { _mm_sfence(); }
/* Loads, stores and flushes before come before loads, stores and flushes after. */
static void fence_all(void) { _mm_mfence(); }

#else

static void line_cvac(char *p) { __asm__ volatile("dc cvac, %0" : : "r"(p) : "memory"); }
static void line_civac(char *p) { __asm__ volatile("dc civac, %0" : : "r"(p) : "memory"); }

static sigjmp_buf refused;
static void on_refusal(int number) {
    (void)number;
    siglongjmp(refused, 1);
}

/* Whether the kernel lets user space do it: the only way to know is to try. */
static int allowed(void (*line)(char *)) {
    static _Alignas(2048) char victim[2048];
    struct sigaction now = {0}, before;
    volatile int good = 0;
    now.sa_handler = on_refusal;
    if (sigaction(SIGILL, &now, &before) != 0)
        return 0;
    if (sigsetjmp(refused, 1) == 0) {
        line(victim);
        good = 1;
    }
    sigaction(SIGILL, &before, NULL);
    return good;
}

static void probe(void) {
    uint64_t type;
    __asm__("mrs %0, ctr_el0" : "=r"(type));
    line_bytes = (size_t)4 << (type >> 16 & 0xf); /* DminLine: log2 of words */
    kinds[DC_CVAC].here = allowed(line_cvac);
    kinds[DC_CIVAC].here = allowed(line_civac);
}

static void fence_stores(void) { __asm__ volatile("dsb sy" : : : "memory"); }
static void fence_all(void) { __asm__ volatile("dsb sy" : : : "memory"); }

#endif

/* One loop for each instruction: the choice is made once a call and not once a line. ``last`` is the line done just before:
 * neighbours share lines, and all their bytes were written before this call. */
#define RUN_OF(line)                                                                    \
    static uintptr_t run_##line(uintptr_t first, uintptr_t end, uintptr_t last) {      \
        uintptr_t p = first & ~(uintptr_t)(line_bytes - 1);                             \
        if (p == last)                                                                  \
            p += line_bytes;                                                            \
        for (; p < end; p += line_bytes)                                                \
            line((char *)p);                                                            \
        return end > first ? (end - 1) & ~(uintptr_t)(line_bytes - 1) : last;           \
    }

typedef uintptr_t (*run)(uintptr_t first, uintptr_t end, uintptr_t last);

#if defined(__x86_64__)
RUN_OF(line_clwb)
RUN_OF(line_clflushopt)
RUN_OF(line_clflush)
static const run runs[KINDS] = {run_line_clwb, run_line_clflushopt, run_line_clflush, NULL, NULL};
#else
RUN_OF(line_cvac)
RUN_OF(line_civac)
static const run runs[KINDS] = {NULL, NULL, NULL, run_line_cvac, run_line_civac};
#endif

/* ------------------------------------------------------------------ Python */

static run find(const char *name) {
    for (int i = 0; i < KINDS; i++)
        if (kinds[i].here && strcmp(kinds[i].name, name) == 0)
            return runs[i];
    PyErr_Format(PyExc_ValueError, "this CPU has no instruction %s for cache lines", name);
    return NULL;
}

static int sane(unsigned long long address, unsigned long long nbytes) {
    if (address != 0 && nbytes <= UINTPTR_MAX - address)
        return 1;
    PyErr_Format(PyExc_ValueError, "%llu bytes at address %llu are no memory", nbytes, address);
    return 0;
}

static PyObject *lines(PyObject *module, PyObject *args) {
    const char *name;
    unsigned long long address, nbytes;
    run line_run;
    (void)module;
    if (!PyArg_ParseTuple(args, "sKK", &name, &address, &nbytes) || (line_run = find(name)) == NULL ||
        !sane(address, nbytes))
        return NULL;
    Py_BEGIN_ALLOW_THREADS;
    line_run((uintptr_t)address, (uintptr_t)(address + nbytes), 0);
    Py_END_ALLOW_THREADS;
    return Py_NewRef(Py_None);
}

static PyObject *lines_many(PyObject *module, PyObject *args) {
    const char *name;
    PyObject *addresses_object, *result = NULL;
    Py_buffer addresses;
    unsigned long long nbytes;
    run line_run;
    (void)module;
    if (!PyArg_ParseTuple(args, "sOK", &name, &addresses_object, &nbytes) || (line_run = find(name)) == NULL)
        return NULL;
    if (PyObject_GetBuffer(addresses_object, &addresses, PyBUF_SIMPLE) < 0)
        return NULL;
    if (addresses.len % 8 != 0 || (uintptr_t)addresses.buf % 8 != 0) {
        PyErr_SetString(PyExc_ValueError, "addresses: not an aligned array of 8-byte items");
    } else {
        const uint64_t *address = addresses.buf;
        const size_t count = (size_t)addresses.len / 8;
        size_t i = 0;
        while (i < count && sane(address[i], nbytes))
            i++;
        if (i == count) {
            uintptr_t last = 0;
            Py_BEGIN_ALLOW_THREADS;
            for (i = 0; i < count; i++)
                last = line_run((uintptr_t)address[i], (uintptr_t)(address[i] + nbytes), last);
            Py_END_ALLOW_THREADS;
            result = Py_NewRef(Py_None);
        }
    }
    PyBuffer_Release(&addresses);
    return result;
}

static PyObject *store_fence(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    fence_stores();
    return Py_NewRef(Py_None);
}

static PyObject *full_fence(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    fence_all();
    return Py_NewRef(Py_None);
}

static PyMethodDef methods[] = {
    {"lines", lines, METH_VARARGS,
     "lines(instruction, address, nbytes)\n\n"
     "Run the instruction on every cache line that holds a byte of the range. No fence."},
    {"lines_many", lines_many, METH_VARARGS,
     "lines_many(instruction, addresses, nbytes)\n\n"
     "The same for many ranges of nbytes each, addresses an array of u64; ValueError, and nothing done, if any is no memory."},
    {"store_fence", store_fence, METH_NOARGS, "store_fence()\n\nSFENCE, or DSB."},
    {"full_fence", full_fence, METH_NOARGS, "full_fence()\n\nMFENCE, or DSB."},
    {NULL, NULL, 0, NULL},
};

/* A tuple of the names of the instructions that this CPU has for one purpose, the best first. */
static int add_names(PyObject *module, const char *attribute, int dropping) {
    PyObject *names = PyList_New(0), *tuple = NULL;
    for (int i = 0; names != NULL && i < KINDS; i++)
        if (kinds[i].here && (dropping ? kinds[i].drops : kinds[i].cleans)) {
            PyObject *name = PyUnicode_FromString(kinds[i].name);
            if (name == NULL || PyList_Append(names, name) < 0)
                Py_CLEAR(names);
            Py_XDECREF(name);
        }
    if (names != NULL)
        tuple = PyList_AsTuple(names);
    Py_XDECREF(names);
    if (tuple == NULL)
        return -1;
    int code = PyModule_AddObjectRef(module, attribute, tuple);
    Py_DECREF(tuple);
    return code;
}

static int start(PyObject *module) {
    probe();
    if (line_bytes == 0 || (line_bytes & (line_bytes - 1)) != 0) {
        /* Hypervisors have been seen to say 0: no instruction is of use then. */
        for (int i = 0; i < KINDS; i++)
            kinds[i].here = 0;
        line_bytes = 64;
    }
    if (PyModule_AddIntConstant(module, "LINE_BYTES", (long)line_bytes) < 0)
        return -1;
    return add_names(module, "CLEANING", 0) < 0 || add_names(module, "DROPPING", 1) < 0 ? -1 : 0;
}

static PyModuleDef_Slot slots[] = {{Py_mod_exec, (void *)start}, {0, NULL}};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT, "maru_core._coherence", "Cache lines written back and dropped by hand.", 0, methods,
    slots, NULL, NULL, NULL,
};

PyMODINIT_FUNC PyInit__coherence(void) { return PyModuleDef_Init(&definition); }
