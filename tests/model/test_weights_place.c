/* SPDX-License-Identifier: Apache-2.0 */
/* Weights of made-up models, random bits, on the CPU's device and on fake ones, whose memory the
 * host can look at. */
#include "model/weights_place.h"

#include <stdlib.h>
#include <string.h>

#include "ops/fake/device_fake.h"
#include "ops/quant.h"
#include "tests/test.h"

enum { NUM_LAYERS = 2 };

/* A model of which nothing is there but config and weights. */
struct world {
    struct imbrex_model model;
    struct layer_weights layers[NUM_LAYERS];
    unsigned char *matrices[NUM_LAYERS * 7 + 2]; /* allocated */
    float *vectors[NUM_LAYERS * 11 + 1];
    int32_t num_matrices, num_vectors;
    uint64_t random;
    enum dtype dtype;
};

/* Of blocks and batches nothing is left over; of the second, in every row. */
static const struct model_config round_config = {.hidden_size = 256,
                                                 .intermediate_size = 512,
                                                 .num_layers = NUM_LAYERS,
                                                 .num_heads = 4,
                                                 .num_kv_heads = 2,
                                                 .head_dim = 64,
                                                 .vocab_size = 1001};
static const struct model_config odd_config = {.hidden_size = 254,
                                               .intermediate_size = 333,
                                               .num_layers = NUM_LAYERS,
                                               .num_heads = 6,
                                               .num_kv_heads = 3,
                                               .head_dim = 50,
                                               .vocab_size = 1003};

static uint32_t random_bits(struct world *world)
{
    world->random = world->random * 6364136223846793005u + 1442695040888963407u;
    return (uint32_t)(world->random >> 32);
}

/* At an odd address, as in many files. Of plain dtypes any bits, NaN and subnormals among them;
 * of blocks, numbers that are sensible. */
static struct weight_view make_matrix(struct world *world, int64_t rows, int64_t columns)
{
    int64_t num_elements = rows * columns;
    size_t num_bytes = dtype_row_bytes(world->dtype, num_elements);
    unsigned char *elements = malloc(num_bytes + 1);
    assert_non_null(elements);
    world->matrices[world->num_matrices++] = elements;
    if (dtype_is_quantized(world->dtype)) {
        float values[256];
        for (int64_t i = 0; i < num_elements; i += 256) {
            for (int32_t j = 0; j < 256; j++) {
                values[j] = (float)(int32_t)random_bits(world) * 0x1p-31f;
            }
            quant_quantize_row(world->dtype, values,
                               elements + 1 + dtype_row_bytes(world->dtype, i), 256);
        }
    } else {
        for (size_t i = 0; i < num_bytes; i++) {
            elements[i + 1] = (unsigned char)random_bits(world);
        }
    }
    return (struct weight_view){.elements = elements + 1, .dtype = world->dtype};
}

static const float *make_vector(struct world *world, int64_t length)
{
    float *values = malloc((size_t)length * sizeof(*values));
    assert_non_null(values);
    world->vectors[world->num_vectors++] = values;
    for (int64_t i = 0; i < length; i++) {
        values[i] = (float)(int32_t)random_bits(world);
    }
    return values;
}

/* With all the biases and norms there are, or with none that can be missing. */
static void make_layer(struct world *world, const struct model_config *config, bool has_all,
                       struct layer_weights *layer)
{
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = config->num_heads * config->head_dim;
    int64_t kv_rows = config->num_kv_heads * config->head_dim;
    *layer = (struct layer_weights){.input_layernorm = make_vector(world, hidden),
                                    .post_attention_layernorm = make_vector(world, hidden),
                                    .q_proj = make_matrix(world, q_rows, hidden),
                                    .k_proj = make_matrix(world, kv_rows, hidden),
                                    .v_proj = make_matrix(world, kv_rows, hidden),
                                    .o_proj = make_matrix(world, hidden, q_rows),
                                    .gate_proj = make_matrix(world, intermediate, hidden),
                                    .up_proj = make_matrix(world, intermediate, hidden),
                                    .down_proj = make_matrix(world, hidden, intermediate)};
    if (has_all) {
        layer->q_norm = make_vector(world, config->head_dim);
        layer->k_norm = make_vector(world, config->head_dim);
        layer->q_bias = make_vector(world, q_rows);
        layer->k_bias = make_vector(world, kv_rows);
        layer->v_bias = make_vector(world, kv_rows);
        layer->o_bias = make_vector(world, hidden);
        layer->gate_bias = make_vector(world, intermediate);
        layer->up_bias = make_vector(world, intermediate);
        layer->down_bias = make_vector(world, hidden);
    }
}

