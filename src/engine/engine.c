/* SPDX-License-Identifier: Apache-2.0 */
/* Planning, creating and destroying an engine; scoring. */
#include "engine/engine.h"

#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/machine_memory.h"
#include "base/thread_pool.h"
#include "kv/kv_codec.h"
#include "kv/kv_tiers_faults.h"

#define DEFAULT_CONTEXT_SIZE 4096
#define DEFAULT_MAX_STEP_TOKENS 128
#define DEFAULT_CUDA_MAX_STEP_TOKENS 4096
#define DEFAULT_MAX_RUNNING 64
#define DEFAULT_MAX_WAITING 1024
#define DEFAULT_KV_POLICY "lru"
#define DEFAULT_PRIORITY_STEP_NS 1000000000
#define MAX_PRIORITY_STEP_NS 86400000000000 /* a day: times IMBREX_MAX_PRIORITY fits int64 */

struct imbrex_engine_options imbrex_engine_options_default(void)
{
    return (struct imbrex_engine_options){.batch_invariant = IMBREX_INVARIANCE_AUTO,
                                          .kv_prefetch_percent = 50,
                                          .cpu_features = IMBREX_CPU_ALL};
}

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

static int32_t max_int32(int32_t a, int32_t b)
{
    return a > b ? a : b;
}

static enum imbrex_status check_range(const char *field, int64_t value, int64_t max,
                                      struct imbrex_error *err)
{
    if (value < 0 || value > max) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, field,
                               ": expected a number in [0, %lld], found %lld", (long long)max,
                               (long long)value);
    }
    return IMBREX_STATUS_OK;
}

/* NULL: no prefix cache. */
static const char *policy_of(const struct imbrex_engine_options *options)
{
    const char *policy = options->kv_policy == NULL ? DEFAULT_KV_POLICY : options->kv_policy;
    return strcmp(policy, "none") == 0 ? NULL : policy;
}

static bool has_tiers(const struct imbrex_engine_options *options)
{
    return options->kv_host_bytes > 0 || options->kv_disk_path != NULL ||
           options->kv_remote_url != NULL;
}

static enum imbrex_status check_policy(const struct imbrex_engine_options *options,
                                       struct imbrex_error *err)
{
    const char *policy = policy_of(options);
    if (policy != NULL && !kv_policy_find(policy, NULL)) {
        return error_set_field(err, IMBREX_STATUS_NOT_FOUND, "kv_policy",
                               ": expected none or one of%s, found \"%s\"", kv_policy_names(),
                               policy);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_disk(const struct imbrex_engine_options *options,
                                     struct imbrex_error *err)
{
    const char *path = options->kv_disk_path;
    if (path != NULL && path[0] == '\0') {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_path",
                               ": expected a folder, found an empty text");
    }
    if (path != NULL && options->kv_disk_bytes == 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_path",
                               ": expected kv_disk_bytes with it, found none");
    }
    if (path == NULL && options->kv_disk_bytes > 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_bytes",
                               ": expected a kv_disk_path with it, found none");
    }
    if (path == NULL && options->kv_disk_zstd_level > 0) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_zstd_level",
                               ": expected a kv_disk_path with it, found none");
    }
    if (options->kv_disk_zstd_level > 0 && !kv_codec_is_available()) {
        return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "kv_disk_zstd_level",
                               ": expected a build with libzstd, found one without");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_remote(const struct imbrex_engine_options *options,
                                       struct imbrex_error *err)
{
    const char *secret_path = options->kv_remote_secret_path;
    struct kv_remote_url url;
    if (secret_path != NULL && options->kv_remote_url == NULL) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_secret_path",
                               ": expected the address of a remote tier with it, found none");
    }
    if (secret_path != NULL && secret_path[0] == '\0') {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_secret_path",
                               ": expected a file, found an empty text");
    }
    return options->kv_remote_url != NULL ? kv_remote_read_url(options->kv_remote_url, &url, err)
                                          : IMBREX_STATUS_OK;
}

static enum imbrex_status check_tiers(const struct imbrex_engine_options *options,
                                      struct imbrex_error *err)
{
    if (policy_of(options) == NULL && has_tiers(options)) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_policy",
                               ": expected one that keeps blocks, for the tiers below the KV "
                               "cache, found \"none\"");
    }
    TRY(check_policy(options, err));
    TRY(check_range("kv_prefetch_percent", options->kv_prefetch_percent, 100, err));
    TRY(check_range("kv_write", options->kv_write, IMBREX_KV_WRITE_DEMOTED, err));
    TRY(check_range("kv_disk_zstd_level", options->kv_disk_zstd_level, KV_CODEC_MAX_LEVEL, err));
    TRY(check_disk(options, err));
    return check_remote(options, err);
}

