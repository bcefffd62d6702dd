/* SPDX-License-Identifier: Apache-2.0 */
/* The cuda backend over a driver without a GPU: which kernels a call becomes, over which grids, and
 * what is left of it when the driver fails. */
#include "ops/cuda/backend_cuda.h"

#include <string.h>

#include "tests/cuda/fake_driver.h"
#include "tests/test.h"

#define NUM_TOKENS 70
#define BLOCK_SIZE 16

/* The driver looks at no address: any will do. */
static float anything[4];

struct fixture {
    struct imbrex_device *device;
    struct backend *backend;
    struct backend_shape shape;
};

/* side: what hidden_size and intermediate_size are multiples of. */
static void open_sized(struct fixture *fixture, enum dtype dtype, int32_t head_dim, int32_t side,
                       uint32_t ablations)
{
    struct driver driver = fake_table();
    struct imbrex_error err;
    fixture->shape = (struct backend_shape){.hidden_size = 9 * side,
                                            .intermediate_size = 13 * side,
                                            .vocab_size = 1000,
                                            .num_heads = 4,
                                            .num_kv_heads = 2,
                                            .head_dim = head_dim,
                                            .max_tokens = NUM_TOKENS,
                                            .max_seqs = 2,
                                            .max_logit_rows = NUM_TOKENS,
                                            .activation_dtype = dtype};
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &fixture->device, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(backend_cuda_create_on(fixture->device,
                                            &(struct backend_cuda_options){
                                                .activation_dtype = dtype, .ablations = ablations},
                                            &fixture->shape, NULL, 0, &fixture->backend, &err),
                     IMBREX_STATUS_OK);
    backend_begin(fixture->backend, NULL);
}

static void open_fixture(struct fixture *fixture, enum dtype dtype, int32_t head_dim,
                         uint32_t ablations)
{
    open_sized(fixture, dtype, head_dim, 10, ablations);
}

static void close_fixture(struct fixture *fixture)
{
    backend_destroy(fixture->backend);
    imbrex_device_close(fixture->device);
}

/* Each part of a layer once. Launches are counted in fake. */
static void run_qkv(struct fixture *fixture, int32_t num_tokens)
{
    const struct backend_shape *shape = &fixture->shape;
    backend_qkv(fixture->backend,
                &(struct qkv_params){.hidden = anything,
                                     .norm = {anything, 1e-6f},
                                     .kv = {.blocks = (unsigned char *)anything,
                                            .dtype = kv_dtype_of(shape->activation_dtype),
                                            .num_layers = 1,
                                            .num_kv_heads = shape->num_kv_heads,
                                            .block_size = BLOCK_SIZE,
                                            .head_dim = shape->head_dim},
                                     .num_tokens = num_tokens,
                                     .hidden_size = shape->hidden_size,
                                     .num_heads = shape->num_heads});
}

static void run_attend(struct fixture *fixture, int32_t num_tokens)
{
    const struct backend_shape *shape = &fixture->shape;
    backend_attend(fixture->backend,
                   &(struct attend_params){.kv = {.blocks = (unsigned char *)anything,
                                                  .dtype = kv_dtype_of(shape->activation_dtype),
                                                  .num_layers = 1,
                                                  .num_kv_heads = shape->num_kv_heads,
                                                  .block_size = BLOCK_SIZE,
                                                  .head_dim = shape->head_dim},
                                           .num_tokens = num_tokens,
                                           .num_seqs = num_tokens > 0 ? 1 : 0,
                                           .num_heads = shape->num_heads,
                                           .max_blocks = 1,
                                           .max_query = num_tokens,
                                           .scale = 1.0f});
}

static void run_project(struct fixture *fixture, int32_t num_tokens)
{
    backend_project(fixture->backend,
                    &(struct project_params){.num_tokens = num_tokens,
                                             .in_features = 50,
                                             .hidden_size = fixture->shape.hidden_size});
}

static void run_mlp(struct fixture *fixture, int32_t num_tokens)
{
    backend_mlp(fixture->backend,
                &(struct mlp_params){.norm = {anything, 1e-6f},
                                     .num_tokens = num_tokens,
                                     .hidden_size = fixture->shape.hidden_size,
                                     .intermediate_size = fixture->shape.intermediate_size});
}

