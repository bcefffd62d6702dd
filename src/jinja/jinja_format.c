/* SPDX-License-Identifier: Apache-2.0 */
/* Python's printf-like `format % values`: the directives %s %r %d %i %x %X %o %f %e %g %c %%. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "base/utf8.h"
#include "jinja/jinja_render.h"

#define MAX_WIDTH 10000
#define MAX_PRECISION 100
#define NUMBER_BYTES 512 /* a double has at most 309 digits before its point */

struct directive {
    bool is_left, is_zero, has_plus, has_space, is_alternate;
    int64_t width, precision; /* precision -1: none */
    char type;
};

struct formatter {
    struct jinja_render *render;
    struct jinja_text text;
    const struct jinja_string *format;
    const struct jinja_value *values;
    size_t position; /* in the format */
    size_t num_used; /* of a tuple of values */
};

static enum imbrex_status fail(const struct formatter *formatter, const char *message)
{
    return jinja_fail(formatter->render, IMBREX_STATUS_FORMAT, "%s", message);
}

static int peek(const struct formatter *formatter)
{
    return formatter->position < formatter->format->num_bytes
               ? (unsigned char)formatter->format->bytes[formatter->position]
               : -1;
}

static enum imbrex_status next_value(struct formatter *formatter, struct jinja_value *value)
{
    const struct jinja_value *values = formatter->values;
    bool is_tuple = jinja_is_tuple(values);
    size_t num_values = is_tuple ? values->as.list->num_items : 1;
    if (formatter->num_used == num_values) {
        return fail(formatter, "not enough arguments for format string");
    }
    *value = is_tuple ? values->as.list->items[formatter->num_used] : *values;
    formatter->num_used++;
    return IMBREX_STATUS_OK;
}

