/* SPDX-License-Identifier: Apache-2.0 */
/* Writes an open model as a GGUF file of another type. Each tensor is read in chunks of rows; the
 * rows of a chunk are widened, quantised and compared by all threads, then written. Memory: one
 * chunk. Which tensor gets which type follows llama.cpp, so that its files and ours are alike. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/memory.h"
#include "base/thread_pool.h"
#include "model/gguf_export.h"
#include "model/model.h"
#include "ops/quant.h"

#define CHUNK_ELEMENTS ((int64_t)1 << 20)
#define REASON_BYTES 64

struct type_row {
    const char *name;
    enum dtype dtype;
    uint32_t file_type; /* llama.cpp's number for such a file */
};

/* IMBREX_QUANTIZE_TYPES names them. */
static const struct type_row types[] = {
    {"f32", DTYPE_F32, 0},    {"f16", DTYPE_F16, 1},    {"bf16", DTYPE_BF16, 32},
    {"q8_0", DTYPE_Q8_0, 7},  {"q4_0", DTYPE_Q4_0, 2},  {"q4_1", DTYPE_Q4_1, 3},
    {"q5_0", DTYPE_Q5_0, 8},  {"q5_1", DTYPE_Q5_1, 9},  {"q4_k", DTYPE_Q4_K, 14},
    {"q5_k", DTYPE_Q5_K, 16}, {"q6_k", DTYPE_Q6_K, 18},
};

/* A tensor on its way: what it is in the checkpoint, and what it becomes. */
struct target {
    const struct checkpoint_tensor *source;
    char name[CHECKPOINT_NAME_BYTES];
    int64_t num_rows, row_elements; /* of both */
    enum dtype dtype;
    bool is_permuted; /* rows change places, see source_row */
    char reason[REASON_BYTES];
    size_t num_bytes;
};

struct quantizer {
    const struct imbrex_model *model;
    const struct imbrex_quantize_options *options;
    const struct type_row *type;
    struct gguf_writer writer;
    struct thread_pool *pool;
    struct target *targets; /* [num_targets] in the order of the file */
    int32_t num_targets;
    float *rope_factors; /* [head_dim / 2] or NULL: a tensor that the checkpoint does not have */
    int64_t max_chunk_rows;
    unsigned char *chunk; /* rows as they are written */
    float *scratch;       /* [num_threads][2 * max_row_elements] */
    double *sums;         /* [max_chunk_rows][2]: squares of errors and of elements */
    int64_t max_row_elements;
    uint64_t bytes_done, bytes_total; /* of the sources */
    struct imbrex_quantize_report report;
    double error_sum, square_sum;
    struct imbrex_error *err;
};

/* ---- what becomes of each tensor ------------------------------------------------------------- */

/* The type for rows that are no whole number of blocks. */
static enum dtype fall_back(enum dtype dtype)
{
    switch (dtype) {
    case DTYPE_Q4_K:
        return DTYPE_Q5_0;
    case DTYPE_Q5_K:
        return DTYPE_Q5_1;
    case DTYPE_Q6_K:
        return DTYPE_Q8_0;
    default:
        return DTYPE_F16;
    }
}

static bool is_output_matrix(const struct quantizer *quantizer, const char *name)
{
    const char *output = quantizer->model->weights.tied ? "token_embd.weight" : "output.weight";
    return strcmp(name, output) == 0;
}

static void choose_dtype(const struct quantizer *quantizer, struct target *target)
{
    if (target->source->num_dims < 2) {
        target->dtype = DTYPE_F32;
        if (quantizer->type->dtype != DTYPE_F32) {
            snprintf(target->reason, REASON_BYTES, "norms and biases are F32");
        }
        return;
    }
    target->dtype = quantizer->type->dtype;
    if (is_output_matrix(quantizer, target->name) &&
        (target->dtype == DTYPE_Q4_K || target->dtype == DTYPE_Q5_K)) {
        target->dtype = DTYPE_Q6_K;
        snprintf(target->reason, REASON_BYTES, "the output matrix gets more bits");
    }
    while (target->row_elements % dtype_block_elements(target->dtype) != 0) {
        snprintf(target->reason, REASON_BYTES, "rows of %" PRId64 " are no multiple of %" PRId32,
                 target->row_elements, dtype_block_elements(target->dtype));
        target->dtype = fall_back(target->dtype);
    }
}

