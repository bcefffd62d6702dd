/* SPDX-License-Identifier: Apache-2.0 */
/* The values of a render, as Python has them. They live in the render's pool and are immutable,
 * except namespaces, generators (read once), cyclers and joiners. */
#ifndef IMBREX_JINJA_JINJA_VALUE_H
#define IMBREX_JINJA_JINJA_VALUE_H

#include <jansson.h>

#include "jinja/jinja_string.h"

enum jinja_kind {
    JINJA_MISSING, /* no value at all: an argument not given, a name not set */
    JINJA_UNDEFINED,
    JINJA_NONE,
    JINJA_BOOL,
    JINJA_INT,
    JINJA_FLOAT,
    JINJA_STRING,
    JINJA_LIST, /* and what behaves much like one: see enum jinja_flavor */
    JINJA_DICT,
    JINJA_RANGE,
    JINJA_NAMESPACE,
    JINJA_MACRO,
    JINJA_LOOP,
    JINJA_FUNCTION, /* a global function */
    JINJA_METHOD,   /* of a value */
    JINJA_CYCLER,
    JINJA_JOINER,
};

enum jinja_flavor {
    JINJA_FLAVOR_LIST,
    JINJA_FLAVOR_TUPLE,
    JINJA_FLAVOR_GROUP, /* a tuple with names: (grouper, list) */
    JINJA_FLAVOR_KEYS,
    JINJA_FLAVOR_VALUES,
    JINJA_FLAVOR_ITEMS,
    JINJA_FLAVOR_GENERATOR, /* can be read once, has no length, is always true */
};

struct jinja_list;
struct jinja_dict;
struct jinja_range;
struct jinja_undefined;
struct jinja_macro;
struct jinja_loop;
struct jinja_method;
struct jinja_cycler;
struct jinja_joiner;
struct jinja_function;

struct jinja_value {
    enum jinja_kind kind;
    union {
        bool boolean;
        int64_t integer;
        double real;
        const struct jinja_string *string;
        struct jinja_list *list;
        struct jinja_dict *dict; /* of a dict or a namespace */
        const struct jinja_range *range;
        const struct jinja_undefined *undefined;
        struct jinja_macro *macro;
        struct jinja_loop *loop;
        const struct jinja_function *function;
        const struct jinja_method *method;
        struct jinja_cycler *cycler;
        struct jinja_joiner *joiner;
    } as;
};

struct jinja_list {
    struct jinja_value *items;
    size_t num_items, capacity;
    size_t num_read; /* of a generator */
    const struct jinja_string
        *failure; /* what reading a generator to its end fails with, or NULL */
    enum jinja_flavor flavor;
    bool is_input; /* came whole from an input variable */
};

struct jinja_entry {
    struct jinja_value key, value;
    uint64_t hash;
};

/* In order of insertion. */
struct jinja_dict {
    struct jinja_entry *entries;
    size_t num_entries, capacity;
    uint32_t *slots; /* [num_slots], entry index + 1 or 0; NULL while the dict is small */
    size_t num_slots;
    bool is_input;
};

struct jinja_range {
    int64_t start, stop, step;
    size_t num_items;
};

/* The differences may be beyond 64 bits where the items are not: hence unsigned. */
static inline int64_t jinja_range_item(const struct jinja_range *range, size_t item_idx)
{
    return (int64_t)((uint64_t)range->start + (uint64_t)range->step * item_idx);
}

struct jinja_undefined {
    const struct jinja_string *hint; /* the whole message, or NULL */
    const struct jinja_string *name; /* of the variable or attribute; NULL for another key */
    struct jinja_value object;       /* that has no such attribute; MISSING for a variable */
    struct jinja_value key;
};

struct jinja_cycler {
    const struct jinja_list *items;
    size_t position;
};

struct jinja_joiner {
    struct jinja_value separator;
    bool was_used;
};

static inline struct jinja_value jinja_missing(void)
{
    return (struct jinja_value){.kind = JINJA_MISSING};
}

static inline struct jinja_value jinja_none(void)
{
    return (struct jinja_value){.kind = JINJA_NONE};
}

static inline struct jinja_value jinja_bool(bool boolean)
{
    return (struct jinja_value){.kind = JINJA_BOOL, .as.boolean = boolean};
}

static inline struct jinja_value jinja_int(int64_t integer)
{
    return (struct jinja_value){.kind = JINJA_INT, .as.integer = integer};
}

static inline struct jinja_value jinja_float(double real)
{
    return (struct jinja_value){.kind = JINJA_FLOAT, .as.real = real};
}

static inline struct jinja_value jinja_string_value(const struct jinja_string *string)
{
    return (struct jinja_value){.kind = JINJA_STRING, .as.string = string};
}

static inline struct jinja_value jinja_list_value(struct jinja_list *list)
{
    return (struct jinja_value){.kind = JINJA_LIST, .as.list = list};
}

static inline struct jinja_value jinja_dict_value(struct jinja_dict *dict)
{
    return (struct jinja_value){.kind = JINJA_DICT, .as.dict = dict};
}

/* An int, or a bool, which Python counts as one. */
static inline bool jinja_as_int(const struct jinja_value *value, int64_t *integer)
{
    if (value->kind == JINJA_INT) {
        *integer = value->as.integer;
    } else if (value->kind == JINJA_BOOL) {
        *integer = value->as.boolean;
    } else {
        return false;
    }
    return true;
}

