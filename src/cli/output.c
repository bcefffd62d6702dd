/* SPDX-License-Identifier: Apache-2.0 */
/* Standard output goes through stdio; the errno of the first failed write is kept here, because a
 * stream remembers only that it failed. */
#include "cli/output.h"

#include <errno.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/resource.h>
#include <unistd.h>

#include "cli/command.h"

static int first_write_errno;
static output_field_fn *field_name; /* NULL: none */

static void message_write(const char *kind, const char *format, va_list arguments)
{
    char line[2048];
    int prefix = snprintf(line, sizeof(line), "imbrex: %s: ", kind);
    int length = vsnprintf(line + prefix, sizeof(line) - (size_t)prefix - 1, format, arguments);
    size_t total = strlen(line);

    if (length < 0) {
        return;
    }
    for (size_t i = 0; i < total; i++) {
        if ((unsigned char)line[i] < 0x20 || line[i] == 0x7f) {
            line[i] = '?';
        }
    }
    line[total] = '\n';
    /* One write, so that lines of several processes do not mix. Nobody is left to tell if it
     * fails. */
    ssize_t written = write(STDERR_FILENO, line, total + 1);
    (void)written;
}

void output_error(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    message_write("error", format, arguments);
    va_end(arguments);
}

void output_warning(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    message_write("warning", format, arguments);
    va_end(arguments);
}

void output_name_fields(output_field_fn *name)
{
    field_name = name;
}

const char *output_option_of(const char *field)
{
    return field_name != NULL ? field_name(field) : NULL;
}

/* What ulimit says, if it does: memory may be out although the machine has more. */
static const char *memory_limit(char *text, size_t max_bytes)
{
    struct rlimit limit;

    text[0] = '\0';
    if (getrlimit(RLIMIT_AS, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY) {
        (void)snprintf(text, max_bytes, "; ulimit -v lets this process have %llu KiB",
                       (unsigned long long)limit.rlim_cur / 1024);
    }
    return text;
}

int output_out_of_memory(void)
{
    char limit[64];

    output_error("out of memory%s", memory_limit(limit, sizeof(limit)));
    return EXIT_CODE_FAILURE;
}

const char *output_system_error(int error)
{
    return error == EMFILE ? "Too many open files (ulimit -n says how many this process may have)"
                           : strerror(error);
}

int output_library_error(const struct imbrex_error *err)
{
    const char *message = err->message[0] != '\0' ? err->message : imbrex_status_text(err->status);

    const char *option = err->field != NULL ? output_option_of(err->field) : NULL;

    if (option != NULL) {
        output_error("--%s%s", option, message + strlen(err->field));
    } else if (err->status == IMBREX_STATUS_OUT_OF_MEMORY) {
        char limit[64];
        output_error("%s%s", message, memory_limit(limit, sizeof(limit)));
    } else {
        output_error("%s", message);
    }
    switch (err->status) {
    case IMBREX_STATUS_OUT_OF_MEMORY:
    case IMBREX_STATUS_DEVICE:
    case IMBREX_STATUS_OUTPUT:
    case IMBREX_STATUS_INTERNAL:
        return EXIT_CODE_FAILURE;
    default:
        return EXIT_CODE_INPUT;
    }
}

void output_log(void *user, enum imbrex_log_level level, const char *message)
{
    (void)user;
    if (level >= IMBREX_LOG_LEVEL_WARNING) {
        output_warning("%s", message);
    }
}

/* Keeps the cause of the first failure. */
static bool write_outcome(bool succeeded)
{
    if (!succeeded && first_write_errno == 0) {
        first_write_errno = errno != 0 ? errno : EIO;
    }
    return first_write_errno == 0;
}

bool output_printf(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    int length = vprintf(format, arguments);
    va_end(arguments);
    return write_outcome(length >= 0);
}

bool output_bytes(const char *bytes, size_t num_bytes)
{
    return write_outcome(fwrite(bytes, 1, num_bytes, stdout) == num_bytes);
}

size_t output_character_bytes(const char *text, size_t num_bytes)
{
    const unsigned char *bytes = (const unsigned char *)text;
    unsigned char first = bytes[0];
    size_t length = first < 0x80 ? 1 : first < 0xc2 ? 0 : first < 0xe0 ? 2 : first < 0xf0 ? 3 : 4;

    if (length == 0 || first > 0xf4 || length > num_bytes) {
        return 0;
    }
    for (size_t i = 1; i < length; i++) {
        if ((bytes[i] & 0xc0) != 0x80) {
            return 0;
        }
    }
    /* Overlong forms, surrogates, and code points past U+10FFFF. */
    if ((first == 0xe0 && bytes[1] < 0xa0) || (first == 0xed && bytes[1] > 0x9f) ||
        (first == 0xf0 && bytes[1] < 0x90) || (first == 0xf4 && bytes[1] > 0x8f)) {
        return 0;
    }
    return length;
}

bool output_is_utf8(const char *bytes, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes;) {
        size_t length = output_character_bytes(bytes + i, num_bytes - i);
        if (length == 0) {
            return false;
        }
        i += length;
    }
    return true;
}

bool output_escaped(const char *bytes, size_t num_bytes)
{
    for (size_t i = 0; i < num_bytes;) {
        const unsigned char *at = (const unsigned char *)bytes + i;
        size_t length = output_character_bytes(bytes + i, num_bytes - i);
        /* U+0080..U+009F are control characters too. */
        bool control = length == 0 || at[0] < 0x20 || at[0] == 0x7f ||
                       (length == 2 && at[0] == 0xc2 && at[1] < 0xa0);
        if (at[0] == '\n') {
            output_bytes("\\n", 2);
        } else if (at[0] == '\t') {
            output_bytes("\\t", 2);
        } else if (at[0] == '\r') {
            output_bytes("\\r", 2);
        } else if (at[0] == '\\' || at[0] == '\'') {
            output_printf("\\%c", at[0]);
        } else if (control) {
            output_printf("\\x%02x", at[0]);
        } else {
            output_bytes(bytes + i, length);
        }
        i += control ? 1 : length;
    }
    return first_write_errno == 0;
}

bool output_flush(void)
{
    return write_outcome(fflush(stdout) == 0);
}

int output_finish(int exit_code)
{
    if (output_flush()) {
        return exit_code;
    }
    /* Whoever reads has had enough, as head has: the code that a shell gives to programs that
     * SIGPIPE ends, and no message. */
    if (first_write_errno == EPIPE) {
        return exit_code == EXIT_CODE_INPUT ? exit_code : EXIT_CODE_SIGNAL + SIGPIPE;
    }
    output_error("standard output: %s", output_system_error(first_write_errno));
    return exit_code == EXIT_CODE_OK || exit_code >= EXIT_CODE_SIGNAL ? EXIT_CODE_FAILURE
                                                                      : exit_code;
}

const char *output_format_size(char text[SIZE_TEXT_BYTES], size_t num_bytes)
{
    static const char *const units[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
    double scaled = (double)num_bytes / 1024;
    size_t unit = 0;

    if (num_bytes < 1024) {
        snprintf(text, SIZE_TEXT_BYTES, "%zu bytes", num_bytes);
        return text;
    }
    while (scaled >= 1024 && unit + 1 < sizeof(units) / sizeof(units[0])) {
        scaled /= 1024;
        unit++;
    }
    snprintf(text, SIZE_TEXT_BYTES, "%.1f %s (%zu bytes)", scaled, units[unit], num_bytes);
    return text;
}