static enum imbrex_status check_options(const struct imbrex_engine_options *options,
                                        struct imbrex_error *err)
{
    TRY(check_range("num_threads", options->num_threads, THREAD_POOL_MAX_THREADS, err));
    TRY(check_range("context_size", options->context_size, IMBREX_MAX_CONTEXT_SIZE, err));
    TRY(check_range("kv_cache_tokens", options->kv_cache_tokens, IMBREX_MAX_KV_CACHE_TOKENS, err));
    TRY(check_range("max_running", options->max_running, IMBREX_MAX_RUNNING, err));
    TRY(check_range("max_step_tokens", options->max_step_tokens, IMBREX_MAX_STEP_TOKENS, err));
    TRY(check_range("max_waiting", options->max_waiting, IMBREX_MAX_WAITING, err));
    TRY(check_range("compute", options->compute, IMBREX_COMPUTE_BF16, err));
    TRY(check_range("kv_dtype", options->kv_dtype, IMBREX_KV_DTYPE_FP8, err));
    TRY(check_range("batch_invariant", options->batch_invariant, IMBREX_INVARIANCE_AUTO, err));
    TRY(check_tiers(options, err));
    return check_range("priority_step_ns", options->priority_step_ns, MAX_PRIORITY_STEP_NS, err);
}

static int32_t num_blocks_for(int32_t num_tokens)
{
    return (num_tokens + KV_BLOCK_SIZE - 1) / KV_BLOCK_SIZE;
}

static int32_t value_or(int32_t value, int32_t default_value)
{
    return value == 0 ? default_value : value;
}

/* Where a model runs, and how. */
struct target {
    struct device_choice choice; /* its kind is decided */
    enum dtype dtype;            /* of activations */
    enum kv_dtype kv_dtype;
    /* The device works beside the host and has memory of its own: weights are placed there, and
     * the steps of decoding sequences are graphs. */
    bool is_async;
    bool batch_invariant;
};

static struct batch_limits limits_of(const struct imbrex_engine_options *options,
                                     const struct imbrex_memory_plan *plan,
                                     const struct target *target)
{
    int32_t max_history =
        max_int32(plan->context_size, IMBREX_STEP_CACHED_TOKENS * plan->max_step_tokens);
    return (struct batch_limits){.max_tokens = plan->max_step_tokens,
                                 .max_history = policy_of(options) != NULL ? max_history : 0,
                                 .max_seqs = plan->max_running,
                                 .max_blocks = num_blocks_for(plan->context_size),
                                 .max_samples = plan->max_step_tokens + IMBREX_MAX_CHOICES,
                                 .pads_decode = target->is_async &&
                                                (options->ablations & IMBREX_ABLATE_GRAPH) == 0};
}

/* The types of imbrex_kv_dtype behind AUTO are those of kv_dtype, in its order. */
static enum kv_dtype kv_dtype_asked(const struct imbrex_engine_options *options, enum dtype dtype)
{
    _Static_assert(
        IMBREX_KV_DTYPE_FP32 == KV_DTYPE_F32 + 1 && IMBREX_KV_DTYPE_FP16 == KV_DTYPE_F16 + 1 &&
            IMBREX_KV_DTYPE_BF16 == KV_DTYPE_BF16 + 1 &&
            IMBREX_KV_DTYPE_INT8 == KV_DTYPE_INT8 + 1 && IMBREX_KV_DTYPE_FP8 == KV_DTYPE_FP8 + 1,
        "one order");
    return options->kv_dtype == IMBREX_KV_DTYPE_AUTO ? kv_dtype_of(dtype)
                                                     : (enum kv_dtype)(options->kv_dtype - 1);
}

/* A CPU takes any; the kernels of a GPU take that of their activations, some also those with
 * scales. */
