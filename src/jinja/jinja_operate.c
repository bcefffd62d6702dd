/* SPDX-License-Identifier: Apache-2.0 */
/* Operators, attributes, indices and slices, and what happens to undefined values in them. */
#include <math.h>
#include <string.h>

#include "jinja/jinja_render.h"

#define SHOWN_BYTES 60 /* of a name in a message */

static int shown(const struct jinja_string *string)
{
    size_t num_bytes = string->num_bytes < SHOWN_BYTES ? string->num_bytes : SHOWN_BYTES;
    while (num_bytes < string->num_bytes && num_bytes > 0 &&
           ((unsigned char)string->bytes[num_bytes] & 0xc0) == 0x80) {
        num_bytes--;
    }
    return (int)num_bytes;
}

/* ---- undefined ------------------------------------------------------------------------------- */

enum imbrex_status jinja_undefined_new(struct jinja_render *render,
                                       const struct jinja_undefined *undefined,
                                       struct jinja_value *value)
{
    struct jinja_undefined *copy;
    TRY(jinja_take(render, 1, sizeof(*copy), &copy));
    *copy = *undefined;
    *value = (struct jinja_value){.kind = JINJA_UNDEFINED, .as.undefined = copy};
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_undefined_fail(struct jinja_render *render,
                                        const struct jinja_undefined *undefined)
{
    if (undefined->hint != NULL) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "%.*s", (int)undefined->hint->num_bytes,
                          undefined->hint->bytes);
    }
    if (undefined->object.kind == JINJA_MISSING) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "'%.*s' is undefined",
                          shown(undefined->name), undefined->name->bytes);
    }
    const char *type = jinja_type_name(&undefined->object);
    bool is_none = undefined->object.kind == JINJA_NONE;
    if (undefined->name != NULL) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "'%s%s' has no attribute '%.*s'",
                          is_none ? "None" : type, is_none ? "" : " object", shown(undefined->name),
                          undefined->name->bytes);
    }
    struct jinja_text text = {0};
    const struct jinja_string *key;
    TRY(jinja_append_repr(render, &text, &undefined->key));
    TRY(jinja_text_finish(render, &text, &key));
    return jinja_fail(render, IMBREX_STATUS_FORMAT, "%s%s has no element %.*s",
                      is_none ? "None" : type, is_none ? "" : " object", shown(key), key->bytes);
}

/* ---- attributes and items -------------------------------------------------------------------- */

static bool is_dunder(const struct jinja_string *name)
{
    return name->num_bytes > 4 && memcmp(name->bytes, "__", 2) == 0 &&
           memcmp(name->bytes + name->num_bytes - 2, "__", 2) == 0;
}

static enum imbrex_status unsafe_attribute(struct jinja_render *render,
                                           const struct jinja_value *object,
                                           const struct jinja_string *name,
                                           struct jinja_value *value)
{
    struct jinja_text text = {0};
    struct jinja_undefined undefined = {.object = *object, .name = name};
    const char *type = jinja_type_name(object);
    TRY(jinja_text_append(render, &text, "access to attribute '", 21, false));
    TRY(jinja_text_append_string(render, &text, name));
    TRY(jinja_text_append(render, &text, "' of '", 6, false));
    TRY(jinja_text_append(render, &text, type, strlen(type), false));
    TRY(jinja_text_append(render, &text, "' object is unsafe.", 19, false));
    TRY(jinja_text_finish(render, &text, &undefined.hint));
    return jinja_undefined_new(render, &undefined, value);
}

