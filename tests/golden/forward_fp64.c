/* SPDX-License-Identifier: Apache-2.0 */
#include "forward_fp64.h"

#include <math.h>
#include <stdlib.h>

#include "golden.h"
#include "ops/quant.h"

static double *allocate(size_t count)
{
    double *memory = calloc(count, sizeof(double));
    assert_non_null(memory);
    return memory;
}

void forward_fp64_init(struct forward_fp64 *sequence, const struct imbrex_model *model,
                       int32_t max_tokens)
{
    const struct model_config *config = &model->config;
    size_t cache = (size_t)config->num_layers * (size_t)max_tokens * (size_t)config->num_kv_heads *
                   (size_t)config->head_dim;
    *sequence = (struct forward_fp64){.model = model,
                                      .max_tokens = max_tokens,
                                      .keys = allocate(cache),
                                      .values = allocate(cache),
                                      .logits = allocate((size_t)config->vocab_size)};
}

void forward_fp64_deinit(struct forward_fp64 *sequence)
{
    free(sequence->keys);
    free(sequence->values);
    free(sequence->logits);
}

/* Activations stay fp64 whatever the weights: what an engine loses by bringing them into blocks is
 * for the tests to allow. */
static void widen_row(struct weight_view weight, int64_t row, int32_t width, float *wide)
{
    size_t row_bytes = dtype_row_bytes(weight.dtype, width);
    quant_dequantize_row(weight.dtype,
                         (const unsigned char *)weight.elements + row * (int64_t)row_bytes, wide,
                         width);
}

/* d[out] = weight · a + bias, added to what d holds. */
static void add_product(struct weight_view weight, const float *bias, const double *a,
                        int32_t num_in, int32_t num_out, double *d)
{
    float *wide = malloc((size_t)num_in * sizeof(float));
    assert_non_null(wide);
    for (int32_t row = 0; row < num_out; row++) {
        double sum = bias == NULL ? 0.0 : bias[row];
        widen_row(weight, row, num_in, wide);
        for (int32_t i = 0; i < num_in; i++) {
            sum += (double)wide[i] * a[i];
        }
        d[row] += sum;
    }
    free(wide);
}

static void normalize(const double *a, const float *weight, int32_t width, double eps, double *d)
{
    double sum = 0.0;
    for (int32_t i = 0; i < width; i++) {
        sum += a[i] * a[i];
    }
    double scale = 1.0 / sqrt(sum / width + eps);
    for (int32_t i = 0; i < width; i++) {
        d[i] = a[i] * scale * weight[i];
    }
}

/* Where, in pairs, the pair lies that turns `turns` times while the position runs over the original
 * length. */
static double turning_pair(const struct model_config *config, double turns)
{
    double length = config->rope_scaling.original_max_position_embeddings;
    return config->head_dim * log(length / (turns * 2.0 * M_PI)) / (2.0 * log(config->rope_theta));
}

static double clamp_unit(double x)
{
    return x < 0.0 ? 0.0 : x > 1.0 ? 1.0 : x;
}

/* The angle of one position for pair i, in the words of the published formulas: wavelengths for
 * llama3, interpolated and extrapolated frequencies for yarn. */
static double pair_frequency(const struct imbrex_model *model, int32_t i)
{
    const struct model_config *config = &model->config;
    const struct rope_scaling *scaling = &config->rope_scaling;
    double plain = 1.0 / pow(config->rope_theta, (double)(2 * i) / config->head_dim);
    if (model->weights.rope_factors != NULL) {
        plain /= (double)model->weights.rope_factors[i];
    }
    double stretched = scaling->type == ROPE_SCALING_NONE ? plain : plain / scaling->factor;
    if (scaling->type == ROPE_SCALING_LLAMA3) {
        double length = scaling->original_max_position_embeddings;
        double wavelength = 2.0 * M_PI / plain;
        if (wavelength < length / scaling->high_freq_factor) {
            return plain;
        }
        if (wavelength > length / scaling->low_freq_factor) {
            return stretched;
        }
        double smooth = (length / wavelength - scaling->low_freq_factor) /
                        (scaling->high_freq_factor - scaling->low_freq_factor);
        return (1.0 - smooth) * stretched + smooth * plain;
    }
    if (scaling->type == ROPE_SCALING_YARN) {
        double low = turning_pair(config, scaling->beta_fast);
        double high = turning_pair(config, scaling->beta_slow);
        low = scaling->truncate ? floor(low) : low;
        high = scaling->truncate ? ceil(high) : high;
        low = low < 0.0 ? 0.0 : low;
        high = high > config->head_dim - 1 ? config->head_dim - 1 : high;
        high = low == high ? high + 0.001 : high;
        double ramp = clamp_unit((i - low) / (high - low));
        return stretched * ramp + plain * (1.0 - ramp);
    }
    return stretched;
}

/* Norm, if there is one, and rotation of one head. */
static void turn_head(const struct imbrex_model *model, const float *norm, int32_t position,
                      double *head)
{
    const struct model_config *config = &model->config;
    int32_t half = config->head_dim / 2;
    double factor = config->rope_scaling.type == ROPE_SCALING_YARN
                        ? config->rope_scaling.attention_factor
                        : 1.0;
    if (norm != NULL) {
        normalize(head, norm, config->head_dim, config->rms_norm_eps, head);
    }
    for (int32_t i = 0; i < half; i++) {
        double *first = config->is_rope_interleaved ? head + (ptrdiff_t)2 * i : head + i;
        double *second = config->is_rope_interleaved ? first + 1 : first + half;
        double angle = position * pair_frequency(model, i);
        double low = *first, high = *second;
        *first = factor * (low * cos(angle) - high * sin(angle));
        *second = factor * (high * cos(angle) + low * sin(angle));
    }
}

