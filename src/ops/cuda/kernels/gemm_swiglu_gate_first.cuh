/* SPDX-License-Identifier: Apache-2.0 */
/* The fused gate and up GEMM in the order of arXiv 2607.02521, Kernel-1: a consumer warpgroup first
 * goes through all of k for its tile of gate, then through all of k again for that of up. Between
 * the two it computes Swish on the gate accumulators, in registers, while the tensor cores belong
 * to the other consumer and the copy engine brings the first k-blocks of up:
 *
 *   consumer 0    | gate 0 | swish | wait | up 0   | store |  wait  | gate 2 | swish ...
 *   consumer 1    |  wait  | gate 1       | swish | wait   | up 1   | store  | wait  | gate 3 ...
 *   tensor cores  | gate 0 | gate 1       | up 0           | up 1   | gate 2         | gate 3 ...
 *   copy engine     ... in the same order, as many stages ahead as there are
 *
 * The price beside the kernel that takes gate and up together (gemm_tile.cuh): rows of A are read
 * twice for a tile, and a k-block has half the products. Gate and up of a tile stay in registers,
 * 192 fp32 of the 232 that a thread has at most. Weights come through a tensor map each, so any
 * layout of the two will do. A CTA with a tile left over runs its two passes without the other
 * consumer, and its Swish is not hidden.
 *
 * Shared memory and barriers: as in gemm_tile.cuh, with rows of gate or of up as the B block.
 */
#ifndef IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_GATE_FIRST_CUH
#define IMBREX_OPS_CUDA_KERNELS_GEMM_SWIGLU_GATE_FIRST_CUH

#include "ops/cuda/kernels/gate_first_trace.h"
#include "ops/cuda/kernels/gemm_tile.cuh"

/* What becomes of Swish. All but the first exist to measure what it costs:
 *   hidden      computed after the turn has passed to the other consumer, while loads go on
 *   serialised  computed while nothing else goes on: the turn is kept until the products are there
 *               and Swish is done, and nothing of the next pass is asked for before
 *   removed     not computed; results are gate * up
 *   held        not computed either, but turn and loads are held until the products are there */
enum gate_first_swish { hidden, serialised, removed, held };

/* Threads of one consumer alone; behind the barriers of turns. */
enum { BARRIER_GROUP = BARRIER_TURN + 2 };

/* Whether a pass over gate ends before anything of the next begins. Then a barrier stands behind the
 * others: 8 bytes of those that the first stage's alignment leaves over. */
template <int SWISH> __device__ __forceinline__ constexpr bool ends_pass(void)
{
    return SWISH == serialised || SWISH == held;
}

/* Notes that a stage begins, by one thread of the warpgroup. */
template <bool TRACED>
__device__ __forceinline__ void trace_stage(const struct gate_first_trace *trace,
                                            uint32_t &num_events, uint32_t stage, int block)
{
    if constexpr (TRACED) {
        if (threadIdx.x % THREADS_OF_GROUP == 0 && num_events < trace->max_events) {
            const size_t track = blockIdx.x * GATE_FIRST_TRACKS + threadIdx.x / THREADS_OF_GROUP;
            struct gate_first_event event;
            event.clock = sm_clock();
            event.stage = stage;
            event.block = block;
            trace->events[track * trace->max_events + num_events] = event;
        }
        num_events++;
    }
}

template <bool TRACED>
__device__ __forceinline__ void trace_begin(const struct gate_first_trace *trace)
{
    if constexpr (TRACED) {
        if (threadIdx.x % THREADS_OF_GROUP == 0) {
            struct gate_first_track *track =
                &trace->tracks[blockIdx.x * GATE_FIRST_TRACKS + threadIdx.x / THREADS_OF_GROUP];
            track->sm = sm_number();
            track->begin_ns = device_time_ns();
            track->begin_clock = sm_clock();
        }
    }
}

template <bool TRACED>
__device__ __forceinline__ void trace_end(const struct gate_first_trace *trace, uint32_t num_events)
{
    if constexpr (TRACED) {
        if (threadIdx.x % THREADS_OF_GROUP == 0) {
            struct gate_first_track *track =
                &trace->tracks[blockIdx.x * GATE_FIRST_TRACKS + threadIdx.x / THREADS_OF_GROUP];
            track->num_events = num_events;
            track->end_ns = device_time_ns();
            track->end_clock = sm_clock();
        }
    }
}

