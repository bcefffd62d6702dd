/* SPDX-License-Identifier: Apache-2.0 */
/* How attention on mma.sync is launched: which kernel, over how many CTAs, within which memory.
 * What the kernels compute is checked on a GPU (tests/gpu/check_gpu_attention.c). */
#include <string.h>

#include "ops/cuda/backend_cuda.h"
#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

/* Of the 7B model. */
static const struct backend_shape shape_7b = {.hidden_size = 3584,
                                              .intermediate_size = 18944,
                                              .vocab_size = 64,
                                              .num_heads = 28,
                                              .num_kv_heads = 4,
                                              .head_dim = 128,
                                              .max_tokens = 64,
                                              .max_seqs = 16,
                                              .max_logit_rows = 16,
                                              .max_samples = 16,
                                              .context_size = 32768,
                                              .activation_dtype = DTYPE_BF16};

struct bed {
    struct imbrex_device *device;
    struct backend *backend;
};

static struct bed open_bed(const struct backend_shape *shape, size_t params_bytes)
{
    struct bed bed = {NULL, NULL};
    const struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16};
    fake_reset();
    fake.params_bytes = params_bytes;
    struct driver driver = fake_table();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &bed.device, NULL), IMBREX_STATUS_OK);
    /* Addresses alone matter: nothing is read. */
    assert_int_equal(backend_cuda_create_on(bed.device, &options, shape, (void *)0x10000000,
                                            cuda_decode_attention_scratch_bytes(shape),
                                            &bed.backend, NULL),
                     IMBREX_STATUS_OK);
    return bed;
}

static void close_bed(struct bed *bed)
{
    backend_destroy(bed->backend);
    imbrex_device_close(bed->device);
}

static struct attend_params step_of(const struct backend_shape *shape, int32_t num_seqs,
                                    int32_t max_blocks)
{
    return (struct attend_params){.kv = {.blocks = (unsigned char *)0x20000000,
                                         .block_bytes = 1 << 20,
                                         .dtype = KV_DTYPE_BF16,
                                         .num_layers = 2,
                                         .num_kv_heads = shape->num_kv_heads,
                                         .block_size = 16,
                                         .head_dim = shape->head_dim},
                                  .layer_idx = 1,
                                  .num_tokens = num_seqs,
                                  .num_seqs = num_seqs,
                                  .num_heads = shape->num_heads,
                                  .max_blocks = max_blocks,
                                  .max_query = 1,
                                  .scale = 0.125f};
}

static enum imbrex_status decode(struct bed *bed, const struct attend_params *params)
{
    fake.num_launches = 0;
    backend_begin(bed->backend, NULL);
    cuda_decode_attend((struct backend_cuda *)(void *)bed->backend, params);
    return backend_end(bed->backend);
}

/* Catches a merge that is launched for nothing or missing, and grids that do not follow the step or
 * the GPU. */
static void test_decode_grids(void **state)
{
    (void)state;
    struct bed bed = open_bed(&shape_7b, sizeof(struct decode_attention_kernel_params));
    struct attend_params params = step_of(&shape_7b, 1, DECODE_PART_BLOCKS);

    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_launches, 1);
    assert_string_equal(fake.kernel, "decode_attention_once_bf16_128_8");
    assert_int_equal(fake.config.gridDimX, 4 * DECODE_CLUSTER(128)); /* a cluster a KV head */

    params = step_of(&shape_7b, 16, DECODE_PART_BLOCKS);
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_launches, 1);
    assert_int_equal(fake.config.gridDimX, DECODE_CLUSTERS(128, 8) * DECODE_CLUSTER(128));

    params = step_of(&shape_7b, 16, DECODE_PART_BLOCKS + 1);
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    assert_int_equal(fake.num_launches, 2);
    assert_string_equal(fake.kernel, "decode_attention_merge");
    assert_int_equal(fake.config.gridDimX, 28);
    assert_int_equal(fake.config.gridDimY, 16);
    assert_int_equal(fake.config.blockDimX, 128);

    bed.device->description.num_sms = DECODE_CLUSTERS_SMS / 2;
    params = step_of(&shape_7b, 16, DECODE_PART_BLOCKS);
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    assert_int_equal(fake.config.gridDimX, DECODE_CLUSTERS(128, 8) / 2 * DECODE_CLUSTER(128));
    close_bed(&bed);
}

