/* SPDX-License-Identifier: Apache-2.0 */
/* Attention on mma.sync, of single tokens and of any number, on a GPU against an fp64 softmax on
 * the host: sequences of mixed lengths in shuffled blocks, prompts cut anywhere, windows, groups of
 * heads of many sizes. Slots of the cache that hold no key are NaN. With --bench, times per call
 * from graphs of calls that read more than the L2 cache holds; with --bench-steps, of attention
 * among the other kernels of a step. Skipped where there is no GPU. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tests/gpu/gpu_check.h"

#if IMBREX_CUDA
#include "tests/gpu/attention_bed.h"

static const struct sequence mixed[] = {{1, 1},    {37, 37},  {1, 17},    {5, 133}, {1, 512},
                                        {64, 200}, {1, 1000}, {130, 130}, {0, 7},   {1, 16},
                                        {1, 33},   {2, 65},   {1, 128}};

static void check_tensor(size_t shape_step, uint32_t ablations)
{
    static const struct sequence chunks[] = {{300, 300}, {1, 5000}, {257, 2057}, {1, 1}, {1, 64}};
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},  {28, 4, 128, 0, 2.0f},  {12, 2, 128, 0, 1.0f}, {4, 4, 16, 0, 2.0f},
        {5, 1, 48, 0, 1.0f},   {3, 1, 96, 0, 1.0f},    {6, 3, 80, 0, 2.0f},   {2, 1, 112, 0, 1.0f},
        {8, 2, 144, 0, 1.0f},  {2, 2, 192, 0, 1.0f},   {8, 1, 256, 0, 2.0f},  {4, 2, 240, 0, 1.0f},
        {40, 2, 64, 0, 1.0f},  {14, 2, 64, 100, 1.0f}, {8, 1, 128, 17, 1.0f}, {6, 2, 32, 1, 1.0f},
        {4, 1, 256, 40, 1.0f}, {130, 1, 16, 0, 1.0f},  {8, 8, 128, 64, 1.0f},
    };
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_step(cuda_tensor_attend, false, &shapes[i], KV_DTYPE_BF16, mixed,
                   sizeof(mixed) / sizeof(mixed[0]), 1500, ablations, "tensor, mixed");
    }
    for (size_t i = 0; i < 3; i += shape_step) {
        check_step(cuda_tensor_attend, false, &shapes[i], KV_DTYPE_BF16, chunks,
                   sizeof(chunks) / sizeof(chunks[0]), 300, ablations, "tensor, chunks");
    }
}

/* Catches bits that depend on where a prompt was cut. */
static void check_tensor_cuts(uint32_t ablations)
{
    static const struct shape shape = {14, 2, 64, 0, 1.0f};
    static const struct sequence whole = {400, 400};
    struct step *step = step_create(&shape, KV_DTYPE_BF16, &whole, 1, 0, true);
    struct bed bed = bed_create(&shape, KV_DTYPE_BF16, 4, 512, ablations);
    struct attend_params params = params_of(step, 0, 1);

    poison_result(step);
    bool is_same = call(&bed, cuda_tensor_attend, &params);
    download_result(step);
    uint16_t *first = zeroed(step->d_elements, 2);
    memcpy(first, step->d, step->d_elements * 2);
    poison_result(step);
    for (int32_t begin = 0, end; begin < 400 && is_same; begin = end) {
        end = begin + 1 + (int32_t)random_below(90);
        end = end < 400 ? end : 400;
        const int32_t query_begin[] = {begin, end};
        require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                    copied_to_gpu(step->gpu_query_begin, query_begin, sizeof(query_begin)) &&
                    copied_to_gpu(step->gpu_seq_lens, &end, sizeof(end)),
                "copy to the GPU");
        is_same = call(&bed, cuda_tensor_attend, &params);
    }
    download_result(step);
    count(is_same && memcmp(first, step->d, step->d_elements * 2) == 0,
          "tensor: same bits wherever a prompt is cut");
    free(first);
    bed_destroy(&bed);
    step_destroy(step);
}