/* Asks for one k-block of gate or of up: this CTA's slice. */
__device__ __forceinline__ void load_half(const struct gemm_tile_params &p, const CUtensorMap *map,
                                          uint32_t block, uint32_t barrier, int k, int piece,
                                          const struct cluster_share &share)
{
    const uint32_t rows = block + share.first_piece * 8 * ROW_BYTES;
    const int row = (piece + share.first_piece) * 8;
    if (p.cluster_m > 1)
        tensor_load_2d_multicast(rows, map, barrier, k, row, share.b_mask);
    else
        tensor_load_2d(rows, map, barrier, k, row);
}

/* Brings the k-blocks of all passes in the order in which the consumers take turns. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int SWISH, bool TRACED>
__device__ __forceinline__ void produce_gate_first(const struct gemm_tile_params &p,
                                                   const struct gate_first_trace *trace,
                                                   const struct cta_place &place)
{
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N / 2 * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const struct cluster_share share = share_of<BLOCK_M, BLOCK_N>(p, place.rank_m, place.rank_n);
    const uint32_t bytes = A_BYTES + p.cluster_m * share.slice * 8 * ROW_BYTES;
    const uint32_t stages = place.stages;
    const int num_blocks = p.num_blocks_m * p.num_blocks_n;
    uint32_t num_events = 0;
    uint32_t pass_parity = 0;
    int k_block = 0;

    trace_begin<TRACED>(trace);
    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_load_gate, place.first_block);
    /* Weights need not wait for the previous grid to end. */
    if (p.weights_settled != 0 && place.first_block < num_blocks) {
        const tile_position tile =
            tile_at<BLOCK_N>(p, place.first_block, place.rank_m, place.rank_n);
        const int early = min(min(NUM_STAGES, p.num_early), p.num_k_blocks);
#pragma unroll 1
        for (; k_block < early; k_block++) {
            const uint32_t barrier = stages + FULL + 8 * k_block;
            mbarrier_expect_bytes(barrier, bytes);
            load_half(p, &p.b, stages + k_block * STAGE_BYTES + A_BYTES, barrier,
                      k_block * GEMM_TILE_BLOCK_K, tile.piece, share);
        }
        grid_wait_for_previous();
#pragma unroll 1
        for (int i = 0; i < early; i++)
            load_a(p, stages + i * STAGE_BYTES, stages + FULL + 8 * i, i * GEMM_TILE_BLOCK_K,
                   tile.m * BLOCK_M + share.a_first, share.a_first, share.a_mask);
    } else {
        grid_wait_for_previous();
    }

    uint32_t stage = k_block % NUM_STAGES;
    uint32_t parity = 1 ^ k_block / NUM_STAGES;
    for (int block = place.first_block; block < num_blocks; block += 2 * place.block_step) {
        const bool is_alone = block + place.block_step >= num_blocks;
#pragma unroll 1
        for (int pass = is_alone ? 1 : 0; pass < 4; pass += is_alone ? 2 : 1) {
            /* Gate of both tiles, then up of both; of one that is left over, passes 1 and 3. */
            const bool is_up = pass >= 2;
            const int own = block + (!is_alone && pass % 2 == 1 ? place.block_step : 0);
            const tile_position tile = tile_at<BLOCK_N>(p, own, place.rank_m, place.rank_n);
            const CUtensorMap *map = is_up ? &p.up : &p.b;
            if (TRACED && (is_up || own != place.first_block))
                trace_stage<TRACED>(trace, num_events,
                                    is_up ? GATE_FIRST_STAGE_load_up : GATE_FIRST_STAGE_load_gate,
                                    own);
#pragma unroll 1
            for (; k_block < p.num_k_blocks; k_block++) {
                const uint32_t barrier = stages + FULL + 8 * stage;
                const uint32_t a = stages + stage * STAGE_BYTES;
                mbarrier_wait(barrier + 8 * NUM_STAGES, parity);
                mbarrier_expect_bytes(barrier, bytes);
                load_a(p, a, barrier, k_block * GEMM_TILE_BLOCK_K, tile.m * BLOCK_M + share.a_first,
                       share.a_first, share.a_mask);
                load_half(p, map, a + A_BYTES, barrier, k_block * GEMM_TILE_BLOCK_K, tile.piece,
                          share);
                if (++stage == NUM_STAGES) {
                    stage = 0;
                    parity ^= 1;
                }
            }
            k_block = 0;
            if (ends_pass<SWISH>() && !is_up) {
                mbarrier_wait(stages + FULL + 16 * NUM_STAGES, pass_parity);
                pass_parity ^= 1;
            }
        }
    }
    trace_end<TRACED>(trace, num_events);
}

__device__ __forceinline__ void take_turn(const struct consumer &self)
{
    named_barrier_wait(BARRIER_TURN + self.group, 2 * THREADS_OF_GROUP);
}

