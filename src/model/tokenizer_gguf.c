/* SPDX-License-Identifier: Apache-2.0 */
/* The tokenizer in a GGUF file. Its metadata name a vocabulary and say little about the steps
 * around it, which are therefore those of the tokenizers that the names stand for:
 *
 *   "llama"  SentencePiece BPE: the pair that makes the token of the highest score merges first;
 *            characters without a token are spelled in byte tokens; U+2581 for spaces
 *   "gpt2"   byte-level BPE with merges; tokenizer.ggml.pre names the split pattern
 *
 * Token types say what is found in a text before it is cut into words: control tokens (special) and
 * user-defined ones (not). Sources: docs/gguf.md of ggml; how the fields are meant, from
 * llama.cpp's convert_hf_to_gguf.py and llama-vocab.cpp. Where llama.cpp and Hugging Face differ,
 * the ids are Hugging Face's: "qwen2" gets NFC. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/gguf.h"
#include "model/tokenizer_internal.h"

#define KEY "tokenizer.ggml."

/* All splits of a token are looked up, so long ones cost their square. */
#define MAX_PIECE_BYTES 512

/* tokenizer.ggml.token_type */
enum piece_type {
    PIECE_NORMAL = 1,
    PIECE_UNKNOWN = 2,
    PIECE_CONTROL = 3,
    PIECE_USER_DEFINED = 4,
    PIECE_UNUSED = 5,
    PIECE_BYTE = 6,
};

/* ---- pre-tokenizers by name ----------------------------------------------------------------- */

/* Mistral's and Llama-4's families; Hugging Face's tokenizer.json of Mistral-Nemo. */
static const char tekken_pattern[] =
    "[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]*[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]+"
    "|[^\\r\\n\\p{L}\\p{N}]?[\\p{Lu}\\p{Lt}\\p{Lm}\\p{Lo}\\p{M}]+[\\p{Ll}\\p{Lm}\\p{Lo}\\p{M}]*"
    "|\\p{N}| ?[^\\s\\p{L}\\p{N}]+[\\r\\n/]*|\\s*[\\r\\n]+|\\s+(?!\\S)|\\s+";

struct pre_rules {
    const char *name;
    enum word_pattern pattern;
    const char *expression; /* instead of the pattern */
    bool splits_digits;     /* one by one, before the pattern */
    bool has_nfc;
    bool ignores_merges;
    bool adds_bos; /* unless the file says otherwise */
};

static const struct pre_rules pre_rules[] = {
    {.name = "gpt-2", .pattern = WORD_PATTERN_GPT2},
    {.name = "smollm", .pattern = WORD_PATTERN_GPT2, .splits_digits = true},
    {.name = "starcoder", .pattern = WORD_PATTERN_GPT2, .splits_digits = true},
    {.name = "refact", .pattern = WORD_PATTERN_GPT2, .splits_digits = true},
    {.name = "qwen2", .pattern = WORD_PATTERN_QWEN2, .has_nfc = true},
    {.name = "deepseek-r1-qwen", .pattern = WORD_PATTERN_QWEN2, .has_nfc = true},
    {.name = "llama-bpe", .pattern = WORD_PATTERN_LLAMA3, .ignores_merges = true, .adds_bos = true},
    {.name = "llama3", .pattern = WORD_PATTERN_LLAMA3, .ignores_merges = true, .adds_bos = true},
    {.name = "llama-v3", .pattern = WORD_PATTERN_LLAMA3, .ignores_merges = true, .adds_bos = true},
    {.name = "tekken", .expression = tekken_pattern, .ignores_merges = true, .adds_bos = true},
};

/* ---- reading -------------------------------------------------------------------------------- */

struct gguf_reader {
    const struct gguf *gguf;
    const struct gguf_string *tokens; /* [num_tokens] */
    size_t num_tokens;
    const struct gguf_value *types; /* NULL: all are normal */
    bool is_sentencepiece;
    bool adds_bos, adds_eos;
    struct vocab_builder builder;
};

