/* SPDX-License-Identifier: Apache-2.0 */
#include "model/config.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "model/model.h"
#include "model/rope.h"
#include "tests/base/fixture.h"
#include "tests/test.h"

#define PATH "m/config.json"
#define LLAMA "models/stories260K/config.json"
#define QWEN2 "tests/golden/qwen2-tiny-4m/config.json"
#define ARCHITECTURES "tests/golden/architectures/"
#define QWEN3 ARCHITECTURES "qwen3/config.json"
#define MISTRAL ARCHITECTURES "mistral-window/config.json"
#define QWEN2_5 "tests/model/configs/qwen2.5-0.5b-instruct/config.json"

/* Sets fields of a JSON file: `edits` is an object, a member that is the string "DELETE" takes the
 * field away. Returns the text, which the caller frees. */
static char *edit(const char *base_path, const char *edits)
{
    json_error_t error;
    json_t *root = json_load_file(base_path, 0, &error);
    json_t *changes = json_loads(edits, JSON_REJECT_DUPLICATES, &error);
    const char *key;
    json_t *value;
    if (root == NULL || changes == NULL) {
        fail_msg("%s, %s: %s", base_path, edits, error.text);
    }
    json_object_foreach(changes, key, value)
    {
        if (json_is_string(value) && strcmp(json_string_value(value), "DELETE") == 0) {
            assert_int_equal(json_object_del(root, key), 0);
        } else {
            json_object_set(root, key, value);
        }
    }
    char *text = json_dumps(root, 0);
    assert_non_null(text);
    json_decref(changes);
    json_decref(root);
    return text;
}

static struct model_config parse_edited(const char *base_path, const char *edits)
{
    struct model_config config = {0};
    struct imbrex_error err = {0};
    char *text = edit(base_path, edits);
    if (config_parse(PATH, text, strlen(text), &config, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s: %s", edits, err.message);
    }
    free(text);
    return config;
}

/* Catches a field read into the wrong place. */
static void test_qwen2_5(void **state)
{
    (void)state;
    struct model_config config = parse_edited(QWEN2_5, "{}");
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN2);
    assert_string_equal(architecture_name(config.architecture), "qwen2");
    assert_int_equal(config.hidden_size, 896);
    assert_int_equal(config.intermediate_size, 4864);
    assert_int_equal(config.num_layers, 24);
    assert_int_equal(config.num_heads, 14);
    assert_int_equal(config.num_kv_heads, 2);
    assert_int_equal(config.head_dim, 64);
    assert_int_equal(config.vocab_size, 151936);
    assert_int_equal(config.max_position_embeddings, 32768);
    assert_true(config.rope_theta == 1e6);
    assert_true(config.rms_norm_eps == 1e-6);
    assert_true(config.tie_word_embeddings);
    assert_true(config.qkv_bias);
    assert_false(config.o_bias);
    assert_false(config.mlp_bias);
    assert_int_equal(config.num_eos_token_ids, 1);
    assert_int_equal(config.eos_token_ids[0], 151645);

    config = parse_edited("tests/model/configs/qwen2.5-7b-instruct/config.json", "{}");
    assert_int_equal(config.hidden_size, 3584);
    assert_int_equal(config.head_dim, 128);
    assert_false(config.tie_word_embeddings);
}

/* Catches the newer spelling (rope_parameters, layer_types, dtype) read differently. */
static void test_other_spellings(void **state)
{
    (void)state;
    struct model_config config = parse_edited(QWEN2, "{}");
    assert_int_equal(config.num_layers, 8);
    assert_int_equal(config.head_dim, 32);
    assert_true(config.rope_theta == 10000.0);
    assert_int_equal(config.eos_token_ids[0], 4093);

    config = parse_edited(LLAMA, "{}");
    assert_int_equal(config.architecture, ARCHITECTURE_LLAMA);
    assert_int_equal(config.num_kv_heads, 4);
    assert_int_equal(config.head_dim, 8);
    assert_true(config.tie_word_embeddings);
    assert_false(config.qkv_bias);
}

/* Catches a default that is not Hugging Face's. */
static void test_defaults(void **state)
{
    (void)state;
    struct model_config config = parse_edited(
        LLAMA, "{\"num_key_value_heads\":\"DELETE\",\"head_dim\":\"DELETE\","
               "\"rope_theta\":\"DELETE\",\"rope_scaling\":\"DELETE\",\"hidden_act\":\"DELETE\","
               "\"tie_word_embeddings\":\"DELETE\",\"attention_bias\":\"DELETE\","
               "\"mlp_bias\":\"DELETE\",\"eos_token_id\":\"DELETE\",\"torch_dtype\":\"DELETE\","
               "\"architectures\":\"DELETE\"}");
    assert_int_equal(config.num_kv_heads, 8);
    assert_int_equal(config.head_dim, 8);
    assert_true(config.rope_theta == 10000.0);
    assert_false(config.tie_word_embeddings);
    assert_false(config.qkv_bias);
    assert_false(config.mlp_bias);
    assert_int_equal(config.num_eos_token_ids, 0);
}

