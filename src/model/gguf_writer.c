/* SPDX-License-Identifier: Apache-2.0 */
#include "model/gguf_writer.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

#define VERSION 3
#define FIRST_BUFFER_BYTES 4096

static const unsigned char zeros[GGUF_WRITER_ALIGNMENT];

/* Bytes to the next multiple of the alignment. */
static size_t padding_at(uint64_t position)
{
    return (size_t)((GGUF_WRITER_ALIGNMENT - position % GGUF_WRITER_ALIGNMENT) %
                    GGUF_WRITER_ALIGNMENT);
}

/* ---- buffers --------------------------------------------------------------------------------- */

static enum imbrex_status append(struct gguf_writer_buffer *buffer, const void *bytes,
                                 size_t num_bytes, struct imbrex_error *err)
{
    size_t needed, max_bytes = buffer->max_bytes == 0 ? FIRST_BUFFER_BYTES : buffer->max_bytes;
    if (!size_add(buffer->num_bytes, num_bytes, &needed)) {
        needed = SIZE_MAX;
    }
    while (max_bytes < needed) {
        max_bytes = max_bytes > SIZE_MAX / 2 ? SIZE_MAX : 2 * max_bytes;
    }
    if (max_bytes != buffer->max_bytes) {
        unsigned char *grown = realloc(buffer->bytes, max_bytes);
        if (grown == NULL) {
            return error_out_of_memory(err, "metadata", max_bytes);
        }
        buffer->bytes = grown;
        buffer->max_bytes = max_bytes;
    }
    if (num_bytes > 0) {
        memcpy(buffer->bytes + buffer->num_bytes, bytes, num_bytes);
    }
    buffer->num_bytes = needed;
    return IMBREX_STATUS_OK;
}

/* Little-endian. */
static enum imbrex_status append_integer(struct gguf_writer_buffer *buffer, uint64_t value,
                                         size_t num_bytes, struct imbrex_error *err)
{
    unsigned char bytes[8];
    for (size_t i = 0; i < num_bytes; i++) {
        bytes[i] = (unsigned char)(value >> (8 * i));
    }
    return append(buffer, bytes, num_bytes, err);
}

static enum imbrex_status append_text(struct gguf_writer_buffer *buffer, const char *bytes,
                                      size_t num_bytes, struct imbrex_error *err)
{
    TRY(append_integer(buffer, num_bytes, 8, err));
    return append(buffer, bytes, num_bytes, err);
}

static uint32_t float_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    return bits;
}

/* ---- values ---------------------------------------------------------------------------------- */

