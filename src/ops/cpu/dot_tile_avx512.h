/* SPDX-License-Identifier: Apache-2.0 */
#ifndef IMBREX_OPS_CPU_DOT_TILE_AVX512_H
#define IMBREX_OPS_CPU_DOT_TILE_AVX512_H

#include "ops/cpu/dot_panel.h"

/* dot_panels with the tiles of AVX-512; job->tiles is ignored. */
void avx512_dot_panels(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                       int64_t end);

#endif
