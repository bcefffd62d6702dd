/* SPDX-License-Identifier: Apache-2.0 */
/* Filters for lists and dicts. Where Jinja returns a generator, so do these, but one that was
 * computed at once, up to the first error, which is kept for whoever reads so far. */
#include <string.h>

#include "jinja/jinja_filters.h"

#define MAX_ATTRIBUTE_PARTS 16

/* An attribute of items: "a.b.0", an int, or nothing (the item itself). */
struct getter {
    struct jinja_value parts[MAX_ATTRIBUTE_PARTS];
    size_t num_parts;
    struct jinja_value fallback; /* for undefined ones, MISSING if there is none */
    bool ignores_case;
};

static enum imbrex_status getter_add_parts(struct jinja_render *render,
                                           const struct jinja_string *path, struct getter *getter)
{
    size_t begin = 0;
    while (begin <= path->num_bytes) {
        const char *dot = memchr(path->bytes + begin, '.', path->num_bytes - begin);
        size_t end = dot == NULL ? path->num_bytes : (size_t)(dot - path->bytes);
        const struct jinja_string *part;
        int64_t index = 0;
        bool is_index = end > begin && end - begin < 18;
        if (getter->num_parts == MAX_ATTRIBUTE_PARTS) {
            return jinja_fail(render, IMBREX_STATUS_CAPACITY, "an attribute of more than %d parts",
                              MAX_ATTRIBUTE_PARTS);
        }
        for (size_t i = begin; i < end && is_index; i++) {
            is_index = path->bytes[i] >= '0' && path->bytes[i] <= '9';
            index = index * 10 + (path->bytes[i] - '0');
        }
        TRY(jinja_string_cut(render, path, begin, end, &part));
        getter->parts[getter->num_parts++] = is_index ? jinja_int(index) : jinja_string_value(part);
        begin = end + 1;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status getter_init(struct jinja_render *render,
                                      const struct jinja_value *attribute, struct getter *getter)
{
    getter->num_parts = 0;
    getter->fallback = jinja_missing();
    getter->ignores_case = false;
    if (attribute->kind == JINJA_MISSING || attribute->kind == JINJA_NONE) {
        return IMBREX_STATUS_OK;
    }
    if (attribute->kind == JINJA_STRING) {
        return getter_add_parts(render, attribute->as.string, getter);
    }
    getter->parts[getter->num_parts++] = *attribute;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status fold_case(struct jinja_render *render, struct jinja_value *value)
{
    if (value->kind == JINJA_STRING) {
        TRY(jinja_string_recase(render, value->as.string, JINJA_CASE_LOWER, &value->as.string));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status getter_get(struct jinja_render *render, const struct getter *getter,
                                     const struct jinja_value *item, struct jinja_value *value)
{
    struct jinja_value current = *item;
    for (size_t i = 0; i < getter->num_parts; i++) {
        struct jinja_value next;
        TRY(jinja_charge(render, 1));
        TRY(jinja_get_item(render, &current, &getter->parts[i], &next));
        current = next;
        if (current.kind == JINJA_UNDEFINED && getter->fallback.kind != JINJA_MISSING) {
            current = getter->fallback;
        }
    }
    if (getter->ignores_case) {
        TRY(fold_case(render, &current));
    }
    *value = current;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status generator_new(struct jinja_render *render, struct jinja_list **list)
{
    return jinja_list_new(render, JINJA_FLAVOR_GENERATOR, 0, list);
}

/* ---- items ----------------------------------------------------------------------------------- */

static enum imbrex_status filter_length(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    size_t length;
    TRY(jinja_length(render, &call->self, &length));
    *result = jinja_int((int64_t)length);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status no_item(struct jinja_render *render, const char *hint_text,
                                  struct jinja_value *result)
{
    const struct jinja_string *hint;
    TRY(jinja_string_new(render, hint_text, strlen(hint_text), false, &hint));
    return jinja_undefined_new(render, &(struct jinja_undefined){.hint = hint}, result);
}

static enum imbrex_status filter_first(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    struct jinja_iterator iterator;
    bool has_item;
    TRY(jinja_iterate(render, &call->self, &iterator));
    TRY(jinja_iterator_next(render, &iterator, result, &has_item));
    return has_item ? IMBREX_STATUS_OK
                    : no_item(render, "No first item, sequence was empty.", result);
}

static enum imbrex_status filter_last(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_list *list;
    if (jinja_is_generator(&call->self)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "'generator' object is not reversible");
    }
    if (call->self.kind == JINJA_STRING && call->self.as.string->num_chars != 0) {
        struct jinja_value minus_one = jinja_int(-1);
        return jinja_get_item(render, &call->self, &minus_one, result);
    }
    TRY(jinja_to_list(render, &call->self, &list));
    if (list->num_items == 0) {
        return no_item(render, "No last item, sequence was empty.", result);
    }
    *result = list->items[list->num_items - 1];
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_list(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_list *list;
    TRY(jinja_to_list(render, &call->self, &list));
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_items(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    struct jinja_list *empty;
    if (call->self.kind == JINJA_UNDEFINED) {
        TRY(generator_new(render, &empty));
        *result = jinja_list_value(empty);
        return IMBREX_STATUS_OK;
    }
    if (call->self.kind != JINJA_DICT) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "Can only get item pairs from a mapping.");
    }
    TRY(jinja_dict_view(render, call->self.as.dict, JINJA_FLAVOR_ITEMS, result));
    result->as.list->flavor = JINJA_FLAVOR_GENERATOR;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_reverse(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    struct jinja_list *list;
    if (call->self.kind == JINJA_STRING) {
        struct jinja_value bounds[3] = {jinja_none(), jinja_none(), jinja_int(-1)};
        return jinja_get_slice(render, &call->self, bounds, result);
    }
    TRY(jinja_to_list(render, &call->self, &list));
    for (size_t i = 0; i < list->num_items / 2; i++) {
        struct jinja_value item = list->items[i];
        list->items[i] = list->items[list->num_items - 1 - i];
        list->items[list->num_items - 1 - i] = item;
    }
    bool was_generator = jinja_is_generator(&call->self) || call->self.kind == JINJA_UNDEFINED;
    list->flavor = was_generator ? JINJA_FLAVOR_LIST : JINJA_FLAVOR_GENERATOR;
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_join(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_text text = {0};
    struct jinja_iterator iterator;
    struct jinja_value item;
    struct getter getter;
    bool has_item;
    const struct jinja_string *separator = &jinja_string_empty, *string;
    if (jinja_is_given(&call->args[0])) {
        TRY(jinja_to_string(render, &call->args[0], &separator));
    }
    TRY(getter_init(render, &call->args[1], &getter));
    TRY(jinja_iterate(render, &call->self, &iterator));
    for (bool is_first = true;; is_first = false) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            break;
        }
        TRY(jinja_text_append_string(render, &text, is_first ? &jinja_string_empty : separator));
        TRY(getter_get(render, &getter, &item, &item));
        TRY(jinja_append_value(render, &text, &item));
    }
    TRY(jinja_text_finish(render, &text, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_sum(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    struct jinja_iterator iterator;
    struct jinja_value item, sum = jinja_is_given(&call->args[1]) ? call->args[1] : jinja_int(0);
    struct getter getter;
    bool has_item;
    TRY(getter_init(render, &call->args[0], &getter));
    TRY(jinja_iterate(render, &call->self, &iterator));
    if (sum.kind == JINJA_STRING) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "sum() can't sum strings");
    }
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            *result = sum;
            return IMBREX_STATUS_OK;
        }
        TRY(getter_get(render, &getter, &item, &item));
        TRY(jinja_arithmetic(render, JINJA_OP_ADD, &sum, &item, &sum));
    }
}

/* batch(linecount, fill_with) */
static enum imbrex_status filter_batch(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    struct jinja_list *items, *batches, *batch = NULL;
    int64_t size;
    TRY(jinja_filter_int(render, call, 0, 0, &size));
    TRY(jinja_to_list(render, &call->self, &items));
    TRY(generator_new(render, &batches));
    for (size_t i = 0; i < items->num_items; i++) {
        if (batch == NULL || batch->num_items == (size_t)size) {
            TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &batch));
            TRY(jinja_list_append(render, batches, jinja_list_value(batch)));
        }
        TRY(jinja_list_append(render, batch, items->items[i]));
    }
    bool fills = jinja_is_given(&call->args[1]) && call->args[1].kind != JINJA_NONE;
    while (batch != NULL && fills && (int64_t)batch->num_items < size) {
        TRY(jinja_list_append(render, batch, call->args[1]));
    }
    *result = jinja_list_value(batches);
    return IMBREX_STATUS_OK;
}

/* slice(slices, fill_with) */
static enum imbrex_status filter_slice(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    struct jinja_list *items, *slices, *slice;
    int64_t num_slices;
    size_t position = 0;
    TRY(jinja_filter_int(render, call, 0, 0, &num_slices));
    TRY(jinja_to_list(render, &call->self, &items));
    TRY(generator_new(render, &slices));
    if (num_slices == 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "division by zero");
    }
    bool fills = jinja_is_given(&call->args[1]) && call->args[1].kind != JINJA_NONE;
    for (int64_t i = 0; i < num_slices; i++) {
        size_t num_longer = items->num_items % (size_t)num_slices;
        size_t num_items = items->num_items / (size_t)num_slices + ((size_t)i < num_longer);
        TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &slice));
        for (size_t j = 0; j < num_items; j++) {
            TRY(jinja_list_append(render, slice, items->items[position++]));
        }
        if (fills && (size_t)i >= num_longer) {
            TRY(jinja_list_append(render, slice, call->args[1]));
        }
        TRY(jinja_list_append(render, slices, jinja_list_value(slice)));
    }
    *result = jinja_list_value(slices);
    return IMBREX_STATUS_OK;
}

