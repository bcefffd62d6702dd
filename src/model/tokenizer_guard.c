/* SPDX-License-Identifier: Apache-2.0 */
/* Where parts of a text lie after normalisation, so that special tokens which are found only then
 * are not found in a user's text. Each step is run again, part by part where it works on parts. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

/* What the steps work with: the text before a step, and working memory. */
struct mapper {
    const struct normalizer_step *step;
    const char *text;
    size_t num_bytes;
    struct byte_buffer output; /* the step's, part by part */
    struct text_span *inputs;
    size_t num_inputs;
    struct imbrex_error *err;
};

/* ---- Unicode forms -------------------------------------------------------------------------- */

static bool is_inert_at(const struct mapper *mapper, size_t at)
{
    struct utf8_step step = utf8_next(mapper->text + at, mapper->num_bytes - at);
    return unicode_form_is_inert(mapper->step->form, mapper->text + at, step.num_bytes);
}

/* True if the form composes or reorders what stands on both sides of `at`, 0 < at < num_bytes. What
 * matters before it stands behind `cut`, and behind it the first character decides: if it begins
 * with a starter that joins nothing before it, nothing behind it can. */
static enum imbrex_status joins(const struct mapper *mapper, size_t cut, size_t at, bool *is_joined)
{
    const char *text = mapper->text;
    enum unicode_form form = mapper->step->form;
    struct byte_buffer whole = {0}, parts = {0}, first = {0};
    size_t end = at + utf8_next(text + at, mapper->num_bytes - at).num_bytes;
    enum imbrex_status status;
    TRY_OR_FAIL(unicode_form_append(UNICODE_FORM_NFKD, text + at, end - at, &first, mapper->err));
    TRY_OR_FAIL(unicode_form_append(form, text + cut, end - cut, &whole, mapper->err));
    TRY_OR_FAIL(unicode_form_append(form, text + cut, at - cut, &parts, mapper->err));
    TRY_OR_FAIL(unicode_form_append(form, text + at, end - at, &parts, mapper->err));
    uint32_t code_point = utf8_next(first.bytes, first.num_bytes).code_point;
    *is_joined = utf8proc_get_property((int32_t)code_point)->combining_class != 0 ||
                 whole.num_bytes != parts.num_bytes ||
                 memcmp(whole.bytes, parts.bytes, whole.num_bytes) != 0;
fail:
    free(whole.bytes);
    free(parts.bytes);
    free(first.bytes);
    return status;
}

/* The nearest place at or before `at`, not before `floor`, where the text may be cut so that the
 * form of the parts is the parts of the form. */
static enum imbrex_status cut_before(const struct mapper *mapper, size_t floor, size_t at,
                                     size_t *position)
{
    bool is_joined = false;
    size_t cut = at;
    while (cut > floor && cut < mapper->num_bytes && !is_inert_at(mapper, cut)) {
        do {
            cut--;
        } while (((unsigned char)mapper->text[cut] & 0xc0) == 0x80);
    }
    if (floor < at && cut < at) {
        TRY(joins(mapper, cut, at, &is_joined));
    }
    *position = is_joined ? cut : at > floor ? at : floor;
    return IMBREX_STATUS_OK;
}

/* The same at or behind `at`. */
static size_t cut_behind(const struct mapper *mapper, size_t at)
{
    while (at > 0 && at < mapper->num_bytes && !is_inert_at(mapper, at)) {
        at += utf8_next(mapper->text + at, mapper->num_bytes - at).num_bytes;
    }
    return at;
}

static enum imbrex_status map_form(struct mapper *mapper)
{
    const char *text = mapper->text;
    enum unicode_form form = mapper->step->form;
    size_t at = 0;
    for (size_t i = 0; i < mapper->num_inputs; i++) {
        struct text_span *input = &mapper->inputs[i];
        size_t begin, end = cut_behind(mapper, input->end);
        TRY(cut_before(mapper, at, input->begin, &begin));
        TRY(unicode_form_append(form, text + at, begin - at, &mapper->output, mapper->err));
        input->begin = mapper->output.num_bytes;
        end = end > begin ? end : begin;
        TRY(unicode_form_append(form, text + begin, end - begin, &mapper->output, mapper->err));
        input->end = mapper->output.num_bytes;
        at = end;
    }
    return IMBREX_STATUS_OK;
}

/* ---- other steps ---------------------------------------------------------------------------- */

