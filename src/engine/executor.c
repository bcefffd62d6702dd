/* SPDX-License-Identifier: Apache-2.0 */
/* One stream carries everything: what a step reads was left there by the steps before it, so steps
 * in flight need no events between them. Each has a place of its own for inputs and results, twice:
 * on the host and on the device, laid out alike. */
#include "engine/executor.h"

#include <assert.h>
#include <stdlib.h>

#include "base/clock.h"

#define DEFAULT_LOGITS_BYTES ((size_t)64 << 20)
#define DEFAULT_CUDA_LOGITS_BYTES ((size_t)256 << 20)
#define MAX_GRAPHS 64 /* shapes of two places; beyond, the one that was not used for longest goes */

/* A step's inputs and results in one kind of memory. */
struct place_memory {
    unsigned char *batch;   /* [batch_max_bytes] */
    unsigned char *results; /* see results_layout */
};

/* What the work of a step, or of a part of it, is told. */
struct step_work {
    struct executor_place *place;
    struct batch_layout layout;
    int32_t begin_layer, end_layer; /* what comes before and behind all layers with the first one
                                     * and the last one */
};

/* The work of all steps of one shape in one place. */
struct step_graph {
    struct step_work work;      /* of the step that was captured */
    struct device_graph *graph; /* NULL: not captured yet, the shape was seen once */
    int64_t last_step;          /* that had the shape; -1: the entry is free */
};

/* Where a step that is filled, in flight or read stands. */
struct executor_place {
    struct executor *executor;
    struct place_memory host, device;
    struct device_event *event; /* behind the step */
    struct step_work work;
    struct step_work parts[EXECUTOR_MAX_WAITS]; /* of a step that waits: the same in parts */
    int64_t forward_ns, sample_ns;              /* written by the step's work, on a host */
    int64_t given_ns;                           /* when the step was given to the device */
};

struct executor {
    const struct imbrex_model *model;
    struct device *device;
    struct executor_options options;
    struct backend *backend;
    struct placed_weights placed;
    const struct weights *weights; /* those, or the model's */
    struct kv_view kv;             /* its blocks: device memory, the executor's */

    void *activations; /* device memory that the pieces below lie in */
    struct forward_buffers buffers;
    struct token_history history; /* [max_seqs, context_size] */
    int32_t *token_ids;           /* [max_tokens + max_history] of the step, all known */
    void *ops_scratch;            /* the backend's; NULL if it needs none */
    size_t ops_scratch_bytes;
    void *sample_scratch; /* of a CPU */

    struct memory_region host_places; /* the host memory of all places */
    void *registered;                 /* the same, once the device knows it */
    void *device_places;
    struct executor_place places[EXECUTOR_MAX_IN_FLIGHT];
    struct step_graph graphs[MAX_GRAPHS];
    bool has_no_graphs; /* one could not be captured */
    int32_t num_in_flight;
    int64_t num_submitted; /* the next step's place follows from it */
    int64_t collected_ns;  /* when the last step was */
};

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t max_logit_rows(const struct imbrex_model *model,
                              const struct executor_options *options)
{
    size_t row_bytes = (size_t)model->config.vocab_size * sizeof(float);
    size_t logits_bytes = options->max_logits_bytes;
    size_t min_rows = 1;
    if (logits_bytes == 0 && options->kind == DEVICE_KIND_CUDA) {
        logits_bytes = DEFAULT_CUDA_LOGITS_BYTES;
        min_rows = (size_t)options->limits.max_seqs;
    } else if (logits_bytes == 0) {
        logits_bytes = DEFAULT_LOGITS_BYTES;
    }
    size_t rows = logits_bytes / row_bytes;
    size_t max_tokens = (size_t)options->limits.max_tokens;
    rows = rows > min_rows ? rows : min_rows;
    return rows < max_tokens ? (int32_t)rows : options->limits.max_tokens;
}

static bool has_mlp_bias(const struct imbrex_model *model)
{
    bool has_bias = false;
    for (int32_t i = 0; i < model->config.num_layers; i++) {
        const struct layer_weights *layer = &model->weights.layers[i];
        has_bias |= layer->gate_bias != NULL || layer->up_bias != NULL;
    }
    return has_bias;
}

