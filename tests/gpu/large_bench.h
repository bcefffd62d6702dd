/* SPDX-License-Identifier: Apache-2.0 */
/* The part of check_gpu_large.c that measures: included there, behind what it uses. CUDA-graph
 * replays that go through more layers than the L2 cache holds. */
#ifndef IMBREX_TESTS_GPU_LARGE_BENCH_H
#define IMBREX_TESTS_GPU_LARGE_BENCH_H

struct bench_model {
    const char *name;
    int32_t hidden_size, intermediate_size, num_heads, num_kv_heads, head_dim;
};

/* Memory of all matrices of one layer, as often as it takes to leave the L2 cache. */
struct bench_memory {
    CUdeviceptr weights, floats, hidden, normed, qkv, attention, mlp, cache, ints;
    int32_t num_layers;
    int64_t layer_elements;
};

enum bench_part { BENCH_QKV, BENCH_O, BENCH_MLP, BENCH_DOWN, BENCH_NUM_PARTS };

static CUdeviceptr bench_alloc(size_t num_bytes, float scale, uint32_t seed)
{
    CUdeviceptr base = 0;
    uint64_t num_elements = num_bytes / 2;
    void *arguments[] = {&base, &num_elements, &scale, &seed};
    require(GPU_CALL(&gpu, mem_alloc, &base, num_bytes), "memory of the GPU");
    require(gpu_launch(&gpu, "bench_fill", 1024, 256, arguments), "fill");
    return base;
}

static int64_t part_columns(const struct bench_model *model, enum bench_part part)
{
    switch (part) {
    case BENCH_QKV:
        return (model->num_heads + 2 * model->num_kv_heads) * model->head_dim;
    case BENCH_MLP:
        return (int64_t)2 * model->intermediate_size;
    default:
        return model->hidden_size;
    }
}

static int64_t part_depth(const struct bench_model *model, enum bench_part part)
{
    return part == BENCH_O      ? model->num_heads * model->head_dim
           : part == BENCH_DOWN ? model->intermediate_size
                                : model->hidden_size;
}

static struct bench_memory bench_create(const struct bench_model *model, int32_t max_tokens)
{
    struct bench_memory memory = {0};
    for (int part = 0; part < BENCH_NUM_PARTS; part++) {
        memory.layer_elements +=
            part_columns(model, (enum bench_part)part) * part_depth(model, (enum bench_part)part);
    }
    memory.num_layers = (int32_t)(400000000 / (memory.layer_elements * 2)) + 2;
    size_t tokens = (size_t)max_tokens, hidden = (size_t)model->hidden_size;
    size_t kv_bytes = (size_t)model->num_kv_heads * (size_t)model->head_dim * 4;
    memory.weights = bench_alloc((size_t)memory.num_layers * (size_t)memory.layer_elements * 2,
                                 1.0f / sqrtf((float)model->hidden_size), 1);
    /* As fp32 it is normal too: the upper halves are. */
    memory.floats = bench_alloc((size_t)1 << 22, 1.0f, 2);
    memory.hidden = bench_alloc(tokens * hidden * 4, 1.0f, 3);
    memory.normed = bench_alloc(tokens * hidden * 2, 1.0f, 4);
    memory.qkv = bench_alloc(tokens * (size_t)part_columns(model, BENCH_QKV) * 2, 1.0f, 5);
    memory.attention = bench_alloc(tokens * (size_t)part_depth(model, BENCH_O) * 2, 1.0f, 6);
    memory.mlp = bench_alloc(tokens * (size_t)model->intermediate_size * 2, 1.0f, 7);
    memory.cache = bench_alloc(tokens * kv_bytes, 1.0f, 8);
    memory.ints = bench_alloc(tokens * 4, 1.0f, 9);
    int32_t *ints = malloc(tokens * 4);
    require(ints != NULL, "memory");
    for (int32_t i = 0; i < max_tokens; i++) {
        ints[i] = i;
    }
    require(GPU_CALL(&gpu, stream_synchronize, gpu.stream) &&
                GPU_CALL(&gpu, memcpy_htod, memory.ints, ints, tokens * 4),
            "positions");
    free(ints);
    return memory;
}

static void bench_destroy(struct bench_memory *memory)
{
    const CUdeviceptr all[] = {memory->weights, memory->floats, memory->hidden,
                               memory->normed,  memory->qkv,    memory->attention,
                               memory->mlp,     memory->cache,  memory->ints};
    for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
        (void)gpu.mem_free(all[i]);
    }
}

