/* SPDX-License-Identifier: Apache-2.0 */
/* What a warp of decode_attention.cu reads of the cache at a time, and the two products that it
 * makes of it: of bf16, and of 8-bit elements with scales (kv_dtype.h).
 *
 * Everything is computed transposed, so that the query heads of a group are the 8 columns of a
 * tile and not 16 rows: Sᵀ = K · Qᵀ, Oᵀ = Vᵀ · Pᵀ. Which element of a head stands at which k of the
 * first product does not matter as long as both sides agree, nor which column of V is which row of
 * the second: so each thread loads whole pieces of a row of K, and of rows of V, and these are its
 * fragments. Only V's need two rows shuffled together, and Pᵀ a transposition of 8x8 tiles.
 *
 * Of 8-bit elements, the codes stay as they are in registers until they are multiplied. K becomes
 * bf16 without its scales: each group of 32 elements is a product of its own, and its sums take the
 * group's scale in fp32. V becomes bf16 with its scales, rounded once. Both come out as powers of 2
 * times themselves (kv_elements.cuh), for which queries, the scale of the softmax, the values'
 * scales and the weights make up. */
#ifndef IMBREX_OPS_CUDA_KERNELS_DECODE_STEP_CUH
#define IMBREX_OPS_CUDA_KERNELS_DECODE_STEP_CUH

#include <math.h>

#include "ops/cuda/kernels/decode_attention_params.h"
#include "ops/cuda/kernels/kv_elements.cuh"
#include "ops/cuda/kernels/ptx_attention.cuh"
#include "ops/cuda/kernels/ptx_warp.cuh"

#define FULL_MASK 0xffffffffu

/* A step: as many blocks as make 64 registers of 32 threads, with r = lane / 4, q = lane % 4. */
template <int KIND, int HEAD_DIM> struct decode_step {
    static constexpr int BLOCKS = 128 / HEAD_DIM;
    /* Elements and their scales. */
    static constexpr int HEAD_BYTES =
        ATTENTION_BLOCK_SIZE * (HEAD_DIM + HEAD_DIM / DECODE_GROUP * 2);
    /* Of rows r and r + 8: of each group 8 elements from 8 q on. */
    uint32_t keys[BLOCKS][2][HEAD_DIM / 32][2];
    /* Of rows 2 q, 2 q + 1 and both + 8: elements [r, r + 1) * HEAD_DIM / 8. */
    uint32_t values[BLOCKS][4][HEAD_DIM / 32];
    /* All scales of the step's blocks, two a word, one word after the other in the lanes: those who
     * multiply ask who has them. */
    static constexpr int ROW_WORDS = HEAD_DIM / (2 * DECODE_GROUP);
    static constexpr int BLOCK_WORDS = ATTENTION_BLOCK_SIZE * ROW_WORDS;
    static constexpr int SCALE_REGISTERS = BLOCKS * BLOCK_WORDS / 32;
    uint32_t key_scales[SCALE_REGISTERS], value_scales[SCALE_REGISTERS];
};

template <int HEAD_DIM> struct decode_step<DECODE_BF16, HEAD_DIM> {
    static constexpr int BLOCKS = 128 / HEAD_DIM;
    static constexpr int HEAD_BYTES = ATTENTION_BLOCK_SIZE * HEAD_DIM * 2;
    /* Of rows r and r + 8: elements 8 q and on, every 32. */
    uint32_t keys[BLOCKS][2][HEAD_DIM / 32][4];
    /* Of rows 2 q, 2 q + 1 and both + 8: elements 8 r and on, every 64. */
    uint32_t values[BLOCKS][4][HEAD_DIM / 64][4];
};

template <int N_TILES, int HEAD_DIM> struct decode_state {
    /* Rows of Oᵀ: elements accum_column(c) + 2 t and the next; columns: heads 2 q and the next. */
    float accum[HEAD_DIM / 64][4][N_TILES][4];
    float largest[N_TILES][2], sum[N_TILES][2]; /* sum: of this thread's keys alone */
};

/* Of no keys. */
template <int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void clear_state(struct decode_state<N_TILES, HEAD_DIM> &state)
{
    state = {};
#pragma unroll
    for (int i = 0; i < 2 * N_TILES; i++) {
        state.largest[i / 2][i % 2] = -INFINITY;
    }
}

