/* SPDX-License-Identifier: Apache-2.0 */
/* Log lines go to the caller's function; the library itself never prints. */
#ifndef IMBREX_BASE_LOG_H
#define IMBREX_BASE_LOG_H

#include "imbrex.h"

struct log {
    imbrex_log_fn *write; /* NULL: silent */
    void *user;
};

/* Formats one line and hands it to the caller's function. Lines over 511 bytes are cut. */
void log_write(const struct log *log, enum imbrex_log_level level, const char *format, ...)
    __attribute__((format(printf, 3, 4)));

#endif
