/* SPDX-License-Identifier: Apache-2.0 */
/* Methods of strings, dicts, lists, tuples and cyclers. Those that change their object are what the
 * sandbox forbids; those that Python has and imbrex has not are refused by name. */
#include <string.h>
#include <utf8proc.h>

#include "base/utf8.h"
#include "jinja/jinja_render.h"

static enum imbrex_status wrong_type(struct jinja_render *render, const struct jinja_call *call,
                                     const char *expected, const struct jinja_value *found)
{
    if (found->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, found->as.undefined);
    }
    return jinja_fail(render, IMBREX_STATUS_FORMAT, "the method '%s' expects %s, found %s",
                      call->entry->name, expected, jinja_type_name(found));
}

static enum imbrex_status string_arg(struct jinja_render *render, const struct jinja_call *call,
                                     int arg_idx, const struct jinja_string **string)
{
    const struct jinja_value *arg = &call->args[arg_idx];
    bool is_string = arg->kind == JINJA_STRING;
    *string = is_string ? arg->as.string : &jinja_string_empty;
    return is_string ? IMBREX_STATUS_OK : wrong_type(render, call, "a string", arg);
}

/* An int; `absent` if it was not given, or is none. */
static enum imbrex_status int_arg(struct jinja_render *render, const struct jinja_call *call,
                                  int arg_idx, int64_t absent, int64_t *integer)
{
    const struct jinja_value *arg = &call->args[arg_idx];
    *integer = absent;
    if (arg->kind == JINJA_MISSING || arg->kind == JINJA_NONE) {
        return IMBREX_STATUS_OK;
    }
    return jinja_as_int(arg, integer) ? IMBREX_STATUS_OK : wrong_type(render, call, "an int", arg);
}

static enum imbrex_status return_string(struct jinja_value *result,
                                        const struct jinja_string *string)
{
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

/* ---- case, white space, padding -------------------------------------------------------------- */

static enum imbrex_status str_recase(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    const struct jinja_string *string;
    TRY(jinja_string_recase(render, call->self.as.string, (enum jinja_case)call->entry->variant,
                            &string));
    return return_string(result, string);
}

static enum imbrex_status str_strip(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_string *chars = NULL, *string;
    if (call->args[0].kind != JINJA_MISSING && call->args[0].kind != JINJA_NONE) {
        TRY(string_arg(render, call, 0, &chars));
    }
    TRY(jinja_string_strip(render, call->self.as.string, chars, (unsigned)call->entry->variant,
                           &string));
    return return_string(result, string);
}

enum imbrex_status jinja_string_pad(struct jinja_render *render, const struct jinja_string *string,
                                    size_t num_before, size_t num_after,
                                    const struct jinja_string *fill,
                                    const struct jinja_string **padded)
{
    struct jinja_text text = {0};
    TRY(jinja_text_append_repeated(render, &text, fill, num_before));
    TRY(jinja_text_append_string(render, &text, string));
    TRY(jinja_text_append_repeated(render, &text, fill, num_after));
    return jinja_text_finish(render, &text, padded);
}

enum pad { PAD_CENTER, PAD_LEFT, PAD_RIGHT };

static enum imbrex_status str_pad(struct jinja_render *render, const struct jinja_call *call,
                                  struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string space = {
        .bytes = " ", .num_bytes = 1, .num_chars = 1, .runs = &run};
    const struct jinja_string *string = call->self.as.string, *fill = &space;
    int64_t width;
    TRY(int_arg(render, call, 0, 0, &width));
    if (call->args[1].kind != JINJA_MISSING) {
        TRY(string_arg(render, call, 1, &fill));
        if (fill->num_chars != 1) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "the fill character must be exactly one character long");
        }
    }
    if (width <= (int64_t)string->num_chars) {
        return return_string(result, string);
    }
    size_t num_fills = (size_t)width - string->num_chars;
    size_t num_before = call->entry->variant == PAD_RIGHT  ? num_fills
                        : call->entry->variant == PAD_LEFT ? 0
                                                           : num_fills / 2;
    /* Python puts the odd one on the left if the width is odd */
    num_before += call->entry->variant == PAD_CENTER && num_fills % 2 == 1 && width % 2 == 1;
    TRY(jinja_string_pad(render, string, num_before, num_fills - num_before, fill, &string));
    return return_string(result, string);
}

