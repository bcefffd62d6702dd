/* SPDX-License-Identifier: Apache-2.0 */
#include "cli/html_writer.h"

#include <stdarg.h>
#include <stdbool.h>
#include <string.h>

#include "cli/output.h"

void html_markup(FILE *file, const char *format, ...)
{
    va_list arguments;

    va_start(arguments, format);
    vfprintf(file, format, arguments);
    va_end(arguments);
}

/* NULL: the character stands for itself. */
static const char *entity_of(char character)
{
    switch (character) {
    case '&':
        return "&amp;";
    case '<':
        return "&lt;";
    case '>':
        return "&gt;";
    case '"':
        return "&quot;";
    case '\'':
        return "&#39;";
    default:
        return NULL;
    }
}

void html_text(FILE *file, const char *text)
{
    size_t num_bytes = strlen(text);

    for (size_t i = 0; i < num_bytes;) {
        size_t length = output_character_bytes(text + i, num_bytes - i);
        unsigned char first = (unsigned char)text[i];
        /* U+0080..U+009F are control characters too. */
        bool is_control = (first < 0x20 && first != '\n' && first != '\t') || first == 0x7f ||
                          (length == 2 && first == 0xc2 && (unsigned char)text[i + 1] < 0xa0);
        const char *entity = entity_of(text[i]);
        if (length == 0 || is_control) {
            fputs("&#xFFFD;", file);
        } else if (entity != NULL) {
            fputs(entity, file);
        } else {
            fwrite(text + i, 1, length, file);
        }
        i += length == 0 ? 1 : length;
    }
}
