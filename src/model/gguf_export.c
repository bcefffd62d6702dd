/* SPDX-License-Identifier: Apache-2.0 */
/* The reverse of gguf_config.c: keys from a configuration, a tokenizer and a chat template. */
#include "model/gguf_export.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/asset.h"
#include "base/file.h"
#include "base/memory.h"
#include "model/rope.h"
#include "model/tokenizer_export.h"

#define KEY_BYTES 128
#define NAME_BYTES 256
#define QUANTIZATION_VERSION 2 /* of the block formats, as ggml counts */

struct metadata_export {
    const struct imbrex_model *model;
    const char *architecture; /* the prefix of its keys */
    struct gguf_writer *writer;
    struct imbrex_error *err;
};

bool gguf_export_is_llama(const struct model_config *config)
{
    return config->architecture == ARCHITECTURE_LLAMA ||
           config->architecture == ARCHITECTURE_MISTRAL;
}

/* ---- numbers --------------------------------------------------------------------------------- */

static enum imbrex_status put_uint32(const struct metadata_export *export, const char *suffix,
                                     int32_t value)
{
    char key[KEY_BYTES];
    snprintf(key, sizeof(key), "%s.%s", export->architecture, suffix);
    return gguf_writer_put_uint32(export->writer, key, (uint32_t)value, export->err);
}

static enum imbrex_status put_float32(const struct metadata_export *export, const char *suffix,
                                      double value)
{
    char key[KEY_BYTES];
    snprintf(key, sizeof(key), "%s.%s", export->architecture, suffix);
    return gguf_writer_put_float32(export->writer, key, (float)value, export->err);
}

