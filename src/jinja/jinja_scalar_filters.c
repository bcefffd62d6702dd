/* SPDX-License-Identifier: Apache-2.0 */
/* Filters for strings, numbers and single values, and the table of all filters' names. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "jinja/jinja_filters.h"

enum imbrex_status jinja_filter_fail(struct jinja_render *render, const struct jinja_call *call,
                                     const char *expected, const struct jinja_value *found)
{
    if (found->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, found->as.undefined);
    }
    return jinja_fail(render, IMBREX_STATUS_FORMAT, "the filter '%s' expects %s, found %s",
                      call->entry->name, expected, jinja_type_name(found));
}

enum imbrex_status jinja_filter_int(struct jinja_render *render, const struct jinja_call *call,
                                    int arg_idx, int64_t absent, int64_t *integer)
{
    const struct jinja_value *arg = &call->args[arg_idx];
    *integer = absent;
    if (arg->kind == JINJA_MISSING || arg->kind == JINJA_NONE) {
        return IMBREX_STATUS_OK;
    }
    return jinja_as_int(arg, integer) ? IMBREX_STATUS_OK
                                      : jinja_filter_fail(render, call, "an int", arg);
}

/* ---- strings --------------------------------------------------------------------------------- */

static enum imbrex_status filter_recase(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_string *string;
    TRY(jinja_to_string(render, &call->self, &string));
    TRY(jinja_string_recase(render, string, (enum jinja_case)call->entry->variant, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_trim(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    const struct jinja_string *string, *chars = NULL;
    TRY(jinja_to_string(render, &call->self, &string));
    if (jinja_is_given(&call->args[0]) && call->args[0].kind != JINJA_NONE) {
        if (call->args[0].kind != JINJA_STRING) {
            return jinja_filter_fail(render, call, "a string", &call->args[0]);
        }
        chars = call->args[0].as.string;
    }
    TRY(jinja_string_strip(render, string, chars, 3, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_replace(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    const struct jinja_string *string, *old, *replacement;
    int64_t count;
    TRY(jinja_to_string(render, &call->self, &string));
    TRY(jinja_to_string(render, &call->args[0], &old));
    TRY(jinja_to_string(render, &call->args[1], &replacement));
    TRY(jinja_filter_int(render, call, 2, -1, &count));
    TRY(jinja_string_replace(render, string, old, replacement, count, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_string(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_string *string;
    TRY(jinja_to_string(render, &call->self, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

/* escape, forceescape and safe */
enum escaping { ESCAPE, FORCE_ESCAPE, MARK_SAFE };

static enum imbrex_status filter_escape(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_string *string;
    struct jinja_string *copy;
    TRY(jinja_to_string(render, &call->self, &string));
    if (call->entry->variant != ESCAPE) {
        TRY(jinja_take(render, 1, sizeof(*copy), &copy));
        *copy = *string;
        copy->is_markup = call->entry->variant == MARK_SAFE;
        copy->growth = NULL;
        string = copy;
    }
    if (call->entry->variant != MARK_SAFE) {
        TRY(jinja_string_escape(render, string, &string));
    }
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_center(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string space = {
        .bytes = " ", .num_bytes = 1, .num_chars = 1, .runs = &run};
    const struct jinja_string *string;
    int64_t width;
    TRY(jinja_to_string(render, &call->self, &string));
    TRY(jinja_filter_int(render, call, 0, 80, &width));
    if (width > (int64_t)string->num_chars) {
        size_t num_fills = (size_t)width - string->num_chars;
        size_t num_before = num_fills / 2 + (num_fills % 2 == 1 && width % 2 == 1);
        TRY(jinja_string_pad(render, string, num_before, num_fills - num_before, &space, &string));
    }
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_indent(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    struct jinja_text text = {0};
    struct jinja_list *lines;
    const struct jinja_string *string, *indent = &jinja_string_empty;
    int64_t width;
    if (call->self.kind != JINJA_STRING) {
        return jinja_filter_fail(render, call, "a string", &call->self);
    }
    if (call->args[0].kind == JINJA_STRING) {
        indent = call->args[0].as.string;
    } else {
        static const struct jinja_run run = {SIZE_MAX, false};
        static const struct jinja_string space = {
            .bytes = " ", .num_bytes = 1, .num_chars = 1, .runs = &run};
        TRY(jinja_filter_int(render, call, 0, 4, &width));
        TRY(jinja_string_pad(render, indent, width < 0 ? 0 : (size_t)width, 0, &space, &indent));
    }
    bool indents_first = jinja_truth(&call->args[1]), indents_blank = jinja_truth(&call->args[2]);
    TRY(jinja_split_lines(render, call->self.as.string, false, &lines));
    /* Jinja adds a newline before it splits: a text that ends with one has an empty last line. */
    const struct jinja_string *last =
        lines->num_items == 0 ? NULL : lines->items[lines->num_items - 1].as.string;
    const struct jinja_string *whole = call->self.as.string;
    if (last == NULL || last->bytes + last->num_bytes != whole->bytes + whole->num_bytes) {
        TRY(jinja_list_append(render, lines, jinja_string_value(&jinja_string_empty)));
    }
    for (size_t i = 0; i < lines->num_items; i++) {
        const struct jinja_string *line = lines->items[i].as.string;
        if (i != 0) {
            TRY(jinja_text_append(render, &text, "\n", 1, false));
        }
        if (i == 0 ? indents_first : indents_blank || line->num_bytes != 0) {
            TRY(jinja_text_append_string(render, &text, indent));
        }
        TRY(jinja_text_append_string(render, &text, line));
    }
    TRY(jinja_text_finish(render, &text, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_truncate(struct jinja_render *render,
                                          const struct jinja_call *call, struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string dots = {
        .bytes = "...", .num_bytes = 3, .num_chars = 3, .runs = &run};
    const struct jinja_string *string, *end = &dots;
    int64_t length, leeway;
    size_t self_length;
    *result = call->self;
    TRY(jinja_length(render, &call->self, &self_length));
    TRY(jinja_filter_int(render, call, 0, 255, &length));
    TRY(jinja_filter_int(render, call, 3, 5, &leeway));
    if (jinja_is_given(&call->args[2])) {
        if (call->args[2].kind != JINJA_STRING) {
            return jinja_filter_fail(render, call, "a string", &call->args[2]);
        }
        end = call->args[2].as.string;
    }
    if (length < (int64_t)end->num_chars || leeway < 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "truncate: the length is less than that of the end, or the leeway less "
                          "than 0");
    }
    if ((int64_t)self_length - leeway <= length) { /* whatever it is */
        return IMBREX_STATUS_OK;
    }
    if (call->self.kind != JINJA_STRING) {
        return jinja_filter_fail(render, call, "a string", &call->self);
    }
    string = call->self.as.string;
    size_t kept = jinja_string_char_offset(string, (size_t)length - end->num_chars);
    if (!jinja_truth(&call->args[1])) { /* back to the last space */
        const char *space = memrchr(string->bytes, ' ', kept);
        kept = space == NULL ? kept : (size_t)(space - string->bytes);
    }
    TRY(jinja_string_cut(render, string, 0, kept, &string));
    TRY(jinja_string_concat(render, string, end, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_wordcount(struct jinja_render *render,
                                           const struct jinja_call *call,
                                           struct jinja_value *result)
{
    const struct jinja_string *string;
    int64_t count = 0;
    bool was_word = false;
    TRY(jinja_to_string(render, &call->self, &string));
    TRY(jinja_charge_bytes(render, string->num_bytes));
    for (size_t i = 0; i < string->num_bytes;) {
        struct utf8_step step = utf8_next(string->bytes + i, string->num_bytes - i);
        utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)step.code_point);
        bool is_word = step.code_point == '_' ||
                       (category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO) ||
                       (category >= UTF8PROC_CATEGORY_ND && category <= UTF8PROC_CATEGORY_NO);
        count += is_word && !was_word;
        was_word = is_word;
        i += step.num_bytes;
    }
    *result = jinja_int(count);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_format(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_string *string;
    struct jinja_value values;
    const struct jinja_args *args = call->all;
    TRY(jinja_to_string(render, &call->self, &string));
    if (args->num_named != 0) {
        struct jinja_dict *dict;
        TRY(jinja_dict_new(render, args->num_named, &dict));
        for (size_t i = 0; i < args->num_named; i++) {
            TRY(jinja_dict_set(render, dict, jinja_string_value(args->named[i].name),
                               args->named[i].value));
        }
        values = jinja_dict_value(dict);
    } else {
        struct jinja_list *list;
        TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 0, &list));
        list->items = args->positional;
        list->num_items = list->capacity = args->num_positional;
        values = jinja_list_value(list);
    }
    if (args->num_named != 0 && args->num_positional != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "can't handle positional and keyword arguments at the same time");
    }
    return jinja_percent_format(render, string, &values, result);
}

/* ---- numbers --------------------------------------------------------------------------------- */

static enum imbrex_status filter_abs(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    int64_t integer;
    if (jinja_as_int(&call->self, &integer)) {
        if (integer < 0 && __builtin_sub_overflow(0, integer, &integer)) {
            return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an integer beyond 64 bits");
        }
        *result = jinja_int(integer);
        return IMBREX_STATUS_OK;
    }
    if (call->self.kind == JINJA_FLOAT) {
        *result = jinja_float(fabs(call->self.as.real));
        return IMBREX_STATUS_OK;
    }
    return jinja_filter_fail(render, call, "a number", &call->self);
}

/* Copies a number's text without white space around it and without underscores between digits;
 * false if it is too long to be one. */
static bool number_text(const struct jinja_string *string, char text[700], size_t *text_bytes)
{
    size_t begin = 0, end = string->num_bytes, used = 0;
    while (begin < end && jinja_is_space((unsigned char)string->bytes[begin])) {
        begin++;
    }
    while (end > begin && jinja_is_space((unsigned char)string->bytes[end - 1])) {
        end--;
    }
    if (end - begin >= 700) {
        return false;
    }
    for (size_t i = begin; i < end; i++) {
        char c = string->bytes[i];
        bool is_between = i > begin && i + 1 < end && string->bytes[i - 1] != '_' &&
                          string->bytes[i + 1] != '_' && string->bytes[i + 1] != '.' &&
                          string->bytes[i - 1] != '.';
        if (c == '_' && is_between) {
            continue;
        }
        text[used++] = c;
    }
    text[used] = '\0';
    *text_bytes = used;
    return true;
}

static bool parse_real(const struct jinja_string *string, double *real)
{
    char text[700];
    size_t num_bytes;
    if (!number_text(string, text, &num_bytes)) {
        return false;
    }
    if (jinja_parse_float(text, num_bytes, real)) {
        return true;
    }
    const char *word = text + (text[0] == '-' || text[0] == '+');
    for (char *c = text; *c != '\0'; c++) {
        *c = *c >= 'A' && *c <= 'Z' ? (char)(*c | 0x20) : *c;
    }
    if (strcmp(word, "nan") == 0) {
        *real = NAN;
        return true;
    }
    if (strcmp(word, "inf") == 0 || strcmp(word, "infinity") == 0) {
        *real = text[0] == '-' ? -INFINITY : INFINITY;
        return true;
    }
    return false;
}

enum parsed { PARSED, NOT_A_NUMBER, TOO_LARGE };

/* int(string, base) */
static enum parsed parse_integer(const struct jinja_string *string, int64_t base, int64_t *integer)
{
    char text[700];
    size_t num_bytes, i;
    int64_t value = 0;
    if (!number_text(string, text, &num_bytes)) {
        return NOT_A_NUMBER;
    }
    bool is_negative = text[0] == '-';
    i = is_negative || text[0] == '+';
    char letter = text[i] == '0' ? (char)(text[i + 1] | 0x20) : '\0';
    int64_t prefix_base = letter == 'x' ? 16 : letter == 'o' ? 8 : letter == 'b' ? 2 : 0;
    if (prefix_base != 0 && (base == prefix_base || base == 0)) {
        base = prefix_base;
        i += 2;
    }
    base = base == 0 ? 10 : base;
    if (i == num_bytes) {
        return NOT_A_NUMBER;
    }
    bool is_too_large = false;
    for (; i < num_bytes; i++) {
        char c = text[i];
        int digit = c >= '0' && c <= '9'   ? c - '0'
                    : c >= 'a' && c <= 'z' ? c - 'a' + 10
                    : c >= 'A' && c <= 'Z' ? c - 'A' + 10
                                           : 99;
        if (digit >= base) {
            return NOT_A_NUMBER;
        }
        is_too_large |= __builtin_mul_overflow(value, base, &value) ||
                        __builtin_sub_overflow(value, digit, &value); /* downwards: -2^63 fits */
    }
    if (!is_negative) {
        is_too_large |= __builtin_sub_overflow(0, value, &value);
    }
    *integer = value;
    return is_too_large ? TOO_LARGE : PARSED;
}

static enum imbrex_status filter_int(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    int64_t integer, base;
    double real = NAN;
    const struct jinja_value *self = &call->self;
    *result = jinja_is_given(&call->args[0]) ? call->args[0] : jinja_int(0);
    TRY(jinja_filter_int(render, call, 1, 10, &base));
    if (base != 0 && (base < 2 || base > 36)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "int() base must be >= 2 and <= 36, or 0");
    }
    if (jinja_as_int(self, &integer)) {
        *result = jinja_int(integer);
        return IMBREX_STATUS_OK;
    }
    if (self->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, self->as.undefined);
    }
    if (self->kind == JINJA_STRING) {
        enum parsed parsed = parse_integer(self->as.string, base, &integer);
        if (parsed == PARSED) {
            *result = jinja_int(integer);
            return IMBREX_STATUS_OK;
        }
        if (parsed == TOO_LARGE) {
            return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an integer beyond 64 bits");
        }
        if (!parse_real(self->as.string, &real)) {
            return IMBREX_STATUS_OK;
        }
        if (isinf(real)) {
            return IMBREX_STATUS_OK;
        }
    } else if (self->kind == JINJA_FLOAT) {
        real = self->as.real;
    } else {
        return IMBREX_STATUS_OK;
    }
    if (isnan(real)) {
        return IMBREX_STATUS_OK;
    }
    if (!(fabs(real) < 0x1p63)) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an integer beyond 64 bits");
    }
    *result = jinja_int((int64_t)real);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_float(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    int64_t integer;
    double real;
    *result = jinja_is_given(&call->args[0]) ? call->args[0] : jinja_float(0);
    if (jinja_as_int(&call->self, &integer)) {
        *result = jinja_float((double)integer);
    } else if (call->self.kind == JINJA_FLOAT) {
        *result = call->self;
    } else if (call->self.kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, call->self.as.undefined);
    } else if (call->self.kind == JINJA_STRING && parse_real(call->self.as.string, &real)) {
        *result = jinja_float(real);
    }
    return IMBREX_STATUS_OK;
}

/* round(integer, -num_zeros), half to even */
static int64_t round_integer(int64_t integer, int64_t num_zeros)
{
    int64_t unit = 1;
    for (int64_t i = 0; i < num_zeros; i++) {
        if (__builtin_mul_overflow(unit, 10, &unit)) {
            return 0;
        }
    }
    int64_t rest = integer % unit, whole = integer / unit;
    int64_t twice =
        rest < 0 ? -rest : rest; /* rest * 2 may overflow: compare with the other part */
    int64_t other = unit - twice;
    if (twice > other || (twice == other && whole % 2 != 0)) {
        whole += integer < 0 ? -1 : 1;
    }
    return __builtin_mul_overflow(whole, unit, &whole) ? integer : whole;
}

/* round(real, precision): printf rounds the exact value half to even, as Python does. */
static double round_real(double real, int64_t precision)
{
    char digits[400];
    size_t used = 0;
    if (!isfinite(real) || precision > 22) {
        return real;
    }
    if (precision < 0) {
        double unit = pow(10, (double)-precision);
        return isfinite(unit) ? rint(real / unit) * unit : 0 * real;
    }
    char text[400];
    snprintf(text, sizeof(text), "%.*f", (int)precision, fabs(real));
    for (const char *c = text; *c != '\0'; c++) { /* digits only: the point is the locale's */
        if (*c >= '0' && *c <= '9') {
            digits[used++] = *c;
        }
    }
    snprintf(digits + used, sizeof(digits) - used, "e-%d", (int)precision);
    return copysign(strtod(digits, NULL), real);
}

static enum imbrex_status filter_round(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    int64_t integer = 0, precision;
    bool is_int = jinja_as_int(&call->self, &integer);
    double real = is_int ? (double)integer : call->self.as.real;
    TRY(jinja_filter_int(render, call, 0, 0, &precision));
    if (!is_int && call->self.kind != JINJA_FLOAT) {
        return jinja_filter_fail(render, call, "a number", &call->self);
    }
    bool is_ceil = false, is_common = true;
    if (jinja_is_given(&call->args[1])) {
        const struct jinja_value *method = &call->args[1];
        is_common = method->kind == JINJA_STRING && jinja_string_is(method->as.string, "common");
        is_ceil = method->kind == JINJA_STRING && jinja_string_is(method->as.string, "ceil");
        if (!is_common && !is_ceil &&
            !(method->kind == JINJA_STRING && jinja_string_is(method->as.string, "floor"))) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "method must be common, ceil or floor");
        }
    }
    if (is_common && is_int) {
        *result = jinja_int(precision < 0 ? round_integer(integer, -(precision + 1) + 1) : integer);
    } else if (is_common) {
        *result = jinja_float(round_real(real, precision));
    } else {
        double scale = pow(10, (double)precision), scaled = real * scale;
        scaled = is_ceil ? ceil(scaled) : floor(scaled);
        if (!isfinite(scaled) || scale == 0) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "a number too large to be rounded");
        }
        *result = jinja_float(scaled / scale);
    }
    return IMBREX_STATUS_OK;
}

/* ---- any value ------------------------------------------------------------------------------- */

static enum imbrex_status filter_default(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    (void)render;
    bool is_replaced = call->self.kind == JINJA_UNDEFINED ||
                       (jinja_truth(&call->args[1]) && !jinja_truth(&call->self));
    *result = !is_replaced                     ? call->self
              : jinja_is_given(&call->args[0]) ? call->args[0]
                                               : jinja_string_value(&jinja_string_empty);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_tojson(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string space = {
        .bytes = " ", .num_bytes = 1, .num_chars = 1, .runs = &run};
    struct jinja_string comma, colon;
    struct jinja_json_style style = {.item_separator = &comma,
                                     .key_separator = &colon,
                                     .escapes_non_ascii = jinja_truth(&call->args[0]),
                                     .sorts_keys = jinja_truth(&call->args[3])};
    const struct jinja_value *indent = &call->args[1], *separators = &call->args[2];
    int64_t width;
    if (indent->kind == JINJA_STRING) {
        style.indent = indent->as.string;
    } else if (jinja_is_given(indent) && indent->kind != JINJA_NONE) {
        TRY(jinja_filter_int(render, call, 1, 0, &width));
        TRY(jinja_string_pad(render, &jinja_string_empty, width < 0 ? 0 : (size_t)width, 0, &space,
                             &style.indent));
    }
    jinja_string_view(", ", style.indent == NULL ? 2 : 1, false, &comma);
    jinja_string_view(": ", 2, false, &colon);
    if (jinja_is_given(separators) && separators->kind != JINJA_NONE) {
        if (!jinja_is_sequence(separators) || separators->as.list->num_items != 2 ||
            separators->as.list->items[0].kind != JINJA_STRING ||
            separators->as.list->items[1].kind != JINJA_STRING) {
            return jinja_filter_fail(render, call, "two strings as separators", separators);
        }
        comma = *separators->as.list->items[0].as.string;
        colon = *separators->as.list->items[1].as.string;
    }
    const struct jinja_string *json;
    TRY(jinja_to_json(render, &call->self, &style, &json));
    *result = jinja_string_value(json);
    return IMBREX_STATUS_OK;
}

const struct jinja_entry_point jinja_scalar_filters[] = {
    {"abs", filter_abs, "", 0, 0, false},
    {"capitalize", filter_recase, "", 0, JINJA_CASE_CAPITALIZE, false},
    {"center", filter_center, "width", 0, 0, false},
    {"d", filter_default, "default_value,boolean", 0, 0, false},
    {"default", filter_default, "default_value,boolean", 0, 0, false},
    {"e", filter_escape, "", 0, ESCAPE, false},
    {"escape", filter_escape, "", 0, ESCAPE, false},
    {"float", filter_float, "default", 0, 0, false},
    {"forceescape", filter_escape, "", 0, FORCE_ESCAPE, false},
    {"format", filter_format, "*", 0, 0, false},
    {"indent", filter_indent, "width,first,blank", 0, 0, false},
    {"int", filter_int, "default,base", 0, 0, false},
    {"lower", filter_recase, "", 0, JINJA_CASE_LOWER, false},
    {"replace", filter_replace, "old,new,count", 2, 0, false},
    {"round", filter_round, "precision,method", 0, 0, false},
    {"safe", filter_escape, "", 0, MARK_SAFE, false},
    {"string", filter_string, "", 0, 0, false},
    {"title", filter_recase, "", 0, JINJA_CASE_WORDS, false},
    {"tojson", filter_tojson, "ensure_ascii,indent,separators,sort_keys", 0, 0, false},
    {"trim", filter_trim, "chars", 0, 0, false},
    {"truncate", filter_truncate, "length,killwords,end,leeway", 0, 0, false},
    {"upper", filter_recase, "", 0, JINJA_CASE_UPPER, false},
    {"wordcount", filter_wordcount, "", 0, 0, false},
    /* Jinja's, refused by name */
    {"attr", NULL, "", 0, 0, false},
    {"filesizeformat", NULL, "", 0, 0, false},
    {"pprint", NULL, "", 0, 0, false},
    {"random", NULL, "", 0, 0, false},
    {"striptags", NULL, "", 0, 0, false},
    {"urlencode", NULL, "", 0, 0, false},
    {"urlize", NULL, "", 0, 0, false},
    {"wordwrap", NULL, "", 0, 0, false},
    {"xmlattr", NULL, "", 0, 0, false},
    {NULL, NULL, NULL, 0, 0, false},
};

const struct jinja_entry_point *jinja_filter_find(const char *name, size_t num_bytes)
{
    const struct jinja_entry_point *tables[] = {jinja_scalar_filters, jinja_sequence_filters};
    for (size_t i = 0; i < 2; i++) {
        for (const struct jinja_entry_point *entry = tables[i]; entry->name != NULL; entry++) {
            if (strlen(entry->name) == num_bytes && memcmp(entry->name, name, num_bytes) == 0) {
                return entry;
            }
        }
    }
    return NULL;
}
