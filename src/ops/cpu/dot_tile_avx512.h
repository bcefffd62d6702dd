/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_TILE_AVX512_H
#define IMBREX_OPS_CPU_DOT_TILE_AVX512_H

#include "ops/cpu/dot_panel.h"

extern const struct dot_tiles avx512_dot_tiles;

#endif
