/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on a GPU against an fp64 softmax on the host: steps of sequences in shuffled blocks of
 * a cache of any type, what their result must be, and a backend to compute it. Slots of the cache
 * that hold no key are NaN. */
#ifndef IMBREX_TESTS_GPU_ATTENTION_BED_H
#define IMBREX_TESTS_GPU_ATTENTION_BED_H

#include "ops/cuda/backend_cuda.h"
#include "tests/gpu/gpu_session.h"

#define CANARY 0xcaca
#define CANARY_ELEMENTS 512
#define BLOCK 16
#define MAX_SEQS 400
#define NUM_LAYERS 2
#define LAYER_IDX 1

uint32_t random_below(uint32_t bound);
/* Of about a normal distribution, in bf16. */
uint16_t random_element(float scale);

CUdeviceptr allocate(size_t num_bytes);
CUdeviceptr upload(const void *from, size_t num_bytes);
void *zeroed(size_t count_of, size_t element_bytes);

/* ---- a step ---- */

struct shape {
    int32_t num_heads, num_kv_heads, head_dim, window;
    float q_scale;
};

/* What a sequence brings into the step: its last num_queries of num_keys positions. */
struct sequence {
    int32_t num_queries, num_keys;
};

struct step {
    struct shape shape;
    int32_t num_seqs, num_tokens, max_blocks, num_blocks;
    bool has_all_keys;
    struct sequence seqs[MAX_SEQS];
    struct kv_view host_kv; /* what the GPU's cache holds */
    struct kv_view kv;      /* of the GPU */
    uint16_t *qkv, *d;      /* d with canaries around it */
    int32_t *tables, *positions, *query_begin, *seq_lens, *seq_idx;
    size_t qkv_elements, d_elements;
    CUdeviceptr gpu_qkv, gpu_d, gpu_tables, gpu_positions, gpu_query_begin, gpu_seq_lens,
        gpu_seq_idx;
};

/* Random q, k and v; num_unowned tokens behind the last sequence's belong to none. has_all_keys:
 * also those that a window hides from all tokens of the step; otherwise they are NaN. */
struct step *step_create(const struct shape *shape, enum kv_dtype dtype,
                         const struct sequence *seqs, int32_t num_seqs, int32_t num_unowned,
                         bool has_all_keys);
/* The same step over a cache in bf16, of what the given one holds, rounded to that. */
struct step *step_rounded(const struct step *step);
void step_destroy(struct step *step);

int32_t qkv_width(const struct shape *shape);
int32_t d_width(const struct shape *shape);

/* ---- calls ---- */

typedef void attend_fn(struct backend_cuda *cuda, const struct attend_params *params);

struct bed {
    struct backend *backend;
    CUdeviceptr scratch;
};

/* For a shape of any problem here. The backend is one of a cache of the type. */
struct bed bed_create(const struct shape *shape, enum kv_dtype dtype, int32_t max_seqs,
                      int32_t context_size, uint32_t ablations);
void bed_destroy(struct bed *bed);

/* Sequences [first, first + num_seqs) of a step; unowned tokens only where all are asked for. */
struct attend_params params_of(const struct step *step, int32_t first, int32_t num_seqs);
void poison_result(struct step *step);
bool call(struct bed *bed, attend_fn *attend, const struct attend_params *params);
void download_result(struct step *step);

/* ---- checks ---- */

/* Nothing beside the result was written, and everything of it; single_only: of sequences with one
 * token in the step alone. Otherwise says why. */
bool surroundings_are_right(const struct step *step, bool single_only, char *why, size_t why_bytes);
/* Of about num_checked heads of tokens, spread over the step. */
bool result_is_right(const struct step *step, bool single_only, int32_t num_checked, char *why,
                     size_t why_bytes);
/* Catches wrong results, writes beside them, and results that change from run to run or with the
 * sequences beside them. */
void check_step(attend_fn *attend, bool single_only, const struct shape *shape, enum kv_dtype dtype,
                const struct sequence *seqs, int32_t num_seqs, int32_t num_checked,
                uint32_t ablations, const char *name);

#endif