static struct backend_shape shape_of(const struct imbrex_model *model,
                                     const struct executor_options *options)
{
    const struct model_config *config = &model->config;
    bool is_ablated = (options->ablations & IMBREX_ABLATE_MLP) != 0;
    return (struct backend_shape){.hidden_size = config->hidden_size,
                                  .intermediate_size = config->intermediate_size,
                                  .vocab_size = config->vocab_size,
                                  .num_heads = config->num_heads,
                                  .num_kv_heads = config->num_kv_heads,
                                  .head_dim = config->head_dim,
                                  .max_tokens = options->limits.max_tokens,
                                  .max_seqs = options->limits.max_seqs,
                                  .max_logit_rows = max_logit_rows(model, options),
                                  .max_samples = options->limits.max_samples,
                                  .context_size = options->context_size,
                                  .activation_dtype = options->dtype,
                                  .kv_dtype = options->kv_dtype,
                                  .has_unfused_mlp = is_ablated || has_mlp_bias(model)};
}

/* Scratch memory of the ops, and of the sampler where it is not among them. */
static void take_scratch(struct arena *arena, const struct imbrex_model *model,
                         const struct executor_options *options, struct executor *executor)
{
    if (options->kind == DEVICE_KIND_CUDA) {
        const struct backend_shape shape = shape_of(model, options);
        executor->ops_scratch_bytes = backend_cuda_scratch_bytes(&shape);
    } else {
        executor->sample_scratch = arena_take(
            arena, 1, sample_scratch_bytes(model->config.vocab_size, options->num_threads));
        executor->ops_scratch_bytes =
            (size_t)options->limits.max_tokens *
            (ops_scratch_token_bytes(model->weights.max_quantized_columns) +
             ops_bf16_token_bytes(options->cpu_features, model->weights.max_bf16_columns));
    }
    if (executor->ops_scratch_bytes > 0) {
        executor->ops_scratch = arena_take(arena, 1, executor->ops_scratch_bytes);
    }
}

/* The one statement of what lies in the activations. With arena->base NULL it measures. */
static void take_activations(struct arena *arena, const struct imbrex_model *model,
                             const struct executor_options *options, struct executor *executor)
{
    int32_t max_tokens = options->limits.max_tokens;
    take_scratch(arena, model, options, executor); /* first: it begins where the memory does */
    forward_buffers_take(arena, &model->config,
                         &(struct forward_limits){.max_tokens = max_tokens,
                                                  .max_logit_rows = max_logit_rows(model, options),
                                                  .max_positions = options->context_size,
                                                  .activation_dtype = options->dtype},
                         &executor->buffers);
    executor->history.token_ids = arena_take(arena, (size_t)options->limits.max_seqs,
                                             (size_t)options->context_size * sizeof(int32_t));
    executor->history.stride = options->context_size;
    executor->token_ids = arena_take(
        arena, (size_t)max_tokens + (size_t)options->limits.max_history, sizeof(int32_t));
}

/* Results of a step: [num_samples] sample_result, then [num_samples, max_logprobs] imbrex_logprob.
 */
static size_t results_top_begin(size_t num_samples)
{
    return (num_samples * sizeof(struct sample_result) + ARENA_ALIGNMENT - 1) / ARENA_ALIGNMENT *
           ARENA_ALIGNMENT;
}

static size_t results_bytes(size_t num_samples, size_t max_logprobs)
{
    return results_top_begin(num_samples) +
           num_samples * max_logprobs * sizeof(struct imbrex_logprob);
}

/* The memory of all places in one arena, on the host and on the device alike. */
static void take_places(struct arena *arena, const struct executor_options *options,
                        struct place_memory places[EXECUTOR_MAX_IN_FLIGHT])
{
    size_t batch_bytes = 0;
    if (!batch_max_bytes(&options->limits, &batch_bytes)) {
        arena->overflowed = true;
    }
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        places[i].batch = arena_take(arena, 1, batch_bytes);
        places[i].results = arena_take(
            arena, 1, results_bytes((size_t)options->limits.max_samples, IMBREX_MAX_LOGPROBS));
    }
}