static enum imbrex_status str_zfill(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string zero = {
        .bytes = "0", .num_bytes = 1, .num_chars = 1, .runs = &run};
    const struct jinja_string *string = call->self.as.string, *sign, *rest;
    int64_t width;
    TRY(int_arg(render, call, 0, 0, &width));
    if (width <= (int64_t)string->num_chars) {
        return return_string(result, string);
    }
    bool has_sign = string->num_bytes != 0 && (string->bytes[0] == '-' || string->bytes[0] == '+');
    size_t num_zeros = (size_t)width - string->num_chars;
    TRY(jinja_string_cut(render, string, 0, has_sign, &sign));
    TRY(jinja_string_cut(render, string, has_sign, string->num_bytes, &rest));
    TRY(jinja_string_pad(render, rest, num_zeros, 0, &zero, &rest));
    TRY(jinja_string_concat(render, sign, rest, &string));
    return return_string(result, string);
}

/* ---- searching ------------------------------------------------------------------------------- */

/* The bytes of characters [start, end), arguments arg_idx and arg_idx + 1. False if start lies
 * behind the end of the string. */
static enum imbrex_status range_args(struct jinja_render *render, const struct jinja_call *call,
                                     int arg_idx, size_t *begin, size_t *end, bool *is_inside)
{
    const struct jinja_string *string = call->self.as.string;
    int64_t num_chars = (int64_t)string->num_chars, first, last;
    TRY(int_arg(render, call, arg_idx, 0, &first));
    TRY(int_arg(render, call, arg_idx + 1, num_chars, &last));
    first = first < -num_chars ? 0 : first < 0 ? first + num_chars : first;
    last = last < -num_chars  ? 0
           : last < 0         ? last + num_chars
           : last > num_chars ? num_chars
                              : last;
    *is_inside = first <= num_chars && first <= last;
    *begin = jinja_string_char_offset(string, (size_t)first);
    *end = jinja_string_char_offset(string, (size_t)last);
    return jinja_charge_bytes(render, string->num_bytes);
}

/* Last offset in [begin, end) where the needle stands, or SIZE_MAX. */
static size_t find_last(const struct jinja_string *string, size_t begin, size_t end,
                        const struct jinja_string *needle)
{
    size_t found = SIZE_MAX;
    if (needle->num_bytes == 0) {
        return end;
    }
    /* from match to match; memmem is linear, so only overlapping matches cost again */
    for (size_t i = begin; i + needle->num_bytes <= end;) {
        const char *match = memmem(string->bytes + i, end - i, needle->bytes, needle->num_bytes);
        if (match == NULL) {
            break;
        }
        found = (size_t)(match - string->bytes);
        i = found + 1;
    }
    return found;
}

enum search { SEARCH_FIND, SEARCH_RFIND, SEARCH_INDEX, SEARCH_RINDEX };

static enum imbrex_status str_find(struct jinja_render *render, const struct jinja_call *call,
                                   struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string, *needle;
    size_t begin, end, found = SIZE_MAX;
    bool is_inside;
    TRY(string_arg(render, call, 0, &needle));
    TRY(range_args(render, call, 1, &begin, &end, &is_inside));
    bool is_last = call->entry->variant == SEARCH_RFIND || call->entry->variant == SEARCH_RINDEX;
    if (is_inside && is_last) {
        size_t work;
        if (__builtin_mul_overflow(string->num_bytes, needle->num_bytes / 8 + 1, &work)) {
            work = SIZE_MAX;
        }
        TRY(jinja_charge_bytes(render, work));
        found = find_last(string, begin, end, needle);
    } else if (is_inside) {
        const char *match =
            memmem(string->bytes + begin, end - begin, needle->bytes, needle->num_bytes);
        found = match == NULL ? SIZE_MAX : (size_t)(match - string->bytes);
    }
    bool must_find = call->entry->variant == SEARCH_INDEX || call->entry->variant == SEARCH_RINDEX;
    if (found == SIZE_MAX && must_find) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "substring not found");
    }
    *result = jinja_int(found == SIZE_MAX ? -1 : (int64_t)jinja_count_chars(string->bytes, found));
    return IMBREX_STATUS_OK;
}

