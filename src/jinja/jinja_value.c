/* SPDX-License-Identifier: Apache-2.0 */
/* Containers, comparison and iteration with Python's rules: numbers of all types are equal if their
 * values are, dicts keep their order, what cannot be ordered or hashed is an error. */
#include <math.h>
#include <string.h>

#include "base/utf8.h"
#include "jinja/jinja_render.h"

const char *jinja_type_name(const struct jinja_value *value)
{
    static const char *const flavors[] = {"list",        "tuple",      "tuple",    "dict_keys",
                                          "dict_values", "dict_items", "generator"};
    switch (value->kind) {
    case JINJA_NONE:
        return "NoneType";
    case JINJA_BOOL:
        return "bool";
    case JINJA_INT:
        return "int";
    case JINJA_FLOAT:
        return "float";
    case JINJA_STRING:
        return "str";
    case JINJA_LIST:
        return flavors[value->as.list->flavor];
    case JINJA_DICT:
        return "dict";
    case JINJA_RANGE:
        return "range";
    case JINJA_NAMESPACE:
        return "Namespace";
    case JINJA_MACRO:
        return "Macro";
    case JINJA_LOOP:
        return "LoopContext";
    case JINJA_FUNCTION:
        return "function";
    case JINJA_METHOD:
        return "method";
    case JINJA_CYCLER:
        return "Cycler";
    case JINJA_JOINER:
        return "Joiner";
    default:
        return "Undefined";
    }
}

/* ---- lists and dicts ------------------------------------------------------------------------- */

enum imbrex_status jinja_list_new(struct jinja_render *render, enum jinja_flavor flavor,
                                  size_t capacity, struct jinja_list **list_out)
{
    struct jinja_list *list;
    struct jinja_value *items = NULL;
    TRY(jinja_take(render, 1, sizeof(*list), &list));
    if (capacity != 0) {
        TRY(jinja_take(render, capacity, sizeof(*items), &items));
    }
    *list = (struct jinja_list){.items = items, .capacity = capacity, .flavor = flavor};
    *list_out = list;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_list_append(struct jinja_render *render, struct jinja_list *list,
                                     struct jinja_value item)
{
    if (list->num_items == list->capacity) {
        size_t capacity = list->capacity < 4 ? 4 : list->capacity * 2;
        struct jinja_value *items;
        TRY(jinja_take(render, capacity, sizeof(*items), &items));
        if (list->num_items != 0) {
            memcpy(items, list->items, list->num_items * sizeof(*items));
        }
        list->items = items;
        list->capacity = capacity;
    }
    list->items[list->num_items++] = item;
    return jinja_charge(render, 1);
}

enum imbrex_status jinja_pair_new(struct jinja_render *render, struct jinja_value first,
                                  struct jinja_value second, struct jinja_value *pair)
{
    struct jinja_list *list;
    TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 2, &list));
    TRY(jinja_list_append(render, list, first));
    TRY(jinja_list_append(render, list, second));
    *pair = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

bool jinja_is_hashable(const struct jinja_value *value)
{
    if (value->kind == JINJA_DICT) {
        return false;
    }
    if (value->kind != JINJA_LIST) {
        return true;
    }
    if (!jinja_is_tuple(value)) {
        return value->as.list->flavor == JINJA_FLAVOR_GENERATOR;
    }
    for (size_t i = 0; i < value->as.list->num_items; i++) {
        const struct jinja_value *item = &value->as.list->items[i];
        if (jinja_is_tuple(item) || !jinja_is_hashable(item)) { /* tuples in tuples: not needed */
            return false;
        }
    }
    return true;
}

static uint64_t hash_mix(uint64_t hash, uint64_t word)
{
    hash = (hash ^ word) * 0x9e3779b97f4a7c15u;
    return hash ^ (hash >> 29);
}

