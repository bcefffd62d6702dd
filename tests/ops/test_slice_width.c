/* SPDX-License-Identifier: Apache-2.0 */
#include "imbrex_ops.h"
#include "tests/test.h"

/* Catches a baseline that is not the rule that it is called by: the width of another GPU, of a
 * batch for one token, one that does not divide, or INT8 taken for bf16. */
static void test_rule(void **state)
{
    (void)state;
    static const struct {
        const char *gpu;
        int32_t num_tokens, intermediate_size, weight_bits, width;
    } cases[] = {
        {"NVIDIA H200", 512, 27648, 16, 1024},
        {"NVIDIA H200", 2, 27648, 16, 1024},
        {"NVIDIA H200", 1, 27648, 16, 512},
        {"NVIDIA H100 80GB HBM3", 512, 27648, 16, 1024},
        {"NVIDIA A100-SXM4-80GB", 512, 27648, 16, 512},
        {"NVIDIA A100-SXM4-80GB", 1, 27648, 16, 256},
        {"NVIDIA L4", 512, 27648, 16, 256},
        {"NVIDIA L4", 1, 27648, 16, 256},
        /* The seven sizes of Qwen2.5. */
        {"NVIDIA H200", 512, 4864, 16, 256},
        {"NVIDIA H200", 512, 8960, 16, 256},
        {"NVIDIA H200", 512, 11008, 16, 256},
        {"NVIDIA H200", 512, 18944, 16, 512},
        {"NVIDIA H200", 512, 13824, 16, 512},
        {"NVIDIA H200", 512, 29568, 16, 128},
        /* Doubled, then halved. */
        {"NVIDIA H200", 512, 27648, 8, 1024},
        {"NVIDIA H200", 512, 8192, 8, 2048},
        {"NVIDIA L4", 1, 8192, 8, 512},
        {"NVIDIA H200", 512, 7, 16, 1},
        {"NVIDIA H200", 512, 8, 16, 8},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        int32_t width = imbrex_slice_width(cases[i].gpu, cases[i].num_tokens,
                                           cases[i].intermediate_size, cases[i].weight_bits);
        if (width != cases[i].width) {
            fail_msg("case %zu: expected %d, found %d", i, (int)cases[i].width, (int)width);
        }
    }
}

int run_slice_width_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rule),
    };
    return cmocka_run_group_tests_name("slice_width", tests, NULL, NULL);
}
