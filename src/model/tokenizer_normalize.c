/* SPDX-License-Identifier: Apache-2.0 */
/* Canonical composition (NFC). Nearly all text is in NFC already, so it is copied from one
 * "inert" character to the next and only what stands between them is decomposed, ordered and
 * composed. utf8proc gives the decompositions and compositions; the ordering is done here, because
 * utf8proc's takes quadratic time in a run of combining marks. Source: Unicode Standard Annex #15.
 */
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/memory.h"
#include "base/status.h"
#include "base/utf8.h"
#include "model/tokenizer_internal.h"

/* The longest canonical decomposition of one code point has 4. */
#define MAX_DECOMPOSITION 8

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

static bool is_inert(uint32_t code_point)
{
    size_t i = 0;
    while (code_point > inert_ranges[i].last) {
        i++;
        if (i == sizeof(inert_ranges) / sizeof(inert_ranges[0])) {
            return false;
        }
    }
    return code_point >= inert_ranges[i].first;
}

/* The end of the run of inert characters that begins at `at`; *last is where its last one is. */
static size_t inert_run_end(const char *text, size_t num_bytes, size_t at, size_t *last)
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
        if (!is_inert(step.code_point)) {
            break;
        }
        *last = at;
        at += step.num_bytes;
    }
    return at;
}

static size_t lively_run_end(const char *text, size_t num_bytes, size_t at)
{
    while (at < num_bytes) {
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        if (is_inert(step.code_point)) {
            break;
        }
        at += step.num_bytes;
    }
    return at;
}

bool nfc_is_inert(const char *text, size_t num_bytes)
{
    size_t last;
    return inert_run_end(text, num_bytes, 0, &last) == num_bytes;
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
static size_t decompose(const char *text, size_t num_bytes, int32_t *code_points)
{
    size_t num_code_points = 0;
    for (size_t at = 0; at < num_bytes;) {
        struct utf8_step step = utf8_next(text + at, num_bytes - at);
        int32_t parts[MAX_DECOMPOSITION];
        int boundary_state = 0;
        utf8proc_ssize_t num_parts =
            utf8proc_decompose_char((int32_t)step.code_point, parts, MAX_DECOMPOSITION,
                                    UTF8PROC_DECOMPOSE | UTF8PROC_STABLE, &boundary_state);
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

/* NFC of text that is to be looked at closely. */
static enum imbrex_status compose_append(const char *text, size_t num_bytes,
                                         struct byte_buffer *result, struct imbrex_error *err)
{
    size_t num_code_points = decompose(text, num_bytes, NULL);
    size_t scratch_bytes;
    if (!size_mul(num_code_points, 2 * sizeof(int32_t), &scratch_bytes)) {
        return error_out_of_memory(err, "Unicode normalisation", SIZE_MAX);
    }
    int32_t *code_points = malloc(scratch_bytes);
    if (code_points == NULL) {
        return error_out_of_memory(err, "Unicode normalisation", scratch_bytes);
    }
    decompose(text, num_bytes, code_points);
    sort_all_marks(code_points, num_code_points, code_points + num_code_points);
    utf8proc_ssize_t num_composed = utf8proc_normalize_utf32(
        code_points, (utf8proc_ssize_t)num_code_points, UTF8PROC_COMPOSE | UTF8PROC_STABLE);

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

enum imbrex_status nfc_append(const char *text, size_t num_bytes, struct byte_buffer *result,
                              struct imbrex_error *err)
{
    for (size_t at = 0; at < num_bytes;) {
        size_t last;
        size_t inert_end = inert_run_end(text, num_bytes, at, &last);
        if (inert_end == num_bytes) {
            return byte_buffer_append(result, text + at, num_bytes - at, err);
        }
        /* What follows may compose with the last inert character. */
        TRY(byte_buffer_append(result, text + at, last - at, err));
        at = lively_run_end(text, num_bytes, inert_end);
        TRY(compose_append(text + last, at - last, result, err));
    }
    return IMBREX_STATUS_OK;
}