__device__ __forceinline__ void pass_turn(const struct consumer &self)
{
    named_barrier_arrive(BARRIER_TURN + 1 - self.group, 2 * THREADS_OF_GROUP);
}

/* Swish on all gate accumulators, done when the next barrier is reached. `never` is false, which
 * the compiler does not know: it would else move arithmetic behind barriers, to where the result is
 * used, and Swish would delay the products of up instead of being hidden. */
template <int NUM_M, int COLUMNS>
__device__ __forceinline__ void swish_all(float (&gate)[NUM_M][1][COLUMNS / 2], bool never,
                                          uint32_t shared)
{
#pragma unroll
    for (int m = 0; m < NUM_M; m++)
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++)
            gate[m][0][i] = swish(gate[m][0][i]);
    if (never) {
#pragma unroll
        for (int m = 0; m < NUM_M; m++)
#pragma unroll
            for (int i = 0; i < COLUMNS / 2; i += 2)
                shared_store_f32x2(shared + (m * COLUMNS / 2 + i) * 4, gate[m][0][i],
                                   gate[m][0][i + 1]);
    }
}

/* One tile, WIDTH <= BLOCK_N rows of weights wide, half of them gate's: its pass over gate from
 * k-block `position` of all that the CTA computes on, that over up behind the other consumer's over
 * gate. Alone: the other consumer has no tile left, nor a turn to give. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int SWISH, bool TRACED,
          int WIDTH>
__device__ __forceinline__ void compute_gate_first_tile(const struct gemm_tile_params &p,
                                                        const struct gate_first_trace *trace,
                                                        const struct cta_place &place,
                                                        struct consumer &self, uint32_t &num_events,
                                                        int block, bool is_alone, uint32_t position)
{
    constexpr int NUM_M = BLOCK_M / 64;
    constexpr int COLUMNS = WIDTH / 2;
    constexpr int A_BYTES = BLOCK_M * ROW_BYTES;
    constexpr int STAGE_BYTES = A_BYTES + BLOCK_N / 2 * ROW_BYTES;
    constexpr int FULL = NUM_STAGES * STAGE_BYTES + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES;
    const uint32_t stages = place.stages;
    float gate[NUM_M][1][COLUMNS / 2], up[NUM_M][1][COLUMNS / 2];
    uint32_t stage = position % NUM_STAGES;
    uint32_t parity = position / NUM_STAGES & 1;

    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_wait_for_gate, block);
    take_turn(self);
    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_gate, block);
    multiply_blocks<NUM_M, 1, COLUMNS, COLUMNS, A_BYTES, STAGE_BYTES, NUM_STAGES, FULL>(
        p, gate, self, stages, 0, stage, parity);
    if (!ends_pass<SWISH>() && !is_alone)
        pass_turn(self);
    wgmma_wait<0>();
    if (self.tells)
        mbarrier_arrive_cluster(self.peer_empty + 8 * stage);

    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_swish, block);
    if (SWISH == hidden || SWISH == serialised)
        swish_all<NUM_M, COLUMNS>(gate, p.num_k_blocks < 0, self.slots);
    if (ends_pass<SWISH>()) {
        named_barrier_wait(BARRIER_GROUP + self.group, THREADS_OF_GROUP);
        if (threadIdx.x % THREADS_OF_GROUP == 0)
            mbarrier_arrive_cluster(cluster_address(stages + FULL + 16 * NUM_STAGES, place.rank));
        if (!is_alone)
            pass_turn(self);
    }

    position += is_alone ? p.num_k_blocks : 2 * p.num_k_blocks;
    stage = position % NUM_STAGES;
    parity = position / NUM_STAGES & 1;
    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_wait_for_up, block);
    if (!is_alone)
        take_turn(self);
    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_up, block);
    multiply_blocks<NUM_M, 1, COLUMNS, COLUMNS, A_BYTES, STAGE_BYTES, NUM_STAGES, FULL>(
        p, up, self, stages, 0, stage, parity);
    const tile_position tile = tile_at<BLOCK_N>(p, block, place.rank_m, place.rank_n);
    if (!is_alone)
        pass_turn(self);
    wgmma_wait<0>();
    if (self.tells)
        mbarrier_arrive_cluster(self.peer_empty + 8 * stage);

    trace_stage<TRACED>(trace, num_events, GATE_FIRST_STAGE_epilogue, block);
    /* Nothing is written before the previous grid has ended. */
    grid_wait_for_previous();
