/* The functions of the CUDA runtime that Maru calls, with the documented results, for machines without a GPU.
 *
 * It refuses what the real one refuses (ranges that overlap, ranges that are not there, copies across the edge of a
 * registration), remembers everything, and fails on demand. "Device addresses" are the host's plus DEVICE_DELTA.
 */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <time.h>

#define MAX 65536
#define DEVICE_DELTA 0x100000000000ull
enum { SUCCESS = 0, INVALID = 1, ALREADY = 712, NOT_REGISTERED = 713, INVALID_DEVICE = 101, NEWER_DRIVER = 36,
       CAPTURE_UNSUPPORTED = 900 };

typedef struct { uintptr_t start; size_t bytes; int device; unsigned flags; } Range;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static Range ranges[MAX];
static int count, most, registered, unregistered, version = 13000, devices = 2;
static uint64_t registered_bytes;
static char failing[64];
static int failing_code, failing_after = -1, sticky;
static unsigned slow_us;
static char calls[MAX];
static int capturing;
static _Thread_local int last, device, capture_mode;

static int done(int code) {
    if (code) last = code;
    return code;
}

/* Whether this call is the one that is to fail. */
static int fails(const char *name, int *code) {
    int result = 0;
    pthread_mutex_lock(&lock);
    if (strlen(calls) + strlen(name) + 2 < MAX) { strcat(calls, name); strcat(calls, "\n"); }
    if (sticky) { *code = sticky; result = 1; }
    else if (!strcmp(name, failing) && failing_after-- == 0) { *code = failing_code; result = 1; }
    pthread_mutex_unlock(&lock);
    return result;
}
#define MAY_FAIL int code; if (fails(__func__, &code)) return done(code)

/* ---- for the test */
void recorder_reset(void) {
    pthread_mutex_lock(&lock);
    count = most = registered = unregistered = sticky = 0; registered_bytes = 0; failing[0] = 0; failing_after = -1;
    slow_us = 0; version = 13000; devices = 2; calls[0] = 0;
    pthread_mutex_unlock(&lock);
    last = device = capture_mode = capturing = 0;
}
/* Another thread captures a graph: calls that allocate or lock memory are refused to threads that have not said otherwise. */
void recorder_capture(int whether) { capturing = whether; }
/* The call number `after` (0: the next) of this function fails with `code`. */
void recorder_fail(const char *name, int code, int after) {
    pthread_mutex_lock(&lock);
    snprintf(failing, sizeof failing, "%s", name); failing_code = code; failing_after = after;
    pthread_mutex_unlock(&lock);
}
void recorder_break(int code) { sticky = code; }
void recorder_slow(unsigned us) { slow_us = us; }
void recorder_version(int v) { version = v; }
void recorder_devices(int n) { devices = n; }
int recorder_registered(void) { return registered; }
int recorder_unregistered(void) { return unregistered; }
const char *recorder_calls(void) { return calls; }
int recorder_ranges(uint64_t *out) {
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++) {
        out[4 * i] = ranges[i].start; out[4 * i + 1] = ranges[i].bytes;
        out[4 * i + 2] = (uint64_t)ranges[i].device; out[4 * i + 3] = ranges[i].flags;
    }
    int n = count;
    pthread_mutex_unlock(&lock);
    return n;
}

/* ---- the runtime */
int cudaGetLastError(void) { int code = last; last = sticky; return code; }
const char *cudaGetErrorString(int code) {
    switch (code) {
    case 2: return "out of memory";
    case INVALID: return "invalid argument";
    case ALREADY: return "part or all of the requested memory range is already mapped";
    case NOT_REGISTERED: return "pointer does not correspond to a registered memory region";
    default: return "another error";
    }
}
int cudaRuntimeGetVersion(int *v) { MAY_FAIL; *v = version; return SUCCESS; }
int cudaGetDeviceCount(int *n) { MAY_FAIL; *n = devices; return devices ? SUCCESS : done(100); }
int cudaGetDevice(int *d) { MAY_FAIL; *d = device; return SUCCESS; }
int cudaSetDevice(int d) {
    MAY_FAIL;
    if (d < 0 || d >= devices) return done(INVALID_DEVICE);
    device = d;
    return SUCCESS;
}
int cudaThreadExchangeStreamCaptureMode(int *mode) {
    MAY_FAIL;
    if (*mode < 0 || *mode > 2) return done(INVALID);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return SUCCESS;
}
int cudaDeviceGetPCIBusId(char *text, int size, int d) {
    MAY_FAIL;
    if (d < 0 || d >= devices) return done(INVALID_DEVICE);
    snprintf(text, (size_t)size, "0000:%02X:00.0", 0x1A + d);
    return SUCCESS;
}

