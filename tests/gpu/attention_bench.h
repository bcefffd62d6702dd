/* SPDX-License-Identifier: Apache-2.0 */
/* The part of check_gpu_attention.c that measures: included there, behind what it uses. */
#ifndef IMBREX_TESTS_GPU_ATTENTION_BENCH_H
#define IMBREX_TESTS_GPU_ATTENTION_BENCH_H

#define BENCH_BYTES (256.0 * 1024 * 1024)
#define BENCH_REPLAYS 15

static int compare_floats(const void *a, const void *b)
{
    float left = *(const float *)a, right = *(const float *)b;
    return (left > right) - (left < right);
}

/* Ends the capture on the stream. Median microseconds of what was captured. */
static double time_captured(void)
{
    CUgraph graph;
    CUgraphExec exec;
    CUevent begin, end;
    float times[BENCH_REPLAYS];
    require(GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) &&
                GPU_CALL(&gpu, graph_instantiate, &exec, graph, 0) &&
                GPU_CALL(&gpu, event_create, &begin, 0) && GPU_CALL(&gpu, event_create, &end, 0),
            "graph");
    for (int i = -2; i < BENCH_REPLAYS; i++) {
        float milliseconds = 0.0f;
        require(GPU_CALL(&gpu, event_record, begin, gpu.stream) &&
                    GPU_CALL(&gpu, graph_launch, exec, gpu.stream) &&
                    GPU_CALL(&gpu, event_record, end, gpu.stream) &&
                    GPU_CALL(&gpu, event_synchronize, end) &&
                    GPU_CALL(&gpu, event_elapsed_time, &milliseconds, begin, end),
                "replay");
        times[i < 0 ? 0 : i] = milliseconds;
    }
    qsort(times, BENCH_REPLAYS, sizeof(times[0]), compare_floats);
    (void)gpu.graph_exec_destroy(exec);
    (void)gpu.graph_destroy(graph);
    (void)gpu.event_destroy(begin);
    (void)gpu.event_destroy(end);
    return (double)times[BENCH_REPLAYS / 2] * 1e3;
}

static void begin_capture(void)
{
    require(GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_RELAXED),
            "capture");
}

/* Microseconds a call, of graphs of one call a layer. */
static double time_calls(struct bed *bed, attend_fn *attend, struct attend_params params,
                         int32_t num_calls)
{
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream), "the work before");
    params.layer_idx = 0;
    require(call(bed, attend, &params), "call"); /* loads the kernels */
    begin_capture();
    backend_begin(bed->backend, gpu.stream);
    for (int32_t i = 0; i < num_calls; i++) {
        params.layer_idx = i % params.kv.num_layers;
        attend((struct backend_cuda *)(void *)bed->backend, &params);
    }
    require(backend_end(bed->backend) == IMBREX_STATUS_OK, "launches");
    return time_captured() / num_calls;
}

/* Every sequence with num_keys keys, of which the last num_queries are the step's; as many layers
 * as it takes to read past the L2 cache. Random elements of bf16 are also codes and scales. */