static bool has_suffix(const char *name, const char *suffix)
{
    size_t name_bytes = strlen(name), suffix_bytes = strlen(suffix);
    return name_bytes >= suffix_bytes && strcmp(name + name_bytes - suffix_bytes, suffix) == 0;
}

/* Rows of q and k of a Hugging Face folder turn in halves of a head, those of a GGUF file of
 * "llama" in neighbours. */
static bool needs_permutation(const struct imbrex_model *model, const char *name)
{
    static const char *const suffixes[] = {".attn_q.weight", ".attn_k.weight", ".attn_q.bias",
                                           ".attn_k.bias"};
    if (model->checkpoint.is_gguf || !gguf_export_is_llama(&model->config)) {
        return false;
    }
    for (size_t i = 0; i < sizeof(suffixes) / sizeof(suffixes[0]); i++) {
        if (has_suffix(name, suffixes[i])) {
            return true;
        }
    }
    return false;
}

static int64_t source_row(const struct quantizer *quantizer, const struct target *target,
                          int64_t row)
{
    int64_t head_dim = quantizer->model->config.head_dim;
    int64_t within = row % head_dim;
    if (!target->is_permuted) {
        return row;
    }
    return row - within + within % 2 * (head_dim / 2) + within / 2;
}

/* Left out: what weights_bind ignored. */
static bool is_written(const struct imbrex_model *model, const struct checkpoint_tensor *tensor)
{
    if (weights_is_ignored(tensor->name)) {
        return false;
    }
    return !(model->weights.tied && strcmp(tensor->name, "lm_head.weight") == 0);
}

static void plan_target(const struct quantizer *quantizer, const struct checkpoint_tensor *source,
                        struct target *target)
{
    const struct imbrex_model *model = quantizer->model;
    *target = (struct target){.source = source};
    if (model->checkpoint.is_gguf) {
        snprintf(target->name, sizeof(target->name), "%s", source->name);
    } else {
        gguf_name_of(source->name, target->name);
    }
    target->is_permuted = needs_permutation(model, target->name);
    bool is_vector = source->num_dims < 2;
    target->row_elements = is_vector && !target->is_permuted ? source->shape[0]
                           : is_vector                       ? 1
                                                             : source->shape[1];
    target->num_rows = is_vector && !target->is_permuted ? 1 : source->shape[0];
    choose_dtype(quantizer, target);
    target->num_bytes =
        dtype_row_bytes(target->dtype, target->row_elements) * (size_t)target->num_rows;
}

/* In the order of a forward pass: embedding, layers by their number, the rest. */
static int64_t layer_of(const struct target *target)
{
    if (strncmp(target->name, "blk.", 4) == 0) {
        return strtoll(target->name + 4, NULL, 10);
    }
    return strncmp(target->name, "token_embd", 10) == 0 ? -1 : INT32_MAX;
}

static int compare_targets(const void *left, const void *right)
{
    const struct target *a = left, *b = right;
    int64_t a_layer = layer_of(a), b_layer = layer_of(b);
    return a_layer != b_layer ? (a_layer > b_layer) - (a_layer < b_layer)
                              : strcmp(a->name, b->name);
}

static enum imbrex_status plan_targets(struct quantizer *quantizer)
{
    const struct checkpoint *checkpoint = &quantizer->model->checkpoint;
    size_t max_targets = (size_t)checkpoint->num_tensors;
    quantizer->targets = calloc(max_targets, sizeof(quantizer->targets[0]));
    if (quantizer->targets == NULL) {
        return error_out_of_memory(quantizer->err, "a list of tensors",
                                   max_targets * sizeof(quantizer->targets[0]));
    }
    for (int32_t i = 0; i < checkpoint->num_tensors; i++) {
        const struct checkpoint_tensor *source = checkpoint->tensors[i];
        if (is_written(quantizer->model, source)) {
            struct target *target = &quantizer->targets[quantizer->num_targets++];
            plan_target(quantizer, source, target);
            quantizer->bytes_total += source->num_bytes;
            if (target->row_elements > quantizer->max_row_elements) {
                quantizer->max_row_elements = target->row_elements;
            }
        }
    }
    qsort(quantizer->targets, (size_t)quantizer->num_targets, sizeof(quantizer->targets[0]),
          compare_targets);
    return IMBREX_STATUS_OK;
}

/* ---- one chunk of rows ----------------------------------------------------------------------- */