/* ---- order ----------------------------------------------------------------------------------- */

static enum imbrex_status get_all(struct jinja_render *render, const struct getter *getter,
                                  const struct jinja_list *items, struct jinja_value **keys_out)
{
    struct jinja_value *keys;
    TRY(jinja_take(render, items->num_items, sizeof(*keys), &keys));
    for (size_t i = 0; i < items->num_items; i++) {
        TRY(getter_get(render, getter, &items->items[i], &keys[i]));
    }
    *keys_out = keys;
    return IMBREX_STATUS_OK;
}

/* Keys of several attributes, "a,b": lists of values. */
static enum imbrex_status get_all_lists(struct jinja_render *render,
                                        const struct jinja_string *attributes, bool ignores_case,
                                        const struct jinja_list *items,
                                        struct jinja_value **keys_out)
{
    struct jinja_value *keys;
    size_t begin = 0;
    TRY(jinja_take(render, items->num_items, sizeof(*keys), &keys));
    for (size_t i = 0; i < items->num_items; i++) {
        struct jinja_list *key;
        TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 2, &key));
        keys[i] = jinja_list_value(key);
    }
    while (begin <= attributes->num_bytes) {
        const char *comma = memchr(attributes->bytes + begin, ',', attributes->num_bytes - begin);
        size_t end = comma == NULL ? attributes->num_bytes : (size_t)(comma - attributes->bytes);
        const struct jinja_string *attribute;
        struct getter getter;
        TRY(jinja_string_cut(render, attributes, begin, end, &attribute));
        struct jinja_value attribute_value = jinja_string_value(attribute);
        TRY(getter_init(render, &attribute_value, &getter));
        getter.ignores_case = ignores_case;
        for (size_t i = 0; i < items->num_items; i++) {
            struct jinja_value value;
            TRY(getter_get(render, &getter, &items->items[i], &value));
            TRY(jinja_list_append(render, keys[i].as.list, value));
        }
        begin = end + 1;
    }
    *keys_out = keys;
    return IMBREX_STATUS_OK;
}

