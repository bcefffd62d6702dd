/* SPDX-License-Identifier: Apache-2.0 */
/* Biases and penalties, on the logits that a CTA has kept. Part of sample.cu. */
#ifndef IMBREX_OPS_CUDA_KERNELS_SAMPLE_CHANGE_CUH
#define IMBREX_OPS_CUDA_KERNELS_SAMPLE_CHANGE_CUH

#include "ops/cuda/kernels/sample_row.cuh"

/* ---- biases and penalties ------------------------------------------------------------------- */

/* Each id by the thread of the first entry that names it, in the order of the entries. */
static __device__ bool apply_bias(const struct chunk *chunk, const struct sample_bias *bias,
                                  int32_t num_bias)
{
    bool is_bad = false;
    for (int32_t i = (int32_t)threadIdx.x; i < num_bias; i += SAMPLE_THREADS) {
        int32_t id = bias[i].token_id, idx = id - chunk->begin, first = 0;
        if (idx < 0 || idx >= chunk->length) {
            continue;
        }
        while (bias[first].token_id != id) {
            first++;
        }
        if (first < i) {
            continue;
        }
        float logit = chunk->logits[idx];
        for (int32_t j = i; j < num_bias; j++) {
            if (bias[j].token_id != id) {
                continue;
            }
            if (bias[j].bias == -CUDART_INF_F) {
                logit = -CUDART_INF_F;
            } else if (logit != -CUDART_INF_F) {
                logit = __fadd_rn(logit, bias[j].bias);
                if (!isfinite(logit)) {
                    is_bad = true;
                    break;
                }
            }
        }
        chunk->logits[idx] = logit;
    }
    return is_bad;
}

#define SEEN_BEFORE 0x80000000u /* beside the count of the output */
#define SEEN_OUTPUT 0x80000000u /* beside an index */

/* Of an id that occurs, num_seen times in the output. */
static __device__ float penalized_logit(const struct sample_row *row, float logit,
                                        uint32_t num_seen)
{
    if (row->repetition_penalty != 1.0f) {
        logit = logit > 0.0f ? __fdiv_rn(logit, row->repetition_penalty)
                             : __fmul_rn(logit, row->repetition_penalty);
    }
    if (num_seen > 0) {
        logit = __fsub_rn(logit, __fmul_rn(row->frequency_penalty, (float)num_seen));
        logit = __fsub_rn(logit, row->presence_penalty);
    }
    return logit;
}

/* Most tokens of a chunk that are compared with each other instead. */
#define SEEN_LIST 256

/* From a list of them, indices of the chunk. */
static __device__ bool penalize_list(const struct chunk *chunk, const struct sample_row *row,
                                     uint32_t count)
{
    const uint32_t *seen = chunk->memory->seen;
    bool is_bad = false;
    uint32_t part = threadIdx.x % 4; /* four threads for each */
    for (uint32_t begin = 0; begin < count; begin += SAMPLE_THREADS / 4) {
        uint32_t entry = begin + threadIdx.x / 4;
        uint32_t own = entry < count ? seen[entry] & ~SEEN_OUTPUT : 0;
        uint32_t num_seen = 0, first = entry;
#pragma unroll 4
        for (uint32_t i = part; i < count; i += 4) {
            bool is_same = (seen[i] & ~SEEN_OUTPUT) == own;
            num_seen += is_same ? seen[i] / SEEN_OUTPUT : 0;
            first = is_same ? min(first, i) : first;
        }
        for (int distance = 1; distance < 4; distance *= 2) {
            num_seen += __shfl_xor_sync(~0u, num_seen, distance);
            first = min(first, __shfl_xor_sync(~0u, first, distance));
        }
        if (part == 0 && first == entry && entry < count) {
            float logit = chunk->logits[own];
            if (logit != -CUDART_INF_F) {
                logit = penalized_logit(row, logit, num_seen);
                is_bad |= !isfinite(logit);
                chunk->logits[own] = logit;
            }
        }
    }
    return is_bad;
}

static __device__ bool apply_penalties(const struct chunk *chunk, const struct sample_row *row,
                                       const int32_t *token_ids)
{
    uint32_t *seen = chunk->memory->seen;
    int32_t first = row->repetition_penalty != 1.0f ? 0 : row->num_prompt_tokens;
    bool is_bad = false;
    set_shared(&chunk->memory->list_count, 0u);
#pragma unroll 4
    for (int32_t position = first + (int32_t)threadIdx.x; position < row->num_tokens;
         position += SAMPLE_THREADS) {
        uint32_t idx = (uint32_t)(token_ids[position] - chunk->begin);
        if (idx < (uint32_t)chunk->length) {
            uint32_t place = atomicAdd(&chunk->memory->list_count, 1u);
            if (place < SEEN_LIST) {
                seen[place] = idx | (position >= row->num_prompt_tokens ? SEEN_OUTPUT : 0);
            }
        }
    }
    __syncthreads();
    if (chunk->memory->list_count <= SEEN_LIST) {
        return penalize_list(chunk, row, chunk->memory->list_count);
    }
    /* Counters of SEEN_IDS ids at a time. */
    __syncthreads();
    for (int32_t begin = 0; begin < chunk->length; begin += SEEN_IDS) {
        int32_t count = min(SEEN_IDS, chunk->length - begin);
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += SAMPLE_THREADS) {
            seen[i] = 0;
        }
        __syncthreads();
#pragma unroll 4
        for (int32_t position = first + (int32_t)threadIdx.x; position < row->num_tokens;
             position += SAMPLE_THREADS) {
            uint32_t i = (uint32_t)(token_ids[position] - chunk->begin - begin);
            if (i < (uint32_t)count) {
                if (position >= row->num_prompt_tokens) {
                    atomicAdd(&seen[i], 1u);
                } else {
                    atomicOr(&seen[i], SEEN_BEFORE);
                }
            }
        }
        __syncthreads();
        for (int32_t i = (int32_t)threadIdx.x; i < count; i += SAMPLE_THREADS) {
            float logit = chunk->logits[begin + i];
            if (seen[i] != 0 && logit != -CUDART_INF_F) {
                logit = penalized_logit(row, logit, seen[i] & ~SEEN_BEFORE);
                is_bad |= !isfinite(logit);
                chunk->logits[begin + i] = logit;
            }
        }
        __syncthreads();
    }
    return is_bad;
}

#endif