/* Catches launches in which clusters have one item each that do not get the kernels for it, others
 * that do, and less memory than theirs. */
static void test_decode_once(void **state)
{
    (void)state;
    static const struct {
        int32_t num_seqs, max_blocks;
        bool is_once;
    } cases[] = {{1, 2048, true}, {2, 2048, true}, {3, 2048, false},
                 {1, 320, true},  {10, 64, true},  {11, 64, false}};
    struct bed bed = open_bed(&shape_7b, sizeof(struct decode_attention_kernel_params));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        bool is_once = cases[i].is_once;
        struct attend_params params = step_of(&shape_7b, cases[i].num_seqs, cases[i].max_blocks);
        assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
        assert_string_equal(fake.first_kernel, is_once ? "decode_attention_once_bf16_128_8"
                                                       : "decode_attention_bf16_128_8");
        assert_int_equal(fake.first_shared_bytes,
                         is_once ? DECODE_ONCE_SHARED(DECODE_BF16, 128, 8) : DECODE_SHARED(128, 8));
    }
    close_bed(&bed);
}

/* Catches 8-bit keys and values that go to the kernels of bf16, or to those of other head_dims,
 * with too little shared memory or over other clusters. */
static void test_scaled_kernels(void **state)
{
    (void)state;
    static const struct {
        enum kv_dtype dtype;
        int32_t head_dim;
        const char *decode, *prefill;
        uint32_t prefill_bytes;
    } cases[] = {{KV_DTYPE_INT8, 64, "decode_attention_once_int8_64_8",
                  "prefill_attention_int8_sm90_64", PREFILL_SCALED_SHARED_64},
                 {KV_DTYPE_FP8, 64, "decode_attention_once_fp8_64_8",
                  "prefill_attention_fp8_sm90_64", PREFILL_SCALED_SHARED_64},
                 {KV_DTYPE_INT8, 128, "decode_attention_int8_128_8",
                  "prefill_attention_int8_sm90_128", PREFILL_SCALED_SHARED_128},
                 {KV_DTYPE_FP8, 128, "decode_attention_fp8_128_8", "prefill_attention_fp8_sm90_128",
                  PREFILL_SCALED_SHARED_128}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct backend_shape shape = shape_7b;
        shape.head_dim = cases[i].head_dim;
        shape.kv_dtype = cases[i].dtype;
        struct bed bed = open_bed(&shape, sizeof(struct decode_attention_kernel_params));
        struct attend_params params = step_of(&shape, 16, DECODE_PART_BLOCKS);
        params.kv.dtype = cases[i].dtype;
        assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
        assert_string_equal(fake.kernel, cases[i].decode);
        assert_int_equal(fake.config.sharedMemBytes, shape.head_dim == 64
                                                         ? DECODE_ONCE_SHARED(DECODE_INT8, 64, 8)
                                                         : DECODE_SCALED_SHARED(128, 8));
        int32_t num_clusters = DECODE_SCALED_CLUSTERS(shape.head_dim, 8);
        assert_int_equal(fake.config.gridDimX,
                         (num_clusters < 64 ? num_clusters : 64) * DECODE_CLUSTER(shape.head_dim));
        params = step_of(&shape, 16, 2 * 32768 / 16);
        params.kv.dtype = cases[i].dtype;
        assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
        close_bed(&bed);

        bed = open_bed(&shape, sizeof(struct prefill_attention_params));
        params.num_tokens = 100;
        fake.num_launches = 0;
        backend_begin(bed.backend, NULL);
        cuda_prefill_attend((struct backend_cuda *)(void *)bed.backend, &params, 1);
        assert_int_equal(backend_end(bed.backend), IMBREX_STATUS_OK);
        assert_string_equal(fake.kernel, cases[i].prefill);
        assert_int_equal(fake.config.sharedMemBytes, cases[i].prefill_bytes);
        close_bed(&bed);
    }
}