static enum imbrex_status str_count(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string, *needle;
    size_t begin, end;
    int64_t count = 0;
    bool is_inside;
    TRY(string_arg(render, call, 0, &needle));
    TRY(range_args(render, call, 1, &begin, &end, &is_inside));
    if (is_inside && needle->num_bytes == 0) {
        count = (int64_t)jinja_count_chars(string->bytes + begin, end - begin) + 1;
    }
    while (is_inside && needle->num_bytes != 0) {
        const char *match =
            memmem(string->bytes + begin, end - begin, needle->bytes, needle->num_bytes);
        if (match == NULL) {
            break;
        }
        TRY(jinja_charge(render, 1));
        count++;
        begin = (size_t)(match - string->bytes) + needle->num_bytes;
    }
    *result = jinja_int(count);
    return IMBREX_STATUS_OK;
}

static bool has_affix(const struct jinja_string *string, size_t begin, size_t end,
                      const struct jinja_string *affix, bool is_suffix)
{
    if (end - begin < affix->num_bytes) {
        return false;
    }
    size_t at = is_suffix ? end - affix->num_bytes : begin;
    return memcmp(string->bytes + at, affix->bytes, affix->num_bytes) == 0;
}

/* startswith and endswith; variant: is_suffix */
static enum imbrex_status str_affix(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string;
    const struct jinja_value *affixes = &call->args[0];
    size_t begin, end, num_affixes = 1;
    bool is_inside, has = false;
    TRY(range_args(render, call, 1, &begin, &end, &is_inside));
    if (jinja_is_tuple(&call->args[0])) {
        num_affixes = affixes->as.list->num_items;
        affixes = affixes->as.list->items;
    }
    for (size_t i = 0; i < num_affixes && !has; i++) {
        TRY(jinja_charge(render, 1));
        if (affixes[i].kind != JINJA_STRING) {
            return wrong_type(render, call, "a string or a tuple of strings", &affixes[i]);
        }
        has = is_inside &&
              has_affix(string, begin, end, affixes[i].as.string, call->entry->variant != 0);
    }
    *result = jinja_bool(has);
    return IMBREX_STATUS_OK;
}

/* removeprefix and removesuffix; variant: is_suffix */
static enum imbrex_status str_remove_affix(struct jinja_render *render,
                                           const struct jinja_call *call,
                                           struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string, *affix;
    bool is_suffix = call->entry->variant != 0;
    TRY(string_arg(render, call, 0, &affix));
    if (has_affix(string, 0, string->num_bytes, affix, is_suffix)) {
        TRY(jinja_string_cut(render, string, is_suffix ? 0 : affix->num_bytes,
                             is_suffix ? string->num_bytes - affix->num_bytes : string->num_bytes,
                             &string));
    }
    return return_string(result, string);
}

/* ---- splitting and joining ------------------------------------------------------------------- */

static enum imbrex_status append_cut(struct jinja_render *render, struct jinja_list *list,
                                     const struct jinja_string *string, size_t begin, size_t end)
{
    const struct jinja_string *cut;
    TRY(jinja_string_cut(render, string, begin, end, &cut));
    return jinja_list_append(render, list, jinja_string_value(cut));
}

static void reverse(struct jinja_list *list)
{
    for (size_t i = 0, j = list->num_items; i + 1 < j; i++) {
        struct jinja_value item = list->items[i];
        list->items[i] = list->items[--j];
        list->items[j] = item;
    }
}

