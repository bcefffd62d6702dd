/* SPDX-License-Identifier: Apache-2.0 */
/* What a forward pass is made of, on any device: each call is a part of a layer that a device may
 * fuse into as few kernels as it can.
 *
 *   cpu    computes in the call, on a thread pool (ops.h)
 *   cuda   launches kernels on the stream of the step
 *
 * Pointers are the device's. What is called `hidden` (the residual stream) and logits are fp32;
 * normed, qkv, attention and mlp have the backend's activation_dtype, the KV cache kv.dtype. All
 * are row-major without gaps. num_tokens = 0 does nothing. The caller has checked shapes and
 * bounds.
 *
 * A call cannot fail where it stands: the first failure since backend_begin is kept, what follows
 * does nothing, and backend_end tells it. */
#ifndef IMBREX_OPS_BACKEND_H
#define IMBREX_OPS_BACKEND_H

#include "ops/device.h"
#include "ops/sample.h"

/* RMSNorm of the rows that a product takes. */
struct norm_params {
    const float *weight; /* [hidden_size] */
    float eps;
};

/* normed = norm(hidden); q, k, v = normed · {q, k, v}_projᵀ + bias; then as rope_kv_params: heads
 * of q and k are normalised, if asked to, q and k are rotated, k and v stored in the cache. */
struct qkv_params {
    const float *hidden; /* [num_tokens, hidden_size] */
    struct norm_params norm;
    struct weight_view q_proj, k_proj, v_proj; /* [heads of each * head_dim, hidden_size] */
    const float *q_bias, *k_bias, *v_bias;     /* or NULL */
    const float *q_norm, *k_norm;              /* [head_dim], or NULL: not normalised */
    const float *cos_sin;                      /* [positions, head_dim], see rope_kv_params */
    const int32_t *positions;                  /* [num_tokens] */
    const int32_t *slot_mapping;               /* [num_tokens]; negative: not stored */
    struct kv_view kv;
    void *normed; /* [num_tokens, hidden_size] written, or not: a place for it */
    /* [num_tokens, (num_heads + 2 * num_kv_heads) * head_dim] written; of k and v undefined */
    void *qkv;
    int32_t layer_idx, num_tokens, hidden_size, num_heads;
    float head_norm_eps; /* of q_norm and k_norm */
    bool is_interleaved;
};

/* As attention_params of ops.h. Tokens of a sequence follow each other, those of sequence i are
 * [query_begin[i], query_begin[i + 1]), and its keys are [0, seq_lens[i]). */
struct attend_params {
    const void *qkv; /* of qkv_params */
    void *d;         /* [num_tokens, num_heads * head_dim] */
    struct kv_view kv;
    const int32_t *block_tables; /* [num_seqs, max_blocks] */
    const int32_t *seq_idx;      /* [num_tokens] */
    const int32_t *positions;    /* [num_tokens] */
    const int32_t *query_begin;  /* [num_seqs + 1] */
    const int32_t *seq_lens;     /* [num_seqs] */
    int32_t layer_idx, num_tokens, num_seqs, num_heads, max_blocks;
    int32_t max_query; /* no sequence has more tokens in this step; 1: all are decoding */
    int32_t window;    /* 0: none */
    float scale;
};

/* hidden += a · weightᵀ + bias */
struct project_params {
    const void *a;             /* [num_tokens, in_features] */
    struct weight_view weight; /* [hidden_size, in_features] */
    const float *bias;         /* [hidden_size] or NULL */
    float *hidden;             /* [num_tokens, hidden_size] */
    int32_t num_tokens, in_features, hidden_size;
};

/* normed = norm(hidden); d = silu(normed · gateᵀ + gate_bias) * (normed · upᵀ + up_bias) */
struct mlp_params {
    const float *hidden; /* [num_tokens, hidden_size] */
    struct norm_params norm;
    struct weight_view gate, up;      /* [intermediate_size, hidden_size] */
    const float *gate_bias, *up_bias; /* or NULL */
    void *normed;                     /* as qkv_params */
    void *d;                          /* [num_tokens, intermediate_size] */
    int32_t num_tokens, hidden_size, intermediate_size;
};

/* logits[i] = norm(hidden[rows[i]]) · weightᵀ */
struct logits_params {
    const float *hidden; /* [tokens of the step, hidden_size] */
    const int32_t *rows; /* [num_rows] */
    struct norm_params norm;
    struct weight_view weight; /* [vocab_size, hidden_size] */
    void *normed;              /* [num_rows, hidden_size], as qkv_params */
    float *logits;             /* [num_rows, vocab_size] */
    int32_t num_rows, hidden_size, vocab_size;
};

