/* SPDX-License-Identifier: Apache-2.0 */
/* The header of a safetensors file, read without trust: every number is checked before it is added,
 * multiplied or pointed with. The tensors of a good file tile its data exactly; what overlaps or
 * leaves a hole is refused, because such bytes would be read twice or never (and could hide
 * something else). */
#include "model/safetensors.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/memory.h"

#define LENGTH_BYTES 8

struct dtype_row {
    const char *name;
    size_t num_bytes;
    enum dtype dtype; /* DTYPE_COUNT: known to the format only */
};

static const struct dtype_row dtype_rows[] = {
    {"F32", 4, DTYPE_F32},       {"F16", 2, DTYPE_F16},       {"BF16", 2, DTYPE_BF16},
    {"BOOL", 1, DTYPE_COUNT},    {"U8", 1, DTYPE_COUNT},      {"I8", 1, DTYPE_COUNT},
    {"F8_E5M2", 1, DTYPE_COUNT}, {"F8_E4M3", 1, DTYPE_COUNT}, {"I16", 2, DTYPE_COUNT},
    {"U16", 2, DTYPE_COUNT},     {"I32", 4, DTYPE_COUNT},     {"U32", 4, DTYPE_COUNT},
    {"F64", 8, DTYPE_COUNT},     {"I64", 8, DTYPE_COUNT},     {"U64", 8, DTYPE_COUNT},
};

/* What is being parsed, for messages and bounds. */
struct source {
    const char *path;
    const unsigned char *data; /* behind the header */
    size_t data_bytes;
    struct imbrex_error *err;
};

/* FORMAT about one field of one tensor. */
static enum imbrex_status field_error(const struct source *source, const char *name,
                                      const char *field, const char *expected, const char *found)
{
    return error_set(source->err, IMBREX_STATUS_FORMAT, "%s: %.128s: %s: expected %s, found %s",
                     source->path, name, field, expected, found);
}

