/* SPDX-License-Identifier: Apache-2.0 */
#include "base/log.h"

#include <stdarg.h>

#include "base/line.h"

#define LOG_LINE_BYTES 512

void log_write(const struct log *log, enum imbrex_log_level level, const char *format, ...)
{
    if (!log || !log->write) {
        return;
    }
    char line[LOG_LINE_BYTES];
    va_list args;
    va_start(args, format);
    line_format(line, sizeof(line), format, args);
    va_end(args);
    log->write(log->user, level, line);
}
