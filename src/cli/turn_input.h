/* SPDX-License-Identifier: Apache-2.0 */
/* What a person says, turn by turn, from standard input: a line, a line that goes on after a
 * backslash at its end, or all lines between two lines that are """. On a terminal there is a
 * prompt and Ctrl-C gives up what was begun. */
#ifndef IMBREX_CLI_TURN_INPUT_H
#define IMBREX_CLI_TURN_INPUT_H

#include <stdbool.h>
#include <stddef.h>

struct turn_bytes {
    char *bytes;
    size_t num_bytes, max_bytes;
};

struct turn_input {
    bool is_terminal;
    bool is_at_end;
    struct turn_bytes pending; /* read, and not yet taken from `begin` on */
    size_t begin;
    struct turn_bytes text; /* of the turn */
};

enum turn_result {
    TURN_RESULT_TEXT,
    TURN_RESULT_COMMAND,     /* one line that begins with '/' */
    TURN_RESULT_END,         /* the end of the input */
    TURN_RESULT_INTERRUPTED, /* a signal was noted */
    TURN_RESULT_FAILED,      /* reported */
};

void turn_input_init(struct turn_input *input);
void turn_input_release(struct turn_input *input);
/* The next turn that is not empty: input->text, with a NUL behind it, valid until the next call.
 * Signals are to be held. */
enum turn_result turn_input_read(struct turn_input *input);
/* Forgets lines that were read ahead. */
void turn_input_drop_pending(struct turn_input *input);

/* Keeps a NUL behind the bytes. False if memory is out: reported. */
bool turn_bytes_append(struct turn_bytes *buffer, const char *bytes, size_t num_bytes);

#endif
