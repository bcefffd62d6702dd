/* SPDX-License-Identifier: Apache-2.0 */
/* Marked strings. A part of the result is input exactly if the bytes it was made of were: slices,
 * joins and replacements carry the marks over run by run. */
#include <string.h>

#include "base/memory.h"
#include "base/utf8.h"
#include "jinja/jinja_render.h"

static const struct jinja_run whole_template = {SIZE_MAX, false};
static const struct jinja_run whole_input = {SIZE_MAX, true};

const struct jinja_string jinja_string_empty = {.bytes = "", .runs = &whole_template};

bool jinja_is_space(uint32_t code_point)
{
    return (code_point >= 0x09 && code_point <= 0x0d) ||
           (code_point >= 0x1c && code_point <= 0x20) || code_point == 0x85 || code_point == 0xa0 ||
           code_point == 0x1680 || (code_point >= 0x2000 && code_point <= 0x200a) ||
           code_point == 0x2028 || code_point == 0x2029 || code_point == 0x202f ||
           code_point == 0x205f || code_point == 0x3000;
}

size_t jinja_count_chars(const char *bytes, size_t num_bytes)
{
    size_t num_chars = 0;
    for (size_t i = 0; i < num_bytes; i++) {
        num_chars += ((unsigned char)bytes[i] & 0xc0) != 0x80;
    }
    return num_chars;
}

void jinja_string_view(const char *bytes, size_t num_bytes, bool is_input,
                       struct jinja_string *string)
{
    *string = (struct jinja_string){.bytes = num_bytes != 0 ? bytes : "",
                                    .num_bytes = num_bytes,
                                    .num_chars = jinja_count_chars(bytes, num_bytes),
                                    .runs = is_input ? &whole_input : &whole_template};
}

enum imbrex_status jinja_string_new(struct jinja_render *render, const char *bytes,
                                    size_t num_bytes, bool is_input,
                                    const struct jinja_string **string_out)
{
    struct jinja_string *string;
    TRY(jinja_charge_bytes(render, num_bytes));
    TRY(jinja_take(render, 1, sizeof(*string), &string));
    jinja_string_view(bytes, num_bytes, is_input, string);
    *string_out = string;
    return IMBREX_STATUS_OK;
}

bool jinja_string_next_part(const struct jinja_string *string, struct jinja_part *part)
{
    if (part->end >= string->num_bytes) {
        return false;
    }
    size_t begin = part->end, idx = begin == 0 ? 0 : part->run_idx + 1;
    const struct jinja_run *run = &string->runs[idx];
    size_t limit = string->offset + string->num_bytes;
    *part = (struct jinja_part){.begin = begin,
                                .end = (run->end < limit ? run->end : limit) - string->offset,
                                .is_input = run->is_input,
                                .run_idx = idx};
    return true;
}

bool jinja_string_is_input(const struct jinja_string *string)
{
    struct jinja_part part = {0};
    while (jinja_string_next_part(string, &part)) {
        if (!part.is_input) {
            return false;
        }
    }
    return string->num_bytes != 0;
}

enum imbrex_status jinja_string_cut(struct jinja_render *render, const struct jinja_string *string,
                                    size_t begin, size_t end, const struct jinja_string **cut_out)
{
    if (begin == 0 && end == string->num_bytes) {
        *cut_out = string;
        return IMBREX_STATUS_OK;
    }
    if (begin >= end) {
        *cut_out = &jinja_string_empty;
        return IMBREX_STATUS_OK;
    }
    struct jinja_string *cut;
    TRY(jinja_take(render, 1, sizeof(*cut), &cut));
    *cut = (struct jinja_string){.bytes = string->bytes + begin,
                                 .num_bytes = end - begin,
                                 .offset = string->offset + begin,
                                 .runs = string->runs,
                                 .is_markup = string->is_markup};
    size_t num_runs = 1;
    for (; cut->runs->end <= cut->offset; num_runs++) {
        cut->runs++;
    }
    bool is_ascii = string->num_chars == string->num_bytes;
    TRY(jinja_charge_bytes(render, num_runs * sizeof(*cut->runs) + (is_ascii ? 0 : end - begin)));
    cut->num_chars = is_ascii ? end - begin : jinja_count_chars(cut->bytes, cut->num_bytes);
    *cut_out = cut;
    return IMBREX_STATUS_OK;
}