static enum imbrex_status put_rope_scaling(const struct metadata_export *export)
{
    const struct rope_scaling *scaling = &export->model->config.rope_scaling;
    char key[KEY_BYTES];
    if (scaling->type != ROPE_SCALING_LINEAR && scaling->type != ROPE_SCALING_YARN) {
        return IMBREX_STATUS_OK; /* llama3's is a tensor */
    }
    snprintf(key, sizeof(key), "%s.rope.scaling.type", export->architecture);
    TRY(gguf_writer_put_string(export->writer, key, rope_scaling_name(scaling->type), export->err));
    TRY(put_float32(export, "rope.scaling.factor", scaling->factor));
    if (scaling->type == ROPE_SCALING_LINEAR) {
        return IMBREX_STATUS_OK;
    }
    if (!scaling->truncate) {
        return error_set(export->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: rope_scaling.truncate: expected true, which is what a GGUF file "
                         "means, found false",
                         export->model->path);
    }
    double plain_factor = rope_yarn_attention_factor(scaling->factor, 0.0, 0.0);
    TRY(put_uint32(export, "rope.scaling.original_context_length",
                   (int32_t)scaling->original_max_position_embeddings));
    TRY(put_float32(export, "rope.scaling.yarn_beta_fast", scaling->beta_fast));
    TRY(put_float32(export, "rope.scaling.yarn_beta_slow", scaling->beta_slow));
    if (scaling->attention_factor != plain_factor) {
        TRY(put_float32(export, "rope.scaling.attn_factor",
                        scaling->attention_factor / plain_factor));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_window(const struct metadata_export *export)
{
    const struct model_config *config = &export->model->config;
    int32_t num_sliding_layers = 0;
    for (int32_t i = 0; i < config->num_layers; i++) {
        num_sliding_layers += config_layer_window(config, i) > 0;
    }
    if (num_sliding_layers == 0) {
        return IMBREX_STATUS_OK;
    }
    if (num_sliding_layers < config->num_layers || !gguf_export_is_llama(config)) {
        return error_set(export->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: sliding_window: expected it in all layers of mistral, which is all "
                         "that a GGUF file can hold, found it in %" PRId32 " of %" PRId32
                         " layers of \"%s\"",
                         export->model->path, num_sliding_layers, config->num_layers,
                         architecture_name(config->architecture));
    }
    return put_uint32(export, "attention.sliding_window", config->sliding_window);
}

static enum imbrex_status put_config(const struct metadata_export *export)
{
    const struct model_config *config = &export->model->config;
    const struct {
        const char *suffix;
        int32_t value;
    } rows[] = {
        {"vocab_size", config->vocab_size},
        {"context_length", config->max_position_embeddings},
        {"embedding_length", config->hidden_size},
        {"block_count", config->num_layers},
        {"feed_forward_length", config->intermediate_size},
        {"attention.head_count", config->num_heads},
        {"attention.head_count_kv", config->num_kv_heads},
        {"attention.key_length", config->head_dim},
        {"attention.value_length", config->head_dim},
        {"rope.dimension_count", config->head_dim},
    };
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        TRY(put_uint32(export, rows[i].suffix, rows[i].value));
    }
    TRY(put_float32(export, "rope.freq_base", config->rope_theta));
    TRY(put_float32(export, "attention.layer_norm_rms_epsilon", config->rms_norm_eps));
    TRY(put_rope_scaling(export));
    return put_window(export);
}

enum imbrex_status gguf_export_rope_factors(const struct imbrex_model *model, float **factors,
                                            struct imbrex_error *err)
{
    const struct model_config *config = &model->config;
    size_t num_factors = (size_t)config->head_dim / 2;
    if (config->rope_scaling.type != ROPE_SCALING_LLAMA3) {
        return IMBREX_STATUS_OK;
    }
    double *frequencies = malloc(num_factors * sizeof(frequencies[0]));
    float *result = malloc(num_factors * sizeof(result[0]));
    if (frequencies == NULL || result == NULL) {
        free(frequencies);
        free(result);
        return error_out_of_memory(err, GGUF_ROPE_FACTORS, num_factors * sizeof(frequencies[0]));
    }
    rope_frequencies(config, NULL, frequencies);
    for (size_t i = 0; i < num_factors; i++) {
        double plain = pow(config->rope_theta, -2.0 * (double)i / config->head_dim);
        result[i] = (float)(plain / frequencies[i]);
    }
    free(frequencies);
    *factors = result;
    return IMBREX_STATUS_OK;
}

/* ---- texts ----------------------------------------------------------------------------------- */

/* The folder's name; "stories260K" for "builtin:stories260K". */
static enum imbrex_status put_name(const struct metadata_export *export)
{
    const char *begin = export->model->path;
    char name[NAME_BYTES];
    size_t num_bytes = strlen(begin);
    while (num_bytes > 1 && begin[num_bytes - 1] == '/') {
        num_bytes--;
    }
    for (size_t i = num_bytes; i > 0; i--) {
        if (begin[i - 1] == '/' || (asset_is_path(begin) && begin[i - 1] == ':')) {
            begin += i;
            num_bytes -= i;
            break;
        }
    }
    snprintf(name, sizeof(name), "%.*s", (int)(num_bytes < NAME_BYTES ? num_bytes : NAME_BYTES),
             begin);
    return gguf_writer_put_string(export->writer, "general.name", name, export->err);
}

/* Up to three end tokens have a key each. */
static enum imbrex_status put_end_tokens(const struct metadata_export *export)
{
    static const char *const keys[] = {"tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id",
                                       "tokenizer.ggml.eom_token_id"};
    const size_t num_keys = sizeof(keys) / sizeof(keys[0]);
    struct imbrex_model_info description;
    imbrex_model_describe(export->model, &description);
    if ((size_t)description.num_eos_token_ids > num_keys) {
        return error_set(export->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: eos_token_id: expected at most %zu ids, for which GGUF has keys, "
                         "found %" PRId32,
                         export->model->path, num_keys, description.num_eos_token_ids);
    }
    for (int32_t i = 0; i < description.num_eos_token_ids; i++) {
        TRY(gguf_writer_put_uint32(export->writer, keys[i], (uint32_t)description.eos_token_ids[i],
                                   export->err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_tokenizer(const struct metadata_export *export)
{
    const struct imbrex_model *model = export->model;
    char *path = NULL;
    if (model->tokenizer != NULL) {
        TRY(file_join(model->path, "tokenizer.json", &path, export->err));
        enum imbrex_status status =
            tokenizer_export_gguf(path, model->config.vocab_size, export->writer, export->err);
        free(path);
        TRY(status);
    } else {
        /* llama.cpp opens no file without the key. */
        TRY(gguf_writer_put_string(export->writer, "tokenizer.ggml.model", GGUF_NO_TOKENIZER,
                                   export->err));
    }
    TRY(put_end_tokens(export));
    if (model->chat_template != NULL) {
        return gguf_writer_put_string(export->writer, "tokenizer.chat_template",
                                      model->chat_template, export->err);
    }
    return IMBREX_STATUS_OK;
}

/* ---- from GGUF ------------------------------------------------------------------------------- */

static bool is_rewritten(const struct gguf_string *key)
{
    static const char *const keys[] = {"general.file_type", "general.quantization_version",
                                       "general.alignment"};
    for (size_t i = 0; i < sizeof(keys) / sizeof(keys[0]); i++) {
        if (key->num_bytes == strlen(keys[i]) && memcmp(key->bytes, keys[i], key->num_bytes) == 0) {
            return true;
        }
    }
    return key->num_bytes > 6 && memcmp(key->bytes, "split.", 6) == 0;
}

static enum imbrex_status copy_values(const struct metadata_export *export)
{
    const struct gguf *gguf = &export->model->checkpoint.gguf;
    for (uint64_t i = 0; i < gguf->num_values; i++) {
        if (!is_rewritten(&gguf->values[i].key)) {
            TRY(gguf_writer_put_value(export->writer, &gguf->values[i], export->err));
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status gguf_export_metadata(const struct imbrex_model *model, uint32_t file_type,
                                        bool is_quantized, struct gguf_writer *writer,
                                        struct imbrex_error *err)
{
    const struct metadata_export export = {.model = model,
                                           .architecture =
                                               gguf_export_is_llama(&model->config)
                                                   ? "llama"
                                                   : architecture_name(model->config.architecture),
                                           .writer = writer,
                                           .err = err};
    if (model->checkpoint.is_gguf) {
        TRY(copy_values(&export));
    } else {
        TRY(gguf_writer_put_string(writer, "general.architecture", export.architecture, err));
        TRY(gguf_writer_put_string(writer, "general.type", "model", err));
        TRY(put_name(&export));
        TRY(put_config(&export));
        TRY(put_tokenizer(&export));
    }
    TRY(gguf_writer_put_uint32(writer, "general.file_type", file_type, err));
    if (is_quantized) {
        return gguf_writer_put_uint32(writer, "general.quantization_version", QUANTIZATION_VERSION,
                                      err);
    }
    return IMBREX_STATUS_OK;
}
