/* SPDX-License-Identifier: Apache-2.0 */
/* upper, lower, title and capitalize as Python has them: utf8proc's simple mappings, the
 * characters whose upper or title case is several characters (Unicode's SpecialCasing.txt, without
 * its language rules), and the final sigma. */
#include <utf8proc.h>

#include "base/utf8.h"
#include "jinja/jinja_render.h"

#define MAX_MAPPED 3

static const struct {
    uint32_t code_point;
    uint32_t upper[MAX_MAPPED], title[MAX_MAPPED]; /* 0 behind the last */
} special_cases[] = {
    /* clang-format off */
    {0x00df, {0x0053, 0x0053}, {0x0053, 0x0073}},
    {0x0149, {0x02bc, 0x004e}, {0x02bc, 0x004e}},
    {0x01f0, {0x004a, 0x030c}, {0x004a, 0x030c}},
    {0x0390, {0x0399, 0x0308, 0x0301}, {0x0399, 0x0308, 0x0301}},
    {0x03b0, {0x03a5, 0x0308, 0x0301}, {0x03a5, 0x0308, 0x0301}},
    {0x0587, {0x0535, 0x0552}, {0x0535, 0x0582}},
    {0x1e96, {0x0048, 0x0331}, {0x0048, 0x0331}},
    {0x1e97, {0x0054, 0x0308}, {0x0054, 0x0308}},
    {0x1e98, {0x0057, 0x030a}, {0x0057, 0x030a}},
    {0x1e99, {0x0059, 0x030a}, {0x0059, 0x030a}},
    {0x1e9a, {0x0041, 0x02be}, {0x0041, 0x02be}},
    {0x1f50, {0x03a5, 0x0313}, {0x03a5, 0x0313}},
    {0x1f52, {0x03a5, 0x0313, 0x0300}, {0x03a5, 0x0313, 0x0300}},
    {0x1f54, {0x03a5, 0x0313, 0x0301}, {0x03a5, 0x0313, 0x0301}},
    {0x1f56, {0x03a5, 0x0313, 0x0342}, {0x03a5, 0x0313, 0x0342}},
    {0x1f80, {0x1f08, 0x0399}, {0x1f88}},
    {0x1f81, {0x1f09, 0x0399}, {0x1f89}},
    {0x1f82, {0x1f0a, 0x0399}, {0x1f8a}},
    {0x1f83, {0x1f0b, 0x0399}, {0x1f8b}},
    {0x1f84, {0x1f0c, 0x0399}, {0x1f8c}},
    {0x1f85, {0x1f0d, 0x0399}, {0x1f8d}},
    {0x1f86, {0x1f0e, 0x0399}, {0x1f8e}},
    {0x1f87, {0x1f0f, 0x0399}, {0x1f8f}},
    {0x1f88, {0x1f08, 0x0399}, {0x1f88}},
    {0x1f89, {0x1f09, 0x0399}, {0x1f89}},
    {0x1f8a, {0x1f0a, 0x0399}, {0x1f8a}},
    {0x1f8b, {0x1f0b, 0x0399}, {0x1f8b}},
    {0x1f8c, {0x1f0c, 0x0399}, {0x1f8c}},
    {0x1f8d, {0x1f0d, 0x0399}, {0x1f8d}},
    {0x1f8e, {0x1f0e, 0x0399}, {0x1f8e}},
    {0x1f8f, {0x1f0f, 0x0399}, {0x1f8f}},
    {0x1f90, {0x1f28, 0x0399}, {0x1f98}},
    {0x1f91, {0x1f29, 0x0399}, {0x1f99}},
    {0x1f92, {0x1f2a, 0x0399}, {0x1f9a}},
    {0x1f93, {0x1f2b, 0x0399}, {0x1f9b}},
    {0x1f94, {0x1f2c, 0x0399}, {0x1f9c}},
    {0x1f95, {0x1f2d, 0x0399}, {0x1f9d}},
    {0x1f96, {0x1f2e, 0x0399}, {0x1f9e}},
    {0x1f97, {0x1f2f, 0x0399}, {0x1f9f}},
    {0x1f98, {0x1f28, 0x0399}, {0x1f98}},
    {0x1f99, {0x1f29, 0x0399}, {0x1f99}},
    {0x1f9a, {0x1f2a, 0x0399}, {0x1f9a}},
    {0x1f9b, {0x1f2b, 0x0399}, {0x1f9b}},
    {0x1f9c, {0x1f2c, 0x0399}, {0x1f9c}},
    {0x1f9d, {0x1f2d, 0x0399}, {0x1f9d}},
    {0x1f9e, {0x1f2e, 0x0399}, {0x1f9e}},
    {0x1f9f, {0x1f2f, 0x0399}, {0x1f9f}},
    {0x1fa0, {0x1f68, 0x0399}, {0x1fa8}},
    {0x1fa1, {0x1f69, 0x0399}, {0x1fa9}},
    {0x1fa2, {0x1f6a, 0x0399}, {0x1faa}},
    {0x1fa3, {0x1f6b, 0x0399}, {0x1fab}},
    {0x1fa4, {0x1f6c, 0x0399}, {0x1fac}},
    {0x1fa5, {0x1f6d, 0x0399}, {0x1fad}},
    {0x1fa6, {0x1f6e, 0x0399}, {0x1fae}},
    {0x1fa7, {0x1f6f, 0x0399}, {0x1faf}},
    {0x1fa8, {0x1f68, 0x0399}, {0x1fa8}},
    {0x1fa9, {0x1f69, 0x0399}, {0x1fa9}},
    {0x1faa, {0x1f6a, 0x0399}, {0x1faa}},
    {0x1fab, {0x1f6b, 0x0399}, {0x1fab}},
    {0x1fac, {0x1f6c, 0x0399}, {0x1fac}},
    {0x1fad, {0x1f6d, 0x0399}, {0x1fad}},
    {0x1fae, {0x1f6e, 0x0399}, {0x1fae}},
    {0x1faf, {0x1f6f, 0x0399}, {0x1faf}},
    {0x1fb2, {0x1fba, 0x0399}, {0x1fba, 0x0345}},
    {0x1fb3, {0x0391, 0x0399}, {0x1fbc}},
    {0x1fb4, {0x0386, 0x0399}, {0x0386, 0x0345}},
    {0x1fb6, {0x0391, 0x0342}, {0x0391, 0x0342}},
    {0x1fb7, {0x0391, 0x0342, 0x0399}, {0x0391, 0x0342, 0x0345}},
    {0x1fbc, {0x0391, 0x0399}, {0x1fbc}},
    {0x1fc2, {0x1fca, 0x0399}, {0x1fca, 0x0345}},
    {0x1fc3, {0x0397, 0x0399}, {0x1fcc}},
    {0x1fc4, {0x0389, 0x0399}, {0x0389, 0x0345}},
    {0x1fc6, {0x0397, 0x0342}, {0x0397, 0x0342}},
    {0x1fc7, {0x0397, 0x0342, 0x0399}, {0x0397, 0x0342, 0x0345}},
    {0x1fcc, {0x0397, 0x0399}, {0x1fcc}},
    {0x1fd2, {0x0399, 0x0308, 0x0300}, {0x0399, 0x0308, 0x0300}},
    {0x1fd3, {0x0399, 0x0308, 0x0301}, {0x0399, 0x0308, 0x0301}},
    {0x1fd6, {0x0399, 0x0342}, {0x0399, 0x0342}},
    {0x1fd7, {0x0399, 0x0308, 0x0342}, {0x0399, 0x0308, 0x0342}},
    {0x1fe2, {0x03a5, 0x0308, 0x0300}, {0x03a5, 0x0308, 0x0300}},
    {0x1fe3, {0x03a5, 0x0308, 0x0301}, {0x03a5, 0x0308, 0x0301}},
    {0x1fe4, {0x03a1, 0x0313}, {0x03a1, 0x0313}},
    {0x1fe6, {0x03a5, 0x0342}, {0x03a5, 0x0342}},
    {0x1fe7, {0x03a5, 0x0308, 0x0342}, {0x03a5, 0x0308, 0x0342}},
    {0x1ff2, {0x1ffa, 0x0399}, {0x1ffa, 0x0345}},
    {0x1ff3, {0x03a9, 0x0399}, {0x1ffc}},
    {0x1ff4, {0x038f, 0x0399}, {0x038f, 0x0345}},
    {0x1ff6, {0x03a9, 0x0342}, {0x03a9, 0x0342}},
    {0x1ff7, {0x03a9, 0x0342, 0x0399}, {0x03a9, 0x0342, 0x0345}},
    {0x1ffc, {0x03a9, 0x0399}, {0x1ffc}},
    {0xfb00, {0x0046, 0x0046}, {0x0046, 0x0066}},
    {0xfb01, {0x0046, 0x0049}, {0x0046, 0x0069}},
    {0xfb02, {0x0046, 0x004c}, {0x0046, 0x006c}},
    {0xfb03, {0x0046, 0x0046, 0x0049}, {0x0046, 0x0066, 0x0069}},
    {0xfb04, {0x0046, 0x0046, 0x004c}, {0x0046, 0x0066, 0x006c}},
    {0xfb05, {0x0053, 0x0054}, {0x0053, 0x0074}},
    {0xfb06, {0x0053, 0x0054}, {0x0053, 0x0074}},
    {0xfb13, {0x0544, 0x0546}, {0x0544, 0x0576}},
    {0xfb14, {0x0544, 0x0535}, {0x0544, 0x0565}},
    {0xfb15, {0x0544, 0x053b}, {0x0544, 0x056b}},
    {0xfb16, {0x054e, 0x0546}, {0x054e, 0x0576}},
    {0xfb17, {0x0544, 0x053d}, {0x0544, 0x056d}}
    /* clang-format on */
};

