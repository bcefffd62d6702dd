/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_input.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#if IMBREX_HAS_ZSTD
#include <zstd.h>
#include <zstd_errors.h>
#endif

#define READ_BYTES ((size_t)1 << 17)
#define QUESTION_MS 50 /* between two questions while nothing comes */

struct sim_input {
    const char *path; /* the caller's, until close */
    int fd;           /* -1: memory */
    bool owns_fd;
    const unsigned char *bytes;
    size_t num_bytes; /* of memory that were not read yet */

    /* As they came: [raw_at, raw_end) of raw[READ_BYTES], only if compressed. */
    unsigned char *raw;
    size_t raw_at, raw_end;
#if IMBREX_HAS_ZSTD
    ZSTD_DStream *stream;
    size_t frame_rest; /* 0: at the end of a frame */
#endif

    /* Text: [at, end) of text[max_text_bytes] was not given yet. */
    char *text;
    size_t at, end, max_text_bytes;
    bool has_looked, is_compressed, is_at_end;
    int64_t line_number;
    sim_continue_fn *may_continue; /* NULL: nobody stops it */
    void *user;
};

/* Until there is something to read, or nothing will come; who watches is asked at least once. */
static enum imbrex_status wait_for_bytes(const struct sim_input *input, struct imbrex_error *err)
{
    struct pollfd polled = {.fd = input->fd, .events = POLLIN};
    bool has_bytes = input->may_continue == NULL;

    while (!has_bytes) {
        if (!input->may_continue(input->user, 0)) {
            return error_set(err, IMBREX_STATUS_CANCELLED, "%s: reading was ended", input->path);
        }
        int count = poll(&polled, 1, QUESTION_MS);
        /* Whatever else is wrong, read() says. */
        has_bytes = count > 0 || (count < 0 && errno != EINTR);
    }
    return IMBREX_STATUS_OK;
}

/* As many bytes as are to be had at once, 0 at the end. */
static enum imbrex_status read_raw(struct sim_input *input, void *bytes, size_t max_bytes,
                                   size_t *num_bytes, struct imbrex_error *err)
{
    if (input->fd < 0) {
        *num_bytes = input->num_bytes < max_bytes ? input->num_bytes : max_bytes;
        if (*num_bytes > 0) {
            memcpy(bytes, input->bytes, *num_bytes);
            input->bytes += *num_bytes;
            input->num_bytes -= *num_bytes;
        }
        return IMBREX_STATUS_OK;
    }
    TRY(wait_for_bytes(input, err));
    for (;;) {
        ssize_t result = read(input->fd, bytes, max_bytes);
        if (result >= 0) {
            *num_bytes = (size_t)result;
            return IMBREX_STATUS_OK;
        }
        if (errno != EINTR) {
            return error_set(err, IMBREX_STATUS_IO, "%s: cannot read: %s", input->path,
                             system_error_text(errno));
        }
    }
}

#if IMBREX_HAS_ZSTD
static enum imbrex_status report_zstd(const struct sim_input *input, size_t result,
                                      struct imbrex_error *err)
{
    if (ZSTD_getErrorCode(result) == ZSTD_error_memory_allocation) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY, "%s: no memory to decompress it",
                         input->path);
    }
    return error_set(err, IMBREX_STATUS_FORMAT, "%s: not good zstd: %s", input->path,
                     ZSTD_getErrorName(result));
}