static struct world *make_world(const struct model_config *config, enum dtype dtype, bool has_all)
{
    struct world *world = calloc(1, sizeof(*world));
    assert_non_null(world);
    world->dtype = dtype;
    world->random = 7 + (uint64_t)dtype;
    world->model.config = *config;
    struct weights *weights = &world->model.weights;
    weights->layers = world->layers;
    weights->tied = !has_all;
    weights->embed_tokens = make_matrix(world, config->vocab_size, config->hidden_size);
    for (int32_t i = 0; i < NUM_LAYERS; i++) {
        make_layer(world, config, has_all, &world->layers[i]);
    }
    weights->norm = make_vector(world, config->hidden_size);
    weights->lm_head = weights->tied ? weights->embed_tokens
                                     : make_matrix(world, config->vocab_size, config->hidden_size);
    return world;
}

static void free_world(struct world *world)
{
    for (int32_t i = 0; i < world->num_matrices; i++) {
        free(world->matrices[i]);
    }
    for (int32_t i = 0; i < world->num_vectors; i++) {
        free(world->vectors[i]);
    }
    free(world);
}

/* ---- what must be where ----------------------------------------------------------------------*/

/* Where the walk below expects the next tensor, which may begin at the next multiple of 256. */
struct expectation {
    const struct placed_weights *placed;
    size_t num_seen; /* bytes of the elements */
};

static void expect_inside(struct expectation *expectation, const void *found, size_t num_bytes)
{
    const unsigned char *begin = expectation->placed->memory;
    const unsigned char *element = found;
    assert_true(element >= begin && element + num_bytes <= begin + expectation->placed->num_bytes);
    expectation->num_seen += num_bytes;
}

static void expect_matrix(struct expectation *expectation, struct weight_view found,
                          struct weight_view source, enum dtype dtype, int64_t rows,
                          int64_t columns, bool is_first)
{
    assert_int_equal(found.dtype, dtype);
    int64_t num_elements = rows * columns;
    float *values = malloc((size_t)num_elements * sizeof(*values));
    assert_non_null(values);
    expect_inside(expectation, found.elements, dtype_row_bytes(dtype, num_elements));
    assert_true(!is_first || (uintptr_t)found.elements % 256 == 0);
    quant_dequantize_row(source.dtype, source.elements, values, num_elements);
    for (int64_t i = 0; i < num_elements; i++) {
        const unsigned char *element =
            (const unsigned char *)found.elements + dtype_row_bytes(dtype, i);
        uint16_t rounded = bf16_from_float(values[i]);
        if (dtype == DTYPE_BF16 && source.dtype == DTYPE_BF16) {
            memcpy(&rounded, (const unsigned char *)source.elements + 2 * i, 2);
        }
        if (memcmp(element, dtype == DTYPE_BF16 ? (const void *)&rounded : &values[i],
                   dtype_block_bytes(dtype)) != 0) {
            fail_msg("%s to %s: element %ld of [%ld, %ld]", dtype_name(source.dtype),
                     dtype_name(dtype), (long)i, (long)rows, (long)columns);
        }
    }
    free(values);
}

static void expect_vector(struct expectation *expectation, const float *found, const float *source,
                          int64_t length, bool is_first)
{
    if (source == NULL) {
        assert_null(found);
        return;
    }
    expect_inside(expectation, found, (size_t)length * sizeof(float));
    assert_true(!is_first || (uintptr_t)found % 256 == 0);
    assert_memory_equal(found, source, (size_t)length * sizeof(float));
}

static void expect_behind(const void *found, const void *before, enum dtype dtype, int64_t elements)
{
    assert_ptr_equal(found, (const unsigned char *)before + dtype_row_bytes(dtype, elements));
}

