/* SPDX-License-Identifier: Apache-2.0 */
/* RoPE's frequencies: how fast each pair of a head turns with the position. */
#ifndef IMBREX_MODEL_ROPE_H
#define IMBREX_MODEL_ROPE_H

#include "model/config.h"

/* The rope_type of a scaling. Static storage. */
const char *rope_scaling_name(enum rope_scaling_type type);

/* Pair i of a head turns by position * frequencies[i], i in [0, head_dim / 2). factors: [head_dim /
 * 2], all > 0, what each frequency is divided by before it is scaled, or NULL. */
void rope_frequencies(const struct model_config *config, const float *factors, double *frequencies);

/* What cosines and sines are multiplied by: 1 unless yarn. */
double rope_attention_factor(const struct model_config *config);

/* YaRN's attention factor where a checkpoint sets none; a mscale of 0 is one that is not set.
 * factor >= 1. */
double rope_yarn_attention_factor(double factor, double mscale, double mscale_all_dim);

#endif
