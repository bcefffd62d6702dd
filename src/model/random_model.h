/* SPDX-License-Identifier: Apache-2.0 */
/* Models without files: "random:<shape>[:<seed>]" has the shape of a published model and weights
 * made of numbers that look like weights, for measuring time and memory. */
#ifndef IMBREX_MODEL_RANDOM_MODEL_H
#define IMBREX_MODEL_RANDOM_MODEL_H

#include "model/checkpoint.h"
#include "model/config.h"

/* True if the path names such a model by its prefix, whether there is such a shape or not. */
bool random_model_is_path(const char *path);

/* The configuration, and BF16 tensors. Vectors are there, matrices have no memory before
 * random_model_fill: their elements are distances from where it will begin. `path` must outlive the
 * checkpoint. */
enum imbrex_status random_model_open(const char *path, struct model_config *config,
                                     struct checkpoint *checkpoint, struct imbrex_error *err);
/* Once: matrices in checkpoint->region, whose bytes depend on shape and seed alone. Uses all CPUs
 * of the process. INVALID_ARGUMENT if that is more than this machine has left. After a failure
 * nothing has changed. */
enum imbrex_status random_model_fill(struct checkpoint *checkpoint, struct imbrex_error *err);

#endif
