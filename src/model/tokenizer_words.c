/* SPDX-License-Identifier: Apache-2.0 */
/* Pre-tokenizers: a piece of text goes through the steps, each of which cuts it into smaller pieces
 * or puts something in front, and what comes out are the words. A step hands its pieces to the next
 * one as soon as it has them, so no list of pieces is ever kept. */
#include <stdlib.h>
#include <string.h>

#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"
#include "model/unicode_kind.h"

struct cutter {
    const struct pre_step *steps;
    size_t num_steps;
    struct pre_scratch *scratch;
    piece_fn *encode;
    void *context;
    struct imbrex_error *err;
};

static enum imbrex_status run_step(const struct cutter *cutter, size_t step_idx, const char *text,
                                   size_t num_bytes, bool is_at_start);

/* ---- matches -------------------------------------------------------------------------------- */

/* The first match at or behind `from`; *is_found is false if there is none. */
static enum imbrex_status find_match(const struct cutter *cutter, size_t step_idx, const char *text,
                                     size_t num_bytes, size_t from, bool *is_found, size_t *begin,
                                     size_t *end)
{
    const struct pre_step *step = &cutter->steps[step_idx];
    *is_found = false;
    switch (step->matcher) {
    case SPLIT_WORDS:
        /* Between them, the alternatives take every character. */
        *is_found = from < num_bytes;
        *begin = from;
        *end = *is_found ? from + word_next(step->pattern, text + from, num_bytes - from) : from;
        break;
    case SPLIT_REGEX:
        return split_regex_match(step->regex, &cutter->scratch->regexes[step_idx], text, num_bytes,
                                 from, is_found, begin, end, cutter->err);
    case SPLIT_STRING: {
        const char *found = memmem(text + from, num_bytes - from, step->text, step->text_bytes);
        if (found != NULL) {
            *is_found = true;
            *begin = (size_t)(found - text);
            *end = *begin + step->text_bytes;
        }
        break;
    }
    case SPLIT_NUMBERS:
        while (from < num_bytes) {
            struct utf8_step character = utf8_next(text + from, num_bytes - from);
            if (unicode_is_number(character.code_point)) {
                *is_found = true;
                *begin = from;
                *end = from + character.num_bytes;
                break;
            }
            from += character.num_bytes;
        }
        break;
    }
    return IMBREX_STATUS_OK;
}

/* ---- what becomes of them ------------------------------------------------------------------- */

/* Gathers matches and what lies between them into pieces. The last segment is held back, since the
 * next one may join it. */
struct split {
    const struct cutter *cutter;
    size_t step_idx;
    const char *text;
    bool is_at_start;
    bool has_held, held_is_match;
    size_t held_begin, held_end;
};

static enum imbrex_status emit(const struct split *split, size_t begin, size_t end)
{
    if (begin == end) {
        return IMBREX_STATUS_OK;
    }
    return run_step(split->cutter, split->step_idx + 1, split->text + begin, end - begin,
                    split->is_at_start && begin == 0);
}

static enum imbrex_status emit_held(struct split *split)
{
    if (!split->has_held) {
        return IMBREX_STATUS_OK;
    }
    split->has_held = false;
    return emit(split, split->held_begin, split->held_end);
}

/* Whether a segment becomes one piece with the one before it. */
static bool joins_held(const struct split *split, enum split_behavior behavior, bool is_match)
{
    if (!split->has_held) {
        return false;
    }
    switch (behavior) {
    case SPLIT_MERGED_WITH_PREVIOUS:
        return is_match && !split->held_is_match;
    case SPLIT_MERGED_WITH_NEXT:
        return !is_match && split->held_is_match;
    case SPLIT_CONTIGUOUS:
        return is_match == split->held_is_match;
    case SPLIT_ISOLATED:
    case SPLIT_REMOVED:
        break;
    }
    return false;
}

