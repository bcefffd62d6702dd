/* SPDX-License-Identifier: Apache-2.0 */
/* GGUF files as models: what their metadata becomes, and what is refused. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "model/gguf_config.h"
#include "model/model.h"
#include "tests/base/fixture.h"
#include "tests/model/gguf_fixture.h"
#include "tests/test.h"

static struct gguf_fixture fixture;

/* ---- configuration --------------------------------------------------------------------------- */

static enum imbrex_status read_config(const char *architecture, uint64_t num_more,
                                      gguf_fixture_fn *more, struct model_config *config,
                                      struct imbrex_error *err)
{
    struct gguf gguf = {0};
    gguf_fixture_llama(&fixture, architecture, num_more, more);
    unsigned char *bytes = gguf_fixture_copy(&fixture);
    enum imbrex_status status = gguf_parse("m.gguf", bytes, fixture.num_bytes, &gguf, err);
    if (status == IMBREX_STATUS_OK) {
        status = gguf_read_config(&gguf, config, err);
    }
    gguf_release(&gguf);
    free(bytes);
    return status;
}

static void expect_config(const char *architecture, uint64_t num_more, gguf_fixture_fn *more,
                          struct model_config *config)
{
    struct imbrex_error err = {0};
    if (read_config(architecture, num_more, more, config, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

static void expect_refused(gguf_fixture_fn *more, enum imbrex_status expected,
                           const char *fragments)
{
    struct imbrex_error err = {0};
    struct model_config config;
    expect_error(read_config("llama", 1, more, &config, &err), expected, &err, fragments);
}

/* Catches a key read as another field, a default that llama.cpp does not have, and RoPE over halves
 * for rows that converters have reordered (or over neighbours for those they have not). */
static void test_config(void **state)
{
    (void)state;
    struct model_config config;
    expect_config("llama", 0, NULL, &config);
    assert_int_equal(config.architecture, ARCHITECTURE_LLAMA);
    assert_int_equal(config.hidden_size, 32);
    assert_int_equal(config.intermediate_size, 64);
    assert_int_equal(config.num_layers, 1);
    assert_int_equal(config.num_heads, 2);
    assert_int_equal(config.num_kv_heads, 1);
    assert_int_equal(config.head_dim, 16);
    assert_int_equal(config.vocab_size, 8);
    assert_int_equal(config.max_position_embeddings, 128);
    assert_true(config.rope_theta == 10000.0);
    assert_true((float)config.rms_norm_eps == 1e-5f);
    assert_int_equal(config.rope_scaling.type, ROPE_SCALING_NONE);
    assert_true(config.tie_word_embeddings && config.is_rope_interleaved);
    assert_false(config.qkv_bias || config.o_bias || config.mlp_bias || config.qk_norm);
    assert_int_equal(config.num_eos_token_ids, 0);
    expect_config("qwen2", 0, NULL, &config);
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN2);
    assert_false(config.is_rope_interleaved || config.qkv_bias);
    expect_config("qwen3", 0, NULL, &config);
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN3);
    assert_true(config.qk_norm);
    assert_false(config.is_rope_interleaved);
}

static void put_end_tokens(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "tokenizer.ggml.eos_token_id", 5);
    gguf_fixture_uint32(file, "tokenizer.ggml.eot_token_id", 5);
    gguf_fixture_uint32(file, "tokenizer.ggml.eom_token_id", 7);
}

/* Catches an end token that is lost, or one that stands twice. */
static void test_end_tokens(void **state)
{
    (void)state;
    struct model_config config;
    expect_config("llama", 3, put_end_tokens, &config);
    assert_int_equal(config.num_eos_token_ids, 2);
    assert_int_equal(config.eos_token_ids[0], 5);
    assert_int_equal(config.eos_token_ids[1], 7);
}

static void put_linear(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "llama.rope.scaling.type", "linear");
    gguf_fixture_float32(file, "llama.rope.scaling.factor", 4.0f);
    gguf_fixture_float32(file, "llama.rope.freq_base", 5e5f);
}

static void put_old_linear(struct gguf_fixture *file)
{
    gguf_fixture_float32(file, "llama.rope.scale_linear", 2.0f);
}