/* The first pattern at or behind `at`; the end of the text if there is none. */
static size_t find_pattern(const struct mapper *mapper, size_t at)
{
    const char *found = memmem(mapper->text + at, mapper->num_bytes - at, mapper->step->pattern,
                               mapper->step->pattern_bytes);
    return found == NULL ? mapper->num_bytes : (size_t)(found - mapper->text);
}

/* A pattern that an input touches becomes part of it. */
static void map_replace(struct mapper *mapper)
{
    const struct normalizer_step *step = mapper->step;
    size_t at = 0, moved = 0; /* the text before `at` has become `moved` bytes */
    size_t next = find_pattern(mapper, 0);
    for (size_t i = 0; i < mapper->num_inputs; i++) {
        struct text_span input = mapper->inputs[i];
        struct text_span *mapped = &mapper->inputs[i];
        /* Over the patterns that end at or before the input's begin, then over those in it. */
        while (next < mapper->num_bytes && next + step->pattern_bytes <= input.begin) {
            moved += next - at + step->content_bytes;
            at = next + step->pattern_bytes;
            next = find_pattern(mapper, at);
        }
        size_t begin = input.begin < next ? input.begin : next;
        mapped->begin = moved + (begin > at ? begin - at : 0);
        while (next < input.end) {
            moved += next - at + step->content_bytes;
            at = next + step->pattern_bytes;
            next = find_pattern(mapper, at);
        }
        mapped->end = moved + (input.end > at ? input.end - at : 0);
    }
}

static void map_prepend(struct mapper *mapper)
{
    for (size_t i = 0; i < mapper->num_inputs; i++) {
        mapper->inputs[i].begin += mapper->step->content_bytes;
        mapper->inputs[i].end += mapper->step->content_bytes;
    }
}

/* `stripped` bytes are gone in front, and `num_bytes` remain. */
static void map_strip(struct mapper *mapper, size_t stripped, size_t num_bytes)
{
    for (size_t i = 0; i < mapper->num_inputs; i++) {
        size_t *ends[] = {&mapper->inputs[i].begin, &mapper->inputs[i].end};
        for (int j = 0; j < 2; j++) {
            size_t moved = *ends[j] > stripped ? *ends[j] - stripped : 0;
            *ends[j] = moved < num_bytes ? moved : num_bytes;
        }
    }
}

/* ---- all steps ------------------------------------------------------------------------------ */

/* Maps the inputs through one step, whose result is result[0, result_bytes). */
static enum imbrex_status map_step(struct mapper *mapper, const char *result, size_t result_bytes)
{
    switch (mapper->step->kind) {
    case NORMALIZER_FORM:
        return map_form(mapper);
    case NORMALIZER_REPLACE:
        map_replace(mapper);
        break;
    case NORMALIZER_PREPEND:
        map_prepend(mapper);
        break;
    case NORMALIZER_STRIP:
        map_strip(mapper, (size_t)(result - mapper->text), result_bytes);
        break;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status normalizer_map_inputs(const struct normalizer_step *steps, size_t num_steps,
                                         const char *text, size_t num_bytes,
                                         struct text_span *inputs, size_t num_inputs,
                                         struct imbrex_error *err)
{
    /* One step's result is the next one's text: the two take turns. */
    struct byte_buffer buffers[2][2] = {{{0}}};
    int turn = 0;
    struct mapper mapper = {.text = text,
                            .num_bytes = num_bytes,
                            .inputs = inputs,
                            .num_inputs = num_inputs,
                            .err = err};
    enum imbrex_status status = IMBREX_STATUS_OK;
    for (size_t i = 0; i < num_steps && mapper.num_bytes > 0; i++) {
        const char *result;
        size_t result_bytes;
        mapper.step = &steps[i];
        mapper.output.num_bytes = 0;
        TRY_OR_FAIL(normalizer_run(&steps[i], 1, mapper.text, mapper.num_bytes, buffers[turn],
                                   &result, &result_bytes, err));
        TRY_OR_FAIL(map_step(&mapper, result, result_bytes));
        if (result == buffers[turn][0].bytes) {
            turn = 1 - turn;
        }
        mapper.text = result;
        mapper.num_bytes = result_bytes;
    }
fail:
    for (int i = 0; i < 2; i++) {
        free(buffers[i][0].bytes);
        free(buffers[i][1].bytes);
    }
    free(mapper.output.bytes);
    return status;
}
