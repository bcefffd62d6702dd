/* SPDX-License-Identifier: Apache-2.0 */
/* A GGUF file as a checkpoint: its tensors keep the names they have there, and what looks for one
 * by Hugging Face's name has it translated. So messages name what is in the file. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "model/checkpoint.h"

struct name_row {
    const char *name, *gguf_name; /* without "model.layers.N." and ".weight", "blk.N." */
};

static const struct name_row model_names[] = {
    {"model.embed_tokens", "token_embd"},
    {"model.norm", "output_norm"},
    {"lm_head", "output"},
};

static const struct name_row layer_names[] = {
    {"input_layernorm", "attn_norm"},    {"post_attention_layernorm", "ffn_norm"},
    {"self_attn.q_proj", "attn_q"},      {"self_attn.k_proj", "attn_k"},
    {"self_attn.v_proj", "attn_v"},      {"self_attn.o_proj", "attn_output"},
    {"self_attn.q_norm", "attn_q_norm"}, {"self_attn.k_norm", "attn_k_norm"},
    {"mlp.gate_proj", "ffn_gate"},       {"mlp.up_proj", "ffn_up"},
    {"mlp.down_proj", "ffn_down"},
};

#define LAYER_PREFIX "model.layers."

/* ---- names ----------------------------------------------------------------------------------- */

/* The row whose name is [name, end), or NULL. */
static const struct name_row *find_row(const struct name_row *rows, size_t num_rows,
                                       const char *name, const char *end)
{
    size_t num_bytes = (size_t)(end - name);
    for (size_t i = 0; i < num_rows; i++) {
        if (strlen(rows[i].name) == num_bytes && memcmp(rows[i].name, name, num_bytes) == 0) {
            return &rows[i];
        }
    }
    return NULL;
}

const char *gguf_name_of(const char *name, char stored[CHECKPOINT_NAME_BYTES])
{
    const char *kind = strrchr(name, '.'); /* ".weight", ".bias" */
    const struct name_row *row = NULL;
    snprintf(stored, CHECKPOINT_NAME_BYTES, "%s", name);
    if (kind == NULL) {
        return stored;
    }
    if (strncmp(name, LAYER_PREFIX, strlen(LAYER_PREFIX)) == 0) {
        const char *layer = name + strlen(LAYER_PREFIX);
        size_t num_digits = strspn(layer, "0123456789");
        const char *part = layer + num_digits + 1;
        if (num_digits > 0 && layer[num_digits] == '.' && part < kind) {
            row = find_row(layer_names, sizeof(layer_names) / sizeof(layer_names[0]), part, kind);
        }
        if (row != NULL) {
            snprintf(stored, CHECKPOINT_NAME_BYTES, "blk.%.*s.%s%s", (int)num_digits, layer,
                     row->gguf_name, kind);
        }
        return stored;
    }
    row = find_row(model_names, sizeof(model_names) / sizeof(model_names[0]), name, kind);
    if (row != NULL) {
        snprintf(stored, CHECKPOINT_NAME_BYTES, "%s%s", row->gguf_name, kind);
    }
    return stored;
}

const char *checkpoint_stored_name(const struct checkpoint *checkpoint, const char *name,
                                   char stored[CHECKPOINT_NAME_BYTES])
{
    if (checkpoint->is_gguf) {
        return gguf_name_of(name, stored);
    }
    snprintf(stored, CHECKPOINT_NAME_BYTES, "%s", name);
    return stored;
}

/* ---- files that are one of several ----------------------------------------------------------- */

static bool has_digits(const char *text, size_t num_digits)
{
    return strspn(text, "0123456789") >= num_digits;
}

/* "model-00001-of-00003.gguf", what llama.cpp calls a split. */
static bool is_split_name(const char *path)
{
    static const char pattern[] = "-00001-of-00003.gguf";
    size_t path_bytes = strlen(path), pattern_bytes = sizeof(pattern) - 1;
    if (path_bytes <= pattern_bytes) {
        return false;
    }
    const char *tail = path + path_bytes - pattern_bytes;
    return tail[0] == '-' && has_digits(tail + 1, 5) && strncmp(tail + 6, "-of-", 4) == 0 &&
           has_digits(tail + 10, 5) && strcmp(tail + 15, ".gguf") == 0;
}