/* getattr(object, name); MISSING if there is no such attribute. */
static enum imbrex_status find_attribute(struct jinja_render *render,
                                         const struct jinja_value *object,
                                         const struct jinja_string *name, struct jinja_value *value)
{
    *value = jinja_missing();
    if (is_dunder(name) || jinja_method_is_unsafe(object, name)) {
        return unsafe_attribute(render, object, name, value);
    }
    const struct jinja_value *found;
    switch (object->kind) {
    case JINJA_NAMESPACE:
        TRY(jinja_dict_get_string(render, object->as.dict, name, &found));
        if (found != NULL && name->num_bytes != 0 && name->bytes[0] == '_') {
            return unsafe_attribute(render, object, name, value);
        }
        if (found != NULL) {
            *value = *found;
        }
        break;
    case JINJA_LOOP:
        TRY(jinja_loop_attribute(render, object->as.loop, name, value));
        break;
    case JINJA_MACRO:
        TRY(jinja_macro_attribute(render, object->as.macro, name, value));
        break;
    case JINJA_CYCLER:
        if (jinja_string_is(name, "current")) {
            *value = object->as.cycler->items->items[object->as.cycler->position];
        }
        break;
    case JINJA_LIST:
        if (object->as.list->flavor == JINJA_FLAVOR_GROUP &&
            (jinja_string_is(name, "grouper") || jinja_string_is(name, "list"))) {
            *value = object->as.list->items[name->num_bytes == 4];
        }
        break;
    default:
        break;
    }
    const struct jinja_entry_point *entry =
        value->kind == JINJA_MISSING ? jinja_method_find(object, name) : NULL;
    if (entry != NULL) {
        struct jinja_method *method;
        TRY(jinja_take(render, 1, sizeof(*method), &method));
        *method = (struct jinja_method){.entry = entry, .self = *object};
        *value = (struct jinja_value){.kind = JINJA_METHOD, .as.method = method};
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_get_attribute(struct jinja_render *render,
                                       const struct jinja_value *object,
                                       const struct jinja_string *name, struct jinja_value *value)
{
    if (object->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, object->as.undefined);
    }
    TRY(find_attribute(render, object, name, value));
    if (value->kind != JINJA_MISSING) {
        return IMBREX_STATUS_OK;
    }
    if (object->kind == JINJA_DICT) {
        const struct jinja_value *found;
        TRY(jinja_dict_get_string(render, object->as.dict, name, &found));
        if (found != NULL) {
            *value = *found;
            return IMBREX_STATUS_OK;
        }
    }
    return jinja_undefined_new(render, &(struct jinja_undefined){.object = *object, .name = name},
                               value);
}

/* Index of item `key` of `length` items; false if it is outside. */
static bool resolve_index(int64_t key, size_t length, size_t *index)
{
    if (key < 0) {
        key += (int64_t)length;
    }
    *index = (size_t)key;
    return key >= 0 && (size_t)key < length;
}

static enum imbrex_status index_sequence(struct jinja_render *render,
                                         const struct jinja_value *object, int64_t key,
                                         struct jinja_value *value)
{
    size_t index;
    if (jinja_is_sequence(object)) {
        if (resolve_index(key, object->as.list->num_items, &index)) {
            *value = object->as.list->items[index];
        }
    } else if (object->kind == JINJA_RANGE) {
        if (resolve_index(key, object->as.range->num_items, &index)) {
            *value = jinja_int(jinja_range_item(object->as.range, index));
        }
    } else if (object->kind == JINJA_STRING) {
        const struct jinja_string *string = object->as.string, *cut;
        if (resolve_index(key, string->num_chars, &index)) {
            size_t begin = jinja_string_char_offset(string, index);
            TRY(jinja_charge_bytes(render, begin));
            size_t end = begin + 1;
            while (end < string->num_bytes && ((unsigned char)string->bytes[end] & 0xc0) == 0x80) {
                end++;
            }
            TRY(jinja_string_cut(render, string, begin, end, &cut));
            *value = jinja_string_value(cut);
        }
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_get_item(struct jinja_render *render, const struct jinja_value *object,
                                  const struct jinja_value *key, struct jinja_value *value)
{
    int64_t index;
    if (object->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, object->as.undefined);
    }
    *value = jinja_missing();
    if (object->kind == JINJA_DICT) {
        if (jinja_is_hashable(key)) {
            const struct jinja_value *found;
            TRY(jinja_dict_get(render, object->as.dict, key, &found));
            if (found != NULL) {
                *value = *found;
            }
        }
    } else if (jinja_as_int(key, &index)) {
        TRY(index_sequence(render, object, index, value));
    }
    if (value->kind == JINJA_MISSING && key->kind == JINJA_STRING) {
        TRY(find_attribute(render, object, key->as.string, value));
    }
    if (value->kind != JINJA_MISSING) {
        return IMBREX_STATUS_OK;
    }
    return jinja_undefined_new(
        render,
        &(struct jinja_undefined){.object = *object,
                                  .name = key->kind == JINJA_STRING ? key->as.string : NULL,
                                  .key = *key},
        value);
}

/* A slice of `length` items: the first one, the step, how many. */
struct slice {
    int64_t start, step;
    size_t num_items;
};

static int64_t clamp(int64_t bound, int64_t length, int64_t low, int64_t high)
{
    if (bound < 0) {
        bound = bound < -length ? -length - 1 : bound;
        bound += length;
    }
    return bound < low ? low : bound > high ? high : bound;
}

/* False if a bound is neither none nor an int. */
static bool slice_resolve(const struct jinja_value bounds[3], size_t num_items, struct slice *slice)
{
    int64_t length = (int64_t)num_items, begin, end;
    slice->step = 1;
    for (int i = 0; i < 3; i++) {
        int64_t bound;
        if (bounds[i].kind != JINJA_NONE && !jinja_as_int(&bounds[i], &bound)) {
            return false;
        }
    }
    jinja_as_int(&bounds[2], &slice->step);
    bool is_backward = slice->step < 0;
    int64_t low = is_backward ? -1 : 0, high = is_backward ? length - 1 : length;
    if (jinja_as_int(&bounds[0], &begin)) {
        begin = clamp(begin, length, low, high);
    } else {
        begin = is_backward ? high : low;
    }
    if (jinja_as_int(&bounds[1], &end)) {
        end = clamp(end, length, low, high);
    } else {
        end = is_backward ? low : high;
    }
    slice->start = begin;
    slice->num_items = 0;
    if (slice->step > 0 && begin < end) {
        slice->num_items = (size_t)((end - begin - 1) / slice->step) + 1;
    } else if (slice->step < 0 && begin > end) {
        /* -step overflows for the least int; the quotient of negatives does not */
        slice->num_items = (size_t)((end - begin + 1) / slice->step) + 1;
    }
    return true;
}

static enum imbrex_status slice_string(struct jinja_render *render,
                                       const struct jinja_string *string, const struct slice *slice,
                                       struct jinja_value *value)
{
    const struct jinja_string *cut = &jinja_string_empty;
    TRY(jinja_charge_bytes(render, string->num_bytes));
    if (slice->num_items != 0 && slice->step == 1) {
        size_t first = (size_t)slice->start;
        TRY(jinja_string_cut(render, string, jinja_string_char_offset(string, first),
                             jinja_string_char_offset(string, first + slice->num_items), &cut));
    } else if (slice->num_items != 0) {
        struct jinja_text text = {0};
        int64_t char_idx = slice->start;
        size_t offset = jinja_string_char_offset(string, (size_t)char_idx);
        for (size_t i = 0; i < slice->num_items; i++) {
            size_t end = offset + 1;
            while (end < string->num_bytes && ((unsigned char)string->bytes[end] & 0xc0) == 0x80) {
                end++;
            }
            TRY(jinja_charge(render, 1));
            TRY(jinja_text_append_part(render, &text, string, offset, end));
            for (int64_t j = 0; i + 1 < slice->num_items && j != slice->step;
                 j += slice->step < 0 ? -1 : 1) { /* to the next one, a character at a time */
                do {
                    offset = slice->step < 0 ? offset - 1 : offset + 1;
                } while (((unsigned char)string->bytes[offset] & 0xc0) == 0x80);
            }
        }
        TRY(jinja_text_finish(render, &text, &cut));
    }
    *value = jinja_string_value(cut);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_get_slice(struct jinja_render *render, const struct jinja_value *object,
                                   const struct jinja_value bounds[3], struct jinja_value *value)
{
    struct slice slice = {0};
    size_t length = 0;
    if (object->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, object->as.undefined);
    }
    if (!jinja_is_sequence(object) && object->kind != JINJA_STRING && object->kind != JINJA_RANGE) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "a slice of an object of type '%s'",
                          jinja_type_name(object));
    }
    TRY(jinja_length(render, object, &length));
    if (!slice_resolve(bounds, length, &slice)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "slice indices must be integers or None");
    }
    if (slice.step == 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "slice step cannot be zero");
    }
    if (object->kind == JINJA_STRING) {
        return slice_string(render, object->as.string, &slice, value);
    }
    if (object->kind == JINJA_RANGE) {
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "a slice of a range");
    }
    struct jinja_list *list;
    TRY(jinja_list_new(render, jinja_is_tuple(object) ? JINJA_FLAVOR_TUPLE : JINJA_FLAVOR_LIST,
                       slice.num_items, &list));
    list->is_input = object->as.list->is_input;
    int64_t item_idx = slice.start;
    for (size_t i = 0; i < slice.num_items; i++) {
        TRY(jinja_list_append(render, list, object->as.list->items[item_idx]));
        item_idx += i + 1 < slice.num_items ? slice.step : 0;
    }
    *value = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