/* Catches what is valid and harmless being refused, or an option that has no effect. */
static void test_accepted_variants(void **state)
{
    (void)state;
    struct model_config config;
    config = parse_edited(LLAMA, "{\"model_type\":\"DELETE\"}");
    assert_int_equal(config.architecture, ARCHITECTURE_LLAMA);
    config = parse_edited(LLAMA, "{\"model_type\":null,\"architectures\":[\"Other\","
                                 "\"Qwen2ForCausalLM\"]}");
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN2);
    config = parse_edited(LLAMA, "{\"attention_bias\":true,\"mlp_bias\":true}");
    assert_true(config.qkv_bias && config.o_bias && config.mlp_bias);
    config = parse_edited(LLAMA, "{\"head_dim\":32,\"num_key_value_heads\":1}");
    assert_int_equal(config.head_dim, 32);
    assert_int_equal(config.num_kv_heads, 1);
    config = parse_edited(LLAMA, "{\"rope_scaling\":{\"type\":\"default\"},\"sliding_window\":7,"
                                 "\"rope_theta\":500000}");
    assert_true(config.rope_theta == 500000.0);
    config = parse_edited(LLAMA, "{\"rope_parameters\":{\"rope_theta\":7e5}}");
    assert_true(config.rope_theta == 7e5); /* the newer field wins */
    config = parse_edited(LLAMA, "{\"eos_token_id\":[2,1,511]}");
    assert_int_equal(config.num_eos_token_ids, 3);
    assert_int_equal(config.eos_token_ids[2], 511); /* the last row */
    config = parse_edited(LLAMA, "{\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15]}");
    assert_int_equal(config.num_eos_token_ids, CONFIG_MAX_EOS_TOKENS);
    config = parse_edited(LLAMA, "{\"quantization_config\":null,\"partial_rotary_factor\":1.0,"
                                 "\"layer_types\":null,\"eos_token_id\":[]}");
    assert_int_equal(config.num_eos_token_ids, 0);
    config = parse_edited(QWEN2, "{\"use_sliding_window\":true,\"sliding_window\":null}");
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN2);
}

/* Catches a field of the newer architectures read into the wrong place, or one of another
 * architecture that is taken over. */
static void test_architectures(void **state)
{
    (void)state;
    struct model_config config = parse_edited(QWEN3, "{}");
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN3);
    assert_true(config.qk_norm);
    assert_false(config.qkv_bias || config.o_bias || config.mlp_bias || config.is_rope_interleaved);
    assert_int_equal(config.head_dim, 16);
    assert_int_equal(config.sliding_window, 0);
    config = parse_edited(QWEN3, "{\"attention_bias\":true,\"mlp_bias\":true,\"head_dim\":null}");
    assert_true(config.qkv_bias && config.o_bias);
    assert_false(config.mlp_bias);
    assert_int_equal(config.head_dim, 128);
    config = parse_edited(QWEN3, "{\"num_experts\":0,\"vision_config\":null}");
    assert_int_equal(config.architecture, ARCHITECTURE_QWEN3);

    config = parse_edited(MISTRAL, "{\"attention_bias\":true,\"mlp_bias\":true}");
    assert_int_equal(config.architecture, ARCHITECTURE_MISTRAL);
    assert_false(config.qk_norm || config.qkv_bias || config.o_bias || config.mlp_bias);
    config = parse_edited(MISTRAL, "{\"head_dim\":\"DELETE\"}");
    assert_int_equal(config.head_dim, 8);
}

static void expect_windows(const char *base, const char *edits, int32_t first, int32_t second,
                           int32_t third)
{
    struct model_config config = parse_edited(base, edits);
    assert_int_equal(config.num_layers, 3);
    if (config_layer_window(&config, 0) != first || config_layer_window(&config, 1) != second ||
        config_layer_window(&config, 2) != third) {
        fail_msg("%s: found windows %d, %d, %d", edits, config_layer_window(&config, 0),
                 config_layer_window(&config, 1), config_layer_window(&config, 2));
    }
    assert_int_equal(config.sliding_window, first > 0 ? first : second > 0 ? second : third);
}