static void put_yarn(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "qwen2.rope.scaling.type", "yarn");
    gguf_fixture_float32(file, "qwen2.rope.scaling.factor", 4.0f);
    gguf_fixture_uint32(file, "qwen2.rope.scaling.original_context_length", 32);
    gguf_fixture_float32(file, "qwen2.rope.scaling.attn_factor", 0.5f);
}

/* Catches a scaling that is dropped, or read with another factor. */
static void test_rope_scaling(void **state)
{
    (void)state;
    struct model_config config;
    expect_config("llama", 3, put_linear, &config);
    assert_int_equal(config.rope_scaling.type, ROPE_SCALING_LINEAR);
    assert_true(config.rope_scaling.factor == 4.0 && config.rope_theta == 5e5);
    expect_config("llama", 1, put_old_linear, &config);
    assert_int_equal(config.rope_scaling.type, ROPE_SCALING_LINEAR);
    assert_true(config.rope_scaling.factor == 2.0);
    expect_config("qwen2", 4, put_yarn, &config);
    assert_int_equal(config.rope_scaling.type, ROPE_SCALING_YARN);
    assert_true(config.rope_scaling.original_max_position_embeddings == 32.0);
    /* 0.5 (0.1 ln 4 + 1) */
    assert_true(config.rope_scaling.attention_factor > 0.56931 &&
                config.rope_scaling.attention_factor < 0.56932);
    assert_true(config.rope_scaling.beta_fast == 32.0 && config.rope_scaling.truncate);
}

static void put_window(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "llama.attention.sliding_window", 24);
}

/* Catches a window that is dropped, as llama.cpp does. */
static void test_window(void **state)
{
    (void)state;
    struct model_config config;
    expect_config("llama", 1, put_window, &config);
    assert_int_equal(config.architecture, ARCHITECTURE_MISTRAL);
    assert_int_equal(config_layer_window(&config, 0), 24);
    assert_true(config.is_rope_interleaved);
}

/* ---- refusals -------------------------------------------------------------------------------- */

static void put_experts(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "llama.expert_count", 8);
}

static void put_longrope(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "llama.rope.scaling.type", "longrope");
}

static void put_partial_rope(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "llama.rope.dimension_count", 8);
}

static void put_value_length(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "llama.attention.value_length", 8);
}

static void put_adapter(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "general.type", "adapter");
}

static void put_logit_scale(struct gguf_fixture *file)
{
    gguf_fixture_float32(file, "llama.logit_scale", 0.5f);
}

static void put_not_causal(struct gguf_fixture *file)
{
    gguf_fixture_key(file, "llama.attention.causal", 7);
    gguf_fixture_integer(file, 0, 1);
}

static void put_huge_window(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "llama.attention.sliding_window", UINT32_MAX);
}

static void put_long_type(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "llama.rope.scaling.type", "linear, and more than that");
}

static void put_eos_string(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "tokenizer.ggml.eos_token_id", "</s>");
}

/* Catches a key that changes the computation and is passed over in silence. */
static void test_refusals(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct model_config config;
    expect_refused(put_experts, IMBREX_STATUS_UNSUPPORTED, "m.gguf: llama.expert_count|found 8");
    expect_refused(put_longrope, IMBREX_STATUS_UNSUPPORTED,
                   "llama.rope.scaling.type|\"yarn\"|found \"longrope\"");
    expect_refused(put_long_type, IMBREX_STATUS_UNSUPPORTED, "llama.rope.scaling.type|linear, and");
    expect_refused(put_partial_rope, IMBREX_STATUS_UNSUPPORTED,
                   "llama.rope.dimension_count|a head, 16|found 8");
    expect_refused(put_value_length, IMBREX_STATUS_UNSUPPORTED,
                   "llama.attention.value_length|found 8");
    expect_refused(put_adapter, IMBREX_STATUS_UNSUPPORTED, "general.type|\"model\"|\"adapter\"");
    expect_refused(put_logit_scale, IMBREX_STATUS_UNSUPPORTED, "llama.logit_scale|found 0.5");
    expect_refused(put_not_causal, IMBREX_STATUS_UNSUPPORTED,
                   "llama.attention.causal|true|found 0");
    expect_refused(put_huge_window, IMBREX_STATUS_FORMAT,
                   "llama.attention.sliding_window|4294967295");
    expect_refused(put_eos_string, IMBREX_STATUS_FORMAT, "tokenizer.ggml.eos_token_id|an integer");
    expect_error(read_config("gemma3", 0, NULL, &config, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "general.architecture|\"llama\" or \"qwen2\" or \"qwen3\"|found \"gemma3\"");
    expect_error(read_config("qwen3moe", 0, NULL, &config, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "general.architecture|found \"qwen3moe\"");
}

static void put_eos_beyond(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "tokenizer.ggml.eos_token_id", 8);
}

static void put_eom_beyond(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "tokenizer.ggml.eom_token_id", UINT32_MAX);
}