static enum imbrex_status check_kv_dtype(const struct target *target, struct imbrex_error *err)
{
    bool is_gpu = target->choice.kind == DEVICE_KIND_CUDA;
    bool has_scaled = target->dtype == DTYPE_BF16 && kv_dtype_has_scales(target->kv_dtype);
    if (is_gpu && target->kv_dtype != kv_dtype_of(target->dtype) && !has_scaled) {
        return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "kv_dtype",
                               ": expected %s on a GPU that computes in %s, found %s, which only "
                               "the cpu device takes then",
                               target->dtype == DTYPE_BF16 ? "bf16, int8 or fp8" : "fp32",
                               dtype_name(target->dtype), kv_dtype_name(target->kv_dtype));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status decide_target(const struct imbrex_engine_options *options,
                                        const struct device_choice *choice, bool is_async,
                                        struct target *target, struct imbrex_error *err)
{
    bool is_cpu = choice->kind == DEVICE_KIND_CPU;
    if (is_cpu && options->compute == IMBREX_COMPUTE_BF16) {
        return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "compute",
                               ": expected F32 on the cpu device, found BF16, which needs a GPU");
    }
    enum dtype dtype = is_cpu || options->compute == IMBREX_COMPUTE_F32 ? DTYPE_F32 : DTYPE_BF16;
    *target = (struct target){
        .choice = *choice,
        .dtype = dtype,
        .kv_dtype = kv_dtype_asked(options, dtype),
        .is_async = is_async,
        .batch_invariant = options->batch_invariant == IMBREX_INVARIANCE_AUTO
                               ? is_cpu
                               : options->batch_invariant == IMBREX_INVARIANCE_ON,
    };
    return check_kv_dtype(target, err);
}

static struct executor_options executor_options_of(const struct imbrex_engine_options *options,
                                                   const struct imbrex_memory_plan *plan,
                                                   const struct target *target)
{
    return (struct executor_options){.limits = limits_of(options, plan, target),
                                     .context_size = plan->context_size,
                                     .num_blocks = plan->kv_num_blocks,
                                     .num_threads = plan->num_threads,
                                     .cpu_features = options->cpu_features,
                                     .kind = target->choice.kind,
                                     .dtype = target->dtype,
                                     .kv_dtype = target->kv_dtype,
                                     .places_weights = target->is_async,
                                     .batch_invariant = target->batch_invariant,
                                     .ablations = options->ablations,
                                     .load_progress = options->load_progress,
                                     .load_user = options->load_user,
                                     .range_begin = options->range_begin,
                                     .range_end = options->range_end,
                                     .range_user = options->range_user};
}

