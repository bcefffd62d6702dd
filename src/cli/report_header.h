/* SPDX-License-Identifier: Apache-2.0 */
/* What every JSON report of a benchmark begins with, and the text and files that JSON becomes. */
#ifndef IMBREX_CLI_REPORT_HEADER_H
#define IMBREX_CLI_REPORT_HEADER_H

#include <jansson.h>
#include <stdbool.h>
#include <stdio.h>

/* {"cpu", "num_cpus", "version", "commit"}; NULL if memory is out. */
json_t *report_machine(void);
/* {"benchmark", "date", "machine"}; NULL if memory is out. */
json_t *report_header(const char *benchmark);
/* A path need not be UTF-8, which JSON is: then, and for NULL, it is null. */
json_t *report_text(const char *text);
/* Whether a path is "-", which stands for standard output or input; NULL is not. */
bool report_is_dash(const char *path);
/* Refuses "" for the name of a file; NULL passes. `command` and `option` are for the message.
 * Returns an exit code. */
int report_check_name(const char *command, const char *option, const char *path);
/* Opens a file that is to be replaced at the end, so that a name that cannot be written costs no
 * run. One that is not there is not made before the end. Returns an exit code. */
int report_open(const char *path, FILE **file);
/* The root, which it takes over, as text with reals of so many digits, freed by the caller with
 * free(). Want of memory is reported, and a root of NULL is one that there was none for. Returns an
 * exit code. */
int report_dump(json_t *root, size_t num_digits, char **text);
/* The same to standard output, and a line end. */
int report_print(json_t *root, size_t num_digits);
#define REPORT_DIGITS 9
/* The text and a line end, in place of what the file held, which stays if they cannot be written.
 * `file` is report_open's, or NULL: opened now. Returns an exit code. */
int report_write_text(const char *path, FILE *file, const char *text);
/* The root as text, in place of what the file held, as above. */
int report_write(const char *path, FILE *file, const json_t *root);

#endif