static struct token_text text_of(struct gguf_string string)
{
    /* The bytes of an empty string may be anywhere. */
    return (struct token_text){.bytes = string.num_bytes == 0 ? "" : string.bytes,
                               .num_bytes = string.num_bytes};
}

static bool is_text(struct gguf_string string, const char *text)
{
    return string.num_bytes == strlen(text) && memcmp(string.bytes, text, string.num_bytes) == 0;
}

static int shown(struct gguf_string string)
{
    return string.num_bytes < 60 ? (int)string.num_bytes : 60;
}

/* A boolean that may be missing. */
static enum imbrex_status read_flag(const struct gguf_reader *reader, const char *key, bool *flag)
{
    return gguf_find(reader->gguf, key) == NULL
               ? IMBREX_STATUS_OK
               : gguf_get_bool(reader->gguf, key, flag, reader->builder.err);
}

/* The array of numbers under a key, one a token; *value is NULL if it is missing. */
static enum imbrex_status find_per_token(const struct gguf_reader *reader, const char *key,
                                         const struct gguf_value **value)
{
    *value = gguf_find(reader->gguf, key);
    if (*value == NULL) {
        return IMBREX_STATUS_OK;
    }
    if ((*value)->type != GGUF_TYPE_ARRAY || (*value)->element_type == GGUF_TYPE_STRING ||
        (*value)->element_type == GGUF_TYPE_ARRAY || (*value)->num_elements != reader->num_tokens) {
        return error_set(reader->builder.err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected an array of %zu numbers, one a token, found another "
                         "value",
                         reader->gguf->path, key, reader->num_tokens);
    }
    return IMBREX_STATUS_OK;
}

static enum piece_type type_of(const struct gguf_reader *reader, size_t token_idx)
{
    double type = reader->types == NULL ? 1.0 : gguf_value_number(reader->types, token_idx);
    return type >= PIECE_NORMAL && type <= PIECE_BYTE ? (enum piece_type)type : PIECE_UNUSED;
}

static enum imbrex_status read_tokens(struct gguf_reader *reader)
{
    struct imbrex_error *err = reader->builder.err;
    TRY(gguf_get_strings(reader->gguf, KEY "tokens", &reader->tokens, &reader->num_tokens, err));
    if (reader->num_tokens == 0 || reader->num_tokens > (size_t)VOCAB_MAX_TOKENS) {
        return error_set(err, IMBREX_STATUS_FORMAT,
                         "%s: " KEY "tokens: expected 1 to %" PRId32 " tokens, found %zu",
                         reader->gguf->path, VOCAB_MAX_TOKENS, reader->num_tokens);
    }
    return find_per_token(reader, KEY "token_type", &reader->types);
}

/* ---- tokens --------------------------------------------------------------------------------- */

static bool is_added(enum piece_type type)
{
    return type == PIECE_CONTROL || type == PIECE_USER_DEFINED || type == PIECE_UNKNOWN;
}

/* Files have one text twice where a model's tokens were added again; what text would then mean is
 * anybody's guess. */