/* Catches an end token that has no row, so that no text would ever end. */
static void test_end_tokens_beyond_the_rows(void **state)
{
    (void)state;
    expect_refused(put_eos_beyond, IMBREX_STATUS_FORMAT,
                   "m.gguf: tokenizer.ggml.eos_token_id|[0, 7]|found 8");
    expect_refused(put_eom_beyond, IMBREX_STATUS_FORMAT,
                   "m.gguf: tokenizer.ggml.eom_token_id|[0, 7]|found 4294967295");
}

/* One value that takes the place of what a sound file has, or is one more. */
struct replacement {
    const char *key;
    enum { NUMBER, INTEGER } kind;
    double value;
    const char *scaling; /* qwen2.rope.scaling.type, if not NULL */
};

static void put_or_replace(const struct replacement *replacement, const char *key, uint32_t value)
{
    if (strcmp(replacement->key, key) != 0) {
        gguf_fixture_uint32(&fixture, key, value);
    }
}

static enum imbrex_status read_replaced(const struct replacement *replacement,
                                        struct imbrex_error *err)
{
    static const char *const keys[] = {
        "qwen2.block_count",          "qwen2.embedding_length",        "qwen2.feed_forward_length",
        "qwen2.attention.head_count", "qwen2.attention.head_count_kv", "qwen2.context_length"};
    static const uint32_t values[] = {2, 32, 64, 4, 2, 128};
    static const char epsilon[] = "qwen2.attention.layer_norm_rms_epsilon";
    bool is_more = strcmp(replacement->key, epsilon) != 0;
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        is_more = is_more && strcmp(replacement->key, keys[i]) != 0;
    }
    gguf_fixture_begin(&fixture, 3, 1, 8u + is_more + (replacement->scaling != NULL));
    gguf_fixture_string(&fixture, "general.architecture", "qwen2");
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        put_or_replace(replacement, keys[i], values[i]);
    }
    if (strcmp(replacement->key, epsilon) != 0) {
        gguf_fixture_float32(&fixture, epsilon, 1e-5f);
    }
    if (replacement->scaling != NULL) {
        gguf_fixture_string(&fixture, "qwen2.rope.scaling.type", replacement->scaling);
    }
    if (replacement->kind == INTEGER) {
        gguf_fixture_uint32(&fixture, replacement->key, (uint32_t)replacement->value);
    } else {
        gguf_fixture_float32(&fixture, replacement->key, (float)replacement->value);
    }
    gguf_fixture_tensor(&fixture, "token_embd.weight", 2, (const uint64_t[]){8, 32}, 0, 0);
    gguf_fixture_elements(&fixture, 1024);
    struct gguf gguf = {0};
    struct model_config config;
    enum imbrex_status status =
        gguf_parse("head_dim/m.gguf", fixture.bytes, fixture.num_bytes, &gguf, err);
    if (status == IMBREX_STATUS_OK) {
        status = gguf_read_config(&gguf, &config, err);
    }
    gguf_release(&gguf);
    return status;
}

/* Catches a message with config.json's name for a field, which the file does not have, one that
 * changes the file's own name, and numbers out of range that are taken for "not there". */