/* The stretch of characters in [begin, end) from the left or right that are white space, or not. */
static size_t skip_kind(const struct jinja_string *string, size_t begin, size_t end, bool is_space,
                        bool from_right)
{
    while (begin < end) {
        size_t at = from_right ? end - 1 : begin;
        while (from_right && at > begin && ((unsigned char)string->bytes[at] & 0xc0) == 0x80) {
            at--;
        }
        struct utf8_step step = utf8_next(string->bytes + at, end - at);
        if (jinja_is_space(step.code_point) != is_space) {
            break;
        }
        if (from_right) {
            end = at;
        } else {
            begin += step.num_bytes;
        }
    }
    return from_right ? end : begin;
}

/* split() and rsplit() without a separator: at runs of white space. */
static enum imbrex_status split_space(struct jinja_render *render,
                                      const struct jinja_string *string, int64_t max_splits,
                                      bool from_right, struct jinja_list *list)
{
    size_t begin = 0, end = string->num_bytes;
    for (;;) {
        size_t edge = skip_kind(string, begin, end, true, from_right);
        begin = from_right ? begin : edge;
        end = from_right ? edge : end;
        if (begin >= end) {
            break;
        }
        if (max_splits-- == 0) { /* the rest as it is, white space at its far end included */
            TRY(append_cut(render, list, string, begin, end));
            break;
        }
        edge = skip_kind(string, begin, end, false, from_right);
        TRY(append_cut(render, list, string, from_right ? edge : begin, from_right ? end : edge));
        begin = from_right ? begin : edge;
        end = from_right ? edge : end;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status split_at(struct jinja_render *render, const struct jinja_string *string,
                                   const struct jinja_string *separator, int64_t max_splits,
                                   struct jinja_list *list)
{
    size_t begin = 0;
    for (int64_t i = 0; max_splits < 0 || i < max_splits; i++) {
        size_t found = jinja_string_find(string, begin, separator);
        if (found == SIZE_MAX) {
            break;
        }
        TRY(append_cut(render, list, string, begin, found));
        begin = found + separator->num_bytes;
    }
    return append_cut(render, list, string, begin, string->num_bytes);
}

/* Where the separators stand that a search from the right finds, without overlaps. */
static enum imbrex_status rsplit_at(struct jinja_render *render, const struct jinja_string *string,
                                    const struct jinja_string *separator, int64_t max_splits,
                                    struct jinja_list *list)
{
    size_t end = string->num_bytes;
    size_t last = separator->num_bytes - 1;
    for (size_t i = end; i >= separator->num_bytes && max_splits != 0;) {
        bool is_match = string->bytes[i - 1] == separator->bytes[last] &&
                        memcmp(string->bytes + i - separator->num_bytes, separator->bytes,
                               separator->num_bytes) == 0;
        TRY(jinja_charge(render, string->bytes[i - 1] == separator->bytes[last]
                                     ? separator->num_bytes / 64 + 1
                                     : 0));
        if (!is_match) {
            i--;
            continue;
        }
        TRY(append_cut(render, list, string, i, end));
        end = i -= separator->num_bytes;
        max_splits--;
    }
    return append_cut(render, list, string, 0, end);
}

/* split and rsplit; variant: from_right */
static enum imbrex_status str_split(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string, *separator;
    bool from_right = call->entry->variant != 0;
    int64_t max_splits;
    struct jinja_list *list;
    TRY(int_arg(render, call, 1, -1, &max_splits));
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &list));
    TRY(jinja_charge_bytes(render, string->num_bytes));
    if (call->args[0].kind == JINJA_MISSING || call->args[0].kind == JINJA_NONE) {
        TRY(split_space(render, string, max_splits < 0 ? -1 : max_splits, from_right, list));
    } else {
        TRY(string_arg(render, call, 0, &separator));
        if (separator->num_bytes == 0) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "empty separator");
        }
        TRY(from_right ? rsplit_at(render, string, separator, max_splits, list)
                       : split_at(render, string, separator, max_splits, list));
    }
    if (from_right) {
        reverse(list);
    }
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

