/* SPDX-License-Identifier: Apache-2.0 */
#include "model/weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/asset.h"
#include "tests/base/fixture.h"
#include "tests/test.h"

#define MAX_TENSORS 64
#define MAX_TENSOR_BYTES 40000

/* A checkpoint in memory, without files. Element i of tensor j is 1 + i / 4 + j (exact in every
 * dtype that is used). */
struct model {
    struct checkpoint checkpoint;
    struct checkpoint_tensor tensors[MAX_TENSORS];
    const struct checkpoint_tensor *by_name[MAX_TENSORS];
    char names[MAX_TENSORS][80];
    unsigned char elements[MAX_TENSORS][MAX_TENSOR_BYTES];
    struct weights weights;
    struct imbrex_error err;
};

static const struct model_config llama = {
    .architecture = ARCHITECTURE_LLAMA,
    .hidden_size = 8,
    .intermediate_size = 6,
    .num_layers = 2,
    .num_heads = 4,
    .num_kv_heads = 2,
    .head_dim = 4,
    .vocab_size = 10,
    .max_position_embeddings = 16,
    .rope_theta = 1e4,
    .rms_norm_eps = 1e-5,
};

static void set_element(unsigned char *elements, enum dtype dtype, int64_t idx, float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof(bits));
    uint16_t half = (uint16_t)(bits >> 16);
    if (dtype == DTYPE_F16) {
        /* 1 <= value < 2^15 with few digits: no rounding, no subnormals. */
        half = (uint16_t)((((bits >> 23) - 112) << 10) | ((bits >> 13) & 0x3ff));
    }
    if (dtype == DTYPE_F32) {
        memcpy(elements + 4 * idx, &value, sizeof(value));
    } else {
        memcpy(elements + 2 * idx, &half, sizeof(half));
    }
}

static void add(struct model *model, enum dtype dtype, int64_t rows, int64_t columns,
                const char *format, ...) __attribute__((format(printf, 5, 6)));

/* columns 0: a vector of `rows`. */
static void add(struct model *model, enum dtype dtype, int64_t rows, int64_t columns,
                const char *format, ...)
{
    int32_t idx = model->checkpoint.num_tensors++;
    struct checkpoint_tensor *tensor = &model->tensors[idx];
    int64_t num_elements = rows * (columns > 0 ? columns : 1);
    va_list args;
    assert_true(idx < MAX_TENSORS);
    va_start(args, format);
    vsnprintf(model->names[idx], sizeof(model->names[idx]), format, args);
    va_end(args);
    *tensor = (struct checkpoint_tensor){
        .name = model->names[idx],
        .dtype = dtype,
        .dtype_name = dtype == DTYPE_COUNT ? "I8" : dtype_name(dtype),
        .num_dims = columns > 0 ? 2 : 1,
        .shape = {rows, columns},
        .elements = model->elements[idx] + 1, /* unaligned, as in many files */
        .num_bytes = (size_t)num_elements * (dtype == DTYPE_COUNT ? 1 : dtype_block_bytes(dtype)),
        .file = "m/f.safetensors",
    };
    assert_true(tensor->num_bytes < MAX_TENSOR_BYTES);
    for (int64_t i = 0; i < num_elements && dtype != DTYPE_COUNT; i++) {
        set_element(model->elements[idx] + 1, dtype, i, 1.0f + (float)i / 4.0f + (float)idx);
    }
}

static void add_projection(struct model *model, enum dtype dtype, int32_t layer_idx,
                           const char *name, int64_t rows, int64_t columns, bool has_bias)
{
    add(model, dtype, rows, columns, "model.layers.%d.%s.weight", layer_idx, name);
    if (has_bias) {
        add(model, dtype, rows, 0, "model.layers.%d.%s.bias", layer_idx, name);
    }
}

