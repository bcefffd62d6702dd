/* SPDX-License-Identifier: Apache-2.0 */
/* The operations a forward pass is made of: one function and one params struct each.
 *
 * src/ops/ref/ holds the plain C version of every op, which is its definition; src/ops/cpu/
 * replaces entries of the kernel table by faster ones that must agree with it.
 * tests/ops/check_<op>.c proves and times them.
 *
 * Common rules. Activations are fp32, row-major, [num_tokens, width], 4-byte aligned; a *_stride is
 * the distance of two rows in elements. Inputs and outputs may not overlap unless said. Each output
 * element is computed by one thread in an order that depends on neither the number of threads nor
 * the number of rows: results are equal bit for bit for any thread count and any batch. num_tokens
 * = 0 does nothing. The caller has checked shapes and bounds (model loading and batch building do);
 * kernels assert them in debug builds only. */
#ifndef IMBREX_OPS_OPS_H
#define IMBREX_OPS_OPS_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "ops/dtype.h"
#include "ops/kv_view.h"

struct ops; /* a thread pool and a table of kernels; one user at a time */

/* cpu_features: bits of enum imbrex_cpu_features the kernels may use, as far as the machine has
 * them. scratch [scratch_bytes], 4-byte aligned, is the caller's and lives as long as ops: where
 * linear and gemm_swiglu keep quantised or rounded activations. A call over num_tokens rows of
 * quantised weights with in_features elements takes num_tokens *
 * ops_scratch_token_bytes(in_features), one of bf16 weights as many ops_bf16_token_bytes; without
 * any, NULL and 0 will do. */
enum imbrex_status ops_create(int32_t num_threads, uint32_t cpu_features, void *scratch,
                              size_t scratch_bytes, struct ops **ops, struct imbrex_error *err);
/* What ops_create maps for that many threads beside `scratch`; pages count once they are used. */
size_t ops_thread_scratch_bytes(int32_t num_threads);
/* Scratch for one token of any op with at most this many in_features; 0 for 0. */
size_t ops_scratch_token_bytes(int64_t max_in_features);
/* What bf16 weights with at most that many in_features take beside it, or alone: 0 unless the
 * kernels for these features round activations. */
size_t ops_bf16_token_bytes(uint32_t cpu_features, int64_t max_in_features);
void ops_destroy(struct ops *ops);
/* The fastest path in use: a name of cpu_paths. Static storage. */
const char *ops_kernels_name(const struct ops *ops);
int32_t ops_num_threads(const struct ops *ops);
/* The name ops_create would give for these features, without creating anything. Static storage. */
const char *ops_kernels_name_for(uint32_t cpu_features);

/* d[t, :] = table[token_ids[t], :] */
struct embedding_params {
    const int32_t *token_ids; /* [num_tokens], in [0, vocab_size) */
    struct weight_view table; /* [vocab_size, hidden_size] */
    float *d;                 /* [num_tokens, hidden_size] */
    int32_t num_tokens, hidden_size, vocab_size;
};
void ops_embedding(struct ops *ops, const struct embedding_params *params);

/* d = a / sqrt(mean(a^2) + eps) * weight, row by row. Without rows, d may be a. */
struct rmsnorm_params {
    const float *a;      /* [num_tokens, hidden_size]; with rows, as many as these name */
    const int32_t *rows; /* [num_tokens] row of a for each row of d, in any order; NULL: the same */
    const float *weight; /* [hidden_size] */
    float *d;            /* [num_tokens, hidden_size] */
    int32_t num_tokens, hidden_size;
    float eps;
};
void ops_rmsnorm(struct ops *ops, const struct rmsnorm_params *params);

/* The row of a that becomes row `token` of d. */
static inline int64_t rmsnorm_row(const struct rmsnorm_params *params, int64_t token)
{
    return params->rows == NULL ? token : params->rows[token];
}

/* d = a · weightᵀ + bias + residual. With quantised weights, a is first brought into the blocks
 * that its dot product is defined over (quant.h), once for all columns. */
