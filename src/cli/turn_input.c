/* SPDX-License-Identifier: Apache-2.0 */
/* Lines are cut from what read() gives rather than from stdio, so that a signal can end the wait
 * and nothing that was read is lost. Prompts go to standard error: standard output has replies
 * only. */
#include "cli/turn_input.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/output.h"
#include "cli/signals.h"

#define READ_BYTES 65536
#define BLOCK_MARK "\"\"\""

void turn_input_init(struct turn_input *input)
{
    *input = (struct turn_input){.is_terminal = isatty(STDIN_FILENO) != 0};
}

void turn_input_release(struct turn_input *input)
{
    free(input->pending.bytes);
    free(input->text.bytes);
    *input = (struct turn_input){0};
}

/* Room for num_more bytes and a NUL. */
static bool reserve(struct turn_bytes *buffer, size_t num_more)
{
    if (num_more < buffer->max_bytes - buffer->num_bytes) {
        return true;
    }
    size_t max_bytes = buffer->num_bytes + num_more + 1;
    if (max_bytes <= num_more || max_bytes > SIZE_MAX / 2) {
        (void)output_out_of_memory();
        return false;
    }
    max_bytes += max_bytes / 2;
    char *bytes = realloc(buffer->bytes, max_bytes);
    if (bytes == NULL) {
        (void)output_out_of_memory();
        return false;
    }
    buffer->bytes = bytes;
    buffer->max_bytes = max_bytes;
    return true;
}

bool turn_bytes_append(struct turn_bytes *buffer, const char *bytes, size_t num_bytes)
{
    if (!reserve(buffer, num_bytes)) {
        return false;
    }
    memcpy(buffer->bytes + buffer->num_bytes, bytes, num_bytes);
    buffer->num_bytes += num_bytes;
    buffer->bytes[buffer->num_bytes] = '\0';
    return true;
}

void turn_input_drop_pending(struct turn_input *input)
{
    input->pending.num_bytes = 0;
    input->begin = 0;
}

static void drop_taken(struct turn_input *input)
{
    struct turn_bytes *pending = &input->pending;

    if (input->begin > 0) {
        pending->num_bytes -= input->begin;
        memmove(pending->bytes, pending->bytes + input->begin, pending->num_bytes);
        input->begin = 0;
    }
}

/* Reads more behind what is pending. TEXT if there is more, or the end was reached. */
static enum turn_result read_more(struct turn_input *input)
{
    struct turn_bytes *pending = &input->pending;

    drop_taken(input);
    if (!reserve(pending, READ_BYTES)) {
        return TURN_RESULT_FAILED;
    }
    for (;;) {
        if (!signals_wait_for_input(STDIN_FILENO)) {
            turn_input_drop_pending(input);
            return TURN_RESULT_INTERRUPTED;
        }
        ssize_t count = read(STDIN_FILENO, pending->bytes + pending->num_bytes, READ_BYTES);
        if (count >= 0) {
            pending->num_bytes += (size_t)count;
            input->is_at_end = count == 0;
            return TURN_RESULT_TEXT;
        }
        if (errno != EINTR && errno != EAGAIN) {
            output_error("standard input: %s", output_system_error(errno));
            return TURN_RESULT_FAILED;
        }
    }
}

/* The next line without its end; it is valid until the next call. END if there is none. */
static enum turn_result read_line(struct turn_input *input, const char *prompt, const char **line,
                                  size_t *num_bytes)
{
    struct turn_bytes *pending = &input->pending;
    size_t num_searched = 0;

    if (input->is_terminal) {
        fputs(prompt, stderr);
    }
    for (;;) {
        size_t num_pending = pending->num_bytes - input->begin;
        const char *begin = num_pending > 0 ? pending->bytes + input->begin : "";
        const char *end = memchr(begin + num_searched, '\n', num_pending - num_searched);
        if (end != NULL || (input->is_at_end && num_pending > 0)) {
            *line = begin;
            *num_bytes = end != NULL ? (size_t)(end - begin) : num_pending;
            input->begin += *num_bytes + (end != NULL);
            return TURN_RESULT_TEXT;
        }
        if (input->is_at_end) {
            /* On a terminal the next read may give something again. */
            input->is_at_end = false;
            return TURN_RESULT_END;
        }
        num_searched = num_pending;
        enum turn_result result = read_more(input);
        if (result != TURN_RESULT_TEXT) {
            return result;
        }
    }
}

static bool is_block_mark(const char *line, size_t num_bytes)
{
    return num_bytes == strlen(BLOCK_MARK) && memcmp(line, BLOCK_MARK, num_bytes) == 0;
}

/* The lines up to the next mark, or the end of the input. */
static enum turn_result read_block(struct turn_input *input)
{
    for (bool is_first = true;; is_first = false) {
        const char *line;
        size_t num_bytes;
        enum turn_result result = read_line(input, ". ", &line, &num_bytes);
        if (result == TURN_RESULT_END ||
            (result == TURN_RESULT_TEXT && is_block_mark(line, num_bytes))) {
            return TURN_RESULT_TEXT;
        }
        if (result != TURN_RESULT_TEXT) {
            return result;
        }
        if ((!is_first && !turn_bytes_append(&input->text, "\n", 1)) ||
            !turn_bytes_append(&input->text, line, num_bytes)) {
            return TURN_RESULT_FAILED;
        }
    }
}

/* A line and those it goes on in. */
static enum turn_result read_lines(struct turn_input *input, const char *line, size_t num_bytes)
{
    while (num_bytes > 0 && line[num_bytes - 1] == '\\') {
        if (!turn_bytes_append(&input->text, line, num_bytes - 1) ||
            !turn_bytes_append(&input->text, "\n", 1)) {
            return TURN_RESULT_FAILED;
        }
        enum turn_result result = read_line(input, ". ", &line, &num_bytes);
        if (result == TURN_RESULT_END) {
            return TURN_RESULT_TEXT;
        }
        if (result != TURN_RESULT_TEXT) {
            return result;
        }
    }
    return turn_bytes_append(&input->text, line, num_bytes) ? TURN_RESULT_TEXT : TURN_RESULT_FAILED;
}

static bool is_blank(const struct turn_bytes *text)
{
    for (size_t i = 0; i < text->num_bytes; i++) {
        if (memchr(" \t\r\n", text->bytes[i], 4) == NULL) {
            return false;
        }
    }
    return true;
}

enum turn_result turn_input_read(struct turn_input *input)
{
    for (;;) {
        const char *line;
        size_t num_bytes;
        input->text.num_bytes = 0;
        enum turn_result result = read_line(input, "> ", &line, &num_bytes);
        if (result != TURN_RESULT_TEXT) {
            return result;
        }
        bool is_command = num_bytes > 0 && line[0] == '/';
        result =
            is_block_mark(line, num_bytes) ? read_block(input) : read_lines(input, line, num_bytes);
        if (result != TURN_RESULT_TEXT) {
            return result;
        }
        if (!is_blank(&input->text)) {
            return is_command ? TURN_RESULT_COMMAND : TURN_RESULT_TEXT;
        }
    }
}