/* All tensors that a checkpoint of this configuration has. */
static struct model *make_model(const struct model_config *config, enum dtype matrices,
                                enum dtype vectors)
{
    struct model *model = calloc(1, sizeof(*model));
    assert_non_null(model);
    int64_t hidden = config->hidden_size, intermediate = config->intermediate_size;
    int64_t q_rows = config->num_heads * config->head_dim;
    int64_t kv_rows = config->num_kv_heads * config->head_dim;
    add(model, matrices, config->vocab_size, hidden, "model.embed_tokens.weight");
    for (int32_t i = 0; i < config->num_layers; i++) {
        add(model, vectors, hidden, 0, "model.layers.%d.input_layernorm.weight", i);
        add(model, vectors, hidden, 0, "model.layers.%d.post_attention_layernorm.weight", i);
        if (config->qk_norm) {
            add(model, vectors, config->head_dim, 0, "model.layers.%d.self_attn.q_norm.weight", i);
            add(model, vectors, config->head_dim, 0, "model.layers.%d.self_attn.k_norm.weight", i);
        }
        add_projection(model, matrices, i, "self_attn.q_proj", q_rows, hidden, config->qkv_bias);
        add_projection(model, matrices, i, "self_attn.k_proj", kv_rows, hidden, config->qkv_bias);
        add_projection(model, matrices, i, "self_attn.v_proj", kv_rows, hidden, config->qkv_bias);
        add_projection(model, matrices, i, "self_attn.o_proj", hidden, q_rows, config->o_bias);
        add_projection(model, matrices, i, "mlp.gate_proj", intermediate, hidden, config->mlp_bias);
        add_projection(model, matrices, i, "mlp.up_proj", intermediate, hidden, config->mlp_bias);
        add_projection(model, matrices, i, "mlp.down_proj", hidden, intermediate, config->mlp_bias);
    }
    add(model, vectors, hidden, 0, "model.norm.weight");
    add(model, matrices, config->vocab_size, hidden, "lm_head.weight");
    return model;
}

static struct checkpoint_tensor *tensor_of(struct model *model, const char *name)
{
    for (int32_t i = 0; i < model->checkpoint.num_tensors; i++) {
        if (strcmp(model->tensors[i].name, name) == 0) {
            return &model->tensors[i];
        }
    }
    fail_msg("no tensor %s", name);
    return NULL;
}

static void remove_tensor(struct model *model, const char *name)
{
    struct checkpoint_tensor *tensor = tensor_of(model, name);
    *tensor = model->tensors[--model->checkpoint.num_tensors];
}

static int compare_names(const void *left, const void *right)
{
    const struct checkpoint_tensor *const *a = left, *const *b = right;
    return strcmp((*a)->name, (*b)->name);
}

static enum imbrex_status bind(struct model *model, const struct model_config *config)
{
    size_t num_tensors = (size_t)model->checkpoint.num_tensors;
    for (size_t i = 0; i < num_tensors; i++) {
        model->by_name[i] = &model->tensors[i];
    }
    qsort(model->by_name, num_tensors, sizeof(model->by_name[0]), compare_names);
    model->checkpoint.tensors = model->by_name;
    return weights_bind(&model->checkpoint, config, "m", &model->weights, &model->err);
}

static void expect_bound(struct model *model, const struct model_config *config)
{
    if (bind(model, config) != IMBREX_STATUS_OK) {
        fail_msg("%s", model->err.message);
    }
}

static void expect_refused(struct model *model, const struct model_config *config,
                           enum imbrex_status expected, const char *fragments)
{
    expect_error(bind(model, config), expected, &model->err, fragments);
    assert_null(model->weights.layers);
    assert_null(model->weights.converted);
    free(model);
}

static void free_model(struct model *model)
{
    weights_release(&model->weights);
    assert_null(model->weights.layers);
    weights_release(&model->weights);
    free(model);
}

static void expect_vector(struct model *model, const float *copy, const char *name)
{
    const struct checkpoint_tensor *tensor = tensor_of(model, name);
    int32_t tensor_idx = (int32_t)(tensor - model->tensors);
    assert_non_null(copy);
    for (int64_t i = 0; i < tensor->shape[0]; i++) {
        assert_true(copy[i] == 1.0f + (float)i / 4.0f + (float)tensor_idx);
    }
}

