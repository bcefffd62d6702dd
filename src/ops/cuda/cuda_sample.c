/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <assert.h>
#include <stddef.h>

#define HISTORY_THREADS 128
/* Rows that do not fit in the shared memory of a cluster, or have none, have copies in memory, so
 * many at once. */
#define WAVE_ROWS 64
#define PORTABLE_WAVE_ROWS 16

_Static_assert(sizeof(struct sample_bias) == sizeof(struct imbrex_logit_bias) &&
                   offsetof(struct sample_bias, bias) == offsetof(struct imbrex_logit_bias, bias),
               "kernels see biases as they are");
_Static_assert(sizeof(struct sample_logprob) == sizeof(struct imbrex_logprob) &&
                   offsetof(struct sample_logprob, logprob) ==
                       offsetof(struct imbrex_logprob, logprob),
               "kernels see logprobs as they are");

void cuda_history(struct backend_cuda *cuda, const struct history_params *params)
{
    struct history_kernel_params told = {.token_ids = params->token_ids,
                                         .slots = params->slots,
                                         .positions = params->positions,
                                         .history = params->history,
                                         .d = params->d,
                                         .num_tokens = params->num_tokens};
    uint32_t num_tokens = (uint32_t)params->num_tokens;
    cuda_launch(cuda,
                &(struct op_launch){.kernel = OP_KERNEL_history,
                                    .grid_x = (num_tokens + HISTORY_THREADS - 1) / HISTORY_THREADS,
                                    .num_threads = HISTORY_THREADS},
                &told);
}

/* Ids of a CTA; whole 16-byte loads. */
static int32_t chunk_of(int32_t num_ids, int32_t cluster)
{
    int32_t chunk = num_ids / cluster + (num_ids % cluster != 0);
    return (chunk + 3) / 4 * 4;
}

static bool fits_in_shared(int32_t chunk)
{
    return chunk <= SAMPLE_MAX_CHUNK_BYTES / (int32_t)sizeof(float);
}

/* The least that holds 0 to count. */
static int32_t bits_of(int32_t count)
{
    int32_t bits = 1;
    while (bits < 31 && count >> bits != 0) {
        bits++;
    }
    return bits;
}

void cuda_sample(struct backend_cuda *cuda, const struct sample_params *params)
{
    int32_t cluster = cuda->is_portable ? 1 : SAMPLE_CLUSTER;
    int32_t chunk = chunk_of(params->num_ids, cluster);
    int32_t bits = bits_of(params->num_ids);
    size_t chunk_bytes = (size_t)chunk * sizeof(float);
    bool is_large = cuda->is_portable || !fits_in_shared(chunk);
    int32_t wave_rows = cuda->is_portable ? PORTABLE_WAVE_ROWS
                        : is_large        ? WAVE_ROWS
                                          : params->num_rows;
    assert(params->num_ids >= 1 && params->num_ids <= params->vocab_size);
    assert(params->max_logprobs <= IMBREX_MAX_LOGPROBS);
    struct sample_kernel_params told = {
        .logits = params->logits,
        .rows = params->rows,
        .bias = (const struct sample_bias *)(const void *)params->bias,
        .history = params->history,
        .results = params->results,
        .top_logprobs = (struct sample_logprob *)(void *)params->top_logprobs,
        .work = is_large ? (float *)(void *)cuda->scratch : NULL,
        .logits_row_begin = params->logits_row_begin,
        .vocab_size = params->vocab_size,
        .num_ids = params->num_ids,
        .max_logprobs = params->max_logprobs,
        .chunk = chunk,
        .mass_bits = bits < 14 ? 50 : 64 - bits,
        .id_bits = bits,
    };
    for (int32_t begin = 0; begin < params->num_rows; begin += wave_rows) {
        int32_t num_left = params->num_rows - begin;
        int32_t num_rows = num_left < wave_rows ? num_left : wave_rows;
        told.row_begin = begin;
        cuda_launch(cuda,
                    &(struct op_launch){.kernel = OP_KERNEL_sample_rows,
                                        .grid_x = (uint32_t)(num_rows * cluster),
                                        .num_threads = SAMPLE_THREADS,
                                        .shared_bytes = is_large ? 0 : (uint32_t)chunk_bytes,
                                        .cluster_x = (uint32_t)cluster},
                    &told);
    }
}

static size_t wave_bytes(const struct backend_shape *shape, int32_t wave_rows, int32_t chunk,
                         int32_t cluster)
{
    int32_t num_rows = shape->max_samples < wave_rows ? shape->max_samples : wave_rows;
    return (size_t)num_rows * (size_t)cluster * (size_t)chunk * sizeof(float);
}

/* Enough for either kernel: this is asked for where there may be no GPU yet. */
size_t cuda_sample_scratch_bytes(const struct backend_shape *shape)
{
    int32_t chunk = chunk_of(shape->vocab_size, SAMPLE_CLUSTER);
    size_t portable = wave_bytes(shape, PORTABLE_WAVE_ROWS, chunk_of(shape->vocab_size, 1), 1);
    size_t clusters =
        fits_in_shared(chunk) ? 0 : wave_bytes(shape, WAVE_ROWS, chunk, SAMPLE_CLUSTER);
    return clusters > portable ? clusters : portable;
}