template <int KIND, int HEAD_DIM> static __device__ __forceinline__ int accum_column(int c)
{
    int r = threadIdx.x % 32 / 4;
    return KIND == DECODE_BF16 ? c * 64 + r * 8 : r * (HEAD_DIM / 8) + c * 8;
}

/* Values with their scales are multiplied as 2^-60 times themselves, so those of 2^-66 to 2^60 keep
 * all their digits, by weights that are 2^60 times themselves. */
#define DECODE_WEIGHT_EXPONENT 60
#define DECODE_SUM_UNIT 0x1p-60f /* of sums of such weights */
template <int KIND> static __device__ __forceinline__ float weight_exponent(void)
{
    return KIND == DECODE_BF16 ? 0.0f : (float)DECODE_WEIGHT_EXPONENT;
}

/* ---- loads ----------------------------------------------------------------------------------- */

template <int WORDS>
static __device__ __forceinline__ void load_words(uint32_t (&d)[WORDS], const unsigned char *from)
{
    static_assert(WORDS == 1 || WORDS == 2 || WORDS == 4, "no load of this width");
    if constexpr (WORDS == 1) {
        load_once_4(d[0], from);
    } else if constexpr (WORDS == 2) {
        load_once_8(d, from);
    } else {
        load_once_16(d, from);
    }
}

/* base: of a block, this head's keys or values. All of its rows are read, of which some may hold no
 * key: mask takes care of them. */
template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void load_keys(const unsigned char *base, int block,
                                                 struct decode_step<KIND, HEAD_DIM> &step)
{
    int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int row = r + half * 8;
        if constexpr (KIND == DECODE_BF16) {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; i++) {
                load_words(step.keys[block][half][i], base + row * HEAD_DIM * 2 + q * 16 + i * 64);
            }
        } else {
#pragma unroll
            for (int i = 0; i < HEAD_DIM / 32; i++) {
                load_words(step.keys[block][half][i], base + row * HEAD_DIM + q * 8 + i * 32);
            }
        }
    }
}

template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void load_values(const unsigned char *base, int block,
                                                   struct decode_step<KIND, HEAD_DIM> &step)
{
    int r = threadIdx.x % 32 / 4, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = q * 2 + i % 2 + i / 2 * 8;
        if constexpr (KIND == DECODE_BF16) {
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
                load_words(step.values[block][i][c], base + row * HEAD_DIM * 2 + r * 16 + c * 128);
            }
        } else {
            load_words(step.values[block][i], base + row * HEAD_DIM + r * (HEAD_DIM / 8));
        }
    }
}

/* bases: of all blocks of a step, as above. */
template <int KIND, int HEAD_DIM, int BLOCKS, int REGISTERS>
static __device__ __forceinline__ void load_scales(const unsigned char *const (&bases)[BLOCKS],
                                                   uint32_t (&scales)[REGISTERS])
{
    constexpr int BLOCK_WORDS = decode_step<KIND, HEAD_DIM>::BLOCK_WORDS;
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < REGISTERS; i++) {
        const unsigned char *base = bases[i * 32 / BLOCK_WORDS];
        if (BLOCK_WORDS < 32 && lane >= BLOCK_WORDS) {
            base = bases[(i * 32 + BLOCK_WORDS) / BLOCK_WORDS];
        }
        load_once_4(scales[i], base + ATTENTION_BLOCK_SIZE * HEAD_DIM + lane % BLOCK_WORDS * 4);
    }
}

/* Scales 2 * word and the next of a row of a block. */
template <int KIND, int HEAD_DIM, int REGISTERS>
static __device__ __forceinline__ uint32_t find_scales(const uint32_t (&scales)[REGISTERS],
                                                       int block, int row, int word)
{
    using step = decode_step<KIND, HEAD_DIM>;
    int at = block * step::BLOCK_WORDS;
    return __shfl_sync(FULL_MASK, scales[at / 32], at % 32 + row * step::ROW_WORDS + word);
}

/* ---- loads by way of shared memory ----------------------------------------------------------- */

