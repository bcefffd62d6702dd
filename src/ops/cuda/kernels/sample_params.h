/* SPDX-License-Identifier: Apache-2.0 */
/* What the kernels are told: sampling and the token history. Compiled by gcc and by nvcc. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SAMPLE_PARAMS_H
#define IMBREX_OPS_CUDA_KERNELS_SAMPLE_PARAMS_H

#include <stdint.h>

#include "ops/sample_row.h"

/* history_params of sample.h, any number of threads and CTAs, one token a thread. */
struct history_kernel_params {
    const int32_t *token_ids; /* [num_tokens] */
    const int32_t *slots;     /* [num_tokens] */
    const int32_t *positions; /* [num_tokens] */
    struct token_history history;
    int32_t *d; /* [num_tokens] */
    int32_t num_tokens;
    int32_t reserved;
};

/* As imbrex_logit_bias and imbrex_logprob, whose header is not for nvcc. */
struct sample_bias {
    int32_t token_id;
    float bias;
};
struct sample_logprob {
    int32_t token_id;
    float logprob;
};

/* A row of the grid is a cluster of SAMPLE_CLUSTER CTAs of SAMPLE_THREADS threads, each of which
 * has `chunk` ids: the CTA of rank r those of [r * chunk, (r + 1) * chunk) below num_ids. Before
 * compute capability 9.0 there are no clusters: a row is one CTA, and its chunk in `work`. */
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#define SAMPLE_CLUSTER 1
#else
#define SAMPLE_CLUSTER 8
#endif
#define SAMPLE_THREADS 512
/* Of dynamic shared memory, for the chunk's logits. */
#define SAMPLE_MAX_CHUNK_BYTES 196608

struct sample_kernel_params {
    const float *logits; /* [rows, vocab_size] */
    const struct sample_row *rows;
    const struct sample_bias *bias;
    struct token_history history;
    struct sample_result *results;
    struct sample_logprob *top_logprobs; /* [rows, max_logprobs] */
    float *work;       /* [rows of the grid, SAMPLE_CLUSTER, chunk]; NULL: in shared memory */
    int64_t row_begin; /* the grid's first row */
    int32_t logits_row_begin, vocab_size, num_ids, max_logprobs;
    int32_t chunk; /* a multiple of 4 */
    /* A probability is counted in units of 2^-mass_bits: num_ids of them fit in 64 bits. */
    int32_t mass_bits;
    int32_t id_bits; /* num_ids <= 2^id_bits */
    int32_t reserved;
};

/* X(symbol, image, params type, most dynamic shared bytes) */
#define SAMPLE_KERNELS(X)                               \
    X(history, sample, struct history_kernel_params, 0) \
    X(sample_rows, sample, struct sample_kernel_params, SAMPLE_MAX_CHUNK_BYTES)

#endif