static void expect_matrix(struct model *model, struct weight_view view, const char *name)
{
    const struct checkpoint_tensor *tensor = tensor_of(model, name);
    assert_ptr_equal(view.elements, tensor->elements);
    assert_int_equal(view.dtype, tensor->dtype);
}

/* Catches two tensors swapped, a layer's taken for another's, a vector widened wrongly: with every
 * bias and the norms of q and k, in each dtype. */
static void test_every_place(void **state)
{
    (void)state;
    struct model_config config = llama;
    config.qkv_bias = config.o_bias = config.mlp_bias = config.qk_norm = true;
    for (int dtype = 0; dtype < DTYPE_NUM_PLAIN; dtype++) {
        struct model *model = make_model(&config, DTYPE_BF16, (enum dtype)dtype);
        expect_bound(model, &config);
        const struct weights *weights = &model->weights;
        expect_matrix(model, weights->embed_tokens, "model.embed_tokens.weight");
        expect_matrix(model, weights->lm_head, "lm_head.weight");
        expect_vector(model, weights->norm, "model.norm.weight");
        for (int32_t i = 0; i < config.num_layers; i++) {
            const struct layer_weights *layer = &weights->layers[i];
            const struct {
                const char *name;
                const float *copy;
            } vectors[] = {
                {"input_layernorm.weight", layer->input_layernorm},
                {"post_attention_layernorm.weight", layer->post_attention_layernorm},
                {"self_attn.q_norm.weight", layer->q_norm},
                {"self_attn.k_norm.weight", layer->k_norm},
                {"self_attn.q_proj.bias", layer->q_bias},
                {"self_attn.k_proj.bias", layer->k_bias},
                {"self_attn.v_proj.bias", layer->v_bias},
                {"self_attn.o_proj.bias", layer->o_bias},
                {"mlp.gate_proj.bias", layer->gate_bias},
                {"mlp.up_proj.bias", layer->up_bias},
                {"mlp.down_proj.bias", layer->down_bias},
            };
            const struct {
                const char *name;
                struct weight_view view;
            } matrices[] = {
                {"self_attn.q_proj", layer->q_proj}, {"self_attn.k_proj", layer->k_proj},
                {"self_attn.v_proj", layer->v_proj}, {"self_attn.o_proj", layer->o_proj},
                {"mlp.gate_proj", layer->gate_proj}, {"mlp.up_proj", layer->up_proj},
                {"mlp.down_proj", layer->down_proj},
            };
            char name[80];
            for (size_t j = 0; j < sizeof(vectors) / sizeof(vectors[0]); j++) {
                snprintf(name, sizeof(name), "model.layers.%d.%s", i, vectors[j].name);
                expect_vector(model, vectors[j].copy, name);
            }
            for (size_t j = 0; j < sizeof(matrices) / sizeof(matrices[0]); j++) {
                snprintf(name, sizeof(name), "model.layers.%d.%s.weight", i, matrices[j].name);
                expect_matrix(model, matrices[j].view, name);
            }
        }
        free_model(model);
    }
}

/* Catches totals that count a tensor twice or not at all. */
static void test_totals(void **state)
{
    (void)state;
    struct model_config config = llama;
    struct model *model = make_model(&config, DTYPE_BF16, DTYPE_F32);
    int64_t num_elements = 0;
    size_t num_bytes = 0;
    for (int32_t i = 0; i < model->checkpoint.num_tensors; i++) {
        const struct checkpoint_tensor *tensor = &model->tensors[i];
        num_elements += tensor->shape[0] * (tensor->num_dims > 1 ? tensor->shape[1] : 1);
        num_bytes += tensor->num_bytes;
    }
    expect_bound(model, &config);
    assert_int_equal(model->weights.num_parameters, num_elements);
    assert_int_equal(model->weights.num_bytes, num_bytes);
    assert_int_equal(model->weights.num_converted, (2 * 2 + 1) * 8);
    assert_null(model->weights.layers[0].q_bias);
    assert_null(model->weights.layers[1].down_bias);
    weights_release(&model->weights);

    config.tie_word_embeddings = true; /* the stored lm_head is now no weight of the model */
    expect_bound(model, &config);
    assert_int_equal(model->weights.num_parameters, num_elements - 10 * 8);
    assert_int_equal(model->weights.num_bytes, num_bytes - 10 * 8 * 2);
    free_model(model);
}