static enum imbrex_status add_segment(struct split *split, size_t begin, size_t end, bool is_match)
{
    const struct pre_step *step = &split->cutter->steps[split->step_idx];
    is_match = is_match != step->is_inverted;
    if (step->behavior == SPLIT_REMOVED) {
        return is_match ? IMBREX_STATUS_OK : emit(split, begin, end);
    }
    if (joins_held(split, step->behavior, is_match)) {
        split->held_end = end;
        split->held_is_match = is_match;
        return IMBREX_STATUS_OK;
    }
    TRY(emit_held(split));
    split->has_held = true;
    split->held_is_match = is_match;
    split->held_begin = begin;
    split->held_end = end;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status run_split(const struct cutter *cutter, size_t step_idx, const char *text,
                                    size_t num_bytes, bool is_at_start)
{
    struct split split = {
        .cutter = cutter, .step_idx = step_idx, .text = text, .is_at_start = is_at_start};
    size_t taken = 0, from = 0, last_match_end = SIZE_MAX;
    const struct pre_step *step = &cutter->steps[step_idx];
    if (step->matcher == SPLIT_REGEX) {
        TRY(split_regex_begin(step->regex, &cutter->scratch->regexes[step_idx], num_bytes,
                              cutter->err));
    }
    while (from <= num_bytes) {
        bool is_found;
        size_t begin, end;
        TRY(find_match(cutter, step_idx, text, num_bytes, from, &is_found, &begin, &end));
        if (!is_found) {
            break;
        }
        if (begin == end && begin == last_match_end) {
            /* Nothing right behind a match is no match of its own. */
            from = begin < num_bytes ? from + utf8_next(text + from, num_bytes - from).num_bytes
                                     : num_bytes + 1;
            continue;
        }
        if (taken < begin) {
            TRY(add_segment(&split, taken, begin, false));
        }
        TRY(add_segment(&split, begin, end, true));
        taken = from = last_match_end = end;
    }
    if (taken < num_bytes) {
        TRY(add_segment(&split, taken, num_bytes, false));
    }
    return emit_held(&split);
}

/* Patterns written out by hand leave nothing between the words: no segments to be gathered. */
static enum imbrex_status run_words(const struct cutter *cutter, size_t step_idx, const char *text,
                                    size_t num_bytes, bool is_at_start)
{
    enum word_pattern pattern = cutter->steps[step_idx].pattern;
    bool is_last = step_idx + 1 == cutter->num_steps;
    for (size_t at = 0; at < num_bytes;) {
        size_t word_bytes = word_next(pattern, text + at, num_bytes - at);
        if (is_last) {
            TRY(cutter->encode(cutter->context, text + at, word_bytes, is_at_start && at == 0));
        } else {
            TRY(run_step(cutter, step_idx + 1, text + at, word_bytes, is_at_start && at == 0));
        }
        at += word_bytes;
    }
    return IMBREX_STATUS_OK;
}

/* ---- the steps ------------------------------------------------------------------------------ */

/* Puts the step's text in front, or in the place of each space. */
static enum imbrex_status run_change(const struct cutter *cutter, size_t step_idx, const char *text,
                                     size_t num_bytes, bool is_at_start)
{
    const struct pre_step *step = &cutter->steps[step_idx];
    struct byte_buffer *buffer = &cutter->scratch->prefixed[step_idx];
    buffer->num_bytes = 0;
    if (step->kind == PRE_STEP_MARK_SPACES) {
        TRY(replace_append(text, num_bytes, " ", 1, step->text, step->text_bytes, buffer,
                           cutter->err));
    } else {
        TRY(byte_buffer_append(buffer, step->text, step->text_bytes, cutter->err));
        TRY(byte_buffer_append(buffer, text, num_bytes, cutter->err));
    }
    return run_step(cutter, step_idx + 1, buffer->bytes, buffer->num_bytes, is_at_start);
}

/* Whether the step would change the text. */
static bool has_effect(const struct pre_step *step, const char *text, size_t num_bytes,
                       bool is_at_start)
{
    if (step->kind == PRE_STEP_MARK_SPACES) {
        return memchr(text, ' ', num_bytes) != NULL;
    }
    if (step->only_at_start && !is_at_start) {
        return false;
    }
    return num_bytes < step->text_bytes || memcmp(text, step->text, step->text_bytes) != 0;
}

static enum imbrex_status run_step(const struct cutter *cutter, size_t step_idx, const char *text,
                                   size_t num_bytes, bool is_at_start)
{
    while (step_idx < cutter->num_steps) {
        const struct pre_step *step = &cutter->steps[step_idx];
        if (step->kind == PRE_STEP_SPLIT) {
            bool is_plain = step->matcher == SPLIT_WORDS && step->behavior == SPLIT_ISOLATED;
            return is_plain ? run_words(cutter, step_idx, text, num_bytes, is_at_start)
                            : run_split(cutter, step_idx, text, num_bytes, is_at_start);
        }
        if (has_effect(step, text, num_bytes, is_at_start)) {
            return run_change(cutter, step_idx, text, num_bytes, is_at_start);
        }
        step_idx++;
    }
    return cutter->encode(cutter->context, text, num_bytes, is_at_start);
}

enum imbrex_status pre_tokenize(const struct pre_step *steps, size_t num_steps, const char *text,
                                size_t num_bytes, bool is_at_start, struct pre_scratch *scratch,
                                piece_fn *encode, void *context, struct imbrex_error *err)
{
    struct cutter cutter = {
        .steps = steps,
        .num_steps = num_steps,
        .scratch = scratch,
        .encode = encode,
        .context = context,
        .err = err,
    };
    return run_step(&cutter, 0, text, num_bytes, is_at_start);
}

void pre_scratch_release(struct pre_scratch *scratch)
{
    for (size_t i = 0; i < TOKENIZER_MAX_STEPS; i++) {
        free(scratch->prefixed[i].bytes);
        split_regex_scratch_release(&scratch->regexes[i]);
    }
}
