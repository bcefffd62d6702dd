/* SPDX-License-Identifier: Apache-2.0 */
/* What this machine can do at most with so many threads: measured, because data sheets know neither
 * its clock nor its neighbours. The kernels lie in bench/cpu, which is linked with the library:
 * what is marked is what it shows. */
#ifndef IMBREX_CLI_ROOFS_H
#define IMBREX_CLI_ROOFS_H

#include <stdint.h>

#include "imbrex.h"

enum roof_kind {
    ROOF_KIND_READ, /* bytes/s from memory, with software prefetch */
    ROOF_KIND_FP32, /* flop/s of fused multiply-adds, two each */
    ROOF_KIND_BF16, /* flop/s of dot products of pairs */
    ROOF_KIND_INT8, /* op/s of dot products of four, a multiplication and an addition each */
    ROOF_KIND_COUNT
};

struct roofs;

/* Memory to read, several times what caches hold, and the fastest way to: as one stream or as
 * several. Returns an exit code. */
IMBREX_API int roofs_create(int32_t num_threads, struct roofs **roofs);
IMBREX_API void roofs_destroy(struct roofs *roofs);
/* One measurement of some 20 ms, in units a second; 0 if the machine has no such instructions. The
 * largest of several is the roof. */
IMBREX_API double roofs_measure(struct roofs *roofs, enum roof_kind kind);

/* "read", "fp32", "bf16", "int8". */
IMBREX_API const char *roof_kind_name(enum roof_kind kind);
/* The instructions that are measured, such as "AVX-512 FMA"; NULL if the machine has none. Without
 * roofs (NULL) the way to read is that of one stream. */
IMBREX_API const char *roof_instructions(const struct roofs *roofs, enum roof_kind kind);

#endif