/* Catches a tied head decided by config alone, or by the tensors alone. */
static void test_tied(void **state)
{
    (void)state;
    for (int is_tied = 0; is_tied < 2; is_tied++) {
        for (int is_stored = 0; is_stored < 2; is_stored++) {
            struct model_config config = llama;
            config.tie_word_embeddings = is_tied;
            struct model *model = make_model(&config, DTYPE_F16, DTYPE_F16);
            if (!is_stored) {
                remove_tensor(model, "lm_head.weight");
            }
            expect_bound(model, &config);
            bool expected = is_tied || !is_stored;
            assert_int_equal(model->weights.tied, expected);
            assert_ptr_equal(
                model->weights.lm_head.elements,
                tensor_of(model, expected ? "model.embed_tokens.weight" : "lm_head.weight")
                    ->elements);
            assert_non_null(strstr(model->weights.tied_reason,
                                   is_tied ? "tie_word_embeddings" : "lm_head.weight"));
            free_model(model);
        }
    }
}

/* Catches a missing tensor that leaves a NULL pointer for the forward pass: each in turn. */
static void test_each_missing_tensor(void **state)
{
    (void)state;
    struct model_config config = llama;
    config.qkv_bias = config.o_bias = config.mlp_bias = true;
    struct model *whole = make_model(&config, DTYPE_BF16, DTYPE_BF16);
    for (int32_t i = 0; i < whole->checkpoint.num_tensors; i++) {
        const char *name = whole->tensors[i].name;
        if (strcmp(name, "lm_head.weight") != 0) {
            struct model *model = make_model(&config, DTYPE_BF16, DTYPE_BF16);
            char fragments[160];
            remove_tensor(model, name);
            snprintf(fragments, sizeof(fragments), "m: %s: expected a tensor of shape [|found none",
                     name);
            expect_refused(model, &config, IMBREX_STATUS_FORMAT, fragments);
        }
    }
    free(whole);
}

/* Catches a shape that is checked by its size only, or not at all: each tensor in turn. */
static void test_each_wrong_shape(void **state)
{
    (void)state;
    struct model_config config = llama;
    config.qkv_bias = config.o_bias = config.mlp_bias = true;
    struct model *whole = make_model(&config, DTYPE_BF16, DTYPE_BF16);
    for (int32_t i = 0; i < whole->checkpoint.num_tensors; i++) {
        struct model *model = make_model(&config, DTYPE_BF16, DTYPE_BF16);
        struct checkpoint_tensor *tensor = &model->tensors[i];
        char fragments[160];
        snprintf(fragments, sizeof(fragments), "m/f.safetensors: %s: shape: expected [|, found [",
                 tensor->name);
        if (tensor->num_dims == 2 && tensor->shape[0] != tensor->shape[1]) {
            int64_t rows = tensor->shape[0]; /* transposed: the same number of bytes */
            tensor->shape[0] = tensor->shape[1];
            tensor->shape[1] = rows;
        } else {
            tensor->num_dims++;
            tensor->shape[tensor->num_dims - 1] = 1;
        }
        expect_refused(model, &config, IMBREX_STATUS_FORMAT, fragments);
    }
    free(whole);
}