/* Catches a window given to the wrong layers, or one that is switched off and counts. */
static void test_windows(void **state)
{
    (void)state;
    static const char qwen2[] = ARCHITECTURES "qwen2-window/config.json";
    expect_windows(MISTRAL, "{}", 16, 16, 16);
    expect_windows(MISTRAL, "{\"sliding_window\":null}", 0, 0, 0);
    expect_windows(MISTRAL, "{\"sliding_window\":\"DELETE\"}", 4096, 4096, 4096);
    expect_windows(
        MISTRAL,
        "{\"layer_types\":[\"sliding_attention\",\"full_attention\",\"sliding_attention\"]}", 16, 0,
        16);
    expect_windows(qwen2, "{}", 0, 20, 20);
    expect_windows(qwen2, "{\"layer_types\":\"DELETE\"}", 0, 20, 20);
    expect_windows(qwen2, "{\"layer_types\":null,\"max_window_layers\":2}", 0, 0, 20);
    expect_windows(qwen2, "{\"layer_types\":null,\"max_window_layers\":\"DELETE\"}", 0, 0, 0);
    expect_windows(qwen2, "{\"layer_types\":null,\"max_window_layers\":0}", 20, 20, 20);
    expect_windows(qwen2, "{\"layer_types\":null,\"use_sliding_window\":false}", 0, 0, 0);
    expect_windows(qwen2, "{\"layer_types\":null,\"sliding_window\":null}", 0, 0, 0);
    expect_windows(qwen2, "{\"sliding_window\":\"DELETE\"}", 0, 4096, 4096);
    expect_windows(QWEN3,
                   "{\"use_sliding_window\":true,\"sliding_window\":7,\"layer_types\":null,"
                   "\"max_window_layers\":1}",
                   0, 7, 7);

    /* Bits beyond the first word. */
    struct model_config config = parse_edited(MISTRAL, "{\"num_hidden_layers\":4096}");
    assert_int_equal(config_layer_window(&config, 64), 16);
    assert_int_equal(config_layer_window(&config, 4095), 16);
}

static void expect_same_rope(const char *base, const char *edits)
{
    struct model_config expected = parse_edited(base, "{}");
    struct model_config found = parse_edited(base, edits);
    const struct rope_scaling *a = &expected.rope_scaling, *b = &found.rope_scaling;
    if (expected.rope_theta != found.rope_theta || a->type != b->type || a->factor != b->factor ||
        a->original_max_position_embeddings != b->original_max_position_embeddings ||
        a->low_freq_factor != b->low_freq_factor || a->high_freq_factor != b->high_freq_factor ||
        a->beta_fast != b->beta_fast || a->beta_slow != b->beta_slow ||
        a->truncate != b->truncate || a->attention_factor != b->attention_factor) {
        fail_msg("%s: %s: another scaling: %s by %g", base, edits, rope_scaling_name(b->type),
                 b->factor);
    }
}

#define OLD "\"rope_parameters\":\"DELETE\",\"dtype\":\"DELETE\",\"torch_dtype\":\"bfloat16\","

/* Catches an older spelling that is read differently from the one that the golden files prove. */
static void test_rope_spellings(void **state)
{
    (void)state;
    expect_same_rope(ARCHITECTURES "llama-linear-bias/config.json",
                     "{" OLD "\"rope_scaling\":{\"type\":\"linear\",\"factor\":4.0}}");
    expect_same_rope(ARCHITECTURES "llama3-rope/config.json",
                     "{" OLD "\"rope_theta\":500000.0,\"rope_scaling\":{\"factor\":8.0,"
                     "\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,"
                     "\"original_max_position_embeddings\":64,\"rope_type\":\"llama3\"}}");
    expect_same_rope(ARCHITECTURES "qwen2-yarn/config.json",
                     "{" OLD "\"rope_theta\":1000000,\"rope_scaling\":{\"type\":\"yarn\","
                     "\"factor\":4.0,\"original_max_position_embeddings\":64}}");
    /* Both spellings of the type; the length beside the object; the factor from the lengths. */
    expect_same_rope(ARCHITECTURES "qwen2-yarn/config.json",
                     "{" OLD "\"rope_theta\":1000000.0,\"original_max_position_embeddings\":64,"
                     "\"rope_scaling\":{\"type\":\"yarn\",\"rope_type\":\"yarn\","
                     "\"factor\":null,\"beta_fast\":null,\"beta_slow\":0}}");
    expect_same_rope(ARCHITECTURES "llama-yarn-factors/config.json",
                     "{" OLD "\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8,"
                     "\"attention_factor\":1.3,\"beta_fast\":16,\"beta_slow\":2,"
                     "\"original_max_position_embeddings\":32,\"truncate\":true}}");
    /* Both objects, which agree. */
    expect_same_rope(ARCHITECTURES "llama-linear-bias/config.json",
                     "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}}");
}

/* Catches a default or a formula of yarn that is not Hugging Face's. */
static void test_yarn(void **state)
{
    (void)state;
    static const char base[] = ARCHITECTURES "qwen2-yarn/config.json";
    struct rope_scaling scaling = parse_edited(base, "{}").rope_scaling;
    assert_true(scaling.beta_fast == 32.0 && scaling.beta_slow == 1.0 && scaling.truncate);
    assert_true(scaling.attention_factor == 0.1 * log(4.0) + 1.0);
    /* Where no length is given, it is the model's. */
    scaling =
        parse_edited(QWEN2_5, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4.0}}").rope_scaling;
    assert_true(scaling.original_max_position_embeddings == 32768.0 && scaling.factor == 4.0);
    scaling =
        parse_edited(QWEN2_5, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":1.0,"
                              "\"mscale_all_dim\":0.5,\"truncate\":false}}")
            .rope_scaling;
    assert_true(fabs(scaling.attention_factor -
                     (0.1 * log(40.0) + 1.0) / (0.05 * log(40.0) + 1.0)) < 1e-12);
    assert_false(scaling.truncate);
    scaling =
        parse_edited(QWEN2_5, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":40,\"mscale\":2.0,"
                              "\"mscale_all_dim\":0}}")
            .rope_scaling;
    assert_true(scaling.attention_factor == 0.1 * log(40.0) + 1.0);
    scaling =
        parse_edited(QWEN2_5, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":1}}").rope_scaling;
    assert_true(scaling.attention_factor == 1.0);
}