static void attend(const struct forward_fp64 *sequence, const double *q, const double *keys,
                   const double *values, int32_t layer_idx, double *d)
{
    const struct model_config *config = &sequence->model->config;
    int32_t head_dim = config->head_dim;
    int32_t kv_width = config->num_kv_heads * head_dim;
    int32_t num_keys = sequence->num_tokens + 1;
    int32_t window = config_layer_window(config, layer_idx);
    double *scores = allocate((size_t)num_keys);
    for (int32_t head = 0; head < config->num_heads; head++) {
        int32_t kv_head = head / (config->num_heads / config->num_kv_heads);
        double max_score = -INFINITY;
        for (int32_t key = 0; key < num_keys; key++) {
            scores[key] = -INFINITY;
            if (window > 0 && key <= sequence->num_tokens - window) {
                continue;
            }
            double dot = 0.0;
            for (int32_t i = 0; i < head_dim; i++) {
                dot += q[head * head_dim + i] * keys[key * kv_width + kv_head * head_dim + i];
            }
            scores[key] = dot / sqrt(head_dim);
            max_score = fmax(max_score, scores[key]);
        }
        double sum = 0.0;
        for (int32_t key = 0; key < num_keys; key++) {
            scores[key] = exp(scores[key] - max_score);
            sum += scores[key];
        }
        for (int32_t i = 0; i < head_dim; i++) {
            double mixed = 0.0;
            for (int32_t key = 0; key < num_keys; key++) {
                mixed += scores[key] * values[key * kv_width + kv_head * head_dim + i];
            }
            d[head * head_dim + i] = mixed / sum;
        }
    }
    free(scores);
}

static void run_layer(struct forward_fp64 *sequence, int32_t layer_idx, double *hidden)
{
    const struct model_config *config = &sequence->model->config;
    const struct layer_weights *layer = &sequence->model->weights.layers[layer_idx];
    int32_t width = config->hidden_size;
    int32_t q_width = config->num_heads * config->head_dim;
    int32_t kv_width = config->num_kv_heads * config->head_dim;
    int32_t inner = config->intermediate_size;
    int32_t position = sequence->num_tokens;
    int64_t layer_offset = (int64_t)layer_idx * sequence->max_tokens * kv_width;
    double *keys = sequence->keys + layer_offset;
    double *values = sequence->values + layer_offset;
    double *normed = allocate((size_t)width);
    double *q = allocate((size_t)q_width);
    double *mixed = allocate((size_t)q_width);
    double *gate = allocate((size_t)inner);
    double *up = allocate((size_t)inner);

    normalize(hidden, layer->input_layernorm, width, config->rms_norm_eps, normed);
    add_product(layer->q_proj, layer->q_bias, normed, width, q_width, q);
    add_product(layer->k_proj, layer->k_bias, normed, width, kv_width, keys + position * kv_width);
    add_product(layer->v_proj, layer->v_bias, normed, width, kv_width,
                values + position * kv_width);
    for (int32_t head = 0; head < config->num_heads; head++) {
        turn_head(sequence->model, layer->q_norm, position, q + head * config->head_dim);
    }
    for (int32_t head = 0; head < config->num_kv_heads; head++) {
        turn_head(sequence->model, layer->k_norm, position,
                  keys + position * kv_width + head * config->head_dim);
    }
    attend(sequence, q, keys, values, layer_idx, mixed);
    add_product(layer->o_proj, layer->o_bias, mixed, q_width, width, hidden);

    normalize(hidden, layer->post_attention_layernorm, width, config->rms_norm_eps, normed);
    add_product(layer->gate_proj, layer->gate_bias, normed, width, inner, gate);
    add_product(layer->up_proj, layer->up_bias, normed, width, inner, up);
    for (int32_t i = 0; i < inner; i++) {
        gate[i] = gate[i] / (1.0 + exp(-gate[i])) * up[i];
    }
    add_product(layer->down_proj, layer->down_bias, gate, inner, width, hidden);
    free(normed);
    free(q);
    free(mixed);
    free(gate);
    free(up);
}

void forward_fp64_push(struct forward_fp64 *sequence, int32_t token_id)
{
    const struct model_config *config = &sequence->model->config;
    const struct weights *weights = &sequence->model->weights;
    int32_t width = config->hidden_size;
    double *hidden = allocate((size_t)width);
    double *normed = allocate((size_t)width);
    float *embedding = malloc((size_t)width * sizeof(float));

    assert_non_null(embedding);
    assert_true(sequence->num_tokens < sequence->max_tokens);
    widen_row(weights->embed_tokens, token_id, width, embedding);
    for (int32_t i = 0; i < width; i++) {
        hidden[i] = embedding[i];
    }
    for (int32_t layer_idx = 0; layer_idx < config->num_layers; layer_idx++) {
        run_layer(sequence, layer_idx, hidden);
    }
    normalize(hidden, weights->norm, width, config->rms_norm_eps, normed);
    for (int32_t i = 0; i < config->vocab_size; i++) {
        sequence->logits[i] = 0.0;
    }
    add_product(weights->lm_head, NULL, normed, width, config->vocab_size, sequence->logits);
    sequence->num_tokens++;
    free(embedding);
    free(hidden);
    free(normed);
}

double forward_fp64_top_two_gap(const struct forward_fp64 *sequence)
{
    double best = -INFINITY;
    double second = -INFINITY;
    for (int32_t i = 0; i < sequence->model->config.vocab_size; i++) {
        double logit = sequence->logits[i];
        if (logit > best) {
            second = best;
            best = logit;
        } else if (logit > second) {
            second = logit;
        }
    }
    return best - second;
}