static enum imbrex_status plan_tiers(const struct imbrex_engine_options *options,
                                     struct imbrex_memory_plan *plan, struct imbrex_error *err)
{
    size_t block_bytes = plan->kv_bytes / (size_t)plan->kv_num_blocks;
    bool has_disk = options->kv_disk_path != NULL;
    int32_t num_slots = kv_tiers_num_slots(block_bytes, options->kv_host_bytes,
                                           has_disk || options->kv_remote_url != NULL);
    if (options->kv_host_bytes > 0 && num_slots == 0) {
        size_t least = KV_TIERS_MIN_SLOTS * block_bytes;
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_host_bytes",
                               ": expected at least %zu bytes (%zu KiB), %d blocks of %zu bytes, "
                               "found %zu",
                               least, (least + 1023) >> 10, KV_TIERS_MIN_SLOTS, block_bytes,
                               options->kv_host_bytes);
    }
    if (has_disk && options->kv_disk_bytes < kv_disk_min_bytes(block_bytes, 0)) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_disk_bytes",
                               ": expected at least %zu bytes (%zu MiB), two segments of blocks "
                               "of %zu bytes, found %zu",
                               kv_disk_min_bytes(block_bytes, 0),
                               (kv_disk_min_bytes(block_bytes, 0) >> 20) + 1, block_bytes,
                               options->kv_disk_bytes);
    }
    plan->kv_host_bytes = (size_t)num_slots * block_bytes;
    plan->kv_disk_bytes = options->kv_disk_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status plan_on(const struct imbrex_model *model,
                                  const struct imbrex_engine_options *options,
                                  const struct target *target, struct imbrex_memory_plan *plan,
                                  struct imbrex_error *err)
{
    bool is_cpu = target->choice.kind == DEVICE_KIND_CPU;
    TRY(check_options(options, err));
    struct imbrex_memory_plan planned = {
        .weight_bytes = model->weights.num_bytes,
        .converted_bytes = model->weights.num_converted * sizeof(float),
        .kv_block_size = KV_BLOCK_SIZE,
        .context_size =
            value_or(options->context_size,
                     min_int32(model->config.max_position_embeddings, DEFAULT_CONTEXT_SIZE)),
        .max_waiting = value_or(options->max_waiting, DEFAULT_MAX_WAITING),
        .num_threads = value_or(options->num_threads, thread_pool_num_cpus()),
        .kernels = is_cpu ? ops_kernels_name_for(options->cpu_features) : "sm90",
        .device = is_cpu ? "cpu" : "cuda",
        .device_idx = target->choice.idx,
        .compute = dtype_name(target->dtype),
        .kv_dtype = kv_dtype_name(target->kv_dtype),
    };
    int32_t kv_cache_tokens = value_or(options->kv_cache_tokens, planned.context_size);
    if (kv_cache_tokens < planned.context_size) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_cache_tokens",
                               ": expected at least the context size of %d, found %d",
                               planned.context_size, kv_cache_tokens);
    }
    planned.kv_num_blocks = num_blocks_for(kv_cache_tokens);
    planned.max_step_tokens =
        min_int32(value_or(options->max_step_tokens,
                           is_cpu ? DEFAULT_MAX_STEP_TOKENS : DEFAULT_CUDA_MAX_STEP_TOKENS),
                  kv_cache_tokens);
    /* A whole block of every step is left to the first prompt, see scheduler.h. */
    int32_t max_running = planned.max_step_tokens - KV_BLOCK_SIZE + 1;
    planned.max_running = min_int32(value_or(options->max_running, DEFAULT_MAX_RUNNING),
                                    max_running < 1 ? 1 : max_running);

    struct executor_options executor_options = executor_options_of(options, &planned, target);
    struct executor_plan sizes;
    TRY(executor_plan(model, &executor_options, &sizes, err));
    planned.device_weight_bytes = sizes.weight_bytes;
    planned.kv_bytes = sizes.kv_bytes;
    planned.kv_token_bytes = sizes.kv_token_bytes;
    planned.activation_bytes =
        sizes.activation_bytes + (is_cpu ? ops_thread_scratch_bytes(planned.num_threads) : 0);
    planned.batch_bytes = sizes.batch_bytes;
    TRY(plan_tiers(options, &planned, err));
    *plan = planned;
    return IMBREX_STATUS_OK;
}

/* A plan may be made for another machine: it is told, where an engine is refused. */
static enum imbrex_status check_host_memory(const struct imbrex_engine_options *options,
                                            struct imbrex_error *err)
{
    size_t num_bytes = options->kv_host_bytes > 0 ? machine_memory_bytes("") : SIZE_MAX;
    if (options->kv_host_bytes > num_bytes) {
        return error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_host_bytes",
                               ": expected at most the %zu bytes (%zu MiB) that this machine, or "
                               "the process's memory limit, has left, found %zu (%zu MiB)",
                               num_bytes, num_bytes >> 20, options->kv_host_bytes,
                               options->kv_host_bytes >> 20);
    }
    return IMBREX_STATUS_OK;
}

static void tell_host_memory(const struct imbrex_model *model,
                             const struct imbrex_engine_options *options)
{
    struct imbrex_error reason;
    if (check_host_memory(options, &reason) != IMBREX_STATUS_OK) {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "an engine with this plan is refused here: RAM for KV blocks%s",
                  reason.message + strlen(reason.field));
    }
}

enum imbrex_status imbrex_engine_plan(const struct imbrex_model *model,
                                      const struct imbrex_engine_options *options,
                                      struct imbrex_memory_plan *plan, struct imbrex_error *err)
{
    struct imbrex_engine_options defaults = imbrex_engine_options_default();
    struct device_choice choice;
    struct target target;
    if (options == NULL) {
        options = &defaults;
    }
    TRY(check_options(options, err));
    TRY(device_parse(options->device, &choice, err));
    if (choice.kind == DEVICE_KIND_AUTO) {
        struct device *device;
        TRY(device_open(&choice, &model->log, &device, &choice, err));
        device_destroy(device);
    }
    TRY(decide_target(options, &choice, choice.kind == DEVICE_KIND_CUDA, &target, err));
    TRY(plan_on(model, options, &target, plan, err));
    tell_host_memory(model, options);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status init_locks(struct imbrex_engine *engine, struct imbrex_error *err)
{
    pthread_condattr_t attributes;
    bool is_good = pthread_condattr_init(&attributes) == 0;
    if (is_good) {
        is_good = pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC) == 0 &&
                  pthread_cond_init(&engine->changed, &attributes) == 0;
        pthread_condattr_destroy(&attributes);
    }
    if (is_good && pthread_mutex_init(&engine->lock, NULL) != 0) {
        pthread_cond_destroy(&engine->changed);
        is_good = false;
    }
    if (!is_good) {
        return error_set(err, IMBREX_STATUS_OUT_OF_MEMORY,
                         "the engine's lock: expected the operating system to give one, found "
                         "none left");
    }
    return IMBREX_STATUS_OK;
}

