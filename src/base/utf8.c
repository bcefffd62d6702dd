/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8 one step at a time. Source: The Unicode Standard, table 3-7 (well-formed bytes). */
#include "base/utf8.h"

#include <string.h>

static struct utf8_step step_invalid(size_t num_bytes, uint8_t is_cut)
{
    return (struct utf8_step){
        .code_point = UTF8_REPLACEMENT, .num_bytes = (uint8_t)num_bytes, .is_cut = is_cut};
}

struct utf8_step utf8_next(const char *text, size_t num_bytes)
{
    const unsigned char *bytes = (const unsigned char *)text;
    uint32_t lead = bytes[0];
    if (lead < 0x80) {
        return (struct utf8_step){.code_point = lead, .num_bytes = 1, .is_valid = 1};
    }
    /* The second byte's range is what keeps out overlong forms, surrogates and values too large. */
    uint32_t lowest = 0x80, highest = 0xbf, code_point;
    size_t length;
    if (lead >= 0xc2 && lead <= 0xdf) {
        length = 2;
        code_point = lead & 0x1f;
    } else if (lead >= 0xe0 && lead <= 0xef) {
        length = 3;
        code_point = lead & 0x0f;
        lowest = lead == 0xe0 ? 0xa0 : lowest;
        highest = lead == 0xed ? 0x9f : highest;
    } else if (lead >= 0xf0 && lead <= 0xf4) {
        length = 4;
        code_point = lead & 0x07;
        lowest = lead == 0xf0 ? 0x90 : lowest;
        highest = lead == 0xf4 ? 0x8f : highest;
    } else {
        return step_invalid(1, 0);
    }
    for (size_t i = 1; i < length; i++) {
        if (i == num_bytes) {
            return step_invalid(i, 1);
        }
        if (bytes[i] < lowest || bytes[i] > highest) {
            return step_invalid(i, 0);
        }
        code_point = code_point << 6 | (bytes[i] & 0x3fu);
        lowest = 0x80;
        highest = 0xbf;
    }
    return (struct utf8_step){
        .code_point = code_point, .num_bytes = (uint8_t)length, .is_valid = 1};
}

size_t utf8_write(uint32_t code_point, char *text)
{
    if (code_point < 0x80) {
        text[0] = (char)code_point;
        return 1;
    }
    if (code_point < 0x800) {
        text[0] = (char)(0xc0 | code_point >> 6);
        text[1] = (char)(0x80 | (code_point & 0x3f));
        return 2;
    }
    if (code_point < 0x10000) {
        text[0] = (char)(0xe0 | code_point >> 12);
        text[1] = (char)(0x80 | (code_point >> 6 & 0x3f));
        text[2] = (char)(0x80 | (code_point & 0x3f));
        return 3;
    }
    text[0] = (char)(0xf0 | code_point >> 18);
    text[1] = (char)(0x80 | (code_point >> 12 & 0x3f));
    text[2] = (char)(0x80 | (code_point >> 6 & 0x3f));
    text[3] = (char)(0x80 | (code_point & 0x3f));
    return 4;
}

size_t utf8_ascii_prefix(const char *text, size_t num_bytes)
{
    size_t i = 0;
    for (; num_bytes - i >= sizeof(uint64_t); i += sizeof(uint64_t)) {
        uint64_t word;
        memcpy(&word, text + i, sizeof(word));
        if ((word & UINT64_C(0x8080808080808080)) != 0) {
            break;
        }
    }
    while (i < num_bytes && (unsigned char)text[i] < 0x80) {
        i++;
    }
    return i;
}

size_t utf8_valid_prefix(const char *text, size_t num_bytes)
{
    size_t i = 0;
    while (i < num_bytes) {
        if ((unsigned char)text[i] < 0x80) {
            i += utf8_ascii_prefix(text + i, num_bytes - i);
            continue;
        }
        struct utf8_step step = utf8_next(text + i, num_bytes - i);
        if (!step.is_valid) {
            break;
        }
        i += step.num_bytes;
    }
    return i;
}
