/* SPDX-License-Identifier: Apache-2.0 */
/* A rule of thumb that is kept to be measured against. */
#include <string.h>

#include "imbrex_ops.h"

/* By a word of the GPU's name; the last one is for all others. */
static const struct {
    const char *word;
    int32_t batch_width, single_width;
} slice_rules[] = {{"H100", 1024, 512}, {"H200", 1024, 512}, {"A100", 512, 256}, {"", 256, 256}};

int32_t imbrex_slice_width(const char *gpu_name, int32_t num_tokens, int32_t intermediate_size,
                           int32_t weight_bits)
{
    size_t i = 0;
    while (strstr(gpu_name, slice_rules[i].word) == NULL) {
        i++;
    }
    int32_t width = num_tokens > 1 ? slice_rules[i].batch_width : slice_rules[i].single_width;
    width *= weight_bits == 8 ? 2 : 1;
    while (intermediate_size % width != 0) {
        width /= 2;
    }
    return width;
}