/* Equal values have equal hashes; the value is hashable. */
static uint64_t value_hash(const struct jinja_value *value)
{
    uint64_t hash = 0, word = 0;
    int64_t integer;
    if (jinja_as_int(value, &integer)) {
        return hash_mix(1, (uint64_t)integer);
    }
    switch (value->kind) {
    case JINJA_FLOAT:
        if (value->as.real >= -0x1p63 && value->as.real < 0x1p63 &&
            value->as.real == floor(value->as.real)) {
            return hash_mix(1, (uint64_t)(int64_t)value->as.real);
        }
        memcpy(&word, &value->as.real, sizeof(word));
        return hash_mix(2, word);
    case JINJA_STRING:
        for (size_t i = 0; i < value->as.string->num_bytes; i += sizeof(word)) {
            size_t left = value->as.string->num_bytes - i;
            word = 0;
            memcpy(&word, value->as.string->bytes + i, left < sizeof(word) ? left : sizeof(word));
            hash = hash_mix(hash, word);
        }
        return hash_mix(hash, value->as.string->num_bytes);
    case JINJA_LIST:
        if (value->as.list->flavor == JINJA_FLAVOR_GENERATOR) {
            return hash_mix(4, (uint64_t)(uintptr_t)value->as.list);
        }
        for (size_t i = 0; i < value->as.list->num_items; i++) {
            hash = hash_mix(hash, value_hash(&value->as.list->items[i]));
        }
        return hash;
    default: /* compared by identity, or there is one value of the kind */
        return hash_mix(3, (uint64_t)value->kind);
    }
}

enum imbrex_status jinja_dict_new(struct jinja_render *render, size_t capacity,
                                  struct jinja_dict **dict_out)
{
    struct jinja_dict *dict;
    struct jinja_entry *entries = NULL;
    TRY(jinja_take(render, 1, sizeof(*dict), &dict));
    if (capacity != 0) {
        TRY(jinja_take(render, capacity, sizeof(*entries), &entries));
    }
    *dict = (struct jinja_dict){.entries = entries, .capacity = capacity};
    *dict_out = dict;
    return IMBREX_STATUS_OK;
}

#define MAX_UNINDEXED 8

static void slot_fill(struct jinja_dict *dict, size_t entry_idx)
{
    size_t mask = dict->num_slots - 1;
    size_t i = (size_t)dict->entries[entry_idx].hash & mask;
    while (dict->slots[i] != 0) {
        i = (i + 1) & mask;
    }
    dict->slots[i] = (uint32_t)entry_idx + 1;
}

static enum imbrex_status dict_reindex(struct jinja_render *render, struct jinja_dict *dict)
{
    size_t num_slots = 4 * MAX_UNINDEXED;
    while (num_slots < dict->capacity * 2) {
        num_slots *= 2;
    }
    if (num_slots > UINT32_MAX) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY, "a dict of %zu items", dict->num_entries);
    }
    TRY(jinja_take(render, num_slots, sizeof(*dict->slots), &dict->slots));
    memset(dict->slots, 0, num_slots * sizeof(*dict->slots));
    dict->num_slots = num_slots;
    for (size_t i = 0; i < dict->num_entries; i++) {
        slot_fill(dict, i);
    }
    return jinja_charge(render, num_slots / 8);
}