static enum imbrex_status begin_value(struct gguf_writer *writer, const char *key, size_t key_bytes,
                                      enum gguf_type type, struct imbrex_error *err)
{
    TRY(append_text(&writer->values, key, key_bytes, err));
    TRY(append_integer(&writer->values, (uint64_t)type, 4, err));
    writer->num_values++;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_writer_put_uint32(struct gguf_writer *writer, const char *key,
                                          uint32_t value, struct imbrex_error *err)
{
    TRY(begin_value(writer, key, strlen(key), GGUF_TYPE_UINT32, err));
    return append_integer(&writer->values, value, 4, err);
}

enum imbrex_status gguf_writer_put_float32(struct gguf_writer *writer, const char *key, float value,
                                           struct imbrex_error *err)
{
    TRY(begin_value(writer, key, strlen(key), GGUF_TYPE_FLOAT32, err));
    return append_integer(&writer->values, float_bits(value), 4, err);
}

enum imbrex_status gguf_writer_put_bool(struct gguf_writer *writer, const char *key, bool value,
                                        struct imbrex_error *err)
{
    TRY(begin_value(writer, key, strlen(key), GGUF_TYPE_BOOL, err));
    return append_integer(&writer->values, value, 1, err);
}

enum imbrex_status gguf_writer_put_string(struct gguf_writer *writer, const char *key,
                                          const char *text, struct imbrex_error *err)
{
    TRY(begin_value(writer, key, strlen(key), GGUF_TYPE_STRING, err));
    return append_text(&writer->values, text, strlen(text), err);
}

enum imbrex_status gguf_writer_put_value(struct gguf_writer *writer, const struct gguf_value *value,
                                         struct imbrex_error *err)
{
    TRY(begin_value(writer, value->key.bytes, value->key.num_bytes, value->type, err));
    if (value->type == GGUF_TYPE_ARRAY) {
        TRY(append_integer(&writer->values, (uint64_t)value->element_type, 4, err));
        TRY(append_integer(&writer->values, value->num_elements, 8, err));
    }
    /* Elements lie in a file of the same byte order one behind the other. */
    return append(&writer->values, value->bytes, gguf_value_bytes(value), err);
}

enum imbrex_status gguf_writer_begin_array(struct gguf_writer *writer, const char *key,
                                           enum gguf_type element_type, uint64_t num_elements,
                                           struct imbrex_error *err)
{
    TRY(begin_value(writer, key, strlen(key), GGUF_TYPE_ARRAY, err));
    TRY(append_integer(&writer->values, (uint64_t)element_type, 4, err));
    return append_integer(&writer->values, num_elements, 8, err);
}

enum imbrex_status gguf_writer_append_string(struct gguf_writer *writer, const char *bytes,
                                             size_t num_bytes, struct imbrex_error *err)
{
    return append_text(&writer->values, bytes, num_bytes, err);
}

enum imbrex_status gguf_writer_append_int32(struct gguf_writer *writer, int32_t value,
                                            struct imbrex_error *err)
{
    return append_integer(&writer->values, (uint32_t)value, 4, err);
}

enum imbrex_status gguf_writer_append_float32(struct gguf_writer *writer, float value,
                                              struct imbrex_error *err)
{
    return append_integer(&writer->values, float_bits(value), 4, err);
}

/* ---- tensors --------------------------------------------------------------------------------- */

enum imbrex_status gguf_writer_add_tensor(struct gguf_writer *writer, const char *name,
                                          int32_t num_dims, const int64_t *shape, enum dtype dtype,
                                          struct imbrex_error *err)
{
    size_t num_bytes =
        num_dims > 0 ? dtype_row_bytes(dtype, shape[num_dims - 1]) : dtype_block_bytes(dtype);
    TRY(append_text(&writer->tensors, name, strlen(name), err));
    TRY(append_integer(&writer->tensors, (uint64_t)num_dims, 4, err));
    for (int32_t i = num_dims - 1; i >= 0; i--) {
        TRY(append_integer(&writer->tensors, (uint64_t)shape[i], 8, err));
    }
    for (int32_t i = 0; i + 1 < num_dims; i++) {
        num_bytes *= (size_t)shape[i]; /* a tensor that is there, of which this is another form */
    }
    TRY(append_integer(&writer->tensors, gguf_tensor_type_id(dtype), 4, err));
    TRY(append_integer(&writer->tensors, writer->tensor_bytes, 8, err));
    writer->num_tensors++;
    writer->tensor_bytes += num_bytes;
    writer->tensor_bytes += padding_at(writer->tensor_bytes);
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_writer_begin_tensors(struct gguf_writer *writer, struct imbrex_error *err)
{
    struct gguf_writer_buffer header = {0};
    enum imbrex_status status;
    TRY_OR_FAIL(append(&header, "GGUF", 4, err));
    TRY_OR_FAIL(append_integer(&header, VERSION, 4, err));
    TRY_OR_FAIL(append_integer(&header, writer->num_tensors, 8, err));
    TRY_OR_FAIL(append_integer(&header, writer->num_values, 8, err));
    TRY_OR_FAIL(file_writer_write(&writer->file, header.bytes, header.num_bytes, err));
    TRY_OR_FAIL(
        file_writer_write(&writer->file, writer->values.bytes, writer->values.num_bytes, err));
    TRY_OR_FAIL(
        file_writer_write(&writer->file, writer->tensors.bytes, writer->tensors.num_bytes, err));
    TRY_OR_FAIL(gguf_writer_end_tensor(writer, err));
    writer->data_begin = writer->file.num_bytes;
fail:
    free(header.bytes);
    return status;
}

enum imbrex_status gguf_writer_write(struct gguf_writer *writer, const void *bytes,
                                     size_t num_bytes, struct imbrex_error *err)
{
    return file_writer_write(&writer->file, bytes, num_bytes, err);
}

enum imbrex_status gguf_writer_end_tensor(struct gguf_writer *writer, struct imbrex_error *err)
{
    return file_writer_write(&writer->file, zeros, padding_at(writer->file.num_bytes), err);
}

/* ---- the file -------------------------------------------------------------------------------- */

enum imbrex_status gguf_writer_open(const char *path, bool overwrite, struct gguf_writer *writer,
                                    struct imbrex_error *err)
{
    struct gguf_writer opened = {0};
    TRY(file_writer_open(path, overwrite, &opened.file, err));
    *writer = opened;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_writer_commit(struct gguf_writer *writer, struct imbrex_error *err)
{
    uint64_t num_written = writer->file.num_bytes - writer->data_begin;
    if (num_written != writer->tensor_bytes) {
        return error_set(err, IMBREX_STATUS_INTERNAL,
                         "%s: expected %" PRIu64 " bytes of tensors, found %" PRIu64 " written",
                         writer->file.path, writer->tensor_bytes, num_written);
    }
    TRY(file_writer_commit(&writer->file, err));
    gguf_writer_abandon(writer);
    return IMBREX_STATUS_OK;
}

void gguf_writer_abandon(struct gguf_writer *writer)
{
    file_writer_abandon(&writer->file);
    free(writer->values.bytes);
    free(writer->tensors.bytes);
    *writer = (struct gguf_writer){0};
}