#define NUM_SPECIAL_CASES (sizeof(special_cases) / sizeof(special_cases[0]))
#define CAPITAL_I_WITH_DOT 0x0130
#define CAPITAL_SIGMA 0x03a3
#define SMALL_SIGMA 0x03c3
#define SMALL_FINAL_SIGMA 0x03c2

static size_t map_upper(uint32_t code_point, bool to_title, uint32_t mapped[MAX_MAPPED])
{
    size_t low = 0, high = NUM_SPECIAL_CASES;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (special_cases[middle].code_point < code_point) {
            low = middle + 1;
        } else {
            high = middle;
        }
    }
    if (low < NUM_SPECIAL_CASES && special_cases[low].code_point == code_point) {
        const uint32_t *found = to_title ? special_cases[low].title : special_cases[low].upper;
        size_t num_mapped = 0;
        while (num_mapped < MAX_MAPPED && found[num_mapped] != 0) {
            mapped[num_mapped] = found[num_mapped];
            num_mapped++;
        }
        return num_mapped;
    }
    utf8proc_int32_t simple = to_title ? utf8proc_totitle((utf8proc_int32_t)code_point)
                                       : utf8proc_toupper((utf8proc_int32_t)code_point);
    mapped[0] = (uint32_t)simple;
    return 1;
}

