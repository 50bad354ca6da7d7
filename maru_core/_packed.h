/* Messages as msgspec packs them (MessagePack), read and written without an object for each field.
 *
 * Only what plain messages are made of: unsigned numbers, byte strings and text known beforehand. Whatever else is there, the caller leaves the
 * message to msgspec. A reader takes nothing, and returns 0, where what follows is something else or ends too soon.
 */
#ifndef MARU_PACKED_H
#define MARU_PACKED_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef struct {
    const unsigned char *at, *end;
} Reader;

static inline int take(Reader *reader, const void *bytes, size_t count) {
    if ((size_t)(reader->end - reader->at) < count || memcmp(reader->at, bytes, count))
        return 0;
    reader->at += count;
    return 1;
}

/* So many bytes, big-endian. */
static inline int take_number(Reader *reader, size_t bytes, uint64_t *number) {
    if ((size_t)(reader->end - reader->at) < bytes)
        return 0;
    *number = 0;
    while (bytes--)
        *number = *number << 8 | *reader->at++;
    return 1;
}

static inline int take_unsigned(Reader *reader, uint64_t *number) {
    if (reader->at == reader->end)
        return 0;
    const unsigned char head = *reader->at++;
    if (head < 0x80) {
        *number = head;
        return 1;
    }
    return head >= 0xcc && head <= 0xcf && take_number(reader, (size_t)1 << (head - 0xcc), number);
}

static inline int take_bytes(Reader *reader, const unsigned char **bytes, size_t *count) {
    uint64_t length;
    if (reader->at == reader->end)
        return 0;
    const unsigned char head = *reader->at++;
    if (head < 0xc4 || head > 0xc6 || !take_number(reader, (size_t)1 << (head - 0xc4), &length) ||
        length > (uint64_t)(reader->end - reader->at))
        return 0;
    *bytes = reader->at;
    *count = (size_t)length;
    reader->at += length;
    return 1;
}

/* Text of 1 to 31 ASCII characters. */
static inline int take_word(Reader *reader, const unsigned char **text, size_t *count) {
    if (reader->at == reader->end)
        return 0;
    const unsigned char head = *reader->at++;
    *count = head & 31u;
    if (head < 0xa1 || head > 0xbf || (size_t)(reader->end - reader->at) < *count)
        return 0;
    *text = reader->at;
    for (size_t i = 0; i < *count; i++)
        if (*reader->at++ & 0x80)
            return 0;
    return 1;
}

static inline size_t unsigned_bytes(uint64_t number) {
    return number < 0x80 ? 1 : number <= 0xff ? 2 : number <= 0xffff ? 3 : number <= 0xffffffff ? 5 : 9;
}

static inline size_t bytes_bytes(size_t count) { return count + (count <= 0xff ? 2 : count <= 0xffff ? 3 : 5); }

static inline unsigned char *put_number(unsigned char *at, unsigned char head, size_t bytes, uint64_t number) {
    *at++ = head;
    while (bytes--)
        *at++ = (unsigned char)(number >> 8 * bytes);
    return at;
}

/* As short as it can be, as msgspec does it. */
static inline unsigned char *put_unsigned(unsigned char *at, uint64_t number) {
    if (number < 0x80)
        return put_number(at, (unsigned char)number, 0, 0);
    if (number <= 0xff)
        return put_number(at, 0xcc, 1, number);
    if (number <= 0xffff)
        return put_number(at, 0xcd, 2, number);
    return number <= 0xffffffff ? put_number(at, 0xce, 4, number) : put_number(at, 0xcf, 8, number);
}

static inline unsigned char *put_bytes_head(unsigned char *at, size_t count) {
    if (count <= 0xff)
        return put_number(at, 0xc4, 1, count);
    return count <= 0xffff ? put_number(at, 0xc5, 2, count) : put_number(at, 0xc6, 4, count);
}

/* What is always the same, as it stands in a literal. */
#define PUT_TEXT(at, text) ((unsigned char *)memcpy(at, text, sizeof(text) - 1) + sizeof(text) - 1)

#endif