/* A step as it lies in a stage: keys of its blocks, their values, then the scales of both. */
template <int KIND, int HEAD_DIM> struct decode_stage {
    static constexpr int BLOCKS = decode_step<KIND, HEAD_DIM>::BLOCKS;
    static constexpr int ROW_BYTES = HEAD_DIM * (KIND == DECODE_BF16 ? 2 : 1);
    static constexpr int ELEMENT_BYTES = ATTENTION_BLOCK_SIZE * ROW_BYTES; /* of a block */
    static constexpr int SCALE_BYTES = decode_step<KIND, HEAD_DIM>::HEAD_BYTES - ELEMENT_BYTES;
    static constexpr int VALUES = BLOCKS * ELEMENT_BYTES;
    static constexpr int KEY_SCALES = 2 * VALUES;
    static constexpr int VALUE_SCALES = KEY_SCALES + BLOCKS * SCALE_BYTES;
    static_assert(VALUE_SCALES + BLOCKS * SCALE_BYTES == DECODE_STAGE_BYTES(KIND),
                  "a stage is a step");
};

/* A block's keys, or values, of a head are one piece of memory, which is copied as it lies, 512
 * bytes an instruction. In lines of 128 bytes the 16-byte chunks change places, so that those who
 * read find theirs in different banks: this is what a chunk's number is turned by (exclusive or),
 * of a row's keys and values. Eight lanes read chunks of bf16 keys from 2 rows, of 8-bit ones 16
 * lanes halves of them from 4; of values they read from rows 2 q. Of a sum of rows that share no
 * bits it is both rows' turns, one after the other. */
template <int KIND, int HEAD_DIM, bool IS_VALUES>
static __device__ __forceinline__ int chunk_turn(int row)
{
    if (IS_VALUES) {
        return row / 2 % 4 * 2;
    }
    return KIND == DECODE_BF16 ? row % 2 * 4
                               : row * decode_stage<KIND, HEAD_DIM>::ROW_BYTES / 128 % 4 * 2;
}

template <int KIND, int HEAD_DIM, bool IS_VALUES>
static __device__ __forceinline__ void copy_elements(uint32_t to, const unsigned char *from)
{
    using stage = decode_stage<KIND, HEAD_DIM>;
    int lane = threadIdx.x % 32, line = lane / 8;
    int turn = chunk_turn<KIND, HEAD_DIM, IS_VALUES>(line * 128 / stage::ROW_BYTES);
    uint32_t lane_to = to + line * 128 + ((lane % 8) ^ turn) * 16;
#pragma unroll
    for (int i = 0; i < stage::ELEMENT_BYTES / 512; i++) {
        int turn_on = chunk_turn<KIND, HEAD_DIM, IS_VALUES>(i * 512 / stage::ROW_BYTES);
        copy_async((lane_to ^ (turn_on * 16)) + i * 512, from + lane * 16 + i * 512);
    }
}

/* A step into a stage at `to`, a multiple of 128. keys: of each of its blocks, this head's. */
template <int KIND, int HEAD_DIM, int BLOCKS>
static __device__ __forceinline__ void copy_step(uint32_t to,
                                                 const unsigned char *const (&keys)[BLOCKS],
                                                 int64_t value_bytes)
{
    using stage = decode_stage<KIND, HEAD_DIM>;
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        uint32_t block_to = to + i * stage::ELEMENT_BYTES;
        copy_elements<KIND, HEAD_DIM, false>(block_to, keys[i]);
        copy_elements<KIND, HEAD_DIM, true>(block_to + stage::VALUES, keys[i] + value_bytes);
    }
    if constexpr (KIND != DECODE_BF16) {
        constexpr int CHUNKS = BLOCKS * stage::SCALE_BYTES / 16;
        int lane = threadIdx.x % 32, at = lane % CHUNKS * 16;
        const unsigned char *from = keys[0];
        if (BLOCKS > 1 && at >= stage::SCALE_BYTES) {
            from = keys[BLOCKS - 1];
        }
        if (lane < 2 * CHUNKS) {
            copy_async(to + stage::KEY_SCALES + lane * 16,
                       from + (lane < CHUNKS ? 0 : value_bytes) + stage::ELEMENT_BYTES +
                           at % stage::SCALE_BYTES);
        }
    }
}

template <int WORDS>
static __device__ __forceinline__ void read_words(uint32_t (&d)[WORDS], uint32_t shared)
{
    static_assert(WORDS == 2 || WORDS == 4, "no load of this width");
    if constexpr (WORDS == 2) {
        uint2 bits = shared_load_8(shared);
        d[0] = bits.x, d[1] = bits.y;
    } else {
        uint4 bits = shared_load_16(shared);
        d[0] = bits.x, d[1] = bits.y, d[2] = bits.z, d[3] = bits.w;
    }
}