/* Catches a message without both shapes, a dtype that no kernel has, a tensor left out silently. */
static void test_refusals(void **state)
{
    (void)state;
    struct model *model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    tensor_of(model, "model.layers.1.mlp.up_proj.weight")->shape[0] = 4864;
    expect_refused(model, &llama, IMBREX_STATUS_FORMAT,
                   "m/f.safetensors: model.layers.1.mlp.up_proj.weight: shape: expected [6, 8], "
                   "found [4864, 8]");

    model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    model->tensors[3].num_dims = 0;
    expect_refused(model, &llama, IMBREX_STATUS_FORMAT, "found []");

    model = make_model(&llama, DTYPE_BF16, DTYPE_COUNT);
    expect_refused(model, &llama, IMBREX_STATUS_UNSUPPORTED,
                   "input_layernorm.weight: dtype: expected F32, F16 or BF16, found I8");

    model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    add(model, DTYPE_BF16, 4, 0, "model.layers.1.self_attn.q_norm.weight");
    expect_refused(model, &llama, IMBREX_STATUS_UNSUPPORTED,
                   "model.layers.1.self_attn.q_norm.weight: expected only the tensors of "
                   "\"llama\"|found this one of shape [4]");

    model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    add(model, DTYPE_BF16, 16, 0, "model.layers.0.self_attn.q_proj.bias");
    expect_refused(model, &llama, IMBREX_STATUS_UNSUPPORTED, "layers.0.self_attn.q_proj.bias");

    model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    add(model, DTYPE_BF16, 8, 0, "model.layers.2.input_layernorm.weight"); /* a layer too many */
    expect_refused(model, &llama, IMBREX_STATUS_UNSUPPORTED, "model.layers.2.input_layernorm");

    struct model_config config = llama;
    config.num_layers = 3;
    model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    expect_refused(model, &config, IMBREX_STATUS_FORMAT, "m: model.layers.2.|found none");

    model = calloc(1, sizeof(*model));
    assert_non_null(model);
    expect_refused(model, &llama, IMBREX_STATUS_FORMAT, "m: model.embed_tokens.weight");
}

/* llama, with rows that 32-element blocks divide and, in down_proj, K blocks too. */
static struct model_config config_for_blocks(void)
{
    struct model_config config = llama;
    config.hidden_size = 64;
    config.intermediate_size = 256;
    config.num_layers = 1;
    config.num_heads = 4;
    config.num_kv_heads = 1;
    config.head_dim = 16;
    config.vocab_size = 3;
    return config;
}

/* A BF16 model of that configuration; the matrix `name` [rows, columns] in blocks, if not NULL. */
static struct model *make_model_with_blocks(const struct model_config *config, const char *name,
                                            enum dtype dtype)
{
    struct model *model = make_model(config, DTYPE_BF16, DTYPE_F32);
    if (name != NULL) {
        struct checkpoint_tensor *tensor = tensor_of(model, name);
        tensor->dtype = dtype;
        tensor->dtype_name = dtype_name(dtype);
        tensor->num_bytes = dtype_row_bytes(dtype, tensor->shape[0] * tensor->shape[1]);
    }
    return model;
}

/* Catches a matrix in blocks that is refused, given another dtype or counted wrongly; scratch for
 * activations planned where no weights need it, or too little. */
static void test_quantized_matrices(void **state)
{
    (void)state;
    struct model_config config = config_for_blocks();
    struct model *model = make_model_with_blocks(&config, NULL, DTYPE_F32);
    expect_bound(model, &config);
    assert_int_equal(model->weights.max_quantized_columns, 0);
    int64_t num_parameters = model->weights.num_parameters;
    size_t num_bytes = model->weights.num_bytes;
    free_model(model);
    for (int dtype = DTYPE_NUM_PLAIN; dtype < DTYPE_COUNT; dtype++) {
        model = make_model_with_blocks(&config, "model.layers.0.mlp.down_proj.weight",
                                       (enum dtype)dtype);
        expect_bound(model, &config);
        assert_int_equal(model->weights.layers[0].down_proj.dtype, dtype);
        assert_int_equal(model->weights.max_quantized_columns, 256);
        assert_int_equal(model->weights.max_bf16_columns, 64); /* down_proj alone has 256 */
        assert_int_equal(model->weights.num_parameters, num_parameters);
        assert_int_equal(model->weights.num_bytes,
                         num_bytes - 2 * 64 * 256 + dtype_row_bytes((enum dtype)dtype, 64 * 256));
        free_model(model);
    }
    model = make_model_with_blocks(&config, "model.layers.0.self_attn.k_proj.weight", DTYPE_Q4_1);
    expect_bound(model, &config);
    assert_int_equal(model->weights.max_quantized_columns, 64);
    assert_int_equal(model->weights.max_bf16_columns, 256);
    free_model(model);
}

