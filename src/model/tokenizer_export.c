/* SPDX-License-Identifier: Apache-2.0 */
/* Writes the two tokenizers that GGUF knows of:
 *
 *   gpt2    byte-level BPE: tokens and merges as they are, the way of cutting words by name
 *   llama   SentencePiece: tokens with scores, of which two neighbours become the token with the
 *           highest. A list of merges says the same only if it has every pair that makes a token,
 *           and all pairs of a token together: checked here, so that both give equal ids. */
#include "model/tokenizer_export.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "base/json.h"
#include "model/tokenizer_internal.h"

#define MAX_TOKENIZER_BYTES ((size_t)256 << 20)
#define KEY(suffix) "tokenizer.ggml." suffix

enum token_type {
    TOKEN_TYPE_NORMAL = 1,
    TOKEN_TYPE_UNKNOWN = 2,
    TOKEN_TYPE_CONTROL = 3,
    TOKEN_TYPE_USER_DEFINED = 4,
    TOKEN_TYPE_UNUSED = 5,
    TOKEN_TYPE_BYTE = 6,
};

struct exporter {
    const char *path;
    json_t *model, *vocab, *merges; /* of the file */
    const json_t *root;
    const char **tokens; /* [num_rows], NULL: no token */
    int32_t *types;      /* [num_rows] */
    float *scores;       /* [num_rows] */
    int32_t num_rows;
    struct gguf_writer *writer;
    struct imbrex_error *err;
};

static enum imbrex_status refuse(const struct exporter *exporter, const char *field,
                                 const char *expected, const char *found)
{
    return error_set(exporter->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: %s: expected %s, which a GGUF file can say, found %.64s", exporter->path,
                     field, expected, found);
}

static const char *type_of(const json_t *object)
{
    const char *type = json_string_value(json_object_get(object, "type"));
    return type != NULL ? type : "";
}

static bool is_type(const json_t *object, const char *type)
{
    return strcmp(type_of(object), type) == 0;
}

static bool is_set(const json_t *value)
{
    return value != NULL && !json_is_null(value);
}

/* The step at idx of something that is one step or a Sequence of them; NULL behind the last. */
static const json_t *step_at(const json_t *steps, const char *list, size_t idx)
{
    if (is_type(steps, "Sequence")) {
        return json_array_get(json_object_get(steps, list), idx);
    }
    return idx == 0 && is_set(steps) ? steps : NULL;
}

/* ---- tokens ---------------------------------------------------------------------------------- */

static enum imbrex_status place_token(struct exporter *exporter, const char *token, json_int_t id,
                                      enum token_type type)
{
    if (id < 0 || id >= exporter->num_rows) {
        return error_set(exporter->err, IMBREX_STATUS_FORMAT,
                         "%s: %.64s: expected an id in [0, %" PRId32 "), found %lld",
                         exporter->path, token, exporter->num_rows, (long long)id);
    }
    exporter->tokens[id] = token;
    exporter->types[id] = type;
    return IMBREX_STATUS_OK;
}

/* Whether the two can have bytes of a text in common. */
static bool can_overlap(const char *a, const char *b)
{
    size_t a_bytes = strlen(a), b_bytes = strlen(b);
    if (strstr(a, b) != NULL || strstr(b, a) != NULL) {
        return true;
    }
    for (size_t i = 1; i < a_bytes && i < b_bytes; i++) {
        if (memcmp(a + a_bytes - i, b, i) == 0 || memcmp(b + b_bytes - i, a, i) == 0) {
            return true;
        }
    }
    return false;
}

/* Whether finding the token in the normalised text, behind those that are found before, is the same
 * as finding all in the text as it is: the one way that a GGUF file knows. */
static bool is_found_alike(const struct exporter *exporter, const char *token)
{
    const json_t *added = json_object_get(exporter->root, "added_tokens"), *entry;
    size_t idx;
    if (is_set(json_object_get(exporter->root, "normalizer"))) {
        return false;
    }
    json_array_foreach(added, idx, entry)
    {
        if (!json_is_true(json_object_get(entry, "normalized")) &&
            can_overlap(token, json_string_value(json_object_get(entry, "content")))) {
            return false;
        }
    }
    return true;
}

static enum imbrex_status check_flags(const struct exporter *exporter, const json_t *entry)
{
    static const char *const flags[] = {"lstrip", "rstrip", "single_word", "normalized"};
    const char *token = json_string_value(json_object_get(entry, "content"));
    for (size_t i = 0; i < sizeof(flags) / sizeof(flags[0]); i++) {
        if (json_is_true(json_object_get(entry, flags[i])) &&
            (strcmp(flags[i], "normalized") != 0 || !is_found_alike(exporter, token))) {
            return error_set(exporter->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: added token \"%.64s\": %s: expected false, which is all a GGUF "
                             "file can say, found true",
                             exporter->path, token, flags[i]);
        }
    }
    return IMBREX_STATUS_OK;
}