static enum imbrex_status read_text(struct sim_input *input, char *text, size_t max_bytes,
                                    size_t *num_bytes, struct imbrex_error *err)
{
    if (!input->is_compressed) {
        return read_raw(input, text, max_bytes, num_bytes, err);
    }
    ZSTD_outBuffer output = {.dst = text, .size = max_bytes};
    while (output.pos == 0) {
        ZSTD_inBuffer raw = {.src = input->raw, .size = input->raw_end, .pos = input->raw_at};
        if (raw.pos == raw.size) {
            TRY(read_raw(input, input->raw, READ_BYTES, &input->raw_end, err));
            input->raw_at = 0;
            raw = (ZSTD_inBuffer){.src = input->raw, .size = input->raw_end};
            if (raw.size == 0 && input->frame_rest != 0) {
                /* What the stream still holds may come out without new input. */
                size_t rest = ZSTD_decompressStream(input->stream, &output, &raw);
                if (!ZSTD_isError(rest) && output.pos > 0) {
                    break;
                }
                return error_set(err, IMBREX_STATUS_FORMAT,
                                 "%s: the compressed file ends too early", input->path);
            }
            if (raw.size == 0) {
                break;
            }
        }
        size_t rest = ZSTD_decompressStream(input->stream, &output, &raw);
        if (ZSTD_isError(rest)) {
            return report_zstd(input, rest, err);
        }
        input->frame_rest = rest;
        input->raw_at = raw.pos;
    }
    *num_bytes = output.pos;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_stream(struct sim_input *input, struct imbrex_error *err)
{
    input->stream = ZSTD_createDStream();
    return input->stream != NULL ? IMBREX_STATUS_OK
                                 : error_out_of_memory(err, "decompression", sizeof(void *));
}

static void close_stream(struct sim_input *input)
{
    ZSTD_freeDStream(input->stream);
}
#else
static enum imbrex_status read_text(struct sim_input *input, char *text, size_t max_bytes,
                                    size_t *num_bytes, struct imbrex_error *err)
{
    return read_raw(input, text, max_bytes, num_bytes, err);
}

static enum imbrex_status open_stream(struct sim_input *input, struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: compressed with zstd, which this build cannot read (it was built without "
                     "libzstd)",
                     input->path);
}

static void close_stream(struct sim_input *input)
{
    (void)input;
}
#endif

/* Reads the first bytes and looks whether they are the magic number of a zstd frame. */
static enum imbrex_status look(struct sim_input *input, struct imbrex_error *err)
{
    static const unsigned char magic[4] = {0x28, 0xb5, 0x2f, 0xfd};
    size_t num_bytes = 1;

    input->max_text_bytes = 2 * READ_BYTES;
    input->text = malloc(input->max_text_bytes);
    if (input->text == NULL) {
        return error_out_of_memory(err, "lines of a trace", input->max_text_bytes);
    }
    while (input->end < sizeof(magic) && num_bytes > 0) {
        TRY(read_raw(input, input->text + input->end, READ_BYTES, &num_bytes, err));
        input->end += num_bytes;
    }
    if (input->end < sizeof(magic) || memcmp(input->text, magic, sizeof(magic)) != 0) {
        return IMBREX_STATUS_OK;
    }
    input->is_compressed = true;
    TRY(open_stream(input, err));
    input->raw = malloc(2 * READ_BYTES);
    if (input->raw == NULL) {
        return error_out_of_memory(err, "compressed bytes of a trace", 2 * READ_BYTES);
    }
    memcpy(input->raw, input->text, input->end);
    input->raw_end = input->end;
    input->end = 0;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create(const char *path, int fd, bool owns_fd, const void *bytes,
                                 size_t num_bytes, struct sim_input **input,
                                 struct imbrex_error *err)
{
    struct sim_input *created = calloc(1, sizeof(*created));

    if (created == NULL) {
        if (owns_fd) {
            close(fd);
        }
        return error_out_of_memory(err, "a trace", sizeof(*created));
    }
    created->path = path;
    created->fd = fd;
    created->owns_fd = owns_fd;
    created->bytes = bytes;
    created->num_bytes = num_bytes;
    *input = created;
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_input_open(const char *path, struct sim_input **input,
                                  struct imbrex_error *err)
{
    if (strcmp(path, "-") == 0) {
        return create("standard input", STDIN_FILENO, false, NULL, 0, input, err);
    }
    /* 0 like any other, where standard input is closed. */
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        return error_set(err, errno == ENOENT ? IMBREX_STATUS_NOT_FOUND : IMBREX_STATUS_IO,
                         "%s: cannot open: %s", path, system_error_text(errno));
    }
    return create(path, fd, true, NULL, 0, input, err);
}

enum imbrex_status sim_input_view(const char *path, const void *bytes, size_t num_bytes,
                                  struct sim_input **input, struct imbrex_error *err)
{
    return create(path, -1, false, bytes, num_bytes, input, err);
}

void sim_input_watch(struct sim_input *input, sim_continue_fn *may_continue, void *user)
{
    input->may_continue = may_continue;
    input->user = user;
}

void sim_input_close(struct sim_input *input)
{
    if (input == NULL) {
        return;
    }
    if (input->owns_fd) {
        close(input->fd);
    }
    close_stream(input);
    free(input->raw);
    free(input->text);
    free(input);
}

/* Moves what was not given yet to the front, and makes room for more behind it. */
static enum imbrex_status make_room(struct sim_input *input, struct imbrex_error *err)
{
    if (input->at > 0) {
        memmove(input->text, input->text + input->at, input->end - input->at);
        input->end -= input->at;
        input->at = 0;
    }
    if (input->max_text_bytes - input->end > READ_BYTES / 2) {
        return IMBREX_STATUS_OK;
    }
    if (input->max_text_bytes >= SIM_MAX_LINE_BYTES) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: line %lld: expected at most %zu bytes, found more", input->path,
                         (long long)input->line_number + 1, SIM_MAX_LINE_BYTES);
    }
    char *text = realloc(input->text, 2 * input->max_text_bytes);
    if (text == NULL) {
        return error_out_of_memory(err, "a line of a trace", 2 * input->max_text_bytes);
    }
    input->text = text;
    input->max_text_bytes *= 2;
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_input_line(struct sim_input *input, const char **line, size_t *num_bytes,
                                  struct imbrex_error *err)
{
    size_t num_seen = 0;

    if (!input->has_looked) {
        TRY(look(input, err));
        input->has_looked = true;
    }
    for (;;) {
        char *begin = input->text + input->at;
        size_t num_there = input->end - input->at;
        char *newline = memchr(begin + num_seen, '\n', num_there - num_seen);
        if (newline != NULL || (input->is_at_end && num_there > 0)) {
            *num_bytes = newline != NULL ? (size_t)(newline - begin) : num_there;
            *line = begin;
            input->at += *num_bytes + (newline != NULL);
            input->line_number++;
            return IMBREX_STATUS_OK;
        }
        if (input->is_at_end) {
            *line = NULL;
            *num_bytes = 0;
            return IMBREX_STATUS_OK;
        }
        num_seen = num_there;
        TRY(make_room(input, err));
        size_t num_read = 0;
        TRY(read_text(input, input->text + input->end, input->max_text_bytes - input->end,
                      &num_read, err));
        input->end += num_read;
        input->is_at_end = num_read == 0;
    }
}

int64_t sim_input_line_number(const struct sim_input *input)
{
    return input->line_number;
}

const char *sim_input_path(const struct sim_input *input)
{
    return input->path;
}