struct linear_params {
    const float *a;            /* [num_tokens, in_features], a_stride */
    struct weight_view weight; /* [out_features, in_features] */
    const float *bias;         /* [out_features] or NULL */
    const float *residual;     /* [num_tokens, out_features], d_stride, or NULL; may be d */
    float *d;                  /* [num_tokens, out_features], d_stride */
    int64_t a_stride, d_stride;
    int32_t num_tokens, in_features, out_features;
};
/* num_linears independent products in one parallel loop (q, k and v, say). All have the same
 * num_tokens; those with quantised or bf16 weights also a, a_stride and in_features. */
void ops_linear(struct ops *ops, const struct linear_params *params, int32_t num_linears);

/* Normalises, if asked to, and rotates q and k in place, then stores k and v in the cache, in its
 * type (kv_dtype.h).
 * Norm: each head as ops_rmsnorm would a row. RoPE: (x[i], x[i + head_dim/2]), or, interleaved,
 * (x[2i], x[2i + 1]), turns by positions[t] * theta_i. cos_sin holds cos and sin, both times the
 * attention factor of the model. */
struct rope_kv_params {
    /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim]: q heads, k heads, v heads */
    float *qkv;
    /* [max position + 1, head_dim]: head_dim/2 cosines, then head_dim/2 sines */
    const float *cos_sin;
    const float *q_norm, *k_norm; /* [head_dim], or NULL: not normalised */
    const int32_t *positions;     /* [num_tokens] */
    const int32_t *slot_mapping;  /* [num_tokens]: slot that receives k and v; negative: none */
    struct kv_view kv;            /* written: layer_idx of those slots */
    int32_t layer_idx, num_tokens, num_heads; /* head_dim (even) and num_kv_heads stand in kv */
    float norm_eps;                           /* of q_norm and k_norm */
    bool is_interleaved;
};
void ops_rope_kv(struct ops *ops, const struct rope_kv_params *params);

/* Causal attention of each token over the cache of its own sequence: keys at positions [0,
 * positions[t]], the last `window` of them if there is a window; others are not read. Query head h
 * reads kv head h / (num_heads / num_kv_heads). d = softmax(scale * q · Kᵀ) · V, where K and V are
 * what kv.dtype makes of the elements in the cache, in fp32. */
struct attention_params {
    const float *q;    /* [num_tokens, num_heads * head_dim], q_stride */
    float *d;          /* [num_tokens, num_heads * head_dim] */
    struct kv_view kv; /* read: layer_idx of the blocks in block_tables */
    /* [num_seqs, max_blocks]: block of positions [i * block_size, (i + 1) * block_size) */
    const int32_t *block_tables;
    const int32_t *seq_idx;   /* [num_tokens]: row of block_tables */
    const int32_t *positions; /* [num_tokens] */
    int64_t q_stride;
    int32_t layer_idx, num_tokens, num_heads, max_blocks;
    int32_t window; /* 0: none */
    float scale;
};
void ops_attention(struct ops *ops, const struct attention_params *params);

/* The first position that a token attends to. */
static inline int64_t attention_first_key(const struct attention_params *params, int64_t token)
{
    int64_t num_keys = (int64_t)params->positions[token] + 1;
    return params->window > 0 && num_keys > params->window ? num_keys - params->window : 0;
}

/* d = silu(a · gateᵀ + gate_bias) * (a · upᵀ + up_bias), neither product stored. silu(x) = x / (1 +
 * exp(-x)). gate and up may differ in dtype; quantised ones as in linear. Source: GLU variants,
 * arXiv 2002.05202. */
struct gemm_swiglu_params {
    const float *a;                   /* [num_tokens, hidden_size] */
    struct weight_view gate, up;      /* [intermediate_size, hidden_size] */
    const float *gate_bias, *up_bias; /* [intermediate_size] or NULL */
    float *d;                         /* [num_tokens, intermediate_size] */
    int32_t num_tokens, hidden_size, intermediate_size;
};
void ops_gemm_swiglu(struct ops *ops, const struct gemm_swiglu_params *params);

#endif