bool jinja_is_cased(uint32_t code_point)
{
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)code_point);
    return category == UTF8PROC_CATEGORY_LU || category == UTF8PROC_CATEGORY_LL ||
           category == UTF8PROC_CATEGORY_LT || utf8proc_islower((utf8proc_int32_t)code_point) ||
           utf8proc_isupper((utf8proc_int32_t)code_point);
}

static bool is_case_ignorable(uint32_t code_point)
{
    switch (utf8proc_category((utf8proc_int32_t)code_point)) {
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_SK:
        return true;
    default:
        return code_point == '\'' || code_point == '.' || code_point == ':' ||
               code_point == 0x00b7 || code_point == 0x2018 || code_point == 0x2019;
    }
}

/* Whether the sigma at [position, end) ends a word: cased letters before it and none behind. The
 * search for them is cut off at 64 characters, so that it stays linear in the text. */
static bool is_final_sigma(const struct jinja_string *string, size_t position, size_t end)
{
    bool has_before = false;
    size_t i = position;
    for (int steps = 0; steps < 64 && i > 0; steps++) {
        do {
            i--;
        } while (i > 0 && ((unsigned char)string->bytes[i] & 0xc0) == 0x80);
        uint32_t before = utf8_next(string->bytes + i, string->num_bytes - i).code_point;
        if (!is_case_ignorable(before)) {
            has_before = jinja_is_cased(before);
            break;
        }
    }
    for (int steps = 0; has_before && steps < 64 && end < string->num_bytes; steps++) {
        struct utf8_step step = utf8_next(string->bytes + end, string->num_bytes - end);
        if (!is_case_ignorable(step.code_point)) {
            return !jinja_is_cased(step.code_point);
        }
        end += step.num_bytes;
    }
    return has_before;
}

