/* SPDX-License-Identifier: Apache-2.0 */
/* The reader of GGUF files. Every count is compared with the bytes that are left before memory is
 * asked for, so that a small file cannot claim much: an entry takes 13 bytes of the file at least.
 * The values are walked twice, first to check them and count their strings, then to place these in
 * one array. Duplicates and overlaps are found by sorting. */
#include "model/gguf.h"

#include <assert.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"

#define MAGIC "GGUF"
#define MAGIC_BYTES 4
#define DEFAULT_ALIGNMENT 32
#define MAX_ALIGNMENT (1 << 30)
#define MAX_KEY_BYTES 65535         /* the format's limit */
#define MAX_TENSOR_NAME_BYTES 255   /* the format says 64 */
#define MAX_TENSOR_DIMS 4           /* likewise */
#define MIN_VALUE_BYTES (8 + 1 + 4) /* length and one byte of the key, type */
#define MIN_TENSOR_BYTES (8 + 1 + 4 + 4 + 8)
#define SUBJECT_MAX_BYTES 128 /* of a name in a message */

struct reader {
    const char *path;
    const unsigned char *bytes;
    size_t num_bytes, position;
    struct gguf_string subject;  /* what is being read, for messages */
    struct gguf_string *strings; /* NULL on the first walk */
    size_t num_strings;
    struct imbrex_error *err;
};

/* "%.*s" of a string that comes from a file */
#define SUBJECT(string)                                                                     \
    (int)((string).num_bytes < SUBJECT_MAX_BYTES ? (string).num_bytes : SUBJECT_MAX_BYTES), \
        (string).bytes

/* ---- types ----------------------------------------------------------------------------------- */

struct type_row {
    const char *name;
    size_t num_bytes; /* 0: no fixed size; a row without a name: no type */
};

static const struct type_row types[] = {
#define TYPE_ROW(name, id, num_bytes) [id] = {#name, num_bytes},
    GGUF_TYPE_LIST(TYPE_ROW)
#undef TYPE_ROW
};
#define NUM_TYPES (sizeof(types) / sizeof(types[0]))

/* Names of the ids that have been given out; those withdrawn since are named too. */
static const char *const tensor_types[] = {
    "F32",   "F16",        "Q4_0",       "Q4_1",       "Q4_2",     "Q4_3",     "Q5_0",
    "Q5_1",  "Q8_0",       "Q8_1",       "Q2_K",       "Q3_K",     "Q4_K",     "Q5_K",
    "Q6_K",  "Q8_K",       "IQ2_XXS",    "IQ2_XS",     "IQ3_XXS",  "IQ1_S",    "IQ4_NL",
    "IQ3_S", "IQ2_S",      "IQ4_XS",     "I8",         "I16",      "I32",      "I64",
    "F64",   "IQ1_M",      "BF16",       "Q4_0_4_4",   "Q4_0_4_8", "Q4_0_8_8", "TQ1_0",
    "TQ2_0", "IQ4_NL_4_4", "IQ4_NL_4_8", "IQ4_NL_8_8", "MXFP4",    "NVFP4",    "Q1_0",
};
#define NUM_TENSOR_TYPES (sizeof(tensor_types) / sizeof(tensor_types[0]))

const char *gguf_tensor_type_name(uint32_t type_id)
{
    return type_id < NUM_TENSOR_TYPES ? tensor_types[type_id] : "an unknown type";
}

uint32_t gguf_tensor_type_id(enum dtype dtype)
{
    uint32_t type_id = 0;
    while (strcmp(tensor_types[type_id], dtype_name(dtype)) != 0) {
        type_id++;
        assert(type_id < NUM_TENSOR_TYPES);
    }
    return type_id;
}

static enum dtype find_dtype(uint32_t type_id)
{
    for (int i = 0; i < DTYPE_COUNT; i++) {
        if (gguf_tensor_type_id((enum dtype)i) == type_id) {
            return (enum dtype)i;
        }
    }
    return DTYPE_COUNT;
}

/* ---- pieces of the file ---------------------------------------------------------------------- */

static uint64_t load_little_endian(const unsigned char *bytes, size_t num_bytes)
{
    uint64_t value = 0;
    for (size_t i = 0; i < num_bytes; i++) {
        value |= (uint64_t)bytes[i] << (8 * i);
    }
    return value;
}

