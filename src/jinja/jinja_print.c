/* SPDX-License-Identifier: Apache-2.0 */
/* Values as text: str() and repr() as Python writes them, and json.dumps(). What is written of a
 * list or object that came whole from input is input, punctuation included. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "jinja/jinja_render.h"

/* ---- numbers --------------------------------------------------------------------------------- */

/* The shortest digits that read back as the same number: real = 0.d1d2d3... x 10^*point. */
static size_t shortest_digits(double real, char digits[24], int *point)
{
    char text[JINJA_FLOAT_BYTES];
    size_t num_digits = 0;
    for (int precision = 0; precision < 17; precision++) {
        /* Reads back what it wrote, so the locale's decimal point does not matter. */
        snprintf(text, sizeof(text), "%.*e", precision, real);
        if (strtod(text, NULL) == real) {
            break;
        }
    }
    const char *c = text;
    for (; *c != '\0' && *c != 'e'; c++) {
        if (*c >= '0' && *c <= '9') {
            digits[num_digits++] = *c;
        }
    }
    *point = (int)strtol(c + (*c == 'e'), NULL, 10) + 1;
    while (num_digits > 1 && digits[num_digits - 1] == '0') {
        num_digits--;
    }
    return num_digits;
}

size_t jinja_format_float(double real, char text[JINJA_FLOAT_BYTES])
{
    if (!isfinite(real)) {
        return (size_t)snprintf(text, JINJA_FLOAT_BYTES, "%s",
                                isnan(real) ? "nan"
                                : real < 0  ? "-inf"
                                            : "inf");
    }
    char digits[24];
    int point;
    size_t used = 0;
    size_t num_digits = shortest_digits(fabs(real), digits, &point);
    if (signbit(real)) {
        text[used++] = '-';
    }
    if (point > -4 && point <= 16) {
        if (point <= 0) {
            text[used++] = '0';
            text[used++] = '.';
            for (int i = point; i < 0; i++) {
                text[used++] = '0';
            }
            memcpy(text + used, digits, num_digits);
            used += num_digits;
        } else {
            for (size_t i = 0; i < num_digits || (int)i <= point; i++) {
                if ((int)i == point) {
                    text[used++] = '.';
                }
                if (i < num_digits || (int)i <= point) {
                    text[used++] = i < num_digits ? digits[i] : '0';
                }
            }
        }
        text[used] = '\0';
        return used;
    }
    text[used++] = digits[0];
    if (num_digits > 1) {
        text[used++] = '.';
        memcpy(text + used, digits + 1, num_digits - 1);
        used += num_digits - 1;
    }
    return used + (size_t)snprintf(text + used, JINJA_FLOAT_BYTES - used, "e%c%02d",
                                   point - 1 < 0 ? '-' : '+', abs(point - 1));
}

bool jinja_parse_float(const char *text, size_t num_bytes, double *real)
{
    char digits[800];
    size_t used = 0, i = 0, num_digits = 0;
    long exponent = 0;
    bool has_point = false;
    if (num_bytes > 700) {
        return false;
    }
    if (i < num_bytes && (text[i] == '-' || text[i] == '+')) {
        digits[used++] = text[i++];
    }
    for (; i < num_bytes && ((text[i] >= '0' && text[i] <= '9') || (text[i] == '.' && !has_point));
         i++) {
        if (text[i] == '.') {
            has_point = true;
        } else {
            digits[used++] = text[i];
            num_digits++;
            exponent -= has_point;
        }
    }
    if (num_digits == 0) {
        return false;
    }
    if (i < num_bytes && (text[i] == 'e' || text[i] == 'E')) {
        i++;
        bool is_negative = i < num_bytes && text[i] == '-';
        i += i < num_bytes && (text[i] == '-' || text[i] == '+');
        long written = 0;
        size_t begin = i;
        for (; i < num_bytes && text[i] >= '0' && text[i] <= '9'; i++) {
            written = written < 100000 ? written * 10 + (text[i] - '0') : written;
        }
        if (i == begin) {
            return false;
        }
        exponent += is_negative ? -written : written;
    }
    if (i != num_bytes) {
        return false;
    }
    /* Without a point in it, the text means the same in every locale. */
    snprintf(digits + used, sizeof(digits) - used, "e%ld", exponent);
    *real = strtod(digits, NULL);
    return true;
}

