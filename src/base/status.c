/* SPDX-License-Identifier: Apache-2.0 */
/* Names and texts of the status codes, and the one place where an error struct is filled. */
#include "base/status.h"

#include <errno.h>
#include <stdarg.h>
#include <string.h>

#include "base/line.h"

const char *imbrex_status_name(enum imbrex_status status)
{
    switch (status) {
#define STATUS_NAME(name, value, text) \
    case IMBREX_STATUS_##name:         \
        return #name;
        IMBREX_STATUS_LIST(STATUS_NAME)
#undef STATUS_NAME
    }
    return "UNKNOWN";
}

const char *imbrex_status_text(enum imbrex_status status)
{
    switch (status) {
#define STATUS_TEXT(name, value, text) \
    case IMBREX_STATUS_##name:         \
        return text;
        IMBREX_STATUS_LIST(STATUS_TEXT)
#undef STATUS_TEXT
    }
    return "no such status";
}

enum imbrex_status error_set(struct imbrex_error *err, enum imbrex_status status,
                             const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        line_format(err->message, sizeof(err->message), format, args);
        va_end(args);
        err->status = status;
        err->field = NULL;
    }
    return status;
}

enum imbrex_status error_set_field(struct imbrex_error *err, enum imbrex_status status,
                                   const char *field, const char *format, ...)
{
    if (err) {
        va_list args;
        va_start(args, format);
        line_format(err->message, sizeof(err->message), format, args);
        va_end(args);
        (void)error_set(err, status, "%s%s", field, err->message);
        err->field = field;
    }
    return status;
}

enum imbrex_status error_out_of_memory(struct imbrex_error *err, const char *what, size_t num_bytes)
{
    return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: cannot allocate %zu bytes", what,
                     num_bytes);
}

const char *system_error_text(int error)
{
    if (error == EMFILE) {
        return "Too many open files (ulimit -n says how many this process may have)";
    }
#if defined(__GLIBC__) && __GLIBC_PREREQ(2, 32)
    const char *text = strerrordesc_np(error);
    return text != NULL ? text : "unknown error";
#else
    return strerror(error);
#endif
}