static size_t num_left(const struct reader *reader)
{
    return reader->num_bytes - reader->position;
}

static enum imbrex_status fail_at_end(const struct reader *reader, const char *what,
                                      uint64_t num_wanted)
{
    return error_set(reader->err, IMBREX_STATUS_FORMAT,
                     "%s: %.*s: %s: expected %" PRIu64 " bytes at offset %zu, found %zu (file "
                     "truncated?)",
                     reader->path, SUBJECT(reader->subject), what, num_wanted, reader->position,
                     num_left(reader));
}

static enum imbrex_status read_integer(struct reader *reader, const char *what, size_t num_bytes,
                                       uint64_t *value)
{
    if (num_left(reader) < num_bytes) {
        return fail_at_end(reader, what, num_bytes);
    }
    *value = load_little_endian(reader->bytes + reader->position, num_bytes);
    reader->position += num_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_string(struct reader *reader, const char *what,
                                      struct gguf_string *string)
{
    uint64_t length = 0;
    TRY(read_integer(reader, what, 8, &length));
    if (length > num_left(reader)) {
        return fail_at_end(reader, what, length);
    }
    *string = (struct gguf_string){(const char *)reader->bytes + reader->position, (size_t)length};
    reader->position += (size_t)length;
    return IMBREX_STATUS_OK;
}

/* A key or a tensor's name: not empty, no NUL, so that it can be compared with C strings. */
static enum imbrex_status read_name(struct reader *reader, const char *what, size_t max_bytes,
                                    struct gguf_string *name)
{
    reader->subject = (struct gguf_string){what, strlen(what)};
    TRY(read_string(reader, "length", name));
    if (name->num_bytes == 0 || name->num_bytes > max_bytes) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %s at offset %zu: expected 1 to %zu bytes, found %zu", reader->path,
                         what, reader->position - name->num_bytes, max_bytes, name->num_bytes);
    }
    if (memchr(name->bytes, '\0', name->num_bytes) != NULL) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %s at offset %zu: expected no NUL, found one", reader->path, what,
                         reader->position - name->num_bytes);
    }
    reader->subject = *name;
    return IMBREX_STATUS_OK;
}

static int compare_strings(const struct gguf_string *a, const struct gguf_string *b)
{
    size_t shared = a->num_bytes < b->num_bytes ? a->num_bytes : b->num_bytes;
    int order = memcmp(a->bytes, b->bytes, shared);
    return order != 0 ? order : (a->num_bytes > b->num_bytes) - (a->num_bytes < b->num_bytes);
}

/* ---- header ---------------------------------------------------------------------------------- */

bool gguf_is_magic(const unsigned char *bytes, size_t num_bytes)
{
    return num_bytes >= MAGIC_BYTES && memcmp(bytes, MAGIC, MAGIC_BYTES) == 0;
}

static enum imbrex_status read_version(struct reader *reader, uint32_t *version)
{
    uint64_t value = 0;
    TRY(read_integer(reader, "version", 4, &value));
    if (value == 2 || value == 3) {
        *version = (uint32_t)value;
        return IMBREX_STATUS_OK;
    }
    if (value != 0 && (value & 0xffff) == 0) {
        return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: version: expected a little-endian file, found a big-endian one",
                         reader->path);
    }
    return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: version: expected GGUF version 2 or 3, found %" PRIu64, reader->path,
                     value);
}

static enum imbrex_status read_count(struct reader *reader, const char *what, uint64_t *count)
{
    return read_integer(reader, what, 8, count);
}

/* Against what the bytes that are left could hold. */
static enum imbrex_status check_count(const struct reader *reader, const char *what, uint64_t count,
                                      size_t min_bytes)
{
    if (count > num_left(reader) / min_bytes) {
        return error_set(
            reader->err, IMBREX_STATUS_FORMAT,
            "%s: %s: expected at most %zu in the %zu bytes that follow, found %" PRIu64,
            reader->path, what, num_left(reader) / min_bytes, num_left(reader), count);
    }
    return IMBREX_STATUS_OK;
}

/* ---- values ---------------------------------------------------------------------------------- */

