/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/gemm_residual.h"

#include <string.h>

#include "ops/cuda/backend_cuda.h"
#include "ops/cuda/kernels/gemm_residual_params.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

/* Addresses alone matter: nothing is read. */
#define A_BASE 0x10000000
#define W_BASE 0x20000000
#define D_BASE 0x60000000
#define SCRATCH_BASE 0x70000000

/* down_proj of the 0.5B model for 512 tokens: 28 tiles of 128 x 128 along 76 k-blocks. */
static struct residual_product few_tiles(bool adds)
{
    return (struct residual_product){.a = (const void *)A_BASE,
                                     .b = (const void *)W_BASE,
                                     .d = (float *)D_BASE,
                                     .m = 512,
                                     .n = 896,
                                     .k = 4864,
                                     .adds = adds};
}

static struct imbrex_device *open_fake(void)
{
    struct imbrex_device *device = NULL;
    fake_reset();
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &device, NULL), IMBREX_STATUS_OK);
    return device;
}

static struct backend_cuda *create_backend(struct imbrex_device *device, bool is_invariant,
                                           size_t scratch_bytes)
{
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16,
                                           .batch_invariant = is_invariant};
    struct backend_shape shape = {.hidden_size = 896,
                                  .intermediate_size = 4864,
                                  .num_heads = 14,
                                  .num_kv_heads = 2,
                                  .head_dim = 64};
    struct backend *backend = NULL;
    assert_int_equal(backend_cuda_create_on(device, &options, &shape, (void *)SCRATCH_BASE,
                                            scratch_bytes, &backend, NULL),
                     IMBREX_STATUS_OK);
    return (struct backend_cuda *)(void *)backend;
}

/* Launches the product; what was chosen, of which there is one. */
static struct residual_plan launch_chosen(struct backend_cuda *cuda,
                                          const struct residual_product *product)
{
    struct residual_plan plan = {.num_splits = 0};
    fake.params_bytes = sizeof(struct gemm_residual_params);
    cuda->backend.functions->begin(&cuda->backend, NULL);
    cuda_gemm_residual(cuda, product, NULL);
    for (int i = 0; i < NUM_RESIDUAL_CHOICES; i++) {
        if (cuda->residual_choices[i].m == product->m) {
            assert_int_equal(plan.num_splits, 0);
            plan = cuda->residual_choices[i].plan;
        }
    }
    return plan;
}

/* Catches sums whose order depends on how many tokens there are: k split in batch-invariant mode;
 * and logits that add to what was there in parts. */
static void test_split_only_where_it_may_be(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    size_t scratch_bytes = gemm_residual_scratch_bytes(512, 896);
    struct residual_product product = few_tiles(true), logits = few_tiles(false);

    struct backend_cuda *cuda = create_backend(device, false, scratch_bytes);
    struct residual_plan plan = launch_chosen(cuda, &product);
    assert_true(plan.num_splits > 1);
    assert_int_equal(backend_end(&cuda->backend), IMBREX_STATUS_OK);
    backend_destroy(&cuda->backend);

    cuda = create_backend(device, true, scratch_bytes);
    assert_int_equal(launch_chosen(cuda, &product).num_splits, 1);
    assert_int_equal(backend_end(&cuda->backend), IMBREX_STATUS_OK);
    backend_destroy(&cuda->backend);

    cuda = create_backend(device, false, scratch_bytes);
    assert_int_equal(launch_chosen(cuda, &logits).num_splits, 1);
    assert_int_equal(backend_end(&cuda->backend), IMBREX_STATUS_OK);
    backend_destroy(&cuda->backend);
    imbrex_device_close(device);
}

/* Catches parts that lie beyond the end of the scratch memory. */
static void test_parts_fit_into_scratch(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct residual_product product = few_tiles(true);
    struct residual_plan plan;
    double cost_us;

    struct backend_cuda *cuda = create_backend(device, false, 0);
    assert_int_equal(launch_chosen(cuda, &product).num_splits, 1);
    backend_destroy(&cuda->backend);
    for (int32_t variant = 0; variant < gemm_residual_num_variants(); variant++) {
        for (int32_t splits = 2; splits <= 8; splits++) {
            cuda = create_backend(device, false, (size_t)splits * 512 * 896 * 4);
            assert_true(gemm_residual_plan(cuda, &product, variant, splits, &plan, &cost_us));
            assert_true(plan.tiles_of_split % plan.tile.cluster_m == 0);
            cuda->scratch_bytes--;
            assert_false(gemm_residual_plan(cuda, &product, variant, splits, &plan, &cost_us));
            backend_destroy(&cuda->backend);
        }
    }
    imbrex_device_close(device);
}