/* sort(reverse, case_sensitive, attribute) */
static enum imbrex_status filter_sort(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    struct jinja_list *list;
    struct jinja_value *keys;
    bool ignores_case = !jinja_truth(&call->args[1]);
    TRY(jinja_to_list(render, &call->self, &list));
    if (call->args[2].kind == JINJA_STRING) {
        TRY(get_all_lists(render, call->args[2].as.string, ignores_case, list, &keys));
    } else {
        struct getter getter;
        TRY(getter_init(render, &call->args[2], &getter));
        getter.ignores_case = ignores_case;
        TRY(get_all(render, &getter, list, &keys));
    }
    TRY(jinja_sort(render, list->items, keys, list->num_items, jinja_truth(&call->args[0])));
    *result = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

/* dictsort(case_sensitive, by, reverse) */
static enum imbrex_status filter_dictsort(struct jinja_render *render,
                                          const struct jinja_call *call, struct jinja_value *result)
{
    struct jinja_value items, *keys;
    struct getter getter = {.num_parts = 1, .fallback = jinja_missing()};
    const struct jinja_value *by = &call->args[1];
    bool by_value = by->kind == JINJA_STRING && jinja_string_is(by->as.string, "value");
    if (call->self.kind != JINJA_DICT) {
        return jinja_filter_fail(render, call, "a dict", &call->self);
    }
    if (jinja_is_given(by) && !by_value &&
        !(by->kind == JINJA_STRING && jinja_string_is(by->as.string, "key"))) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "You can only sort by either \"key\" or \"value\"");
    }
    getter.parts[0] = jinja_int(by_value);
    getter.ignores_case = !jinja_truth(&call->args[0]);
    TRY(jinja_dict_view(render, call->self.as.dict, JINJA_FLAVOR_ITEMS, &items));
    TRY(get_all(render, &getter, items.as.list, &keys));
    TRY(jinja_sort(render, items.as.list->items, keys, items.as.list->num_items,
                   jinja_truth(&call->args[2])));
    items.as.list->flavor = JINJA_FLAVOR_LIST;
    *result = items;
    return IMBREX_STATUS_OK;
}