static enum imbrex_status read_type(struct reader *reader, const char *what, enum gguf_type *type)
{
    uint64_t id = 0;
    TRY(read_integer(reader, what, 4, &id));
    if (id >= NUM_TYPES || types[id].name == NULL) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: %s: expected an id in [0, %zu], found %" PRIu64, reader->path,
                         SUBJECT(reader->subject), what, NUM_TYPES - 1, id);
    }
    *type = (enum gguf_type)id;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_value_strings(struct reader *reader, struct gguf_value *value)
{
    struct gguf_string string;
    if (value->num_elements > num_left(reader) / 8) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: expected at most %zu strings in the %zu bytes that follow, "
                         "found %" PRIu64,
                         reader->path, SUBJECT(reader->subject), num_left(reader) / 8,
                         num_left(reader), value->num_elements);
    }
    if (reader->strings != NULL) {
        value->strings = reader->strings + reader->num_strings;
    }
    for (uint64_t i = 0; i < value->num_elements; i++) {
        TRY(read_string(reader, "string", &string));
        if (reader->strings != NULL) {
            reader->strings[reader->num_strings] = string;
        }
        reader->num_strings++;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_value_numbers(struct reader *reader, const struct gguf_value *value)
{
    size_t element_bytes = types[value->element_type].num_bytes;
    if (value->num_elements > num_left(reader) / element_bytes) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: expected at most %zu elements of type %s in the %zu bytes that "
                         "follow, found %" PRIu64,
                         reader->path, SUBJECT(reader->subject), num_left(reader) / element_bytes,
                         types[value->element_type].name, num_left(reader), value->num_elements);
    }
    if (value->element_type == GGUF_TYPE_BOOL) {
        for (uint64_t i = 0; i < value->num_elements; i++) {
            if (value->bytes[i] > 1) {
                return error_set(reader->err, IMBREX_STATUS_FORMAT,
                                 "%s: %.*s: expected a BOOL of 0 or 1, found %d", reader->path,
                                 SUBJECT(reader->subject), value->bytes[i]);
            }
        }
    }
    reader->position += (size_t)value->num_elements * element_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_value(struct reader *reader, struct gguf_value *value)
{
    struct gguf_value result = {.num_elements = 1};
    TRY(read_name(reader, "metadata key", MAX_KEY_BYTES, &result.key));
    TRY(read_type(reader, "type", &result.type));
    result.element_type = result.type;
    if (result.type == GGUF_TYPE_ARRAY) {
        TRY(read_type(reader, "type of the elements", &result.element_type));
        TRY(read_integer(reader, "number of elements", 8, &result.num_elements));
        if (result.element_type == GGUF_TYPE_ARRAY) {
            return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: %.*s: expected numbers or strings, found an array of arrays",
                             reader->path, SUBJECT(reader->subject));
        }
    }
    result.bytes = reader->bytes + reader->position;
    if (result.element_type == GGUF_TYPE_STRING) {
        TRY(read_value_strings(reader, &result));
    } else {
        TRY(read_value_numbers(reader, &result));
    }
    *value = result;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_values(struct reader *reader, struct gguf *gguf)
{
    for (uint64_t i = 0; i < gguf->num_values; i++) {
        TRY(read_value(reader, &gguf->values[i]));
    }
    return IMBREX_STATUS_OK;
}

static int compare_values(const void *left, const void *right)
{
    const struct gguf_value *a = left, *b = right;
    return compare_strings(&a->key, &b->key);
}