static void bench(attend_fn *attend, const char *name, const struct shape *shape,
                  enum kv_dtype dtype, int32_t num_seqs, int32_t num_queries, int32_t num_keys)
{
    int32_t blocks_of_seq = (num_keys + BLOCK - 1) / BLOCK, num_blocks = num_seqs * blocks_of_seq;
    size_t layer_bytes = 2 * (size_t)shape->num_kv_heads * BLOCK *
                         kv_dtype_row_bytes(dtype, shape->head_dim); /* of a block */
    double call_bytes = (double)layer_bytes * num_blocks;
    int32_t num_layers =
        (int32_t)fmin(256.0, fmax(num_queries > 1 ? 2.0 : 4.0, BENCH_BYTES / call_bytes));
    struct kv_view kv = {.block_bytes = ((size_t)num_layers * layer_bytes + 4095) / 4096 * 4096,
                         .dtype = dtype,
                         .num_layers = num_layers,
                         .num_kv_heads = shape->num_kv_heads,
                         .block_size = BLOCK,
                         .head_dim = shape->head_dim};
    size_t pool_bytes = (size_t)num_blocks * kv.block_bytes;
    int32_t num_tokens = num_seqs * num_queries;
    size_t qkv_bytes = (size_t)num_tokens * (size_t)qkv_width(shape) * 2;
    /* One piece of random elements again and again. */
    size_t piece_bytes = 4 << 20;
    uint16_t *piece = zeroed(piece_bytes, 1);
    for (size_t i = 0; i < piece_bytes / 2; i++) {
        piece[i] = random_element(1.0f);
    }
    kv.blocks = (unsigned char *)allocate(pool_bytes);
    CUdeviceptr qkv = allocate(qkv_bytes);
    for (size_t at = 0; at < pool_bytes; at += piece_bytes) {
        size_t left = pool_bytes - at;
        require(copied_to_gpu((CUdeviceptr)kv.blocks + at, piece,
                              left < piece_bytes ? left : piece_bytes),
                "fill");
    }
    for (size_t at = 0; at < qkv_bytes; at += piece_bytes) {
        size_t left = qkv_bytes - at;
        require(copied_to_gpu(qkv + at, piece, left < piece_bytes ? left : piece_bytes), "fill");
    }
    free(piece);
    int32_t *tables = zeroed((size_t)num_blocks, sizeof(int32_t));
    int32_t *query_begin = zeroed((size_t)num_seqs + 1, sizeof(int32_t));
    int32_t *seq_lens = zeroed((size_t)num_seqs, sizeof(int32_t));
    int32_t *positions = zeroed((size_t)num_tokens, sizeof(int32_t));
    for (int32_t i = 0; i < num_blocks; i++) {
        int32_t at = (int32_t)random_below((uint32_t)i + 1);
        tables[i] = tables[at];
        tables[at] = i;
    }
    for (int32_t i = 0; i < num_seqs; i++) {
        query_begin[i + 1] = (i + 1) * num_queries;
        seq_lens[i] = num_keys;
        for (int32_t j = 0; j < num_queries; j++) {
            positions[i * num_queries + j] = num_keys - num_queries + j;
        }
    }
    CUdeviceptr d = allocate((size_t)num_tokens * (size_t)d_width(shape) * 2);
    CUdeviceptr gpu_tables = upload(tables, (size_t)num_blocks * sizeof(int32_t));
    CUdeviceptr gpu_query_begin = upload(query_begin, ((size_t)num_seqs + 1) * sizeof(int32_t));
    CUdeviceptr gpu_seq_lens = upload(seq_lens, (size_t)num_seqs * sizeof(int32_t));
    CUdeviceptr gpu_positions = upload(positions, (size_t)num_tokens * sizeof(int32_t));
    struct bed bed = bed_create(shape, dtype, num_seqs, num_keys, 0);
    struct attend_params params = {
        .qkv = (const void *)qkv,
        .d = (void *)d,
        .kv = kv,
        .block_tables = (const int32_t *)gpu_tables,
        .positions = (const int32_t *)gpu_positions,
        .query_begin = (const int32_t *)gpu_query_begin,
        .seq_lens = (const int32_t *)gpu_seq_lens,
        .num_tokens = num_tokens,
        .num_seqs = num_seqs,
        .num_heads = shape->num_heads,
        .max_blocks = blocks_of_seq,
        .max_query = num_queries,
        .scale = 1.0f / sqrtf((float)shape->head_dim),
    };
    double us = time_calls(&bed, attend, params, num_queries > 1 ? 2 : num_layers);
    double bytes = (double)num_seqs * num_keys * (double)layer_bytes / BLOCK;
    double pairs = (double)num_seqs * num_queries * (num_keys - (num_queries - 1) * 0.5);
    double flops = 4.0 * shape->head_dim * shape->num_heads * pairs;
    printf("%-7s %-4s %2d/%d x %3d, %3d x %5d of %6d: %9.2f us, floor %8.2f (%5.1f %%), %6.1f "
           "TFLOP/s\n",
           name, kv_dtype_name(dtype), (int)shape->num_heads, (int)shape->num_kv_heads,
           (int)shape->head_dim, (int)num_seqs, (int)num_queries, (int)num_keys, us, bytes / 4.5e6,
           100.0 * bytes / 4.5e6 / us, flops / us * 1e-6);
    const CUdeviceptr buffers[] = {
        (CUdeviceptr)kv.blocks, qkv, d, gpu_tables, gpu_query_begin, gpu_seq_lens, gpu_positions};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
    free(tables);
    free(query_begin);
    free(seq_lens);
    free(positions);
    bed_destroy(&bed);
}

