/* SPDX-License-Identifier: Apache-2.0 */
/* The header of one safetensors file: 8 bytes of little-endian length, a JSON object, then the
 * tensors' bytes. Source: the format's README in huggingface/safetensors. Nothing in the file is
 * trusted. */
#ifndef IMBREX_MODEL_SAFETENSORS_H
#define IMBREX_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "ops/dtype.h"

/* The format's own limit on the JSON header, in bytes. */
#define SAFETENSORS_MAX_HEADER_BYTES 100000000u

/* One tensor of a file. `name` is owned by the struct safetensors it came from, `elements` points
 * into the file. */
struct safetensor {
    const char *name;
    const char *dtype_name; /* as written in the file, for messages; owned likewise */
    enum dtype dtype; /* DTYPE_COUNT: a type of the format that imbrex does not compute with */
    int32_t num_dims;
    int64_t shape[IMBREX_MAX_TENSOR_DIMS];
    const unsigned char *elements;
    size_t num_bytes;
    const char *file; /* path of the file, a view of what the caller passed */
};

struct safetensors {
    struct safetensor *tensors; /* [num_tensors], by name */
    int32_t num_tensors;
    void *header; /* the parsed JSON, which holds the names */
};

/* Reads the header of a whole file at bytes[0, num_bytes). Checked: header length, JSON, dtype
 * names, shapes, offsets in range, byte counts equal to shape x dtype, tensors that neither overlap
 * nor leave holes. FORMAT names `path`, the tensor, the field, expected and found. `bytes` and
 * `path` must outlive the result. */
enum imbrex_status safetensors_parse(const char *path, const unsigned char *bytes, size_t num_bytes,
                                     struct safetensors *result, struct imbrex_error *err);
/* Safe on a zeroed struct and after a release. */
void safetensors_release(struct safetensors *result);

#endif