static enum imbrex_status sort_values(const struct reader *reader, struct gguf *gguf)
{
    if (gguf->num_values > 0) {
        qsort(gguf->values, (size_t)gguf->num_values, sizeof(gguf->values[0]), compare_values);
    }
    for (uint64_t i = 1; i < gguf->num_values; i++) {
        if (compare_values(&gguf->values[i - 1], &gguf->values[i]) == 0) {
            return error_set(reader->err, IMBREX_STATUS_FORMAT,
                             "%s: %.*s: expected each key once, found it twice", reader->path,
                             SUBJECT(gguf->values[i].key));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_metadata(struct reader *reader, struct gguf *gguf)
{
    size_t begin = reader->position, num_bytes;
    TRY(check_count(reader, "number of metadata keys", gguf->num_values, MIN_VALUE_BYTES));
    /* Both products are below eight times the file's size. */
    num_bytes = ((size_t)gguf->num_values + 1) * sizeof(gguf->values[0]);
    gguf->values = malloc(num_bytes);
    if (gguf->values == NULL) {
        return error_out_of_memory(reader->err, reader->path, num_bytes);
    }
    TRY(read_values(reader, gguf));
    num_bytes = (reader->num_strings + 1) * sizeof(gguf->strings[0]);
    gguf->strings = malloc(num_bytes);
    if (gguf->strings == NULL) {
        return error_out_of_memory(reader->err, reader->path, num_bytes);
    }
    reader->position = begin;
    reader->num_strings = 0;
    reader->strings = gguf->strings;
    TRY(read_values(reader, gguf));
    return sort_values(reader, gguf);
}

/* ---- tensors --------------------------------------------------------------------------------- */

static enum imbrex_status read_shape(struct reader *reader, struct gguf_tensor *tensor)
{
    uint64_t num_dims = 0, extent = 0;
    int64_t num_elements = 1;
    TRY(read_integer(reader, "number of dimensions", 4, &num_dims));
    if (num_dims > MAX_TENSOR_DIMS) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: expected at most %d dimensions, found %" PRIu64, reader->path,
                         SUBJECT(reader->subject), MAX_TENSOR_DIMS, num_dims);
    }
    tensor->num_dims = (int32_t)num_dims;
    for (int32_t i = tensor->num_dims - 1; i >= 0; i--) {
        TRY(read_integer(reader, "shape", 8, &extent));
        if (extent > INT64_MAX ||
            __builtin_mul_overflow(num_elements, (int64_t)extent, &num_elements)) {
            return error_set(reader->err, IMBREX_STATUS_FORMAT,
                             "%s: %.*s: shape: expected at most 2^63 elements, found an extent of "
                             "%" PRIu64,
                             reader->path, SUBJECT(reader->subject), extent);
        }
        tensor->shape[i] = (int64_t)extent;
    }
    return IMBREX_STATUS_OK;
}

/* Bytes by dtype and shape. The product of the extents fits int64_t. */
static enum imbrex_status measure_tensor(const struct reader *reader, struct gguf_tensor *tensor)
{
    int64_t row = tensor->num_dims > 0 ? tensor->shape[tensor->num_dims - 1] : 1;
    size_t num_bytes;
    if (tensor->dtype == DTYPE_COUNT) {
        return IMBREX_STATUS_OK;
    }
    int32_t block_elements = dtype_block_elements(tensor->dtype);
    if (row % block_elements != 0) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: expected rows of a multiple of %" PRId32
                         " elements (type %s), found %" PRId64,
                         reader->path, SUBJECT(reader->subject), block_elements,
                         dtype_name(tensor->dtype), row);
    }
    if (!size_mul((size_t)(row / block_elements), dtype_block_bytes(tensor->dtype), &num_bytes)) {
        num_bytes = SIZE_MAX;
    }
    for (int32_t i = 0; i + 1 < tensor->num_dims; i++) {
        if (!size_mul(num_bytes, (size_t)tensor->shape[i], &num_bytes)) {
            num_bytes = SIZE_MAX;
        }
    }
    tensor->num_bytes = num_bytes; /* compared with the file's in place_tensor */
    return IMBREX_STATUS_OK;
}

/* Leaves the offset in `offset`: where the tensors' bytes begin is known when all have been read.
 */
static enum imbrex_status read_tensor(struct reader *reader, const struct gguf *gguf,
                                      struct gguf_tensor *tensor, uint64_t *offset)
{
    uint64_t type_id = 0;
    *tensor = (struct gguf_tensor){0};
    TRY(read_name(reader, "tensor name", MAX_TENSOR_NAME_BYTES, &tensor->name));
    TRY(read_shape(reader, tensor));
    TRY(read_integer(reader, "type", 4, &type_id));
    tensor->type_id = (uint32_t)type_id;
    tensor->dtype = find_dtype(tensor->type_id);
    TRY(measure_tensor(reader, tensor));
    TRY(read_integer(reader, "offset", 8, offset));
    if (*offset % gguf->alignment != 0) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: offset: expected a multiple of general.alignment = %" PRIu32
                         ", found %" PRIu64,
                         reader->path, SUBJECT(reader->subject), gguf->alignment, *offset);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status place_tensor(const struct reader *reader, size_t begin, uint64_t offset,
                                       struct gguf_tensor *tensor)
{
    size_t num_data = reader->num_bytes - begin;
    if (offset > num_data || tensor->num_bytes > num_data - offset) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: %.*s: expected %zu bytes at offset %" PRIu64
                         ", found %zu bytes of tensors in the file (file truncated?)",
                         reader->path, SUBJECT(tensor->name), tensor->num_bytes, offset, num_data);
    }
    tensor->elements = reader->bytes + begin + (size_t)offset;
    return IMBREX_STATUS_OK;
}