/* Bytes of the line break at the position, 0 if there is none. */
static size_t line_break(const struct jinja_string *string, size_t position)
{
    struct utf8_step step = utf8_next(string->bytes + position, string->num_bytes - position);
    uint32_t c = step.code_point;
    if (c == '\r' && position + 1 < string->num_bytes && string->bytes[position + 1] == '\n') {
        return 2;
    }
    bool is_break = (c >= 0x0a && c <= 0x0d) || (c >= 0x1c && c <= 0x1e) || c == 0x85 ||
                    c == 0x2028 || c == 0x2029;
    return is_break ? step.num_bytes : 0;
}

enum imbrex_status jinja_split_lines(struct jinja_render *render, const struct jinja_string *string,
                                     bool keeps_ends, struct jinja_list **list_out)
{
    struct jinja_list *list;
    size_t begin = 0;
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &list));
    TRY(jinja_charge_bytes(render, string->num_bytes));
    for (size_t i = 0; i < string->num_bytes;) {
        size_t break_bytes = line_break(string, i);
        if (break_bytes == 0) {
            i += utf8_next(string->bytes + i, string->num_bytes - i).num_bytes;
            continue;
        }
        TRY(append_cut(render, list, string, begin, i + (keeps_ends ? break_bytes : 0)));
        begin = i += break_bytes;
    }
    if (begin < string->num_bytes) {
        TRY(append_cut(render, list, string, begin, string->num_bytes));
    }
    *list_out = list;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status str_splitlines(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    struct jinja_list *list;
    TRY(jinja_split_lines(render, call->self.as.string, jinja_truth(&call->args[0]), &list));
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

/* partition and rpartition; variant: from_right */
static enum imbrex_status str_partition(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string, *separator;
    struct jinja_list *list;
    bool from_right = call->entry->variant != 0;
    TRY(string_arg(render, call, 0, &separator));
    if (separator->num_bytes == 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "empty separator");
    }
    size_t work;
    if (__builtin_mul_overflow(string->num_bytes, separator->num_bytes / 8 + 1, &work)) {
        work = SIZE_MAX;
    }
    TRY(jinja_charge_bytes(render, work));
    size_t found = from_right ? find_last(string, 0, string->num_bytes, separator)
                              : jinja_string_find(string, 0, separator);
    size_t end = string->num_bytes;
    size_t edges[4] = {0, end, end, end};
    if (found != SIZE_MAX) {
        edges[1] = found;
        edges[2] = found + separator->num_bytes;
    } else if (from_right) {
        edges[1] = edges[2] = 0;
    }
    TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 3, &list));
    for (int i = 0; i < 3; i++) {
        TRY(append_cut(render, list, string, edges[i], edges[i + 1]));
    }
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status str_join(struct jinja_render *render, const struct jinja_call *call,
                                   struct jinja_value *result)
{
    struct jinja_text text = {0};
    struct jinja_iterator iterator;
    struct jinja_value item;
    bool has_item;
    const struct jinja_string *string;
    TRY(jinja_iterate(render, &call->args[0], &iterator));
    for (size_t i = 0;; i++) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            break;
        }
        if (item.kind != JINJA_STRING) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "sequence item %zu: expected str instance, %s found", i,
                              jinja_type_name(&item));
        }
        if (i != 0) {
            TRY(jinja_text_append_string(render, &text, call->self.as.string));
        }
        TRY(jinja_text_append_string(render, &text, item.as.string));
    }
    TRY(jinja_text_finish(render, &text, &string));
    return return_string(result, string);
}

static enum imbrex_status str_replace(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    const struct jinja_string *old, *replacement, *string;
    int64_t count;
    TRY(string_arg(render, call, 0, &old));
    TRY(string_arg(render, call, 1, &replacement));
    TRY(int_arg(render, call, 2, -1, &count));
    TRY(jinja_string_replace(render, call->self.as.string, old, replacement, count, &string));
    return return_string(result, string);
}

/* ---- classes of characters ------------------------------------------------------------------- */

