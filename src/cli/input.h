/* SPDX-License-Identifier: Apache-2.0 */
/* Files that the user names on the command line. Pipes and "-", which is standard input, are read
 * like files. Failures are reported; the functions return an exit code. */
#ifndef IMBREX_CLI_INPUT_H
#define IMBREX_CLI_INPUT_H

#include <stddef.h>
#include <stdint.h>

#include <jansson.h>

/* The name of a path in messages. */
const char *input_display_name(const char *path);

/* What is longer is refused: a device without an end must not take all memory. */
#define INPUT_MAX_BYTES ((size_t)1 << 30)

/* A whole file of at most INPUT_MAX_BYTES: *bytes is [*num_bytes] plus a NUL, freed by the caller
 * with free(). */
int input_read_file(const char *path, char **bytes, size_t *num_bytes);

/* The same for a text of at most `max_bytes`, in which NUL bytes are refused. */
int input_read_text(const char *path, size_t max_bytes, char **text, size_t *num_bytes);

#define INPUT_SHOWN_BYTES 84 /* of 80, dots and a NUL */
/* A value of a file as JSON, for what a message says was found: "none" for NULL. Returns `text`. */
const char *input_show_json(const json_t *value, char text[INPUT_SHOWN_BYTES]);

/* A JSON array of token ids, each in [0, vocab_size): *token_ids is [*num_tokens], freed by the
 * caller with free(). */
int input_read_ids(const char *path, int32_t vocab_size, int32_t **token_ids, size_t *num_tokens);

#define INPUT_MAX_LINE_BYTES ((size_t)1 << 26)

/* Gives lines of a file to `take`, with their number from 1, without the line end; NUL bytes are
 * allowed. Ends at the first exit code that is not OK, and returns it. A line of more than
 * INPUT_MAX_LINE_BYTES is refused. Memory: the longest line. */
typedef int input_line_fn(void *user, const char *line, size_t num_bytes, size_t line_number);
int input_read_lines(const char *path, input_line_fn *take, void *user);

#endif