/* Catches each rule that is not enforced, and a message that does not lead to the field. */
static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *base, *edits;
        enum imbrex_status status;
        const char *fragments;
    } rows[] = {
        {LLAMA, "{\"model_type\":\"gpt2\"}", IMBREX_STATUS_UNSUPPORTED,
         "model_type: expected \"llama\" or \"qwen2\" or \"qwen3\" or \"mistral\", found \"gpt2\""},
        {LLAMA, "{\"model_type\":\"mixtral\"}", IMBREX_STATUS_UNSUPPORTED,
         "model_type: expected|found \"mixtral\" (a mixture of experts)"},
        {LLAMA, "{\"model_type\":\"qwen3_moe\"}", IMBREX_STATUS_UNSUPPORTED,
         "model_type: expected|found \"qwen3_moe\" (a mixture of experts)"},
        {LLAMA, "{\"model_type\":\"qwen2_5_vl\"}", IMBREX_STATUS_UNSUPPORTED,
         "model_type: expected|found \"qwen2_5_vl\" (a vision model)"},
        {LLAMA, "{\"model_type\":null,\"architectures\":[\"Qwen2MoeForCausalLM\"]}",
         IMBREX_STATUS_UNSUPPORTED,
         "architectures: expected|found \"Qwen2MoeForCausalLM\" (a mixture of experts)"},
        {LLAMA, "{\"model_type\":\"mixtral\",\"num_local_experts\":8}", IMBREX_STATUS_UNSUPPORTED,
         "num_local_experts: expected none|found 8: model_type \"mixtral\" is a mixture of "
         "experts"},
        {QWEN3, "{\"num_experts\":128}", IMBREX_STATUS_UNSUPPORTED,
         "num_experts: expected none (a dense text model), found 128: model_type \"qwen3\" is a "
         "mixture of experts"},
        {QWEN3, "{\"num_experts\":[]}", IMBREX_STATUS_UNSUPPORTED, "num_experts|found an array"},
        {LLAMA, "{\"n_routed_experts\":64}", IMBREX_STATUS_UNSUPPORTED,
         "n_routed_experts|found 64"},
        {MISTRAL, "{\"model_type\":\"mistral3\",\"vision_config\":{\"hidden_size\":1}}",
         IMBREX_STATUS_UNSUPPORTED,
         "vision_config: expected none|found an object: model_type \"mistral3\" is a vision model"},
        {LLAMA, "{\"audio_config\":{}}", IMBREX_STATUS_UNSUPPORTED,
         "audio_config: expected none|an audio model"},
        {LLAMA, "{\"model_type\":5}", IMBREX_STATUS_FORMAT,
         "model_type: expected a string, found an integer"},
        {LLAMA, "{\"model_type\":\"DELETE\",\"architectures\":\"DELETE\"}", IMBREX_STATUS_FORMAT,
         "model_type: expected \"llama\" or \"qwen2\" or \"qwen3\" or \"mistral\", found neither "
         "it nor "
         "architectures"},
        {LLAMA, "{\"model_type\":\"DELETE\",\"architectures\":[\"GPT2LMHeadModel\"]}",
         IMBREX_STATUS_UNSUPPORTED,
         "architectures: expected \"LlamaForCausalLM\" or \"Qwen2ForCausalLM\" or "
         "\"Qwen3ForCausalLM\" or \"MistralForCausalLM\", found \"GPT2LMHeadModel\""},
        {LLAMA, "{\"architectures\":[\"Qwen2ForCausalLM\"]}", IMBREX_STATUS_UNSUPPORTED,
         "architectures: expected \"LlamaForCausalLM\" (model_type is \"llama\")|found \"Qwen2"},
        {LLAMA, "{\"architectures\":[]}", IMBREX_STATUS_UNSUPPORTED, "architectures|found nothing"},
        {LLAMA, "{\"architectures\":\"LlamaForCausalLM\"}", IMBREX_STATUS_FORMAT,
         "architectures: expected an array, found a string"},
        {LLAMA, "{\"quantization_config\":{\"quant_method\":\"gptq\",\"bits\":4}}",
         IMBREX_STATUS_UNSUPPORTED, "quantization_config: expected none|quant_method \"gptq\""},
        {QWEN3, "{\"quantization_config\":{\"quant_method\":\"awq\"}}", IMBREX_STATUS_UNSUPPORTED,
         "quantization_config|quant_method \"awq\""},
        {QWEN3, "{\"quantization_config\":{\"quant_method\":\"fp8\"}}", IMBREX_STATUS_UNSUPPORTED,
         "quantization_config|quant_method \"fp8\""},
        {MISTRAL, "{\"quantization_config\":{\"quant_method\":\"bitsandbytes\"}}",
         IMBREX_STATUS_UNSUPPORTED, "quantization_config|quant_method \"bitsandbytes\""},
        {MISTRAL, "{\"quantization_config\":{\"load_in_8bit\":true}}", IMBREX_STATUS_UNSUPPORTED,
         "quantization_config|quant_method \"bitsandbytes\""},
        {LLAMA, "{\"compression_config\":{\"quant_method\":\"compressed-tensors\"}}",
         IMBREX_STATUS_UNSUPPORTED, "compression_config|quant_method \"compressed-tensors\""},
        {LLAMA, "{\"quantization_config\":{}}", IMBREX_STATUS_UNSUPPORTED,
         "quantization_config|found quant_method nothing"},
        {LLAMA, "{\"quantization_config\":false}", IMBREX_STATUS_UNSUPPORTED,
         "quantization_config"},
        {LLAMA, "{\"hidden_size\":\"DELETE\"}", IMBREX_STATUS_FORMAT,
         "hidden_size: expected an integer in [1, 1048576], found nothing"},
        {LLAMA, "{\"hidden_size\":\"64\"}", IMBREX_STATUS_FORMAT,
         "hidden_size: expected an integer in [1, 1048576], found a string"},
        {LLAMA, "{\"hidden_size\":0}", IMBREX_STATUS_FORMAT, "hidden_size|found 0"},
        {LLAMA, "{\"hidden_size\":-64}", IMBREX_STATUS_FORMAT, "hidden_size|found -64"},
        {LLAMA, "{\"hidden_size\":1048577}", IMBREX_STATUS_FORMAT, "hidden_size|found 1048577"},
        {LLAMA, "{\"intermediate_size\":4194305}", IMBREX_STATUS_FORMAT,
         "intermediate_size: expected an integer in [1, 4194304]"},
        {LLAMA, "{\"num_hidden_layers\":4097}", IMBREX_STATUS_FORMAT,
         "num_hidden_layers|[1, 4096]"},
        {LLAMA, "{\"num_hidden_layers\":0}", IMBREX_STATUS_FORMAT, "num_hidden_layers|found 0"},
        {LLAMA, "{\"num_attention_heads\":4294967304}", IMBREX_STATUS_FORMAT,
         "num_attention_heads|[1, 4096]|found 4294967304"},
        {LLAMA, "{\"vocab_size\":16777217}", IMBREX_STATUS_FORMAT, "vocab_size|[1, 16777216]"},
        {LLAMA, "{\"max_position_embeddings\":1073741825}", IMBREX_STATUS_FORMAT,
         "max_position_embeddings|[1, 1073741824]"},
        {LLAMA, "{\"num_key_value_heads\":3}", IMBREX_STATUS_FORMAT,
         "num_key_value_heads: expected a divisor of num_attention_heads 8, found 3"},
        {LLAMA, "{\"num_key_value_heads\":16}", IMBREX_STATUS_FORMAT,
         "num_key_value_heads: expected a divisor of num_attention_heads 8, found 16"},
        {LLAMA, "{\"num_key_value_heads\":0}", IMBREX_STATUS_FORMAT, "num_key_value_heads|found 0"},
        {LLAMA, "{\"head_dim\":7}", IMBREX_STATUS_FORMAT,
         "head_dim: expected an even number of at most 4096, found 7"},
        {LLAMA, "{\"head_dim\":4098}", IMBREX_STATUS_FORMAT, "head_dim|found 4098"},
        {LLAMA, "{\"head_dim\":\"DELETE\",\"hidden_size\":63}", IMBREX_STATUS_FORMAT,
         "num_attention_heads: expected a divisor of hidden_size 63, found 8"},
        {LLAMA, "{\"head_dim\":\"DELETE\",\"hidden_size\":1048576}", IMBREX_STATUS_FORMAT,
         "head_dim: expected an even number of at most 4096, found 131072"},
        {LLAMA, "{\"rms_norm_eps\":0}", IMBREX_STATUS_FORMAT, "rms_norm_eps: expected a number"},
        {LLAMA, "{\"rms_norm_eps\":\"DELETE\"}", IMBREX_STATUS_FORMAT,
         "rms_norm_eps: expected a number in [1e-20, 1], found nothing"},
        {LLAMA, "{\"rope_theta\":0}", IMBREX_STATUS_FORMAT,
         "rope_theta: expected a number in [1, 1e+15], found 0"},
        {LLAMA, "{\"rope_scaling\":{\"rope_type\":\"dynamic\",\"factor\":4.0}}",
         IMBREX_STATUS_UNSUPPORTED,
         "rope_scaling.rope_type: expected \"default\" or \"linear\" or \"llama3\" or \"yarn\", "
         "found "
         "\"dynamic\""},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"longrope\",\"short_factor\":[1]}}",
         IMBREX_STATUS_UNSUPPORTED, "rope_scaling.type: expected|found \"longrope\""},
        {QWEN2, "{\"rope_parameters\":{\"rope_type\":\"mrope\"}}", IMBREX_STATUS_UNSUPPORTED,
         "rope_parameters.rope_type: expected|found \"mrope\""},
        {LLAMA, "{\"rope_scaling\":{\"type\":7}}", IMBREX_STATUS_UNSUPPORTED,
         "rope_scaling.type: expected|found 7"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"linear\",\"rope_type\":\"yarn\",\"factor\":2}}",
         IMBREX_STATUS_FORMAT, "rope_scaling.type: expected \"yarn\" as in rope_type|\"linear\""},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"linear\"}}", IMBREX_STATUS_FORMAT,
         "rope_scaling: factor: expected a number in [1, 1000000], found nothing"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}}", IMBREX_STATUS_FORMAT,
         "rope_scaling: factor|found 0.5"},
        {LLAMA, "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0}}",
         IMBREX_STATUS_FORMAT, "rope_scaling: low_freq_factor|found nothing"},
        {LLAMA,
         "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":4,"
         "\"high_freq_factor\":4}}",
         IMBREX_STATUS_FORMAT, "high_freq_factor: expected more than low_freq_factor 4, found 4"},
        {LLAMA,
         "{\"rope_scaling\":{\"rope_type\":\"llama3\",\"factor\":8.0,\"low_freq_factor\":1,"
         "\"high_freq_factor\":4,\"original_max_position_embeddings\":0}}",
         IMBREX_STATUS_FORMAT, "original_max_position_embeddings|found 0"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":\"4\"}}", IMBREX_STATUS_FORMAT,
         "rope_scaling: factor|found a string"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"yarn\",\"original_max_position_embeddings\":1024}}",
         IMBREX_STATUS_FORMAT,
         "original_max_position_embeddings: expected at most max_position_embeddings 512, found "
         "1024"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"beta_fast\":-1}}",
         IMBREX_STATUS_FORMAT, "rope_scaling: beta_fast|found -1"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"attention_factor\":0}}",
         IMBREX_STATUS_FORMAT, "rope_scaling: attention_factor|found 0"},
        {LLAMA, "{\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4,\"truncate\":1}}",
         IMBREX_STATUS_FORMAT, "rope_scaling: truncate|found 1"},
        {LLAMA, "{\"rope_theta\":1,\"rope_scaling\":{\"type\":\"yarn\",\"factor\":4}}",
         IMBREX_STATUS_FORMAT, "rope_theta: expected more than 1 with \"yarn\", found 1"},
        {LLAMA,
         "{\"rope_scaling\":{\"type\":\"linear\",\"factor\":4},\"rope_parameters\":{\"rope_theta\":"
         "1e4}}",
         IMBREX_STATUS_FORMAT, "rope_scaling: expected what rope_parameters says|\"linear\""},
        {LLAMA, "{\"rope_scaling\":\"dynamic\"}", IMBREX_STATUS_FORMAT,
         "rope_scaling: expected an object, found a string"},
        {QWEN2, "{\"rope_parameters\":{\"rope_type\":\"llama3\",\"rope_theta\":5e5}}",
         IMBREX_STATUS_FORMAT, "rope_parameters: factor|found nothing"},
        {QWEN2, "{\"rope_parameters\":{\"full_attention\":{\"rope_theta\":5e5}}}",
         IMBREX_STATUS_UNSUPPORTED, "rope_parameters|found an object for \"full_attention\""},
        {QWEN2, "{\"rope_parameters\":{\"rope_theta\":\"x\"}}", IMBREX_STATUS_FORMAT,
         "rope_theta: expected a number|found a string"},
        {QWEN2, "{\"rope_parameters\":{\"partial_rotary_factor\":0.5}}", IMBREX_STATUS_UNSUPPORTED,
         "partial_rotary_factor: expected 1|found 0.5"},
        {LLAMA, "{\"partial_rotary_factor\":0.25}", IMBREX_STATUS_UNSUPPORTED,
         "partial_rotary_factor: expected 1|found 0.25"},
        {LLAMA, "{\"partial_rotary_factor\":\"x\"}", IMBREX_STATUS_UNSUPPORTED,
         "partial_rotary_factor|found \"x\""},
        {QWEN2_5, "{\"use_sliding_window\":true,\"sliding_window\":0}", IMBREX_STATUS_FORMAT,
         "sliding_window: expected an integer in [1, 1073741824], found 0"},
        {QWEN2_5, "{\"use_sliding_window\":true,\"max_window_layers\":-1}", IMBREX_STATUS_FORMAT,
         "max_window_layers|found -1"},
        {MISTRAL, "{\"sliding_window\":\"no\"}", IMBREX_STATUS_FORMAT,
         "sliding_window|found a string"},
        {QWEN2_5, "{\"use_sliding_window\":1}", IMBREX_STATUS_FORMAT,
         "use_sliding_window: expected true or false, found 1"},
        {LLAMA,
         "{\"layer_types\":[\"full_attention\",\"full_attention\",\"sliding_attention\","
         "\"full_attention\",\"full_attention\"]}",
         IMBREX_STATUS_UNSUPPORTED,
         "layer_types[2]: expected \"full_attention\" (no sliding_window in use), found "
         "\"sliding_attention\""},
        {MISTRAL,
         "{\"layer_types\":[\"full_attention\",\"sliding_attention\",\"chunked_attention\"]}",
         IMBREX_STATUS_UNSUPPORTED,
         "layer_types[2]: expected \"full_attention\" or \"sliding_attention\", found "
         "\"chunked_attention\""},
        {QWEN3, "{\"layer_types\":[\"sliding_attention\",\"full_attention\",\"full_attention\"]}",
         IMBREX_STATUS_UNSUPPORTED, "layer_types[0]: expected \"full_attention\" (no sliding"},
        {LLAMA, "{\"layer_types\":[\"full_attention\"]}", IMBREX_STATUS_FORMAT,
         "layer_types: expected an array of num_hidden_layers = 5 names, found an array of 1"},
        {LLAMA, "{\"layer_types\":\"full_attention\"}", IMBREX_STATUS_FORMAT,
         "layer_types|found a string"},
        {LLAMA, "{\"hidden_act\":\"gelu\"}", IMBREX_STATUS_UNSUPPORTED,
         "hidden_act: expected \"silu\", found \"gelu\""},
        {LLAMA, "{\"attention_bias\":\"no\"}", IMBREX_STATUS_FORMAT,
         "attention_bias: expected true or false, found a string"},
        {LLAMA, "{\"mlp_bias\":1}", IMBREX_STATUS_FORMAT, "mlp_bias|found 1"},
        {LLAMA, "{\"tie_word_embeddings\":1}", IMBREX_STATUS_FORMAT, "tie_word_embeddings|found 1"},
        {LLAMA, "{\"eos_token_id\":-1}", IMBREX_STATUS_FORMAT,
         "eos_token_id: expected ids in [0, 512), vocab_size of config.json, found -1"},
        {LLAMA, "{\"eos_token_id\":[1,512]}", IMBREX_STATUS_FORMAT, "eos_token_id|found 512"},
        {LLAMA, "{\"eos_token_id\":[1,2147483648]}", IMBREX_STATUS_FORMAT, "eos_token_id"},
        {LLAMA, "{\"eos_token_id\":\"</s>\"}", IMBREX_STATUS_FORMAT, "eos_token_id|a string"},
        {LLAMA, "{\"eos_token_id\":[0,1,2,3,4,5,6,7,8,9,10,11,12,13,14,15,16]}",
         IMBREX_STATUS_UNSUPPORTED, "eos_token_id: expected at most 16 ids, found 17"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct imbrex_error err = {0};
        struct model_config config, untouched;
        memset(&config, 0x5a, sizeof(config));
        memset(&untouched, 0x5a, sizeof(untouched));
        char *text = edit(rows[i].base, rows[i].edits);
        enum imbrex_status status = config_parse(PATH, text, strlen(text), &config, &err);
        expect_error(status, rows[i].status, &err, PATH ": ");
        expect_error(status, rows[i].status, &err, rows[i].fragments);
        assert_memory_equal(&config, &untouched, sizeof(config));
        free(text);
    }
}

