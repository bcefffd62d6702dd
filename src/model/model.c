/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint: a folder, a GGUF file, or none; and what the public API tells about it. */
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "base/asset.h"
#include "base/file.h"
#include "model/gguf_config.h"
#include "model/random_model.h"
#include "model/rope.h"

/* A real config.json has a few KiB; the limit only keeps a wrong file from being read whole. */
#define MAX_CONFIG_BYTES ((size_t)16 << 20)

struct imbrex_model_options imbrex_model_options_default(void)
{
    return (struct imbrex_model_options){.log = NULL, .log_user = NULL};
}

static enum imbrex_status read_config(struct imbrex_model *model, struct imbrex_error *err)
{
    char *path = NULL;
    struct file file = {0};
    enum imbrex_status status;

    TRY_OR_FAIL(file_join(model->path, "config.json", &path, err));
    TRY_OR_FAIL(file_read(path, MAX_CONFIG_BYTES, &file, err));
    TRY_OR_FAIL(config_parse(path, file.bytes, file.num_bytes, &model->config, err));
fail:
    file_close(&file);
    free(path);
    return status;
}

static enum imbrex_status read_generation_config(struct imbrex_model *model,
                                                 struct imbrex_error *err)
{
    char *path = NULL;
    struct file file = {0};
    enum imbrex_status status;

    model->generation_config = generation_config_default();
    TRY_OR_FAIL(file_join(model->path, "generation_config.json", &path, err));
    if (file_exists(path)) {
        TRY_OR_FAIL(file_read(path, MAX_CONFIG_BYTES, &file, err));
        TRY_OR_FAIL(generation_config_parse(path, file.bytes, file.num_bytes,
                                            model->config.vocab_size, &model->generation_config,
                                            err));
    }
fail:
    file_close(&file);
    free(path);
    return status;
}

static enum imbrex_status open_tokenizer(struct imbrex_model *model, struct imbrex_error *err)
{
    char *path = NULL;
    enum imbrex_status status;

    TRY_OR_FAIL(file_join(model->path, "tokenizer.json", &path, err));
    if (file_exists(path)) {
        TRY_OR_FAIL(imbrex_tokenizer_open(model->path, &model->tokenizer, err));
    } else {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "%s has no tokenizer.json: it takes and gives token ids only", model->path);
    }
fail:
    free(path);
    return status;
}

/* A tokenizer may have fewer ids than the model has rows (padding), not more: an id without a row
 * could be read from a prompt and not be embedded. */
static enum imbrex_status check_tokenizer_fits(const struct imbrex_model *model,
                                               struct imbrex_error *err)
{
    if (model->tokenizer == NULL) {
        return IMBREX_STATUS_OK;
    }
    int32_t num_ids = imbrex_tokenizer_vocab_size(model->tokenizer);
    if (num_ids > model->config.vocab_size) {
        return error_set(
            err, IMBREX_STATUS_FORMAT, "%s%s: expected at most %d token ids (%s), found %d",
            model->path, model->checkpoint.is_gguf ? ": tokenizer.ggml.tokens" : "/tokenizer.json",
            model->config.vocab_size,
            model->checkpoint.is_gguf ? "rows of token_embd.weight" : "vocab_size of config.json",
            num_ids);
    }
    return IMBREX_STATUS_OK;
}

/* A LoRA adapter is a folder of its own that only changes another model's weights. */
static enum imbrex_status check_adapter(const struct imbrex_model *model, struct imbrex_error *err)
{
    static const char *const names[] = {"adapter_config.json", "model.safetensors",
                                        "model.safetensors.index.json"};
    bool exist[sizeof(names) / sizeof(names[0])];
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        char *path = NULL;
        TRY(file_join(model->path, names[i], &path, err));
        exist[i] = file_exists(path);
        free(path);
    }
    if (exist[0] && !exist[1] && !exist[2]) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: adapter_config.json: expected a whole model, found a LoRA adapter: "
                         "merge it into the model that it was made for",
                         model->path);
    }
    if (exist[0]) {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "%s: adapter_config.json is ignored: the folder's own weights run", model->path);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status open_folder(struct imbrex_model *model, struct imbrex_error *err)
{
    TRY(check_adapter(model, err));
    TRY(read_config(model, err));
    TRY(read_generation_config(model, err));
    TRY(checkpoint_open(model->path, &model->checkpoint, err));
    TRY(weights_bind(&model->checkpoint, &model->config, model->path, &model->weights, err));
    TRY(open_tokenizer(model, err));
    TRY(check_tokenizer_fits(model, err));
    return chat_source_read(model, err);
}

