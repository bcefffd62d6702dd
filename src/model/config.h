/* SPDX-License-Identifier: Apache-2.0 */
/* config.json and generation_config.json: what a checkpoint says about itself, checked once. */
#ifndef IMBREX_MODEL_CONFIG_H
#define IMBREX_MODEL_CONFIG_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* X(name, model_type, class in "architectures") */
#define ARCHITECTURE_LIST(X)              \
    X(LLAMA, "llama", "LlamaForCausalLM") \
    X(QWEN2, "qwen2", "Qwen2ForCausalLM")

enum architecture {
#define ARCHITECTURE_ENUM(name, model_type, class_name) ARCHITECTURE_##name,
    ARCHITECTURE_LIST(ARCHITECTURE_ENUM)
#undef ARCHITECTURE_ENUM
        ARCHITECTURE_COUNT
};

/* The model_type of an architecture. Static storage. */
const char *architecture_name(enum architecture architecture);

#define CONFIG_MAX_EOS_TOKENS 16

/* Field names are Hugging Face's. All are checked: positive, and small enough that the product of
 * any two fits int64_t; num_heads is a multiple of num_kv_heads; head_dim is even. */
struct model_config {
    enum architecture architecture;
    int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    int32_t vocab_size, max_position_embeddings;
    double rope_theta, rms_norm_eps;
    bool tie_word_embeddings;
    bool qkv_bias; /* q_proj, k_proj, v_proj have biases: always for qwen2, by attention_bias for
                      llama */
    bool o_bias;   /* o_proj has one: by attention_bias for llama */
    bool mlp_bias; /* gate_proj, up_proj, down_proj have them: by mlp_bias for llama */
    int32_t eos_token_ids[CONFIG_MAX_EOS_TOKENS];
    int32_t num_eos_token_ids;
};

/* Parses config.json. FORMAT for missing or wrong fields; UNSUPPORTED, by name, for another
 * architecture or activation, any quantization_config, a RoPE scaling other than "default", sliding
 * windows in use. Accepts rope_theta and rope_parameters. `path` is for messages. */
enum imbrex_status config_parse(const char *path, const void *bytes, size_t num_bytes,
                                struct model_config *config, struct imbrex_error *err);

/* Sampling defaults of generation_config.json. A field that the file does not set keeps "off". */
struct generation_config {
    bool do_sample;
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
    unsigned present; /* bits of enum imbrex_generation_field */
    int32_t eos_token_ids[CONFIG_MAX_EOS_TOKENS];
    int32_t num_eos_token_ids; /* 0: the file names none, config.json's count */
};

/* What holds without a file: greedy, everything off. */
struct generation_config generation_config_default(void);
/* Parses generation_config.json. FORMAT for values that no sampler accepts. */
enum imbrex_status generation_config_parse(const char *path, const void *bytes, size_t num_bytes,
                                           struct generation_config *config,
                                           struct imbrex_error *err);

#endif
