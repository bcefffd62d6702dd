/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8 as RFC 3629 has it: no overlong forms, no surrogates, nothing above U+10FFFF. */
#ifndef IMBREX_BASE_UTF8_H
#define IMBREX_BASE_UTF8_H

#include <stddef.h>
#include <stdint.h>

#define UTF8_MAX_BYTES 4

#define UTF8_REPLACEMENT 0xfffdu /* U+FFFD */
#define UTF8_REPLACEMENT_BYTES 3 /* of U+FFFD in UTF-8 */

/* One code point of a text, or the bytes that one U+FFFD replaces: the longest start of a character
 * that is there (Unicode's "maximal subpart" practice). */
struct utf8_step {
    uint32_t code_point; /* U+FFFD if invalid */
    uint8_t num_bytes;   /* consumed, >= 1 */
    uint8_t is_valid;
    uint8_t is_cut; /* invalid only because the text ends here */
};

/* The step at text[0, num_bytes), num_bytes >= 1. */
struct utf8_step utf8_next(const char *text, size_t num_bytes);

/* Writes a code point (a scalar value) into text[UTF8_MAX_BYTES]; returns the bytes written. (Not
 * "encode": jansson has that name, and its static library is linked beside this.) */
size_t utf8_write(uint32_t code_point, char *text);

/* Bytes at the start of the text that are ASCII. */
size_t utf8_ascii_prefix(const char *text, size_t num_bytes);

/* Bytes at the start of the text that are valid: num_bytes if all are. */
size_t utf8_valid_prefix(const char *text, size_t num_bytes);

#endif
