/* SPDX-License-Identifier: Apache-2.0 */
/* RoPE's frequencies and their scaling, as Hugging Face transformers defines it. Everything is in
 * double: at position 100,000 an fp32 angle would be off by 0.004 rad.
 *
 *   linear   every frequency / factor
 *   llama3   by how often a pair turns in the original length: pairs of high_freq_factor turns and
 *            more keep their frequency, those of low_freq_factor and fewer have it / factor, those
 *            between go from one to the other, linearly in the number of turns
 *   yarn     the same with beta_fast and beta_slow, linearly in the pair's index, and q and k are
 *            multiplied by a constant. Source: arXiv 2309.00071 */
#include "model/rope.h"

#include <math.h>

#define PI 3.14159265358979323846

static const char *const scaling_names[ROPE_SCALING_COUNT] = {
#define SCALING_NAME(name, rope_type) [ROPE_SCALING_##name] = rope_type,
    ROPE_SCALING_LIST(SCALING_NAME)
#undef SCALING_NAME
};

const char *rope_scaling_name(enum rope_scaling_type type)
{
    return scaling_names[type];
}

static double llama3_frequency(const struct rope_scaling *scaling, double frequency)
{
    double turns = scaling->original_max_position_embeddings * frequency / (2.0 * PI);
    double kept =
        (turns - scaling->low_freq_factor) / (scaling->high_freq_factor - scaling->low_freq_factor);
    kept = fmin(fmax(kept, 0.0), 1.0);
    return kept * frequency + (1.0 - kept) * frequency / scaling->factor;
}

/* The pair, as a real number, that turns num_turns times in the original length. */
static double pair_of_turns(const struct model_config *config, double num_turns)
{
    double wavelength = config->rope_scaling.original_max_position_embeddings / num_turns;
    return config->head_dim * log(wavelength / (2.0 * PI)) / (2.0 * log(config->rope_theta));
}

static void scale_yarn(const struct model_config *config, double *frequencies)
{
    const struct rope_scaling *scaling = &config->rope_scaling;
    double begin = pair_of_turns(config, scaling->beta_fast);
    double end = pair_of_turns(config, scaling->beta_slow);
    if (scaling->truncate) {
        begin = floor(begin);
        end = ceil(end);
    }
    begin = fmax(begin, 0.0);
    end = fmin(end, config->head_dim - 1.0);
    if (begin == end) {
        end += 0.001;
    }
    for (int32_t pair = 0; pair < config->head_dim / 2; pair++) {
        double divided = fmin(fmax((pair - begin) / (end - begin), 0.0), 1.0);
        frequencies[pair] *= divided / scaling->factor + (1.0 - divided);
    }
}

void rope_frequencies(const struct model_config *config, const float *factors, double *frequencies)
{
    const struct rope_scaling *scaling = &config->rope_scaling;
    int32_t num_pairs = config->head_dim / 2;
    for (int32_t pair = 0; pair < num_pairs; pair++) {
        frequencies[pair] = pow(config->rope_theta, -2.0 * pair / config->head_dim);
        if (factors != NULL) {
            frequencies[pair] /= (double)factors[pair];
        }
        if (scaling->type == ROPE_SCALING_LINEAR) {
            frequencies[pair] /= scaling->factor;
        } else if (scaling->type == ROPE_SCALING_LLAMA3) {
            frequencies[pair] = llama3_frequency(scaling, frequencies[pair]);
        }
    }
    if (scaling->type == ROPE_SCALING_YARN) {
        scale_yarn(config, frequencies);
    }
}

double rope_attention_factor(const struct model_config *config)
{
    const struct rope_scaling *scaling = &config->rope_scaling;
    return scaling->type == ROPE_SCALING_YARN ? scaling->attention_factor : 1.0;
}

double rope_yarn_attention_factor(double factor, double mscale, double mscale_all_dim)
{
    if (mscale != 0.0 && mscale_all_dim != 0.0) {
        return (0.1 * mscale * log(factor) + 1.0) / (0.1 * mscale_all_dim * log(factor) + 1.0);
    }
    return 0.1 * log(factor) + 1.0;
}