static void expect_layer(struct expectation *expectation, const struct model_config *config,
                         const struct layer_weights *found, const struct layer_weights *source,
                         enum dtype dtype)
{
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = config->num_heads * config->head_dim;
    int64_t kv_rows = config->num_kv_heads * config->head_dim;
    expect_vector(expectation, found->input_layernorm, source->input_layernorm, hidden, true);
    expect_vector(expectation, found->post_attention_layernorm, source->post_attention_layernorm,
                  hidden, true);
    expect_vector(expectation, found->q_norm, source->q_norm, config->head_dim, true);
    expect_vector(expectation, found->k_norm, source->k_norm, config->head_dim, true);
    expect_matrix(expectation, found->q_proj, source->q_proj, dtype, q_rows, hidden, true);
    expect_matrix(expectation, found->k_proj, source->k_proj, dtype, kv_rows, hidden, false);
    expect_matrix(expectation, found->v_proj, source->v_proj, dtype, kv_rows, hidden, false);
    expect_behind(found->k_proj.elements, found->q_proj.elements, dtype, q_rows * hidden);
    expect_behind(found->v_proj.elements, found->k_proj.elements, dtype, kv_rows * hidden);
    expect_vector(expectation, found->q_bias, source->q_bias, q_rows, true);
    expect_vector(expectation, found->k_bias, source->k_bias, kv_rows, false);
    expect_vector(expectation, found->v_bias, source->v_bias, kv_rows, false);
    expect_matrix(expectation, found->o_proj, source->o_proj, dtype, hidden, q_rows, true);
    expect_vector(expectation, found->o_bias, source->o_bias, hidden, true);
    expect_matrix(expectation, found->gate_proj, source->gate_proj, dtype, intermediate, hidden,
                  true);
    expect_matrix(expectation, found->up_proj, source->up_proj, dtype, intermediate, hidden, false);
    expect_behind(found->up_proj.elements, found->gate_proj.elements, dtype, intermediate * hidden);
    expect_vector(expectation, found->gate_bias, source->gate_bias, intermediate, true);
    expect_vector(expectation, found->up_bias, source->up_bias, intermediate, false);
    expect_matrix(expectation, found->down_proj, source->down_proj, dtype, hidden, intermediate,
                  true);
    expect_vector(expectation, found->down_bias, source->down_bias, hidden, true);
    if (source->q_bias != NULL) {
        expect_behind(found->k_bias, found->q_bias, DTYPE_F32, q_rows);
        expect_behind(found->v_bias, found->k_bias, DTYPE_F32, kv_rows);
        expect_behind(found->up_bias, found->gate_bias, DTYPE_F32, intermediate);
    }
}

/* All of it; returns the bytes of all tensors. Since contents are random, tensors that overlap
 * differ from their sources somewhere. */
static size_t expect_placed(const struct world *world, const struct placed_weights *placed,
                            enum dtype dtype)
{
    const struct model_config *config = &world->model.config;
    const struct weights *source = &world->model.weights, *found = &placed->weights;
    struct expectation expectation = {.placed = placed};
    size_t planned = 0;
    assert_true(weights_place_bytes(&world->model, dtype, &planned));
    assert_int_equal(planned, placed->num_bytes);
    expect_matrix(&expectation, found->embed_tokens, source->embed_tokens, dtype,
                  config->vocab_size, config->hidden_size, true);
    for (int32_t i = 0; i < NUM_LAYERS; i++) {
        expect_layer(&expectation, config, &found->layers[i], &source->layers[i], dtype);
    }
    expect_vector(&expectation, found->norm, source->norm, config->hidden_size, true);
    assert_int_equal(found->tied, source->tied);
    if (found->tied) {
        assert_ptr_equal(found->lm_head.elements, found->embed_tokens.elements);
    } else {
        expect_matrix(&expectation, found->lm_head, source->lm_head, dtype, config->vocab_size,
                      config->hidden_size, true);
    }
    return expectation.num_seen;
}

/* ---- tests -----------------------------------------------------------------------------------*/

static struct device *create_device(int32_t seed)
{
    struct device *device = NULL;
    assert_int_equal(seed < 0 ? device_cpu_create(&device, NULL)
                              : device_fake_create((uint64_t)seed, &device, NULL),
                     IMBREX_STATUS_OK);
    return device;
}

struct progress {
    size_t num_done, num_bytes;
    int32_t num_calls, cancel_at; /* 0: never */
};

static bool on_progress(void *user, size_t num_done, size_t num_bytes)
{
    struct progress *progress = user;
    assert_true(num_done >= progress->num_done && num_done <= num_bytes);
    progress->num_done = num_done;
    progress->num_bytes = num_bytes;
    return ++progress->num_calls != progress->cancel_at;
}