static size_t map_lower(const struct jinja_string *string, size_t position, struct utf8_step step,
                        uint32_t mapped[MAX_MAPPED])
{
    if (step.code_point == CAPITAL_I_WITH_DOT) {
        mapped[0] = 'i';
        mapped[1] = 0x0307;
        return 2;
    }
    if (step.code_point == CAPITAL_SIGMA) {
        mapped[0] = is_final_sigma(string, position, position + step.num_bytes) ? SMALL_FINAL_SIGMA
                                                                                : SMALL_SIGMA;
        return 1;
    }
    mapped[0] = (uint32_t)utf8proc_tolower((utf8proc_int32_t)step.code_point);
    return 1;
}

/* Whether a word begins behind this character. */
static bool begins_word(enum jinja_case to, uint32_t code_point)
{
    if (to == JINJA_CASE_WORDS) {
        return jinja_is_space(code_point) || code_point == '-' || code_point == '(' ||
               code_point == '{' || code_point == '[' || code_point == '<';
    }
    return to == JINJA_CASE_TITLE && !jinja_is_cased(code_point);
}

enum imbrex_status jinja_string_recase(struct jinja_render *render,
                                       const struct jinja_string *string, enum jinja_case to,
                                       const struct jinja_string **recased)
{
    struct jinja_text text = {0};
    struct jinja_part part = {0};
    bool is_word_start = true;
    TRY(jinja_charge_bytes(render, string->num_bytes * 4));
    while (jinja_string_next_part(string, &part)) {
        for (size_t i = part.begin; i < part.end;) {
            struct utf8_step step = utf8_next(string->bytes + i, part.end - i);
            uint32_t mapped[MAX_MAPPED];
            size_t num_mapped;
            bool to_upper = to == JINJA_CASE_UPPER || (to != JINJA_CASE_LOWER && is_word_start);
            if (step.code_point < 0x80) {
                char c = string->bytes[i];
                bool is_letter = (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z');
                mapped[0] = is_letter ? (to_upper ? (uint32_t)c & ~0x20u : (uint32_t)c | 0x20u)
                                      : step.code_point;
                num_mapped = 1;
                is_word_start = begins_word(to, step.code_point);
            } else {
                bool to_title = to == JINJA_CASE_TITLE || to == JINJA_CASE_CAPITALIZE;
                num_mapped = to_upper ? map_upper(step.code_point, to_title, mapped)
                                      : map_lower(string, i, step, mapped);
                is_word_start = begins_word(to, step.code_point);
            }
            for (size_t j = 0; j < num_mapped; j++) {
                TRY(jinja_text_append_char(render, &text, mapped[j], part.is_input));
            }
            i += step.num_bytes;
        }
    }
    return jinja_text_finish(render, &text, recased);
}