static void test_messages_name_keys(void **state)
{
    (void)state;
    static const struct {
        struct replacement replacement;
        const char *fragments;
    } cases[] = {
        {{"qwen2.block_count", INTEGER, 0, NULL}, "qwen2.block_count: expected an integer|found 0"},
        {{"qwen2.embedding_length", INTEGER, 30, NULL},
         "qwen2.attention.head_count: |a divisor of qwen2.embedding_length 30, found 4"},
        {{"qwen2.feed_forward_length", INTEGER, 0, NULL}, "qwen2.feed_forward_length: "},
        {{"qwen2.attention.head_count", INTEGER, 1 << 20, NULL}, "qwen2.attention.head_count: "},
        {{"qwen2.attention.head_count_kv", INTEGER, 3, NULL},
         "qwen2.attention.head_count_kv: |a divisor of qwen2.attention.head_count 4, found 3"},
        {{"qwen2.attention.key_length", INTEGER, 7, NULL}, "qwen2.attention.key_length: |found 7"},
        {{"qwen2.context_length", INTEGER, 0, NULL}, "qwen2.context_length: "},
        {{"qwen2.attention.layer_norm_rms_epsilon", NUMBER, 0, NULL},
         "qwen2.attention.layer_norm_rms_epsilon: "},
        {{"qwen2.rope.freq_base", NUMBER, 0, NULL}, "qwen2.rope.freq_base: |found 0"},
        {{"qwen2.rope.freq_base", NUMBER, -1e4, NULL}, "qwen2.rope.freq_base: |found -10000"},
        {{"qwen2.rope.freq_base", NUMBER, NAN, NULL}, "qwen2.rope.freq_base: |finite"},
        {{"qwen2.rope.scaling.factor", NUMBER, 0, "yarn"}, "qwen2.rope.scaling.factor: |found 0"},
        {{"qwen2.rope.scaling.factor", NUMBER, 0.5, "linear"},
         "qwen2.rope.scaling.factor: |found 0.5"},
        {{"qwen2.rope.scale_linear", NUMBER, 0.5, NULL}, "qwen2.rope.scale_linear: |found 0.5"},
        {{"qwen2.rope.freq_base", NUMBER, 1e4, "yarn"},
         "qwen2.rope.scaling.factor: |\"yarn\"|found no such key"},
        {{"qwen2.rope.freq_base", NUMBER, 1e4, "linear"},
         "qwen2.rope.scaling.factor: |\"linear\"|found no such key"},
    };
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        struct imbrex_error err = {0};
        char fragments[256];
        snprintf(fragments, sizeof(fragments), "head_dim/m.gguf: |%s", cases[i].fragments);
        expect_error(read_replaced(&cases[i].replacement, &err), IMBREX_STATUS_FORMAT, &err,
                     fragments);
    }
    /* The rest of the file is sound. */
    struct imbrex_error err = {0};
    const struct replacement sound = {"qwen2.rope.freq_base", NUMBER, 1e4, NULL};
    if (read_replaced(&sound, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    assert_int_equal(read_replaced(&cases[0].replacement, NULL), IMBREX_STATUS_FORMAT);
}

static void put_attn_factor(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "llama.rope.scaling.type", "yarn");
    gguf_fixture_float32(file, "llama.rope.scaling.factor", 4.0f);
    gguf_fixture_float32(file, "llama.rope.scaling.attn_factor", 0.0f);
}

static void put_original_length(struct gguf_fixture *file)
{
    gguf_fixture_string(file, "llama.rope.scaling.type", "yarn");
    gguf_fixture_float32(file, "llama.rope.scaling.factor", 4.0f);
    gguf_fixture_float32(file, "llama.rope.scaling.original_context_length", -1.0f);
}

/* Catches YaRN's numbers that are out of range and passed over, or named as in config.json. */
static void test_yarn_numbers(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct model_config config;
    expect_error(read_config("llama", 3, put_attn_factor, &config, &err), IMBREX_STATUS_FORMAT,
                 &err, "m.gguf: llama.rope.scaling.attn_factor: |found 0");
    expect_error(read_config("llama", 3, put_original_length, &config, &err), IMBREX_STATUS_FORMAT,
                 &err, "m.gguf: llama.rope.scaling.original_context_length: |found -1");
}

/* A file of two values and the embedding: `heads` puts llama.attention.head_count. */
static void put_minimal(gguf_fixture_fn *heads)
{
    gguf_fixture_begin(&fixture, 3, 1, 7);
    gguf_fixture_string(&fixture, "general.architecture", "llama");
    gguf_fixture_uint32(&fixture, "llama.block_count", 2);
    gguf_fixture_uint32(&fixture, "llama.embedding_length", 32);
    gguf_fixture_uint32(&fixture, "llama.feed_forward_length", 64);
    gguf_fixture_uint32(&fixture, "llama.context_length", 128);
    gguf_fixture_float32(&fixture, "llama.attention.layer_norm_rms_epsilon", 1e-5f);
    heads(&fixture);
    gguf_fixture_tensor(&fixture, "token_embd.weight", 2, (const uint64_t[]){8, 32}, 0, 0);
    gguf_fixture_elements(&fixture, 1024);
}