static void place_and_check(const struct world *world, enum dtype dtype, int32_t seed)
{
    struct device *device = create_device(seed);
    struct placed_weights placed = {0};
    struct progress progress = {0};
    struct imbrex_error err;
    if (weights_place(&world->model, device, dtype, 2, on_progress, &progress, &placed, &err) !=
        IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    size_t num_seen = expect_placed(world, &placed, dtype);
    assert_int_equal(progress.num_done, num_seen);
    assert_int_equal(progress.num_bytes, num_seen);
    assert_true(progress.num_calls > 4); /* or no buffer was ever filled again */
    weights_place_release(device, &placed);
    assert_null(placed.memory);
    device_destroy(device);
}

/* Catches: tensors in another's place, gaps where kernels expect none, wrong rounding of halves,
 * NaN or subnormals, a batch cut wrongly; on fake devices, a buffer that is filled again while a
 * copy still reads it. */
static void test_every_dtype(void **state)
{
    (void)state;
    const enum dtype dtypes[] = {DTYPE_F32,  DTYPE_F16,  DTYPE_BF16,
                                 DTYPE_Q8_0, DTYPE_Q4_0, DTYPE_Q4_K};
    for (int32_t i = 0; i < 6; i++) {
        struct world *world = make_world(&round_config, dtypes[i], i % 2 == 0);
        place_and_check(world, DTYPE_F32, i - 1);
        place_and_check(world, DTYPE_BF16, i);
        free_world(world);
    }
}

/* Catches: rows, matrices and vectors that are no multiple of anything; biases that are there or
 * not; a tied matrix that is stored twice. */
static void test_odd_sizes(void **state)
{
    (void)state;
    size_t num_bytes[2];
    for (int32_t dtype = 0; dtype < DTYPE_NUM_PLAIN; dtype++) {
        for (int32_t has_all = 0; has_all < 2; has_all++) {
            struct world *world = make_world(&odd_config, (enum dtype)dtype, has_all);
            place_and_check(world, DTYPE_F32, dtype - 1);
            place_and_check(world, DTYPE_BF16, 10 + dtype);
            assert_true(weights_place_bytes(&world->model, DTYPE_BF16, &num_bytes[has_all]));
            free_world(world);
        }
        assert_true(num_bytes[1] > num_bytes[0] + 1003 * 254 * 2);
    }
}

/* Catches: for every call and every copy that can fail: a status that is lost, pinned memory,
 * events or device memory that is kept, a buffer given back with a copy still on its way (the
 * device's destruction sees all of these), a result that is written. */
static void test_failures(void **state)
{
    (void)state;
    struct world *world = make_world(&odd_config, DTYPE_F16, true);
    for (int32_t fault = 0; fault < DEVICE_FAKE_FAULT_COUNT; fault++) {
        const enum imbrex_status statuses[] = {IMBREX_STATUS_IO, IMBREX_STATUS_DEVICE};
        for (int32_t i = 0; i < 2 && fault != DEVICE_FAKE_FAULT_WORK; i++) {
            enum imbrex_status status = statuses[i];
            int64_t countdown = 1;
            for (; status != IMBREX_STATUS_OK; countdown++) {
                struct device *device = create_device((int32_t)countdown);
                struct placed_weights placed = {.num_bytes = 1};
                struct imbrex_error err = {0};
                device_fake_fail(device, (enum device_fake_fault)fault, countdown, statuses[i]);
                status =
                    weights_place(&world->model, device, DTYPE_BF16, 1, NULL, NULL, &placed, &err);
                if (status == IMBREX_STATUS_OK) {
                    weights_place_release(device, &placed);
                } else {
                    assert_int_equal(status, statuses[i]);
                    assert_true(strlen(err.message) > 0);
                    assert_int_equal(placed.num_bytes, 1);
                }
                device_destroy(device);
            }
            assert_true(countdown > 8);
        }
    }
    free_world(world);
}

/* Catches: a load that goes on when it was cancelled, or leaves something behind. */
static void test_cancel(void **state)
{
    (void)state;
    struct world *world = make_world(&odd_config, DTYPE_F32, false);
    enum imbrex_status status = IMBREX_STATUS_CANCELLED;
    int32_t cancel_at = 1;
    for (; status != IMBREX_STATUS_OK; cancel_at++) {
        struct device *device = create_device(cancel_at);
        struct placed_weights placed = {0};
        struct progress progress = {.cancel_at = cancel_at};
        status = weights_place(&world->model, device, DTYPE_BF16, 2, on_progress, &progress,
                               &placed, NULL);
        if (status != IMBREX_STATUS_OK) {
            assert_int_equal(status, IMBREX_STATUS_CANCELLED);
            assert_int_equal(progress.num_calls, cancel_at);
            assert_null(placed.memory);
        }
        weights_place_release(device, &placed);
        device_destroy(device);
    }
    assert_true(cancel_at > 5);
    free_world(world);
}

/* Catches: sizes that wrap around. */
static void test_overflow(void **state)
{
    (void)state;
    struct world *world = make_world(&odd_config, DTYPE_F32, false);
    size_t num_bytes = 1;
    world->model.config.hidden_size = INT32_MAX;
    world->model.config.vocab_size = INT32_MAX;
    world->model.config.intermediate_size = INT32_MAX;
    assert_false(weights_place_bytes(&world->model, DTYPE_F32, &num_bytes));
    assert_int_equal(num_bytes, 1);
    free_world(world);
}

int run_weights_place_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_dtype), cmocka_unit_test(test_odd_sizes),
        cmocka_unit_test(test_failures),    cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_overflow),
    };
    return cmocka_run_group_tests_name("weights_place", tests, NULL, NULL);
}
