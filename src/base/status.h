/* SPDX-License-Identifier: Apache-2.0 */
/* Errors as values: one list of codes (imbrex.h), one sentence that names what was expected and
 * found. */
#ifndef IMBREX_BASE_STATUS_H
#define IMBREX_BASE_STATUS_H

#include "imbrex.h"

/* Returns the status of a failed call to the caller of the function it stands in. */
#define TRY(call)                               \
    do {                                        \
        enum imbrex_status try_status = (call); \
        if (try_status != IMBREX_STATUS_OK) {   \
            return try_status;                  \
        }                                       \
    } while (0)

/* The same for functions that hold resources: keeps the status in `status` and goes to `fail`. */
#define TRY_OR_FAIL(call)                 \
    do {                                  \
        status = (call);                  \
        if (status != IMBREX_STATUS_OK) { \
            goto fail;                    \
        }                                 \
    } while (0)

/* Writes status and message into err (may be NULL) and returns status, so that `return
 * error_set(...)` is one step. The message becomes one line: control characters turn into '?'. A
 * message too long for the buffer is cut at a character's edge. */
enum imbrex_status error_set(struct imbrex_error *err, enum imbrex_status status,
                             const char *format, ...) __attribute__((format(printf, 3, 4)));

/* error_set of a message that begins with a field of an options struct, a literal: `format` is what
 * follows it, such as ": expected ...". */
enum imbrex_status error_set_field(struct imbrex_error *err, enum imbrex_status status,
                                   const char *field, const char *format, ...)
    __attribute__((format(printf, 4, 5)));

/* error_set for an allocation of num_bytes that failed; `what` says what it was for. */
enum imbrex_status error_out_of_memory(struct imbrex_error *err, const char *what,
                                       size_t num_bytes);

/* The text of an errno value: strerror without its shared buffer, and with the remedy where a limit
 * of the process was met. */
const char *system_error_text(int error);

#endif