static void check_decode_of(const struct shape *shape, const struct sequence *seqs,
                            int32_t num_seqs, int32_t num_checked, const char *name)
{
    check_step(cuda_decode_attend, true, shape, KV_DTYPE_BF16, seqs, num_seqs, num_checked, 0,
               name);
}

static void check_decode(size_t shape_step)
{
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f},    {28, 4, 128, 0, 2.0f},   {12, 2, 128, 0, 1.0f},
        {16, 2, 128, 0, 1.0f},   {4, 4, 64, 0, 2.0f},     {9, 1, 128, 0, 1.0f},
        {16, 1, 64, 0, 1.0f},    {24, 1, 128, 0, 1.0f},   {40, 2, 64, 0, 1.0f},
        {14, 2, 64, 100, 1.0f},  {28, 4, 128, 513, 1.0f}, {8, 1, 128, 1, 1.0f},
        {24, 2, 64, 4000, 1.0f},
    };
    struct sequence seqs[MAX_SEQS];
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i += shape_step) {
        check_decode_of(&shapes[i], mixed, sizeof(mixed) / sizeof(mixed[0]), 1500, "decode, mixed");
        static const int32_t edges[] = {1,   15,  16,  17,   31,   32,   33,   255,  256, 257,
                                        511, 512, 513, 1023, 1024, 1025, 2047, 2049, 5000};
        int32_t num_seqs = 0;
        for (size_t j = 0; j < sizeof(edges) / sizeof(edges[0]); j++) {
            seqs[num_seqs++] = (struct sequence){1, edges[j]};
        }
        for (int32_t j = 0; j < 12; j++) {
            seqs[num_seqs++] = (struct sequence){1, 1 + (int32_t)random_below(3000)};
        }
        check_decode_of(&shapes[i], seqs, num_seqs, 300, "decode, lengths");
    }
    if (shape_step > 1) {
        return;
    }
    static const struct sequence far[] = {{1, 40000}, {1, 3}, {1, 17000}};
    check_decode_of(&shapes[0], far, 3, 20, "decode, far");
    check_decode_of(&shapes[1], far, 3, 20, "decode, far");
    for (int32_t j = 0; j < MAX_SEQS; j++) {
        seqs[j] = (struct sequence){1, 1 + (int32_t)random_below(90)};
    }
    check_decode_of(&shapes[1], seqs, MAX_SEQS, 300, "decode, many");
    /* Some of them in parts, of which a cluster has more than it looks at at once. */
    for (int32_t j = 0; j < MAX_SEQS; j += 8) {
        seqs[j] = (struct sequence){1, 1 + (int32_t)random_below(3000)};
    }
    check_decode_of(&shapes[1], seqs, MAX_SEQS, 300, "decode, many parts");
}

#include "attention_bench.h"

static bool has_argument(int argc, char **argv, const char *name)
{
    for (int i = 1; i < argc; i++) {
        if (strcmp(argv[i], name) == 0) {
            return true;
        }
    }
    return false;
}

int main(int argc, char **argv)
{
    int exit_code = 0;
    if (!check_begin(&exit_code)) {
        return exit_code;
    }
    int shape_step = argc > 1 ? atoi(argv[1]) : 0;
    /* The second time as the driver compiles it for other GPUs than Hopper. */
    static const uint32_t ablations[] = {0, IMBREX_ABLATE_HOPPER};
    for (int i = 0; i < 2; i++) {
        check_tensor(shape_step > 0 ? (size_t)shape_step : 1, ablations[i]);
        check_tensor_cuts(ablations[i]);
    }
    check_decode(shape_step > 0 ? (size_t)shape_step : 1);
    if (has_argument(argc, argv, "--bench")) {
        bench_all();
    }
    if (has_argument(argc, argv, "--bench-steps")) {
        bench_steps_all();
    }
    return check_end();
}

#else

int main(void)
{
    return check_absent();
}

#endif
