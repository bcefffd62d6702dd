/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_TILE_AVX2_H
#define IMBREX_OPS_CPU_DOT_TILE_AVX2_H

#include "ops/cpu/dot_panel.h"

extern const struct dot_tiles avx2_dot_tiles;

#endif