/* Catches input that is no config at all and crashes or passes. */
static void test_no_json(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    struct model_config config;
    struct generation_config generation;
    expect_error(config_parse(PATH, "GGUF\3\0\0\0", 8, &config, &err), IMBREX_STATUS_FORMAT, &err,
                 PATH ": line 1, column 1|found 'G'");
    expect_error(config_parse(PATH, "[]", 2, &config, &err), IMBREX_STATUS_FORMAT, &err,
                 "expected a JSON object, found an array");
    expect_error(generation_config_parse(PATH, "{]", 2, 512, &generation, &err),
                 IMBREX_STATUS_FORMAT, &err, PATH ": line 1, column 2");
}

static enum imbrex_status parse_generation(const char *text, struct generation_config *config,
                                           struct imbrex_error *err)
{
    return generation_config_parse("g.json", text, strlen(text), 151936, config, err);
}

/* Catches a field read into the wrong place, and an absent one that is reported as present. */
static void test_generation_config(void **state)
{
    (void)state;
    size_t num_bytes;
    char *text = fixture_read("tests/model/configs/qwen2.5-0.5b-instruct/generation_config.json",
                              &num_bytes);
    struct generation_config config = {0};
    assert_int_equal(parse_generation(text, &config, NULL), IMBREX_STATUS_OK);
    free(text);
    assert_true(config.do_sample);
    assert_true(config.temperature == 0.7f);
    assert_true(config.top_p == 0.8f);
    assert_int_equal(config.top_k, 20);
    assert_true(config.min_p == 0.0f);
    assert_true(config.repetition_penalty == 1.1f);
    assert_int_equal(config.present, IMBREX_GENERATION_TEMPERATURE | IMBREX_GENERATION_TOP_K |
                                         IMBREX_GENERATION_TOP_P |
                                         IMBREX_GENERATION_REPETITION_PENALTY);
    assert_int_equal(config.num_eos_token_ids, 2);
    assert_int_equal(config.eos_token_ids[0], 151645);
    assert_int_equal(config.eos_token_ids[1], 151643);

    assert_int_equal(parse_generation("{\"min_p\":0.25,\"temperature\":null}", &config, NULL), 0);
    assert_true(config.min_p == 0.25f);
    assert_int_equal(config.present, IMBREX_GENERATION_MIN_P);
    assert_int_equal(parse_generation("{\"top_k\":-1}", &config, NULL), 0);
    assert_int_equal(config.top_k, 0);
    assert_int_equal(config.present, IMBREX_GENERATION_TOP_K);
}

