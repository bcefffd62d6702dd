/* SPDX-License-Identifier: Apache-2.0 */
/* Reading to the end without knowing the size first, since pipes have none; and JSON arrays of ids,
 * of which the first wrong element is named. */
#include "cli/input.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/output.h"

#define FIRST_READ_BYTES 65536

const char *input_display_name(const char *path)
{
    return strcmp(path, "-") == 0 ? "standard input" : path;
}

const char *input_show_json(const json_t *value, char text[INPUT_SHOWN_BYTES])
{
    char *dumped = value != NULL ? json_dumps(value, JSON_ENCODE_ANY | JSON_COMPACT |
                                                         JSON_ENSURE_ASCII | JSON_REAL_PRECISION(9))
                                 : NULL;
    bool is_long = dumped != NULL && strlen(dumped) >= INPUT_SHOWN_BYTES;

    (void)snprintf(text, INPUT_SHOWN_BYTES, "%.80s%s", dumped != NULL ? dumped : "none",
                   is_long ? "..." : "");
    free(dumped);
    return text;
}

static int report_errno(const char *path, const char *action)
{
    int cause = errno;
    output_error("%s: cannot %s: %s", input_display_name(path), action, output_system_error(cause));
    return cause == ENOMEM ? EXIT_CODE_FAILURE : EXIT_CODE_INPUT;
}

static int report_out_of_memory(const char *path)
{
    output_error("%s: out of memory", input_display_name(path));
    return EXIT_CODE_FAILURE;
}

/* Reads to the end of an open file. */
static int read_to_end(int fd, const char *path, size_t max_bytes, char **bytes, size_t *num_bytes)
{
    size_t capacity = FIRST_READ_BYTES, length = 0;
    char *buffer = malloc(capacity);

    if (buffer == NULL) {
        return report_out_of_memory(path);
    }
    for (;;) {
        /* One byte stays free for the NUL. */
        ssize_t count = read(fd, buffer + length, capacity - length - 1);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count < 0) {
            int exit_code = report_errno(path, "read");
            free(buffer);
            return exit_code;
        }
        if (count == 0) {
            break;
        }
        length += (size_t)count;
        if (length > max_bytes) {
            output_error("%s: expected at most %zu bytes, found more", input_display_name(path),
                         max_bytes);
            free(buffer);
            return EXIT_CODE_INPUT;
        }
        if (length + 1 == capacity) {
            char *larger = capacity <= SIZE_MAX / 2 ? realloc(buffer, capacity * 2) : NULL;
            if (larger == NULL) {
                free(buffer);
                return report_out_of_memory(path);
            }
            buffer = larger;
            capacity *= 2;
        }
    }
    buffer[length] = '\0';
    *bytes = buffer;
    *num_bytes = length;
    return EXIT_CODE_OK;
}

static int read_file(const char *path, size_t max_bytes, char **bytes, size_t *num_bytes)
{
    if (strcmp(path, "-") == 0) {
        return read_to_end(STDIN_FILENO, path, max_bytes, bytes, num_bytes);
    }
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return report_errno(path, "open");
    }
    int exit_code = read_to_end(fd, path, max_bytes, bytes, num_bytes);
    close(fd);
    return exit_code;
}

int input_read_file(const char *path, char **bytes, size_t *num_bytes)
{
    return read_file(path, INPUT_MAX_BYTES, bytes, num_bytes);
}

int input_read_text(const char *path, size_t max_bytes, char **text, size_t *num_bytes)
{
    int exit_code = read_file(path, max_bytes, text, num_bytes);

    if (exit_code == EXIT_CODE_OK && strlen(*text) != *num_bytes) {
        output_error("%s: expected a text, found a NUL byte", input_display_name(path));
        free(*text);
        *text = NULL;
        exit_code = EXIT_CODE_INPUT;
    }
    return exit_code;
}

/* What a JSON value is called in messages. */
static const char *json_type_name(const json_t *value)
{
    switch (json_typeof(value)) {
    case JSON_OBJECT:
        return "an object";
    case JSON_ARRAY:
        return "an array";
    case JSON_STRING:
        return "a string";
    case JSON_INTEGER:
        return "an integer";
    case JSON_REAL:
        return "a number with a fraction or exponent";
    case JSON_TRUE:
    case JSON_FALSE:
        return "a boolean";
    case JSON_NULL:
        return "null";
    }
    return "an unknown value";
}