size_t jinja_string_char_offset(const struct jinja_string *string, size_t char_idx)
{
    if (char_idx >= string->num_chars) {
        return string->num_bytes;
    }
    if (string->num_chars == string->num_bytes) {
        return char_idx;
    }
    size_t offset = 0;
    for (size_t i = 0; i < char_idx; i++) {
        do {
            offset++;
        } while (((unsigned char)string->bytes[offset] & 0xc0) == 0x80);
    }
    return offset;
}

bool jinja_string_equal(const struct jinja_string *a, const struct jinja_string *b)
{
    return a->num_bytes == b->num_bytes && memcmp(a->bytes, b->bytes, a->num_bytes) == 0;
}

bool jinja_string_is(const struct jinja_string *string, const char *text)
{
    return string->num_bytes == strlen(text) && memcmp(string->bytes, text, string->num_bytes) == 0;
}

int jinja_string_compare(const struct jinja_string *a, const struct jinja_string *b)
{
    size_t common = a->num_bytes < b->num_bytes ? a->num_bytes : b->num_bytes;
    int order = memcmp(a->bytes, b->bytes, common); /* UTF-8 sorts as code points do */
    if (order != 0) {
        return order;
    }
    return (a->num_bytes > b->num_bytes) - (a->num_bytes < b->num_bytes);
}

size_t jinja_string_find(const struct jinja_string *string, size_t from,
                         const struct jinja_string *needle)
{
    if (from > string->num_bytes) {
        return SIZE_MAX;
    }
    const char *found =
        memmem(string->bytes + from, string->num_bytes - from, needle->bytes, needle->num_bytes);
    return found == NULL ? SIZE_MAX : (size_t)(found - string->bytes);
}

/* ---- texts ----------------------------------------------------------------------------------- */

/* Room for further bytes and one further run. */
static enum imbrex_status text_reserve(struct jinja_render *render, struct jinja_text *text,
                                       size_t num_bytes)
{
    size_t needed;
    if (!size_add(text->num_bytes, num_bytes, &needed)) {
        needed = SIZE_MAX;
    }
    if (text == render->final_output && needed > render->options.max_output_bytes) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "the output is longer than %zu bytes",
                          render->options.max_output_bytes);
    }
    if (needed > text->capacity) {
        size_t capacity = needed < 32 ? 64 : needed < SIZE_MAX / 2 ? needed * 2 : SIZE_MAX;
        char *bytes;
        TRY(jinja_take(render, capacity, 1, &bytes));
        if (text->num_bytes != 0) {
            memcpy(bytes, text->bytes, text->num_bytes);
        }
        text->bytes = bytes;
        text->capacity = capacity;
    }
    if (text->num_runs == text->run_capacity) {
        size_t capacity = text->num_runs < 2 ? 2 : text->num_runs * 2;
        struct jinja_run *runs;
        TRY(jinja_take(render, capacity, sizeof(*runs), &runs));
        if (text->num_runs != 0) {
            memcpy(runs, text->runs, text->num_runs * sizeof(*runs));
        }
        text->runs = runs;
        text->run_capacity = capacity;
    }
    return IMBREX_STATUS_OK;
}

/* Strings that are views of the text see neither the new bytes nor the longer last run: theirs ends
 * at their own end. */
static void text_put(struct jinja_text *text, const char *bytes, size_t num_bytes, bool is_input)
{
    memcpy(text->bytes + text->num_bytes, bytes, num_bytes);
    text->num_bytes += num_bytes;
    if (text->num_runs == 0 || text->runs[text->num_runs - 1].is_input != is_input) {
        text->runs[text->num_runs++].is_input = is_input;
    }
    text->runs[text->num_runs - 1].end = text->num_bytes;
}