static const uint16_t *bench_weight(const struct bench_model *model,
                                    const struct bench_memory *memory, int32_t layer_idx,
                                    enum bench_part part)
{
    const uint16_t *weight =
        (const uint16_t *)memory->weights + (int64_t)layer_idx * memory->layer_elements;
    for (int before = 0; before < (int)part; before++) {
        weight += part_columns(model, (enum bench_part)before) *
                  part_depth(model, (enum bench_part)before);
    }
    return weight;
}

static struct qkv_params bench_qkv(const struct bench_model *model,
                                   const struct bench_memory *memory, int32_t layer_idx,
                                   int32_t num_tokens)
{
    const float *floats = (const float *)memory->floats;
    size_t kv_width = (size_t)model->num_kv_heads * (size_t)model->head_dim;
    return (struct qkv_params){
        .hidden = (const float *)memory->hidden,
        .norm = {floats, 1e-6f},
        .q_proj = {bench_weight(model, memory, layer_idx, BENCH_QKV), DTYPE_BF16},
        .q_bias = floats,
        .cos_sin = (const float *)memory->weights,
        .positions = (const int32_t *)memory->ints,
        .slot_mapping = (const int32_t *)memory->ints,
        .kv = {.blocks = (unsigned char *)memory->cache,
               .block_bytes = kv_width * CASE_BLOCK_SIZE * 4,
               .dtype = KV_DTYPE_BF16,
               .num_layers = 1,
               .num_kv_heads = model->num_kv_heads,
               .block_size = CASE_BLOCK_SIZE,
               .head_dim = model->head_dim},
        .normed = (void *)memory->normed,
        .qkv = (void *)memory->qkv,
        .num_tokens = num_tokens,
        .hidden_size = model->hidden_size,
        .num_heads = model->num_heads};
}

static struct project_params bench_project(const struct bench_model *model,
                                           const struct bench_memory *memory, int32_t layer_idx,
                                           enum bench_part part, int32_t num_tokens)
{
    return (struct project_params){
        .a = (const void *)(part == BENCH_O ? memory->attention : memory->mlp),
        .weight = {bench_weight(model, memory, layer_idx, part), DTYPE_BF16},
        .hidden = (float *)memory->hidden,
        .num_tokens = num_tokens,
        .in_features = (int32_t)part_depth(model, part),
        .hidden_size = model->hidden_size};
}

static void bench_part(struct backend_cuda *cuda, const struct bench_model *model,
                       const struct bench_memory *memory, int32_t layer_idx, enum bench_part part,
                       int32_t num_tokens)
{
    if (part == BENCH_QKV) {
        struct qkv_params params = bench_qkv(model, memory, layer_idx, num_tokens);
        cuda_large_qkv(cuda, &params);
    } else if (part == BENCH_MLP) {
        const uint16_t *gate = bench_weight(model, memory, layer_idx, part);
        int64_t gate_elements = (int64_t)model->intermediate_size * model->hidden_size;
        cuda_large_mlp(cuda, &(struct mlp_params){.hidden = (const float *)memory->hidden,
                                                  .norm = {(const float *)memory->floats, 1e-6f},
                                                  .gate = {gate, DTYPE_BF16},
                                                  .up = {gate + gate_elements, DTYPE_BF16},
                                                  .normed = (void *)memory->normed,
                                                  .d = (void *)memory->mlp,
                                                  .num_tokens = num_tokens,
                                                  .hidden_size = model->hidden_size,
                                                  .intermediate_size = model->intermediate_size});
    } else {
        struct project_params params = bench_project(model, memory, layer_idx, part, num_tokens);
        cuda_large_project(cuda, &params);
    }
}

/* The product alone, in bf16. */
static void bench_twin(const struct bench_model *model, const struct bench_memory *memory,
                       int32_t layer_idx, enum bench_part part, int32_t num_tokens)
{
    const uint16_t *weight = bench_weight(model, memory, layer_idx, part);
    enum imbrex_status status;
    if (part == BENCH_MLP) {
        struct imbrex_gemm_swiglu_params params = {
            .a = (const void *)memory->normed,
            .gate = weight,
            .up = weight + (int64_t)model->intermediate_size * model->hidden_size,
            .d = (void *)memory->mlp,
            .num_tokens = num_tokens,
            .hidden_size = model->hidden_size,
            .intermediate_size = model->intermediate_size,
            .weights_settled = true};
        status = imbrex_gemm_swiglu(device, &params, NULL, gpu.stream, NULL);
    } else {
        struct imbrex_gemm_params params = {
            .a = (const void *)(part == BENCH_O      ? memory->attention
                                : part == BENCH_DOWN ? memory->mlp
                                                     : memory->normed),
            .b = weight,
            .d = (void *)(part == BENCH_QKV ? memory->qkv : memory->normed),
            .num_tokens = num_tokens,
            .in_features = (int32_t)part_depth(model, part),
            .out_features = (int32_t)part_columns(model, part),
            .weights_settled = true};
        status = imbrex_gemm(device, &params, NULL, gpu.stream, NULL);
    }
    require(status == IMBREX_STATUS_OK, "twin");
}

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return x < y ? -1 : x > y;
}