static int read_id_array(const char *path, const json_t *array, int32_t vocab_size,
                         int32_t **token_ids, size_t *num_tokens)
{
    if (!json_is_array(array)) {
        output_error("%s: expected a JSON array of token ids, found %s", input_display_name(path),
                     json_type_name(array));
        return EXIT_CODE_INPUT;
    }
    size_t count = json_array_size(array);
    int32_t *ids = malloc((count > 0 ? count : 1) * sizeof(*ids));
    if (ids == NULL) {
        return report_out_of_memory(path);
    }
    for (size_t i = 0; i < count; i++) {
        const json_t *element = json_array_get(array, i);
        if (!json_is_integer(element)) {
            output_error("%s: element %zu: expected a token id in [0, %" PRId32 "), found %s",
                         input_display_name(path), i, vocab_size, json_type_name(element));
            free(ids);
            return EXIT_CODE_INPUT;
        }
        json_int_t id = json_integer_value(element);
        if (id < 0 || id >= vocab_size) {
            output_error("%s: element %zu: expected a token id in [0, %" PRId32
                         "), found %" JSON_INTEGER_FORMAT,
                         input_display_name(path), i, vocab_size, id);
            free(ids);
            return EXIT_CODE_INPUT;
        }
        ids[i] = (int32_t)id;
    }
    *token_ids = ids;
    *num_tokens = count;
    return EXIT_CODE_OK;
}

int input_read_ids(const char *path, int32_t vocab_size, int32_t **token_ids, size_t *num_tokens)
{
    char *bytes;
    size_t num_bytes;
    json_error_t json_error;

    int exit_code = input_read_file(path, &bytes, &num_bytes);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    json_t *array = json_loadb(bytes, num_bytes, JSON_DECODE_ANY, &json_error);
    free(bytes);
    if (array == NULL) {
        if (json_error_code(&json_error) == json_error_out_of_memory) {
            return report_out_of_memory(path);
        }
        output_error("%s: line %d: not JSON: %s", input_display_name(path), json_error.line,
                     json_error.text);
        return EXIT_CODE_INPUT;
    }
    exit_code = read_id_array(path, array, vocab_size, token_ids, num_tokens);
    json_decref(array);
    return exit_code;
}

/* What has been read and is not yet given out. */
struct line_reader {
    const char *path;
    char *bytes; /* [capacity] */
    size_t capacity, length;
    size_t line_number; /* of the first line */
};

/* Gives out the whole lines and moves what is behind them to the front. */
static int take_lines(struct line_reader *reader, size_t num_searched, input_line_fn *take,
                      void *user)
{
    size_t begin = 0;
    int exit_code = EXIT_CODE_OK;

    for (;;) {
        size_t from = begin > num_searched ? begin : num_searched;
        const char *end = memchr(reader->bytes + from, '\n', reader->length - from);
        if (end == NULL || exit_code != EXIT_CODE_OK) {
            break;
        }
        size_t line_bytes = (size_t)(end - reader->bytes) - begin;
        exit_code = take(user, reader->bytes + begin, line_bytes, reader->line_number++);
        begin += line_bytes + 1;
    }
    memmove(reader->bytes, reader->bytes + begin, reader->length - begin);
    reader->length -= begin;
    return exit_code;
}

static int reserve_line(struct line_reader *reader)
{
    if (reader->length > INPUT_MAX_LINE_BYTES) {
        output_error("%s: line %zu: expected at most %zu bytes, found more",
                     input_display_name(reader->path), reader->line_number, INPUT_MAX_LINE_BYTES);
        return EXIT_CODE_INPUT;
    }
    if (reader->length == reader->capacity) {
        size_t larger = reader->capacity == 0 ? FIRST_READ_BYTES : reader->capacity * 2;
        char *bytes = realloc(reader->bytes, larger);
        if (bytes == NULL) {
            return report_out_of_memory(reader->path);
        }
        reader->bytes = bytes;
        reader->capacity = larger;
    }
    return EXIT_CODE_OK;
}

static int read_lines(int fd, struct line_reader *reader, input_line_fn *take, void *user)
{
    for (;;) {
        int exit_code = reserve_line(reader);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
        ssize_t count = read(fd, reader->bytes + reader->length, reader->capacity - reader->length);
        if (count < 0 && errno != EINTR) {
            return report_errno(reader->path, "read");
        }
        if (count == 0) {
            break;
        }
        size_t num_searched = reader->length;
        reader->length += count > 0 ? (size_t)count : 0;
        exit_code = take_lines(reader, num_searched, take, user);
        if (exit_code != EXIT_CODE_OK) {
            return exit_code;
        }
    }
    return reader->length > 0 ? take(user, reader->bytes, reader->length, reader->line_number)
                              : EXIT_CODE_OK;
}

int input_read_lines(const char *path, input_line_fn *take, void *user)
{
    struct line_reader reader = {.path = path, .line_number = 1};
    bool is_standard_input = strcmp(path, "-") == 0;
    int fd = is_standard_input ? STDIN_FILENO : open(path, O_RDONLY | O_CLOEXEC);

    if (fd < 0) {
        return report_errno(path, "open");
    }
    int exit_code = read_lines(fd, &reader, take, user);
    free(reader.bytes);
    if (!is_standard_input) {
        close(fd);
    }
    return exit_code;
}