static inline bool jinja_is_tuple(const struct jinja_value *value)
{
    return value->kind == JINJA_LIST && (value->as.list->flavor == JINJA_FLAVOR_TUPLE ||
                                         value->as.list->flavor == JINJA_FLAVOR_GROUP);
}

/* A list or tuple: what can be indexed and added. */
static inline bool jinja_is_sequence(const struct jinja_value *value)
{
    return value->kind == JINJA_LIST && value->as.list->flavor <= JINJA_FLAVOR_GROUP;
}

static inline bool jinja_is_generator(const struct jinja_value *value)
{
    return value->kind == JINJA_LIST && value->as.list->flavor == JINJA_FLAVOR_GENERATOR;
}

/* type(value).__name__ */
const char *jinja_type_name(const struct jinja_value *value);

enum imbrex_status jinja_list_new(struct jinja_render *render, enum jinja_flavor flavor,
                                  size_t capacity, struct jinja_list **list);
enum imbrex_status jinja_list_append(struct jinja_render *render, struct jinja_list *list,
                                     struct jinja_value item);
/* A tuple of two. */
enum imbrex_status jinja_pair_new(struct jinja_render *render, struct jinja_value first,
                                  struct jinja_value second, struct jinja_value *pair);

enum imbrex_status jinja_dict_new(struct jinja_render *render, size_t capacity,
                                  struct jinja_dict **dict);
enum imbrex_status jinja_dict_set(struct jinja_render *render, struct jinja_dict *dict,
                                  struct jinja_value key, struct jinja_value value);
/* *found is NULL if the key is not there. FORMAT for a key that Python cannot hash. */
enum imbrex_status jinja_dict_get(struct jinja_render *render, const struct jinja_dict *dict,
                                  const struct jinja_value *key, const struct jinja_value **found);
enum imbrex_status jinja_dict_get_string(struct jinja_render *render, const struct jinja_dict *dict,
                                         const struct jinja_string *key,
                                         const struct jinja_value **found);
bool jinja_is_hashable(const struct jinja_value *value);

/* JSON to values; strings are views of jansson's. */
enum imbrex_status jinja_value_from_json(struct jinja_render *render, const json_t *json,
                                         bool is_input, struct jinja_value *value);

bool jinja_truth(const struct jinja_value *value);
enum imbrex_status jinja_equal(struct jinja_render *render, const struct jinja_value *a,
                               const struct jinja_value *b, bool *is_equal);
/* *order < 0, 0, > 0; FORMAT if Python has no order for the two. `symbol` is for that message. */
enum imbrex_status jinja_order(struct jinja_render *render, const struct jinja_value *a,
                               const struct jinja_value *b, const char *symbol, int *order);
enum imbrex_status jinja_contains(struct jinja_render *render, const struct jinja_value *container,
                                  const struct jinja_value *item, bool *is_in);
/* len(); FORMAT if the value has none. */
enum imbrex_status jinja_length(struct jinja_render *render, const struct jinja_value *value,
                                size_t *length);

/* Reads what Python can iterate over, an item at a time. */
struct jinja_iterator {
    struct jinja_value source;
    size_t position; /* an index; in a string a byte offset */
};

/* FORMAT if the value cannot be iterated over. */
enum imbrex_status jinja_iterate(struct jinja_render *render, const struct jinja_value *value,
                                 struct jinja_iterator *iterator);
enum imbrex_status jinja_iterator_next(struct jinja_render *render, struct jinja_iterator *iterator,
                                       struct jinja_value *item, bool *has_item);
bool jinja_is_iterable(const struct jinja_value *value);
/* list(value), a new one */
enum imbrex_status jinja_to_list(struct jinja_render *render, const struct jinja_value *value,
                                 struct jinja_list **list);

/* str(value) */
enum imbrex_status jinja_to_string(struct jinja_render *render, const struct jinja_value *value,
                                   const struct jinja_string **string);
enum imbrex_status jinja_append_value(struct jinja_render *render, struct jinja_text *text,
                                      const struct jinja_value *value);
/* repr(value) */
enum imbrex_status jinja_append_repr(struct jinja_render *render, struct jinja_text *text,
                                     const struct jinja_value *value);

#define JINJA_FLOAT_BYTES 32
/* repr() of a float, NUL-terminated; returns its length. Independent of the locale. */
size_t jinja_format_float(double real, char text[JINJA_FLOAT_BYTES]);
/* Digits with at most one point and an exponent, as Python's float() takes them. */
bool jinja_parse_float(const char *text, size_t num_bytes, double *real);

/* json.dumps() */
struct jinja_json_style {
    const struct jinja_string *indent; /* one level, or NULL for one line */
    const struct jinja_string *item_separator, *key_separator;
    bool sorts_keys, escapes_non_ascii;
};
enum imbrex_status jinja_to_json(struct jinja_render *render, const struct jinja_value *value,
                                 const struct jinja_json_style *style,
                                 const struct jinja_string **json);

/* Stable sort of indices or items by keys: items[i] goes with keys[i]. */
enum imbrex_status jinja_sort(struct jinja_render *render, struct jinja_value *items,
                              struct jinja_value *keys, size_t num_items, bool is_reverse);

#endif
