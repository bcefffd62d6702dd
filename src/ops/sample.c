/* SPDX-License-Identifier: Apache-2.0 */
/* The parallel loop of sampling, and the history. How a row becomes a token is in
 * ref/ref_sample.c. */
#include "ops/sample.h"

#include <assert.h>

#include "base/memory.h"
#include "ops/ops_loop.h"
#include "ops/ref/ref_kernels.h"

/* Of one id, for the loop's pieces: reading it, and an exp. */
#define SCAN_FLOPS 1.0
#define EXP_FLOPS 20.0

void ops_history(struct ops *ops, const struct history_params *params)
{
    const struct token_history *history = &params->history;
    (void)ops; /* a few thousand ids: not worth sharing */
    for (int32_t token = 0; token < params->num_tokens; token++) {
        if (params->slots[token] < 0) {
            params->d[token] = params->token_ids[token];
            continue;
        }
        assert(params->positions[token] >= 0 && params->positions[token] < history->stride);
        int32_t *kept =
            &history->token_ids[params->slots[token] * history->stride + params->positions[token]];
        if (params->token_ids[token] >= 0) {
            *kept = params->token_ids[token];
        }
        params->d[token] = *kept;
    }
}

size_t sample_scratch_bytes(int32_t vocab_size, int32_t num_threads)
{
    size_t num_bytes;
    size_t thread_bytes = ref_sample_scratch_bytes(vocab_size);
    assert(num_threads >= 1);
    return size_mul(thread_bytes, (size_t)num_threads, &num_bytes) ? num_bytes : SIZE_MAX;
}

struct sample_loop {
    const struct sample_params *params;
    const struct cpu_kernels *kernels;
    size_t thread_bytes;
};

static void sample_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct sample_loop *loop = arg;
    unsigned char *scratch = loop->params->scratch;
    ref_sample(loop->params, loop->kernels, begin, end,
               scratch + (size_t)thread_idx * loop->thread_bytes);
}

__attribute__((unused)) static bool row_is_valid(const struct sample_params *params,
                                                 const struct sample_row *row)
{
    int64_t logits_row = (int64_t)row->logits_row - params->logits_row_begin;
    return row->logits_row < 0 ||
           (logits_row >= 0 && logits_row < params->num_logits_rows && row->slot >= 0 &&
            row->num_tokens >= 1 && row->num_prompt_tokens >= 0 &&
            row->num_tokens <= params->history.stride && row->target_id < params->vocab_size &&
            row->num_logprobs <= params->max_logprobs);
}

void ops_sample(struct ops *ops, const struct sample_params *params)
{
    assert(params->num_ids >= 1 && params->num_ids <= params->vocab_size);
    assert((uintptr_t)params->scratch % ARENA_ALIGNMENT == 0);
    double num_flops = 0.0;
    for (int32_t row_idx = 0; row_idx < params->num_rows; row_idx++) {
        const struct sample_row *row = &params->rows[row_idx];
        assert(row_is_valid(params, row));
        bool has_exp = row->num_logprobs >= 0 || (row->target_id < 0 && row->temperature > 0.0f);
        num_flops += (has_exp ? EXP_FLOPS : SCAN_FLOPS) * params->num_ids;
    }
    if (params->num_rows == 0) {
        return;
    }
    struct sample_loop loop = {.params = params,
                               .kernels = ops_kernels(ops),
                               .thread_bytes = ref_sample_scratch_bytes(params->vocab_size)};
    ops_run_loop(ops, sample_piece, &loop, params->num_rows, num_flops / params->num_rows);
}