static void run_logits(struct fixture *fixture, int32_t num_rows)
{
    backend_logits(fixture->backend,
                   &(struct logits_params){.norm = {anything, 1e-6f},
                                           .num_rows = num_rows,
                                           .hidden_size = fixture->shape.hidden_size,
                                           .vocab_size = fixture->shape.vocab_size});
}

static void expect_launch(const char *kernel, int num_launches, unsigned int grid_x,
                          unsigned int grid_y)
{
    assert_string_equal(fake.kernel, kernel);
    assert_int_equal(fake.num_launches, num_launches);
    assert_int_equal(fake.config.gridDimX, grid_x);
    assert_int_equal(fake.config.gridDimY, grid_y);
    fake.num_launches = 0;
}

/* Catches: sizes and dtypes that reach a kernel which does not take them, and grids that leave
 * rows, columns or heads out. */
static void test_plain(void **state)
{
    (void)state;
    static const struct {
        enum dtype dtype;
        const char *rope, *attend, *add, *swiglu, *logits;
    } cases[] = {
        {DTYPE_F32, "plain_rope_f32", "plain_attend_f32", "plain_add_f32", "plain_swiglu_f32",
         "plain_logits_f32"},
        {DTYPE_BF16, "plain_rope_bf16", "plain_attend_bf16", "plain_add_bf16", "plain_swiglu_bf16",
         "plain_logits_bf16"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct fixture fixture;
        fake_reset();
        open_fixture(&fixture, cases[i].dtype, 10, 0);
        run_qkv(&fixture, NUM_TOKENS);
        expect_launch(cases[i].rope, 3, NUM_TOKENS, 1); /* 8 heads of a token, 8 warps of a CTA */
        run_attend(&fixture, NUM_TOKENS);
        expect_launch(cases[i].attend, 1, NUM_TOKENS, 4);
        run_project(&fixture, NUM_TOKENS);
        expect_launch(cases[i].add, 1, 2, 2);
        run_mlp(&fixture, NUM_TOKENS);
        expect_launch(cases[i].swiglu, 2, 3, 2);
        run_logits(&fixture, NUM_TOKENS);
        expect_launch(cases[i].logits, 2, 16, 2);
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
        close_fixture(&fixture);
    }
}

/* Catches: attention in bf16 of odd models left to the slowest kernel where a faster one does. */
static void test_plain_with_tensor_attention(void **state)
{
    (void)state;
    struct fixture fixture;
    fake_reset();
    open_fixture(&fixture, DTYPE_BF16, 48, 0);
    run_attend(&fixture, NUM_TOKENS);
    assert_int_equal(fake.num_launches, 1);
    assert_non_null(strstr(fake.kernel, "tensor_attention"));
    assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
    close_fixture(&fixture);
}

/* Catches: empty grids, which the driver refuses. */
static void test_no_tokens(void **state)
{
    (void)state;
    struct fixture fixture;
    fake_reset();
    open_fixture(&fixture, DTYPE_F32, 10, 0);
    run_qkv(&fixture, 0);
    run_attend(&fixture, 0);
    run_project(&fixture, 0);
    run_mlp(&fixture, 0);
    run_logits(&fixture, 0);
    assert_int_equal(fake.num_launches, 0);
    assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
    close_fixture(&fixture);
}

/* Catches: an ablation that changes nothing. */
static void test_overlap(void **state)
{
    (void)state;
    for (int i = 0; i < 2; i++) {
        struct fixture fixture;
        fake_reset();
        open_fixture(&fixture, DTYPE_F32, 10, i == 0 ? 0 : IMBREX_ABLATE_PDL);
        run_project(&fixture, 1);
        assert_int_equal(fake.config.numAttrs, i == 0 ? 1 : 0);
        close_fixture(&fixture);
    }
}

static struct fixture open_unfused(uint32_t ablations, size_t scratch_bytes)
{
    struct driver driver = fake_table();
    struct fixture fixture = {.shape = {.hidden_size = 64,
                                        .intermediate_size = 128,
                                        .num_heads = 1,
                                        .num_kv_heads = 1,
                                        .head_dim = 64,
                                        .activation_dtype = DTYPE_BF16}};
    const struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16,
                                                 .ablations = ablations};
    fake_reset();
    assert_int_equal(cuda_device_create(&driver, 0, NULL, &fixture.device, NULL), IMBREX_STATUS_OK);
    assert_int_equal(backend_cuda_create_on(fixture.device, &options, &fixture.shape, anything,
                                            scratch_bytes, &fixture.backend, NULL),
                     IMBREX_STATUS_OK);
    backend_begin(fixture.backend, NULL);
    return fixture;
}

