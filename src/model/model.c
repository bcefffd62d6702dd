/* SPDX-License-Identifier: Apache-2.0 */
/* Opening a checkpoint folder, and what the public API tells about it. */
#include "model/model.h"

#include <stdlib.h>
#include <string.h>

#include "base/asset.h"
#include "base/file.h"

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
                                            &model->generation_config, err));
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
        TRY_OR_FAIL(imbrex_tokenizer_open(path, &model->tokenizer, err));
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
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s/tokenizer.json: expected at most %d token ids (vocab_size of "
                         "config.json), found %d",
                         model->path, model->config.vocab_size, num_ids);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status check_is_folder(const char *path, struct imbrex_error *err)
{
    if (file_is_folder(path)) {
        return IMBREX_STATUS_OK;
    }
    if (asset_is_path(path)) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND, "%s: expected %s, found no such model", path,
                         ASSET_DEFAULT_MODEL);
    }
    if (!file_exists(path)) {
        return error_set(err, IMBREX_STATUS_NOT_FOUND,
                         "%s: expected a folder with config.json and model.safetensors, found "
                         "nothing at this path",
                         path);
    }
    return error_set(err, IMBREX_STATUS_FORMAT,
                     "%s: expected a folder with config.json and model.safetensors, found a file",
                     path);
}

enum imbrex_status imbrex_model_open(const char *path, const struct imbrex_model_options *options,
                                     struct imbrex_model **model, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct imbrex_model *opened = NULL;

    if (path == NULL) {
        path = ASSET_DEFAULT_MODEL;
    }
    TRY(check_is_folder(path, err));
    opened = calloc(1, sizeof(*opened));
    if (opened == NULL) {
        return error_out_of_memory(err, "the model", sizeof(*opened));
    }
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
    TRY_OR_FAIL(read_config(opened, err));
    TRY_OR_FAIL(read_generation_config(opened, err));
    TRY_OR_FAIL(checkpoint_open(path, &opened->checkpoint, err));
    TRY_OR_FAIL(weights_bind(&opened->checkpoint, &opened->config, path, &opened->weights, err));
    TRY_OR_FAIL(open_tokenizer(opened, err));
    TRY_OR_FAIL(check_tokenizer_fits(opened, err));
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

void imbrex_model_close(struct imbrex_model *model)
{
    if (model == NULL) {
        return;
    }
    imbrex_tokenizer_close(model->tokenizer);
    weights_release(&model->weights);
    checkpoint_close(&model->checkpoint);
    free(model->path);
    free(model);
}

const struct imbrex_tokenizer *imbrex_model_tokenizer(const struct imbrex_model *model)
{
    return model->tokenizer;
}

void imbrex_model_describe(const struct imbrex_model *model, struct imbrex_model_info *info)
{
    const struct model_config *config = &model->config;
    bool has_generation_eos = model->generation_config.num_eos_token_ids > 0;
    *info = (struct imbrex_model_info){
        .path = model->path,
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
    const struct safetensor *source = model->checkpoint.tensors[tensor_idx];
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

struct imbrex_generation_options imbrex_generation_options_default(const struct imbrex_model *model)
{
    const struct generation_config *config = &model->generation_config;
    return (struct imbrex_generation_options){
        .temperature = config->do_sample ? config->temperature : 0.0f,
        .top_k = config->top_k,
        .top_p = config->top_p,
        .min_p = config->min_p,
        .repetition_penalty = config->repetition_penalty,
        .from_checkpoint = config->present,
    };
}