/* What load_keys and load_scales of the step would have loaded. */
template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void read_keys(uint32_t from,
                                                 struct decode_step<KIND, HEAD_DIM> &step)
{
    using stage = decode_stage<KIND, HEAD_DIM>;
    constexpr int PIECE_BYTES = KIND == DECODE_BF16 ? 16 : 8; /* of 32 elements, a thread's */
    int lane = threadIdx.x % 32, r = lane / 4, q = lane % 4;
    int turn = chunk_turn<KIND, HEAD_DIM, false>(r) * 16;
    uint32_t first = from + ((r * stage::ROW_BYTES + q * PIECE_BYTES) ^ turn);
#pragma unroll
    for (int i = 0; i < stage::BLOCKS * 2 * (HEAD_DIM / 32); i++) {
        int group = i % (HEAD_DIM / 32), half = i / (HEAD_DIM / 32); /* of all blocks */
        int on = group * PIECE_BYTES * 4;
        read_words(step.keys[half / 2][half % 2][group],
                   (first ^ (on % 128)) + on / 128 * 128 + half * 8 * stage::ROW_BYTES);
    }
    if constexpr (KIND != DECODE_BF16) {
        static_assert(step.SCALE_REGISTERS == 1, "a word a lane");
        step.key_scales[0] = shared_load_4(from + stage::KEY_SCALES + lane * 4);
    }
}

/* What load_values and load_scales would have loaded. */
template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void read_values(uint32_t from,
                                                   struct decode_step<KIND, HEAD_DIM> &step)
{
    using stage = decode_stage<KIND, HEAD_DIM>;
    constexpr int PIECE_BYTES = KIND == DECODE_BF16 ? 16 : HEAD_DIM / 8;
    int lane = threadIdx.x % 32, r = lane / 4, row = lane % 4 * 2;
    int turn = chunk_turn<KIND, HEAD_DIM, true>(row) * 16;
    uint32_t first = from + stage::VALUES + ((row * stage::ROW_BYTES + r * PIECE_BYTES) ^ turn);
#pragma unroll
    for (int i = 0; i < stage::BLOCKS * 4; i++) {
        int on = i % 2 * stage::ROW_BYTES;
        uint32_t place =
            (first ^ (on % 128)) + on / 128 * 128 + (i / 4 * 16 + i / 2 % 2 * 8) * stage::ROW_BYTES;
        if constexpr (KIND == DECODE_BF16) {
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
                read_words(step.values[i / 4][i % 4][c], place + c * 128);
            }
        } else {
            read_words(step.values[i / 4][i % 4], place);
        }
    }
    if constexpr (KIND != DECODE_BF16) {
        step.value_scales[0] = shared_load_4(from + stage::VALUE_SCALES + lane * 4);
    }
}

/* ---- keys that do not count ------------------------------------------------------------------ */

static __device__ __forceinline__ bool key_counts(int32_t low, int32_t high, int32_t key)
{
    return (uint32_t)(key - low) < (uint32_t)(high - low);
}

/* The values of keys outside of [low, high) become zeros, of which the first is first_key: weight 0
 * times what was never written might be no number. Of codes it is one, whatever the code. */
template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void clear_values(int32_t low, int32_t high, int32_t first_key,
                                                    struct decode_step<KIND, HEAD_DIM> &step)
{
    using of_step = decode_step<KIND, HEAD_DIM>;
    int lane = threadIdx.x % 32;
    if constexpr (KIND == DECODE_BF16) {
#pragma unroll
        for (int i = 0; i < of_step::BLOCKS * 4; i++) {
            int32_t row = i / 4 * ATTENTION_BLOCK_SIZE + lane % 4 * 2 + i % 2 + i % 4 / 2 * 8;
            if (!key_counts(low, high, first_key + row)) {
#pragma unroll
                for (int j = 0; j < HEAD_DIM / 16; j++) {
                    step.values[i / 4][i % 4][j / 4][j % 4] = 0;
                }
            }
        }
    } else {
#pragma unroll
        for (int i = 0; i < of_step::SCALE_REGISTERS; i++) {
            if (!key_counts(low, high, first_key + (i * 32 + lane) / of_step::ROW_WORDS)) {
                step.value_scales[i] = 0;
            }
        }
    }
}