/* Rows [begin, end) of the cosines and sines that qkv_params takes: position p, pair i turns by p *
 * frequencies[i]; both are multiplied by attention_factor. */
struct rope_table_params {
    const double *frequencies; /* [head_dim / 2] on the host */
    double attention_factor;
    float *cos_sin; /* [end, head_dim] */
    int32_t head_dim, begin, end;
};

struct backend;

struct backend_functions {
    const char *name; /* "cpu"; static storage */
    void (*destroy)(struct backend *backend);
    void (*begin)(struct backend *backend, void *stream_handle);
    enum imbrex_status (*end)(struct backend *backend);
    void (*rope_table)(struct backend *backend, const struct rope_table_params *params);
    void (*history)(struct backend *backend, const struct history_params *params);
    void (*embedding)(struct backend *backend, const struct embedding_params *params);
    void (*qkv)(struct backend *backend, const struct qkv_params *params);
    void (*attend)(struct backend *backend, const struct attend_params *params);
    void (*project)(struct backend *backend, const struct project_params *params);
    void (*mlp)(struct backend *backend, const struct mlp_params *params);
    void (*logits)(struct backend *backend, const struct logits_params *params);
    void (*sample)(struct backend *backend, const struct sample_params *params);
};

/* The head of every backend's struct. */
struct backend {
    const struct backend_functions *functions;
    enum dtype activation_dtype;
    /* Whether positions, block tables and the like can be read in the calls: on a host. */
    bool is_host;
    const char *kernels_name; /* of the fastest kernels in use; static storage */
};

/* On a thread pool of its own; the arguments as those of ops_create. */
enum imbrex_status backend_cpu_create(int32_t num_threads, uint32_t cpu_features, void *scratch,
                                      size_t scratch_bytes, struct backend **backend,
                                      struct imbrex_error *err);
/* What a backend's scratch memory depends on. */
struct backend_shape {
    int32_t hidden_size, intermediate_size, vocab_size, num_heads, num_kv_heads, head_dim;
    int32_t max_tokens, max_seqs, max_logit_rows, max_samples; /* of a step */
    int32_t context_size;
    enum dtype activation_dtype;
    enum kv_dtype kv_dtype; /* of the KV cache */
    /* Some layer's gate or up has a bias, or IMBREX_ABLATE_MLP is asked for: then the two are a
     * product of their own, which needs scratch memory. */
    bool has_unfused_mlp;
};

struct backend_cuda_options {
    enum dtype activation_dtype; /* BF16; F32: plain kernels, for comparisons */
    /* A token's bits depend neither on the tokens beside it nor on how its prompt was cut: products
     * and attention of all sizes by the same kernels, which is slower for few tokens. */
    bool batch_invariant;
    uint32_t ablations; /* bits of enum imbrex_ablation */
};

/* On a device that device_cuda_create made. scratch: device memory of
 * backend_cuda_scratch_bytes, which lives as long as the backend.
 *
 * How its calls want their weights (weights_place): all matrices in one dtype, activation_dtype,
 * rows without gaps; k_proj behind q_proj and v_proj behind k_proj, up behind gate, their biases
 * alike, as one matrix and one vector; every other matrix and vector begins at a multiple of 256
 * bytes. Nothing writes weights while the backend lives.
 * UNSUPPORTED in a build without the CUDA toolkit. */
enum imbrex_status backend_cuda_create(struct device *device,
                                       const struct backend_cuda_options *options,
                                       const struct backend_shape *shape, void *scratch,
                                       size_t scratch_bytes, struct backend **backend,
                                       struct imbrex_error *err);
size_t backend_cuda_scratch_bytes(const struct backend_shape *shape);

/* NULL does nothing. No work may be left on its streams. */
void backend_destroy(struct backend *backend);

/* What follows goes to this stream (of device_work_fn) until backend_end, which gives the status of
 * the first that failed. */
void backend_begin(struct backend *backend, void *stream_handle);
enum imbrex_status backend_end(struct backend *backend);

void backend_rope_table(struct backend *backend, const struct rope_table_params *params);
void backend_history(struct backend *backend, const struct history_params *params);
void backend_embedding(struct backend *backend, const struct embedding_params *params);
void backend_qkv(struct backend *backend, const struct qkv_params *params);
void backend_attend(struct backend *backend, const struct attend_params *params);
void backend_project(struct backend *backend, const struct project_params *params);
void backend_mlp(struct backend *backend, const struct mlp_params *params);
void backend_logits(struct backend *backend, const struct logits_params *params);
void backend_sample(struct backend *backend, const struct sample_params *params);

#endif