static enum imbrex_status append_number(struct jinja_render *render, struct jinja_text *text,
                                        const struct jinja_value *value, bool is_input)
{
    char number[JINJA_FLOAT_BYTES];
    size_t num_bytes = value->kind == JINJA_FLOAT ? jinja_format_float(value->as.real, number)
                                                  : (size_t)snprintf(number, sizeof(number), "%lld",
                                                                     (long long)value->as.integer);
    return jinja_text_append(render, text, number, num_bytes, is_input);
}

/* ---- str and repr ---------------------------------------------------------------------------- */

static enum imbrex_status append_literal(struct jinja_render *render, struct jinja_text *text,
                                         const char *literal, bool is_input)
{
    return jinja_text_append(render, text, literal, strlen(literal), is_input);
}

/* str.isprintable() of one character */
static bool is_printable(uint32_t code_point)
{
    switch (utf8proc_category((utf8proc_int32_t)code_point)) {
    case UTF8PROC_CATEGORY_CC:
    case UTF8PROC_CATEGORY_CF:
    case UTF8PROC_CATEGORY_CS:
    case UTF8PROC_CATEGORY_CO:
    case UTF8PROC_CATEGORY_CN:
    case UTF8PROC_CATEGORY_ZL:
    case UTF8PROC_CATEGORY_ZP:
        return false;
    case UTF8PROC_CATEGORY_ZS:
        return code_point == ' ';
    default:
        return true;
    }
}

static enum imbrex_status append_string_repr(struct jinja_render *render, struct jinja_text *text,
                                             const struct jinja_string *string, bool is_input)
{
    bool has_single = memchr(string->bytes, '\'', string->num_bytes) != NULL;
    bool has_double = memchr(string->bytes, '"', string->num_bytes) != NULL;
    char quote = has_single && !has_double ? '"' : '\'';
    struct jinja_part part = {0};
    is_input = is_input || jinja_string_is_input(string);
    TRY(jinja_text_append(render, text, &quote, 1, is_input));
    while (jinja_string_next_part(string, &part)) {
        size_t plain = part.begin; /* what needs no escape, up to here */
        for (size_t i = part.begin; i < part.end;) {
            struct utf8_step step = utf8_next(string->bytes + i, part.end - i);
            char escape[12];
            uint32_t c = step.code_point;
            if (c == (unsigned char)quote || c == '\\') {
                snprintf(escape, sizeof(escape), "\\%c", (char)c);
            } else if (c == '\n' || c == '\r' || c == '\t') {
                snprintf(escape, sizeof(escape), "\\%c", c == '\n' ? 'n' : c == '\r' ? 'r' : 't');
            } else if (c < 0x80 ? c >= 0x20 && c != 0x7f : is_printable(c)) {
                i += step.num_bytes;
                continue;
            } else {
                snprintf(escape, sizeof(escape),
                         c < 0x100     ? "\\x%02x"
                         : c < 0x10000 ? "\\u%04x"
                                       : "\\U%08x",
                         c);
            }
            TRY(jinja_text_append_part(render, text, string, plain, i));
            TRY(append_literal(render, text, escape, part.is_input));
            TRY(jinja_charge(render, 1));
            i += step.num_bytes;
            plain = i;
        }
        TRY(jinja_text_append_part(render, text, string, plain, part.end));
    }
    return jinja_text_append(render, text, &quote, 1, is_input);
}

static enum imbrex_status append_repr(struct jinja_render *render, struct jinja_text *text,
                                      const struct jinja_value *value, bool is_input);

static enum imbrex_status append_list_repr(struct jinja_render *render, struct jinja_text *text,
                                           const struct jinja_list *list, bool is_input)
{
    static const struct {
        const char *open, *close;
    } brackets[] = {{"[", "]"},
                    {"(", ")"},
                    {"(", ")"},
                    {"dict_keys([", "])"},
                    {"dict_values([", "])"},
                    {"dict_items([", "])"},
                    {"<", ">"}};
    is_input |= list->is_input;
    if (list->flavor == JINJA_FLAVOR_GENERATOR) {
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED,
                          "a generator printed as it is; |list makes a list of it");
    }
    bool is_tuple = list->flavor == JINJA_FLAVOR_TUPLE || list->flavor == JINJA_FLAVOR_GROUP;
    TRY(append_literal(render, text, brackets[list->flavor].open, is_input));
    for (size_t i = 0; i < list->num_items; i++) {
        TRY(append_literal(render, text, i == 0 ? "" : ", ", is_input));
        TRY(append_repr(render, text, &list->items[i], is_input));
    }
    TRY(append_literal(render, text, is_tuple && list->num_items == 1 ? "," : "", is_input));
    return append_literal(render, text, brackets[list->flavor].close, is_input);
}

