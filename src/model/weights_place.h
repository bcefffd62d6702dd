/* SPDX-License-Identifier: Apache-2.0 */
/* Weights in a device's own memory, in one dtype, laid out as the device's kernels want them
 * (backend_cuda_create in ops/backend.h). */
#ifndef IMBREX_MODEL_WEIGHTS_PLACE_H
#define IMBREX_MODEL_WEIGHTS_PLACE_H

#include "model/model.h"
#include "ops/device.h"

struct placed_weights {
    struct weights weights; /* device addresses; its layers are the host's */
    void *memory;           /* of the device: all of it */
    size_t num_bytes;
};

/* Bytes of the device's memory, from the config and from what is there alone. False if they do not
 * fit size_t. */
bool weights_place_bytes(const struct imbrex_model *model, enum dtype dtype, size_t *num_bytes);

/* Brings the model's weights to the device: matrices in `dtype` (F32 or BF16: quantised ones are
 * widened, others converted with one rounding), norms and biases in fp32. Reads the mapping front
 * to back through two pinned buffers: one is filled by num_threads threads while the other is on
 * its way. progress (or NULL) is called on the calling thread now and then with the bytes of the
 * device that are done; returning false stops it with status CANCELLED. Nothing may run on the
 * device's KV_IN stream. */
typedef bool weights_progress_fn(void *user, size_t num_done, size_t num_bytes);
enum imbrex_status weights_place(const struct imbrex_model *model, struct device *device,
                                 enum dtype dtype, int32_t num_threads,
                                 weights_progress_fn *progress, void *user,
                                 struct placed_weights *placed, struct imbrex_error *err);
/* Safe on a zeroed struct. */
void weights_place_release(struct device *device, struct placed_weights *placed);

#endif
