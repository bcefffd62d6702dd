/* SPDX-License-Identifier: Apache-2.0 */
/* The header of one safetensors file: 8 bytes of little-endian length, a JSON object, then the
 * tensors' bytes. Source: the format's README in huggingface/safetensors. Nothing in the file is
 * trusted. */
#ifndef IMBREX_MODEL_SAFETENSORS_H
#define IMBREX_MODEL_SAFETENSORS_H

#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "model/checkpoint_tensor.h"

/* The format's own limit on the JSON header, in bytes. */
#define SAFETENSORS_MAX_HEADER_BYTES 100000000u

struct safetensors {
    struct checkpoint_tensor *tensors; /* [num_tensors], by name, which the header owns */
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