/* ---- arithmetic ------------------------------------------------------------------------------ */

static const char *symbol_of(enum jinja_operator op)
{
    static const char *const symbols[] = {"+", "-", "*", "/", "//", "%", "** or pow()"};
    return symbols[op - JINJA_OP_ADD];
}

static enum imbrex_status overflow(struct jinja_render *render)
{
    return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an integer beyond 64 bits");
}

static enum imbrex_status power_of_ints(struct jinja_render *render, int64_t base, int64_t exponent,
                                        struct jinja_value *result)
{
    int64_t power = 1;
    while (exponent > 0) {
        if ((exponent & 1) != 0 && __builtin_mul_overflow(power, base, &power)) {
            return overflow(render);
        }
        exponent >>= 1;
        if (exponent > 0 && __builtin_mul_overflow(base, base, &base)) {
            return overflow(render);
        }
    }
    *result = jinja_int(power);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status int_arithmetic(struct jinja_render *render, enum jinja_operator op,
                                         int64_t left, int64_t right, struct jinja_value *result)
{
    int64_t value = 0;
    bool overflows = false;
    switch (op) {
    case JINJA_OP_ADD:
        overflows = __builtin_add_overflow(left, right, &value);
        break;
    case JINJA_OP_SUB:
        overflows = __builtin_sub_overflow(left, right, &value);
        break;
    case JINJA_OP_MUL:
        overflows = __builtin_mul_overflow(left, right, &value);
        break;
    case JINJA_OP_POW:
        return power_of_ints(render, left, right, result);
    default:
        if (right == -1) { /* the one case where / itself overflows */
            value = 0;
            overflows = op == JINJA_OP_FLOORDIV && __builtin_sub_overflow(0, left, &value);
        } else if (op == JINJA_OP_FLOORDIV) {
            value = left / right - (left % right != 0 && (left < 0) != (right < 0));
        } else {
            value = left % right;
            value += value != 0 && (value < 0) != (right < 0) ? right : 0;
        }
        break;
    }
    if (overflows) {
        return overflow(render);
    }
    *result = jinja_int(value);
    return IMBREX_STATUS_OK;
}

/* Floor division as Python computes it: through the remainder. */
static double floor_divide(double left, double right, double *remainder)
{
    double rest = fmod(left, right);
    double quotient = (left - rest) / right;
    if (rest != 0) {
        if ((right < 0) != (rest < 0)) {
            rest += right;
            quotient -= 1;
        }
    } else {
        rest = copysign(0, right);
    }
    *remainder = rest;
    if (quotient == 0) {
        return copysign(0, left / right);
    }
    double whole = floor(quotient);
    return quotient - whole > 0.5 ? whole + 1 : whole;
}

static enum imbrex_status float_arithmetic(struct jinja_render *render, enum jinja_operator op,
                                           double left, double right, struct jinja_value *result)
{
    double remainder, real;
    switch (op) {
    case JINJA_OP_ADD:
        real = left + right;
        break;
    case JINJA_OP_SUB:
        real = left - right;
        break;
    case JINJA_OP_MUL:
        real = left * right;
        break;
    case JINJA_OP_DIV:
        real = left / right;
        break;
    case JINJA_OP_FLOORDIV:
        real = floor_divide(left, right, &remainder);
        break;
    case JINJA_OP_MOD:
        floor_divide(left, right, &real);
        break;
    default:
        real = pow(left, right);
        if (left == 0 && right < 0) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "0.0 cannot be raised to a negative power");
        }
        if (isnan(real) && !isnan(left) && !isnan(right)) {
            return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "a complex number");
        }
        if (isinf(real) && isfinite(left) && isfinite(right)) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "a power beyond the largest float");
        }
        break;
    }
    *result = jinja_float(real);
    return IMBREX_STATUS_OK;
}

