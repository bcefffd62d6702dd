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
    X(QWEN2, "qwen2", "Qwen2ForCausalLM") \
    X(QWEN3, "qwen3", "Qwen3ForCausalLM") \
    X(MISTRAL, "mistral", "MistralForCausalLM")

enum architecture {
#define ARCHITECTURE_ENUM(name, model_type, class_name) ARCHITECTURE_##name,
    ARCHITECTURE_LIST(ARCHITECTURE_ENUM)
#undef ARCHITECTURE_ENUM
        ARCHITECTURE_COUNT
};

/* The model_type of an architecture. Static storage. */
const char *architecture_name(enum architecture architecture);

#define CONFIG_MAX_EOS_TOKENS 16
#define CONFIG_MAX_LAYERS (1 << 12) /* published: up to 126 */
#define CONFIG_MAX_HEAD_DIM (1 << 12)

/* X(name, rope_type): how RoPE's frequencies are changed so that a model reaches further than it
 * was first trained to. rope.c has the formulas. */
#define ROPE_SCALING_LIST(X) \
    X(NONE, "default")       \
    X(LINEAR, "linear")      \
    X(LLAMA3, "llama3")      \
    X(YARN, "yarn")

enum rope_scaling_type {
#define ROPE_SCALING_ENUM(name, rope_type) ROPE_SCALING_##name,
    ROPE_SCALING_LIST(ROPE_SCALING_ENUM)
#undef ROPE_SCALING_ENUM
        ROPE_SCALING_COUNT
};

/* Field names are Hugging Face's; what a type does not use is 0. */
struct rope_scaling {
    enum rope_scaling_type type;
    double factor;                            /* >= 1: frequencies are divided by it */
    double original_max_position_embeddings;  /* llama3, yarn: as first trained */
    double low_freq_factor, high_freq_factor; /* llama3: turns in the original length, low < high */
    double beta_fast, beta_slow;              /* yarn: the same; > 0 */
    bool truncate;                            /* yarn: the ramp's ends are whole pairs */
    double attention_factor;                  /* yarn: of q and k; > 0 */
};

/* Field names are Hugging Face's. All are checked: positive, and small enough that the product of
 * any two fits int64_t; num_heads is a multiple of num_kv_heads; head_dim is even. */
struct model_config {
    enum architecture architecture;
    int32_t hidden_size, intermediate_size, num_layers, num_heads, num_kv_heads, head_dim;
    int32_t vocab_size, max_position_embeddings;
    double rope_theta, rms_norm_eps; /* rope_theta > 1 with yarn */
    struct rope_scaling rope_scaling;
    bool is_rope_interleaved; /* RoPE turns pairs (2i, 2i + 1) of a head, not halves: never in a
                                 Hugging Face folder */
    int32_t sliding_window;   /* 0: none; else what config_layer_window gives for sliding layers */
    uint64_t sliding_layers[CONFIG_MAX_LAYERS / 64]; /* bit of each layer */
    bool tie_word_embeddings;
    bool qk_norm;  /* every head of q and k has an RMSNorm before RoPE: qwen3 */
    bool qkv_bias; /* q_proj, k_proj, v_proj have biases: always for qwen2, by attention_bias for
                      llama and qwen3 */
    bool o_bias;   /* o_proj has one: by attention_bias for llama and qwen3 */
    bool mlp_bias; /* gate_proj, up_proj, down_proj have them: by mlp_bias for llama */
    int32_t eos_token_ids[CONFIG_MAX_EOS_TOKENS];
    int32_t num_eos_token_ids;
};

/* How many of the last positions a token of this layer sees, its own among them. 0: all. */
int32_t config_layer_window(const struct model_config *config, int32_t layer_idx);

/* Parses config.json. FORMAT for missing or wrong fields; UNSUPPORTED, by name, for another
 * architecture or activation, mixtures of experts, vision models, any quantization_config, a RoPE
 * scaling that is not listed above. Accepts rope_theta and rope_scaling as well as rope_parameters.
 * `path` is for messages. */
enum imbrex_status config_parse(const char *path, const void *bytes, size_t num_bytes,
                                struct model_config *config, struct imbrex_error *err);

/* What a file and a caller may ask for. Beyond, the penalty could make a logit infinite. */
#define GENERATION_MAX_TEMPERATURE 100.0
#define GENERATION_MIN_REPETITION_PENALTY 0.01
#define GENERATION_MAX_REPETITION_PENALTY 100.0

/* Sampling defaults of generation_config.json. A field that the file does not set keeps "off". */
struct generation_config {
    bool do_sample;
    float temperature, top_p, min_p, repetition_penalty;
    int32_t top_k;
    unsigned present; /* bits of enum imbrex_generation_field; temperature: exactly if do_sample */
    int32_t eos_token_ids[CONFIG_MAX_EOS_TOKENS];
    int32_t num_eos_token_ids; /* 0: the file names none, config.json's count */
};

/* What holds without a file: greedy, everything off. */
struct generation_config generation_config_default(void);
/* Parses generation_config.json. FORMAT for values that no sampler accepts, and for end tokens
 * outside [0, vocab_size), config.json's. */
enum imbrex_status generation_config_parse(const char *path, const void *bytes, size_t num_bytes,
                                           int32_t vocab_size, struct generation_config *config,
                                           struct imbrex_error *err);

#endif
