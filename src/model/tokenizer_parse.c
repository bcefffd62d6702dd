/* SPDX-License-Identifier: Apache-2.0 */
/* tokenizer.json: which of its steps imbrex has. A file is taken only if every step in it is one
 * whose result here equals that of Hugging Face's tokenizers; whatever else it asks for is refused
 * by name, because ids that are nearly right are worse than none. tokenizer_parse_vocab.c reads the
 * tokens.
 *
 *   normalizer      NFC NFD NFKC NFKD Replace(String) Prepend Strip Sequence
 *   pre_tokenizer   Split ByteLevel(last) Digits Metaspace Sequence
 *   model           BPE without dropout and affixes
 *   decoder         ByteLevel or: Replace(String)* Metaspace? ByteFallback?; then Fuse Strip(start)
 *   post_processor  TemplateProcessing ByteLevel Sequence
 *
 * `truncation` and `padding` are left aside: they shape batches, they do not belong to a text. So
 * is tokenizer_config.json: its add_bos_token and add_eos_token say what the class that wrote
 * tokenizer.json has put into post_processor already. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

#define FIELD_MAX_BYTES 160

/* More than any file has; memory stays proportional to it. */
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

/* A boolean that may be missing. FORMAT if it is something else. */
static enum imbrex_status read_flag(const struct tokenizer_reader *reader, const char *field,
                                    const json_t *object, const char *key, bool *value)
{
    char scope[FIELD_MAX_BYTES + IMBREX_ERROR_MESSAGE_BYTES];
    snprintf(scope, sizeof(scope), "%s: %s", reader->path, field);
    return json_get_optional_bool(scope, object, key, value, reader->err);
}