/* Catches: an ablation without effect on few tokens, a product of
 * which scratch memory holds a part. */
static void test_unfused_mlp(void **state)
{
    (void)state;
    static const struct {
        int32_t num_tokens;
        const char *fused;
    } cases[] = {
        {1, "small_single_mlp_4"}, {8, "small_resident_mlp_4"}, {64, "small_stream_mlp_64"}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        size_t num_bytes = (size_t)cases[i].num_tokens * 2 * 128 * 2;
        struct fixture fixture = open_unfused(0, 0);
        run_mlp(&fixture, cases[i].num_tokens);
        assert_string_equal(fake.kernel, cases[i].fused);
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
        close_fixture(&fixture);

        fixture = open_unfused(IMBREX_ABLATE_MLP, num_bytes);
        run_mlp(&fixture, cases[i].num_tokens);
        assert_string_equal(fake.kernel, "silu_mul");
        assert_int_equal(fake.num_launches, cases[i].num_tokens == 64 ? 3 : 2);
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
        close_fixture(&fixture);

        fixture = open_unfused(IMBREX_ABLATE_MLP, num_bytes - 1);
        run_mlp(&fixture, cases[i].num_tokens);
        assert_int_equal(fake.num_launches, 0);
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_INTERNAL);
        close_fixture(&fixture);
    }
}

/* Catches: scratch memory for gate and up that nothing will use, or none where it is used. */
static void test_scratch(void **state)
{
    (void)state;
    struct backend_shape shape = {.hidden_size = 3584,
                                  .intermediate_size = 18944,
                                  .vocab_size = 152064,
                                  .num_heads = 28,
                                  .num_kv_heads = 4,
                                  .head_dim = 128,
                                  .max_tokens = 4096,
                                  .max_seqs = 64,
                                  .max_logit_rows = 64,
                                  .max_samples = 64,
                                  .context_size = 4096,
                                  .activation_dtype = DTYPE_BF16};
    size_t unfused_bytes = (size_t)2048 * 2 * 18944 * 2;
    assert_true(backend_cuda_scratch_bytes(&shape) < unfused_bytes);
    shape.has_unfused_mlp = true;
    assert_int_equal(backend_cuda_scratch_bytes(&shape), unfused_bytes);
}

/* Catches: a failed launch that is forgotten, or after which the step goes on with what was never
 * computed. */
static void test_each_call_fails(void **state)
{
    (void)state;
    int fail_at = 0;
    bool has_failed = true;
    while (has_failed) {
        struct fixture fixture;
        fake_reset();
        open_fixture(&fixture, DTYPE_F32, 10, 0);
        int num_calls = fake.num_calls;
        fake.fail_at = num_calls + ++fail_at;
        run_qkv(&fixture, 1);
        run_mlp(&fixture, 1);
        has_failed = fake.failed_call != NULL;
        if (has_failed) {
            int num_launches = fake.num_launches;
            assert_int_not_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
            run_project(&fixture, 1);
            assert_int_equal(fake.num_launches, num_launches);
            assert_int_not_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
            backend_begin(fixture.backend, NULL);
            run_project(&fixture, 1);
            assert_int_equal(fake.num_launches, num_launches + 1);
        } else {
            assert_int_equal(fake.num_launches, 5);
        }
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
        close_fixture(&fixture);
    }
    assert_true(fail_at > 5);
}

/* Catches: a step on a GPU before or after Hopper, or told to do as on one, in which a part goes to
 * a kernel of Hopper's; attention that asks for more shared memory than there is. */