/* False if one of the two is no number. */
static bool as_doubles(const struct jinja_value *left, const struct jinja_value *right,
                       double *left_real, double *right_real)
{
    int64_t integer;
    const struct jinja_value *values[2] = {left, right};
    double *reals[2] = {left_real, right_real};
    for (int i = 0; i < 2; i++) {
        if (jinja_as_int(values[i], &integer)) {
            *reals[i] = (double)integer;
        } else if (values[i]->kind == JINJA_FLOAT) {
            *reals[i] = values[i]->as.real;
        } else {
            return false;
        }
    }
    return true;
}

static enum imbrex_status concat_lists(struct jinja_render *render, const struct jinja_value *left,
                                       const struct jinja_value *right, struct jinja_value *result)
{
    struct jinja_list *list;
    TRY(jinja_list_new(render, jinja_is_tuple(left) ? JINJA_FLAVOR_TUPLE : JINJA_FLAVOR_LIST,
                       left->as.list->num_items + right->as.list->num_items, &list));
    for (size_t i = 0; i < left->as.list->num_items; i++) {
        TRY(jinja_list_append(render, list, left->as.list->items[i]));
    }
    for (size_t i = 0; i < right->as.list->num_items; i++) {
        TRY(jinja_list_append(render, list, right->as.list->items[i]));
    }
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

/* string * count or list * count */
static enum imbrex_status repeat(struct jinja_render *render, const struct jinja_value *value,
                                 int64_t count, struct jinja_value *result)
{
    count = count < 0 ? 0 : count;
    if (value->kind == JINJA_STRING) {
        struct jinja_text text = {0};
        const struct jinja_string *string = value->as.string;
        TRY(jinja_text_append_repeated(render, &text, string, (size_t)count));
        TRY(jinja_text_finish(render, &text, &string));
        *result = jinja_string_value(string);
        return IMBREX_STATUS_OK;
    }
    struct jinja_list *list;
    TRY(jinja_list_new(render, jinja_is_tuple(value) ? JINJA_FLAVOR_TUPLE : JINJA_FLAVOR_LIST, 0,
                       &list));
    for (int64_t i = 0; value->as.list->num_items != 0 && i < count; i++) {
        for (size_t j = 0; j < value->as.list->num_items; j++) {
            TRY(jinja_list_append(render, list, value->as.list->items[j]));
        }
    }
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static bool can_repeat(const struct jinja_value *value)
{
    return value->kind == JINJA_STRING || jinja_is_sequence(value);
}

static enum imbrex_status sequence_arithmetic(struct jinja_render *render, enum jinja_operator op,
                                              const struct jinja_value *left,
                                              const struct jinja_value *right,
                                              struct jinja_value *result)
{
    int64_t count;
    const struct jinja_string *string;
    if (op == JINJA_OP_ADD && left->kind == JINJA_STRING && right->kind == JINJA_STRING) {
        TRY(jinja_string_concat(render, left->as.string, right->as.string, &string));
        *result = jinja_string_value(string);
        return IMBREX_STATUS_OK;
    }
    if (op == JINJA_OP_ADD && jinja_is_sequence(left) && jinja_is_sequence(right) &&
        jinja_is_tuple(left) == jinja_is_tuple(right)) {
        return concat_lists(render, left, right, result);
    }
    if (op == JINJA_OP_MUL && can_repeat(left) && jinja_as_int(right, &count)) {
        return repeat(render, left, count, result);
    }
    if (op == JINJA_OP_MUL && can_repeat(right) && jinja_as_int(left, &count)) {
        return repeat(render, right, count, result);
    }
    if (op == JINJA_OP_MOD && left->kind == JINJA_STRING) {
        return jinja_percent_format(render, left->as.string, right, result);
    }
    if (op == JINJA_OP_ADD && can_repeat(left)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "can only concatenate %s (not \"%s\") to %s", jinja_type_name(left),
                          jinja_type_name(right), jinja_type_name(left));
    }
    return jinja_fail(render, IMBREX_STATUS_FORMAT,
                      "unsupported operand type(s) for %s: '%s' and '%s'", symbol_of(op),
                      jinja_type_name(left), jinja_type_name(right));
}

enum imbrex_status jinja_arithmetic(struct jinja_render *render, enum jinja_operator op,
                                    const struct jinja_value *left, const struct jinja_value *right,
                                    struct jinja_value *result)
{
    int64_t left_int, right_int;
    double left_real, right_real;
    if (left->kind == JINJA_UNDEFINED || right->kind == JINJA_UNDEFINED) {
        bool is_left = left->kind == JINJA_UNDEFINED;
        if (op == JINJA_OP_MOD && !is_left && left->kind == JINJA_STRING) {
            return jinja_percent_format(render, left->as.string, right, result);
        }
        return jinja_undefined_fail(render, is_left ? left->as.undefined : right->as.undefined);
    }
    if (!as_doubles(left, right, &left_real, &right_real)) {
        return sequence_arithmetic(render, op, left, right, result);
    }
    bool is_division = op == JINJA_OP_DIV || op == JINJA_OP_FLOORDIV || op == JINJA_OP_MOD;
    if (is_division && right_real == 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "division by zero");
    }
    if (op != JINJA_OP_DIV && jinja_as_int(left, &left_int) && jinja_as_int(right, &right_int) &&
        (op != JINJA_OP_POW || right_int >= 0)) {
        return int_arithmetic(render, op, left_int, right_int, result);
    }
    return float_arithmetic(render, op, left_real, right_real, result);
}