struct chunk_work {
    const struct quantizer *quantizer;
    const struct target *target;
    int64_t first_row;
};

static double sum_of_squares(const float *values, int64_t num_values)
{
    double sum = 0.0;
    for (int64_t i = 0; i < num_values; i++) {
        sum += (double)values[i] * (double)values[i];
    }
    return sum;
}

/* Rows [begin, end) of the chunk. A row that is not finite, before or behind, gets NaN as its
 * error. */
static void quantize_rows(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    const struct chunk_work *work = arg;
    const struct quantizer *quantizer = work->quantizer;
    const struct target *target = work->target;
    const struct checkpoint_tensor *source = target->source;
    int64_t num_elements = target->row_elements;
    size_t from_bytes = dtype_row_bytes(source->dtype, num_elements);
    size_t to_bytes = dtype_row_bytes(target->dtype, num_elements);
    float *before = quantizer->scratch + 2 * quantizer->max_row_elements * thread_idx;
    float *behind = before + quantizer->max_row_elements;
    for (int64_t i = begin; i < end; i++) {
        int64_t row = source_row(quantizer, target, work->first_row + i);
        const unsigned char *from = source->elements + (size_t)row * from_bytes;
        unsigned char *to = quantizer->chunk + (size_t)i * to_bytes;
        double *sums = quantizer->sums + 2 * i;
        quant_dequantize_row(source->dtype, from, before, num_elements);
        sums[0] = 0.0;
        sums[1] = sum_of_squares(before, num_elements);
        if (source->dtype == target->dtype) {
            memcpy(to, from, to_bytes);
            continue;
        }
        if (!isfinite(sums[1])) {
            continue;
        }
        quant_quantize_row(target->dtype, before, to, num_elements);
        quant_dequantize_row(target->dtype, to, behind, num_elements);
        for (int64_t j = 0; j < num_elements; j++) {
            behind[j] -= before[j];
        }
        sums[0] = sum_of_squares(behind, num_elements);
    }
}