/* min and max(case_sensitive, attribute); variant: is_max */
static enum imbrex_status filter_extreme(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    struct jinja_list *list;
    struct jinja_value *keys;
    struct getter getter;
    size_t best = 0;
    bool is_max = call->entry->variant != 0;
    TRY(jinja_to_list(render, &call->self, &list));
    if (list->num_items == 0) {
        return no_item(render, "No aggregated item, sequence was empty.", result);
    }
    TRY(getter_init(render, &call->args[1], &getter));
    getter.ignores_case = !jinja_truth(&call->args[0]);
    TRY(get_all(render, &getter, list, &keys));
    for (size_t i = 1; i < list->num_items; i++) {
        int order;
        TRY(jinja_order(render, &keys[i], &keys[best], is_max ? ">" : "<", &order));
        if (is_max ? order > 0 : order < 0) {
            best = i;
        }
    }
    *result = list->items[best];
    return IMBREX_STATUS_OK;
}

/* unique(case_sensitive, attribute) */
static enum imbrex_status filter_unique(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    struct jinja_list *list, *unique;
    struct jinja_value *keys;
    struct jinja_dict *seen;
    struct getter getter;
    TRY(jinja_to_list(render, &call->self, &list));
    TRY(getter_init(render, &call->args[1], &getter));
    getter.ignores_case = !jinja_truth(&call->args[0]);
    TRY(get_all(render, &getter, list, &keys));
    TRY(generator_new(render, &unique));
    TRY(jinja_dict_new(render, 0, &seen));
    for (size_t i = 0; i < list->num_items; i++) {
        const struct jinja_value *found;
        TRY(jinja_dict_get(render, seen, &keys[i], &found));
        if (found == NULL) {
            TRY(jinja_dict_set(render, seen, keys[i], jinja_none()));
            TRY(jinja_list_append(render, unique, list->items[i]));
        }
    }
    *result = jinja_list_value(unique);
    return IMBREX_STATUS_OK;
}

