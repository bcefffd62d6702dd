/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json: which of its steps imbrex has. A file is taken only if every step in it is one
 * whose result here equals that of Hugging Face's tokenizers; whatever else it asks for is refused
 * by name, because ids that are nearly right are worse than none. tokenizer_vocab.c reads the
 * tokens.
 *
 *   byte-level     normalizer NFC or null; pre_tokenizer Split by Qwen2's pattern, then ByteLevel;
 *                  decoder ByteLevel
 *   SentencePiece  normalizer Prepend and Replace; no pre_tokenizer; decoder Replace, ByteFallback,
 *                  Fuse, Strip
 *
 * `truncation` and `padding` are left aside: they shape batches, they do not belong to a text. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "model/tokenizer_internal.h"

#define FIELD_MAX_BYTES 96

/* Offsets of token bytes have 32 bits; the bytes are never more than the file's. */
#define PARSE_MAX_BYTES ((size_t)1 << 31)

enum imbrex_status tokenizer_reader_refuse(const struct tokenizer_reader *reader,
                                           enum imbrex_status status, const char *field,
                                           const char *expected, const json_t *found)
{
    if (json_is_string(found)) {
        return error_set(reader->err, status, "%s: %s: expected %s, found \"%.80s\"", reader->path,
                         field, expected, json_string_value(found));
    }
    if (json_is_number(found)) {
        return error_set(reader->err, status, "%s: %s: expected %s, found %.17g", reader->path,
                         field, expected, json_number_value(found));
    }
    return error_set(reader->err, status, "%s: %s: expected %s, found %s", reader->path, field,
                     expected, json_kind(found));
}

static enum imbrex_status refuse_format(const struct tokenizer_reader *reader, const char *field,
                                        const char *expected, const json_t *found)
{
    return tokenizer_reader_refuse(reader, IMBREX_STATUS_FORMAT, field, expected, found);
}

static enum imbrex_status refuse_unsupported(const struct tokenizer_reader *reader,
                                             const char *field, const char *expected,
                                             const json_t *found)
{
    return tokenizer_reader_refuse(reader, IMBREX_STATUS_UNSUPPORTED, field, expected, found);
}

static bool is_absent(const json_t *value)
{
    return value == NULL || json_is_null(value);
}

static bool is_string(const json_t *value, const char *text)
{
    return json_is_string(value) && strcmp(json_string_value(value), text) == 0;
}

/* True if step["type"] is this name; false for what is no object. */
static bool has_type(const json_t *step, const char *type)
{
    return is_string(json_object_get(step, "type"), type);
}

