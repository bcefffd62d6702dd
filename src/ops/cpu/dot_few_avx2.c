/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cpu/dot_columns_avx2.h"

#if defined(__x86_64__)

#include "ops/cpu/vec_generic_avx2.h"

#include "ops/cpu/dot_few.h"

void avx2_dot_few(const struct dot_job *job, unsigned char *scratch, int64_t begin, int64_t end)
{
    dot_few(job, false, scratch, begin, end);
}

void avx2_dot_few_along(const struct dot_job *job, unsigned char *scratch, int64_t begin,
                        int64_t end)
{
    dot_few(job, true, scratch, begin, end);
}

#endif
