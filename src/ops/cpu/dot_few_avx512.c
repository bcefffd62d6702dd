/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/dot_columns_avx512.h"

#if defined(__x86_64__)

#include "ops/cpu/dot_columns_avx2.h"
#include "ops/cpu/vec_generic_avx512.h"

#include "ops/cpu/dot_few.h"

void avx512_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    dot_few(job, false, scratch, begin, end);
}

#endif