enum char_class { CLASS_ALPHA, CLASS_DECIMAL, CLASS_ALNUM, CLASS_SPACE, CLASS_ASCII };

static bool is_in_class(uint32_t c, enum char_class class)
{
    utf8proc_category_t category = utf8proc_category((utf8proc_int32_t)c);
    bool is_alpha = category >= UTF8PROC_CATEGORY_LU && category <= UTF8PROC_CATEGORY_LO;
    switch (class) {
    case CLASS_ALPHA:
        return is_alpha;
    case CLASS_DECIMAL:
        return category == UTF8PROC_CATEGORY_ND;
    case CLASS_ALNUM:
        return is_alpha || category == UTF8PROC_CATEGORY_ND || category == UTF8PROC_CATEGORY_NL ||
               category == UTF8PROC_CATEGORY_NO;
    case CLASS_SPACE:
        return jinja_is_space(c);
    default:
        return c < 0x80;
    }
}

/* isalpha, isdecimal, isdigit, isalnum, isspace, isascii */
static enum imbrex_status str_is_class(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    const struct jinja_string *string = call->self.as.string;
    enum char_class class = (enum char_class)call->entry->variant;
    bool holds = string->num_bytes != 0 || class == CLASS_ASCII;
    TRY(jinja_charge_bytes(render, string->num_bytes));
    for (size_t i = 0; holds && i < string->num_bytes;) {
        struct utf8_step step = utf8_next(string->bytes + i, string->num_bytes - i);
        holds = is_in_class(step.code_point, class);
        i += step.num_bytes;
    }
    *result = jinja_bool(holds);
    return IMBREX_STATUS_OK;
}

bool jinja_string_has_case(const struct jinja_string *string, bool is_upper)
{
    bool has_cased = false;
    for (size_t i = 0; i < string->num_bytes;) {
        struct utf8_step step = utf8_next(string->bytes + i, string->num_bytes - i);
        utf8proc_int32_t c = (utf8proc_int32_t)step.code_point;
        bool has_wrong_case = is_upper ? utf8proc_islower(c) != 0 : utf8proc_isupper(c) != 0;
        if (has_wrong_case || utf8proc_category(c) == UTF8PROC_CATEGORY_LT) {
            return false;
        }
        has_cased |= is_upper ? utf8proc_isupper(c) != 0 : utf8proc_islower(c) != 0;
        i += step.num_bytes;
    }
    return has_cased;
}

/* islower and isupper; variant: is_upper */
static enum imbrex_status str_has_case(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    TRY(jinja_charge_bytes(render, call->self.as.string->num_bytes));
    *result = jinja_bool(jinja_string_has_case(call->self.as.string, call->entry->variant != 0));
    return IMBREX_STATUS_OK;
}

/* ---- dicts, lists, cyclers ------------------------------------------------------------------- */

