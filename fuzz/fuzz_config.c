/* SPDX-License-Identifier: Apache-2.0 */
/* Any bytes as config.json and as generation_config.json: what passes must keep the promises of
 * model/config.h. */
#include <math.h>
#include <stdlib.h>

#include "model/config.h"
#include "model/rope.h"

#define MAX_PAIRS 2048

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Whatever the scaling: finite frequencies, which no pair exceeds that turns unscaled. */
static void check_rope(const struct model_config *config)
{
    static double frequencies[MAX_PAIRS];
    require(config->head_dim / 2 <= MAX_PAIRS);
    require(config->rope_scaling.type < ROPE_SCALING_COUNT);
    rope_frequencies(config, NULL, frequencies);
    for (int32_t i = 0; i < config->head_dim / 2; i++) {
        require(isfinite(frequencies[i]) && frequencies[i] > 0.0 && frequencies[i] <= 1.0);
    }
    require(isfinite(rope_attention_factor(config)) && rope_attention_factor(config) > 0.0);
}

static void check_config(const struct model_config *config)
{
    require(config->architecture < ARCHITECTURE_COUNT);
    require(config->hidden_size > 0 && config->intermediate_size > 0 && config->num_layers > 0);
    require(config->vocab_size > 0 && config->max_position_embeddings > 0);
    require(config->num_heads > 0 && config->num_kv_heads > 0);
    require(config->num_heads % config->num_kv_heads == 0);
    require(config->head_dim > 0 && config->head_dim % 2 == 0);
    int64_t qkv_rows = (int64_t)(config->num_heads + 2 * config->num_kv_heads) * config->head_dim;
    require(qkv_rows <= INT32_MAX);
    require(config->rope_theta >= 1.0 && config->rope_theta <= 1e15);
    check_rope(config);
    for (int32_t i = 0; i < config->num_layers; i++) {
        int32_t window = config_layer_window(config, i);
        require(window == 0 || (window == config->sliding_window && window <= 1 << 30));
    }
    require(config->rms_norm_eps > 0.0 && config->rms_norm_eps <= 1.0);
    require(config->num_eos_token_ids >= 0 && config->num_eos_token_ids <= CONFIG_MAX_EOS_TOKENS);
    for (int32_t i = 0; i < config->num_eos_token_ids; i++) {
        require(config->eos_token_ids[i] >= 0);
    }
}

static void check_generation_config(const struct generation_config *config)
{
    require(config->temperature >= 0.0f && config->temperature <= 1e6f);
    require(config->top_p > 0.0f && config->top_p <= 1.0f);
    require(config->min_p >= 0.0f && config->min_p < 1.0f);
    require(config->repetition_penalty > 0.0f && config->repetition_penalty <= 1e6f);
    require(config->top_k >= 0);
    require(config->num_eos_token_ids >= 0 && config->num_eos_token_ids <= CONFIG_MAX_EOS_TOKENS);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct imbrex_error err = {0};
    struct model_config config;
    struct generation_config generation;
    enum imbrex_status status = config_parse("fuzz", bytes, num_bytes, &config, &err);
    if (status == IMBREX_STATUS_OK) {
        check_config(&config);
    } else {
        require(err.status == status && err.message[0] != '\0');
    }
    if (generation_config_parse("fuzz", bytes, num_bytes, 32000, &generation, &err) ==
        IMBREX_STATUS_OK) {
        check_generation_config(&generation);
    }
    return 0;
}