/* ---- other kinds ----------------------------------------------------------------------------- */

/* Without the key, or where its value says so, as in files for benchmarks. */
static bool has_tokenizer(const struct gguf *gguf)
{
    static const char *const absent[] = {GGUF_NO_TOKENIZER, "none"};
    const struct gguf_value *kind = gguf_find(gguf, "tokenizer.ggml.model");
    bool is_absent = kind == NULL;
    for (size_t i = 0; i < 2 && kind != NULL && kind->type == GGUF_TYPE_STRING; i++) {
        is_absent |= kind->strings[0].num_bytes == strlen(absent[i]) &&
                     memcmp(kind->strings[0].bytes, absent[i], strlen(absent[i])) == 0;
    }
    return !is_absent;
}

static enum imbrex_status open_gguf(struct imbrex_model *model, struct imbrex_error *err)
{
    const struct gguf *gguf = &model->checkpoint.gguf;
    model->generation_config = generation_config_default();
    TRY(checkpoint_open_gguf(model->path, &model->checkpoint, err));
    TRY(gguf_read_config(gguf, &model->config, err));
    TRY(weights_bind(&model->checkpoint, &model->config, model->path, &model->weights, err));
    if (has_tokenizer(gguf)) {
        TRY(tokenizer_from_gguf(gguf, &model->tokenizer, err));
    } else {
        log_write(&model->log, IMBREX_LOG_LEVEL_WARNING,
                  "%s has no tokenizer: it takes and gives token ids only", model->path);
    }
    TRY(check_tokenizer_fits(model, err));
    return chat_source_read_gguf(model, err);
}

static enum imbrex_status open_random(struct imbrex_model *model, struct imbrex_error *err)
{
    model->generation_config = generation_config_default();
    TRY(random_model_open(model->path, &model->config, &model->checkpoint, err));
    return weights_bind(&model->checkpoint, &model->config, model->path, &model->weights, err);
}

/* A folder, or a file, or one of the two that are neither. */
static enum imbrex_status open_path(struct imbrex_model *model, struct imbrex_error *err)
{
    const char *path = model->path;
    if (file_is_folder(path)) {
        return open_folder(model, err);
    }
    if (asset_is_path(path)) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND, "%s: expected %s, found no such model", path,
                         ASSET_DEFAULT_MODEL);
    }
    if (random_model_is_path(path)) {
        return open_random(model, err);
    }
    if (!file_exists(path)) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "%s: expected a folder with config.json and model.safetensors, or a GGUF "
                         "file, found nothing at this path",
                         path);
    }
    return open_gguf(model, err);
}

enum imbrex_status imbrex_model_open(const char *path, const struct imbrex_model_options *options,
                                     struct imbrex_model **model, struct imbrex_error *err)
{
    enum imbrex_status status;
    if (path == NULL) {
        path = ASSET_DEFAULT_MODEL;
    }
    struct imbrex_model *opened = calloc(1, sizeof(*opened));
    if (opened == NULL) {
        return error_out_of_memory(err, "the model", sizeof(*opened));
    }
    pthread_mutex_init(&opened->filling, NULL);
    if (options != NULL) {
        opened->log = (struct log){.write = options->log, .user = options->log_user};
    }
    size_t path_bytes = strlen(path) + 1;
    opened->path = malloc(path_bytes);
    if (opened->path == NULL) {
        status = error_out_of_memory(err, "the model's path", path_bytes);
        goto fail;
    }
    memcpy(opened->path, path, path_bytes);
    TRY_OR_FAIL(open_path(opened, err));
    if (opened->weights.tied != opened->config.tie_word_embeddings) {
        log_write(&opened->log, IMBREX_LOG_LEVEL_WARNING, "%s: lm_head: %s", path,
                  opened->weights.tied_reason);
    }
    *model = opened;
    return IMBREX_STATUS_OK;
fail:
    imbrex_model_close(opened);
    return status;
}

enum imbrex_status model_fill(struct imbrex_model *model, struct imbrex_error *err)
{
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (!model->checkpoint.is_random) {
        return IMBREX_STATUS_OK;
    }
    pthread_mutex_lock(&model->filling);
    if (!model->is_filled) {
        status = random_model_fill(&model->checkpoint, err);
        if (status == IMBREX_STATUS_OK) {
            weights_rebase(&model->weights, model->config.num_layers,
                           model->checkpoint.region.base);
            model->is_filled = true;
        }
    }
    pthread_mutex_unlock(&model->filling);
    return status;
}