/* By begin, then by end: an empty tensor comes before one that begins where it stands. */
static int compare_places(const void *left, const void *right)
{
    const struct gguf_tensor *a = left, *b = right;
    if (a->elements != b->elements) {
        return a->elements < b->elements ? -1 : 1;
    }
    return (a->num_bytes > b->num_bytes) - (a->num_bytes < b->num_bytes);
}

static int compare_names(const void *left, const void *right)
{
    const struct gguf_tensor *a = left, *b = right;
    return compare_strings(&a->name, &b->name);
}

/* Two tensors may not share bytes; gaps are padding. Then sorts them by name. */
static enum imbrex_status sort_tensors(const struct reader *reader, struct gguf *gguf)
{
    struct gguf_tensor *tensors = gguf->tensors;
    size_t num_tensors = (size_t)gguf->num_tensors;
    if (num_tensors == 0) {
        return IMBREX_STATUS_OK;
    }
    qsort(tensors, num_tensors, sizeof(tensors[0]), compare_places);
    for (size_t i = 1; i < num_tensors; i++) {
        if ((size_t)(tensors[i].elements - tensors[i - 1].elements) < tensors[i - 1].num_bytes) {
            return error_set(reader->err, IMBREX_STATUS_FORMAT,
                             "%s: %.*s: expected bytes of its own, found an overlap with %.*s",
                             reader->path, SUBJECT(tensors[i].name), SUBJECT(tensors[i - 1].name));
        }
    }
    qsort(tensors, num_tensors, sizeof(tensors[0]), compare_names);
    for (size_t i = 1; i < num_tensors; i++) {
        if (compare_names(&tensors[i - 1], &tensors[i]) == 0) {
            return error_set(reader->err, IMBREX_STATUS_FORMAT,
                             "%s: %.*s: expected each tensor once, found it twice", reader->path,
                             SUBJECT(tensors[i].name));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_alignment(const struct reader *reader, struct gguf *gguf)
{
    int32_t alignment = DEFAULT_ALIGNMENT;
    if (gguf_find(gguf, "general.alignment") != NULL) {
        TRY(gguf_get_int32(gguf, "general.alignment", 1, MAX_ALIGNMENT, &alignment, reader->err));
    }
    if ((alignment & (alignment - 1)) != 0) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: general.alignment: expected a power of two, found %" PRId32,
                         reader->path, alignment);
    }
    gguf->alignment = (uint32_t)alignment;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_tensor_headers(struct reader *reader, const struct gguf *gguf,
                                              uint64_t *offsets)
{
    for (uint64_t i = 0; i < gguf->num_tensors; i++) {
        TRY(read_tensor(reader, gguf, &gguf->tensors[i], &offsets[i]));
    }
    /* The tensors' bytes begin at the next multiple of the alignment. */
    size_t padding = (gguf->alignment - reader->position % gguf->alignment) % gguf->alignment;
    if (gguf->num_tensors > 0 && padding > num_left(reader)) {
        reader->subject = gguf->tensors[0].name;
        return fail_at_end(reader, "padding", padding);
    }
    reader->position += padding;
    for (uint64_t i = 0; i < gguf->num_tensors; i++) {
        TRY(place_tensor(reader, reader->position, offsets[i], &gguf->tensors[i]));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_tensors(struct reader *reader, struct gguf *gguf)
{
    TRY(check_count(reader, "number of tensors", gguf->num_tensors, MIN_TENSOR_BYTES));
    /* Both products are below eight times the file's size. */
    size_t num_tensors = (size_t)gguf->num_tensors + 1;
    gguf->tensors = malloc(num_tensors * sizeof(gguf->tensors[0]));
    if (gguf->tensors == NULL) {
        return error_out_of_memory(reader->err, reader->path,
                                   num_tensors * sizeof(gguf->tensors[0]));
    }
    uint64_t *offsets = malloc(num_tensors * sizeof(offsets[0]));
    if (offsets == NULL) {
        return error_out_of_memory(reader->err, reader->path, num_tensors * sizeof(offsets[0]));
    }
    enum imbrex_status status = read_tensor_headers(reader, gguf, offsets);
    free(offsets);
    TRY(status);
    return sort_tensors(reader, gguf);
}

static enum imbrex_status read_file(struct reader *reader, struct gguf *gguf)
{
    TRY(read_version(reader, &gguf->version));
    TRY(read_count(reader, "number of tensors", &gguf->num_tensors));
    TRY(read_count(reader, "number of metadata keys", &gguf->num_values));
    TRY(read_metadata(reader, gguf));
    TRY(read_alignment(reader, gguf));
    return read_tensors(reader, gguf);
}

enum imbrex_status gguf_parse(const char *path, const unsigned char *bytes, size_t num_bytes,
                              struct gguf *gguf, struct imbrex_error *err)
{
    static const char header[] = "header";
    struct gguf result = {.path = path};
    struct reader reader = {.path = path,
                            .bytes = bytes,
                            .num_bytes = num_bytes,
                            .position = MAGIC_BYTES,
                            .subject = {header, sizeof(header) - 1},
                            .err = err};
    if (!gguf_is_magic(bytes, num_bytes)) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: expected a GGUF file, found no \"" MAGIC "\" at its begin", path);
    }
    enum imbrex_status status = read_file(&reader, &result);
    if (status != IMBREX_STATUS_OK) {
        gguf_release(&result);
        return status;
    }
    *gguf = result;
    return IMBREX_STATUS_OK;
}

void gguf_release(struct gguf *gguf)
{
    free(gguf->strings);
    free(gguf->values);
    free(gguf->tensors);
    *gguf = (struct gguf){0};
}

/* ---- access ---------------------------------------------------------------------------------- */

static int compare_key(const void *key, const void *element)
{
    const struct gguf_value *value = element;
    return compare_strings(key, &value->key);
}

static int compare_tensor_name(const void *name, const void *element)
{
    const struct gguf_tensor *tensor = element;
    return compare_strings(name, &tensor->name);
}

const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key)
{
    const struct gguf_string wanted = {key, strlen(key)};
    return gguf->num_values == 0 ? NULL
                                 : bsearch(&wanted, gguf->values, (size_t)gguf->num_values,
                                           sizeof(gguf->values[0]), compare_key);
}

const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name)
{
    const struct gguf_string wanted = {name, strlen(name)};
    return gguf->num_tensors == 0 ? NULL
                                  : bsearch(&wanted, gguf->tensors, (size_t)gguf->num_tensors,
                                            sizeof(gguf->tensors[0]), compare_tensor_name);
}