static enum imbrex_status check_finite(const struct quantizer *quantizer,
                                       const struct target *target, const double *sums)
{
    if (!isfinite(sums[1])) {
        return error_set(quantizer->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected finite elements, found an infinite one or NaN",
                         target->source->file, target->source->name);
    }
    if (!isfinite(sums[0])) {
        return error_set(quantizer->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: %s: expected elements that %s can hold, found a larger one",
                         target->source->file, target->source->name, dtype_name(target->dtype));
    }
    return IMBREX_STATUS_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

/* Tells the caller how far it is; `finished` is the tensor that has just been written, or NULL. */
static enum imbrex_status tell(const struct quantizer *quantizer, int32_t num_finished,
                               const struct imbrex_quantized_tensor *finished)
{
    const struct imbrex_quantize_options *options = quantizer->options;
    const struct imbrex_quantize_progress progress = {.tensor = finished,
                                                      .num_finished = num_finished,
                                                      .num_tensors = quantizer->report.num_tensors,
                                                      .bytes_done = quantizer->bytes_done,
                                                      .bytes_total = quantizer->bytes_total};
    if (options->progress != NULL && !options->progress(options->user, &progress)) {
        return error_set(quantizer->err, IMBREX_STATUS_CANCELLED, "%s: cancelled, nothing written",
                         options->path);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status finish_tensor(struct quantizer *quantizer, int32_t num_finished,
                                        const struct target *target, double error_sum,
                                        double square_sum)
{
    const struct checkpoint_tensor *source = target->source;
    struct imbrex_quantized_tensor finished = {
        .name = target->name,
        .from = source->dtype_name,
        .to = dtype_name(target->dtype),
        .reason = target->reason[0] != '\0' ? target->reason : NULL,
        .num_dims = source->num_dims,
        .from_bytes = source->num_bytes,
        .to_bytes = target->num_bytes,
        .rms_error = square_sum > 0.0 ? sqrt(error_sum / square_sum) : 0.0};
    memcpy(finished.shape, source->shape, sizeof(finished.shape));
    quantizer->error_sum += error_sum;
    quantizer->square_sum += square_sum;
    quantizer->report.from_bytes += source->num_bytes;
    quantizer->report.to_bytes += target->num_bytes;
    TRY(gguf_writer_end_tensor(&quantizer->writer, quantizer->err));
    return tell(quantizer, num_finished, &finished);
}

static int64_t rows_of_chunk(const struct target *target)
{
    int64_t num_rows = CHUNK_ELEMENTS / (target->row_elements > 0 ? target->row_elements : 1);
    num_rows = num_rows < 1 ? 1 : num_rows;
    return num_rows < target->num_rows ? num_rows : target->num_rows;
}

static enum imbrex_status write_tensor(struct quantizer *quantizer, int32_t target_idx)
{
    const struct target *target = &quantizer->targets[target_idx];
    size_t from_bytes = dtype_row_bytes(target->source->dtype, target->row_elements);
    size_t to_bytes = dtype_row_bytes(target->dtype, target->row_elements);
    double error_sum = 0.0, square_sum = 0.0;
    int64_t max_rows = rows_of_chunk(target);
    for (int64_t row = 0; row < target->num_rows; row += max_rows) {
        int64_t num_rows = target->num_rows - row < max_rows ? target->num_rows - row : max_rows;
        struct chunk_work work = {quantizer, target, row};
        thread_pool_run(quantizer->pool, num_rows, 1, quantize_rows, &work);
        for (int64_t i = 0; i < num_rows; i++) {
            const double *sums = quantizer->sums + 2 * i;
            TRY(check_finite(quantizer, target, sums));
            error_sum += sums[0];
            square_sum += sums[1];
        }
        TRY(gguf_writer_write(&quantizer->writer, quantizer->chunk, (size_t)num_rows * to_bytes,
                              quantizer->err));
        quantizer->bytes_done += (uint64_t)num_rows * from_bytes;
        TRY(tell(quantizer, target_idx, NULL));
    }
    return finish_tensor(quantizer, target_idx + 1, target, error_sum, square_sum);
}

/* The factors of Llama 3's RoPE, which a Hugging Face folder has as four numbers. */
static enum imbrex_status write_rope_factors(struct quantizer *quantizer)
{
    int64_t num_factors = quantizer->model->config.head_dim / 2;
    size_t num_bytes = (size_t)num_factors * sizeof(float);
    struct imbrex_quantized_tensor finished = {.name = GGUF_ROPE_FACTORS,
                                               .from = "config.json",
                                               .to = "F32",
                                               .num_dims = 1,
                                               .shape = {num_factors},
                                               .to_bytes = num_bytes};
    quantizer->report.to_bytes += num_bytes;
    TRY(gguf_writer_write(&quantizer->writer, quantizer->rope_factors, num_bytes, quantizer->err));
    TRY(gguf_writer_end_tensor(&quantizer->writer, quantizer->err));
    return tell(quantizer, quantizer->report.num_tensors, &finished);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static enum imbrex_status add_tensors(struct quantizer *quantizer)
{
    const struct imbrex_model *model = quantizer->model;
    for (int32_t i = 0; i < quantizer->num_targets; i++) {
        const struct target *target = &quantizer->targets[i];
        TRY(gguf_writer_add_tensor(&quantizer->writer, target->name, target->source->num_dims,
                                   target->source->shape, target->dtype, quantizer->err));
    }
    quantizer->report.num_tensors = quantizer->num_targets;
    TRY(gguf_export_rope_factors(model, &quantizer->rope_factors, quantizer->err));
    if (quantizer->rope_factors != NULL) {
        int64_t num_factors = model->config.head_dim / 2;
        TRY(gguf_writer_add_tensor(&quantizer->writer, GGUF_ROPE_FACTORS, 1, &num_factors,
                                   DTYPE_F32, quantizer->err));
        quantizer->report.num_tensors++;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status reserve(struct quantizer *quantizer)
{
    size_t num_threads = (size_t)thread_pool_num_threads(quantizer->pool), chunk_bytes = 0;
    for (int32_t i = 0; i < quantizer->num_targets; i++) {
        const struct target *target = &quantizer->targets[i];
        int64_t num_rows = rows_of_chunk(target);
        size_t num_bytes = (size_t)num_rows * dtype_row_bytes(target->dtype, target->row_elements);
        chunk_bytes = num_bytes > chunk_bytes ? num_bytes : chunk_bytes;
        if (num_rows > quantizer->max_chunk_rows) {
            quantizer->max_chunk_rows = num_rows;
        }
    }
    size_t scratch_bytes =
        2 * (size_t)quantizer->max_row_elements * num_threads * sizeof(quantizer->scratch[0]);
    size_t sums_bytes = 2 * (size_t)quantizer->max_chunk_rows * sizeof(quantizer->sums[0]);
    quantizer->chunk = malloc(chunk_bytes + 1);
    quantizer->scratch = malloc(scratch_bytes + 1);
    quantizer->sums = malloc(sums_bytes + 1);
    if (quantizer->chunk == NULL || quantizer->scratch == NULL || quantizer->sums == NULL) {
        return error_out_of_memory(quantizer->err, "rows to quantise",
                                   chunk_bytes + scratch_bytes + sums_bytes);
    }
    return IMBREX_STATUS_OK;
}

/* A folder one of whose files became something else could not be opened any more. A GGUF file is a
 * whole model: it may be replaced by another. */
static enum imbrex_status check_output(const struct quantizer *quantizer)
{
    const struct checkpoint *checkpoint = &quantizer->model->checkpoint;
    for (int32_t i = 0; i < checkpoint->num_files && !checkpoint->is_gguf; i++) {
        if (file_is_same(checkpoint->files[i].path, quantizer->options->path)) {
            return error_set(quantizer->err, IMBREX_STATUS_INVALID_ARGUMENT,
                             "%s: expected a file to write that is none of the model's own",
                             quantizer->options->path);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status write_file(struct quantizer *quantizer)
{
    const struct imbrex_quantize_options *options = quantizer->options;
    int32_t num_threads = options->num_threads > 0 ? options->num_threads : thread_pool_num_cpus();
    TRY(check_output(quantizer));
    TRY(gguf_writer_open(options->path, options->overwrite, &quantizer->writer, quantizer->err));
    TRY(plan_targets(quantizer));
    TRY(thread_pool_create(num_threads, &quantizer->pool, quantizer->err));
    TRY(reserve(quantizer));
    TRY(gguf_export_metadata(quantizer->model, quantizer->type->file_type,
                             dtype_is_quantized(quantizer->type->dtype), &quantizer->writer,
                             quantizer->err));
    TRY(add_tensors(quantizer));
    TRY(gguf_writer_begin_tensors(&quantizer->writer, quantizer->err));
    for (int32_t i = 0; i < quantizer->num_targets; i++) {
        TRY(write_tensor(quantizer, i));
    }
    if (quantizer->rope_factors != NULL) {
        TRY(write_rope_factors(quantizer));
    }
    quantizer->report.file_bytes = quantizer->writer.file.num_bytes;
    return gguf_writer_commit(&quantizer->writer, quantizer->err);
}

static enum imbrex_status find_type(const char *name, const struct type_row **type,
                                    struct imbrex_error *err)
{
    for (size_t i = 0; i < sizeof(types) / sizeof(types[0]); i++) {
        if (name != NULL && strcasecmp(types[i].name, name) == 0 &&
            quant_can_quantize(types[i].dtype)) {
            *type = &types[i];
            return IMBREX_STATUS_OK;
        }
    }
    return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                     "type: expected " IMBREX_QUANTIZE_TYPES ", found %.64s",
                     name != NULL ? name : "none");
}

struct imbrex_quantize_options imbrex_quantize_options_default(void)
{
    return (struct imbrex_quantize_options){.type = "q8_0"};
}

enum imbrex_status imbrex_quantize(struct imbrex_model *model,
                                   const struct imbrex_quantize_options *options,
                                   struct imbrex_quantize_report *report, struct imbrex_error *err)
{
    struct quantizer quantizer = {.model = model, .options = options, .err = err};
    if (options->path == NULL || options->num_threads < 0) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "expected a path and num_threads >= 0, found %s and %" PRId32,
                         options->path != NULL ? options->path : "none", options->num_threads);
    }
    TRY(find_type(options->type, &quantizer.type, err));
    TRY(model_fill(model, err));
    enum imbrex_status status = write_file(&quantizer);
    if (status == IMBREX_STATUS_OK && report != NULL) {
        *report = quantizer.report;
        report->rms_error =
            quantizer.square_sum > 0.0 ? sqrt(quantizer.error_sum / quantizer.square_sum) : 0.0;
    }
    gguf_writer_abandon(&quantizer.writer);
    thread_pool_destroy(quantizer.pool);
    free(quantizer.targets);
    free(quantizer.rope_factors);
    free(quantizer.chunk);
    free(quantizer.scratch);
    free(quantizer.sums);
    return status;
}