void imbrex_model_close(struct imbrex_model *model)
{
    if (model == NULL) {
        return;
    }
    chat_source_release(model);
    imbrex_tokenizer_close(model->tokenizer);
    weights_release(&model->weights);
    checkpoint_close(&model->checkpoint);
    pthread_mutex_destroy(&model->filling);
    free(model->path);
    free(model);
}

const struct imbrex_tokenizer *imbrex_model_tokenizer(const struct imbrex_model *model)
{
    return model->tokenizer;
}

static const char *format_name(const struct checkpoint *checkpoint)
{
    if (checkpoint->is_gguf) {
        return checkpoint->gguf.version == 2 ? "GGUF v2" : "GGUF v3";
    }
    return checkpoint->is_random ? "random" : "safetensors";
}

void imbrex_model_describe(const struct imbrex_model *model, struct imbrex_model_info *info)
{
    const struct model_config *config = &model->config;
    bool has_generation_eos = model->generation_config.num_eos_token_ids > 0;
    bool is_scaled = config->rope_scaling.type != ROPE_SCALING_NONE;
    int32_t num_sliding_layers = 0;
    for (int32_t i = 0; i < config->num_layers; i++) {
        num_sliding_layers += config_layer_window(config, i) > 0;
    }
    *info = (struct imbrex_model_info){
        .path = model->path,
        .format = format_name(&model->checkpoint),
        .file_type =
            model->checkpoint.is_gguf ? gguf_file_type_name(&model->checkpoint.gguf) : NULL,
        .architecture = architecture_name(config->architecture),
        .hidden_size = config->hidden_size,
        .intermediate_size = config->intermediate_size,
        .num_layers = config->num_layers,
        .num_heads = config->num_heads,
        .num_kv_heads = config->num_kv_heads,
        .head_dim = config->head_dim,
        .vocab_size = config->vocab_size,
        .max_position_embeddings = config->max_position_embeddings,
        .rope_theta = config->rope_theta,
        .rms_norm_eps = config->rms_norm_eps,
        .rope_scaling = rope_scaling_name(config->rope_scaling.type),
        .rope_scaling_factor = is_scaled ? config->rope_scaling.factor : 1.0,
        .sliding_window = config->sliding_window,
        .num_sliding_layers = num_sliding_layers,
        .tied = model->weights.tied,
        .tied_reason = model->weights.tied_reason,
        .num_parameters = model->weights.num_parameters,
        .weight_bytes = model->weights.num_bytes,
        .kv_bytes_per_token = 2 * sizeof(float) * (size_t)config->num_layers *
                              (size_t)config->num_kv_heads * (size_t)config->head_dim,
        .eos_token_ids =
            has_generation_eos ? model->generation_config.eos_token_ids : config->eos_token_ids,
        .num_eos_token_ids = has_generation_eos ? model->generation_config.num_eos_token_ids
                                                : config->num_eos_token_ids,
    };
}

int32_t imbrex_model_num_tensors(const struct imbrex_model *model)
{
    return model->checkpoint.num_tensors;
}

enum imbrex_status imbrex_model_tensor(const struct imbrex_model *model, int32_t tensor_idx,
                                       struct imbrex_tensor_info *tensor)
{
    if (tensor_idx < 0 || tensor_idx >= model->checkpoint.num_tensors) {
        return IMBREX_STATUS_INVALID_ARGUMENT;
    }
    const struct checkpoint_tensor *source = model->checkpoint.tensors[tensor_idx];
    *tensor = (struct imbrex_tensor_info){.name = source->name,
                                          .dtype = source->dtype_name,
                                          .file = source->file,
                                          .num_dims = source->num_dims,
                                          .num_bytes = source->num_bytes};
    memcpy(tensor->shape, source->shape, sizeof(tensor->shape));
    return IMBREX_STATUS_OK;
}

const char *imbrex_model_file_at(const struct imbrex_model *model, const void *address)
{
    return checkpoint_file_at(&model->checkpoint, address);
}

struct imbrex_request_options imbrex_request_options_default(const struct imbrex_model *model)
{
    const struct generation_config *config = &model->generation_config;
    return (struct imbrex_request_options){
        .num_choices = 1,
        .num_logprobs = -1,
        .num_prompt_logprobs = -1,
        .temperature = config->do_sample ? config->temperature : 0.0f,
        .top_k = config->top_k,
        .top_p = config->top_p,
        .min_p = config->min_p,
        .repetition_penalty = config->repetition_penalty,
        .from_checkpoint = config->present,
    };
}