/* UNSUPPORTED unless object[key] is this string. */
static enum imbrex_status expect_string(const struct tokenizer_reader *reader, const char *field,
                                        const json_t *object, const char *key, const char *text)
{
    const json_t *value = json_object_get(object, key);
    if (is_string(value, text)) {
        return IMBREX_STATUS_OK;
    }
    char name[FIELD_MAX_BYTES], expected[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.%s", field, key);
    snprintf(expected, sizeof(expected), "\"%s\"", text);
    return refuse_unsupported(reader, name, expected, value);
}

/* UNSUPPORTED unless object[key] is false. Missing counts as true: that is the default of
 * Hugging Face's ByteLevel. */
static enum imbrex_status expect_false(const struct tokenizer_reader *reader, const char *field,
                                       const json_t *object, const char *key)
{
    const json_t *value = json_object_get(object, key);
    if (json_is_false(value)) {
        return IMBREX_STATUS_OK;
    }
    char name[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.%s", field, key);
    return refuse_unsupported(reader, name, "false", value);
}

/* ---- normalizer ----------------------------------------------------------------------------- */

static enum imbrex_status read_normalizer_step(const struct tokenizer_reader *reader,
                                               const char *field, const json_t *step)
{
    struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    char name[FIELD_MAX_BYTES];
    if (has_type(step, "NFC") && tokenizer->is_byte_level) {
        tokenizer->has_nfc = true;
        return IMBREX_STATUS_OK;
    }
    if (has_type(step, "Prepend") && !tokenizer->is_byte_level && !tokenizer->has_prepend) {
        tokenizer->has_prepend = true;
        return expect_string(reader, field, step, "prepend", SPACE_MARK);
    }
    if (has_type(step, "Replace") && !tokenizer->is_byte_level) {
        tokenizer->has_replace = true;
        snprintf(name, sizeof(name), "%s.pattern", field);
        TRY(expect_string(reader, name, json_object_get(step, "pattern"), "String", " "));
        return expect_string(reader, field, step, "content", SPACE_MARK);
    }
    snprintf(name, sizeof(name), "%s.type", field);
    return refuse_unsupported(reader, name,
                              tokenizer->is_byte_level ? "\"NFC\" (before ByteLevel)"
                                                       : "one \"Prepend\" and \"Replace\" (without "
                                                         "pre_tokenizer)",
                              json_object_get(step, "type"));
}

static enum imbrex_status read_normalizer(const struct tokenizer_reader *reader)
{
    const json_t *normalizer = json_object_get(reader->root, "normalizer");
    if (is_absent(normalizer)) {
        return IMBREX_STATUS_OK;
    }
    if (!json_is_object(normalizer)) {
        return refuse_format(reader, "normalizer", "an object or null", normalizer);
    }
    if (!has_type(normalizer, "Sequence")) {
        return read_normalizer_step(reader, "normalizer", normalizer);
    }
    const json_t *steps = json_object_get(normalizer, "normalizers");
    if (!json_is_array(steps)) {
        return refuse_format(reader, "normalizer.normalizers", "an array", steps);
    }
    for (size_t i = 0; i < json_array_size(steps); i++) {
        char field[FIELD_MAX_BYTES];
        snprintf(field, sizeof(field), "normalizer.normalizers[%zu]", i);
        TRY(read_normalizer_step(reader, field, json_array_get(steps, i)));
    }
    return IMBREX_STATUS_OK;
}

/* ---- pre_tokenizer -------------------------------------------------------------------------- */

static enum imbrex_status read_pre_tokenizer(const struct tokenizer_reader *reader)
{
    const json_t *pre_tokenizer = json_object_get(reader->root, "pre_tokenizer");
    if (is_absent(pre_tokenizer)) {
        return IMBREX_STATUS_OK;
    }
    if (!has_type(pre_tokenizer, "Sequence")) {
        return refuse_unsupported(reader, "pre_tokenizer.type",
                                  "null or a \"Sequence\" of Split and ByteLevel",
                                  json_object_get(pre_tokenizer, "type"));
    }
    const json_t *steps = json_object_get(pre_tokenizer, "pretokenizers");
    if (!json_is_array(steps)) {
        return refuse_format(reader, "pre_tokenizer.pretokenizers", "an array", steps);
    }
    if (json_array_size(steps) != 2) {
        return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: pre_tokenizer.pretokenizers: expected Split and ByteLevel, found %zu "
                         "steps",
                         reader->path, json_array_size(steps));
    }
    static const char split_field[] = "pre_tokenizer.pretokenizers[0]";
    static const char bytes_field[] = "pre_tokenizer.pretokenizers[1]";
    const json_t *split = json_array_get(steps, 0), *bytes = json_array_get(steps, 1);
    TRY(expect_string(reader, split_field, split, "type", "Split"));
    const json_t *regex = json_object_get(json_object_get(split, "pattern"), "Regex");
    if (!is_string(regex, qwen2_split_pattern)) {
        return refuse_unsupported(reader, "pre_tokenizer.pretokenizers[0].pattern.Regex",
                                  "Qwen2's pattern", regex);
    }
    TRY(expect_string(reader, split_field, split, "behavior", "Isolated"));
    TRY(expect_false(reader, split_field, split, "invert"));
    TRY(expect_string(reader, bytes_field, bytes, "type", "ByteLevel"));
    TRY(expect_false(reader, bytes_field, bytes, "add_prefix_space"));
    TRY(expect_false(reader, bytes_field, bytes, "use_regex"));
    reader->tokenizer->is_byte_level = true;
    return IMBREX_STATUS_OK;
}

/* ---- decoder -------------------------------------------------------------------------------- */

static enum imbrex_status read_decoder_steps(const struct tokenizer_reader *reader,
                                             const json_t *steps)
{
    static const char *const types[] = {"Replace", "ByteFallback", "Fuse", "Strip"};
    const size_t num_types = sizeof(types) / sizeof(types[0]);
    size_t num_steps = json_array_size(steps);
    if (num_steps != num_types && num_steps != num_types - 1) {
        return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: decoder.decoders: expected Replace, ByteFallback, Fuse and maybe "
                         "Strip, found %zu steps",
                         reader->path, num_steps);
    }
    for (size_t i = 0; i < num_steps; i++) {
        char field[FIELD_MAX_BYTES];
        snprintf(field, sizeof(field), "decoder.decoders[%zu]", i);
        TRY(expect_string(reader, field, json_array_get(steps, i), "type", types[i]));
    }
    const json_t *replace = json_array_get(steps, 0);
    TRY(expect_string(reader, "decoder.decoders[0].pattern", json_object_get(replace, "pattern"),
                      "String", SPACE_MARK));
    TRY(expect_string(reader, "decoder.decoders[0]", replace, "content", " "));
    if (num_steps == num_types) {
        const json_t *strip = json_array_get(steps, 3);
        const json_t *start = json_object_get(strip, "start"),
                     *stop = json_object_get(strip, "stop");
        TRY(expect_string(reader, "decoder.decoders[3]", strip, "content", " "));
        if (!json_is_integer(start) || json_integer_value(start) != 1) {
            return refuse_unsupported(reader, "decoder.decoders[3].start", "1", start);
        }
        if (!json_is_integer(stop) || json_integer_value(stop) != 0) {
            return refuse_unsupported(reader, "decoder.decoders[3].stop", "0", stop);
        }
        reader->tokenizer->strips_space = true;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_decoder(const struct tokenizer_reader *reader)
{
    const json_t *decoder = json_object_get(reader->root, "decoder");
    if (reader->tokenizer->is_byte_level) {
        /* Its options say nothing about decoding. */
        return expect_string(reader, "decoder", decoder, "type", "ByteLevel");
    }
    TRY(expect_string(reader, "decoder", decoder, "type", "Sequence"));
    return read_decoder_steps(reader, json_object_get(decoder, "decoders"));
}

/* ---- model ---------------------------------------------------------------------------------- */

/* Affixes that mark a token's place in a word: null and "" both mean none. */
static enum imbrex_status expect_no_affix(const struct tokenizer_reader *reader,
                                          const json_t *model, const char *key)
{
    const json_t *affix = json_object_get(model, key);
    if (is_absent(affix) || is_string(affix, "")) {
        return IMBREX_STATUS_OK;
    }
    char field[FIELD_MAX_BYTES];
    snprintf(field, sizeof(field), "model.%s", key);
    return refuse_unsupported(reader, field, "null or \"\"", affix);
}

static enum imbrex_status read_model(const struct tokenizer_reader *reader)
{
    struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    const json_t *model = json_object_get(reader->root, "model");
    if (!json_is_object(model)) {
        return refuse_format(reader, "model", "an object", model);
    }
    TRY(expect_string(reader, "model", model, "type", "BPE"));
    const json_t *dropout = json_object_get(model, "dropout");
    if (!is_absent(dropout) && !(json_is_number(dropout) && json_number_value(dropout) == 0.0)) {
        return refuse_unsupported(reader, "model.dropout", "null", dropout);
    }
    TRY(expect_no_affix(reader, model, "continuing_subword_prefix"));
    TRY(expect_no_affix(reader, model, "end_of_word_suffix"));

    /* Hugging Face looks a whole word up before it merges; every other step is the same. */
    bool ignores_merges = false, has_byte_fallback = false;
    char scope[FIELD_MAX_BYTES + IMBREX_ERROR_MESSAGE_BYTES];
    snprintf(scope, sizeof(scope), "%s: model", reader->path);
    TRY(json_get_optional_bool(scope, model, "ignore_merges", &ignores_merges, reader->err));
    if (ignores_merges) {
        return refuse_unsupported(reader, "model.ignore_merges", "false",
                                  json_object_get(model, "ignore_merges"));
    }
    TRY(json_get_optional_bool(scope, model, "byte_fallback", &has_byte_fallback, reader->err));
    TRY(json_get_optional_bool(scope, model, "fuse_unk", &tokenizer->fuse_unk, reader->err));
    /* A byte-level vocabulary has a token for each byte: nothing is left to fall back from. */
    tokenizer->has_byte_fallback = has_byte_fallback && !tokenizer->is_byte_level;
    return tokenizer_read_vocab(reader);
}

/* ---- post_processor ------------------------------------------------------------------------- */

/* Appends the ids of one special token of a template. */
static enum imbrex_status read_template_token(const struct tokenizer_reader *reader,
                                              const json_t *template, const json_t *name,
                                              struct id_buffer *ids)
{
    if (!json_is_string(name)) {
        return refuse_format(reader, "post_processor.single: SpecialToken.id", "a string", name);
    }
    const json_t *token =
        json_object_get(json_object_get(template, "special_tokens"), json_string_value(name));
    const json_t *token_ids = json_object_get(token, "ids");
    if (!json_is_array(token_ids)) {
        return error_set(reader->err, IMBREX_STATUS_FORMAT,
                         "%s: post_processor.special_tokens: \"%.60s\": expected an array `ids`, "
                         "found %s",
                         reader->path, json_string_value(name), json_kind(token_ids));
    }
    for (size_t i = 0; i < json_array_size(token_ids); i++) {
        const json_t *id = json_array_get(token_ids, i);
        size_t unused;
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= reader->tokenizer->vocab_size ||
            imbrex_token_bytes(reader->tokenizer, (int32_t)json_integer_value(id), &unused) ==
                NULL) {
            return refuse_format(reader, "post_processor.special_tokens: ids",
                                 "ids of the vocabulary", id);
        }
        TRY(id_buffer_append(ids, (int32_t)json_integer_value(id), reader->err));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_template(const struct tokenizer_reader *reader,
                                        const json_t *template, struct id_buffer *ids,
                                        size_t *num_before)
{
    const json_t *pieces = json_object_get(template, "single");
    if (!json_is_array(pieces)) {
        return refuse_unsupported(reader, "post_processor.single", "an array", pieces);
    }
    bool has_text = false;
    for (size_t i = 0; i < json_array_size(pieces); i++) {
        const json_t *piece = json_array_get(pieces, i);
        const json_t *sequence = json_object_get(piece, "Sequence");
        const json_t *special = json_object_get(piece, "SpecialToken");
        if (sequence != NULL && !has_text && is_string(json_object_get(sequence, "id"), "A")) {
            has_text = true;
            *num_before = ids->num_ids;
        } else if (special != NULL) {
            TRY(read_template_token(reader, template, json_object_get(special, "id"), ids));
        } else {
            return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                             "%s: post_processor.single[%zu]: expected a SpecialToken, or once the "
                             "Sequence \"A\", found another piece",
                             reader->path, i);
        }
    }
    if (!has_text) {
        return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: post_processor.single: expected the Sequence \"A\", found special "
                         "tokens only",
                         reader->path);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_post_processor(const struct tokenizer_reader *reader)
{
    const json_t *processor = json_object_get(reader->root, "post_processor");
    /* ByteLevel only moves offsets, which imbrex does not keep. */
    if (is_absent(processor) || has_type(processor, "ByteLevel")) {
        return IMBREX_STATUS_OK;
    }
    if (!has_type(processor, "TemplateProcessing")) {
        return refuse_unsupported(reader, "post_processor.type",
                                  "\"ByteLevel\", \"TemplateProcessing\" or null",
                                  json_object_get(processor, "type"));
    }
    struct id_buffer ids = {0};
    size_t num_before = 0;
    enum imbrex_status status = read_template(reader, processor, &ids, &num_before);
    if (status != IMBREX_STATUS_OK) {
        free(ids.ids);
        return status;
    }
    reader->tokenizer->template_ids = ids.ids;
    reader->tokenizer->num_before = num_before;
    reader->tokenizer->num_after = ids.num_ids - num_before;
    return IMBREX_STATUS_OK;
}

/* ---- the whole ------------------------------------------------------------------------------ */

static enum imbrex_status read_tokenizer(const struct tokenizer_reader *reader)
{
    const json_t *version = json_object_get(reader->root, "version");
    if (!is_absent(version) && !is_string(version, "1.0")) {
        return refuse_unsupported(reader, "version", "\"1.0\"", version);
    }
    TRY(read_pre_tokenizer(reader));
    TRY(read_normalizer(reader));
    TRY(read_decoder(reader));
    TRY(read_model(reader));
    return read_post_processor(reader);
}

enum imbrex_status tokenizer_parse(const char *path, const void *bytes, size_t num_bytes,
                                   struct imbrex_tokenizer **tokenizer, struct imbrex_error *err)
{
    if (num_bytes > PARSE_MAX_BYTES) {
        return error_set(err, IMBREX_STATUS_FORMAT, "%s: expected at most %zu bytes, found %zu",
                         path, PARSE_MAX_BYTES, num_bytes);
    }
    json_t *root = NULL;
    struct imbrex_tokenizer *built = NULL;
    enum imbrex_status status;
    TRY_OR_FAIL(json_parse_object(path, bytes, num_bytes, &root, err));
    built = calloc(1, sizeof(*built));
    if (built == NULL) {
        status = error_out_of_memory(err, "tokenizer", sizeof(*built));
        goto fail;
    }
    struct tokenizer_reader reader = {.path = path, .root = root, .tokenizer = built, .err = err};
    TRY_OR_FAIL(read_tokenizer(&reader));
    json_decref(root);
    *tokenizer = built;
    return IMBREX_STATUS_OK;
fail:
    imbrex_tokenizer_close(built);
    json_decref(root);
    return status;
}