/* keys, values and items; variant: the flavor */
enum imbrex_status jinja_dict_view(struct jinja_render *render, const struct jinja_dict *dict,
                                   enum jinja_flavor flavor, struct jinja_value *view)
{
    struct jinja_list *list;
    TRY(jinja_list_new(render, flavor, dict->num_entries, &list));
    list->is_input = dict->is_input;
    for (size_t i = 0; i < dict->num_entries; i++) {
        const struct jinja_entry *entry = &dict->entries[i];
        struct jinja_value item = flavor == JINJA_FLAVOR_KEYS ? entry->key : entry->value;
        if (flavor == JINJA_FLAVOR_ITEMS) {
            TRY(jinja_pair_new(render, entry->key, entry->value, &item));
        }
        TRY(jinja_list_append(render, list, item));
    }
    *view = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status dict_view(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    return jinja_dict_view(render, call->self.as.dict, (enum jinja_flavor)call->entry->variant,
                           result);
}

static enum imbrex_status dict_get(struct jinja_render *render, const struct jinja_call *call,
                                   struct jinja_value *result)
{
    const struct jinja_value *found;
    TRY(jinja_dict_get(render, call->self.as.dict, &call->args[0], &found));
    *result = found != NULL                         ? *found
              : call->args[1].kind == JINJA_MISSING ? jinja_none()
                                                    : call->args[1];
    return IMBREX_STATUS_OK;
}

/* copy() of a dict or list: nothing can change the original, so it is as good */
static enum imbrex_status any_copy(struct jinja_render *render, const struct jinja_call *call,
                                   struct jinja_value *result)
{
    (void)render;
    *result = call->self;
    return IMBREX_STATUS_OK;
}

/* count and index; variant: is_index */
static enum imbrex_status list_find(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    const struct jinja_list *list = call->self.as.list;
    int64_t count = 0, num_items = (int64_t)list->num_items, first, last;
    TRY(int_arg(render, call, 1, 0, &first));
    TRY(int_arg(render, call, 2, num_items, &last));
    first = first < -num_items ? 0 : first < 0 ? first + num_items : first;
    last = last < -num_items  ? 0
           : last < 0         ? last + num_items
           : last > num_items ? num_items
                              : last;
    for (int64_t i = first; i < last; i++) {
        bool is_equal;
        TRY(jinja_charge(render, 1));
        TRY(jinja_equal(render, &list->items[i], &call->args[0], &is_equal));
        count += is_equal;
        if (is_equal && call->entry->variant != 0) {
            *result = jinja_int(i);
            return IMBREX_STATUS_OK;
        }
    }
    if (call->entry->variant != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "the value is not in the list");
    }
    *result = jinja_int(count);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cycler_next(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_cycler *cycler = call->self.as.cycler;
    (void)render;
    *result = cycler->items->items[cycler->position];
    cycler->position = (cycler->position + 1) % cycler->items->num_items;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cycler_reset(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    (void)render;
    call->self.as.cycler->position = 0;
    *result = jinja_none();
    return IMBREX_STATUS_OK;
}

/* ---- tables ---------------------------------------------------------------------------------- */

static const struct jinja_entry_point str_methods[] = {
    {"capitalize", str_recase, "", 0, JINJA_CASE_CAPITALIZE, false},
    {"casefold", NULL, "", 0, 0, false},
    {"center", str_pad, "width,fillchar", 1, PAD_CENTER, false},
    {"count", str_count, "sub,start,end", 1, 0, false},
    {"encode", NULL, "", 0, 0, false},
    {"endswith", str_affix, "suffix,start,end", 1, 1, false},
    {"expandtabs", NULL, "", 0, 0, false},
    {"find", str_find, "sub,start,end", 1, SEARCH_FIND, false},
    {"format", NULL, "", 0, 0, false},
    {"format_map", NULL, "", 0, 0, false},
    {"index", str_find, "sub,start,end", 1, SEARCH_INDEX, false},
    {"isalnum", str_is_class, "", 0, CLASS_ALNUM, false},
    {"isalpha", str_is_class, "", 0, CLASS_ALPHA, false},
    {"isascii", str_is_class, "", 0, CLASS_ASCII, false},
    {"isdecimal", str_is_class, "", 0, CLASS_DECIMAL, false},
    {"isdigit", str_is_class, "", 0, CLASS_DECIMAL, false},
    {"isidentifier", NULL, "", 0, 0, false},
    {"islower", str_has_case, "", 0, 0, false},
    {"isnumeric", NULL, "", 0, 0, false},
    {"isprintable", NULL, "", 0, 0, false},
    {"isspace", str_is_class, "", 0, CLASS_SPACE, false},
    {"istitle", NULL, "", 0, 0, false},
    {"isupper", str_has_case, "", 0, 1, false},
    {"join", str_join, "iterable", 1, 0, false},
    {"ljust", str_pad, "width,fillchar", 1, PAD_LEFT, false},
    {"lower", str_recase, "", 0, JINJA_CASE_LOWER, false},
    {"lstrip", str_strip, "chars", 0, 1, false},
    {"maketrans", NULL, "", 0, 0, false},
    {"partition", str_partition, "sep", 1, 0, false},
    {"removeprefix", str_remove_affix, "prefix", 1, 0, false},
    {"removesuffix", str_remove_affix, "suffix", 1, 1, false},
    {"replace", str_replace, "old,new,count", 2, 0, false},
    {"rfind", str_find, "sub,start,end", 1, SEARCH_RFIND, false},
    {"rindex", str_find, "sub,start,end", 1, SEARCH_RINDEX, false},
    {"rjust", str_pad, "width,fillchar", 1, PAD_RIGHT, false},
    {"rpartition", str_partition, "sep", 1, 1, false},
    {"rsplit", str_split, "sep,maxsplit", 0, 1, false},
    {"rstrip", str_strip, "chars", 0, 2, false},
    {"split", str_split, "sep,maxsplit", 0, 0, false},
    {"splitlines", str_splitlines, "keepends", 0, 0, false},
    {"startswith", str_affix, "prefix,start,end", 1, 0, false},
    {"strip", str_strip, "chars", 0, 3, false},
    {"swapcase", NULL, "", 0, 0, false},
    {"title", str_recase, "", 0, JINJA_CASE_TITLE, false},
    {"translate", NULL, "", 0, 0, false},
    {"upper", str_recase, "", 0, JINJA_CASE_UPPER, false},
    {"zfill", str_zfill, "width", 1, 0, false},
    {NULL, NULL, NULL, 0, 0, false},
};

static const struct jinja_entry_point dict_methods[] = {
    {"copy", any_copy, "", 0, 0, false},
    {"fromkeys", NULL, "", 0, 0, false},
    {"get", dict_get, "key,default", 1, 0, false},
    {"items", dict_view, "", 0, JINJA_FLAVOR_ITEMS, false},
    {"keys", dict_view, "", 0, JINJA_FLAVOR_KEYS, false},
    {"values", dict_view, "", 0, JINJA_FLAVOR_VALUES, false},
    {NULL, NULL, NULL, 0, 0, false},
};

static const struct jinja_entry_point list_methods[] = {
    {"copy", any_copy, "", 0, 0, false}, /* of lists only */
    {"count", list_find, "value", 1, 0, false},
    {"index", list_find, "value,start,stop", 1, 1, false},
    {NULL, NULL, NULL, 0, 0, false},
};

static const struct jinja_entry_point cycler_methods[] = {
    {"next", cycler_next, "", 0, 0, false},
    {"reset", cycler_reset, "", 0, 0, false},
    {NULL, NULL, NULL, 0, 0, false},
};

const struct jinja_entry_point *jinja_method_find(const struct jinja_value *self,
                                                  const struct jinja_string *name)
{
    const struct jinja_entry_point *methods;
    switch (self->kind) {
    case JINJA_STRING:
        methods = str_methods;
        break;
    case JINJA_DICT:
        methods = dict_methods;
        break;
    case JINJA_LIST:
        if (!jinja_is_sequence(self)) {
            return NULL;
        }
        methods = jinja_is_tuple(self) ? &list_methods[1] : list_methods;
        break;
    case JINJA_CYCLER:
        methods = cycler_methods;
        break;
    case JINJA_LOOP:
        return jinja_loop_method(name);
    default:
        return NULL;
    }
    for (; methods->name != NULL; methods++) {
        if (jinja_string_is(name, methods->name)) {
            return methods;
        }
    }
    return NULL;
}

bool jinja_method_is_unsafe(const struct jinja_value *self, const struct jinja_string *name)
{
    static const char *const of_dicts[] = {"clear", "pop", "popitem", "setdefault", "update", NULL};
    static const char *const of_lists[] = {"append", "clear",   "extend", "insert", "pop",
                                           "remove", "reverse", "sort",   NULL};
    const char *const *names = self->kind == JINJA_DICT                           ? of_dicts
                               : jinja_is_sequence(self) && !jinja_is_tuple(self) ? of_lists
                                                                                  : NULL;
    for (; names != NULL && *names != NULL; names++) {
        if (jinja_string_is(name, *names)) {
            return true;
        }
    }
    return false;
}