/* Catches columns that the copy engine would write beyond the end of a row. */
static void test_odd_widths_are_refused(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct backend_cuda *cuda = create_backend(device, false, 0);
    struct residual_product product = few_tiles(true);
    product.n = 900;
    fake.params_bytes = sizeof(struct gemm_residual_params);
    backend_begin(&cuda->backend, NULL);
    cuda_gemm_residual(cuda, &product, NULL);
    assert_int_equal(backend_end(&cuda->backend), IMBREX_STATUS_UNSUPPORTED);
    assert_int_equal(fake.num_launches, 0);
    backend_destroy(&cuda->backend);
    imbrex_device_close(device);
}

/* Catches a tuned plan of the plain product that the model's own kernels do not take. */
static void test_tuned_plan(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    struct residual_product product = few_tiles(false);
    struct imbrex_tune_key key;
    struct imbrex_tune_row row = {
        .shape = {.op = IMBREX_KERNEL_OP_GEMM, .m = product.m, .n = product.n, .k = product.k},
        .plan = {.cluster_m = 1, .cluster_n = 2, .group_m = 3},
        .is_faster = true};
    struct imbrex_kernel_variant variant = {.block_m = 0};
    for (int32_t i = 0; variant.block_m != 128 || variant.block_n != 128; i++) {
        row.plan.variant_idx = i;
        assert_int_equal(imbrex_kernel_variant_describe(IMBREX_KERNEL_OP_GEMM, i, &variant, NULL),
                         IMBREX_STATUS_OK);
    }
    assert_int_equal(imbrex_tune_key_read(device, &key, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_table_create(&key, &device->tuned, NULL), IMBREX_STATUS_OK);
    assert_int_equal(imbrex_tune_table_set(device->tuned, &row, NULL), IMBREX_STATUS_OK);

    struct backend_cuda *cuda = create_backend(device, false, 0);
    struct residual_plan plan = launch_chosen(cuda, &product);
    assert_int_equal(plan.num_splits, 1);
    assert_int_equal(plan.tile.cluster_n, 2);
    assert_int_equal(plan.tile.group_m, 3);
    assert_string_equal(kernel_table_at(plan.tile.kernel_idx)->name, variant.name);
    backend_destroy(&cuda->backend);
    imbrex_device_close(device);
}

/* Catches tiles for q, k and v that cut a head, and a path that depends on the number of tokens in
 * batch-invariant mode. */
static void test_qkv_tiles_hold_whole_heads(void **state)
{
    (void)state;
    struct imbrex_device *device = open_fake();
    for (int32_t head_dim = 32; head_dim <= 256; head_dim *= 2) {
        bool has_kernels = head_dim == 64 || head_dim == 128;
        for (int is_invariant = 0; is_invariant < 2; is_invariant++) {
            struct backend_cuda *cuda = create_backend(device, is_invariant != 0, 0);
            for (int32_t num_tokens = 1; num_tokens <= 8192; num_tokens = num_tokens * 3 + 1) {
                struct qkv_params params = {.kv = {.num_kv_heads = 2, .head_dim = head_dim},
                                            .num_tokens = num_tokens,
                                            .hidden_size = 896,
                                            .num_heads = 14};
                bool is_worth_it = gemm_qkv_is_worth_it(cuda, &params);
                assert_true(has_kernels || !is_worth_it);
                assert_true(!has_kernels || !is_invariant || is_worth_it);
                for (int32_t variant = 0; variant < gemm_qkv_num_variants(); variant++) {
                    struct qkv_plan plan;
                    double cost_us;
                    if (gemm_qkv_plan(cuda, &params, variant, &plan, &cost_us)) {
                        const struct kernel_variant *twin = kernel_table_at(plan.tile.kernel_idx);
                        assert_int_equal(twin->block_n % head_dim, 0);
                        assert_int_equal(plan.tile.num_tiles_n, 0);
                    }
                }
            }
            backend_destroy(&cuda->backend);
        }
    }
    imbrex_device_close(device);
}

int run_gemm_residual_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_split_only_where_it_may_be),
        cmocka_unit_test(test_parts_fit_into_scratch),
        cmocka_unit_test(test_odd_widths_are_refused),
        cmocka_unit_test(test_tuned_plan),
        cmocka_unit_test(test_qkv_tiles_hold_whole_heads),
    };
    return cmocka_run_group_tests_name("gemm_residual", tests, NULL, NULL);
}
