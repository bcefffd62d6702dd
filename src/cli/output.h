/* SPDX-License-Identifier: Apache-2.0 */
/* What the program writes: results to standard output, where no failed write goes unnoticed, and
 * one-line messages to standard error. */
#ifndef IMBREX_CLI_OUTPUT_H
#define IMBREX_CLI_OUTPUT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "imbrex.h"

/* "imbrex: error: ..." and "imbrex: warning: ...": always one line, control characters replaced. */
void output_error(const char *format, ...) __attribute__((format(printf, 1, 2)));
void output_warning(const char *format, ...) __attribute__((format(printf, 1, 2)));
/* The option that sets a field of the library's options, without the dashes. NULL: there is none.
 */
typedef const char *output_field_fn(const char *field);
/* From now on messages of the library that begin with a field call it by its option. */
void output_name_fields(output_field_fn *name);
/* Reports an error of the library. Returns the exit code that goes with its status. */
int output_library_error(const struct imbrex_error *err);
/* Reports it, with the limit of the process, if there is one. Returns EXIT_CODE_FAILURE. */
int output_out_of_memory(void);
/* An imbrex_log_fn that prints warnings. */
void output_log(void *user, enum imbrex_log_level level, const char *message);

/* To standard output. Both return false once a write has failed; the cause is kept for
 * output_finish(). */
bool output_printf(const char *format, ...) __attribute__((format(printf, 1, 2)));
bool output_bytes(const char *bytes, size_t num_bytes);
/* Bytes of unknown origin for a terminal: characters as they are, all else as \n, \\, \', \xNN. */
bool output_escaped(const char *bytes, size_t num_bytes);
/* Bytes of the UTF-8 character at the front, or 0 if there is none whole and valid. */
size_t output_character_bytes(const char *text, size_t num_bytes);
bool output_is_utf8(const char *bytes, size_t num_bytes);
/* Hands everything to the operating system. False if a write failed, now or before. */
bool output_flush(void);
/* The last flush: reports the first failed write. Returns `exit_code`, or EXIT_CODE_FAILURE; where
 * the reader of a pipe has gone, 141, without a report. */
int output_finish(int exit_code);

/* What a count puts behind its noun: "1 block", "2 blocks". */
static inline const char *output_plural(uint64_t count)
{
    return count == 1 ? "" : "s";
}

#define SIZE_TEXT_BYTES 48
/* "1.5 MiB (1572864 bytes)"; "12 bytes" under one KiB. Returns `text`. */
const char *output_format_size(char text[SIZE_TEXT_BYTES], size_t num_bytes);

/* The running command's option for a field of the library's options; NULL: it has none. */
const char *output_option_of(const char *field);
/* The text of an errno value, with the remedy where a limit of the process was met. */
const char *output_system_error(int error);

#endif
