/* SPDX-License-Identifier: Apache-2.0 */
/* One printable line: what error messages and log lines are made of. */
#ifndef IMBREX_BASE_LINE_H
#define IMBREX_BASE_LINE_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

/* Formats into line[line_bytes] (line_bytes >= 1), always NUL-terminated. The result is valid UTF-8
 * without control characters: each byte that is not turns into '?'. A text too long is cut in the
 * middle: its begin names the file, its end what was expected and found. The arguments may point
 * into `line`. */
void line_format(char *line, size_t line_bytes, const char *format, va_list args)
    __attribute__((format(printf, 3, 0)));

/* What a count puts behind its noun: "1 block", "2 blocks". */
static inline const char *line_plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

#endif