static const enum kv_dtype bench_dtypes[] = {KV_DTYPE_BF16, KV_DTYPE_INT8, KV_DTYPE_FP8};
#define NUM_BENCH_DTYPES (sizeof(bench_dtypes) / sizeof(bench_dtypes[0]))

static void attend_prompts(struct backend_cuda *cuda, const struct attend_params *params)
{
    cuda_prefill_attend(cuda, params, 2);
}

static void bench_all(void)
{
    static const struct shape shapes[] = {
        {14, 2, 64, 0, 1.0f}, {12, 2, 128, 0, 1.0f}, {16, 2, 128, 0, 1.0f}, {28, 4, 128, 0, 1.0f}};
    static const int32_t decodes[][2] = {{1, 512},  {1, 2048},  {1, 4096}, {1, 32768}, {8, 512},
                                         {8, 4096}, {8, 32768}, {32, 512}, {128, 512}};
    static const int32_t prompts[][2] = {{2048, 2048}, {512, 4608}, {2048, 32768}, {16384, 16384}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        bench(cuda_tensor_attend, "tensor", &shapes[i], KV_DTYPE_BF16, 1, 1, 512);
        bench(cuda_tensor_attend, "tensor", &shapes[i], KV_DTYPE_BF16, 1, 2048, 2048);
    }
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]) * NUM_BENCH_DTYPES; i++) {
        const struct shape *shape = &shapes[i / NUM_BENCH_DTYPES];
        enum kv_dtype dtype = bench_dtypes[i % NUM_BENCH_DTYPES];
        for (size_t j = 0; j < sizeof(prompts) / sizeof(prompts[0]); j++) {
            bench(attend_prompts, "prefill", shape, dtype, 1, prompts[j][0], prompts[j][1]);
        }
        for (size_t j = 0; j < sizeof(decodes) / sizeof(decodes[0]); j++) {
            bench(cuda_decode_attend, "decode", shape, dtype, decodes[j][0], 1, decodes[j][1]);
        }
    }
}

/* ---- attention in a step ---- */

struct step_shape {
    const char *name;
    int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim, num_layers;
};

/* All layers of a model, and of a step what its calls need. */
struct step_memory {
    CUdeviceptr weights, blocks, floats, hidden, normed, qkv, attention, mlp, cos_sin, scratch;
    CUdeviceptr positions, slots, tables, query_begin, seq_lens;
    size_t scratch_bytes;
};

/* Elements of a row of q, of k and of a layer's matrices. */
struct step_widths {
    size_t hidden, q, k, inner, layer;
};

static struct step_widths widths_of(const struct step_shape *shape)
{
    struct step_widths widths = {.hidden = (size_t)shape->hidden_size,
                                 .q = (size_t)(shape->num_heads * shape->head_dim),
                                 .k = (size_t)(shape->num_kv_heads * shape->head_dim),
                                 .inner = (size_t)shape->intermediate_size};
    widths.layer = widths.hidden * (2 * widths.q + 2 * widths.k + 3 * widths.inner);
    return widths;
}