static enum imbrex_status check_is_whole(const struct gguf *gguf, struct imbrex_error *err)
{
    int32_t num_files = 1;
    if (gguf_find(gguf, "split.count") != NULL) {
        TRY(gguf_get_int32(gguf, "split.count", 0, INT32_MAX, &num_files, err));
    }
    if (num_files > 1) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: split.count: expected a model in one file (llama-gguf-split --merge "
                         "makes one), found one of %" PRId32 " files",
                         gguf->path, num_files);
    }
    if (is_split_name(gguf->path)) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: expected a model in one file (llama-gguf-split --merge makes one), "
                         "found a part of several by its name",
                         gguf->path);
    }
    return IMBREX_STATUS_OK;
}

/* ---- tensors --------------------------------------------------------------------------------- */

static enum imbrex_status copy_tensors(struct checkpoint *checkpoint, struct imbrex_error *err)
{
    const struct gguf *gguf = &checkpoint->gguf;
    size_t num_tensors = (size_t)gguf->num_tensors, names_bytes = 0, position = 0;
    if (num_tensors == 0 || num_tensors > INT32_MAX) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: expected 1 to %" PRId32 " tensors, found %zu", gguf->path, INT32_MAX,
                         num_tensors);
    }
    for (size_t i = 0; i < num_tensors; i++) {
        names_bytes += gguf->tensors[i].name.num_bytes + 1;
    }
    checkpoint->owned_names = malloc(names_bytes);
    checkpoint->owned_tensors = calloc(num_tensors, sizeof(checkpoint->owned_tensors[0]));
    checkpoint->tensors = calloc(num_tensors, sizeof(checkpoint->tensors[0]));
    if (checkpoint->owned_names == NULL || checkpoint->owned_tensors == NULL ||
        checkpoint->tensors == NULL) {
        return error_out_of_memory(err, "a checkpoint's tensors",
                                   num_tensors * sizeof(checkpoint->owned_tensors[0]));
    }
    for (size_t i = 0; i < num_tensors; i++) {
        const struct gguf_tensor *source = &gguf->tensors[i];
        struct checkpoint_tensor *tensor = &checkpoint->owned_tensors[i];
        char *name = checkpoint->owned_names + position;
        memcpy(name, source->name.bytes, source->name.num_bytes);
        name[source->name.num_bytes] = '\0';
        position += source->name.num_bytes + 1;
        *tensor = (struct checkpoint_tensor){.name = name,
                                             .dtype_name = gguf_tensor_type_name(source->type_id),
                                             .dtype = source->dtype,
                                             .num_dims = source->num_dims,
                                             .elements = source->elements,
                                             .num_bytes = source->num_bytes,
                                             .file = gguf->path};
        memcpy(tensor->shape, source->shape, sizeof(source->shape));
        checkpoint->tensors[i] = tensor; /* in the order of their names as in the file */
    }
    checkpoint->num_tensors = (int32_t)num_tensors;
    return IMBREX_STATUS_OK;
}

enum imbrex_status checkpoint_read_gguf(const char *path, const unsigned char *bytes,
                                        size_t num_bytes, struct checkpoint *checkpoint,
                                        struct imbrex_error *err)
{
    enum imbrex_status status;
    struct checkpoint opened = {.is_gguf = true};
    TRY_OR_FAIL(gguf_parse(path, bytes, num_bytes, &opened.gguf, err));
    TRY_OR_FAIL(check_is_whole(&opened.gguf, err));
    TRY_OR_FAIL(copy_tensors(&opened, err));
    *checkpoint = opened;
    return IMBREX_STATUS_OK;
fail:
    checkpoint_close(&opened);
    return status;
}

enum imbrex_status checkpoint_open_gguf(const char *path, struct checkpoint *checkpoint,
                                        struct imbrex_error *err)
{
    struct checkpoint opened = {0};
    struct file *file = calloc(1, sizeof(*file));
    enum imbrex_status status;
    if (file == NULL) {
        return error_out_of_memory(err, "a checkpoint's files", sizeof(*file));
    }
    TRY_OR_FAIL(file_map(path, file, err));
    TRY_OR_FAIL(checkpoint_read_gguf(file->path, file->bytes, file->num_bytes, &opened, err));
    opened.files = file;
    opened.num_files = 1;
    *checkpoint = opened;
    return IMBREX_STATUS_OK;
fail:
    file_close(file);
    free(file);
    return status;
}