/* What is timed: launches everything of one repetition on the stream. */
typedef void bench_launch_fn(struct backend_cuda *cuda, const void *what, int32_t layer_idx);

/* Microseconds of one repetition: median of graph replays that go through the layers. */
static double bench_us(bench_launch_fn *launch, const void *what, int32_t num_layers,
                       double expected_us, double replay_us)
{
    enum { REPLAYS = 7 };
    CUgraph graph = NULL;
    CUgraphExec replay = NULL;
    CUevent events[2];
    double times[REPLAYS];
    int repetitions = (int)(replay_us / expected_us) + 1;
    repetitions = repetitions < num_layers ? num_layers : repetitions;
    repetitions = repetitions > 200 ? 200 : repetitions;

    struct backend_cuda *cuda = backend_create(false, 0);
    bool is_ok = GPU_CALL(&gpu, event_create, &events[0], 0) &&
                 GPU_CALL(&gpu, event_create, &events[1], 0) &&
                 GPU_CALL(&gpu, stream_begin_capture, gpu.stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    for (int i = 0; is_ok && i < repetitions; i++) {
        launch(cuda, what, i % num_layers);
    }
    is_ok = is_ok && GPU_CALL(&gpu, stream_end_capture, gpu.stream, &graph) &&
            GPU_CALL(&gpu, graph_instantiate, &replay, graph, 0);
    backend_finish(cuda, "bench");
    for (int i = -1; is_ok && i < REPLAYS; i++) {
        float ms = 0.0f;
        is_ok = GPU_CALL(&gpu, event_record, events[0], gpu.stream) &&
                GPU_CALL(&gpu, graph_launch, replay, gpu.stream) &&
                GPU_CALL(&gpu, event_record, events[1], gpu.stream) &&
                GPU_CALL(&gpu, event_synchronize, events[1]) &&
                GPU_CALL(&gpu, event_elapsed_time, &ms, events[0], events[1]);
        if (i >= 0) {
            times[i] = (double)ms * 1e3 / repetitions;
        }
    }
    require(is_ok, "bench");
    (void)gpu.graph_exec_destroy(replay);
    (void)gpu.graph_destroy(graph);
    (void)gpu.event_destroy(events[0]);
    (void)gpu.event_destroy(events[1]);
    qsort(times, REPLAYS, sizeof(times[0]), compare_doubles);
    return times[REPLAYS / 2];
}

struct bench_cell {
    const struct bench_model *model;
    const struct bench_memory *memory;
    int32_t num_tokens;
    enum bench_part part; /* BENCH_NUM_PARTS: all */
    bool is_twin;
    const struct residual_plan *plan; /* of bench_plan */
    const struct qkv_plan *qkv_plan;  /* of bench_qkv_plan */
};

static void bench_parts(struct backend_cuda *cuda, const void *what, int32_t layer_idx)
{
    const struct bench_cell *cell = what;
    for (int part = 0; part < BENCH_NUM_PARTS; part++) {
        if (part != (int)cell->part && cell->part != BENCH_NUM_PARTS) {
            continue;
        }
        if (cell->is_twin) {
            bench_twin(cell->model, cell->memory, layer_idx, (enum bench_part)part,
                       cell->num_tokens);
        } else {
            bench_part(cuda, cell->model, cell->memory, layer_idx, (enum bench_part)part,
                       cell->num_tokens);
        }
    }
}

static void bench_norm(struct backend_cuda *cuda, const void *what, int32_t layer_idx)
{
    const struct bench_cell *cell = what;
    struct qkv_params qkv = bench_qkv(cell->model, cell->memory, layer_idx, cell->num_tokens);
    cuda_rmsnorm(cuda, qkv.hidden, NULL, &qkv.norm, qkv.normed, qkv.num_tokens, qkv.hidden_size);
}

static void bench_rope(struct backend_cuda *cuda, const void *what, int32_t layer_idx)
{
    const struct bench_cell *cell = what;
    struct qkv_params qkv = bench_qkv(cell->model, cell->memory, layer_idx, cell->num_tokens);
    cuda_rope_kv(cuda, &qkv);
}

static void bench_plan(struct backend_cuda *cuda, const void *what, int32_t layer_idx)
{
    const struct bench_cell *cell = what;
    struct project_params project =
        bench_project(cell->model, cell->memory, layer_idx, cell->part, cell->num_tokens);
    cuda_gemm_residual(cuda,
                       &(struct residual_product){.a = project.a,
                                                  .b = project.weight.elements,
                                                  .d = project.hidden,
                                                  .m = project.num_tokens,
                                                  .n = project.hidden_size,
                                                  .k = project.in_features,
                                                  .adds = true},
                       cell->plan);
}

static void bench_qkv_plan(struct backend_cuda *cuda, const void *what, int32_t layer_idx)
{
    const struct bench_cell *cell = what;
    struct qkv_params qkv = bench_qkv(cell->model, cell->memory, layer_idx, cell->num_tokens);
    cuda_gemm_qkv(cuda, &qkv, cell->qkv_plan);
}

static const struct bench_model bench_models[] = {{"0.5B", 896, 4864, 14, 2, 64},
                                                  {"1.5B", 1536, 8960, 12, 2, 128},
                                                  {"7B", 3584, 18944, 28, 4, 128}};
enum { NUM_BENCH_MODELS = sizeof(bench_models) / sizeof(bench_models[0]) };

/* Every plan that may be good for the two projections, the best ones first. */
static void sweep(void)
{
    static const int32_t tokens[] = {128, 256, 512, 1024, 2048, 8192};
    static const int32_t split_counts[] = {1, 2, 3, 4, 5, 6, 8};
    enum { MAX_PLANS = 400, NUM_SHOWN = 5 };
    for (int i = 0; i < NUM_BENCH_MODELS; i++) {
        struct bench_memory memory = bench_create(&bench_models[i], 8192);
        for (size_t j = 0; j < 2 * sizeof(tokens) / sizeof(tokens[0]); j++) {
            struct bench_cell cell = {.model = &bench_models[i],
                                      .memory = &memory,
                                      .num_tokens = tokens[j / 2],
                                      .part = j % 2 == 0 ? BENCH_O : BENCH_DOWN};
            static struct residual_plan plans[MAX_PLANS];
            static double costs[MAX_PLANS], times[MAX_PLANS];
            double least_cost = 1e9;
            int num_plans = 0;
            struct residual_product product = {.m = cell.num_tokens,
                                               .n = cell.model->hidden_size,
                                               .k = (int32_t)part_depth(cell.model, cell.part),
                                               .adds = true};
            struct backend_cuda *cuda = backend_create(false, 0);
            for (int32_t variant = 0; variant < gemm_residual_num_variants(); variant++) {
                for (size_t k = 0; k < sizeof(split_counts) / sizeof(split_counts[0]); k++) {
                    if ((split_counts[k] == 1 || cell.num_tokens <= 2048) &&
                        num_plans < MAX_PLANS &&
                        gemm_residual_plan(cuda, &product, variant, split_counts[k],
                                           &plans[num_plans], &costs[num_plans])) {
                        least_cost = fmin(least_cost, costs[num_plans++]);
                    }
                }
            }
            backend_finish(cuda, "sweep");
            for (int plan = 0; plan < num_plans; plan++) {
                cell.plan = &plans[plan];
                times[plan] =
                    costs[plan] > 1.3 * least_cost + 1.5
                        ? 1e9
                        : bench_us(bench_plan, &cell, memory.num_layers, costs[plan], 700.0);
            }
            printf("%s %d %s:", cell.model->name, (int)cell.num_tokens,
                   cell.part == BENCH_O ? "o" : "down");
            cell.plan = NULL;
            printf(" chosen %.1f, cost %.1f |",
                   bench_us(bench_plan, &cell, memory.num_layers, least_cost, 700.0), least_cost);
            for (int shown = 0; shown < NUM_SHOWN; shown++) {
                int best = 0;
                for (int plan = 1; plan < num_plans; plan++) {
                    best = times[plan] < times[best] ? plan : best;
                }
                const struct kernel_variant *kernel = kernel_table_at(plans[best].tile.kernel_idx);
                printf(" %s%dx%d%s%s s%d %.1f (%.1f)",
                       kernel->schedule == TILE_SCHEDULE_pingpong ? "pp" : "co",
                       (int)kernel->block_m, (int)kernel->block_n,
                       plans[best].tile.cluster_m > 1   ? "c2x1"
                       : plans[best].tile.cluster_n > 1 ? "c1x2"
                                                        : "",
                       plans[best].tile.num_tiles_n > 0 ? "*" : "", (int)plans[best].num_splits,
                       times[best], costs[best]);
                times[best] = 1e9;
            }
            printf("\n");
        }
        bench_destroy(&memory);
    }
}

/* Every kernel for q, k and v. */
static void sweep_qkv(void)
{
    static const int32_t tokens[] = {128, 256, 512, 1024, 2048, 8192};
    for (int i = 0; i < NUM_BENCH_MODELS; i++) {
        struct bench_memory memory = bench_create(&bench_models[i], 8192);
        for (size_t j = 0; j < sizeof(tokens) / sizeof(tokens[0]); j++) {
            struct bench_cell cell = {
                .model = &bench_models[i], .memory = &memory, .num_tokens = tokens[j]};
            struct qkv_params shape = bench_qkv(cell.model, &memory, 0, tokens[j]);
            struct backend_cuda *cuda = backend_create(false, 0);
            printf("%s %d qkv: chosen %.1f, %s |", cell.model->name, (int)tokens[j],
                   bench_us(bench_qkv_plan, &cell, memory.num_layers, tokens[j] / 50.0, 700.0),
                   gemm_qkv_is_worth_it(cuda, &shape) ? "together" : "apart");
            for (int32_t variant = 0; variant < gemm_qkv_num_variants(); variant++) {
                struct qkv_plan plan;
                double cost_us;
                if (gemm_qkv_plan(cuda, &shape, variant, &plan, &cost_us)) {
                    const struct kernel_variant *kernel = kernel_table_at(plan.tile.kernel_idx);
                    cell.qkv_plan = &plan;
                    printf(" %s%dx%d%s %.1f (%.1f)",
                           kernel->schedule == TILE_SCHEDULE_pingpong ? "pp" : "co",
                           (int)kernel->block_m, (int)kernel->block_n,
                           plan.tile.cluster_m > 1   ? "c2x1"
                           : plan.tile.cluster_n > 1 ? "c1x2"
                                                     : "",
                           bench_us(bench_qkv_plan, &cell, memory.num_layers, cost_us, 700.0),
                           cost_us);
                }
            }
            printf("\n");
            backend_finish(cuda, "sweep");
        }
        bench_destroy(&memory);
    }
}

static void bench(void)
{
    static const int32_t tokens[] = {128, 512, 2048, 8192};
    static const char *const names[] = {"norm+qkv+rope", "project o", "norm+mlp", "project down",
                                        "all"};
    printf("%-5s %6s %-14s %9s %9s %8s %8s\n", "model", "tokens", "part", "us", "GEMM us",
           "TFLOP/s", "of GEMM");
    for (int i = 0; i < NUM_BENCH_MODELS; i++) {
        const struct bench_model *model = &bench_models[i];
        struct bench_memory memory = bench_create(model, 8192);
        for (size_t j = 0; j < sizeof(tokens) / sizeof(tokens[0]); j++) {
            struct bench_cell cell = {.model = model, .memory = &memory, .num_tokens = tokens[j]};
            for (int part = 0; part <= BENCH_NUM_PARTS; part++) {
                double flops = 0.0;
                for (int each = 0; each < BENCH_NUM_PARTS; each++) {
                    if (each == part || part == BENCH_NUM_PARTS) {
                        flops += 2.0 * tokens[j] *
                                 (double)part_columns(model, (enum bench_part)each) *
                                 (double)part_depth(model, (enum bench_part)each);
                    }
                }
                double expected_us = flops / 6e8 + 5.0;
                cell.part = (enum bench_part)part;
                cell.is_twin = false;
                double us = bench_us(bench_parts, &cell, memory.num_layers, expected_us, 2500.0);
                cell.is_twin = true;
                double twin_us =
                    bench_us(bench_parts, &cell, memory.num_layers, expected_us, 2500.0);
                printf("%-5s %6d %-14s %9.1f %9.1f %8.0f %7.0f%%\n", model->name, (int)tokens[j],
                       names[part], us, twin_us, flops / us * 1e-6, 100.0 * twin_us / us);
            }
            double qkv_bytes = 2.0 * (double)part_columns(model, BENCH_QKV) * 2.0;
            double bytes[2] = {model->hidden_size * 6.0, qkv_bytes};
            for (int k = 0; k < 2; k++) {
                double us = bench_us(k == 0 ? bench_norm : bench_rope, &cell, memory.num_layers,
                                     5.0, 1000.0);
                double floor_us = bytes[k] * tokens[j] / 4.5e6;
                printf("%-5s %6d %-14s %9.1f %9s floor %.1f us, %.0f%%\n", model->name,
                       (int)tokens[j], k == 0 ? "norm" : "rope", us, "", floor_us,
                       100.0 * floor_us / us);
            }
        }
        bench_destroy(&memory);
    }
}

#endif