/* Says so if all blocks in the KV folder are such as this engine may not use, or something else is
 * there. A folder that several models share has some of each. */
static void tell_foreign(const struct imbrex_engine *engine, const char *path)
{
    struct kv_tiers_metrics metrics;
    kv_tiers_read_metrics(engine->tiers.tiers, &metrics);
    kv_tiers_tell_strange(&metrics.disk, path, &engine->model->log);
    if (metrics.disk.num_foreign_bytes > 0 && metrics.disk.num_blocks == 0) {
        log_write(&engine->model->log, IMBREX_LOG_LEVEL_WARNING,
                  "%s: %lld bytes are blocks of another model, KV type (here it is %s), secret "
                  "(with a remote tier it is that tier's), kernels or "
                  "version: they are not used, and go first when room is short",
                  path, (long long)metrics.disk.num_foreign_bytes, engine->plan.kv_dtype);
    }
}

static enum imbrex_status create_prefix_cache(struct imbrex_engine *engine,
                                              const struct imbrex_engine_options *options,
                                              const struct target *target, struct imbrex_error *err)
{
    const struct imbrex_memory_plan *plan = &engine->plan;
    const struct prefix_tiers_options tiers_options = {
        .host_bytes = options->kv_host_bytes,
        .disk_path = options->kv_disk_path,
        .disk_bytes = options->kv_disk_bytes,
        .disk_zstd_level = options->kv_disk_zstd_level,
        .remote_url = options->kv_remote_url,
        .remote_secret_path = options->kv_remote_secret_path,
        .num_blocks = plan->kv_num_blocks,
        .prefetch_percent = options->kv_prefetch_percent,
        .writes_through = options->kv_write == IMBREX_KV_WRITE_COMPUTED,
        .device = engine->device,
        .kv = executor_kv(engine->executor),
        .log = &engine->model->log,
    };
    if (has_tiers(options)) {
        TRY(prefix_tiers_prepare(&tiers_options, &engine->tiers, err));
    }
    char computation[192];
    snprintf(computation, sizeof(computation),
             "%s, KV %s, imbrex %s, kernels %s, invariant %d, without %x", plan->compute,
             plan->kv_dtype, imbrex_version(), plan->kernels, target->batch_invariant,
             (unsigned)options->ablations);
    const struct prefix_cache_options cache_options = {
        .cache =
            {
                /* Preempted ones wait beside those that never ran; one too many runs without the
                 * cache. */
                .max_requests = plan->max_waiting + 2 * plan->max_running,
                .block_size = KV_BLOCK_SIZE,
                .has_token_ids = true,
                .forgets = has_tiers(options) ? prefix_tiers_forget : NULL,
                .user = &engine->tiers,
                .policy = policy_of(options),
                .policy_options = kv_policy_options_default(),
            },
        .computation = computation,
        .kept_secret = prefix_tiers_secret(&engine->tiers, &tiers_options),
    };
    TRY(prefix_cache_create(engine->model, &cache_options, &engine->kv_pool, &engine->prefix, err));
    engine->prefix.metrics = &engine->metrics;
    engine->scheduler.cache = prefix_scheduler_cache(&engine->prefix);
    if (has_tiers(options)) {
        TRY(prefix_tiers_create(&tiers_options, &engine->prefix, &engine->tiers, err));
    }
    if (options->kv_disk_path != NULL) {
        tell_foreign(engine, options->kv_disk_path);
    }
    /* What one step fills: whole blocks of prompts, and the last tokens of others. */
    size_t max_filled = (size_t)(plan->max_step_tokens / KV_BLOCK_SIZE) + (size_t)plan->max_running;
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        struct flight *flight = &engine->flights[i];
        flight->pinned_blocks = malloc(max_filled * sizeof(*flight->pinned_blocks));
        if (flight->pinned_blocks == NULL) {
            return error_out_of_memory(err, "pinned blocks",
                                       max_filled * sizeof(*flight->pinned_blocks));
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status create_parts(struct imbrex_engine *engine,
                                       const struct imbrex_engine_options *options,
                                       const struct target *target, struct imbrex_error *err)
{
    struct imbrex_memory_plan *plan = &engine->plan;
    struct executor_options executor_options = executor_options_of(options, plan, target);
    struct scheduler_options scheduler_options = {
        .max_running = plan->max_running,
        .max_step_tokens = plan->max_step_tokens,
        .max_step_samples = engine->limits.max_samples,
        .max_blocks = engine->limits.max_blocks,
        .priority_step_ns =
            options->priority_step_ns == 0 ? DEFAULT_PRIORITY_STEP_NS : options->priority_step_ns,
        .max_step_history = engine->limits.max_history,
        .has_block_edges = target->batch_invariant && plan->max_step_tokens >= KV_BLOCK_SIZE,
    };
    TRY(executor_create(engine->model, engine->device, &executor_options, &engine->executor, err));
    plan->kernels = executor_kernels_name(engine->executor);
    TRY(kv_pool_create(plan->kv_num_blocks, &engine->kv_pool, err));
    TRY(scheduler_create(&scheduler_options, &engine->kv_pool, &engine->scheduler, err));
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        TRY(step_plan_create(&scheduler_options, &engine->flights[i].plan, err));
    }
    if (policy_of(options) != NULL) {
        TRY(create_prefix_cache(engine, options, target, err));
    }
    engine->request_limits = (struct request_limits){
        .context_size = plan->context_size,
        .priority_step_ns = scheduler_options.priority_step_ns,
        .identity = engine->prefix.cache != NULL ? &engine->prefix.identity : NULL};
    return IMBREX_STATUS_OK;
}

/* The device stays the caller's. */
static enum imbrex_status create_on(struct imbrex_model *model,
                                    const struct imbrex_engine_options *options,
                                    const struct target *target, struct device *device,
                                    struct imbrex_engine **engine, struct imbrex_error *err)
{
    struct imbrex_memory_plan plan;
    TRY(plan_on(model, options, target, &plan, err));
    TRY(check_host_memory(options, err));
    struct imbrex_engine *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the engine", sizeof(*created));
    }
    enum imbrex_status status = init_locks(created, err);
    if (status != IMBREX_STATUS_OK) {
        free(created);
        return status;
    }
    created->model = model;
    created->plan = plan;
    created->limits = limits_of(options, &plan, target);
    created->device = device;
    created->range_begin = options->range_begin;
    created->range_end = options->range_end;
    created->range_user = options->range_user;
    TRY_OR_FAIL(create_parts(created, options, target, err));
    metrics_set(&created->metrics.kv_num_blocks, plan.kv_num_blocks);
    metrics_set(&created->metrics.kv_num_free, plan.kv_num_blocks);
    if (plan.context_size > model->config.max_position_embeddings) {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "context of %d tokens is longer than the %d that %s was made for: text beyond "
                  "them may degrade",
                  plan.context_size, model->config.max_position_embeddings, model->path);
    }
    *engine = created;
    return IMBREX_STATUS_OK;