enum imbrex_status executor_plan(const struct imbrex_model *model,
                                 const struct executor_options *options, struct executor_plan *plan,
                                 struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    struct executor_plan planned;
    struct executor measured;
    struct place_memory memory[EXECUTOR_MAX_IN_FLIGHT];
    struct arena activations = {0};
    struct arena places = {0};
    size_t block_bytes;
    take_activations(&activations, model, options, &measured);
    take_places(&places, options, memory);
    planned.activation_bytes = activations.num_used;
    planned.weight_bytes = 0;
    if (activations.overflowed || places.overflowed ||
        !size_mul(places.num_used, 2, &planned.batch_bytes) ||
        (options->places_weights &&
         !weights_place_bytes(model, options->dtype, &planned.weight_bytes)) ||
        !kv_token_bytes(config->num_layers, config->num_kv_heads, config->head_dim,
                        options->kv_dtype, &planned.kv_token_bytes) ||
        !kv_block_bytes(config->num_layers, config->num_kv_heads, config->head_dim,
                        options->kv_dtype, &block_bytes) ||
        !size_mul(block_bytes, (size_t)options->num_blocks, &planned.kv_bytes)) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "%s: %d tokens of context, %d KV blocks and %d sequences in steps of %d "
                         "tokens need more memory than can be addressed",
                         model->path, options->context_size, options->num_blocks,
                         options->limits.max_seqs, options->limits.max_tokens);
    }
    *plan = planned;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_kv(struct executor *executor, size_t kv_bytes,
                                    struct imbrex_error *err)
{
    const struct model_config *config = &executor->model->config;
    void *blocks;
    TRY(device_alloc(executor->device, "the KV cache", kv_bytes, &blocks, err));
    executor->kv = (struct kv_view){
        .blocks = blocks,
        .block_bytes = kv_bytes / (size_t)executor->options.num_blocks,
        .dtype = executor->options.kv_dtype,
        .num_layers = config->num_layers,
        .num_kv_heads = config->num_kv_heads,
        .block_size = KV_BLOCK_SIZE,
        .head_dim = config->head_dim,
    };
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_places(struct executor *executor, size_t places_bytes,
                                        struct imbrex_error *err)
{
    struct device *device = executor->device;
    struct place_memory host[EXECUTOR_MAX_IN_FLIGHT];
    struct place_memory on_device[EXECUTOR_MAX_IN_FLIGHT];
    TRY(memory_region_map("the steps' inputs and results", places_bytes, &executor->host_places,
                          err));
    TRY(device_host_register(device, executor->host_places.base, executor->host_places.num_bytes,
                             err));
    executor->registered = executor->host_places.base;
    TRY(device_alloc(device, "the steps' inputs and results", places_bytes,
                     &executor->device_places, err));
    take_places(&(struct arena){.base = executor->host_places.base}, &executor->options, host);
    take_places(&(struct arena){.base = executor->device_places}, &executor->options, on_device);
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        struct executor_place *place = &executor->places[i];
        place->executor = executor;
        place->work.place = place;
        place->work.end_layer = executor->model->config.num_layers;
        place->host = host[i];
        place->device = on_device[i];
        TRY(device_event_create(device, &place->event, err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_backend(struct executor *executor, struct imbrex_error *err)
{
    const struct executor_options *options = &executor->options;
    if (options->kind != DEVICE_KIND_CUDA) {
        return backend_cpu_create(options->num_threads, options->cpu_features,
                                  executor->ops_scratch, executor->ops_scratch_bytes,
                                  &executor->backend, err);
    }
    const struct backend_shape shape = shape_of(executor->model, options);
    return backend_cuda_create(
        executor->device,
        &(struct backend_cuda_options){.activation_dtype = options->dtype,
                                       .batch_invariant = options->batch_invariant,
                                       .ablations = options->ablations},
        &shape, executor->ops_scratch, executor->ops_scratch_bytes, &executor->backend, err);
}

static enum imbrex_status create_weights(struct executor *executor, struct imbrex_error *err)
{
    const struct executor_options *options = &executor->options;
    const struct imbrex_model *model = executor->model;
    executor->weights = &model->weights;
    if (!options->places_weights) {
        return IMBREX_STATUS_OK;
    }
    TRY(weights_place(model, executor->device, options->dtype, options->num_threads,
                      options->load_progress, options->load_user, &executor->placed, err));
    executor->weights = &executor->placed.weights;
    if (model->weights.max_quantized_columns > 0) {
        log_write(&model->log, IMBREX_LOG_LEVEL_INFO,
                  "%s: %zu bytes of weights in blocks are %zu bytes of %s on the %s device",
                  model->path, model->weights.num_bytes, executor->placed.num_bytes,
                  dtype_name(options->dtype), device_name(executor->device));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status fill_positions(void *arg, void *stream_handle)
{
    struct executor *executor = arg;
    backend_begin(executor->backend, stream_handle);
    forward_extend_positions(&executor->model->config, executor->weights, executor->backend,
                             &executor->buffers, executor->options.context_size);
    return backend_end(executor->backend);
}

/* All positions at once, unless the backend reads them and fills them as sequences grow. */
static enum imbrex_status create_positions(struct executor *executor, struct imbrex_error *err)
{
    struct device *device = executor->device;
    struct device_event *event = executor->places[0].event;
    if (executor->backend->is_host) {
        return IMBREX_STATUS_OK;
    }
    enum imbrex_status status =
        device_run_async(device, DEVICE_STREAM_STEP, fill_positions, executor);
    if (status == IMBREX_STATUS_OK) {
        status = device_event_record(device, event, DEVICE_STREAM_STEP);
    }
    if (status == IMBREX_STATUS_OK) {
        status = device_event_synchronize(device, event);
    }
    if (status != IMBREX_STATUS_OK) {
        return error_set(err, status, "the %s device failed while it filled the table of positions",
                         device_name(device));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_create(struct imbrex_model *model, struct device *device,
                                   const struct executor_options *options,
                                   struct executor **executor, struct imbrex_error *err)
{
    struct executor_plan plan;
    enum imbrex_status status;
    struct executor *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the executor", sizeof(*created));
    }
    created->model = model;
    created->device = device;
    created->options = *options;
    for (int32_t i = 0; i < MAX_GRAPHS; i++) {
        created->graphs[i].last_step = -1;
    }
    TRY_OR_FAIL(executor_plan(model, options, &plan, err));
    TRY_OR_FAIL(model_fill(model, err));
    TRY_OR_FAIL(create_kv(created, plan.kv_bytes, err));
    TRY_OR_FAIL(
        device_alloc(device, "activations", plan.activation_bytes, &created->activations, err));
    take_activations(&(struct arena){.base = created->activations}, model, options, created);
    TRY_OR_FAIL(create_places(created, plan.batch_bytes / 2, err));
    TRY_OR_FAIL(create_weights(created, err));
    TRY_OR_FAIL(create_backend(created, err));
    TRY_OR_FAIL(create_positions(created, err));
    *executor = created;
    return IMBREX_STATUS_OK;
fail:
    executor_destroy(created);
    return status;
}

void executor_destroy(struct executor *executor)
{
    if (executor == NULL) {
        return;
    }
    assert(executor->num_in_flight == 0 || executor->device->has_failed);
    for (int32_t i = 0; i < MAX_GRAPHS; i++) {
        device_graph_destroy(executor->device, executor->graphs[i].graph);
    }
    backend_destroy(executor->backend);
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        device_event_destroy(executor->device, executor->places[i].event);
    }
    device_free(executor->device, executor->device_places);
    device_host_unregister(executor->device, executor->registered);
    memory_region_unmap(&executor->host_places);
    device_free(executor->device, executor->activations);
    device_free(executor->device, executor->kv.blocks);
    weights_place_release(executor->device, &executor->placed);
    free(executor);
}

const struct kv_view *executor_kv(const struct executor *executor)
{
    return &executor->kv;
}

int32_t executor_max_in_flight(const struct executor *executor)
{
    return device_is_async(executor->device) ? EXECUTOR_MAX_IN_FLIGHT : 1;
}

const char *executor_kernels_name(const struct executor *executor)
{
    return executor->backend->kernels_name;
}

/* The place of step number `step_idx`. */
static struct executor_place *place_of(struct executor *executor, int64_t step_idx)
{
    return &executor->places[step_idx % executor_max_in_flight(executor)];
}

void *executor_batch_memory(struct executor *executor)
{
    assert(executor->num_in_flight < executor_max_in_flight(executor));
    return place_of(executor, executor->num_submitted)->host.batch;
}

/* Begins a part of a step's work; returns the time. */
static int64_t begin_part(const struct executor *executor, const char *name)
{
    const struct executor_options *options = &executor->options;
    if (options->range_begin != NULL) {
        options->range_begin(options->range_user, name);
    }
    return clock_now_ns();
}

static void end_part(const struct executor *executor, int64_t begin_ns, int64_t *total_ns)
{
    const struct executor_options *options = &executor->options;
    if (executor->backend->is_host) {
        *total_ns += clock_now_ns() - begin_ns;
    }
    if (options->range_end != NULL) {
        options->range_end(options->range_user);
    }
}

static void run_history(const struct step_work *work)
{
    const struct executor *executor = work->place->executor;
    const struct batch_layout *layout = &work->layout;
    void *batch = work->place->device.batch;
    backend_history(
        executor->backend,
        &(struct history_params){.token_ids = BATCH_ARRAY(int32_t, batch, layout, token_ids),
                                 .slots = BATCH_ARRAY(int32_t, batch, layout, history_slots),
                                 .positions = BATCH_ARRAY(int32_t, batch, layout, positions),
                                 .history = executor->history,
                                 .d = executor->token_ids,
                                 .num_tokens = layout->num_tokens + layout->num_history});
}

/* The work's layers, over all tokens of the step. */
static void run_forward(const struct step_work *work)
{
    struct executor_place *place = work->place;
    struct executor *executor = place->executor;
    const struct batch_layout *layout = &work->layout;
    void *batch = place->device.batch;
    int64_t begin_ns = begin_part(executor, "forward");
    if (work->begin_layer == 0) {
        run_history(work);
    }
    forward_layers(
        &executor->model->config, executor->weights, executor->backend, &executor->kv,
        &(struct forward_batch){.token_ids = executor->token_ids,
                                .positions = BATCH_ARRAY(int32_t, batch, layout, positions),
                                .slot_mapping = BATCH_ARRAY(int32_t, batch, layout, slot_mapping),
                                .seq_idx = BATCH_ARRAY(int32_t, batch, layout, seq_idx),
                                .query_begin = BATCH_ARRAY(int32_t, batch, layout, query_begin),
                                .seq_lens = BATCH_ARRAY(int32_t, batch, layout, seq_lens),
                                .block_tables = BATCH_ARRAY(int32_t, batch, layout, block_tables),
                                .num_tokens = layout->num_tokens,
                                .num_seqs = layout->num_seqs,
                                .max_blocks = layout->max_blocks,
                                .max_query = layout->max_query},
        work->begin_layer, work->end_layer, &executor->buffers);
    end_part(executor, begin_ns, &place->forward_ns);
}

/* Of the step's logits rows [begin, begin + num_rows). */
static void run_logits(const struct step_work *work, int32_t begin, int32_t num_rows)
{
    struct executor_place *place = work->place;
    struct executor *executor = place->executor;
    int64_t begin_ns = begin_part(executor, "forward");
    forward_logits(&executor->model->config, executor->weights, executor->backend,
                   BATCH_ARRAY(int32_t, place->device.batch, &work->layout, logits_tokens) + begin,
                   num_rows, &executor->buffers);
    end_part(executor, begin_ns, &place->forward_ns);
}

/* Ids that can be drawn: the weights may have more rows than the tokenizer ids. */
static int32_t num_drawn_ids(const struct imbrex_model *model)
{
    int32_t vocab_size = model->config.vocab_size;
    return model->tokenizer == NULL
               ? vocab_size
               : min_int32(vocab_size, imbrex_tokenizer_vocab_size(model->tokenizer));
}

/* The step's samples [begin, end), all of logits rows [logits_begin, logits_begin + num_rows). */
static void run_samples(const struct step_work *work, int32_t begin, int32_t end,
                        int32_t logits_begin, int32_t num_rows)
{
    struct executor_place *place = work->place;
    struct executor *executor = place->executor;
    const struct batch_layout *layout = &work->layout;
    void *batch = place->device.batch;
    unsigned char *results = place->device.results;
    struct sample_result *sample_results = (struct sample_result *)(void *)results;
    struct imbrex_logprob *top_logprobs =
        (struct imbrex_logprob *)(void *)(results + results_top_begin((size_t)layout->num_samples));
    int64_t begin_ns = begin_part(executor, "sample");
    backend_sample(executor->backend,
                   &(struct sample_params){
                       .logits = executor->buffers.logits,
                       .rows = BATCH_ARRAY(struct sample_row, batch, layout, sample_rows) + begin,
                       .bias = BATCH_ARRAY(struct imbrex_logit_bias, batch, layout, bias),
                       .history = executor->history,
                       .results = sample_results + begin,
                       .top_logprobs = top_logprobs + (int64_t)begin * layout->max_logprobs,
                       .scratch = executor->sample_scratch,
                       .logits_row_begin = logits_begin,
                       .num_logits_rows = num_rows,
                       .num_rows = end - begin,
                       .vocab_size = executor->model->config.vocab_size,
                       .num_ids = num_drawn_ids(executor->model),
                       .max_logprobs = layout->max_logprobs});
    end_part(executor, begin_ns, &place->sample_ns);
}

/* The logits of as many rows as fit are there at once. */
static void run_results(const struct step_work *work)
{
    const struct executor_place *place = work->place;
    const struct batch_layout *layout = &work->layout;
    /* Which samples belong to which rows is looked up on the host, where it was written. */
    const struct sample_row *rows =
        BATCH_ARRAY(struct sample_row, place->host.batch, layout, sample_rows);
    int32_t max_rows = place->executor->buffers.limits.max_logit_rows;
    int32_t sample = 0;
    for (int32_t begin = 0; begin < layout->num_logits_rows; begin += max_rows) {
        int32_t num_rows = min_int32(max_rows, layout->num_logits_rows - begin);
        int32_t first_sample = sample;
        while (sample < layout->num_samples && rows[sample].logits_row < begin + num_rows) {
            sample++;
        }
        run_logits(work, begin, num_rows);
        run_samples(work, first_sample, sample, begin, num_rows);
    }
}

/* A step's work on its stream, or a part of it. */
static enum imbrex_status run_step(void *arg, void *stream_handle)
{
    const struct step_work *work = arg;
    struct executor_place *place = work->place;
    struct executor *executor = place->executor;
    if (work->begin_layer == 0) {
        place->forward_ns = 0;
        place->sample_ns = 0;
    }
    backend_begin(executor->backend, stream_handle);
    run_forward(work);
    if (work->end_layer == executor->model->config.num_layers) {
        run_results(work);
    }
    return backend_end(executor->backend);
}

/* Copies of one step follow each other: one may read what the one before it wrote. */
static enum imbrex_status give_copy(struct executor *executor, void *destination,
                                    const void *source, size_t num_bytes)
{
    return device_copy_batch_async(
        executor->device, DEVICE_STREAM_STEP,
        &(struct device_copy){.destination = destination, .source = source, .num_bytes = num_bytes},
        1);
}

static enum imbrex_status give_plan_copies(struct executor *executor, const struct step_plan *plan)
{
    for (int32_t i = 0; i < plan->num_block_copies; i++) {
        const struct step_block_copy *copy = &plan->block_copies[i];
        size_t block_bytes = executor->kv.block_bytes;
        assert(copy->source < executor->options.num_blocks &&
               copy->destination < executor->options.num_blocks);
        TRY(give_copy(executor, executor->kv.blocks + (size_t)copy->destination * block_bytes,
                      executor->kv.blocks + (size_t)copy->source * block_bytes, block_bytes));
    }
    for (int32_t i = 0; i < plan->num_slot_copies; i++) {
        const struct step_slot_copy *copy = &plan->slot_copies[i];
        const struct token_history *history = &executor->history;
        assert(copy->num_tokens <= history->stride);
        TRY(give_copy(executor, history->token_ids + copy->destination * history->stride,
                      history->token_ids + copy->source * history->stride,
                      (size_t)copy->num_tokens * sizeof(int32_t)));
    }
    return IMBREX_STATUS_OK;
}

/* Whether all that the step's work is told but the contents of the place's memory follows from
 * place and shape. */
static bool can_be_graph(const struct executor *executor, const struct batch_layout *layout)
{
    return layout->is_padded && layout->num_bias == 0 && layout->max_logprobs == 0 &&
           layout->num_logits_rows <= executor->buffers.limits.max_logit_rows &&
           !executor->has_no_graphs;
}

/* The entry of the place's shape, or one that is free or was not used for longest. */
static struct step_graph *find_graph(struct executor *executor, const struct step_work *work)
{
    struct step_graph *oldest = &executor->graphs[0];
    for (int32_t i = 0; i < MAX_GRAPHS; i++) {
        struct step_graph *entry = &executor->graphs[i];
        if (entry->last_step >= 0 && entry->work.place == work->place &&
            entry->work.layout.num_seqs == work->layout.num_seqs &&
            entry->work.layout.max_blocks == work->layout.max_blocks) {
            return entry;
        }
        oldest = entry->last_step < oldest->last_step ? entry : oldest;
    }
    /* So many were used since that no step in flight has it. */
    assert(oldest->last_step < executor->num_submitted - executor->num_in_flight);
    device_graph_destroy(executor->device, oldest->graph);
    *oldest = (struct step_graph){.last_step = -1};
    return oldest;
}

static enum imbrex_status launch(struct executor *executor, struct device_graph *graph)
{
    const struct executor_options *options = &executor->options;
    /* Of a host, the work itself has its ranges. */
    bool has_range = options->range_begin != NULL && !executor->backend->is_host;
    if (has_range) {
        options->range_begin(options->range_user, "forward");
    }
    enum imbrex_status status = device_graph_launch(executor->device, DEVICE_STREAM_STEP, graph);
    if (has_range && options->range_end != NULL) {
        options->range_end(options->range_user);
    }
    return status;
}

/* Gives a step's work to the stream, as a graph where it can be one. A shape that comes once, as
 * when the last sequences of a batch end one after the other, is not worth capturing. */
static enum imbrex_status give_work(struct executor *executor, struct step_work *work)
{
    struct device *device = executor->device;
    if (can_be_graph(executor, &work->layout)) {
        struct step_graph *entry = find_graph(executor, work);
        bool is_first = entry->last_step < 0;
        entry->last_step = executor->num_submitted;
        if (is_first) {
            entry->work = *work;
        } else if (entry->graph == NULL) {
            struct imbrex_error reason;
            enum imbrex_status status =
                device_graph_capture(device, run_step, &entry->work, &entry->graph, &reason);
            if (status == IMBREX_STATUS_DEVICE) {
                return status;
            }
            if (status != IMBREX_STATUS_OK) {
                executor->has_no_graphs = true;
                log_write(&executor->model->log, IMBREX_LOG_LEVEL_WARNING,
                          "steps are launched without graphs from now on: %s", reason.message);
            }
        }
        if (entry->graph != NULL) {
            return launch(executor, entry->graph);
        }
    }
    return device_run_async(device, DEVICE_STREAM_STEP, run_step, work);
}

/* Gives a step's work in parts, between which the stream waits. */
static enum imbrex_status give_parts(struct executor *executor, struct executor_place *place,
                                     const struct executor_waits *waits)
{
    assert(waits->num_waits <= EXECUTOR_MAX_WAITS && waits->first_layers[0] == 0);
    for (int32_t i = 0; i < waits->num_waits; i++) {
        struct step_work *part = &place->parts[i];
        *part = place->work;
        part->begin_layer = waits->first_layers[i];
        if (i + 1 < waits->num_waits) {
            part->end_layer = waits->first_layers[i + 1];
        }
        TRY(device_event_wait(executor->device, waits->events[i], DEVICE_STREAM_STEP));
        TRY(device_run_async(executor->device, DEVICE_STREAM_STEP, run_step, part));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status give_step(struct executor *executor, struct executor_place *place,
                                    const struct step_plan *plan,
                                    const struct executor_waits *waits)
{
    const struct batch_layout *layout = &place->work.layout;
    size_t num_samples = (size_t)layout->num_samples;
    if (executor->num_in_flight == 0) {
        /* What failed before was told by another place's event; this one's begins to count here.
         * Behind a step in flight it counts that one's failures too, on which this one builds. */
        TRY(device_event_record(executor->device, place->event, DEVICE_STREAM_STEP));
    }
    TRY(give_plan_copies(executor, plan));
    TRY(give_copy(executor, place->device.batch, place->host.batch, layout->num_bytes));
    if (waits != NULL && waits->num_waits > 0) {
        TRY(give_parts(executor, place, waits));
    } else {
        TRY(give_work(executor, &place->work));
    }
    if (num_samples > 0) {
        TRY(give_copy(executor, place->host.results, place->device.results,
                      results_bytes(num_samples, (size_t)layout->max_logprobs)));
    }
    return device_event_record(executor->device, place->event, DEVICE_STREAM_STEP);
}

/* Waits until nothing of a step that could not be given as a whole is left on the stream. A device
 * that does not even let us wait has failed. */
static enum imbrex_status drain(struct executor *executor, struct executor_place *place)
{
    if (device_event_record(executor->device, place->event, DEVICE_STREAM_STEP) !=
            IMBREX_STATUS_OK ||
        device_event_synchronize(executor->device, place->event) == IMBREX_STATUS_DEVICE) {
        return IMBREX_STATUS_DEVICE;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_submit(struct executor *executor, const struct step_plan *plan,
                                   const struct batch_layout *layout,
                                   const struct executor_waits *waits)
{
    struct executor_place *place = place_of(executor, executor->num_submitted);
    assert(executor->num_in_flight < executor_max_in_flight(executor));
    assert(layout->num_tokens <= executor->options.limits.max_tokens);
    assert(layout->num_samples <= executor->options.limits.max_samples);
    place->work.layout = *layout;
    place->given_ns = clock_now_ns();
    enum imbrex_status status = give_step(executor, place, plan, waits);
    if (status != IMBREX_STATUS_OK) {
        TRY(drain(executor, place));
        return status;
    }
    executor->num_submitted++;
    executor->num_in_flight++;
    return IMBREX_STATUS_OK;
}

enum imbrex_status executor_collect(struct executor *executor, struct executor_results *results)
{
    assert(executor->num_in_flight > 0);
    struct executor_place *place =
        place_of(executor, executor->num_submitted - executor->num_in_flight);
    enum imbrex_status status = device_event_synchronize(executor->device, place->event);
    /* The device began with it when it was given, or behind the step before. */
    int64_t begin_ns =
        place->given_ns > executor->collected_ns ? place->given_ns : executor->collected_ns;
    executor->collected_ns = clock_now_ns();
    executor->num_in_flight--;
    TRY(status);
    const struct batch_layout *layout = &place->work.layout;
    *results = (struct executor_results){
        .results = (const struct sample_result *)(const void *)place->host.results,
        .top_logprobs =
            (const struct imbrex_logprob *)(const void *)(place->host.results +
                                                          results_top_begin(
                                                              (size_t)layout->num_samples)),
        .forward_ns =
            executor->backend->is_host ? place->forward_ns : executor->collected_ns - begin_ns,
        .sample_ns = place->sample_ns,
    };
    return IMBREX_STATUS_OK;
}