/* Of a step that begins at first_key, keys outside of [low, high) score -infinity. */
template <int N_TILES, int BLOCKS>
static __device__ __forceinline__ void mask_scores(int32_t low, int32_t high, int32_t first_key,
                                                   float (&scores)[BLOCKS][N_TILES][4])
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
        for (int j = 0; j < 4; j++) {
            int32_t row = i * ATTENTION_BLOCK_SIZE + threadIdx.x % 32 / 4 + j / 2 * 8;
            bool counts = key_counts(low, high, first_key + row);
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                scores[i][n][j] = counts ? scores[i][n][j] : -INFINITY;
            }
        }
    }
}

/* ---- products -------------------------------------------------------------------------------- */

/* What this thread has of the queries: of each head n * 8 + r, of every 32 elements, 8 from 8 q on.
 * Beside 8-bit elements they lie in shared memory, in pieces of 16 bytes that each thread writes
 * and reads itself: registers are scarce. */
template <int KIND, int N_TILES, int HEAD_DIM> struct decode_queries {
    uint32_t pieces; /* shared address of piece 0; of the next, in the order of [n][i], 512 on */
};

template <int N_TILES, int HEAD_DIM> struct decode_queries<DECODE_BF16, N_TILES, HEAD_DIM> {
    uint32_t registers[N_TILES][HEAD_DIM / 32][4];
};

/* from: piece i of head n * 8 + r; zeros if it is not there. When all have been asked for, they are
 * to be arranged before they are multiplied. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void load_query(
    struct decode_queries<KIND, N_TILES, HEAD_DIM> &queries, int n, int i, const void *from,
    bool is_there)
{
    if constexpr (KIND == DECODE_BF16) {
        load_once_16_if(queries.registers[n][i], from, is_there);
    } else {
        copy_async_16(queries.pieces + (n * (HEAD_DIM / 32) + i) * 512, from, is_there ? 16 : 0);
    }
}

/* Codes come out as pairs of every other element: so must queries. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void arrange_queries(
    const struct decode_queries<KIND, N_TILES, HEAD_DIM> &queries)
{
    if constexpr (KIND != DECODE_BF16) {
        copy_async_wait<0>();
#pragma unroll
        for (int i = 0; i < N_TILES * (HEAD_DIM / 32); i++) {
            uint4 piece = shared_load_16(queries.pieces + i * 512);
            uint32_t pairs[4] = {halves_low(piece.x, piece.y), halves_high(piece.x, piece.y),
                                 halves_low(piece.z, piece.w), halves_high(piece.z, piece.w)};
#pragma unroll
            for (int j = 0; j < 4 && KIND == DECODE_FP8; j++) {
                pairs[j] = bf16x2_multiply(pairs[j], BF16X2_POWER(DECODE_FP8_QUERY_EXPONENT));
            }
            shared_store_16(queries.pieces + i * 512, pairs);
        }
    }
}

/* sums[j]: of rows r and r + 8 of a block, heads 2 q and the next, without scales. */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void multiply_group(
    float (&sums)[N_TILES][4], const struct decode_step<KIND, HEAD_DIM> &step, int block, int group,
    const uint4 (&queries)[N_TILES])
{
#pragma unroll
    for (int word = 0; word < 2; word++) {
        uint32_t a[4];
        split_codes<KIND == DECODE_FP8>(step.keys[block][0][group][word], a[0], a[2]);
        split_codes<KIND == DECODE_FP8>(step.keys[block][1][group][word], a[1], a[3]);
#pragma unroll
        for (int i = 0; i < 4 && KIND == DECODE_INT8; i++) {
            a[i] = int8_centre(a[i]);
        }
#pragma unroll
        for (int n = 0; n < N_TILES; n++) {
            matrix_multiply_add(sums[n], a, word == 0 ? queries[n].x : queries[n].z,
                                word == 0 ? queries[n].y : queries[n].w);
        }
    }
}