#pragma unroll
    for (int m = 0; m < NUM_M; m++) {
#pragma unroll
        for (int i = 0; i < COLUMNS / 2; i++)
            up[m][0][i] = gate[m][0][i] * up[m][0][i];
        write_chunks<plain, NUM_SLOTS, COLUMNS, 0>(
            p, WIDTH == BLOCK_N ? &p.d_rest : &p.d_rest_narrow, self.slots, self.turn, up[m],
            self.lane, tile.m * BLOCK_M + self.first_row + m * 64, tile.piece * 8);
    }
}

/* All tiles of a consumer warpgroup. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int SWISH, bool TRACED>
__device__ __forceinline__ void consume_gate_first(const struct gemm_tile_params &p,
                                                   const struct gate_first_trace *trace,
                                                   const struct cta_place &place)
{
    constexpr int SLOTS = NUM_STAGES * (BLOCK_M + BLOCK_N / 2) * ROW_BYTES;
    constexpr int EMPTY = SLOTS + 2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES + 8 * NUM_STAGES;
    const int num_blocks = p.num_blocks_m * p.num_blocks_n;
    uint32_t num_events = 0;
    uint32_t round = 0; /* first k-block of what both consumers do next */
    struct consumer self = consumer_of<SLOTS, EMPTY, NUM_SLOTS>(
        p, place.stages, place.group, place.rank, place.rank_m, place.rank_n, 0);

    trace_begin<TRACED>(trace);
    if (place.group == 1)
        named_barrier_arrive(BARRIER_TURN, 2 * THREADS_OF_GROUP);
    for (int block = place.first_block + place.group * place.block_step; block < num_blocks;
         block += 2 * place.block_step) {
        const bool is_alone = place.group == 0 && block + place.block_step >= num_blocks;
        const uint32_t position = round + place.group * p.num_k_blocks;
        if (tile_at<BLOCK_N>(p, block, place.rank_m, place.rank_n).n < p.num_wide)
            compute_gate_first_tile<BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, SWISH, TRACED,
                                    BLOCK_N>(p, trace, place, self, num_events, block, is_alone,
                                             position);
        else
            compute_gate_first_tile<BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, SWISH, TRACED,
                                    BLOCK_N - 16>(p, trace, place, self, num_events, block,
                                                  is_alone, position);
        round += 4 * p.num_k_blocks;
    }
    if (self.lane == 0)
        tensor_store_wait_read<0>();
    trace_end<TRACED>(trace, num_events);
}

/* The kernel. trace: of traced kernels, else NULL. */
template <int BLOCK_M, int BLOCK_N, int NUM_STAGES, int NUM_SLOTS, int SWISH, bool TRACED>
__device__ __forceinline__ void gate_first_gemm(const struct gemm_tile_params &p,
                                                const struct gate_first_trace *trace)
{
    constexpr int HALF = BLOCK_N / 2;
    static_assert(BLOCK_N % 16 == 0 && HALF <= 192, "gate and up in columns of wgmma");
    static_assert(BLOCK_M % 64 == 0, "rows of wgmma");
    static_assert(BLOCK_M * BLOCK_N / THREADS_OF_GROUP <= 192,
                  "accumulators and addresses share 232 registers");
    static_assert(GEMM_TILE_SHARED_BYTES(BLOCK_M, HALF, NUM_STAGES, NUM_SLOTS) <=
                      GEMM_TILE_SHARED_LIMIT,
                  "shared memory of a CTA");
    if (ends_pass<SWISH>() && threadIdx.x == 0) {
        extern __shared__ unsigned char shared[];
        const uint32_t stages =
            (shared_address(shared) + SWIZZLE_ATOM_BYTES - 1) & ~(SWIZZLE_ATOM_BYTES - 1);
        mbarrier_init(stages + NUM_STAGES * (BLOCK_M + HALF) * ROW_BYTES +
                          2 * NUM_SLOTS * GEMM_TILE_SLOT_BYTES + 16 * NUM_STAGES,
                      1);
    }
    const struct cta_place place = begin_cta<BLOCK_M, HALF, NUM_STAGES, NUM_SLOTS, 1>(p);

    if (place.group == PRODUCER_GROUP) {
        registers_shrink<40>();
        if (threadIdx.x == PRODUCER_GROUP * THREADS_OF_GROUP)
            produce_gate_first<BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, SWISH, TRACED>(p, trace,
                                                                                       place);
    } else {
        registers_grow<232>();
        consume_gate_first<BLOCK_M, BLOCK_N, NUM_STAGES, NUM_SLOTS, SWISH, TRACED>(p, trace, place);
    }
    /* No CTA ends while another may still write into its shared memory. */
    if (place.cluster > 1)
        cluster_sync();
}

#endif