/* *entry is NULL if the key is not there. */
static enum imbrex_status dict_find(struct jinja_render *render, const struct jinja_dict *dict,
                                    const struct jinja_value *key, uint64_t hash,
                                    struct jinja_entry **entry)
{
    bool is_equal;
    *entry = NULL;
    if (dict->slots == NULL) {
        for (size_t i = 0; i < dict->num_entries; i++) {
            if (dict->entries[i].hash == hash) {
                TRY(jinja_equal(render, &dict->entries[i].key, key, &is_equal));
                if (is_equal) {
                    *entry = &dict->entries[i];
                    return IMBREX_STATUS_OK;
                }
            }
        }
        return IMBREX_STATUS_OK;
    }
    size_t mask = dict->num_slots - 1;
    for (size_t i = (size_t)hash & mask; dict->slots[i] != 0; i = (i + 1) & mask) {
        struct jinja_entry *candidate = &dict->entries[dict->slots[i] - 1];
        TRY(jinja_charge(render, 1)); /* keys may be chosen to collide */
        if (candidate->hash == hash) {
            TRY(jinja_equal(render, &candidate->key, key, &is_equal));
            if (is_equal) {
                *entry = candidate;
                return IMBREX_STATUS_OK;
            }
        }
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status key_hash(struct jinja_render *render, const struct jinja_value *key,
                                   uint64_t *hash)
{
    if (!jinja_is_hashable(key)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "unhashable type: '%s'",
                          jinja_type_name(key));
    }
    if (key->kind == JINJA_STRING) {
        TRY(jinja_charge_bytes(render, key->as.string->num_bytes));
    }
    *hash = value_hash(key);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_dict_set(struct jinja_render *render, struct jinja_dict *dict,
                                  struct jinja_value key, struct jinja_value value)
{
    uint64_t hash = 0;
    struct jinja_entry *entry;
    TRY(jinja_charge(render, 1));
    TRY(key_hash(render, &key, &hash));
    TRY(dict_find(render, dict, &key, hash, &entry));
    if (entry != NULL) {
        entry->value = value;
        return IMBREX_STATUS_OK;
    }
    if (dict->num_entries == dict->capacity) {
        size_t capacity = dict->capacity < 4 ? 4 : dict->capacity * 2;
        struct jinja_entry *entries;
        TRY(jinja_take(render, capacity, sizeof(*entries), &entries));
        if (dict->num_entries != 0) {
            memcpy(entries, dict->entries, dict->num_entries * sizeof(*entries));
        }
        dict->entries = entries;
        dict->capacity = capacity;
        dict->slots = NULL;
    }
    dict->entries[dict->num_entries++] =
        (struct jinja_entry){.key = key, .value = value, .hash = hash};
    if (dict->slots != NULL) {
        slot_fill(dict, dict->num_entries - 1);
    } else if (dict->num_entries > MAX_UNINDEXED) {
        TRY(dict_reindex(render, dict));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_dict_get(struct jinja_render *render, const struct jinja_dict *dict,
                                  const struct jinja_value *key, const struct jinja_value **found)
{
    uint64_t hash = 0;
    struct jinja_entry *entry;
    TRY(key_hash(render, key, &hash));
    TRY(dict_find(render, dict, key, hash, &entry));
    *found = entry == NULL ? NULL : &entry->value;
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_dict_get_string(struct jinja_render *render, const struct jinja_dict *dict,
                                         const struct jinja_string *key,
                                         const struct jinja_value **found)
{
    struct jinja_value value = jinja_string_value(key);
    return jinja_dict_get(render, dict, &value, found);
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static enum imbrex_status array_from_json(struct jinja_render *render, const json_t *json,
                                          bool is_input, struct jinja_value *value)
{
    struct jinja_list *list;
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, json_array_size(json), &list));
    list->is_input = is_input;
    for (size_t i = 0; i < json_array_size(json); i++) {
        struct jinja_value item;
        TRY(jinja_value_from_json(render, json_array_get(json, i), is_input, &item));
        TRY(jinja_list_append(render, list, item));
    }
    *value = jinja_list_value(list);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status object_from_json(struct jinja_render *render, const json_t *json,
                                           bool is_input, struct jinja_value *value)
{
    struct jinja_dict *dict;
    TRY(jinja_dict_new(render, json_object_size(json), &dict));
    dict->is_input = is_input;
    /* jansson's macros and iterators want objects that are not const, but change nothing */
    json_t *object = (json_t *)(uintptr_t)json;
    for (void *i = json_object_iter(object); i != NULL; i = json_object_iter_next(object, i)) {
        const struct jinja_string *key;
        struct jinja_value item;
        const char *text = json_object_iter_key(i);
        TRY(jinja_string_new(render, text, strlen(text), is_input, &key));
        TRY(jinja_value_from_json(render, json_object_iter_value(i), is_input, &item));
        TRY(jinja_dict_set(render, dict, jinja_string_value(key), item));
    }
    *value = jinja_dict_value(dict);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_value_from_json(struct jinja_render *render, const json_t *json,
                                         bool is_input, struct jinja_value *value)
{
    const struct jinja_string *string;
    TRY(jinja_enter(render));
    switch (json_typeof(json)) {
    case JSON_NULL:
        *value = jinja_none();
        break;
    case JSON_TRUE:
    case JSON_FALSE:
        *value = jinja_bool(json_is_true(json));
        break;
    case JSON_INTEGER:
        *value = jinja_int(json_integer_value(json));
        break;
    case JSON_REAL:
        *value = jinja_float(json_real_value(json));
        break;
    case JSON_STRING:
        TRY(jinja_string_new(render, json_string_value(json), json_string_length(json), is_input,
                             &string));
        *value = jinja_string_value(string);
        break;
    case JSON_ARRAY:
        TRY(array_from_json(render, json, is_input, value));
        break;
    case JSON_OBJECT:
        TRY(object_from_json(render, json, is_input, value));
        break;
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}

/* ---- truth, equality, order ------------------------------------------------------------------ */

bool jinja_truth(const struct jinja_value *value)
{
    switch (value->kind) {
    case JINJA_MISSING:
    case JINJA_UNDEFINED:
    case JINJA_NONE:
        return false;
    case JINJA_BOOL:
        return value->as.boolean;
    case JINJA_INT:
        return value->as.integer != 0;
    case JINJA_FLOAT:
        return value->as.real != 0;
    case JINJA_STRING:
        return value->as.string->num_bytes != 0;
    case JINJA_LIST:
        return value->as.list->num_items != 0 || value->as.list->flavor == JINJA_FLAVOR_GENERATOR;
    case JINJA_DICT:
        return value->as.dict->num_entries != 0;
    case JINJA_RANGE:
        return value->as.range->num_items != 0;
    default:
        return true;
    }
}

/* Numbers as Python compares them: exactly, whatever their types. */
static bool numbers_compare(const struct jinja_value *a, const struct jinja_value *b, int *order,
                            bool *is_unordered)
{
    int64_t left, right;
    bool has_left = jinja_as_int(a, &left), has_right = jinja_as_int(b, &right);
    *is_unordered = false;
    if (has_left && has_right) {
        *order = (left > right) - (left < right);
        return true;
    }
    if ((!has_left && a->kind != JINJA_FLOAT) || (!has_right && b->kind != JINJA_FLOAT)) {
        return false;
    }
    if (!has_left && !has_right) {
        *is_unordered = isnan(a->as.real) || isnan(b->as.real);
        *order = (a->as.real > b->as.real) - (a->as.real < b->as.real);
        return true;
    }
    double real = has_left ? b->as.real : a->as.real;
    int64_t integer = has_left ? left : right;
    int real_order; /* of the float against the int */
    if (isnan(real)) {
        *is_unordered = true;
        real_order = 0;
    } else if (real >= 0x1p63) {
        real_order = 1;
    } else if (real < -0x1p63) {
        real_order = -1;
    } else {
        int64_t whole = (int64_t)real; /* towards zero */
        double fraction = real - (double)whole;
        real_order = whole != integer ? (whole > integer) - (whole < integer)
                                      : (fraction > 0) - (fraction < 0);
    }
    *order = has_left ? -real_order : real_order;
    return true;
}

static enum imbrex_status lists_equal(struct jinja_render *render, const struct jinja_list *a,
                                      const struct jinja_list *b, bool *is_equal)
{
    *is_equal = a->num_items == b->num_items;
    for (size_t i = 0; *is_equal && i < a->num_items; i++) {
        TRY(jinja_equal(render, &a->items[i], &b->items[i], is_equal));
    }
    return IMBREX_STATUS_OK;
}

static enum imbrex_status dicts_equal(struct jinja_render *render, const struct jinja_dict *a,
                                      const struct jinja_dict *b, bool *is_equal)
{
    *is_equal = a->num_entries == b->num_entries;
    for (size_t i = 0; *is_equal && i < a->num_entries; i++) {
        const struct jinja_value *other;
        TRY(jinja_dict_get(render, b, &a->entries[i].key, &other));
        *is_equal = other != NULL;
        if (other != NULL) {
            TRY(jinja_equal(render, &a->entries[i].value, other, is_equal));
        }
    }
    return IMBREX_STATUS_OK;
}

static bool ranges_equal(const struct jinja_range *a, const struct jinja_range *b)
{
    return a->num_items == b->num_items &&
           (a->num_items == 0 ||
            (a->start == b->start && (a->num_items == 1 || a->step == b->step)));
}

enum imbrex_status jinja_equal(struct jinja_render *render, const struct jinja_value *a,
                               const struct jinja_value *b, bool *is_equal)
{
    int order;
    bool is_unordered;
    if (numbers_compare(a, b, &order, &is_unordered)) {
        *is_equal = order == 0 && !is_unordered;
        return IMBREX_STATUS_OK;
    }
    *is_equal = false;
    if (a->kind != b->kind) {
        return IMBREX_STATUS_OK;
    }
    TRY(jinja_enter(render));
    switch (a->kind) {
    case JINJA_STRING:
        *is_equal = jinja_string_equal(a->as.string, b->as.string);
        TRY(jinja_charge_bytes(render, *is_equal ? a->as.string->num_bytes : 0));
        break;
    case JINJA_LIST:
        if (a->as.list == b->as.list) {
            *is_equal = true;
        } else if (jinja_is_tuple(a) ? jinja_is_tuple(b)
                                     : a->as.list->flavor == b->as.list->flavor &&
                                           (a->as.list->flavor == JINJA_FLAVOR_LIST ||
                                            a->as.list->flavor == JINJA_FLAVOR_KEYS ||
                                            a->as.list->flavor == JINJA_FLAVOR_ITEMS)) {
            TRY(lists_equal(render, a->as.list, b->as.list, is_equal));
        }
        break;
    case JINJA_DICT:
        TRY(dicts_equal(render, a->as.dict, b->as.dict, is_equal));
        break;
    case JINJA_RANGE:
        *is_equal = ranges_equal(a->as.range, b->as.range);
        break;
    case JINJA_NONE:
    case JINJA_UNDEFINED:
    case JINJA_MISSING:
        *is_equal = true;
        break;
    case JINJA_METHOD:
        *is_equal = a->as.method->entry == b->as.method->entry &&
                    a->as.method->self.as.dict == b->as.method->self.as.dict;
        break;
    default:
        *is_equal = a->as.macro == b->as.macro; /* the same object: any of the union's pointers */
        break;
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}

static enum imbrex_status lists_order(struct jinja_render *render, const struct jinja_list *a,
                                      const struct jinja_list *b, const char *symbol, int *order)
{
    for (size_t i = 0; i < a->num_items && i < b->num_items; i++) {
        bool is_equal;
        TRY(jinja_equal(render, &a->items[i], &b->items[i], &is_equal));
        if (!is_equal) {
            return jinja_order(render, &a->items[i], &b->items[i], symbol, order);
        }
    }
    *order = (a->num_items > b->num_items) - (a->num_items < b->num_items);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_order(struct jinja_render *render, const struct jinja_value *a,
                               const struct jinja_value *b, const char *symbol, int *order)
{
    bool is_unordered;
    TRY(jinja_enter(render));
    if (numbers_compare(a, b, order, &is_unordered)) {
        if (is_unordered) {
            return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "a comparison with nan");
        }
    } else if (a->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, a->as.undefined);
    } else if (b->kind == JINJA_UNDEFINED) {
        return jinja_undefined_fail(render, b->as.undefined);
    } else if (a->kind == JINJA_STRING && b->kind == JINJA_STRING) {
        TRY(jinja_charge_bytes(render, a->as.string->num_bytes));
        *order = jinja_string_compare(a->as.string, b->as.string);
    } else if (jinja_is_sequence(a) && jinja_is_sequence(b) &&
               jinja_is_tuple(a) == jinja_is_tuple(b)) {
        TRY(lists_order(render, a->as.list, b->as.list, symbol, order));
    } else {
        return jinja_fail(render, IMBREX_STATUS_FORMAT,
                          "'%s' not supported between instances of '%s' and '%s'", symbol,
                          jinja_type_name(a), jinja_type_name(b));
    }
    jinja_leave(render);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_contains(struct jinja_render *render, const struct jinja_value *container,
                                  const struct jinja_value *item, bool *is_in)
{
    if (container->kind == JINJA_STRING) {
        if (item->kind != JINJA_STRING) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "'in <string>' requires string as left operand, not %s",
                              jinja_type_name(item));
        }
        TRY(jinja_charge_bytes(render, container->as.string->num_bytes));
        *is_in = jinja_string_find(container->as.string, 0, item->as.string) != SIZE_MAX;
        return IMBREX_STATUS_OK;
    }
    if (container->kind == JINJA_DICT) {
        const struct jinja_value *found;
        TRY(jinja_dict_get(render, container->as.dict, item, &found));
        *is_in = found != NULL;
        return IMBREX_STATUS_OK;
    }
    if (!jinja_is_iterable(container)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "argument of type '%s' is not iterable",
                          jinja_type_name(container));
    }
    struct jinja_iterator iterator;
    struct jinja_value candidate;
    bool has_candidate;
    *is_in = false;
    TRY(jinja_iterate(render, container, &iterator));
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &candidate, &has_candidate));
        if (!has_candidate) {
            return IMBREX_STATUS_OK;
        }
        TRY(jinja_equal(render, &candidate, item, is_in));
        if (*is_in) {
            return IMBREX_STATUS_OK;
        }
    }
}

enum imbrex_status jinja_length(struct jinja_render *render, const struct jinja_value *value,
                                size_t *length)
{
    switch (value->kind) {
    case JINJA_UNDEFINED:
        *length = 0;
        return IMBREX_STATUS_OK;
    case JINJA_STRING:
        *length = value->as.string->num_chars;
        return IMBREX_STATUS_OK;
    case JINJA_LIST:
        if (value->as.list->flavor != JINJA_FLAVOR_GENERATOR) {
            *length = value->as.list->num_items;
            return IMBREX_STATUS_OK;
        }
        break;
    case JINJA_DICT:
        *length = value->as.dict->num_entries;
        return IMBREX_STATUS_OK;
    case JINJA_RANGE:
        *length = value->as.range->num_items;
        return IMBREX_STATUS_OK;
    case JINJA_LOOP:
        return jinja_loop_length(render, value->as.loop, length);
    default:
        break;
    }
    return jinja_fail(render, IMBREX_STATUS_FORMAT, "object of type '%s' has no len()",
                      jinja_type_name(value));
}

/* ---- iteration ------------------------------------------------------------------------------- */

bool jinja_is_iterable(const struct jinja_value *value)
{
    switch (value->kind) {
    case JINJA_UNDEFINED:
    case JINJA_STRING:
    case JINJA_LIST:
    case JINJA_DICT:
    case JINJA_RANGE:
    case JINJA_LOOP:
        return true;
    default:
        return false;
    }
}

enum imbrex_status jinja_iterate(struct jinja_render *render, const struct jinja_value *value,
                                 struct jinja_iterator *iterator)
{
    if (value->kind == JINJA_LOOP) {
        return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED, "iteration over 'loop' itself");
    }
    if (!jinja_is_iterable(value)) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "'%s' object is not iterable",
                          jinja_type_name(value));
    }
    *iterator = (struct jinja_iterator){.source = *value};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status next_char(struct jinja_render *render, struct jinja_iterator *iterator,
                                    struct jinja_value *item)
{
    const struct jinja_string *string = iterator->source.as.string, *cut;
    size_t begin = iterator->position;
    struct utf8_step step = utf8_next(string->bytes + begin, string->num_bytes - begin);
    iterator->position += step.num_bytes;
    TRY(jinja_string_cut(render, string, begin, iterator->position, &cut));
    if (cut->is_markup) { /* its characters are not */
        struct jinja_string *plain;
        TRY(jinja_take(render, 1, sizeof(*plain), &plain));
        *plain = *cut;
        plain->is_markup = false;
        plain->growth = NULL;
        cut = plain;
    }
    *item = jinja_string_value(cut);
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_iterator_next(struct jinja_render *render, struct jinja_iterator *iterator,
                                       struct jinja_value *item, bool *has_item)
{
    const struct jinja_value *source = &iterator->source;
    *has_item = false;
    TRY(jinja_charge(render, 1));
    switch (source->kind) {
    case JINJA_STRING:
        if (iterator->position < source->as.string->num_bytes) {
            *has_item = true;
            return next_char(render, iterator, item);
        }
        break;
    case JINJA_LIST: {
        struct jinja_list *list = source->as.list;
        bool is_generator = list->flavor == JINJA_FLAVOR_GENERATOR;
        size_t *position = is_generator ? &list->num_read : &iterator->position;
        if (*position < list->num_items) {
            *has_item = true;
            *item = list->items[(*position)++];
        } else if (list->failure != NULL) {
            return error_set(render->err, IMBREX_STATUS_FORMAT, "%.*s",
                             (int)list->failure->num_bytes, list->failure->bytes);
        }
        break;
    }
    case JINJA_DICT:
        if (iterator->position < source->as.dict->num_entries) {
            *has_item = true;
            *item = source->as.dict->entries[iterator->position++].key;
        }
        break;
    case JINJA_RANGE:
        if (iterator->position < source->as.range->num_items) {
            *has_item = true;
            *item = jinja_int(jinja_range_item(source->as.range, iterator->position++));
        }
        break;
    default:
        break;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_to_list(struct jinja_render *render, const struct jinja_value *value,
                                 struct jinja_list **list_out)
{
    struct jinja_list *list;
    struct jinja_iterator iterator;
    struct jinja_value item;
    bool has_item;
    size_t capacity = 0;
    if (value->kind == JINJA_LIST) {
        capacity = value->as.list->num_items;
    } else if (value->kind == JINJA_DICT) {
        capacity = value->as.dict->num_entries;
    }
    TRY(jinja_iterate(render, value, &iterator));
    TRY(jinja_list_new(render, JINJA_FLAVOR_LIST, capacity, &list));
    list->is_input = (value->kind == JINJA_LIST && value->as.list->is_input) ||
                     (value->kind == JINJA_DICT && value->as.dict->is_input);
    for (;;) {
        TRY(jinja_iterator_next(render, &iterator, &item, &has_item));
        if (!has_item) {
            break;
        }
        TRY(jinja_list_append(render, list, item));
    }
    *list_out = list;
    return IMBREX_STATUS_OK;
}

/* ---- sorting --------------------------------------------------------------------------------- */

struct sorter {
    struct jinja_value *items, *keys, *item_space, *key_space;
    bool is_reverse;
};

/* Merges the sorted [begin, middle) and [middle, end). */
static enum imbrex_status merge(struct jinja_render *render, const struct sorter *sorter,
                                size_t begin, size_t middle, size_t end)
{
    size_t left = begin, right = middle;
    for (size_t i = begin; i < end; i++) {
        bool takes_right = left == middle;
        if (!takes_right && right < end) {
            int order;
            TRY(jinja_order(render, &sorter->keys[right], &sorter->keys[left], "<", &order));
            takes_right = sorter->is_reverse ? order > 0 : order < 0;
        }
        size_t from = takes_right ? right++ : left++;
        sorter->item_space[i] = sorter->items[from];
        sorter->key_space[i] = sorter->keys[from];
    }
    memcpy(sorter->items + begin, sorter->item_space + begin,
           (end - begin) * sizeof(*sorter->items));
    memcpy(sorter->keys + begin, sorter->key_space + begin, (end - begin) * sizeof(*sorter->keys));
    return IMBREX_STATUS_OK;
}

enum imbrex_status jinja_sort(struct jinja_render *render, struct jinja_value *items,
                              struct jinja_value *keys, size_t num_items, bool is_reverse)
{
    struct sorter sorter = {.items = items, .keys = keys, .is_reverse = is_reverse};
    if (num_items < 2) {
        return IMBREX_STATUS_OK;
    }
    TRY(jinja_take(render, num_items, sizeof(*items), &sorter.item_space));
    TRY(jinja_take(render, num_items, sizeof(*keys), &sorter.key_space));
    for (size_t width = 1; width < num_items; width *= 2) {
        for (size_t begin = 0; num_items - begin > width; begin += 2 * width) {
            size_t end = num_items - begin < 2 * width ? num_items : begin + 2 * width;
            TRY(merge(render, &sorter, begin, begin + width, end));
            if (end == num_items) {
                break;
            }
        }
    }
    return IMBREX_STATUS_OK;
}
