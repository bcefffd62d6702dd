/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer as an object: opened from a folder, asked about its tokens, closed. */
#include <stdlib.h>

#include "base/file.h"
#include "base/status.h"
#include "model/gguf.h"
#include "model/tokenizer_internal.h"

/* The largest published tokenizer.json has 33 MB; its JSON tree takes about ten times the file. */
#define TOKENIZER_MAX_FILE_BYTES ((size_t)64 << 20)

/* *is_gguf tells whether the file is one; if not, nothing is opened. */
static enum imbrex_status open_gguf(const char *path, bool *is_gguf,
                                    struct imbrex_tokenizer **tokenizer, struct imbrex_error *err)
{
    struct file file = {0};
    struct gguf gguf = {0};
    enum imbrex_status status;
    TRY_OR_FAIL(file_map(path, &file, err));
    *is_gguf = gguf_is_magic(file.bytes, file.num_bytes);
    if (*is_gguf) {
        TRY_OR_FAIL(gguf_parse(path, file.bytes, file.num_bytes, &gguf, err));
        TRY_OR_FAIL(tokenizer_from_gguf(&gguf, tokenizer, err));
    }
fail:
    gguf_release(&gguf);
    file_close(&file);
    return status;
}

enum imbrex_status imbrex_tokenizer_open(const char *path, struct imbrex_tokenizer **tokenizer,
                                         struct imbrex_error *err)
{
    if (path == NULL) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT, "path: expected a text, found NULL");
    }
    char *file_path = NULL;
    struct file file = {0};
    enum imbrex_status status;
    if (file_is_folder(path)) {
        TRY_OR_FAIL(file_join(path, "tokenizer.json", &file_path, err));
        path = file_path;
    } else {
        bool is_gguf = false;
        TRY_OR_FAIL(open_gguf(path, &is_gguf, tokenizer, err));
        if (is_gguf) {
            goto fail; /* opened: `status` is OK */
        }
    }
    TRY_OR_FAIL(file_read(path, TOKENIZER_MAX_FILE_BYTES, &file, err));
    TRY_OR_FAIL(tokenizer_parse(path, file.bytes, file.num_bytes, tokenizer, err));
fail:
    file_close(&file);
    free(file_path);
    return status;
}

void imbrex_tokenizer_close(struct imbrex_tokenizer *tokenizer)
{
    if (tokenizer == NULL) {
        return;
    }
    free(tokenizer->token_bytes);
    free(tokenizer->token_offsets);
    free(tokenizer->token_flags);
    free(tokenizer->chars);
    free(tokenizer->template_ids);
    for (size_t i = 0; i < tokenizer->num_pre_steps; i++) {
        split_regex_destroy(tokenizer->pre_steps[i].regex);
    }
    text_table_release(&tokenizer->words);
    free(tokenizer->word_bytes);
    merge_table_release(&tokenizer->merges);
    added_tokens_release(&tokenizer->raw_added);
    added_tokens_release(&tokenizer->normalized_added);
    free(tokenizer->added_contents);
    free(tokenizer);
}

int32_t imbrex_tokenizer_vocab_size(const struct imbrex_tokenizer *tokenizer)
{
    return tokenizer->vocab_size;
}

static bool has_flag(const struct imbrex_tokenizer *tokenizer, int32_t token_id, uint8_t flag)
{
    return token_id >= 0 && token_id < tokenizer->vocab_size &&
           (tokenizer->token_flags[token_id] & flag) != 0;
}

bool imbrex_token_is_special(const struct imbrex_tokenizer *tokenizer, int32_t token_id)
{
    return has_flag(tokenizer, token_id, TOKEN_FLAG_SPECIAL);
}

const char *imbrex_token_bytes(const struct imbrex_tokenizer *tokenizer, int32_t token_id,
                               size_t *num_bytes)
{
    if (!has_flag(tokenizer, token_id, TOKEN_FLAG_ASSIGNED)) {
        return NULL;
    }
    uint32_t begin = tokenizer->token_offsets[token_id];
    *num_bytes = tokenizer->token_offsets[token_id + 1] - begin;
    return tokenizer->token_bytes + begin;
}

int32_t tokenizer_bos_id(const struct imbrex_tokenizer *tokenizer)
{
    return tokenizer->num_before == 1 ? tokenizer->template_ids[0] : -1;
}

size_t tokenizer_max_token_bytes(const struct imbrex_tokenizer *tokenizer)
{
    return tokenizer->max_token_bytes;
}