/* Catches a temperature of 0, which do_sample says, told as if the file named it; and one of 1 that
 * only do_sample brought, told as if nobody had. */
static void test_generation_temperature(void **state)
{
    (void)state;
    static const struct {
        const char *text;
        float temperature;
        bool is_present;
    } rows[] = {
        {"{}", 0.0f, false},
        {"{\"temperature\":0.7}", 0.0f, false},
        {"{\"do_sample\":false,\"temperature\":0.7}", 0.0f, false},
        {"{\"do_sample\":true}", 1.0f, true},
        {"{\"do_sample\":true,\"temperature\":0.5}", 0.5f, true},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct imbrex_model model = {0};
        assert_int_equal(parse_generation(rows[i].text, &model.generation_config, NULL), 0);
        struct imbrex_request_options options = imbrex_request_options_default(&model);
        assert_true(options.temperature == rows[i].temperature);
        assert_int_equal(options.from_checkpoint,
                         rows[i].is_present ? IMBREX_GENERATION_TEMPERATURE : 0);
    }
}

/* Catches a default that would change the text of a model without the file. */
static void test_generation_defaults(void **state)
{
    (void)state;
    struct generation_config parsed = {0}, config = generation_config_default();
    assert_int_equal(parse_generation("{\"_from_model_config\":true}", &parsed, NULL), 0);
    assert_false(config.do_sample);
    assert_true(config.temperature == 1.0f);
    assert_true(config.top_p == 1.0f);
    assert_true(config.min_p == 0.0f);
    assert_true(config.repetition_penalty == 1.0f);
    assert_int_equal(config.top_k, 0);
    assert_int_equal(config.present, 0);
    assert_int_equal(config.num_eos_token_ids, 0);
    assert_false(parsed.do_sample);
    assert_true(parsed.temperature == 1.0f && parsed.top_p == 1.0f && parsed.min_p == 0.0f &&
                parsed.repetition_penalty == 1.0f && parsed.top_k == 0 && parsed.present == 0);
}