/* (name) of %(name)s, position behind the opening parenthesis. */
static enum imbrex_status named_value(struct formatter *formatter, struct jinja_value *value)
{
    const char *begin = formatter->format->bytes + formatter->position;
    const char *end = memchr(begin, ')', formatter->format->num_bytes - formatter->position);
    const struct jinja_string *name;
    const struct jinja_value *found;
    if (formatter->values->kind != JINJA_DICT) {
        return fail(formatter, "format requires a mapping");
    }
    if (end == NULL) {
        return fail(formatter, "incomplete format key");
    }
    formatter->position += (size_t)(end - begin) + 1;
    TRY(jinja_string_new(formatter->render, begin, (size_t)(end - begin), false, &name));
    TRY(jinja_dict_get_string(formatter->render, formatter->values->as.dict, name, &found));
    if (found == NULL) {
        return fail(formatter, "a format key that the mapping does not have");
    }
    *value = *found;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_number(struct formatter *formatter, int64_t max, int64_t *number)
{
    *number = 0;
    while (peek(formatter) >= '0' && peek(formatter) <= '9') {
        *number = *number * 10 + (peek(formatter) - '0');
        if (*number > max) {
            return jinja_fail(formatter->render, IMBREX_STATUS_CAPACITY,
                              "a width or precision above %lld", (long long)max);
        }
        formatter->position++;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status read_directive(struct formatter *formatter, struct directive *directive)
{
    *directive = (struct directive){.precision = -1};
    for (bool is_flag = true; is_flag; formatter->position += is_flag) {
        int flag = peek(formatter);
        directive->is_left |= flag == '-';
        directive->is_zero |= flag == '0';
        directive->has_plus |= flag == '+';
        directive->has_space |= flag == ' ';
        directive->is_alternate |= flag == '#';
        is_flag = flag == '-' || flag == '0' || flag == '+' || flag == ' ' || flag == '#';
    }
    TRY(read_number(formatter, MAX_WIDTH, &directive->width));
    if (peek(formatter) == '.') {
        formatter->position++;
        TRY(read_number(formatter, MAX_PRECISION, &directive->precision));
    }
    if (peek(formatter) == '*' || directive->is_alternate) {
        return jinja_fail(formatter->render, IMBREX_STATUS_UNSUPPORTED,
                          "the format directives * and # are not supported");
    }
    if (peek(formatter) < 0) {
        return fail(formatter, "incomplete format");
    }
    directive->type = (char)peek(formatter);
    formatter->position++;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status append_fill(struct formatter *formatter, char fill, size_t width,
                                      size_t used)
{
    for (size_t i = used; i < width; i++) {
        TRY(jinja_text_append(formatter->render, &formatter->text, &fill, 1, false));
    }
    return jinja_charge(formatter->render, width / 8);
}

static enum imbrex_status append_string(struct formatter *formatter,
                                        const struct directive *directive,
                                        const struct jinja_string *string)
{
    size_t num_bytes = string->num_bytes, num_chars = string->num_chars;
    if (directive->precision >= 0 && (size_t)directive->precision < num_chars) {
        num_chars = (size_t)directive->precision;
        num_bytes = jinja_string_char_offset(string, num_chars);
    }
    size_t width = (size_t)directive->width;
    TRY(append_fill(formatter, ' ', directive->is_left ? 0 : width, num_chars));
    TRY(jinja_text_append_part(formatter->render, &formatter->text, string, 0, num_bytes));
    return append_fill(formatter, ' ', directive->is_left ? width : 0, num_chars);
}

/* A number's text without its sign, which comes before leading zeros. */
static enum imbrex_status append_number(struct formatter *formatter,
                                        const struct directive *directive, bool is_negative,
                                        const char *digits, size_t num_digits)
{
    const char *sign = is_negative            ? "-"
                       : directive->has_plus  ? "+"
                       : directive->has_space ? " "
                                              : "";
    size_t width = (size_t)directive->width, used = strlen(sign) + num_digits;
    bool is_zero = directive->is_zero && !directive->is_left;
    TRY(append_fill(formatter, ' ', directive->is_left || is_zero ? 0 : width, used));
    TRY(jinja_text_append(formatter->render, &formatter->text, sign, strlen(sign), false));
    TRY(append_fill(formatter, '0', is_zero ? width : 0, used));
    TRY(jinja_text_append(formatter->render, &formatter->text, digits, num_digits, false));
    return append_fill(formatter, ' ', directive->is_left ? width : 0, used);
}

static enum imbrex_status append_int(struct formatter *formatter, const struct directive *directive,
                                     const struct jinja_value *value)
{
    char digits[NUMBER_BYTES];
    int64_t integer;
    if (!jinja_as_int(value, &integer)) {
        bool is_decimal = directive->type == 'd' || directive->type == 'i';
        if (!is_decimal || value->kind != JINJA_FLOAT || !(fabs(value->as.real) < 0x1p63)) {
            return jinja_fail(formatter->render, IMBREX_STATUS_FORMAT,
                              "%%%c format: a number is required, not %s", directive->type,
                              jinja_type_name(value));
        }
        integer = (int64_t)value->as.real;
    }
    uint64_t magnitude = integer < 0 ? 0 - (uint64_t)integer : (uint64_t)integer;
    const char *conversion = directive->type == 'x'   ? "%.*llx"
                             : directive->type == 'X' ? "%.*llX"
                             : directive->type == 'o' ? "%.*llo"
                                                      : "%.*llu";
    int precision = directive->precision < 1 ? 1 : (int)directive->precision;
    int num_digits =
        snprintf(digits, sizeof(digits), conversion, precision, (unsigned long long)magnitude);
    return append_number(formatter, directive, integer < 0, digits, (size_t)num_digits);
}

/* Digits as printf writes them, with "." for the locale's decimal point. Returns their number. */
static size_t format_real(double magnitude, const struct directive *directive,
                          char digits[NUMBER_BYTES])
{
    char text[NUMBER_BYTES];
    int precision = directive->precision < 0 ? 6 : (int)directive->precision;
    const char *conversion = directive->type == 'e'   ? "%.*e"
                             : directive->type == 'g' ? "%.*g"
                                                      : "%.*f";
    size_t used = 0;
    snprintf(text, sizeof(text), conversion, precision, magnitude);
    for (const char *c = text; *c != '\0'; c++) {
        bool is_plain =
            (*c >= '0' && *c <= '9') || (*c >= 'a' && *c <= 'z') || *c == '-' || *c == '+';
        if (is_plain || used == 0 || digits[used - 1] != '.') {
            digits[used++] = is_plain ? *c : '.';
        }
    }
    return used;
}

static enum imbrex_status append_real(struct formatter *formatter,
                                      const struct directive *directive,
                                      const struct jinja_value *value)
{
    char digits[NUMBER_BYTES];
    int64_t integer;
    double real;
    if (value->kind == JINJA_FLOAT) {
        real = value->as.real;
    } else if (jinja_as_int(value, &integer)) {
        real = (double)integer;
    } else {
        return jinja_fail(formatter->render, IMBREX_STATUS_FORMAT, "must be real number, not %s",
                          jinja_type_name(value));
    }
    size_t num_digits = format_real(fabs(real), directive, digits);
    return append_number(formatter, directive, signbit(real), digits, num_digits);
}

static enum imbrex_status append_char(struct formatter *formatter,
                                      const struct directive *directive,
                                      const struct jinja_value *value)
{
    struct jinja_text text = {0};
    const struct jinja_string *string;
    int64_t code_point;
    if (value->kind == JINJA_STRING && value->as.string->num_chars == 1) {
        return append_string(formatter, directive, value->as.string);
    }
    if (!jinja_as_int(value, &code_point) || code_point < 0 || code_point > 0x10ffff ||
        (code_point >= 0xd800 && code_point <= 0xdfff)) {
        return fail(formatter, "%c requires int or char");
    }
    TRY(jinja_text_append_char(formatter->render, &text, (uint32_t)code_point, false));
    TRY(jinja_text_finish(formatter->render, &text, &string));
    return append_string(formatter, directive, string);
}

static enum imbrex_status append_directive(struct formatter *formatter)
{
    struct jinja_value value = jinja_missing();
    struct directive directive;
    if (peek(formatter) == '(') {
        formatter->position++;
        TRY(named_value(formatter, &value));
    }
    TRY(read_directive(formatter, &directive));
    if (directive.type == '%') {
        return jinja_text_append(formatter->render, &formatter->text, "%", 1, false);
    }
    if (strchr("srdixXofegc", directive.type) == NULL || directive.type == '\0') {
        return jinja_fail(formatter->render, IMBREX_STATUS_UNSUPPORTED,
                          "the format directive '%%%c' is not supported", directive.type);
    }
    if (value.kind == JINJA_MISSING) {
        TRY(next_value(formatter, &value));
    }
    if (directive.type == 's' || directive.type == 'r') {
        const struct jinja_string *string;
        struct jinja_text text = {0};
        if (directive.type == 's') {
            TRY(jinja_to_string(formatter->render, &value, &string));
        } else {
            TRY(jinja_append_repr(formatter->render, &text, &value));
            TRY(jinja_text_finish(formatter->render, &text, &string));
        }
        return append_string(formatter, &directive, string);
    }
    if (value.kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(formatter->render, value.as.undefined);
    }
    if (strchr("feg", directive.type) != NULL) {
        return append_real(formatter, &directive, &value);
    }
    return directive.type == 'c' ? append_char(formatter, &directive, &value)
                                 : append_int(formatter, &directive, &value);
}

enum imbrex_status jinja_percent_format(struct jinja_render *render,
                                        const struct jinja_string *format,
                                        const struct jinja_value *values,
                                        struct jinja_value *result)
{
    struct formatter formatter = {.render = render, .format = format, .values = values};
    const struct jinja_string *string;
    while (formatter.position < format->num_bytes) {
        size_t begin = formatter.position;
        const char *percent = memchr(format->bytes + begin, '%', format->num_bytes - begin);
        size_t end = percent == NULL ? format->num_bytes : (size_t)(percent - format->bytes);
        TRY(jinja_charge(render, 1));
        TRY(jinja_text_append_part(render, &formatter.text, format, begin, end));
        formatter.position = end + (percent != NULL);
        if (percent != NULL) {
            TRY(append_directive(&formatter));
        }
    }
    bool may_be_unused = values->kind == JINJA_DICT || values->kind == JINJA_RANGE ||
                         values->kind == JINJA_UNDEFINED ||
                         (jinja_is_sequence(values) && !jinja_is_tuple(values));
    size_t num_values = jinja_is_tuple(values) ? values->as.list->num_items : 1;
    if (!may_be_unused && formatter.num_used < num_values) {
        return fail(&formatter, "not all arguments converted during string formatting");
    }
    TRY(jinja_text_finish(render, &formatter.text, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}