static void run_layer(struct backend *backend, const struct step_shape *shape,
                      const struct step_memory *memory, const struct kv_view *kv, int32_t layer_idx,
                      int32_t num_seqs, int32_t max_blocks)
{
    struct step_widths widths = widths_of(shape);
    const uint16_t *q = (const uint16_t *)memory->weights + (size_t)layer_idx * widths.layer;
    const uint16_t *o = q + widths.hidden * (widths.q + 2 * widths.k);
    const uint16_t *gate = o + widths.hidden * widths.q;
    const uint16_t *down = gate + 2 * widths.inner * widths.hidden;
    const float *norm_weight = (const float *)memory->floats;
    const float *biases = norm_weight + widths.hidden;
    struct norm_params norm = {norm_weight, 1e-6f};
    backend_qkv(backend, &(struct qkv_params){
                             .hidden = (const float *)memory->hidden,
                             .norm = norm,
                             .q_proj = {q, DTYPE_BF16},
                             .k_proj = {q + widths.hidden * widths.q, DTYPE_BF16},
                             .v_proj = {q + widths.hidden * (widths.q + widths.k), DTYPE_BF16},
                             .q_bias = biases,
                             .k_bias = biases + widths.q,
                             .v_bias = biases + widths.q + widths.k,
                             .cos_sin = (const float *)memory->cos_sin,
                             .positions = (const int32_t *)memory->positions,
                             .slot_mapping = (const int32_t *)memory->slots,
                             .kv = *kv,
                             .normed = (void *)memory->normed,
                             .qkv = (void *)memory->qkv,
                             .layer_idx = layer_idx,
                             .num_tokens = num_seqs,
                             .hidden_size = shape->hidden_size,
                             .num_heads = shape->num_heads});
    backend_attend(backend,
                   &(struct attend_params){
                       .qkv = (const void *)memory->qkv,
                       .d = (void *)memory->attention,
                       .kv = *kv,
                       .block_tables = (const int32_t *)memory->tables,
                       .seq_idx = (const int32_t *)memory->query_begin, /* one token each */
                       .positions = (const int32_t *)memory->positions,
                       .query_begin = (const int32_t *)memory->query_begin,
                       .seq_lens = (const int32_t *)memory->seq_lens,
                       .layer_idx = layer_idx,
                       .num_tokens = num_seqs,
                       .num_seqs = num_seqs,
                       .num_heads = shape->num_heads,
                       .max_blocks = max_blocks,
                       .max_query = 1,
                       .scale = 1.0f / sqrtf((float)shape->head_dim)});
    backend_project(backend, &(struct project_params){.a = (const void *)memory->attention,
                                                      .weight = {o, DTYPE_BF16},
                                                      .hidden = (float *)memory->hidden,
                                                      .num_tokens = num_seqs,
                                                      .in_features = (int32_t)widths.q,
                                                      .hidden_size = shape->hidden_size});
    backend_mlp(backend,
                &(struct mlp_params){.hidden = (const float *)memory->hidden,
                                     .norm = norm,
                                     .gate = {gate, DTYPE_BF16},
                                     .up = {gate + widths.inner * widths.hidden, DTYPE_BF16},
                                     .normed = (void *)memory->normed,
                                     .d = (void *)memory->mlp,
                                     .num_tokens = num_seqs,
                                     .hidden_size = shape->hidden_size,
                                     .intermediate_size = shape->intermediate_size});
    backend_project(backend, &(struct project_params){.a = (const void *)memory->mlp,
                                                      .weight = {down, DTYPE_BF16},
                                                      .hidden = (float *)memory->hidden,
                                                      .num_tokens = num_seqs,
                                                      .in_features = shape->intermediate_size,
                                                      .hidden_size = shape->hidden_size});
}

