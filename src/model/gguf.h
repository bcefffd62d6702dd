/* SPDX-License-Identifier: Apache-2.0 */
/* One GGUF file (version 2 or 3): metadata as keys with typed values, then tensors. Nothing in the
 * file is trusted: counts, lengths and offsets are checked against the bytes that are there, and
 * memory stays proportional to the file. Source: ggml's docs/gguf.md. */
#ifndef IMBREX_MODEL_GGUF_H
#define IMBREX_MODEL_GGUF_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "ops/dtype.h"

/* X(name, id in the file, bytes; 0: variable) */
#define GGUF_TYPE_LIST(X) \
    X(UINT8, 0, 1)        \
    X(INT8, 1, 1)         \
    X(UINT16, 2, 2)       \
    X(INT16, 3, 2)        \
    X(UINT32, 4, 4)       \
    X(INT32, 5, 4)        \
    X(FLOAT32, 6, 4)      \
    X(BOOL, 7, 1)         \
    X(STRING, 8, 0)       \
    X(ARRAY, 9, 0)        \
    X(UINT64, 10, 8)      \
    X(INT64, 11, 8)       \
    X(FLOAT64, 12, 8)

enum gguf_type {
#define GGUF_TYPE_ENUM(name, id, num_bytes) GGUF_TYPE_##name = id,
    GGUF_TYPE_LIST(GGUF_TYPE_ENUM)
#undef GGUF_TYPE_ENUM
};

/* A string of the file: not NUL-terminated, any bytes. A view. */
struct gguf_string {
    const char *bytes;
    size_t num_bytes;
};

struct gguf_value {
    struct gguf_string key;
    enum gguf_type type;         /* ARRAY for arrays */
    enum gguf_type element_type; /* of arrays; else as type */
    uint64_t num_elements;       /* of arrays; else 1 */
    const unsigned char *bytes;  /* the first element, any alignment, little-endian */
    struct gguf_string *strings; /* [num_elements] for STRING and arrays of STRING, else NULL */
};

struct gguf_tensor {
    struct gguf_string name;
    int32_t num_dims;
    int64_t shape[4]; /* row-major as everywhere here: GGUF's own order reversed */
    uint32_t type_id; /* as written in the file */
    enum dtype dtype; /* DTYPE_COUNT: a type that imbrex does not have */
    const unsigned char *elements;
    size_t num_bytes; /* 0 for unknown types */
};

struct gguf {
    const char *path;          /* the caller's */
    struct gguf_value *values; /* [num_values], by key */
    uint64_t num_values;
    struct gguf_tensor *tensors; /* [num_tensors], by name */
    uint64_t num_tensors;
    struct gguf_string *strings; /* of all values */
    uint32_t version;
    uint32_t alignment; /* of the tensors' bytes, counted from the first one's */
};

/* The type of a file's tensors as the format names it ("Q3_K"), "an unknown type" for an id that
 * stands for none. Static storage. */
const char *gguf_tensor_type_name(uint32_t type_id);
/* The id of a dtype in a file. */
uint32_t gguf_tensor_type_id(enum dtype dtype);

/* True if the bytes begin as a GGUF file does. */
bool gguf_is_magic(const unsigned char *bytes, size_t num_bytes);

/* Reads a whole file at bytes[0, num_bytes), which must outlive the result, as must path. FORMAT
 * names the key or tensor, expected and found; duplicate keys and tensors are refused. */
enum imbrex_status gguf_parse(const char *path, const unsigned char *bytes, size_t num_bytes,
                              struct gguf *gguf, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void gguf_release(struct gguf *gguf);

/* tokenizer.ggml.model of a model that takes and gives token ids only. */
#define GGUF_NO_TOKENIZER "no_vocab"

/* NULL if there is none. */
const struct gguf_value *gguf_find(const struct gguf *gguf, const char *key);
const struct gguf_tensor *gguf_find_tensor(const struct gguf *gguf, const char *name);

/* Typed access: NOT_FOUND (with the key in the message) if missing, FORMAT if of another type or
 * out of range. Integers of any width are accepted where they fit. */
enum imbrex_status gguf_get_int32(const struct gguf *gguf, const char *key, int32_t min,
                                  int32_t max, int32_t *value, struct imbrex_error *err);
enum imbrex_status gguf_get_double(const struct gguf *gguf, const char *key, double *value,
                                   struct imbrex_error *err);
enum imbrex_status gguf_get_bool(const struct gguf *gguf, const char *key, bool *value,
                                 struct imbrex_error *err);
enum imbrex_status gguf_get_string(const struct gguf *gguf, const char *key,
                                   struct gguf_string *value, struct imbrex_error *err);
/* An array of strings: strings[num_strings], a view. */
enum imbrex_status gguf_get_strings(const struct gguf *gguf, const char *key,
                                    const struct gguf_string **strings, size_t *num_strings,
                                    struct imbrex_error *err);

/* The bytes of the elements in the file, lengths of strings included. */
size_t gguf_value_bytes(const struct gguf_value *value);

/* Element `idx` of a numeric or boolean value or array, as a number. */
double gguf_value_number(const struct gguf_value *value, uint64_t idx);

#endif