static void test_portable(void **state)
{
    (void)state;
    static const struct {
        int major, minor, max_shared_bytes;
        uint32_t ablations;
        int32_t head_dim;
        const char *attend, *project; /* of 60 tokens */
    } cases[] = {
        {8, 0, 166912, 0, 64, "tensor_attention_64", "small_stream_project_64"},
        {8, 0, 166912, 0, 256, "tensor_attention_256", "small_stream_project_64"},
        {8, 6, 101376, 0, 128, "tensor_attention_128", "gemm_bf16_sm80_"},
        {8, 9, 101376, 0, 256, "plain_attend_bf16", "gemm_bf16_sm80_"},
        {10, 0, 232448, 0, 128, "tensor_attention_128", "small_stream_project_64"},
        {12, 0, 101376, 0, 64, "tensor_attention_64", "gemm_bf16_sm80_"},
        {9, 0, 232448, IMBREX_ABLATE_HOPPER, 128, "tensor_attention_128",
         "small_stream_project_64"},
    };
    /* in_features: the second one's rows are too long to stay in shared memory. */
    static const int32_t widths[] = {512, 32768};
    static const struct {
        int32_t num_tokens;
        const char *project[2]; /* NULL: as the case says */
    } counts[] = {{1, {"small_single_project_", "small_stream_project_8"}},
                  {8, {"small_resident_project_", "small_stream_project_8"}},
                  {60, {NULL, NULL}},
                  {NUM_TOKENS, {"gemm_bf16_sm80_", "gemm_bf16_sm80_"}}};
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct fixture fixture;
        fake_reset();
        fake.compute_major = cases[i].major;
        fake.compute_minor = cases[i].minor;
        fake.max_shared_bytes = cases[i].max_shared_bytes;
        open_sized(&fixture, DTYPE_BF16, cases[i].head_dim, 64, cases[i].ablations);
        for (size_t j = 0; j < sizeof(counts) / sizeof(counts[0]); j++) {
            run_attend(&fixture, counts[j].num_tokens);
            assert_string_equal(fake.kernel, cases[i].attend);
            assert_int_equal(fake.config.numAttrs, 0);
            for (int k = 0; k < 2; k++) {
                const char *expected = counts[j].project[k];
                backend_project(fixture.backend,
                                &(struct project_params){.num_tokens = counts[j].num_tokens,
                                                         .in_features = widths[k],
                                                         .hidden_size = fixture.shape.hidden_size});
                assert_non_null(
                    strstr(fake.kernel, expected != NULL ? expected : cases[i].project));
                assert_int_equal(fake.config.numAttrs, 0);
                assert_true(fake.config.sharedMemBytes + OP_KERNEL_STATIC_BYTES <=
                            (unsigned int)cases[i].max_shared_bytes);
            }
        }
        backend_sample(fixture.backend, &(struct sample_params){.num_rows = 1,
                                                                .num_logits_rows = 1,
                                                                .vocab_size = 1000,
                                                                .num_ids = 1000});
        assert_string_equal(fake.kernel, "sample_rows");
        assert_int_equal(fake.config.gridDimX, 1);
        assert_int_equal(fake.config.sharedMemBytes, 0);
        assert_int_equal(fake.config.numAttrs, 0);
        assert_int_equal(backend_end(fixture.backend), IMBREX_STATUS_OK);
        close_fixture(&fixture);
    }
}

/* Catches a backend without Hopper's kernels after which no other one of the device has them. */
static void test_portable_beside_hopper(void **state)
{
    (void)state;
    struct fixture fixture;
    struct backend *other = NULL;
    struct imbrex_error err;
    fake_reset();
    open_fixture(&fixture, DTYPE_BF16, 128, IMBREX_ABLATE_HOPPER);
    run_attend(&fixture, NUM_TOKENS);
    assert_string_equal(fake.kernel, "tensor_attention_128");
    assert_int_equal(
        backend_cuda_create_on(fixture.device,
                               &(struct backend_cuda_options){.activation_dtype = DTYPE_BF16},
                               &fixture.shape, NULL, 0, &other, &err),
        IMBREX_STATUS_OK);
    assert_string_equal(fixture.backend->kernels_name, "sm80");
    assert_string_equal(other->kernels_name, "sm90");
    backend_destroy(other);
    close_fixture(&fixture);
}

int run_backend_cuda_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_plain_with_tensor_attention),
        cmocka_unit_test(test_no_tokens),
        cmocka_unit_test(test_overlap),
        cmocka_unit_test(test_each_call_fails),
        cmocka_unit_test(test_scratch),
        cmocka_unit_test(test_unfused_mlp),
        cmocka_unit_test(test_portable),
        cmocka_unit_test(test_portable_beside_hopper),
    };
    return cmocka_run_group_tests_name("backend_cuda", tests, NULL, NULL);
}