/* groupby(attribute, default, case_sensitive) */
static enum imbrex_status filter_groupby(struct jinja_render *render, const struct jinja_call *call,
                                         struct jinja_value *result)
{
    struct jinja_list *list, *groups, *members = NULL;
    struct jinja_value *keys;
    struct getter getter;
    TRY(jinja_to_list(render, &call->self, &list));
    TRY(getter_init(render, &call->args[0], &getter));
    getter.fallback = call->args[1].kind == JINJA_NONE ? jinja_missing() : call->args[1];
    getter.ignores_case = !jinja_truth(&call->args[2]);
    TRY(get_all(render, &getter, list, &keys));
    TRY(jinja_sort(render, list->items, keys, list->num_items, false));
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &groups));
    getter.ignores_case = false; /* the name of a group is its first member's */
    for (size_t i = 0; i < list->num_items; i++) {
        bool is_same = false;
        if (i != 0) {
            TRY(jinja_equal(render, &keys[i - 1], &keys[i], &is_same));
        }
        if (!is_same) {
            struct jinja_value name, group;
            TRY(getter_get(render, &getter, &list->items[i], &name));
            TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, 0, &members));
            TRY(jinja_pair_new(render, name, jinja_list_value(members), &group));
            group.as.list->flavor = JINJA_FLAVOR_GROUP;
            TRY(jinja_list_append(render, groups, group));
        }
        TRY(jinja_list_append(render, members, list->items[i]));
    }
    *result = jinja_list_value(groups);
    return IMBREX_STATUS_OK;
}

/* ---- map and select -------------------------------------------------------------------------- */

/* The filter or test that an argument names. */
static enum imbrex_status named_entry(struct jinja_render *render, const struct jinja_value *name,
                                      bool is_test, const struct jinja_entry_point **entry)
{
    const char *what = is_test ? "test" : "filter";
    if (name->kind != JINJA_STRING) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "expected the name of a %s, found %s", what,
                          jinja_type_name(name));
    }
    const struct jinja_string *string = name->as.string;
    *entry = is_test ? jinja_test_find(string->bytes, string->num_bytes)
                     : jinja_filter_find(string->bytes, string->num_bytes);
    if (*entry == NULL) {
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "there is no %s '%.*s'", what,
                          (int)(string->num_bytes < 60 ? string->num_bytes : 60), string->bytes);
    }
    return IMBREX_STATUS_OK;
}

/* The arguments behind the first num_skipped ones. */
static struct jinja_args rest_of(const struct jinja_args *args, size_t num_skipped)
{
    struct jinja_args rest = *args;
    if (num_skipped != 0) {
        rest.positional += num_skipped;
        rest.num_positional -= num_skipped;
    }
    return rest;
}

/* map(attribute=..., default=...): all named arguments into the getter */
static enum imbrex_status map_getter(struct jinja_render *render, const struct jinja_args *args,
                                     struct getter *getter)
{
    const struct jinja_value *attribute = NULL, *fallback = NULL;
    for (size_t i = 0; i < args->num_named; i++) {
        if (jinja_string_is(args->named[i].name, "attribute")) {
            attribute = &args->named[i].value;
        } else if (jinja_string_is(args->named[i].name, "default")) {
            fallback = &args->named[i].value;
        } else {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "map got an unexpected keyword argument");
        }
    }
    if (attribute == NULL) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "map requires a filter argument");
    }
    TRY(getter_init(render, attribute, getter));
    if (fallback != NULL && fallback->kind != JINJA_NONE) {
        getter->fallback = *fallback;
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status filter_map(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    const struct jinja_entry_point *entry = NULL;
    struct getter getter;
    struct jinja_list *mapped;
    struct jinja_iterator iterator;
    struct jinja_args rest = *call->all;
    struct jinja_value item;
    bool has_item;
    TRY(generator_new(render, &mapped));
    *result = jinja_list_value(mapped);
    if (!jinja_truth(&call->self)) {
        return IMBREX_STATUS_OK;
    }
    if (call->all->num_positional == 0) {
        TRY(map_getter(render, call->all, &getter));
    } else {
        TRY(named_entry(render, &call->all->positional[0], false, &entry));
        rest = rest_of(call->all, 1);
    }
    TRY(jinja_enter(render));
    TRY(jinja_iterate(render, &call->self, &iterator));
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            break;
        }
        struct jinja_value value;
        TRY(entry == NULL ? getter_get(render, &getter, &item, &value)
                          : jinja_call_native(render, "filter", entry, &item, &rest, &value));
        TRY(jinja_list_append(render, mapped, value));
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}