fail:
    imbrex_engine_destroy(created);
    return status;
}

enum imbrex_status engine_create_on(struct imbrex_model *model,
                                    const struct imbrex_engine_options *options,
                                    struct device *device, struct imbrex_engine **engine,
                                    struct imbrex_error *err)
{
    struct target target;
    if (device == NULL) {
        return imbrex_engine_create(model, options, engine, err);
    }
    const struct device_choice choice = {.kind = device_kind(device)};
    TRY(decide_target(options, &choice, device_is_async(device), &target, err));
    return create_on(model, options, &target, device, engine, err);
}

/* With a device of the engine's own. *opened is its choice with the kind decided, once it is. */
static enum imbrex_status open_and_create(struct imbrex_model *model,
                                          const struct imbrex_engine_options *options,
                                          const struct device_choice *choice,
                                          struct device_choice *opened,
                                          struct imbrex_engine **engine, struct imbrex_error *err)
{
    struct target target;
    struct device *device;
    TRY(device_open(choice, &model->log, &device, opened, err));
    enum imbrex_status status =
        decide_target(options, opened, device_is_async(device), &target, err);
    if (status == IMBREX_STATUS_OK) {
        status = create_on(model, options, &target, device, engine, err);
    }
    if (status != IMBREX_STATUS_OK) {
        device_destroy(device);
        return status;
    }
    (*engine)->owns_device = true;
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_engine_create(struct imbrex_model *model,
                                        const struct imbrex_engine_options *options,
                                        struct imbrex_engine **engine, struct imbrex_error *err)
{
    struct imbrex_engine_options defaults = imbrex_engine_options_default();
    struct device_choice choice, opened;
    if (options == NULL) {
        options = &defaults;
    }
    TRY(check_options(options, err));
    TRY(device_parse(options->device, &choice, err));
    choice.tuned = options->tuned;
    choice.tuned_is_optional = options->tuned_is_optional;
    opened = choice;
    struct imbrex_error reason = {0};
    enum imbrex_status status = open_and_create(model, options, &choice, &opened, engine, &reason);
    if (status == IMBREX_STATUS_OUT_OF_MEMORY && choice.kind == DEVICE_KIND_AUTO &&
        opened.kind == DEVICE_KIND_CUDA) {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "device auto: the model runs on the CPU: %s", reason.message);
        choice.kind = DEVICE_KIND_CPU;
        return open_and_create(model, options, &choice, &opened, engine, err);
    }
    if (status != IMBREX_STATUS_OK && err != NULL) {
        *err = reason;
    }
    return status;
}