static enum imbrex_status append_dict_repr(struct jinja_render *render, struct jinja_text *text,
                                           const struct jinja_dict *dict, bool is_input)
{
    is_input |= dict->is_input;
    TRY(append_literal(render, text, "{", is_input));
    for (size_t i = 0; i < dict->num_entries; i++) {
        TRY(append_literal(render, text, i == 0 ? "" : ", ", is_input));
        TRY(append_repr(render, text, &dict->entries[i].key, is_input));
        TRY(append_literal(render, text, ": ", is_input));
        TRY(append_repr(render, text, &dict->entries[i].value, is_input));
    }
    return append_literal(render, text, "}", is_input);
}

static enum imbrex_status append_range_repr(struct jinja_render *render, struct jinja_text *text,
                                            const struct jinja_range *range)
{
    char numbers[96];
    snprintf(numbers, sizeof(numbers),
             range->step == 1 ? "range(%lld, %lld)" : "range(%lld, %lld, %lld)",
             (long long)range->start, (long long)range->stop, (long long)range->step);
    return append_literal(render, text, numbers, false);
}

static enum imbrex_status append_macro_repr(struct jinja_render *render, struct jinja_text *text,
                                            const struct jinja_macro *macro)
{
    const struct jinja_string *name = jinja_macro_name(macro);
    TRY(append_literal(render, text, name == NULL ? "<Macro anonymous" : "<Macro ", false));
    if (name != NULL) {
        TRY(append_string_repr(render, text, name, false));
    }
    return append_literal(render, text, ">", false);
}

static enum imbrex_status append_loop_repr(struct jinja_render *render, struct jinja_text *text,
                                           struct jinja_loop *loop)
{
    char numbers[64];
    size_t length;
    TRY(jinja_loop_length(render, loop, &length));
    snprintf(numbers, sizeof(numbers), "<LoopContext %lld/%zu>",
             (long long)jinja_loop_index0(loop) + 1, length);
    return append_literal(render, text, numbers, false);
}