static void put_head_list(struct gguf_fixture *file, uint32_t first, uint32_t second)
{
    gguf_fixture_key(file, "llama.attention.head_count", 9);
    gguf_fixture_integer(file, 4, 4);
    gguf_fixture_integer(file, 2, 8);
    gguf_fixture_integer(file, first, 4);
    gguf_fixture_integer(file, second, 4);
}

static void put_equal_heads(struct gguf_fixture *file)
{
    put_head_list(file, 4, 4);
}

static void put_other_heads(struct gguf_fixture *file)
{
    put_head_list(file, 4, 2);
}

static void put_no_heads(struct gguf_fixture *file)
{
    gguf_fixture_uint32(file, "other.attention.head_count", 4);
}

static enum imbrex_status read_minimal(gguf_fixture_fn *heads, struct model_config *config,
                                       struct imbrex_error *err)
{
    struct gguf gguf = {0};
    put_minimal(heads);
    enum imbrex_status status = gguf_parse("m.gguf", fixture.bytes, fixture.num_bytes, &gguf, err);
    if (status == IMBREX_STATUS_OK) {
        status = gguf_read_config(&gguf, config, err);
    }
    gguf_release(&gguf);
    return status;
}

/* Catches numbers by layer of which only the first is looked at. */
static void test_numbers_by_layer(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct model_config config;
    assert_int_equal(read_minimal(put_equal_heads, &config, &err), IMBREX_STATUS_OK);
    assert_int_equal(config.num_heads, 4);
    assert_int_equal(config.num_kv_heads, 4);
    expect_error(read_minimal(put_other_heads, &config, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "llama.attention.head_count|the same number for all layers|4 and 2");
    expect_error(read_minimal(put_no_heads, &config, &err), IMBREX_STATUS_NOT_FOUND, &err,
                 "llama.attention.head_count|no such key");
}

/* ---- models ---------------------------------------------------------------------------------- */

static enum imbrex_status open_fixture(const char *name, struct imbrex_model **model,
                                       struct imbrex_error *err)
{
    char path[FIXTURE_PATH_BYTES];
    fixture_path(path, name);
    fixture_write(path, fixture.bytes, fixture.num_bytes);
    return imbrex_model_open(path, NULL, model, err);
}

/* Catches tensors bound to other places than their names say. */
static void test_open(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    struct imbrex_model_info description;
    struct imbrex_tensor_info tensor;
    gguf_fixture_llama(&fixture, "llama", 0, NULL);
    if (open_fixture("whole.gguf", &model, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    imbrex_model_describe(model, &description);
    assert_string_equal(description.format, "GGUF v3");
    assert_null(description.file_type);
    assert_string_equal(description.tied_reason, "the file has no output.weight");
    assert_null(imbrex_model_tokenizer(model));
    assert_int_equal(imbrex_model_num_tensors(model), 11);
    assert_int_equal(imbrex_model_tensor(model, 0, &tensor), IMBREX_STATUS_OK);
    assert_string_equal(tensor.name, "blk.0.attn_k.weight");
    assert_string_equal(tensor.dtype, "F32");
    const struct gguf *gguf = &model->checkpoint.gguf;
    const struct layer_weights *layer = &model->weights.layers[0];
    assert_ptr_equal(layer->q_proj.elements,
                     gguf_find_tensor(gguf, "blk.0.attn_q.weight")->elements);
    assert_ptr_equal(layer->o_proj.elements,
                     gguf_find_tensor(gguf, "blk.0.attn_output.weight")->elements);
    assert_ptr_equal(layer->down_proj.elements,
                     gguf_find_tensor(gguf, "blk.0.ffn_down.weight")->elements);
    assert_memory_equal(layer->post_attention_layernorm,
                        gguf_find_tensor(gguf, "blk.0.ffn_norm.weight")->elements, 128);
    assert_string_equal(imbrex_model_file_at(model, layer->q_proj.elements), description.path);
    imbrex_model_close(model);
}

/* The position of the type id of a tensor in the fixture. */
static size_t type_of(const char *name)
{
    size_t name_bytes = strlen(name);
    for (size_t i = 0; i + name_bytes < fixture.num_bytes; i++) {
        if (memcmp(fixture.bytes + i, name, name_bytes) == 0) {
            return i + name_bytes + 4 + 2 * 8;
        }
    }
    fail_msg("%s: expected it in the fixture, found none", name);
    return 0;
}

/* Catches: a type without kernels, a tensor of another name, a part opened as a whole model. */
static void test_open_refusals(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    gguf_fixture_llama(&fixture, "llama", 0, NULL);
    fixture.bytes[type_of("blk.0.ffn_up.weight")] = 11;
    expect_error(open_fixture("q3.gguf", &model, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "q3.gguf|blk.0.ffn_up.weight: dtype|Q6_K, found Q3_K");
    gguf_fixture_llama(&fixture, "llama", 0, NULL);
    fixture.bytes[type_of("blk.0.ffn_up.weight")] = 200;
    expect_error(open_fixture("unknown.gguf", &model, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "blk.0.ffn_up.weight: dtype|found an unknown type");
    gguf_fixture_llama(&fixture, "llama", 0, NULL);
    fixture.bytes[type_of("blk.0.ffn_up.weight") - 21] = 'q'; /* the last letter of the name */
    expect_error(open_fixture("name.gguf", &model, &err), IMBREX_STATUS_FORMAT, &err,
                 "blk.0.ffn_up.weight: expected a tensor of shape [64, 32]|none of that name");
    gguf_fixture_llama(&fixture, "llama", 0, NULL);
    expect_error(open_fixture("m-00001-of-00002.gguf", &model, &err), IMBREX_STATUS_UNSUPPORTED,
                 &err, "m-00001-of-00002.gguf|in one file|a part of several");
    gguf_fixture_llama(&fixture, "qwen3", 0, NULL);
    expect_error(open_fixture("qwen3.gguf", &model, &err), IMBREX_STATUS_FORMAT, &err,
                 "blk.0.attn_q_norm.weight|none of that name");
    gguf_fixture_begin(&fixture, 3, 0, 0);
    expect_error(open_fixture("empty.gguf", &model, &err), IMBREX_STATUS_FORMAT, &err,
                 "empty.gguf|tensors, found 0");
    fixture.bytes[0] = 'X';
    expect_error(open_fixture("other.bin", &model, &err), IMBREX_STATUS_FORMAT, &err,
                 "other.bin|a GGUF file");
    assert_null(model);
}

static void put_splits(struct gguf_fixture *file)
{
    gguf_fixture_key(file, "split.count", 2);
    gguf_fixture_integer(file, 3, 2);
}

/* Catches a part of a model that has a name of its own. */
static void test_split_count(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    gguf_fixture_llama(&fixture, "llama", 1, put_splits);
    expect_error(open_fixture("split.gguf", &model, &err), IMBREX_STATUS_UNSUPPORTED, &err,
                 "split.count|one of 3 files");
}

/* Catches names that are translated where GGUF has none, or cut where they are long. */
static void test_names(void **state)
{
    (void)state;
    static const struct {
        const char *name, *stored;
    } rows[] = {
        {"model.embed_tokens.weight", "token_embd.weight"},
        {"lm_head.weight", "output.weight"},
        {"model.norm.weight", "output_norm.weight"},
        {"model.layers.17.self_attn.q_norm.weight", "blk.17.attn_q_norm.weight"},
        {"model.layers.0.mlp.down_proj.bias", "blk.0.ffn_down.bias"},
        {"model.layers..mlp.down_proj.bias", "model.layers..mlp.down_proj.bias"},
        {"model.layers.3.weight", "model.layers.3.weight"},
        {"model.layers.3.other.weight", "model.layers.3.other.weight"},
        {"weight", "weight"},
    };
    char stored[CHECKPOINT_NAME_BYTES];
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        assert_string_equal(gguf_name_of(rows[i].name, stored), rows[i].stored);
    }
}

/* ---- models without files -------------------------------------------------------------------- */

/* Catches a shape that is not the published one, a path that is taken for a seed, a model that
 * takes the memory of its weights though nobody computes with them. */
static void test_random(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    struct imbrex_model_info description;
    if (imbrex_model_open("random:qwen2.5-0.5b:7", NULL, &model, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    imbrex_model_describe(model, &description);
    assert_string_equal(description.format, "random");
    assert_int_equal(description.num_parameters, 494032768);
    assert_true(description.tied);
    assert_null(imbrex_model_tokenizer(model));
    /* Norms are about 1, each another. */
    const float *norm = model->weights.norm;
    assert_true(norm[0] > 0.9f && norm[0] < 1.1f && norm[0] != norm[1]);
    assert_null(model->checkpoint.region.base);
    imbrex_model_close(model);
    model = NULL;
    expect_error(imbrex_model_open("random:qwen2.5-8b", NULL, &model, &err),
                 IMBREX_STATUS_NOT_FOUND, &err, "qwen2.5-72b|found \"qwen2.5-8b\"");
    expect_error(imbrex_model_open("random:qwen2.5-7b:x", NULL, &model, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "a seed|found \"x\"");
    expect_error(imbrex_model_open("random:qwen2.5-7b:99999999999999999999", NULL, &model, &err),
                 IMBREX_STATUS_INVALID_ARGUMENT, &err, "a seed");
    assert_null(model);
}

/* Catches: weights that are bound beside the matrices that are filled, or to another one's. */
static void test_random_filled(void **state)
{
    (void)state;
#ifdef __SANITIZE_THREAD__
    /* Half a billion elements take a minute there, and the pool that draws them has tests of its
     * own. */
    skip();
#endif
    struct imbrex_error err = {0};
    struct imbrex_model *model = NULL;
    assert_int_equal(imbrex_model_open("random:qwen2.5-0.5b", NULL, &model, &err),
                     IMBREX_STATUS_OK);
    const struct weights *weights = &model->weights;
    const struct layer_weights *last = &weights->layers[model->config.num_layers - 1];
    const struct {
        const char *name;
        const struct weight_view *view;
    } rows[] = {{"model.embed_tokens.weight", &weights->embed_tokens},
                {"model.embed_tokens.weight", &weights->lm_head},
                {"model.layers.0.self_attn.q_proj.weight", &weights->layers[0].q_proj},
                {"model.layers.23.self_attn.k_proj.weight", &last->k_proj},
                {"model.layers.23.self_attn.v_proj.weight", &last->v_proj},
                {"model.layers.23.self_attn.o_proj.weight", &last->o_proj},
                {"model.layers.23.mlp.gate_proj.weight", &last->gate_proj},
                {"model.layers.23.mlp.up_proj.weight", &last->up_proj},
                {"model.layers.23.mlp.down_proj.weight", &last->down_proj}};
    for (int32_t twice = 0; twice < 2; twice++) {
        assert_int_equal(model_fill(model, &err), IMBREX_STATUS_OK);
        for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
            const struct checkpoint_tensor *tensor =
                checkpoint_find(&model->checkpoint, rows[i].name);
            const unsigned char *base = model->checkpoint.region.base;
            assert_non_null(tensor);
            assert_ptr_equal(rows[i].view->elements, tensor->elements);
            assert_true(tensor->elements >= base && tensor->elements + tensor->num_bytes <=
                                                        base + model->checkpoint.region_bytes);
            const uint16_t *last_element =
                (const uint16_t *)(const void *)(tensor->elements + tensor->num_bytes - 2);
            assert_int_not_equal(*last_element, 0);
        }
    }
    imbrex_model_close(model);
}

int run_gguf_model_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config),
        cmocka_unit_test(test_end_tokens),
        cmocka_unit_test(test_rope_scaling),
        cmocka_unit_test(test_window),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_end_tokens_beyond_the_rows),
        cmocka_unit_test(test_messages_name_keys),
        cmocka_unit_test(test_yarn_numbers),
        cmocka_unit_test(test_numbers_by_layer),
        cmocka_unit_test(test_open),
        cmocka_unit_test(test_open_refusals),
        cmocka_unit_test(test_split_count),
        cmocka_unit_test(test_names),
        cmocka_unit_test(test_random),
        cmocka_unit_test(test_random_filled),
    };
    return cmocka_run_group_tests_name("gguf_model", tests, NULL, NULL);
}
