/* SPDX-License-Identifier: Apache-2.0 */
/* Messages quote paths, tensor names and JSON keys that come from files. Here they are made safe to
 * print: a file name with an escape sequence must not reach the terminal as one. */
#include "base/line.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"

#define MAX_FORMATTED_BYTES 8192 /* a path has up to 4,096 */
#define GAP "..."

/* C0, DEL, C1 and the two Unicode line breaks. */
static bool is_control(uint32_t code_point)
{
    return code_point < 0x20 || (code_point >= 0x7f && code_point < 0xa0) || code_point == 0x2028 ||
           code_point == 0x2029;
}

/* Replaces in place what cannot be printed, byte for byte, so that the length stays. */
static void make_printable(char *text, size_t num_bytes)
{
    struct utf8_step step;
    for (size_t offset = 0; offset < num_bytes; offset += step.num_bytes) {
        step = utf8_next(text + offset, num_bytes - offset);
        if (!step.is_valid || is_control(step.code_point)) {
            memset(text + offset, '?', step.num_bytes);
        }
    }
}

/* Whether a character of valid UTF-8 begins here, rather than goes on. */
static bool is_character_start(char byte)
{
    return ((unsigned char)byte & 0xc0) != 0x80;
}

void line_format(char *line, size_t line_bytes, const char *format, va_list args)
{
    /* Formatted aside, because the arguments may point into `line` (a message that wraps itself)
     * and because a text that is too long keeps its end. */
    char text[MAX_FORMATTED_BYTES];
    int formatted_bytes = vsnprintf(text, sizeof(text), format, args);
    if (formatted_bytes < 0) {
        line[0] = '\0';
        return;
    }
    size_t text_bytes = (size_t)formatted_bytes;
    text_bytes = text_bytes < sizeof(text) ? text_bytes : sizeof(text) - 1;
    make_printable(text, text_bytes);
    if (text_bytes < line_bytes) {
        memcpy(line, text, text_bytes + 1);
        return;
    }
    const size_t gap_bytes = sizeof(GAP) - 1;
    if (line_bytes <= gap_bytes) {
        line[0] = '\0';
        return;
    }
    size_t kept_bytes = line_bytes - 1 - gap_bytes;
    size_t head_bytes = kept_bytes / 3;
    size_t tail = text_bytes - (kept_bytes - head_bytes);
    while (head_bytes > 0 && !is_character_start(text[head_bytes])) {
        head_bytes--;
    }
    while (tail < text_bytes && !is_character_start(text[tail])) {
        tail++;
    }
    memcpy(line, text, head_bytes);
    memcpy(line + head_bytes, GAP, gap_bytes);
    memcpy(line + head_bytes + gap_bytes, text + tail, text_bytes - tail);
    line[head_bytes + gap_bytes + text_bytes - tail] = '\0';
}