/* Catches values that would make a sampler divide by zero or keep nothing. */
static void test_generation_refusals(void **state)
{
    (void)state;
    static const char *const rows[][2] = {
        {"{\"temperature\":-0.1}", "temperature: expected a number in [0, 100], found -0.1"},
        {"{\"temperature\":101}", "temperature|found 101"},
        {"{\"temperature\":\"hot\"}", "temperature|found a string"},
        {"{\"top_p\":0}", "top_p: expected a number in [1e-09, 1], found 0"},
        {"{\"top_p\":1.01}", "top_p|found 1.01"},
        {"{\"min_p\":1}", "min_p: expected a number in [0, 0.999999], found 1"},
        {"{\"min_p\":-1}", "min_p|found -1"},
        {"{\"repetition_penalty\":0}",
         "repetition_penalty: expected a number in [0.01, 100], found 0"},
        {"{\"repetition_penalty\":-1.1}", "repetition_penalty|found -1.1"},
        {"{\"repetition_penalty\":100.1}", "repetition_penalty|found 100.1"},
        {"{\"top_k\":-2}", "top_k: expected an integer in [-1, 2147483647], found -2"},
        {"{\"top_k\":1.5}", "top_k|found 1.5"},
        {"{\"do_sample\":\"yes\"}", "do_sample: expected true or false, found a string"},
        {"{\"eos_token_id\":{}}", "eos_token_id|found an object"},
        {"{\"eos_token_id\":[151645,151936]}",
         "eos_token_id: expected ids in [0, 151936), vocab_size of config.json, found 151936"},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct imbrex_error err = {0};
        struct generation_config config, untouched;
        memset(&config, 0x5a, sizeof(config));
        memset(&untouched, 0x5a, sizeof(untouched));
        enum imbrex_status status = parse_generation(rows[i][0], &config, &err);
        expect_error(status, IMBREX_STATUS_FORMAT, &err, "g.json: ");
        expect_error(status, IMBREX_STATUS_FORMAT, &err, rows[i][1]);
        assert_memory_equal(&config, &untouched, sizeof(config));
    }
}

int run_config_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_qwen2_5),
        cmocka_unit_test(test_other_spellings),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_accepted_variants),
        cmocka_unit_test(test_architectures),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_rope_spellings),
        cmocka_unit_test(test_yarn),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_no_json),
        cmocka_unit_test(test_generation_config),
        cmocka_unit_test(test_generation_temperature),
        cmocka_unit_test(test_generation_defaults),
        cmocka_unit_test(test_generation_refusals),
    };
    return cmocka_run_group_tests_name("config", tests, NULL, NULL);
}