enum imbrex_status jinja_text_append(struct jinja_render *render, struct jinja_text *text,
                                     const char *bytes, size_t num_bytes, bool is_input)
{
    if (num_bytes == 0) {
        return IMBREX_STATUS_OK;
    }
    TRY(jinja_charge_bytes(render, num_bytes));
    TRY(text_reserve(render, text, num_bytes));
    text_put(text, bytes, num_bytes, is_input);
    text->num_chars += jinja_count_chars(bytes, num_bytes);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_text_append_part(struct jinja_render *render, struct jinja_text *text,
                                          const struct jinja_string *string, size_t begin,
                                          size_t end)
{
    if (begin >= end) {
        return IMBREX_STATUS_OK;
    }
    struct jinja_part part = {0};
    bool is_whole = begin == 0 && end == string->num_bytes;
    TRY(jinja_charge_bytes(render, end - begin));
    while (jinja_string_next_part(string, &part)) {
        size_t part_begin = part.begin > begin ? part.begin : begin;
        size_t part_end = part.end < end ? part.end : end;
        if (part_begin < part_end) {
            TRY(text_reserve(render, text, part_end - part_begin));
            text_put(text, string->bytes + part_begin, part_end - part_begin, part.is_input);
        } else if (part.begin >= end) {
            break;
        }
        TRY(jinja_charge(render, part.run_idx % 16 == 15));
    }
    text->num_chars +=
        is_whole ? string->num_chars : jinja_count_chars(string->bytes + begin, end - begin);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_text_append_string(struct jinja_render *render, struct jinja_text *text,
                                            const struct jinja_string *string)
{
    return jinja_text_append_part(render, text, string, 0, string->num_bytes);
}

enum imbrex_status jinja_text_append_repeated(struct jinja_render *render, struct jinja_text *text,
                                              const struct jinja_string *string, size_t count)
{
    size_t num_bytes;
    if (string->num_bytes == 0 || count == 0) {
        return IMBREX_STATUS_OK;
    }
    if (!size_mul(string->num_bytes, count, &num_bytes) ||
        num_bytes > render->options.max_memory_bytes) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "the values need more than %zu bytes",
                          render->options.max_memory_bytes);
    }
    TRY(jinja_charge(render, count));
    for (size_t i = 0; i < count; i++) {
        TRY(jinja_text_append_string(render, text, string));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_text_append_char(struct jinja_render *render, struct jinja_text *text,
                                          uint32_t code_point, bool is_input)
{
    char bytes[UTF8_MAX_BYTES];
    size_t num_bytes = utf8_write(code_point, bytes);
    return jinja_text_append(render, text, bytes, num_bytes, is_input);
}

static enum imbrex_status text_string(struct jinja_render *render, const struct jinja_text *text,
                                      struct jinja_string **string_out)
{
    struct jinja_string *string;
    if (text->num_bytes == 0) {
        TRY(jinja_take(render, 1, sizeof(*string), &string));
        *string = jinja_string_empty;
        *string_out = string;
        return IMBREX_STATUS_OK;
    }
    TRY(jinja_take(render, 1, sizeof(*string), &string));
    *string = (struct jinja_string){.bytes = text->bytes,
                                    .num_bytes = text->num_bytes,
                                    .num_chars = text->num_chars,
                                    .runs = text->runs};
    *string_out = string;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_text_finish(struct jinja_render *render, const struct jinja_text *text,
                                     const struct jinja_string **string_out)
{
    struct jinja_string *string;
    TRY(text_string(render, text, &string));
    *string_out = string;
    return IMBREX_STATUS_OK;
}

/* ---- operations ------------------------------------------------------------------------------ */

enum imbrex_status jinja_string_concat(struct jinja_render *render, const struct jinja_string *left,
                                       const struct jinja_string *right,
                                       const struct jinja_string **sum_out)
{
    if (left->is_markup != right->is_markup) { /* Markup escapes what is added to it */
        TRY(jinja_string_escape(render, left, &left));
        TRY(jinja_string_escape(render, right, &right));
    }
    if (left->num_bytes == 0 || right->num_bytes == 0) {
        *sum_out = left->num_bytes == 0 ? right : left;
        return IMBREX_STATUS_OK;
    }
    struct jinja_text *text = left->growth;
    if (text == NULL || text->num_bytes != left->num_bytes) {
        TRY(jinja_take(render, 1, sizeof(*text), &text));
        *text = (struct jinja_text){0};
        TRY(jinja_text_append_string(render, text, left));
    }
    TRY(jinja_text_append_string(render, text, right));
    struct jinja_string *sum;
    TRY(text_string(render, text, &sum));
    sum->growth = text;
    sum->is_markup = left->is_markup;
    *sum_out = sum;
    return IMBREX_STATUS_OK;
}

static bool has_char(const struct jinja_string *chars, const char *bytes, size_t num_bytes)
{
    return memmem(chars->bytes, chars->num_bytes, bytes, num_bytes) != NULL;
}

enum imbrex_status jinja_string_strip(struct jinja_render *render,
                                      const struct jinja_string *string,
                                      const struct jinja_string *chars, unsigned sides,
                                      const struct jinja_string **stripped)
{
    size_t begin = 0, end = string->num_bytes;
    size_t num_steps = 0;
    while ((sides & 1) != 0 && begin < end) {
        struct utf8_step step = utf8_next(string->bytes + begin, end - begin);
        if (chars != NULL ? !has_char(chars, string->bytes + begin, step.num_bytes)
                          : !jinja_is_space(step.code_point)) {
            break;
        }
        begin += step.num_bytes;
        num_steps++;
    }
    while ((sides & 2) != 0 && begin < end) {
        size_t last = end - 1;
        while (last > begin && ((unsigned char)string->bytes[last] & 0xc0) == 0x80) {
            last--;
        }
        struct utf8_step step = utf8_next(string->bytes + last, end - last);
        if (chars != NULL ? !has_char(chars, string->bytes + last, step.num_bytes)
                          : !jinja_is_space(step.code_point)) {
            break;
        }
        end = last;
        num_steps++;
    }
    size_t work = 0;
    if (!size_mul(num_steps + 1, chars != NULL ? chars->num_bytes + 8 : 8, &work)) {
        work = SIZE_MAX;
    }
    TRY(jinja_charge_bytes(render, work));
    return jinja_string_cut(render, string, begin, end, stripped);
}

enum imbrex_status jinja_string_replace(struct jinja_render *render,
                                        const struct jinja_string *string,
                                        const struct jinja_string *old,
                                        const struct jinja_string *replacement, int64_t count,
                                        const struct jinja_string **replaced)
{
    struct jinja_text text = {0};
    size_t begin = 0, run_from = 0;
    TRY(jinja_charge_bytes(render, string->num_bytes));
    for (int64_t i = 0; count < 0 || i < count; i++) {
        size_t found = jinja_string_find(string, begin, old);
        if (found == SIZE_MAX) {
            break;
        }
        if (old->num_bytes == 0) { /* between all characters, and at both ends */
            found = begin;
        }
        TRY(jinja_charge(render, 1));
        TRY(jinja_text_append_part(render, &text, string, run_from, found));
        TRY(jinja_text_append_string(render, &text, replacement));
        begin = run_from = found + old->num_bytes;
        if (old->num_bytes == 0) {
            if (begin == string->num_bytes) {
                break;
            }
            begin += utf8_next(string->bytes + begin, string->num_bytes - begin).num_bytes;
        }
    }
    TRY(jinja_text_append_part(render, &text, string, run_from, string->num_bytes));
    return jinja_text_finish(render, &text, replaced);
}

enum imbrex_status jinja_string_escape(struct jinja_render *render,
                                       const struct jinja_string *string,
                                       const struct jinja_string **escaped)
{
    if (string->is_markup) {
        *escaped = string;
        return IMBREX_STATUS_OK;
    }
    struct jinja_text text = {0};
    struct jinja_part part = {0};
    while (jinja_string_next_part(string, &part)) {
        for (size_t i = part.begin; i < part.end; i++) {
            char c = string->bytes[i];
            const char *entity = c == '&'    ? "&amp;"
                                 : c == '<'  ? "&lt;"
                                 : c == '>'  ? "&gt;"
                                 : c == '\'' ? "&#39;"
                                 : c == '"'  ? "&#34;"
                                             : NULL;
            if (entity != NULL) {
                TRY(jinja_text_append(render, &text, entity, strlen(entity), part.is_input));
                continue;
            }
            size_t begin = i;
            while (i + 1 < part.end && strchr("&<>'\"", string->bytes[i + 1]) == NULL) {
                i++;
            }
            TRY(jinja_text_append(render, &text, string->bytes + begin, i + 1 - begin,
                                  part.is_input));
        }
    }
    struct jinja_string *markup;
    TRY(text_string(render, &text, &markup));
    markup->is_markup = true;
    *escaped = markup;
    return IMBREX_STATUS_OK;
}