static bool is_integer(enum gguf_type type)
{
    switch (type) {
    case GGUF_TYPE_UINT8:
    case GGUF_TYPE_INT8:
    case GGUF_TYPE_UINT16:
    case GGUF_TYPE_INT16:
    case GGUF_TYPE_UINT32:
    case GGUF_TYPE_INT32:
    case GGUF_TYPE_UINT64:
    case GGUF_TYPE_INT64:
        return true;
    default:
        return false;
    }
}

static bool is_signed(enum gguf_type type)
{
    return type == GGUF_TYPE_INT8 || type == GGUF_TYPE_INT16 || type == GGUF_TYPE_INT32 ||
           type == GGUF_TYPE_INT64;
}

/* The element's bits, sign extended for signed integers. */
static uint64_t load_bits(const struct gguf_value *value, uint64_t idx)
{
    size_t element_bytes = types[value->element_type].num_bytes;
    uint64_t bits = load_little_endian(value->bytes + (size_t)idx * element_bytes, element_bytes);
    if (is_signed(value->element_type) && element_bytes < 8 &&
        (bits >> (8 * element_bytes - 1)) != 0) {
        bits |= UINT64_MAX << (8 * element_bytes);
    }
    return bits;
}

size_t gguf_value_bytes(const struct gguf_value *value)
{
    size_t num_bytes = (size_t)value->num_elements * types[value->element_type].num_bytes;
    for (uint64_t i = 0; value->strings != NULL && i < value->num_elements; i++) {
        num_bytes += 8 + value->strings[i].num_bytes;
    }
    return num_bytes;
}

