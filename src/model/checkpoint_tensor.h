/* SPDX-License-Identifier: Apache-2.0 */
/* A tensor as it lies in a checkpoint, whatever the file's format. */
#ifndef IMBREX_MODEL_CHECKPOINT_TENSOR_H
#define IMBREX_MODEL_CHECKPOINT_TENSOR_H

#include <stddef.h>
#include <stdint.h>

#include "imbrex.h"
#include "ops/dtype.h"

/* Strings are views into what the tensor came from; `elements` points into the file. */
struct checkpoint_tensor {
    const char *name;
    const char *dtype_name; /* as written in the file, for messages */
    enum dtype dtype; /* DTYPE_COUNT: a type of the format that imbrex does not compute with */
    int32_t num_dims;
    int64_t shape[IMBREX_MAX_TENSOR_DIMS];
    const unsigned char *elements;
    size_t num_bytes;
    const char *file; /* its path */
};

#endif