/* Catches rows that are cut in the middle of a block, which the dot products would read past, and
 * norms in blocks. */
static void test_refused_blocks(void **state)
{
    (void)state;
    struct model_config config = config_for_blocks();
    struct model *model =
        make_model_with_blocks(&config, "model.layers.0.self_attn.o_proj.weight", DTYPE_Q6_K);
    expect_refused(model, &config, IMBREX_STATUS_FORMAT,
                   "m/f.safetensors: model.layers.0.self_attn.o_proj.weight: expected rows of a "
                   "multiple of 256 elements, a block of Q6_K, found 64");

    config.intermediate_size = 240;
    model = make_model_with_blocks(&config, "model.layers.0.mlp.down_proj.weight", DTYPE_Q5_0);
    expect_refused(model, &config, IMBREX_STATUS_FORMAT,
                   "down_proj.weight: expected rows of a multiple of 32 elements, a block of Q5_0, "
                   "found 240");

    model = make_model_with_blocks(&config, NULL, DTYPE_F32);
    struct checkpoint_tensor *norm = tensor_of(model, "model.norm.weight");
    norm->dtype = DTYPE_Q8_0;
    norm->num_bytes = 2 * 34;
    expect_refused(model, &config, IMBREX_STATUS_FORMAT,
                   "model.norm.weight: dtype: expected F32, F16 or BF16 for a norm or bias, found "
                   "Q8_0");
}

/* Catches old Llama checkpoints being refused for the RoPE buffers they store. */
static void test_ignored_buffers(void **state)
{
    (void)state;
    struct model *model = make_model(&llama, DTYPE_BF16, DTYPE_BF16);
    add(model, DTYPE_F32, 2, 0, "model.layers.0.self_attn.rotary_emb.inv_freq");
    add(model, DTYPE_COUNT, 2, 0, "model.rotary_emb.inv_freq");
    expect_bound(model, &llama);
    free_model(model);
}

/* Catches the shipped models not fitting their own configuration. */
static void test_shipped_models(void **state)
{
    (void)state;
    static const struct {
        const char *folder;
        int64_t num_parameters;
    } rows[] = {{ASSET_DEFAULT_MODEL, 260032}, {"tests/golden/qwen2-tiny-4m", 3937984}};
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct checkpoint checkpoint = {0};
        struct model_config config = {0};
        struct weights weights = {0};
        struct file file = {0};
        char *path;
        assert_int_equal(file_join(rows[i].folder, "config.json", &path, NULL), 0);
        assert_int_equal(file_read(path, 1 << 20, &file, NULL), 0);
        assert_int_equal(config_parse(path, file.bytes, file.num_bytes, &config, NULL), 0);
        assert_int_equal(checkpoint_open(rows[i].folder, &checkpoint, NULL), 0);
        assert_int_equal(weights_bind(&checkpoint, &config, path, &weights, NULL), 0);
        assert_int_equal(weights.num_parameters, rows[i].num_parameters);
        assert_true(weights.tied);
        weights_release(&weights);
        checkpoint_close(&checkpoint);
        file_close(&file);
        free(path);
    }
}

int run_weights_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_place),
        cmocka_unit_test(test_totals),
        cmocka_unit_test(test_tied),
        cmocka_unit_test(test_each_missing_tensor),
        cmocka_unit_test(test_each_wrong_shape),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_quantized_matrices),
        cmocka_unit_test(test_refused_blocks),
        cmocka_unit_test(test_ignored_buffers),
        cmocka_unit_test(test_shipped_models),
    };
    return cmocka_run_group_tests_name("weights", tests, NULL, NULL);
}