static enum imbrex_status append_repr(struct jinja_render *render, struct jinja_text *text,
                                      const struct jinja_value *value, bool is_input)
{
    TRY(jinja_enter(render));
    switch (value->kind) {
    case JINJA_NONE:
        TRY(append_literal(render, text, "None", is_input));
        break;
    case JINJA_BOOL:
        TRY(append_literal(render, text, value->as.boolean ? "True" : "False", is_input));
        break;
    case JINJA_INT:
    case JINJA_FLOAT:
        TRY(append_number(render, text, value, is_input));
        break;
    case JINJA_STRING:
        if (value->as.string->is_markup) {
            TRY(append_literal(render, text, "Markup(", false));
        }
        TRY(append_string_repr(render, text, value->as.string, is_input));
        if (value->as.string->is_markup) {
            TRY(append_literal(render, text, ")", false));
        }
        break;
    case JINJA_LIST:
        TRY(append_list_repr(render, text, value->as.list, is_input));
        break;
    case JINJA_DICT:
        TRY(append_dict_repr(render, text, value->as.dict, is_input));
        break;
    case JINJA_NAMESPACE:
        TRY(append_literal(render, text, "<Namespace ", false));
        TRY(append_dict_repr(render, text, value->as.dict, false));
        TRY(append_literal(render, text, ">", false));
        break;
    case JINJA_RANGE:
        TRY(append_range_repr(render, text, value->as.range));
        break;
    case JINJA_MACRO:
        TRY(append_macro_repr(render, text, value->as.macro));
        break;
    case JINJA_LOOP:
        TRY(append_loop_repr(render, text, value->as.loop));
        break;
    case JINJA_UNDEFINED:
    case JINJA_MISSING:
        TRY(append_literal(render, text, "Undefined", is_input));
        break;
    default: /* Python prints an address */
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "a %s printed as it is",
                          jinja_type_name(value));
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_append_repr(struct jinja_render *render, struct jinja_text *text,
                                     const struct jinja_value *value)
{
    return append_repr(render, text, value, false);
}

enum imbrex_status jinja_append_value(struct jinja_render *render, struct jinja_text *text,
                                      const struct jinja_value *value)
{
    if (value->kind == JINJA_STRING) {
        return jinja_text_append_string(render, text, value->as.string);
    }
    if (value->kind == JINJA_UNDEFINED || value->kind == JINJA_MISSING) {
        return IMBREX_STATUS_OK;
    }
    return append_repr(render, text, value, false);
}

enum imbrex_status jinja_to_string(struct jinja_render *render, const struct jinja_value *value,
                                   const struct jinja_string **string)
{
    if (value->kind == JINJA_STRING) {
        *string = value->as.string;
        return IMBREX_STATUS_OK;
    }
    struct jinja_text text = {0};
    TRY(jinja_append_value(render, &text, value));
    return jinja_text_finish(render, &text, string);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

struct json_writer {
    struct jinja_render *render;
    struct jinja_text text;
    const struct jinja_json_style *style;
    size_t level;
};

static enum imbrex_status write_literal(struct json_writer *writer, const char *literal,
                                        bool is_input)
{
    return append_literal(writer->render, &writer->text, literal, is_input);
}

static enum imbrex_status write_escape(struct json_writer *writer, uint32_t code_point,
                                       bool is_input)
{
    static const char letters[] = "\"\\\b\f\n\r\t", names[] = "\"\\bfnrt";
    char escape[16];
    const char *letter =
        code_point != 0 && code_point < 0x80 ? strchr(letters, (int)code_point) : NULL;
    TRY(jinja_charge(writer->render, 1));
    if (letter != NULL) {
        snprintf(escape, sizeof(escape), "\\%c", names[letter - letters]);
    } else if (code_point < 0x10000) {
        snprintf(escape, sizeof(escape), "\\u%04x", code_point);
    } else {
        uint32_t rest = code_point - 0x10000;
        snprintf(escape, sizeof(escape), "\\u%04x\\u%04x", 0xd800 + (rest >> 10),
                 0xdc00 + (rest & 0x3ff));
    }
    return write_literal(writer, escape, is_input);
}

static enum imbrex_status write_string(struct json_writer *writer,
                                       const struct jinja_string *string, bool is_input)
{
    struct jinja_part part = {0};
    bool escapes_non_ascii = writer->style->escapes_non_ascii;
    is_input = is_input || jinja_string_is_input(string);
    TRY(write_literal(writer, "\"", is_input));
    while (jinja_string_next_part(string, &part)) {
        size_t plain = part.begin;
        for (size_t i = part.begin; i < part.end;) {
            struct utf8_step step = utf8_next(string->bytes + i, part.end - i);
            uint32_t c = step.code_point;
            if (c >= 0x20 && c != '"' && c != '\\' && (!escapes_non_ascii || c < 0x7f)) {
                i += step.num_bytes;
                continue;
            }
            TRY(jinja_text_append_part(writer->render, &writer->text, string, plain, i));
            TRY(write_escape(writer, c, part.is_input));
            i += step.num_bytes;
            plain = i;
        }
        TRY(jinja_text_append_part(writer->render, &writer->text, string, plain, part.end));
    }
    return write_literal(writer, "\"", is_input);
}

static enum imbrex_status write_indent(struct json_writer *writer, bool is_input)
{
    if (writer->style->indent == NULL) {
        return IMBREX_STATUS_OK;
    }
    TRY(write_literal(writer, "\n", is_input));
    for (size_t i = 0; i < writer->level; i++) {
        TRY(jinja_charge(writer->render, 1));
        const struct jinja_string *indent = writer->style->indent;
        TRY(jinja_text_append(writer->render, &writer->text, indent->bytes, indent->num_bytes,
                              is_input));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status write_value(struct json_writer *writer, const struct jinja_value *value,
                                      bool is_input);

/* The comma and newline before an item, or the newline before the first one. */
static enum imbrex_status write_separator(struct json_writer *writer, size_t item_idx,
                                          bool is_input)
{
    if (item_idx != 0) {
        const struct jinja_string *separator = writer->style->item_separator;
        TRY(jinja_text_append(writer->render, &writer->text, separator->bytes, separator->num_bytes,
                              is_input));
    }
    return write_indent(writer, is_input);
}

static enum imbrex_status write_list(struct json_writer *writer, const struct jinja_list *list,
                                     bool is_input)
{
    is_input |= list->is_input;
    if (list->num_items == 0) {
        return write_literal(writer, "[]", is_input);
    }
    TRY(write_literal(writer, "[", is_input));
    writer->level++;
    for (size_t i = 0; i < list->num_items; i++) {
        TRY(write_separator(writer, i, is_input));
        TRY(write_value(writer, &list->items[i], is_input));
    }
    writer->level--;
    TRY(write_indent(writer, is_input));
    return write_literal(writer, "]", is_input);
}

static enum imbrex_status write_key(struct json_writer *writer, const struct jinja_value *key,
                                    bool is_input)
{
    const struct jinja_string *string;
    switch (key->kind) {
    case JINJA_STRING:
        return write_string(writer, key->as.string, is_input);
    case JINJA_NONE:
    case JINJA_BOOL:
        return write_literal(writer,
                             key->kind == JINJA_NONE ? "\"null\""
                             : key->as.boolean       ? "\"true\""
                                                     : "\"false\"",
                             is_input);
    case JINJA_INT:
    case JINJA_FLOAT:
        TRY(jinja_to_string(writer->render, key, &string));
        return write_string(writer, string, is_input);
    default:
        return jinja_fail(writer->render, IMBREX_STATUS_FORMAT,
                          "keys must be str, int, float, bool or None, not %s",
                          jinja_type_name(key));
    }
}

static enum imbrex_status write_dict(struct json_writer *writer, const struct jinja_dict *dict,
                                     bool is_input)
{
    is_input |= dict->is_input;
    if (dict->num_entries == 0) {
        return write_literal(writer, "{}", is_input);
    }
    struct jinja_value *keys, *values;
    TRY(jinja_take(writer->render, dict->num_entries, sizeof(*keys), &keys));
    TRY(jinja_take(writer->render, dict->num_entries, sizeof(*values), &values));
    for (size_t i = 0; i < dict->num_entries; i++) {
        keys[i] = dict->entries[i].key;
        values[i] = dict->entries[i].value;
    }
    if (writer->style->sorts_keys) {
        TRY(jinja_sort(writer->render, values, keys, dict->num_entries, false));
    }
    TRY(write_literal(writer, "{", is_input));
    writer->level++;
    for (size_t i = 0; i < dict->num_entries; i++) {
        const struct jinja_string *separator = writer->style->key_separator;
        TRY(write_separator(writer, i, is_input));
        TRY(write_key(writer, &keys[i], is_input));
        TRY(jinja_text_append(writer->render, &writer->text, separator->bytes, separator->num_bytes,
                              is_input));
        TRY(write_value(writer, &values[i], is_input));
    }
    writer->level--;
    TRY(write_indent(writer, is_input));
    return write_literal(writer, "}", is_input);
}

static enum imbrex_status write_value(struct json_writer *writer, const struct jinja_value *value,
                                      bool is_input)
{
    TRY(jinja_enter(writer->render));
    switch (value->kind) {
    case JINJA_NONE:
        TRY(write_literal(writer, "null", is_input));
        break;
    case JINJA_BOOL:
        TRY(write_literal(writer, value->as.boolean ? "true" : "false", is_input));
        break;
    case JINJA_FLOAT:
        if (!isfinite(value->as.real)) {
            TRY(write_literal(writer,
                              isnan(value->as.real) ? "NaN"
                              : value->as.real < 0  ? "-Infinity"
                                                    : "Infinity",
                              is_input));
            break;
        }
        TRY(append_number(writer->render, &writer->text, value, is_input));
        break;
    case JINJA_INT:
        TRY(append_number(writer->render, &writer->text, value, is_input));
        break;
    case JINJA_STRING:
        TRY(write_string(writer, value->as.string, is_input));
        break;
    case JINJA_DICT:
        TRY(write_dict(writer, value->as.dict, is_input));
        break;
    default:
        if (!jinja_is_sequence(value)) {
            return jinja_fail(writer->render, IMBREX_STATUS_FORMAT,
                              "Object of type %s is not JSON serializable", jinja_type_name(value));
        }
        TRY(write_list(writer, value->as.list, is_input));
        break;
    }
    jinja_leave(writer->render);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_to_json(struct jinja_render *render, const struct jinja_value *value,
                                 const struct jinja_json_style *style,
                                 const struct jinja_string **json)
{
    struct json_writer writer = {.render = render, .style = style};
    TRY(write_value(&writer, value, false));
    return jinja_text_finish(render, &writer.text, json);
}