/* Microseconds of all layers of a step in which each sequence has num_keys keys. */
static double time_layers(struct backend *backend, const struct step_shape *shape,
                          const struct step_memory *memory, const struct kv_view *kv,
                          int32_t num_seqs, int32_t max_blocks, int32_t num_keys)
{
    size_t ints_bytes = (size_t)num_seqs * sizeof(int32_t);
    int32_t *seq_lens = zeroed((size_t)num_seqs, sizeof(int32_t));
    int32_t *positions = zeroed((size_t)num_seqs, sizeof(int32_t));
    int32_t *slots = zeroed((size_t)num_seqs, sizeof(int32_t));
    for (int32_t i = 0; i < num_seqs; i++) {
        seq_lens[i] = num_keys;
        positions[i] = num_keys - 1;
        slots[i] = i * max_blocks * BLOCK + num_keys - 1;
    }
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                copied_to_gpu(memory->seq_lens, seq_lens, ints_bytes) &&
                copied_to_gpu(memory->positions, positions, ints_bytes) &&
                copied_to_gpu(memory->slots, slots, ints_bytes),
            "copy to the GPU");
    free(seq_lens);
    free(positions);
    free(slots);
    backend_begin(backend, gpu.stream);
    run_layer(backend, shape, memory, kv, 0, num_seqs, max_blocks); /* loads the kernels */
    require(backend_end(backend) == IMBREX_STATUS_OK, "launches");
    begin_capture();
    backend_begin(backend, gpu.stream);
    for (int32_t i = 0; i < shape->num_layers; i++) {
        run_layer(backend, shape, memory, kv, i, num_seqs, max_blocks);
    }
    require(backend_end(backend) == IMBREX_STATUS_OK, "launches");
    return time_captured();
}

static CUdeviceptr filled_with(size_t num_bytes, unsigned char byte)
{
    CUdeviceptr memory = allocate(num_bytes);
    require(GPU_CALL(&gpu, memset_d8_async, memory, byte, num_bytes, gpu.stream), "fill");
    return memory;
}

static CUdeviceptr filled_random(size_t num_bytes, float scale, uint32_t seed)
{
    CUdeviceptr memory = allocate(num_bytes);
    uint64_t num_elements = num_bytes / 2;
    void *arguments[] = {&memory, &num_elements, &scale, &seed};
    require(gpu_launch(&gpu, "bench_fill", 1024, 256, arguments), "fill");
    return memory;
}

/* The layers of a step of sequences of num_keys keys and of 16: what a key costs among the kernels
 * that attention has beside it in a model, over all of the model's layers and blocks, with no
 * prompt to read. Blocks in order, as an engine that has just begun gives them. */