/* Catches scratch memory that is too small for the widest step, and a step that is wider than it
 * being launched all the same. */
static void test_decode_scratch(void **state)
{
    (void)state;
    struct bed bed = open_bed(&shape_7b, sizeof(struct decode_attention_kernel_params));
    struct attend_params params = step_of(&shape_7b, 16, 2 * 32768 / 16);

    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    params = step_of(&shape_7b, 17, 2 * 32768 / 16);
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_INTERNAL);
    assert_int_equal(fake.num_launches, 0);
    close_bed(&bed);
}

/* Catches head_dims without a kernel, and groups of heads that a CTA cannot take at once. */
static void test_decode_shapes(void **state)
{
    (void)state;
    struct backend_shape shape = shape_7b;
    shape.num_heads = 40;
    shape.num_kv_heads = 1;
    shape.head_dim = 64;
    struct bed bed = open_bed(&shape, sizeof(struct decode_attention_kernel_params));
    struct attend_params params = step_of(&shape, 1, 4);
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_OK);
    assert_string_equal(fake.kernel, "decode_attention_once_bf16_64_16");
    assert_int_equal(fake.config.gridDimX, 3 * DECODE_CLUSTER(64)); /* 16 + 16 + 8 heads */

    params.kv.head_dim = 96;
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_UNSUPPORTED);
    params = step_of(&shape, 1, 4);
    params.kv.block_size = 32;
    assert_int_equal(decode(&bed, &params), IMBREX_STATUS_UNSUPPORTED);
    assert_int_equal(fake.num_launches, 0);
    close_bed(&bed);
}

/* Catches a head_dim that goes to a kernel too narrow for it. */
static void test_tensor_kernels(void **state)
{
    (void)state;
    static const struct {
        int32_t head_dim;
        const char *kernel; /* NULL: refused */
    } cases[] = {{16, "tensor_attention_32"},
                 {32, "tensor_attention_32"},
                 {48, "tensor_attention_64"},
                 {128, "tensor_attention_128"},
                 {144, "tensor_attention_160"},
                 {256, "tensor_attention_256"},
                 {272, NULL},
                 {40, NULL}};
    struct bed bed = open_bed(&shape_7b, sizeof(struct tensor_attention_kernel_params));
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct attend_params params = step_of(&shape_7b, 3, 4);
        params.num_tokens = 100;
        params.kv.head_dim = cases[i].head_dim;
        fake.kernel = NULL;
        backend_begin(bed.backend, NULL);
        cuda_tensor_attend((struct backend_cuda *)(void *)bed.backend, &params);
        enum imbrex_status status = backend_end(bed.backend);
        if (cases[i].kernel == NULL) {
            assert_int_equal(status, IMBREX_STATUS_UNSUPPORTED);
            assert_null(fake.kernel);
            continue;
        }
        assert_int_equal(status, IMBREX_STATUS_OK);
        assert_string_equal(fake.kernel, cases[i].kernel);
        /* 700 rows of a KV head, and a tile more for each sequence. */
        uint32_t tile_rows = cases[i].head_dim <= 128 ? 128 : 64;
        assert_int_equal(fake.config.gridDimX, (700 / tile_rows + 3) * 4);
    }
    close_bed(&bed);
}

int run_attention_launch_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_grids),   cmocka_unit_test(test_decode_scratch),
        cmocka_unit_test(test_decode_shapes),  cmocka_unit_test(test_scaled_kernels),
        cmocka_unit_test(test_tensor_kernels), cmocka_unit_test(test_decode_once),
    };
    return cmocka_run_group_tests_name("attention_launch", tests, NULL, NULL);
}
