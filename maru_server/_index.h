/* The index of a prefix tree: page hash to row, open addressing with linear probing, no object per page.
 *
 * A table is an array of 2^k 64-bit entries, 0 where empty, else tag << 32 | row + 1. The tag is a keyed 32-bit hash of the page
 * hash and its low bits are the entry's home, so that growing and deleting never look at the page hashes, which lie
 * in a column of their own (`hashes`, 32 bytes a row). An entry is taken for a page only if all 32 bytes agree.
 * The key keeps a client from choosing page hashes that share a home.
 */
#ifndef MARU_INDEX_H
#define MARU_INDEX_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define HASH_BYTES 32

typedef struct {
    const uint64_t *entries;
    size_t mask; /* entries - 1 */
    const unsigned char *hashes;
    size_t rows; /* rows that `hashes` has */
    uint64_t key[4];
} MaruIndex;

static inline uint64_t maru_mix(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

static inline uint32_t maru_tag(const uint64_t key[4], const void *hash) {
    uint64_t word[4];
    memcpy(word, hash, HASH_BYTES);
    const uint64_t mixed = maru_mix(word[0] ^ key[0], word[1] ^ key[1]) ^ maru_mix(word[2] ^ key[2], word[3] ^ key[3]);
    return (uint32_t)(mixed ^ mixed >> 32);
}

/* The row of a page hash, -1 where it is not known, -2 where the table contradicts `hashes`. */
static inline long long maru_find(const MaruIndex *index, uint32_t tag, const void *hash) {
    for (size_t at = tag & index->mask, steps = 0; steps <= index->mask; at = (at + 1) & index->mask, steps++) {
        const uint64_t entry = index->entries[at];
        if (!entry)
            return -1;
        if ((uint32_t)(entry >> 32) == tag) {
            const size_t row = (uint32_t)entry - 1u;
            if (row >= index->rows)
                return -2;
            if (!memcmp(index->hashes + row * HASH_BYTES, hash, HASH_BYTES))
                return (long long)row;
        }
    }
    return -1;
}

/* Tags of a whole batch, with the entries on their way into the cache: what a lookup waits for is memory. */
static inline void maru_tags(const MaruIndex *index, const char *hashes, size_t count, uint32_t *tags) {
    for (size_t i = 0; i < count; i++) {
        tags[i] = maru_tag(index->key, hashes + i * HASH_BYTES);
        __builtin_prefetch(&index->entries[tags[i] & index->mask]);
    }
}

#endif
