/* SPDX-License-Identifier: Apache-2.0 */
/* Normalizers: Unicode's four forms, and the steps that SentencePiece's files are written with.
 *
 * Nearly all text is in NFC already, so it is copied from one "inert" character to the next and
 * only what stands between them is decomposed, ordered and composed. utf8proc gives the
 * decompositions and compositions; the ordering is done here, because utf8proc's takes quadratic
 * time in a run of combining marks. Source: Unicode Standard Annex #15. */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"

/* The longest decomposition of one code point has 18 (U+FDFA), the longest canonical one 4. */
#define MAX_DECOMPOSITION 32

/* Steps may make a text longer, but not without end. */
#define MAX_GROWTH 64
#define MAX_GROWTH_START 4096

struct form_rules {
    bool is_compatible, is_composed;
};

static const struct form_rules rules_of[] = {
#define UNICODE_FORM_RULES(name, id, compatible, composed) \
    [UNICODE_FORM_##id] = {.is_compatible = (compatible), .is_composed = (composed)},
    UNICODE_FORM_LIST(UNICODE_FORM_RULES)
#undef UNICODE_FORM_RULES
};

struct code_point_range {
    uint32_t first, last;
};

/* Characters that NFC leaves alone and in front of which a text may be cut: none of them changes by
 * itself, is a combining mark or composes with what precedes it. Not all there are, but those of
 * which most text is made: Latin, Cyrillic, punctuation, kana, Han, Hangul, emoji. */
static const struct code_point_range inert_ranges[] = {
    {0x0000, 0x02ff}, {0x0400, 0x0482}, {0x048a, 0x052f},   {0x2002, 0x2027},   {0x202f, 0x205e},
    {0x3001, 0x3029}, {0x3041, 0x3096}, {0x30a1, 0x30fa},   {0x3400, 0x4dbf},   {0x4e00, 0x9fff},
    {0xac00, 0xd7a3}, {0xff01, 0xffbe}, {0x1f300, 0x1faff}, {0x20000, 0x2a6df},
};

/* The same for every form. */
static const struct code_point_range inert_in_all_forms[] = {
    {0x0000, 0x007f},
    {0x3400, 0x4dbf},
    {0x4e00, 0x9fff},
    {0x20000, 0x2a6df},
};

static bool is_inert(enum unicode_form form, uint32_t code_point)
{
    const struct code_point_range *ranges = inert_in_all_forms;
    size_t num_ranges = sizeof(inert_in_all_forms) / sizeof(inert_in_all_forms[0]);
    if (form == UNICODE_FORM_NFC) {
        ranges = inert_ranges;
        num_ranges = sizeof(inert_ranges) / sizeof(inert_ranges[0]);
    }
    size_t i = 0;
    while (code_point > ranges[i].last) {
        i++;
        if (i == num_ranges) {
            return false;
        }
    }
    return code_point >= ranges[i].first;
}

/* The end of the run of inert characters that begins at `at`; *last is where its last one is. */
static size_t inert_run_end(enum unicode_form form, const char *text, size_t num_bytes, size_t at,
                            size_t *last)
{
    *last = at;
    while (at < num_bytes) {
        size_t num_ascii = utf8_ascii_prefix(text + at, num_bytes - at);
        if (num_ascii > 0) {
            at += num_ascii;
            *last = at - 1;
            continue;
        }
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        if (!is_inert(form, step.code_point)) {
            break;
        }
        *last = at;
        at += step.num_bytes;
    }
    return at;
}

static size_t lively_run_end(enum unicode_form form, const char *text, size_t num_bytes, size_t at)
{
    while (at < num_bytes) {
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        if (is_inert(form, step.code_point)) {
            break;
        }
        at += step.num_bytes;
    }
    return at;
}

bool unicode_form_is_inert(enum unicode_form form, const char *text, size_t num_bytes)
{
    size_t last;
    return inert_run_end(form, text, num_bytes, 0, &last) == num_bytes;
}

static unsigned combining_class(int32_t code_point)
{
    return (unsigned)utf8proc_get_property(code_point)->combining_class;
}

/* Sorts a run of combining marks by their class and keeps the order within a class. `scratch` has
 * room for as many. */
static void sort_marks(int32_t *marks, size_t num_marks, int32_t *scratch)
{
    size_t begins[257] = {0};
    for (size_t i = 0; i < num_marks; i++) {
        begins[combining_class(marks[i]) + 1]++;
    }
    for (size_t i = 1; i < 257; i++) {
        begins[i] += begins[i - 1];
    }
    for (size_t i = 0; i < num_marks; i++) {
        scratch[begins[combining_class(marks[i])]++] = marks[i];
    }
    memcpy(marks, scratch, num_marks * sizeof(*marks));
}

static void sort_all_marks(int32_t *code_points, size_t num_code_points, int32_t *scratch)
{
    for (size_t i = 0; i < num_code_points; i++) {
        unsigned previous = combining_class(code_points[i]);
        if (previous == 0) {
            continue;
        }
        size_t end = i + 1;
        bool is_sorted = true;
        for (; end < num_code_points; end++) {
            unsigned next = combining_class(code_points[end]);
            if (next == 0) {
                break;
            }
            is_sorted = is_sorted && previous <= next;
            previous = next;
        }
        if (!is_sorted) {
            sort_marks(code_points + i, end - i, scratch);
        }
        i = end - 1;
    }
}

/* Decomposes the text into code_points, or counts them if that is NULL. */
static size_t decompose(enum unicode_form form, const char *text, size_t num_bytes,
                        int32_t *code_points)
{
    const utf8proc_option_t options =
        UTF8PROC_DECOMPOSE | UTF8PROC_STABLE | (rules_of[form].is_compatible ? UTF8PROC_COMPAT : 0);
    size_t num_code_points = 0;
    for (size_t at = 0; at < num_bytes;) {
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        int32_t parts[MAX_DECOMPOSITION];
        int boundary_state = 0;
        utf8proc_ssize_t num_parts = utf8proc_decompose_char(
            (int32_t)step.code_point, parts, MAX_DECOMPOSITION, options, &boundary_state);
        if (num_parts < 1 || num_parts > MAX_DECOMPOSITION) {
            parts[0] = (int32_t)step.code_point;
            num_parts = 1;
        }
        if (code_points != NULL) {
            memcpy(code_points + num_code_points, parts, (size_t)num_parts * sizeof(*parts));
        }
        num_code_points += (size_t)num_parts;
        at += step.num_bytes;
    }
    return num_code_points;
}

/* The form of text that is to be looked at closely. */
static enum imbrex_status lively_append(enum unicode_form form, const char *text, size_t num_bytes,
                                        struct byte_buffer *result, struct imbrex_error *err)
{
    size_t num_code_points = decompose(form, text, num_bytes, NULL);
    size_t scratch_bytes;
    if (!size_mul(num_code_points, 2 * sizeof(int32_t), &scratch_bytes)) {
        return error_out_of_memory(err, "Unicode normalisation", SIZE_MAX);
    }
    int32_t *code_points = malloc(scratch_bytes);
    if (code_points == NULL) {
        return error_out_of_memory(err, "Unicode normalisation", scratch_bytes);
    }
    decompose(form, text, num_bytes, code_points);
    sort_all_marks(code_points, num_code_points, code_points + num_code_points);
    utf8proc_ssize_t num_composed = (utf8proc_ssize_t)num_code_points;
    if (rules_of[form].is_composed) {
        num_composed =
            utf8proc_normalize_utf32(code_points, num_composed, UTF8PROC_COMPOSE | UTF8PROC_STABLE);
    }

    enum imbrex_status status;
    if (num_composed < 0) {
        status =
            error_set(err, IMBREX_STATUS_INTERNAL, "utf8proc: %s", utf8proc_errmsg(num_composed));
        goto done;
    }
    status = byte_buffer_reserve(result, (size_t)num_composed * UTF8_MAX_BYTES, err);
    if (status != IMBREX_STATUS_OK) {
        goto done;
    }
    for (utf8proc_ssize_t i = 0; i < num_composed; i++) {
        result->num_bytes +=
            utf8_write((uint32_t)code_points[i], result->bytes + result->num_bytes);
    }
done:
    free(code_points);
    return status;
}

enum imbrex_status unicode_form_append(enum unicode_form form, const char *text, size_t num_bytes,
                                       struct byte_buffer *result, struct imbrex_error *err)
{
    for (size_t at = 0; at < num_bytes;) {
        size_t last;
        size_t inert_end = inert_run_end(form, text, num_bytes, at, &last);
        if (inert_end == num_bytes) {
            return byte_buffer_append(result, text + at, num_bytes - at, err);
        }
        /* What follows may compose with the last inert character. */
        TRY(byte_buffer_append(result, text + at, last - at, err));
        at = lively_run_end(form, text, num_bytes, inert_end);
        TRY(lively_append(form, text + last, at - last, result, err));
    }
    return IMBREX_STATUS_OK;
}

/* ---- steps ---------------------------------------------------------------------------------- */

enum imbrex_status replace_append(const char *text, size_t num_bytes, const char *pattern,
                                  size_t pattern_bytes, const char *content, size_t content_bytes,
                                  struct byte_buffer *result, struct imbrex_error *err)
{
    for (size_t at = 0; at < num_bytes;) {
        const char *found = memmem(text + at, num_bytes - at, pattern, pattern_bytes);
        size_t end = found == NULL ? num_bytes : (size_t)(found - text);
        TRY(byte_buffer_append(result, text + at, end - at, err));
        at = end;
        if (found != NULL) {
            TRY(byte_buffer_append(result, content, content_bytes, err));
            at += pattern_bytes;
        }
    }
    return IMBREX_STATUS_OK;
}

/* Moves the ends of a text inwards over white space. */
static void strip(const struct normalizer_step *step, const char **text, size_t *num_bytes)
{
    while (step->strips_left && *num_bytes > 0) {
        struct utf8_step first = utf8_next(*text, *num_bytes);
        if (!unicode_is_space(first.code_point)) {
            break;
        }
        *text += first.num_bytes;
        *num_bytes -= first.num_bytes;
    }
    while (step->strips_right && *num_bytes > 0) {
        size_t last = *num_bytes - 1;
        while (last > 0 && ((unsigned char)(*text)[last] & 0xc0) == 0x80) {
            last--;
        }
        if (!unicode_is_space(utf8_next(*text + last, *num_bytes - last).code_point)) {
            break;
        }
        *num_bytes = last;
    }
}

/* Whether a step leaves the text as it is, so that no copy need be made. */
static bool is_idle(const struct normalizer_step *step, const char *text, size_t num_bytes)
{
    switch (step->kind) {
    case NORMALIZER_FORM:
        return unicode_form_is_inert(step->form, text, num_bytes);
    case NORMALIZER_REPLACE:
        return memmem(text, num_bytes, step->pattern, step->pattern_bytes) == NULL;
    case NORMALIZER_PREPEND:
        return step->content_bytes == 0;
    case NORMALIZER_STRIP:
        break;
    }
    return true;
}

static enum imbrex_status append_step(const struct normalizer_step *step, const char *text,
                                      size_t num_bytes, struct byte_buffer *result,
                                      struct imbrex_error *err)
{
    switch (step->kind) {
    case NORMALIZER_FORM:
        return unicode_form_append(step->form, text, num_bytes, result, err);
    case NORMALIZER_REPLACE:
        return replace_append(text, num_bytes, step->pattern, step->pattern_bytes, step->content,
                              step->content_bytes, result, err);
    case NORMALIZER_PREPEND:
        TRY(byte_buffer_append(result, step->content, step->content_bytes, err));
        return byte_buffer_append(result, text, num_bytes, err);
    case NORMALIZER_STRIP:
        break;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status normalizer_run(const struct normalizer_step *steps, size_t num_steps,
                                  const char *text, size_t num_bytes, struct byte_buffer buffers[2],
                                  const char **normalized, size_t *normalized_bytes,
                                  struct imbrex_error *err)
{
    size_t max_bytes = num_bytes, turn = 0;
    if (!size_mul(num_bytes, MAX_GROWTH, &max_bytes) ||
        !size_add(max_bytes, MAX_GROWTH_START, &max_bytes)) {
        max_bytes = SIZE_MAX;
    }
    for (size_t i = 0; i < num_steps && num_bytes > 0; i++) {
        if (steps[i].kind == NORMALIZER_STRIP) {
            strip(&steps[i], &text, &num_bytes);
            continue;
        }
        if (is_idle(&steps[i], text, num_bytes)) {
            continue;
        }
        /* The text is not in the buffer whose turn it is. */
        struct byte_buffer *buffer = &buffers[turn];
        turn = 1 - turn;
        buffer->num_bytes = 0;
        TRY(append_step(&steps[i], text, num_bytes, buffer, err));
        text = buffer->bytes;
        num_bytes = buffer->num_bytes;
        if (num_bytes > max_bytes) {
            return error_set(err, IMBREX_STATUS_CAPACITY,
                             "text: expected at most %zu bytes after the tokenizer's normalizer, "
                             "found more",
                             max_bytes);
        }
    }
    *normalized = text;
    *normalized_bytes = num_bytes;
    return IMBREX_STATUS_OK;
}