static void bench_step(const struct step_shape *shape, enum kv_dtype dtype, int32_t num_seqs,
                       int32_t num_keys)
{
    struct step_widths widths = widths_of(shape);
    size_t tokens = (size_t)num_seqs, layers = (size_t)shape->num_layers;
    int32_t max_blocks = num_keys / BLOCK;
    struct kv_view kv = {.dtype = dtype,
                         .num_layers = shape->num_layers,
                         .num_kv_heads = shape->num_kv_heads,
                         .block_size = BLOCK,
                         .head_dim = shape->head_dim};
    kv.block_bytes = (kv_view_layer_offset(&kv, shape->num_layers) + 4095) / 4096 * 4096;
    struct backend_shape all = {.hidden_size = shape->hidden_size,
                                .intermediate_size = shape->intermediate_size,
                                .vocab_size = 64,
                                .num_heads = shape->num_heads,
                                .num_kv_heads = shape->num_kv_heads,
                                .head_dim = shape->head_dim,
                                .max_tokens = num_seqs,
                                .max_seqs = num_seqs,
                                .max_logit_rows = 1,
                                .max_samples = 1,
                                .context_size = num_keys,
                                .activation_dtype = DTYPE_BF16,
                                .kv_dtype = dtype};
    int32_t *tables = zeroed(tokens * (size_t)max_blocks, sizeof(int32_t));
    int32_t *query_begin = zeroed(tokens + 1, sizeof(int32_t));
    for (int32_t i = 0; i < num_seqs * max_blocks; i++) {
        tables[i] = i;
    }
    for (int32_t i = 0; i <= num_seqs; i++) {
        query_begin[i] = i;
    }
    struct step_memory memory = {
        .weights = filled_random(layers * widths.layer * 2, 0.02f, 1),
        .blocks = filled_random(tokens * (size_t)max_blocks * kv.block_bytes, 1.0f, 2),
        .floats = filled_with((widths.hidden + widths.q + 2 * widths.k) * sizeof(float), 0x3c),
        .hidden = filled_with(tokens * widths.hidden * sizeof(float), 0x3c),
        .normed = allocate(tokens * widths.hidden * 2),
        .qkv = allocate(tokens * (widths.q + 2 * widths.k) * 2),
        .attention = allocate(tokens * widths.q * 2),
        .mlp = allocate(tokens * widths.inner * 2),
        .cos_sin = filled_with((size_t)num_keys * (size_t)shape->head_dim * sizeof(float), 0x3e),
        .scratch_bytes = backend_cuda_scratch_bytes(&all),
        .positions = allocate(tokens * sizeof(int32_t)),
        .slots = allocate(tokens * sizeof(int32_t)),
        .tables = upload(tables, tokens * (size_t)max_blocks * sizeof(int32_t)),
        .query_begin = upload(query_begin, (tokens + 1) * sizeof(int32_t)),
        .seq_lens = allocate(tokens * sizeof(int32_t)),
    };
    free(tables);
    free(query_begin);
    memory.scratch = filled_with(memory.scratch_bytes, 0);
    kv.blocks = (unsigned char *)memory.blocks;
    struct backend *backend = NULL;
    struct imbrex_error err = {0};
    struct backend_cuda_options options = {.activation_dtype = DTYPE_BF16};
    require(backend_cuda_create_on(device, &options, &all, (void *)memory.scratch,
                                   memory.scratch_bytes, &backend, &err) == IMBREX_STATUS_OK,
            err.message);
    double few_us = time_layers(backend, shape, &memory, &kv, num_seqs, max_blocks, BLOCK);
    double us = time_layers(backend, shape, &memory, &kv, num_seqs, max_blocks, num_keys);
    double bytes = (double)tokens * (num_keys - BLOCK) * 2.0 * (double)layers *
                   (double)shape->num_kv_heads * (double)kv_dtype_row_bytes(dtype, shape->head_dim);
    printf("step %-4s %-4s x%-3d of %5d keys: %8.1f us, of %d keys %8.1f us", shape->name,
           kv_dtype_name(dtype), (int)num_seqs, (int)num_keys, us, BLOCK, few_us);
    if (us > 1.1 * few_us) { /* else the difference is that of two launches */
        printf("; a layer's other keys %6.2f us, %5.3f TB/s", (us - few_us) / (double)layers,
               bytes / (us - few_us) * 1e-6);
    }
    printf("\n");
    backend_destroy(backend);
    const CUdeviceptr buffers[] = {
        memory.weights,   memory.blocks,    memory.floats, memory.hidden,      memory.normed,
        memory.qkv,       memory.attention, memory.mlp,    memory.cos_sin,     memory.scratch,
        memory.positions, memory.slots,     memory.tables, memory.query_begin, memory.seq_lens};
    for (size_t i = 0; i < sizeof(buffers) / sizeof(buffers[0]); i++) {
        (void)gpu.mem_free(buffers[i]);
    }
}

static void bench_steps_all(void)
{
    static const struct step_shape shapes[] = {{"0.5B", 896, 4864, 14, 2, 64, 24},
                                               {"1.5B", 1536, 8960, 12, 2, 128, 28},
                                               {"7B", 3584, 18944, 28, 4, 128, 28}};
    static const int32_t cases[][2] = {{1, 512},  {1, 4096},  {1, 32768}, {8, 512},
                                       {8, 4096}, {8, 32768}, {32, 512},  {128, 512}};
    for (size_t i = 0; i < sizeof(shapes) / sizeof(shapes[0]); i++) {
        for (size_t j = 0; j < sizeof(cases) / sizeof(cases[0]); j++) {
            for (size_t k = 0; k < NUM_BENCH_DTYPES; k++) {
                bench_step(&shapes[i], bench_dtypes[k], cases[j][0], cases[j][1]);
            }
        }
    }
}

#endif