int cudaHostRegister(void *pointer, size_t bytes, unsigned flags) {
    MAY_FAIL;
    uintptr_t start = (uintptr_t)pointer;
    if (slow_us) {
        struct timespec t = {slow_us / 1000000, (long)(slow_us % 1000000) * 1000};
        nanosleep(&t, NULL);
    }
    if (!start || !bytes || flags > 15) return done(INVALID);
    if (capturing && capture_mode != 2) return done(CAPTURE_UNSUPPORTED);
    /* As the driver does: bring every page in. */
    for (size_t i = 0; i < bytes; i += 4096) { volatile char *p = (char *)pointer + i; *p = *p; }
    pthread_mutex_lock(&lock);
    int result = SUCCESS;
    for (int i = 0; i < count; i++)
        if (start < ranges[i].start + ranges[i].bytes && ranges[i].start < start + bytes) result = ALREADY;
    if (!result && count < MAX) {
        ranges[count++] = (Range){start, bytes, device, flags};
        registered++; registered_bytes += bytes;
    }
    pthread_mutex_unlock(&lock);
    return done(result);
}
int cudaHostUnregister(void *pointer) {
    MAY_FAIL;
    int result = NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count; i++)
        if (ranges[i].start == (uintptr_t)pointer) {
            ranges[i] = ranges[--count];
            unregistered++;
            result = SUCCESS;
            break;
        }
    pthread_mutex_unlock(&lock);
    return done(result);
}
int cudaHostGetDevicePointer(void **out, void *pointer, unsigned flags) {
    MAY_FAIL;
    int result = flags ? INVALID : NOT_REGISTERED;
    pthread_mutex_lock(&lock);
    for (int i = 0; i < count && !flags; i++)
        if ((uintptr_t)pointer - ranges[i].start < ranges[i].bytes && ranges[i].flags & 2) {
            *out = (char *)pointer + DEVICE_DELTA;
            result = SUCCESS;
        }
    pthread_mutex_unlock(&lock);
    return done(result);
}

/* A copy's end: a device address of a registration, a registered or a plain address. 0: it crosses an edge. */
static void *resolve(uintptr_t start, size_t bytes) {
    for (int i = 0; i < count; i++)
        for (int side = 0; side < 2; side++) {
            uintptr_t from = ranges[i].start + (side ? DEVICE_DELTA : 0);
            if (start < from + ranges[i].bytes && from < start + bytes) {
                if (start < from || start + bytes > from + ranges[i].bytes) return NULL;
                return (void *)(start - (side ? DEVICE_DELTA : 0));
            }
        }
    return (void *)start;
}
static int copy(uintptr_t target, uintptr_t source, size_t bytes) {
    pthread_mutex_lock(&lock);
    void *to = resolve(target, bytes), *from = resolve(source, bytes);
    pthread_mutex_unlock(&lock);
    if (!to || !from) return INVALID;
    memmove(to, from, bytes);
    return SUCCESS;
}
int cudaMemcpyAsync(void *target, const void *source, size_t bytes, int kind, void *stream) {
    MAY_FAIL;
    (void)stream;
    if (kind != 4) return done(INVALID);
    return done(copy((uintptr_t)target, (uintptr_t)source, bytes));
}

typedef struct { int order, source_type, source_id, target_type, target_id; unsigned flags; } Attributes;

/* CUDA 12.8 and 13 differ by one argument before the stream; `version` says which this is. */
int cudaMemcpyBatchAsync(void **targets, const void **sources, const size_t *sizes, size_t n, Attributes *attributes,
                         size_t *indices, size_t attribute_count, void *eighth, void *ninth) {
    MAY_FAIL;
    void *stream = version < 13000 ? ninth : eighth;
    if (!n || attribute_count != 1 || indices[0] != 0 || attributes->order < 1 || attributes->order > 3 || !stream)
        return done(INVALID);
    if (version < 13000) *(size_t *)eighth = SIZE_MAX;
    for (size_t i = 0; i < n; i++) {
        int result = sizes[i] ? copy((uintptr_t)targets[i], (uintptr_t)sources[i], sizes[i]) : INVALID;
        if (result) {
            if (version < 13000) *(size_t *)eighth = i;
            return done(result);
        }
    }
    return SUCCESS;
}