/* scores: rows r and r + 8 of each block, heads 2 q and the next. */
template <int KIND, int N_TILES, int HEAD_DIM, int BLOCKS>
static __device__ __forceinline__ void multiply_keys(
    float (&scores)[BLOCKS][N_TILES][4], const struct decode_step<KIND, HEAD_DIM> &step,
    const struct decode_queries<KIND, N_TILES, HEAD_DIM> &queries)
{
#pragma unroll
    for (int i = 0; i < BLOCKS * N_TILES * 4; i++) {
        scores[i / 4 / N_TILES][i / 4 % N_TILES][i % 4] = 0.0f;
    }
    if constexpr (KIND == DECODE_BF16) {
#pragma unroll
        for (int block = 0; block < BLOCKS; block++) {
            const uint32_t(&keys)[2][HEAD_DIM / 32][4] = step.keys[block];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
#pragma unroll
                for (int i = 0; i < HEAD_DIM / 32; i++) {
                    const uint32_t(&query)[4] = queries.registers[n][i];
#pragma unroll
                    for (int half = 0; half < 4; half += 2) {
                        const uint32_t a[4] = {keys[0][i][half], keys[1][i][half],
                                               keys[0][i][half + 1], keys[1][i][half + 1]};
                        matrix_multiply_add(scores[block][n], a, query[half], query[half + 1]);
                    }
                }
            }
        }
    } else {
#pragma unroll
        for (int group = 0; group < HEAD_DIM / DECODE_GROUP; group++) {
            uint4 of_group[N_TILES];
#pragma unroll
            for (int n = 0; n < N_TILES; n++) {
                of_group[n] = shared_load_16(queries.pieces + (n * (HEAD_DIM / 32) + group) * 512);
            }
#pragma unroll
            for (int block = 0; block < BLOCKS; block++) {
                float sums[N_TILES][4] = {};
                multiply_group(sums, step, block, group, of_group);
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    uint32_t pair = find_scales<KIND, HEAD_DIM>(
                        step.key_scales, block, threadIdx.x % 32 / 4 + half * 8, group / 2);
                    float scale = __uint_as_float(group % 2 == 0 ? pair << 16 : pair & 0xffff0000u);
#pragma unroll
                    for (int i = 0; i < 2 * N_TILES; i++) {
                        float *score = &scores[block][i / 2][2 * half + i % 2];
                        *score = fmaf(scale, sums[i / 2][2 * half + i % 2], *score);
                    }
                }
            }
        }
    }
}

/* The largest over a step's keys, which the threads of equal lane % 4 share. */
template <int N_TILES, int BLOCKS>
static __device__ __forceinline__ float step_largest(const float (&scores)[BLOCKS][N_TILES][4],
                                                     int n, int head, float largest)
{
#pragma unroll
    for (int i = 0; i < BLOCKS; i++) {
        largest = fmaxf(largest, fmaxf(scores[i][n][head], scores[i][n][head + 2]));
    }
#pragma unroll
    for (int distance = 4; distance < 32; distance *= 2) {
        largest = fmaxf(largest, __shfl_xor_sync(FULL_MASK, largest, distance));
    }
    return largest;
}

/* scores become exp(score - largest), in the unit of weights; sums and accumulators follow a
 * largest that has grown. */
template <int KIND, int N_TILES, int HEAD_DIM, int BLOCKS>
static __device__ __forceinline__ void soften(float exp2_scale, float (&scores)[BLOCKS][N_TILES][4],
                                              struct decode_state<N_TILES, HEAD_DIM> &state)
{
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        float shrink[2];
        bool has_grown = false;
#pragma unroll
        for (int head = 0; head < 2; head++) {
            float before = state.largest[n][head];
            float largest = step_largest<N_TILES, BLOCKS>(scores, n, head, before);
            /* Nothing but -infinity so far: minus itself it is no number. */
            float base = largest == -INFINITY ? 0.0f : largest * exp2_scale;
            base -= weight_exponent<KIND>();
            /* Exactly 1 where nothing has changed: heads of other threads may have. */
            shrink[head] = largest > before ? exp2_approx((before - largest) * exp2_scale) : 1.0f;
            has_grown = has_grown || largest > before;
            state.largest[n][head] = largest;
            state.sum[n][head] *= shrink[head];
#pragma unroll
            for (int i = 0; i < BLOCKS; i++) {
#pragma unroll
                for (int j = head; j < 4; j += 2) {
                    scores[i][n][j] = exp2_approx(scores[i][n][j] * exp2_scale - base);
                    state.sum[n][head] += scores[i][n][j];
                }
            }
        }
        if (__any_sync(FULL_MASK, has_grown)) {
#pragma unroll
            for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
                for (int t = 0; t < 4; t++) {
#pragma unroll
                    for (int i = 0; i < 4; i++) {
                        state.accum[c][t][n][i] *= shrink[i % 2];
                    }
                }
            }
        }
    }
}

/* value = split code * factor + offset, for rows 2 q and the next, and for both + 8. */
struct value_scales {
    uint32_t factors[2], offsets[2];
};