static enum imbrex_status read_header_length(const char *path, const unsigned char *bytes,
                                             size_t num_bytes, size_t *header_bytes,
                                             struct imbrex_error *err)
{
    uint64_t length = 0;
    if (num_bytes < LENGTH_BYTES) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: header length: expected %d bytes, found a file of %zu", path,
                         LENGTH_BYTES, num_bytes);
    }
    for (int i = 0; i < LENGTH_BYTES; i++) {
        length |= (uint64_t)bytes[i] << (8 * i);
    }
    if (length > SAFETENSORS_MAX_HEADER_BYTES) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: header length: expected at most %u, found %" PRIu64
                         " (not a safetensors file?)",
                         path, SAFETENSORS_MAX_HEADER_BYTES, length);
    }
    if (length > num_bytes - LENGTH_BYTES) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: header length: expected at most %zu (the file has %zu bytes), found "
                         "%" PRIu64 " (file truncated?)",
                         path, num_bytes - LENGTH_BYTES, num_bytes, length);
    }
    *header_bytes = (size_t)length;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_dtype(const struct source *source, const json_t *entry,
                                     struct checkpoint_tensor *tensor, size_t *element_bytes)
{
    const json_t *dtype = json_object_get(entry, "dtype");
    if (!json_is_string(dtype)) {
        return field_error(source, tensor->name, "dtype", "a string", json_kind(dtype));
    }
    tensor->dtype_name = json_string_value(dtype);
    for (size_t i = 0; i < sizeof(dtype_rows) / sizeof(dtype_rows[0]); i++) {
        if (strcmp(tensor->dtype_name, dtype_rows[i].name) == 0) {
            tensor->dtype = dtype_rows[i].dtype;
            *element_bytes = dtype_rows[i].num_bytes;
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(source->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: %.128s: dtype: expected a type such as BF16, F16 or F32, found \"%.32s\"",
                     source->path, tensor->name, tensor->dtype_name);
}

/* Also the bytes that a tensor of this shape takes. */
static enum imbrex_status read_shape(const struct source *source, const json_t *entry,
                                     struct checkpoint_tensor *tensor, size_t element_bytes)
{
    const json_t *shape = json_object_get(entry, "shape");
    size_t num_bytes = element_bytes;
    char found[48];
    if (!json_is_array(shape)) {
        return field_error(source, tensor->name, "shape", "an array", json_kind(shape));
    }
    if (json_array_size(shape) > IMBREX_MAX_TENSOR_DIMS) {
        return error_set(source->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %.128s: shape: expected at most %d dimensions, found %zu",
                         source->path, tensor->name, IMBREX_MAX_TENSOR_DIMS,
                         json_array_size(shape));
    }
    tensor->num_dims = (int32_t)json_array_size(shape);
    for (int32_t i = 0; i < tensor->num_dims; i++) {
        const json_t *extent = json_array_get(shape, (size_t)i);
        if (!json_is_integer(extent) || json_integer_value(extent) < 0) {
            return field_error(source, tensor->name, "shape", "integers that are not negative",
                               json_is_integer(extent) ? "a negative one" : json_kind(extent));
        }
        tensor->shape[i] = json_integer_value(extent);
        if ((uint64_t)tensor->shape[i] > SIZE_MAX ||
            !size_mul(num_bytes, (size_t)tensor->shape[i], &num_bytes)) {
            snprintf(found, sizeof(found), "more (dimension %" PRId32 ")", i);
            return field_error(source, tensor->name, "shape", "at most 2^64 bytes", found);
        }
    }
    tensor->num_bytes = num_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_offsets(const struct source *source, const json_t *entry,
                                       struct checkpoint_tensor *tensor)
{
    const json_t *offsets = json_object_get(entry, "data_offsets");
    uint64_t range[2];
    char expected[64], found[64];
    if (!json_is_array(offsets) || json_array_size(offsets) != 2) {
        return field_error(source, tensor->name, "data_offsets", "an array of two integers",
                           json_is_array(offsets) ? "an array of another length"
                           : offsets == NULL      ? "nothing"
                                                  : json_kind(offsets));
    }
    for (size_t i = 0; i < 2; i++) {
        const json_t *offset = json_array_get(offsets, i);
        if (!json_is_integer(offset) || json_integer_value(offset) < 0) {
            return field_error(source, tensor->name, "data_offsets",
                               "integers that are not negative",
                               json_is_integer(offset) ? "a negative one" : json_kind(offset));
        }
        range[i] = (uint64_t)json_integer_value(offset);
    }
    snprintf(found, sizeof(found), "[%" PRIu64 ", %" PRIu64 "]", range[0], range[1]);
    if (range[0] > range[1]) {
        return field_error(source, tensor->name, "data_offsets", "begin <= end", found);
    }
    if (range[1] > source->data_bytes) {
        snprintf(expected, sizeof(expected), "an end within the %zu bytes of data",
                 source->data_bytes);
        return field_error(source, tensor->name, "data_offsets", expected, found);
    }
    if (range[1] - range[0] != tensor->num_bytes) {
        snprintf(expected, sizeof(expected), "%zu bytes by dtype and shape", tensor->num_bytes);
        snprintf(found, sizeof(found), "%" PRIu64, range[1] - range[0]);
        return field_error(source, tensor->name, "data_offsets", expected, found);
    }
    tensor->elements = source->data + range[0];
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_tensor(const struct source *source, const char *name,
                                      const json_t *entry, struct checkpoint_tensor *tensor)
{
    size_t element_bytes = 0;
    if (!json_is_object(entry)) {
        return error_set(source->err, IMBREX_STATUS_FORMAT,
                         "%s: %.128s: expected an object, found %s", source->path, name,
                         json_kind(entry));
    }
    *tensor = (struct checkpoint_tensor){.name = name, .file = source->path};
    TRY(read_dtype(source, entry, tensor, &element_bytes));
    TRY(read_shape(source, entry, tensor, element_bytes));
    return read_offsets(source, entry, tensor);
}

static enum imbrex_status check_metadata(const struct source *source, const json_t *metadata)
{
    const char *key;
    json_t *value;
    if (!json_is_object(metadata)) {
        return error_set(source->err, IMBREX_STATUS_FORMAT,
                         "%s: __metadata__: expected an object, found %s", source->path,
                         json_kind(metadata));
    }
    json_object_foreach((json_t *)(uintptr_t)metadata, key, value)
    {
        if (!json_is_string(value)) {
            return error_set(source->err, IMBREX_STATUS_FORMAT,
                             "%s: __metadata__: %.64s: expected a string, found %s", source->path,
                             key, json_kind(value));
        }
    }
    return IMBREX_STATUS_OK;
}

/* By begin, then by end: an empty tensor comes before one that begins where it stands. */
static int compare_offsets(const void *left, const void *right)
{
    const struct checkpoint_tensor *a = left, *b = right;
    if (a->elements != b->elements) {
        return a->elements < b->elements ? -1 : 1;
    }
    return (a->num_bytes > b->num_bytes) - (a->num_bytes < b->num_bytes);
}

static int compare_names(const void *left, const void *right)
{
    const struct checkpoint_tensor *a = left, *b = right;
    return strcmp(a->name, b->name);
}

/* Sorts the tensors by their place and checks that they tile [0, data_bytes). */
static enum imbrex_status check_tiling(const struct source *source,
                                       struct checkpoint_tensor *tensors, size_t num_tensors)
{
    size_t end = 0;
    char expected[64], found[64];
    if (num_tensors > 0) {
        qsort(tensors, num_tensors, sizeof(tensors[0]), compare_offsets);
    }
    for (size_t i = 0; i < num_tensors; i++) {
        size_t begin = (size_t)(tensors[i].elements - source->data);
        if (begin != end) {
            snprintf(expected, sizeof(expected), "begin %zu, the end of the tensor before", end);
            snprintf(found, sizeof(found), "%zu (%s)", begin, begin < end ? "overlap" : "hole");
            return field_error(source, tensors[i].name, "data_offsets", expected, found);
        }
        end = begin + tensors[i].num_bytes;
    }
    if (end != source->data_bytes) {
        return error_set(source->err, IMBREX_STATUS_FORMAT,
                         "%s: data: expected %zu bytes, the end of the last tensor, found %zu",
                         source->path, end, source->data_bytes);
    }
    return IMBREX_STATUS_OK;
}

/* The tensors of the header into tensors[], which has room for every member of `header`. */
static enum imbrex_status read_tensors(const struct source *source, json_t *header,
                                       struct checkpoint_tensor *tensors, size_t *num_tensors)
{
    const char *name;
    json_t *entry;
    size_t num_read = 0;
    json_object_foreach(header, name, entry)
    {
        if (strcmp(name, "__metadata__") == 0) {
            TRY(check_metadata(source, entry));
        } else {
            TRY(read_tensor(source, name, entry, &tensors[num_read]));
            num_read++;
        }
    }
    *num_tensors = num_read;
    return IMBREX_STATUS_OK;
}

enum imbrex_status safetensors_parse(const char *path, const unsigned char *bytes, size_t num_bytes,
                                     struct safetensors *result, struct imbrex_error *err)
{
    enum imbrex_status status;
    size_t header_bytes = 0, array_bytes, num_tensors = 0;
    json_t *header = NULL;
    struct checkpoint_tensor *tensors = NULL;
    TRY(read_header_length(path, bytes, num_bytes, &header_bytes, err));
    TRY(json_parse_object(path, bytes + LENGTH_BYTES, header_bytes, &header, err));

    struct source source = {.path = path,
                            .data = bytes + LENGTH_BYTES + header_bytes,
                            .data_bytes = num_bytes - LENGTH_BYTES - header_bytes,
                            .err = err};
    /* One more than needed, so that a header without tensors is no request for 0 bytes. */
    if (!size_mul(json_object_size(header) + 1, sizeof(tensors[0]), &array_bytes)) {
        array_bytes = SIZE_MAX;
    }
    tensors = malloc(array_bytes);
    if (tensors == NULL) {
        status = error_out_of_memory(err, path, array_bytes);
        goto fail;
    }
    TRY_OR_FAIL(read_tensors(&source, header, tensors, &num_tensors));
    TRY_OR_FAIL(check_tiling(&source, tensors, num_tensors));
    if (num_tensors > 0) {
        qsort(tensors, num_tensors, sizeof(tensors[0]), compare_names);
    }
    /* A tensor takes at least ten bytes of at most SAFETENSORS_MAX_HEADER_BYTES. */
    *result = (struct safetensors){
        .tensors = tensors, .num_tensors = (int32_t)num_tensors, .header = header};
    return IMBREX_STATUS_OK;

fail:
    free(tensors);
    json_decref(header);
    return status;
}

void safetensors_release(struct safetensors *result)
{
    free(result->tensors);
    json_decref(result->header);
    *result = (struct safetensors){0};
}
