/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H
#define IMBREX_OPS_CPU_DOT_COLUMNS_AVX2_H

#include "ops/cpu/dot_panel.h"

/* Takes activations as fp32; job->tiles is not used. */
dot_panels_fn avx2_dot_columns;

#endif