enum selection { SELECT = 0, REJECT = 1, BY_ATTRIBUTE = 2 };

/* select, reject, selectattr, rejectattr */
static enum imbrex_status filter_select(struct jinja_render *render, const struct jinja_call *call,
                                        struct jinja_value *result)
{
    const struct jinja_entry_point *entry = NULL;
    const struct jinja_args *args = call->all;
    bool by_attribute = (call->entry->variant & BY_ATTRIBUTE) != 0;
    bool rejects = (call->entry->variant & REJECT) != 0;
    size_t num_skipped = by_attribute;
    struct getter getter;
    struct jinja_value attribute = jinja_missing(), item;
    struct jinja_list *selected;
    struct jinja_iterator iterator;
    bool has_item;
    TRY(generator_new(render, &selected));
    *result = jinja_list_value(selected);
    if (!jinja_truth(&call->self)) {
        return IMBREX_STATUS_OK;
    }
    if (by_attribute) {
        if (args->num_positional == 0) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT, "Missing parameter for attribute name");
        }
        attribute = args->positional[0];
    }
    TRY(getter_init(render, &attribute, &getter));
    if (args->num_positional > num_skipped) {
        TRY(named_entry(render, &args->positional[num_skipped], true, &entry));
        num_skipped++;
    }
    struct jinja_args rest = rest_of(args, num_skipped);
    TRY(jinja_iterate(render, &call->self, &iterator));
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            return IMBREX_STATUS_OK;
        }
        struct jinja_value value, verdict;
        TRY(getter_get(render, &getter, &item, &value));
        verdict = value;
        if (entry != NULL) {
            TRY(jinja_call_native(render, "test", entry, &value, &rest, &verdict));
        }
        if (jinja_truth(&verdict) != rejects) {
            TRY(jinja_list_append(render, selected, item));
        }
    }
}

const struct jinja_entry_point jinja_sequence_filters[] = {
    {"batch", filter_batch, "linecount,fill_with", 1, 0, true},
    {"count", filter_length, "", 0, 0, false},
    {"dictsort", filter_dictsort, "case_sensitive,by,reverse", 0, 0, false},
    {"first", filter_first, "", 0, 0, false},
    {"groupby", filter_groupby, "attribute,default,case_sensitive", 1, 0, false},
    {"items", filter_items, "", 0, 0, true},
    {"join", filter_join, "d,attribute", 0, 0, false},
    {"last", filter_last, "", 0, 0, false},
    {"length", filter_length, "", 0, 0, false},
    {"list", filter_list, "", 0, 0, false},
    {"map", filter_map, "*", 0, 0, true},
    {"max", filter_extreme, "case_sensitive,attribute", 0, 1, false},
    {"min", filter_extreme, "case_sensitive,attribute", 0, 0, false},
    {"reject", filter_select, "*", 0, REJECT, true},
    {"rejectattr", filter_select, "*", 0, REJECT | BY_ATTRIBUTE, true},
    {"reverse", filter_reverse, "", 0, 0, false},
    {"select", filter_select, "*", 0, SELECT, true},
    {"selectattr", filter_select, "*", 0, SELECT | BY_ATTRIBUTE, true},
    {"slice", filter_slice, "slices,fill_with", 1, 0, true},
    {"sort", filter_sort, "reverse,case_sensitive,attribute", 0, 0, false},
    {"sum", filter_sum, "attribute,start", 0, 0, false},
    {"unique", filter_unique, "case_sensitive,attribute", 0, 0, true},
    {NULL, NULL, NULL, 0, 0, false},
};