double gguf_value_number(const struct gguf_value *value, uint64_t idx)
{
    assert(value->element_type != GGUF_TYPE_STRING && idx < value->num_elements);
    uint64_t bits = load_bits(value, idx);
    uint32_t low = (uint32_t)bits;
    float single;
    double number;
    if (value->element_type == GGUF_TYPE_FLOAT32) {
        memcpy(&single, &low, sizeof(single));
        return (double)single;
    }
    if (value->element_type == GGUF_TYPE_FLOAT64) {
        memcpy(&number, &bits, sizeof(number));
        return number;
    }
    return is_signed(value->element_type) ? (double)(int64_t)bits : (double)bits;
}

/* NOT_FOUND if there is no such key. */
static enum imbrex_status require(const struct gguf *gguf, const char *key, const char *expected,
                                  const struct gguf_value **value, struct imbrex_error *err)
{
    *value = gguf_find(gguf, key);
    if (*value == NULL) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND, "%s: %s: expected %s, found no such key",
                         gguf->path, key, expected);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status refuse_type(const struct gguf *gguf, const char *key,
                                      const char *expected, const struct gguf_value *value,
                                      struct imbrex_error *err)
{
    bool is_array = value->type == GGUF_TYPE_ARRAY;
    return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected %s, found %s%s", gguf->path, key,
                     expected, is_array ? "an array of " : "", types[value->element_type].name);
}

enum imbrex_status gguf_get_int32(const struct gguf *gguf, const char *key, int32_t min,
                                  int32_t max, int32_t *value, struct imbrex_error *err)
{
    const struct gguf_value *found;
    TRY(require(gguf, key, "an integer", &found, err));
    if (!is_integer(found->type)) {
        return refuse_type(gguf, key, "an integer", found, err);
    }
    uint64_t bits = load_bits(found, 0);
    int64_t number = (int64_t)bits;
    bool is_above = !is_signed(found->type) && bits > INT64_MAX;
    if (is_above || number < min || number > max) {
        char text[32];
        if (is_above) {
            snprintf(text, sizeof(text), "%" PRIu64, bits);
        } else {
            snprintf(text, sizeof(text), "%" PRId64, number);
        }
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected an integer in [%" PRId32 ", %" PRId32 "], found %s",
                         gguf->path, key, min, max, text);
    }
    *value = (int32_t)number;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_get_double(const struct gguf *gguf, const char *key, double *value,
                                   struct imbrex_error *err)
{
    const struct gguf_value *found;
    TRY(require(gguf, key, "a number", &found, err));
    if (!is_integer(found->type) && found->type != GGUF_TYPE_FLOAT32 &&
        found->type != GGUF_TYPE_FLOAT64) {
        return refuse_type(gguf, key, "a number", found, err);
    }
    double number = gguf_value_number(found, 0);
    if (!isfinite(number)) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: %s: expected a finite number, found %g",
                         gguf->path, key, number);
    }
    *value = number;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_get_bool(const struct gguf *gguf, const char *key, bool *value,
                                 struct imbrex_error *err)
{
    const struct gguf_value *found;
    TRY(require(gguf, key, "a BOOL", &found, err));
    if (found->type != GGUF_TYPE_BOOL) {
        return refuse_type(gguf, key, "a BOOL", found, err);
    }
    *value = found->bytes[0] != 0;
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_get_string(const struct gguf *gguf, const char *key,
                                   struct gguf_string *value, struct imbrex_error *err)
{
    const struct gguf_value *found;
    TRY(require(gguf, key, "a STRING", &found, err));
    if (found->type != GGUF_TYPE_STRING) {
        return refuse_type(gguf, key, "a STRING", found, err);
    }
    *value = found->strings[0];
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_get_strings(const struct gguf *gguf, const char *key,
                                    const struct gguf_string **strings, size_t *num_strings,
                                    struct imbrex_error *err)
{
    const struct gguf_value *found;
    TRY(require(gguf, key, "an array of STRING", &found, err));
    if (found->type != GGUF_TYPE_ARRAY || found->element_type != GGUF_TYPE_STRING) {
        return refuse_type(gguf, key, "an array of STRING", found, err);
    }
    *strings = found->strings;
    *num_strings = (size_t)found->num_elements;
    return IMBREX_STATUS_OK;
}