static enum imbrex_status add_model_tokens(struct gguf_reader *reader)
{
    struct vocab_builder *builder = &reader->builder;
    for (size_t i = 0; i < reader->num_tokens; i++) {
        enum piece_type type = type_of(reader, i);
        if (type == PIECE_NORMAL || type == PIECE_BYTE) {
            vocab_builder_add_slot(builder, text_of(reader->tokens[i]), (int32_t)i);
            TRY(vocab_builder_claim(builder, (int32_t)i, text_of(reader->tokens[i]),
                                    type == PIECE_NORMAL ? VOCAB_ROLE_MODEL : 0));
        }
    }
    TRY(vocab_builder_index(builder));
    for (size_t i = 0; i < builder->num_slots; i++) {
        const struct text_slot *slot = &builder->slots[i];
        int32_t id = vocab_builder_find(builder, slot->text.bytes, slot->text.num_bytes);
        if (id != slot->id) {
            return error_set(builder->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: " KEY "tokens: expected each text once, found \"%.*s\" with ids "
                             "%" PRId32 " and %" PRId32,
                             builder->path, shown(reader->tokens[slot->id]),
                             reader->tokens[slot->id].bytes, slot->id, id);
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status add_added_tokens(struct gguf_reader *reader)
{
    struct vocab_builder *builder = &reader->builder;
    size_t num_entries = 0;
    struct added_entry *entries = malloc(reader->num_tokens * sizeof(*entries));
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (entries == NULL) {
        return error_out_of_memory(builder->err, "added tokens",
                                   reader->num_tokens * sizeof(*entries));
    }
    for (size_t i = 0; i < reader->num_tokens; i++) {
        enum piece_type type = type_of(reader, i);
        if (!is_added(type)) {
            continue;
        }
        TRY_OR_FAIL(vocab_builder_claim(builder, (int32_t)i, text_of(reader->tokens[i]),
                                        VOCAB_ROLE_VERBATIM));
        if (reader->tokens[i].num_bytes > 0) {
            entries[num_entries++] = (struct added_entry){
                .content = text_of(reader->tokens[i]),
                .id = (int32_t)i,
                .is_special = type != PIECE_USER_DEFINED,
            };
        }
    }
    TRY_OR_FAIL(vocab_builder_add_tokens(builder, entries, num_entries));
fail:
    free(entries);
    return status;
}

/* ---- merges --------------------------------------------------------------------------------- */

struct merge_list {
    struct merge *merges;
    size_t num_merges, max_merges;
};

static enum imbrex_status merge_list_append(struct merge_list *list, struct merge merge,
                                            struct imbrex_error *err)
{
    if (list->num_merges == list->max_merges) {
        size_t grown = list->max_merges + list->max_merges / 2 + 1024;
        struct merge *merges = realloc(list->merges, grown * sizeof(*merges));
        if (merges == NULL) {
            return error_out_of_memory(err, "merges of the tokenizer", grown * sizeof(*merges));
        }
        list->merges = merges;
        list->max_merges = grown;
    }
    list->merges[list->num_merges++] = merge;
    return IMBREX_STATUS_OK;
}

/* Both halves of "left right" and what they make. */
static enum imbrex_status read_merge(struct gguf_reader *reader, struct gguf_string line,
                                     size_t rank, struct byte_buffer *joined,
                                     struct merge_list *list)
{
    struct vocab_builder *builder = &reader->builder;
    /* From the second byte on: the left half may begin with a space, but is never empty. */
    const char *space = line.num_bytes < 3 ? NULL : memchr(line.bytes + 1, ' ', line.num_bytes - 1);
    int32_t left = -1, right = -1, merged = -1;
    if (space != NULL) {
        size_t left_bytes = (size_t)(space - line.bytes);
        size_t right_bytes = line.num_bytes - left_bytes - 1;
        joined->num_bytes = 0;
        TRY(byte_buffer_append(joined, line.bytes, left_bytes, builder->err));
        TRY(byte_buffer_append(joined, space + 1, right_bytes, builder->err));
        left = vocab_builder_find(builder, line.bytes, left_bytes);
        right = vocab_builder_find(builder, space + 1, right_bytes);
        merged = vocab_builder_find(builder, joined->bytes, joined->num_bytes);
    }
    if (left < 0 || right < 0 || merged < 0) {
        return error_set(builder->err, IMBREX_STATUS_FORMAT,
                         "%s: " KEY "merges: %zu: expected \"left right\", normal tokens that make "
                         "a third, found \"%.*s\"",
                         builder->path, rank, shown(line), line.bytes);
    }
    return merge_list_append(list,
                             (struct merge){.left = (uint32_t)left,
                                            .right = (uint32_t)right,
                                            .rank = (uint32_t)rank,
                                            .merged = (uint32_t)merged},
                             builder->err);
}

static enum imbrex_status read_merges(struct gguf_reader *reader, struct merge_list *list)
{
    const struct gguf_string *lines;
    size_t num_lines;
    struct byte_buffer joined = {0};
    enum imbrex_status status;
    TRY(gguf_get_strings(reader->gguf, KEY "merges", &lines, &num_lines, reader->builder.err));
    for (size_t i = 0; i < num_lines; i++) {
        TRY_OR_FAIL(read_merge(reader, lines[i], i, &joined, list));
    }
    status = IMBREX_STATUS_OK;
fail:
    free(joined.bytes);
    return status;
}

/* Each way in which two tokens make this one merges at its score's rank. Equal ranks merge from the
 * left, as SentencePiece does. */
static enum imbrex_status add_splits(struct gguf_reader *reader, int32_t id, uint32_t rank,
                                     struct merge_list *list)
{
    struct vocab_builder *builder = &reader->builder;
    struct token_text text = builder->texts[id];
    for (size_t at = 0; at < text.num_bytes;) {
        at += utf8_next(text.bytes + at, text.num_bytes - at).num_bytes;
        if (at == text.num_bytes) {
            break;
        }
        int32_t left = vocab_builder_find(builder, text.bytes, at);
        int32_t right =
            left < 0 ? -1 : vocab_builder_find(builder, text.bytes + at, text.num_bytes - at);
        if (right >= 0 && (builder->roles[left] & VOCAB_ROLE_MODEL) != 0 &&
            (builder->roles[right] & VOCAB_ROLE_MODEL) != 0) {
            TRY(merge_list_append(list,
                                  (struct merge){.left = (uint32_t)left,
                                                 .right = (uint32_t)right,
                                                 .rank = rank,
                                                 .merged = (uint32_t)id},
                                  builder->err));
        }
    }
    return IMBREX_STATUS_OK;
}

struct scored_token {
    double score;
    int32_t id;
};

/* From the highest score down. */
static int score_compare(const void *a, const void *b)
{
    const struct scored_token *left = a, *right = b;
    if (left->score != right->score) {
        return left->score > right->score ? -1 : 1;
    }
    return (left->id > right->id) - (left->id < right->id);
}

static enum imbrex_status read_scored_tokens(struct gguf_reader *reader,
                                             struct scored_token *tokens, size_t *num_scored)
{
    struct vocab_builder *builder = &reader->builder;
    const struct gguf_value *scores;
    TRY(find_per_token(reader, KEY "scores", &scores));
    if (scores == NULL) {
        return error_set(builder->err, IMBREX_STATUS_NOT_FOUND,
                         "%s: " KEY "scores: expected a number for each token, found none",
                         builder->path);
    }
    *num_scored = 0;
    for (size_t i = 0; i < reader->num_tokens; i++) {
        struct gguf_string text = reader->tokens[i];
        if ((builder->roles[i] & VOCAB_ROLE_MODEL) == 0) {
            continue;
        }
        double score = gguf_value_number(scores, i);
        if (isnan(score) || text.num_bytes > MAX_PIECE_BYTES) {
            return error_set(builder->err, IMBREX_STATUS_FORMAT,
                             "%s: token %zu: expected a score and at most %d bytes, found %g and "
                             "%zu bytes",
                             builder->path, i, MAX_PIECE_BYTES, score, text.num_bytes);
        }
        tokens[(*num_scored)++] = (struct scored_token){.score = score, .id = (int32_t)i};
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status make_merges(struct gguf_reader *reader, struct merge_list *list)
{
    size_t num_scored = 0;
    struct scored_token *tokens = malloc(reader->num_tokens * sizeof(*tokens));
    enum imbrex_status status;
    if (tokens == NULL) {
        return error_out_of_memory(reader->builder.err, "scores of the tokens",
                                   reader->num_tokens * sizeof(*tokens));
    }
    TRY_OR_FAIL(read_scored_tokens(reader, tokens, &num_scored));
    qsort(tokens, num_scored, sizeof(*tokens), score_compare);
    uint32_t rank = 0;
    for (size_t i = 0; i < num_scored; i++) {
        rank += i > 0 && tokens[i].score != tokens[i - 1].score ? 1 : 0;
        TRY_OR_FAIL(add_splits(reader, tokens[i].id, rank, list));
    }
fail:
    free(tokens);
    return status;
}

/* ---- the kinds ------------------------------------------------------------------------------ */

static void add_normalizer(struct imbrex_tokenizer *tokenizer, struct normalizer_step step)
{
    tokenizer->normalizer[tokenizer->num_normalizer_steps++] = step;
}

static enum imbrex_status set_sentencepiece(struct gguf_reader *reader,
                                            struct decoder_steps *decoder)
{
    struct imbrex_tokenizer *tokenizer = reader->builder.tokenizer;
    bool adds_space_prefix = true, removes_spaces = false;
    TRY(read_flag(reader, KEY "add_space_prefix", &adds_space_prefix));
    TRY(read_flag(reader, KEY "remove_extra_whitespaces", &removes_spaces));
    if (removes_spaces) {
        return error_set(reader->builder.err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: " KEY "remove_extra_whitespaces: expected false, found true",
                         reader->gguf->path);
    }
    if (gguf_find(reader->gguf, KEY "precompiled_charsmap") != NULL) {
        return error_set(reader->builder.err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: " KEY "precompiled_charsmap: expected none, found one",
                         reader->gguf->path);
    }
    if (adds_space_prefix) {
        add_normalizer(tokenizer, (struct normalizer_step){.kind = NORMALIZER_PREPEND,
                                                           .content = SPACE_MARK,
                                                           .content_bytes = SPACE_MARK_BYTES});
    }
    add_normalizer(tokenizer, (struct normalizer_step){.kind = NORMALIZER_REPLACE,
                                                       .pattern = " ",
                                                       .pattern_bytes = 1,
                                                       .content = SPACE_MARK,
                                                       .content_bytes = SPACE_MARK_BYTES});
    tokenizer->has_byte_fallback = true;
    tokenizer->num_stripped_spaces = adds_space_prefix ? 1 : 0;
    decoder->has_byte_fallback = true;
    decoder->num_replaces = 1;
    decoder->replaces[0] = (struct decoder_replace){.pattern = SPACE_MARK,
                                                    .pattern_bytes = SPACE_MARK_BYTES,
                                                    .content = " ",
                                                    .content_bytes = 1};
    reader->is_sentencepiece = true;
    reader->adds_bos = true;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status find_pre_rules(const struct gguf_reader *reader,
                                         const struct pre_rules **rules)
{
    struct gguf_string name;
    char known[256] = "";
    TRY(gguf_get_string(reader->gguf, KEY "pre", &name, reader->builder.err));
    for (size_t i = 0; i < sizeof(pre_rules) / sizeof(pre_rules[0]); i++) {
        if (is_text(name, pre_rules[i].name)) {
            *rules = &pre_rules[i];
            return IMBREX_STATUS_OK;
        }
        size_t length = strlen(known);
        snprintf(known + length, sizeof(known) - length, "%s%s", i > 0 ? ", " : "",
                 pre_rules[i].name);
    }
    return error_set(reader->builder.err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: " KEY "pre: expected one of %s, found \"%.*s\"", reader->gguf->path,
                     known, shown(name), name.bytes);
}

static enum imbrex_status set_byte_level(struct gguf_reader *reader, struct decoder_steps *decoder)
{
    struct imbrex_tokenizer *tokenizer = reader->builder.tokenizer;
    const struct pre_rules *rules = NULL;
    TRY(find_pre_rules(reader, &rules));
    if (rules->has_nfc) {
        add_normalizer(tokenizer,
                       (struct normalizer_step){.kind = NORMALIZER_FORM, .form = UNICODE_FORM_NFC});
    }
    if (rules->splits_digits) {
        tokenizer->pre_steps[tokenizer->num_pre_steps++] =
            (struct pre_step){.kind = PRE_STEP_SPLIT, .matcher = SPLIT_NUMBERS};
    }
    struct pre_step *step = &tokenizer->pre_steps[tokenizer->num_pre_steps++];
    *step = (struct pre_step){
        .kind = PRE_STEP_SPLIT, .matcher = SPLIT_WORDS, .pattern = rules->pattern};
    tokenizer->is_byte_level = true;
    tokenizer->ignores_merges = rules->ignores_merges;
    decoder->is_byte_level = true;
    reader->adds_bos = rules->adds_bos;
    if (rules->expression != NULL) {
        step->matcher = SPLIT_REGEX;
        return split_regex_create(reader->gguf->path, KEY "pre", rules->expression, &step->regex,
                                  reader->builder.err);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status set_kind(struct gguf_reader *reader, struct decoder_steps *decoder)
{
    struct gguf_string model;
    TRY(gguf_get_string(reader->gguf, KEY "model", &model, reader->builder.err));
    if (is_text(model, "llama")) {
        return set_sentencepiece(reader, decoder);
    }
    if (is_text(model, "gpt2")) {
        return set_byte_level(reader, decoder);
    }
    return error_set(reader->builder.err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: " KEY "model: expected \"llama\" or \"gpt2\", found \"%.*s\"",
                     reader->gguf->path, shown(model), model.bytes);
}

/* ---- special tokens around a text ----------------------------------------------------------- */

/* Appends the id under a key to the template. */
static enum imbrex_status append_special(const struct gguf_reader *reader, const char *key,
                                         struct id_buffer *ids)
{
    const struct vocab_builder *builder = &reader->builder;
    int32_t id;
    TRY(gguf_get_int32(reader->gguf, key, 0, builder->tokenizer->vocab_size - 1, &id,
                       builder->err));
    if (builder->texts[id].bytes == NULL) {
        return error_set(builder->err, IMBREX_STATUS_FORMAT,
                         "%s: %s: expected the id of a token in use, found %" PRId32, builder->path,
                         key, id);
    }
    return id_buffer_append(ids, id, builder->err);
}

static enum imbrex_status read_template(struct gguf_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->builder.tokenizer;
    struct id_buffer ids = {0};
    enum imbrex_status status;
    TRY(read_flag(reader, KEY "add_bos_token", &reader->adds_bos));
    TRY(read_flag(reader, KEY "add_eos_token", &reader->adds_eos));
    status = IMBREX_STATUS_OK;
    if (reader->adds_bos) {
        TRY_OR_FAIL(append_special(reader, KEY "bos_token_id", &ids));
    }
    tokenizer->num_before = ids.num_ids;
    if (reader->adds_eos) {
        TRY_OR_FAIL(append_special(reader, KEY "eos_token_id", &ids));
    }
    tokenizer->num_after = ids.num_ids - tokenizer->num_before;
    tokenizer->template_ids = ids.ids;
    return IMBREX_STATUS_OK;
fail:
    free(ids.ids);
    return status;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static enum imbrex_status read_tokenizer(struct gguf_reader *reader, struct decoder_steps *decoder)
{
    struct merge_list list = {0};
    enum imbrex_status status;
    TRY(set_kind(reader, decoder));
    TRY(read_tokens(reader));
    TRY(vocab_builder_begin(&reader->builder, (int32_t)reader->num_tokens, reader->num_tokens));
    TRY(add_model_tokens(reader));
    TRY(add_added_tokens(reader));
    TRY(read_template(reader));
    TRY_OR_FAIL(reader->is_sentencepiece ? make_merges(reader, &list) : read_merges(reader, &list));
    TRY_OR_FAIL(vocab_builder_finish(&reader->builder, list.merges, list.num_merges));
fail:
    free(list.merges);
    return status;
}

enum imbrex_status tokenizer_from_gguf(const struct gguf *gguf, struct imbrex_tokenizer **tokenizer,
                                       struct imbrex_error *err)
{
    struct imbrex_tokenizer *built = calloc(1, sizeof(*built));
    if (built == NULL) {
        return error_out_of_memory(err, "tokenizer", sizeof(*built));
    }
    struct decoder_steps decoder = {0};
    struct gguf_reader reader = {
        .gguf = gguf,
        .builder = {.path = gguf->path, .tokenizer = built, .err = err, .decoder = &decoder},
    };
    enum imbrex_status status = read_tokenizer(&reader, &decoder);
    vocab_builder_release(&reader.builder);
    if (status != IMBREX_STATUS_OK) {
        imbrex_tokenizer_close(built);
        return status;
    }
    *tokenizer = built;
    return IMBREX_STATUS_OK;
}