void imbrex_engine_destroy(struct imbrex_engine *engine)
{
    if (engine == NULL) {
        return;
    }
    imbrex_engine_stop(engine);
    assert(engine->inbox.first == NULL && engine->live.first == NULL &&
           engine->ending.first == NULL);
    for (int32_t i = 0; i < EXECUTOR_MAX_IN_FLIGHT; i++) {
        step_plan_destroy(&engine->flights[i].plan);
        free(engine->flights[i].pinned_blocks);
    }
    prefix_tiers_destroy(&engine->tiers, engine->failure.status == IMBREX_STATUS_OK);
    prefix_cache_destroy(&engine->prefix);
    scheduler_destroy(&engine->scheduler);
    kv_pool_destroy(&engine->kv_pool);
    executor_destroy(engine->executor);
    if (engine->owns_device) {
        device_destroy(engine->device);
    }
    pthread_cond_destroy(&engine->changed);
    pthread_mutex_destroy(&engine->lock);
    free(engine);
}

void imbrex_engine_memory_plan(const struct imbrex_engine *engine, struct imbrex_memory_plan *plan)
{
    *plan = engine->plan;
}

void imbrex_engine_read_metrics(const struct imbrex_engine *engine,
                                struct imbrex_engine_metrics *metrics)
{
    metrics_read(&engine->metrics, metrics);
}

enum imbrex_status imbrex_engine_score(struct imbrex_engine *engine, const int32_t *token_ids,
                                       int32_t num_tokens, double *nll, struct imbrex_error *err)
{
    if (num_tokens < 2) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "score: expected at least 2 token ids, found %d", num_tokens);
    }
    if (num_tokens > engine->plan.context_size) {
        return error_set(err, IMBREX_STATUS_CAPACITY,
                         "score: expected at most %d token ids (context size), found %d",
                         engine->plan.context_size, num_tokens);
    }
    for (int32_t i = 0; i < num_tokens; i++) {
        if (token_ids[i] < 0 || token_ids[i] >= engine->model->config.vocab_size) {
            return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "score: token_ids[%d]: expected an id in [0, %d), found %d", i,
                             engine->model->config.vocab_size, token_ids[i]);
        }
    }
    TRY(engine_check_outside(engine, "score", err));
    struct imbrex_request_options options = imbrex_request_options_default(engine->model);
    struct imbrex_request *request;
    const float *logprobs;
    options.prompt_ids = token_ids;
    options.num_prompt_ids = num_tokens;
    options.max_tokens = IMBREX_NO_TOKENS;
    options.num_prompt_logprobs = 0;
    options.no_text = true;
    TRY(imbrex_request_submit(engine, &options, &request, err));
    enum imbrex_status status = imbrex_request_wait(request, err);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_request_prompt_logprobs(request, &logprobs, NULL, err);
    }
    for (int32_t i = 0; status == IMBREX_STATUS_OK && i < num_tokens - 1; i++) {
        nll[i] = -(double)logprobs[i + 1];
    }
    imbrex_request_destroy(request);
    return status;
}