/* "<0x0A>" */
static bool is_byte_token(const char *token)
{
    return strlen(token) == 6 && strncmp(token, "<0x", 3) == 0 && token[5] == '>' &&
           strspn(token + 3, "0123456789ABCDEF") == 2;
}

static enum imbrex_status place_tokens(struct exporter *exporter)
{
    const char *unknown = json_string_value(json_object_get(exporter->model, "unk_token"));
    bool has_bytes = json_is_true(json_object_get(exporter->model, "byte_fallback"));
    const json_t *added = json_object_get(exporter->root, "added_tokens"), *entry;
    const char *token;
    json_t *id;
    size_t idx;
    for (int32_t i = 0; i < exporter->num_rows; i++) {
        exporter->types[i] = TOKEN_TYPE_UNUSED;
    }
    json_object_foreach(exporter->vocab, token, id)
    {
        enum token_type type =
            has_bytes && is_byte_token(token) ? TOKEN_TYPE_BYTE : TOKEN_TYPE_NORMAL;
        TRY(place_token(exporter, token, json_integer_value(id), type));
    }
    json_array_foreach(added, idx, entry)
    {
        token = json_string_value(json_object_get(entry, "content"));
        bool is_special = json_is_true(json_object_get(entry, "special"));
        TRY(check_flags(exporter, entry));
        TRY(place_token(exporter, token, json_integer_value(json_object_get(entry, "id")),
                        is_special ? TOKEN_TYPE_CONTROL : TOKEN_TYPE_USER_DEFINED));
    }
    const json_t *unknown_id = unknown != NULL ? json_object_get(exporter->vocab, unknown) : NULL;
    if (unknown_id != NULL) {
        TRY(place_token(exporter, unknown, json_integer_value(unknown_id), TOKEN_TYPE_UNKNOWN));
        TRY(gguf_writer_put_uint32(exporter->writer, KEY("unknown_token_id"),
                                   (uint32_t)json_integer_value(unknown_id), exporter->err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_tokens(const struct exporter *exporter)
{
    struct gguf_writer *writer = exporter->writer;
    char unused[24];
    TRY(gguf_writer_begin_array(writer, KEY("tokens"), GGUF_TYPE_STRING,
                                (uint64_t)exporter->num_rows, exporter->err));
    for (int32_t i = 0; i < exporter->num_rows; i++) {
        const char *token = exporter->tokens[i];
        if (token == NULL) {
            snprintf(unused, sizeof(unused), "[PAD%" PRId32 "]", i);
            token = unused;
        }
        TRY(gguf_writer_append_string(writer, token, strlen(token), exporter->err));
    }
    TRY(gguf_writer_begin_array(writer, KEY("token_type"), GGUF_TYPE_INT32,
                                (uint64_t)exporter->num_rows, exporter->err));
    for (int32_t i = 0; i < exporter->num_rows; i++) {
        TRY(gguf_writer_append_int32(writer, exporter->types[i], exporter->err));
    }
    return IMBREX_STATUS_OK;
}

/* ---- merges ---------------------------------------------------------------------------------- */

/* A merge is "left right" or, in newer files, ["left", "right"]. */
static void merge_parts(const json_t *merge, struct gguf_string *left, struct gguf_string *right)
{
    if (json_is_array(merge)) {
        const json_t *first = json_array_get(merge, 0), *second = json_array_get(merge, 1);
        *left = (struct gguf_string){json_string_value(first), json_string_length(first)};
        *right = (struct gguf_string){json_string_value(second), json_string_length(second)};
        return;
    }
    const char *text = json_string_value(merge);
    size_t num_bytes = json_string_length(merge);
    const char *space = memchr(text, ' ', num_bytes);
    size_t left_bytes = (size_t)(space - text);
    *left = (struct gguf_string){text, left_bytes};
    *right = (struct gguf_string){space + 1, num_bytes - left_bytes - 1};
}

static enum imbrex_status put_merges(const struct exporter *exporter)
{
    const json_t *merge;
    size_t idx;
    struct byte_buffer text = {0};
    enum imbrex_status status =
        gguf_writer_begin_array(exporter->writer, KEY("merges"), GGUF_TYPE_STRING,
                                json_array_size(exporter->merges), exporter->err);
    json_array_foreach(exporter->merges, idx, merge)
    {
        struct gguf_string left, right;
        merge_parts(merge, &left, &right);
        text.num_bytes = 0;
        TRY_OR_FAIL(byte_buffer_append(&text, left.bytes, left.num_bytes, exporter->err));
        TRY_OR_FAIL(byte_buffer_append(&text, " ", 1, exporter->err));
        TRY_OR_FAIL(byte_buffer_append(&text, right.bytes, right.num_bytes, exporter->err));
        TRY_OR_FAIL(
            gguf_writer_append_string(exporter->writer, text.bytes, text.num_bytes, exporter->err));
    }
fail:
    free(text.bytes);
    return status;
}

/* ---- gpt2 ------------------------------------------------------------------------------------ */

/* What llama.cpp calls the ways of cutting a text into words. */
static const char *const pattern_names[NUM_WORD_PATTERNS] = {
    [WORD_PATTERN_GPT2] = "gpt-2",
    [WORD_PATTERN_QWEN2] = "qwen2",
    [WORD_PATTERN_LLAMA3] = "llama-bpe",
};

static enum imbrex_status find_pattern_name(const struct exporter *exporter, const char **name)
{
    static const char field[] = "pre_tokenizer";
    const json_t *pre_tokenizer = json_object_get(exporter->root, field);
    bool has_split = false, is_byte_level = false;
    enum word_pattern pattern = WORD_PATTERN_GPT2; /* ByteLevel's own */
    const json_t *step;
    for (size_t i = 0; (step = step_at(pre_tokenizer, "pretokenizers", i)) != NULL; i++) {
        if (is_type(step, "Split") && !has_split && i == 0) {
            const char *text =
                json_string_value(json_object_get(json_object_get(step, "pattern"), "Regex"));
            const char *behavior = json_string_value(json_object_get(step, "behavior"));
            has_split = true;
            if (text == NULL || !word_pattern_find(text, &pattern) || behavior == NULL ||
                strcmp(behavior, "Isolated") != 0 ||
                json_is_true(json_object_get(step, "invert"))) {
                return refuse(exporter, "pre_tokenizer: Split",
                              "the pattern of GPT-2, Qwen2 or Llama-3", "another one");
            }
        } else if (is_type(step, "ByteLevel") && !is_byte_level) {
            const json_t *use_regex = json_object_get(step, "use_regex");
            is_byte_level = true;
            if (json_is_true(json_object_get(step, "add_prefix_space"))) {
                return refuse(exporter, "pre_tokenizer: ByteLevel: add_prefix_space", "false",
                              "true");
            }
            if (has_split && !json_is_false(use_regex)) {
                return refuse(exporter, "pre_tokenizer: ByteLevel: use_regex", "false", "true");
            }
            if (!has_split && json_is_false(use_regex)) {
                return refuse(exporter, "pre_tokenizer: ByteLevel: use_regex", "true", "false");
            }
        } else {
            return refuse(exporter, field, "Split and ByteLevel", type_of(step));
        }
    }
    if (!is_byte_level) {
        return refuse(exporter, field, "ByteLevel at its end", "none");
    }
    *name = pattern_names[pattern];
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_gpt2(const struct exporter *exporter)
{
    const char *name = NULL;
    const json_t *normalizer = json_object_get(exporter->root, "normalizer");
    if (is_set(normalizer) && !is_type(normalizer, "NFC")) {
        return refuse(exporter, "normalizer", "none or NFC", type_of(normalizer));
    }
    TRY(find_pattern_name(exporter, &name));
    TRY(gguf_writer_put_string(exporter->writer, KEY("model"), "gpt2", exporter->err));
    TRY(gguf_writer_put_string(exporter->writer, KEY("pre"), name, exporter->err));
    TRY(put_tokens(exporter));
    return put_merges(exporter);
}

/* ---- llama ----------------------------------------------------------------------------------- */

static enum imbrex_status refuse_merges(const struct exporter *exporter, const char *why,
                                        const char *token)
{
    return error_set(exporter->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: model.merges: expected merges that scores of tokens can say, found %s "
                     "\"%.64s\"",
                     exporter->path, why, token);
}

/* The id of left and right together; -1: not in the vocabulary. */
static enum imbrex_status find_joined(const struct exporter *exporter,
                                      const struct gguf_string *left,
                                      const struct gguf_string *right, struct byte_buffer *text,
                                      json_int_t *found)
{
    text->num_bytes = 0;
    TRY(byte_buffer_append(text, left->bytes, left->num_bytes, exporter->err));
    TRY(byte_buffer_append(text, right->bytes, right->num_bytes, exporter->err));
    TRY(byte_buffer_append(text, "", 1, exporter->err));
    const json_t *id = json_object_get(exporter->vocab, text->bytes);
    *found = id != NULL ? json_integer_value(id) : -1;
    return IMBREX_STATUS_OK;
}

/* How often the merges make each token, and its score: minus the place of its merges. */
static enum imbrex_status score_tokens(const struct exporter *exporter, int32_t *num_merges,
                                       struct byte_buffer *text)
{
    const json_t *merge;
    size_t idx;
    json_int_t id, last = -1;
    float place = 0.0f;
    json_array_foreach(exporter->merges, idx, merge)
    {
        struct gguf_string left, right;
        merge_parts(merge, &left, &right);
        TRY(find_joined(exporter, &left, &right, text, &id));
        if (id < 0) {
            continue; /* tokenizer_parse would have refused it */
        }
        if (id != last && num_merges[id] > 0) {
            return refuse_merges(exporter, "not one after the other those of",
                                 exporter->tokens[id]);
        }
        place -= id != last ? 1.0f : 0.0f;
        exporter->scores[id] = place;
        num_merges[id]++;
        last = id;
    }
    return IMBREX_STATUS_OK;
}

/* Pairs of tokens that together are this token. */
static enum imbrex_status count_pairs(const struct exporter *exporter, const char *token,
                                      struct byte_buffer *text, int32_t *num_pairs)
{
    size_t num_bytes = strlen(token);
    *num_pairs = 0;
    for (size_t cut = 1; cut < num_bytes; cut++) {
        if (((unsigned char)token[cut] & 0xc0) == 0x80 ||
            json_object_get(exporter->vocab, token + cut) == NULL) {
            continue;
        }
        text->num_bytes = 0;
        TRY(byte_buffer_append(text, token, cut, exporter->err));
        TRY(byte_buffer_append(text, "", 1, exporter->err));
        *num_pairs += json_object_get(exporter->vocab, text->bytes) != NULL;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status find_scores(const struct exporter *exporter)
{
    struct byte_buffer text = {0};
    enum imbrex_status status;
    int32_t *num_merges = calloc((size_t)exporter->num_rows, sizeof(num_merges[0]));
    if (num_merges == NULL) {
        return error_out_of_memory(exporter->err, exporter->path,
                                   (size_t)exporter->num_rows * sizeof(num_merges[0]));
    }
    TRY_OR_FAIL(score_tokens(exporter, num_merges, &text));
    for (int32_t i = 0; i < exporter->num_rows; i++) {
        int32_t num_pairs = 0;
        if (exporter->types[i] != TOKEN_TYPE_NORMAL) {
            continue;
        }
        TRY_OR_FAIL(count_pairs(exporter, exporter->tokens[i], &text, &num_pairs));
        if (num_pairs != num_merges[i]) {
            status = refuse_merges(exporter, "too few for", exporter->tokens[i]);
            goto fail;
        }
        if (num_merges[i] == 0) {
            exporter->scores[i] = -(float)(json_array_size(exporter->merges) + 1);
        }
    }
fail:
    free(num_merges);
    free(text.bytes);
    return status;
}

/* Whether U+2581 is put before the text. */
static enum imbrex_status find_prefix(const struct exporter *exporter, bool *has_prefix)
{
    const json_t *normalizer = json_object_get(exporter->root, "normalizer");
    const json_t *pre_tokenizer = json_object_get(exporter->root, "pre_tokenizer");
    const json_t *step;
    bool marks_spaces = false;
    *has_prefix = false;
    for (size_t i = 0; (step = step_at(normalizer, "normalizers", i)) != NULL; i++) {
        if (is_type(step, "Prepend")) {
            *has_prefix = true;
        } else if (is_type(step, "Replace")) {
            marks_spaces = true;
        } else {
            return refuse(exporter, "normalizer", "Prepend and Replace", type_of(step));
        }
    }
    for (size_t i = 0; (step = step_at(pre_tokenizer, "pretokenizers", i)) != NULL; i++) {
        const char *scheme = json_string_value(json_object_get(step, "prepend_scheme"));
        if (!is_type(step, "Metaspace") || json_is_true(json_object_get(step, "split"))) {
            return refuse(exporter, "pre_tokenizer", "none or Metaspace that does not split",
                          type_of(step));
        }
        marks_spaces = true;
        *has_prefix = *has_prefix || scheme == NULL || strcmp(scheme, "never") != 0;
    }
    if (!marks_spaces) {
        return refuse(exporter, "normalizer", "one that writes spaces as U+2581", "none");
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_llama(const struct exporter *exporter)
{
    struct gguf_writer *writer = exporter->writer;
    bool has_prefix = false;
    TRY(find_prefix(exporter, &has_prefix));
    TRY(find_scores(exporter));
    TRY(gguf_writer_put_string(writer, KEY("model"), "llama", exporter->err));
    TRY(gguf_writer_put_string(writer, KEY("pre"), "default", exporter->err));
    TRY(put_tokens(exporter));
    TRY(gguf_writer_begin_array(writer, KEY("scores"), GGUF_TYPE_FLOAT32,
                                (uint64_t)exporter->num_rows, exporter->err));
    for (int32_t i = 0; i < exporter->num_rows; i++) {
        TRY(gguf_writer_append_float32(writer, exporter->scores[i], exporter->err));
    }
    return gguf_writer_put_bool(writer, KEY("add_space_prefix"), has_prefix, exporter->err);
}

/* ---- tokens around a text -------------------------------------------------------------------- */

/* The template's single special token before or behind the text, or -1. */
static enum imbrex_status read_template(const struct exporter *exporter, const json_t *processor,
                                        json_int_t *before, json_int_t *after)
{
    const json_t *single = json_object_get(processor, "single"), *piece;
    const json_t *specials = json_object_get(processor, "special_tokens");
    bool is_behind = false;
    size_t idx;
    json_array_foreach(single, idx, piece)
    {
        const json_t *special = json_object_get(piece, "SpecialToken");
        json_int_t *id = is_behind ? after : before;
        if (special == NULL) {
            is_behind = true;
            continue;
        }
        const char *name = json_string_value(json_object_get(special, "id"));
        const json_t *ids = json_object_get(json_object_get(specials, name), "ids");
        if (*id >= 0 || json_array_size(ids) != 1) {
            return refuse(exporter, "post_processor", "at most one token before and behind a text",
                          "more");
        }
        *id = json_integer_value(json_array_get(ids, 0));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status put_template(const struct exporter *exporter)
{
    const json_t *processor = json_object_get(exporter->root, "post_processor"), *step;
    struct gguf_writer *writer = exporter->writer;
    json_int_t before = -1, after = -1;
    for (size_t i = 0; (step = step_at(processor, "processors", i)) != NULL; i++) {
        if (is_type(step, "TemplateProcessing")) {
            TRY(read_template(exporter, step, &before, &after));
        } else if (!is_type(step, "ByteLevel")) {
            return refuse(exporter, "post_processor", "TemplateProcessing or ByteLevel",
                          type_of(step));
        }
    }
    if (before >= 0) {
        TRY(gguf_writer_put_uint32(writer, KEY("bos_token_id"), (uint32_t)before, exporter->err));
    }
    TRY(gguf_writer_put_bool(writer, KEY("add_bos_token"), before >= 0, exporter->err));
    if (after >= 0) {
        /* Which token that is, llama.cpp takes from eos_token_id: the caller's. */
        return refuse(exporter, "post_processor", "no token behind a text", "one");
    }
    return gguf_writer_put_bool(writer, KEY("add_eos_token"), false, exporter->err);
}

/* ---- the whole ------------------------------------------------------------------------------- */

static enum imbrex_status put_all(struct exporter *exporter)
{
    size_t num_rows = (size_t)exporter->num_rows;
    bool has_bytes = json_is_true(json_object_get(exporter->model, "byte_fallback"));
    exporter->tokens = calloc(num_rows, sizeof(exporter->tokens[0]));
    exporter->types = calloc(num_rows, sizeof(exporter->types[0]));
    exporter->scores = calloc(num_rows, sizeof(exporter->scores[0]));
    if (exporter->tokens == NULL || exporter->types == NULL || exporter->scores == NULL) {
        return error_out_of_memory(exporter->err, exporter->path,
                                   num_rows * sizeof(exporter->tokens[0]));
    }
    TRY(place_tokens(exporter));
    TRY(has_bytes ? put_llama(exporter) : put_gpt2(exporter));
    return put_template(exporter);
}

enum imbrex_status tokenizer_export_gguf(const char *path, int32_t num_rows,
                                         struct gguf_writer *writer, struct imbrex_error *err)
{
    json_t *root = NULL;
    TRY(json_read_object(path, MAX_TOKENIZER_BYTES, &root, err));
    json_t *model = json_object_get(root, "model");
    struct exporter exporter = {.path = path,
                                .root = root,
                                .model = model,
                                .vocab = json_object_get(model, "vocab"),
                                .merges = json_object_get(model, "merges"),
                                .num_rows = num_rows,
                                .writer = writer,
                                .err = err};
    enum imbrex_status status = put_all(&exporter);
    free(exporter.tokens);
    free(exporter.types);
    free(exporter.scores);
    json_decref(root);
    return status;
}