template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ struct value_scales find_value_scales(
    const struct decode_step<KIND, HEAD_DIM> &step, int block)
{
    struct value_scales found = {};
    int group = threadIdx.x % 32 / 4 * (HEAD_DIM / 8) / DECODE_GROUP, q = threadIdx.x % 4;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        uint32_t first =
            find_scales<KIND, HEAD_DIM>(step.value_scales, block, q * 2 + i * 8, group / 2);
        uint32_t second =
            find_scales<KIND, HEAD_DIM>(step.value_scales, block, q * 2 + i * 8 + 1, group / 2);
        uint32_t scales = group % 2 == 0 ? halves_low(first, second) : halves_high(first, second);
        if constexpr (KIND == DECODE_FP8) {
            found.factors[i] = bf16x2_multiply(scales, BF16X2_POWER(120 - DECODE_WEIGHT_EXPONENT));
        } else {
            const uint32_t sign = 0x80008000u;
            found.factors[i] = bf16x2_multiply(scales, BF16X2_POWER(133 - DECODE_WEIGHT_EXPONENT));
            found.offsets[i] =
                bf16x2_multiply(scales, BF16X2_POWER(7 - DECODE_WEIGHT_EXPONENT) | sign);
        }
    }
    return found;
}

/* Of one block: the fragments c, 2 * pair and the next of Vᵀ. */
template <int KIND, int HEAD_DIM>
static __device__ __forceinline__ void value_fragments(
    const struct decode_step<KIND, HEAD_DIM> &step, int block, int c, int pair,
    const struct value_scales &scales, uint32_t (&a)[2][4])
{
    if constexpr (KIND == DECODE_BF16) {
        const uint32_t(&values)[4][HEAD_DIM / 64][4] = step.values[block];
#pragma unroll
        for (int i = 0; i < 2; i++) {
            int t = 2 * pair + i;
            a[i][0] = halves_low(values[0][c][t], values[1][c][t]);
            a[i][1] = halves_high(values[0][c][t], values[1][c][t]);
            a[i][2] = halves_low(values[2][c][t], values[3][c][t]);
            a[i][3] = halves_high(values[2][c][t], values[3][c][t]);
        }
    } else {
        const uint32_t(&values)[4][HEAD_DIM / 32] = step.values[block];
        int word = 2 * c + pair;
#pragma unroll
        for (int i = 0; i < 2; i++) {
#pragma unroll
            for (int rows = 0; rows < 2; rows++) {
                uint32_t first = values[2 * rows][word], second = values[2 * rows + 1][word];
                uint32_t codes = i == 0 ? halves_low(first, second) : halves_high(first, second);
                split_codes<KIND == DECODE_FP8>(codes, a[i][2 * rows], a[i][2 * rows + 1]);
#pragma unroll
                for (int j = 2 * rows; j < 2 * rows + 2; j++) {
                    a[i][j] = KIND == DECODE_FP8
                                  ? bf16x2_multiply(a[i][j], scales.factors[rows])
                                  : bf16x2_fma(a[i][j], scales.factors[rows], scales.offsets[rows]);
                }
            }
        }
    }
}

/* accum += Vᵀ · Pᵀ of one block */
template <int KIND, int N_TILES, int HEAD_DIM>
static __device__ __forceinline__ void multiply_values(
    const float (&weights)[N_TILES][4], const struct decode_step<KIND, HEAD_DIM> &step, int block,
    struct decode_state<N_TILES, HEAD_DIM> &state)
{
    uint32_t b[N_TILES][2];
    struct value_scales scales = {};
#pragma unroll
    for (int n = 0; n < N_TILES; n++) {
        b[n][0] = matrix_transpose(bf16x2_round(weights[n][0], weights[n][1]));
        b[n][1] = matrix_transpose(bf16x2_round(weights[n][2], weights[n][3]));
    }
    if constexpr (KIND != DECODE_BF16) {
        scales = find_value_scales(step, block);
    }
#pragma unroll
    for (int c = 0; c < HEAD_DIM / 64; c++) {
#pragma unroll
        for (int pair = 0; pair < 2; pair++) {
            uint32_t a[2][4];
            value_fragments(step, block, c, pair, scales, a);
#pragma unroll
            for (int i = 0; i < 2; i++) {
#pragma unroll
                for (int n = 0; n < N_TILES; n++) {
                    matrix_multiply_add(state.accum[c][2 * pair + i][n], a[i], b[n][0], b[n][1]);
                }
            }
        }
    }
}

#endif