/* A string of min_bytes to TOKENIZER_MAX_AFFIX_BYTES - 1 bytes, copied. */
static enum imbrex_status read_affix(const struct tokenizer_reader *reader, const char *field,
                                     const json_t *object, const char *key, size_t min_bytes,
                                     char text[TOKENIZER_MAX_AFFIX_BYTES], size_t *num_bytes)
{
    const json_t *value = json_object_get(object, key);
    char name[FIELD_MAX_BYTES], expected[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.%s", field, key);
    if (!json_is_string(value)) {
        return refuse_unsupported(reader, name, "a string", value);
    }
    size_t length = json_string_length(value);
    if (length < min_bytes || length >= TOKENIZER_MAX_AFFIX_BYTES) {
        snprintf(expected, sizeof(expected), "a string of %zu to %d bytes", min_bytes,
                 TOKENIZER_MAX_AFFIX_BYTES - 1);
        return refuse_unsupported(reader, name, expected, value);
    }
    memcpy(text, json_string_value(value), length);
    *num_bytes = length;
    return IMBREX_STATUS_OK;
}

/* {"pattern": {"String": ...}, "content": ...} */
static enum imbrex_status read_replace(const struct tokenizer_reader *reader, const char *field,
                                       const json_t *step, char *pattern, size_t *pattern_bytes,
                                       char *content, size_t *content_bytes)
{
    char name[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.pattern", field);
    TRY(read_affix(reader, name, json_object_get(step, "pattern"), "String", 1, pattern,
                   pattern_bytes));
    return read_affix(reader, field, step, "content", 0, content, content_bytes);
}

/* Reads one step, or those of a Sequence, whose array has this name. */
typedef enum imbrex_status read_step_fn(const struct tokenizer_reader *reader, void *context,
                                        const char *field, const json_t *step);

static enum imbrex_status read_steps(const struct tokenizer_reader *reader, void *context,
                                     const char *field, const char *array_name, const json_t *steps,
                                     read_step_fn *read_step)
{
    if (!has_type(steps, "Sequence")) {
        return read_step(reader, context, field, steps);
    }
    const json_t *array = json_object_get(steps, array_name);
    char name[FIELD_MAX_BYTES];
    if (!json_is_array(array)) {
        snprintf(name, sizeof(name), "%s.%s", field, array_name);
        return refuse_format(reader, name, "an array", array);
    }
    for (size_t i = 0; i < json_array_size(array); i++) {
        snprintf(name, sizeof(name), "%s.%s[%zu]", field, array_name, i);
        TRY(read_step(reader, context, name, json_array_get(array, i)));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status refuse_type(const struct tokenizer_reader *reader, const char *field,
                                      const char *expected, const json_t *step)
{
    char name[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.type", field);
    return refuse_unsupported(reader, name, expected, json_object_get(step, "type"));
}

static enum imbrex_status refuse_number_of_steps(const struct tokenizer_reader *reader,
                                                 const char *field)
{
    return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                     "%s: %s: expected at most %d steps, found more", reader->path, field,
                     TOKENIZER_MAX_STEPS);
}

/* ---- normalizer ----------------------------------------------------------------------------- */

static bool find_form(const json_t *step, enum unicode_form *form)
{
    static const char *const names[] = {
#define UNICODE_FORM_NAME(name, id, is_compatible, is_composed) [UNICODE_FORM_##id] = name,
        UNICODE_FORM_LIST(UNICODE_FORM_NAME)
#undef UNICODE_FORM_NAME
    };
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (has_type(step, names[i])) {
            *form = (enum unicode_form)i;
            return true;
        }
    }
    return false;
}

static enum imbrex_status read_normalizer_step(const struct tokenizer_reader *reader, void *context,
                                               const char *field, const json_t *step)
{
    (void)context;
    struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    if (tokenizer->num_normalizer_steps == TOKENIZER_MAX_STEPS) {
        return refuse_number_of_steps(reader, field);
    }
    struct normalizer_step *added = &tokenizer->normalizer[tokenizer->num_normalizer_steps];
    *added = (struct normalizer_step){0};
    if (find_form(step, &added->form)) {
        added->kind = NORMALIZER_FORM;
    } else if (has_type(step, "Replace")) {
        added->kind = NORMALIZER_REPLACE;
        TRY(read_replace(reader, field, step, added->pattern, &added->pattern_bytes, added->content,
                         &added->content_bytes));
    } else if (has_type(step, "Prepend")) {
        added->kind = NORMALIZER_PREPEND;
        TRY(read_affix(reader, field, step, "prepend", 0, added->content, &added->content_bytes));
    } else if (has_type(step, "Strip")) {
        added->kind = NORMALIZER_STRIP;
        added->strips_left = added->strips_right = true;
        TRY(read_flag(reader, field, step, "strip_left", &added->strips_left));
        TRY(read_flag(reader, field, step, "strip_right", &added->strips_right));
    } else {
        return refuse_type(reader, field,
                           "\"NFC\", \"NFD\", \"NFKC\", \"NFKD\", \"Replace\", \"Prepend\", "
                           "\"Strip\" or a \"Sequence\" of them",
                           step);
    }
    tokenizer->num_normalizer_steps++;
    return IMBREX_STATUS_OK;
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
    return read_steps(reader, NULL, "normalizer", "normalizers", normalizer, read_normalizer_step);
}

/* ---- pre_tokenizer -------------------------------------------------------------------------- */

/* Room for one more step, zeroed. */
static enum imbrex_status add_pre_step(const struct tokenizer_reader *reader, const char *field,
                                       struct pre_step **step)
{
    struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    if (tokenizer->num_pre_steps == TOKENIZER_MAX_STEPS) {
        return refuse_number_of_steps(reader, field);
    }
    *step = &tokenizer->pre_steps[tokenizer->num_pre_steps++];
    **step = (struct pre_step){.kind = PRE_STEP_SPLIT};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_behavior(const struct tokenizer_reader *reader, const char *field,
                                        const json_t *step, enum split_behavior *behavior)
{
    static const char *const names[] = {
#define SPLIT_BEHAVIOR_NAME(name, id) [SPLIT_##id] = name,
        SPLIT_BEHAVIOR_LIST(SPLIT_BEHAVIOR_NAME)
#undef SPLIT_BEHAVIOR_NAME
    };
    const json_t *value = json_object_get(step, "behavior");
    for (size_t i = 0; i < sizeof(names) / sizeof(names[0]); i++) {
        if (is_string(value, names[i])) {
            *behavior = (enum split_behavior)i;
            return IMBREX_STATUS_OK;
        }
    }
    char name[FIELD_MAX_BYTES];
    snprintf(name, sizeof(name), "%s.behavior", field);
    return refuse_unsupported(reader, name,
                              "\"Isolated\", \"Removed\", \"MergedWithPrevious\", "
                              "\"MergedWithNext\" or \"Contiguous\"",
                              value);
}

static enum imbrex_status read_split(const struct tokenizer_reader *reader, const char *field,
                                     const json_t *step)
{
    struct pre_step *added = NULL;
    char name[FIELD_MAX_BYTES];
    TRY(add_pre_step(reader, field, &added));
    TRY(read_behavior(reader, field, step, &added->behavior));
    TRY(read_flag(reader, field, step, "invert", &added->is_inverted));
    const json_t *pattern = json_object_get(step, "pattern");
    const json_t *regex = json_object_get(pattern, "Regex");
    snprintf(name, sizeof(name), "%s.pattern", field);
    if (regex == NULL) {
        added->matcher = SPLIT_STRING;
        return read_affix(reader, name, pattern, "String", 1, added->text, &added->text_bytes);
    }
    snprintf(name, sizeof(name), "%s.pattern.Regex", field);
    if (!json_is_string(regex)) {
        return refuse_format(reader, name, "a string", regex);
    }
    added->matcher = SPLIT_WORDS;
    if (!word_pattern_find(json_string_value(regex), &added->pattern)) {
        added->matcher = SPLIT_REGEX;
        return split_regex_create(reader->path, name, json_string_value(regex), &added->regex,
                                  reader->err);
    }
    if (added->behavior == SPLIT_REMOVED && added->is_inverted) {
        /* Nothing lies between the words, so nothing is removed. */
        added->behavior = SPLIT_ISOLATED;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_byte_level(const struct tokenizer_reader *reader, const char *field,
                                          const json_t *step)
{
    bool adds_prefix_space = true, uses_regex = true;
    struct pre_step *added = NULL;
    TRY(read_flag(reader, field, step, "add_prefix_space", &adds_prefix_space));
    TRY(read_flag(reader, field, step, "use_regex", &uses_regex));
    if (adds_prefix_space) {
        TRY(add_pre_step(reader, field, &added));
        added->kind = PRE_STEP_PREFIX_SPACE;
        added->text[0] = ' ';
        added->text_bytes = 1;
    }
    if (uses_regex) {
        TRY(add_pre_step(reader, field, &added));
        added->matcher = SPLIT_WORDS;
        added->pattern = WORD_PATTERN_GPT2;
    }
    reader->tokenizer->is_byte_level = true;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_digits(const struct tokenizer_reader *reader, const char *field,
                                      const json_t *step)
{
    bool is_individual = false;
    struct pre_step *added = NULL;
    TRY(read_flag(reader, field, step, "individual_digits", &is_individual));
    TRY(add_pre_step(reader, field, &added));
    added->matcher = SPLIT_NUMBERS;
    added->behavior = is_individual ? SPLIT_ISOLATED : SPLIT_CONTIGUOUS;
    return IMBREX_STATUS_OK;
}

/* Metaspace, as pre-tokenizer and as decoder. */
struct metaspace {
    char mark[TOKENIZER_MAX_AFFIX_BYTES];
    size_t mark_bytes;
    bool prepends, only_at_start; /* the mark */
    bool splits;
};

static enum imbrex_status read_metaspace(const struct tokenizer_reader *reader, const char *field,
                                         const json_t *step, struct metaspace *metaspace)
{
    char name[FIELD_MAX_BYTES];
    bool adds_prefix_space = true;
    *metaspace = (struct metaspace){.splits = true};
    TRY(read_affix(reader, field, step, "replacement", 1, metaspace->mark, &metaspace->mark_bytes));
    struct utf8_step mark = utf8_next(metaspace->mark, metaspace->mark_bytes);
    if (mark.num_bytes != metaspace->mark_bytes || mark.code_point == ' ') {
        snprintf(name, sizeof(name), "%s.replacement", field);
        return refuse_unsupported(reader, name, "one character, no space",
                                  json_object_get(step, "replacement"));
    }
    TRY(read_flag(reader, field, step, "split", &metaspace->splits));
    TRY(read_flag(reader, field, step, "add_prefix_space", &adds_prefix_space));
    const json_t *scheme = json_object_get(step, "prepend_scheme");
    if (is_string(scheme, "never")) {
        return IMBREX_STATUS_OK;
    }
    snprintf(name, sizeof(name), "%s.prepend_scheme", field);
    if (!adds_prefix_space) {
        return refuse_unsupported(reader, name, "\"never\", as add_prefix_space is false", scheme);
    }
    if (scheme != NULL && !is_string(scheme, "always") && !is_string(scheme, "first")) {
        return refuse_unsupported(reader, name, "\"always\", \"first\" or \"never\"", scheme);
    }
    metaspace->prepends = true;
    metaspace->only_at_start = is_string(scheme, "first");
    return IMBREX_STATUS_OK;
}

/* A step with the mark of a Metaspace. */
static enum imbrex_status add_mark_step(const struct tokenizer_reader *reader, const char *field,
                                        const struct metaspace *metaspace, struct pre_step **added)
{
    TRY(add_pre_step(reader, field, added));
    memcpy((*added)->text, metaspace->mark, metaspace->mark_bytes);
    (*added)->text_bytes = metaspace->mark_bytes;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_pre_metaspace(const struct tokenizer_reader *reader,
                                             const char *field, const json_t *step)
{
    struct metaspace metaspace;
    struct pre_step *added = NULL;
    TRY(read_metaspace(reader, field, step, &metaspace));
    TRY(add_mark_step(reader, field, &metaspace, &added));
    added->kind = PRE_STEP_MARK_SPACES;
    if (metaspace.prepends) {
        TRY(add_mark_step(reader, field, &metaspace, &added));
        added->kind = PRE_STEP_PREFIX_MARK;
        added->only_at_start = metaspace.only_at_start;
    }
    if (metaspace.splits) {
        TRY(add_mark_step(reader, field, &metaspace, &added));
        added->matcher = SPLIT_STRING;
        added->behavior = SPLIT_MERGED_WITH_NEXT;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_pre_step(const struct tokenizer_reader *reader, void *context,
                                        const char *field, const json_t *step)
{
    (void)context;
    if (reader->tokenizer->is_byte_level) {
        /* What follows would see the alphabet of bytes rather than the text. */
        return refuse_type(reader, field, "nothing behind \"ByteLevel\"", step);
    }
    if (has_type(step, "Split")) {
        return read_split(reader, field, step);
    }
    if (has_type(step, "ByteLevel")) {
        return read_byte_level(reader, field, step);
    }
    if (has_type(step, "Digits")) {
        return read_digits(reader, field, step);
    }
    if (has_type(step, "Metaspace")) {
        return read_pre_metaspace(reader, field, step);
    }
    return refuse_type(reader, field,
                       "\"Split\", \"ByteLevel\", \"Digits\", \"Metaspace\" or a \"Sequence\" of "
                       "them",
                       step);
}

/* "first" asks where a piece lay in the text as it was, which is not kept: a normalizer that takes
 * something away at the start would have to be undone. */
static enum imbrex_status check_first(const struct tokenizer_reader *reader)
{
    const struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    bool needs_start = false, moves_start = false;
    for (size_t i = 0; i < tokenizer->num_pre_steps; i++) {
        needs_start |= tokenizer->pre_steps[i].only_at_start;
    }
    for (size_t i = 0; i < tokenizer->num_normalizer_steps; i++) {
        const struct normalizer_step *step = &tokenizer->normalizer[i];
        moves_start |= step->kind == NORMALIZER_STRIP ||
                       (step->kind == NORMALIZER_REPLACE && step->content_bytes == 0);
    }
    if (needs_start && moves_start) {
        return error_set(reader->err, IMBREX_STATUS_UNSUPPORTED,
                         "%s: pre_tokenizer: prepend_scheme: expected \"always\" or \"never\" "
                         "behind a normalizer that removes text, found \"first\"",
                         reader->path);
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_pre_tokenizer(const struct tokenizer_reader *reader)
{
    const json_t *pre_tokenizer = json_object_get(reader->root, "pre_tokenizer");
    if (is_absent(pre_tokenizer)) {
        return IMBREX_STATUS_OK;
    }
    TRY(read_steps(reader, NULL, "pre_tokenizer", "pretokenizers", pre_tokenizer, read_pre_step));
    return check_first(reader);
}

/* ---- decoder -------------------------------------------------------------------------------- */

/* What a decoder has done so far: the steps must come in this order. */
enum decoder_stage { DECODER_TOKENS, DECODER_BYTES, DECODER_FUSED, DECODER_STRIPPED };

struct decoder_reader {
    struct decoder_steps *steps;
    enum decoder_stage stage;
};

static enum imbrex_status read_decoder_strip(const struct tokenizer_reader *reader,
                                             const char *field, const json_t *step)
{
    char name[FIELD_MAX_BYTES];
    const json_t *start = json_object_get(step, "start"), *stop = json_object_get(step, "stop");
    TRY(expect_string(reader, field, step, "content", " "));
    if (!json_is_integer(start) || json_integer_value(start) < 0 ||
        json_integer_value(start) > 1024) {
        snprintf(name, sizeof(name), "%s.start", field);
        return refuse_unsupported(reader, name, "an integer in [0, 1024]", start);
    }
    if (!json_is_integer(stop) || json_integer_value(stop) != 0) {
        snprintf(name, sizeof(name), "%s.stop", field);
        return refuse_unsupported(reader, name, "0", stop);
    }
    reader->tokenizer->num_stripped_spaces = (int32_t)json_integer_value(start);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_decoder_replace(const struct tokenizer_reader *reader,
                                               struct decoder_steps *steps, const char *field,
                                               const json_t *step)
{
    if (steps->num_replaces == DECODER_MAX_REPLACES) {
        return refuse_number_of_steps(reader, field);
    }
    struct decoder_replace *replace = &steps->replaces[steps->num_replaces++];
    return read_replace(reader, field, step, replace->pattern, &replace->pattern_bytes,
                        replace->content, &replace->content_bytes);
}

static enum imbrex_status read_decoder_metaspace(const struct tokenizer_reader *reader,
                                                 struct decoder_steps *steps, const char *field,
                                                 const json_t *step)
{
    struct metaspace metaspace;
    TRY(read_metaspace(reader, field, step, &metaspace));
    memcpy(steps->mark.pattern, metaspace.mark, metaspace.mark_bytes);
    steps->mark.pattern_bytes = metaspace.mark_bytes;
    steps->mark.content[0] = ' ';
    steps->mark.content_bytes = 1;
    reader->tokenizer->drops_first_marks = metaspace.prepends;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_decoder_step(const struct tokenizer_reader *reader, void *context,
                                            const char *field, const json_t *step)
{
    struct decoder_reader *decoder = context;
    struct decoder_steps *steps = decoder->steps;
    bool has_mark = steps->mark.pattern_bytes > 0;
    if (has_type(step, "ByteLevel") && decoder->stage == DECODER_TOKENS &&
        steps->num_replaces == 0 && !has_mark) {
        /* Its options say nothing about decoding. */
        steps->is_byte_level = true;
        decoder->stage = DECODER_FUSED;
        return IMBREX_STATUS_OK;
    }
    if (has_type(step, "Replace") && decoder->stage == DECODER_TOKENS && !has_mark) {
        return read_decoder_replace(reader, steps, field, step);
    }
    if (has_type(step, "Metaspace") && decoder->stage == DECODER_TOKENS && !has_mark) {
        return read_decoder_metaspace(reader, steps, field, step);
    }
    if (has_type(step, "ByteFallback") && decoder->stage == DECODER_TOKENS) {
        steps->has_byte_fallback = true;
        decoder->stage = DECODER_BYTES;
        return IMBREX_STATUS_OK;
    }
    if (has_type(step, "Fuse") && decoder->stage <= DECODER_FUSED) {
        decoder->stage = DECODER_FUSED;
        return IMBREX_STATUS_OK;
    }
    if (has_type(step, "Strip") && decoder->stage == DECODER_FUSED) {
        decoder->stage = DECODER_STRIPPED;
        return read_decoder_strip(reader, field, step);
    }
    return refuse_type(reader, field,
                       "\"ByteLevel\", or \"Replace\", \"Metaspace\", \"ByteFallback\", \"Fuse\", "
                       "\"Strip\" in this order",
                       step);
}

static enum imbrex_status read_decoder(const struct tokenizer_reader *reader,
                                       struct decoder_steps *steps)
{
    /* Without one, Hugging Face puts a space between all tokens. */
    struct decoder_reader decoder = {.steps = steps};
    return read_steps(reader, &decoder, "decoder", "decoders",
                      json_object_get(reader->root, "decoder"), read_decoder_step);
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

static enum imbrex_status read_model(const struct tokenizer_reader *reader,
                                     const struct decoder_steps *decoder)
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

    bool has_byte_fallback = false;
    TRY(read_flag(reader, "model", model, "ignore_merges", &tokenizer->ignores_merges));
    TRY(read_flag(reader, "model", model, "byte_fallback", &has_byte_fallback));
    TRY(read_flag(reader, "model", model, "fuse_unk", &tokenizer->fuse_unk));
    /* A byte-level vocabulary has a token for each byte: nothing is left to fall back from. */
    tokenizer->has_byte_fallback = has_byte_fallback && !tokenizer->is_byte_level;
    return tokenizer_read_vocab(reader, decoder);
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

static enum imbrex_status read_processor_step(const struct tokenizer_reader *reader, void *context,
                                              const char *field, const json_t *processor)
{
    struct imbrex_tokenizer *tokenizer = reader->tokenizer;
    (void)context;
    /* ByteLevel only moves offsets, which imbrex does not keep. */
    if (has_type(processor, "ByteLevel")) {
        return IMBREX_STATUS_OK;
    }
    if (!has_type(processor, "TemplateProcessing") || tokenizer->template_ids != NULL) {
        return refuse_type(reader, field,
                           "\"ByteLevel\", one \"TemplateProcessing\" or a \"Sequence\" of them",
                           processor);
    }
    struct id_buffer ids = {0};
    size_t num_before = 0;
    /* One id at least, so that the template is known to be there. */
    enum imbrex_status status = id_buffer_reserve(&ids, 1, reader->err);
    if (status == IMBREX_STATUS_OK) {
        status = read_template(reader, processor, &ids, &num_before);
    }
    if (status != IMBREX_STATUS_OK) {
        free(ids.ids);
        return status;
    }
    tokenizer->template_ids = ids.ids;
    tokenizer->num_before = num_before;
    tokenizer->num_after = ids.num_ids - num_before;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_post_processor(const struct tokenizer_reader *reader)
{
    const json_t *processor = json_object_get(reader->root, "post_processor");
    if (is_absent(processor)) {
        return IMBREX_STATUS_OK;
    }
    return read_steps(reader, NULL, "post_processor", "processors", processor, read_processor_step);
}

/* ---- the whole ------------------------------------------------------------------------------ */

/* Tokens spelled in the alphabet of bytes are found in text only if it is spelled so, too. */
static enum imbrex_status check_byte_level(const struct tokenizer_reader *reader,
                                           const struct decoder_steps *decoder)
{
    if (decoder->is_byte_level && !reader->tokenizer->is_byte_level) {
        return refuse_unsupported(reader, "pre_tokenizer", "a \"ByteLevel\", as the decoder is",
                                  json_object_get(reader->root, "pre_tokenizer"));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_tokenizer(const struct tokenizer_reader *reader)
{
    const json_t *version = json_object_get(reader->root, "version");
    if (!is_absent(version) && !is_string(version, "1.0")) {
        return refuse_unsupported(reader, "version", "\"1.0\"", version);
    }
    struct decoder_steps decoder = {0};
    TRY(read_normalizer(reader));
    TRY(read_pre_tokenizer(reader));
    TRY(read_decoder(reader, &decoder));
    TRY(check_byte_level(reader, &decoder));
    TRY(read_model(reader, &decoder));
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
