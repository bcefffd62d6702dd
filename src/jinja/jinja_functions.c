/* SPDX-License-Identifier: Apache-2.0 */
/* Global functions: Jinja's own, and the two that Hugging Face adds. */
#include <stdio.h>
#include <string.h>

#include "jinja/jinja_render.h"

#define MAX_RANGE 100000 /* as Jinja's sandbox has it */

static enum imbrex_status range_new(struct jinja_render *render, const struct jinja_call *call,
                                    struct jinja_value *result)
{
    int64_t bounds[3] = {0, 0, 1};
    int num_bounds = 0;
    for (int i = 0; i < 3 && call->args[i].kind != JINJA_MISSING; i++) {
        if (call->args[i].kind == JINJA_UNDEFINED) {
            return jinja_undefined_fail(render, call->args[i].as.undefined);
        }
        if (!jinja_as_int(&call->args[i], &bounds[i])) {
            return jinja_fail(render, IMBREX_STATUS_FORMAT,
                              "'%s' object cannot be interpreted as an integer",
                              jinja_type_name(&call->args[i]));
        }
        num_bounds++;
    }
    if (num_bounds == 1) {
        bounds[1] = bounds[0];
        bounds[0] = 0;
    }
    if (bounds[2] == 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "range() arg 3 must not be zero");
    }
    bool is_backward = bounds[2] < 0;
    uint64_t low = (uint64_t)(is_backward ? bounds[1] : bounds[0]);
    uint64_t high = (uint64_t)(is_backward ? bounds[0] : bounds[1]);
    bool is_empty = is_backward ? bounds[0] <= bounds[1] : bounds[1] <= bounds[0];
    uint64_t step = is_backward ? 0 - (uint64_t)bounds[2] : (uint64_t)bounds[2];
    uint64_t num_items = is_empty ? 0 : (high - low - 1) / step + 1;
    if (num_items > MAX_RANGE) {
        return jinja_fail(render, IMBREX_STATUS_CAPACITY,
                          "Range too big: ranges are limited to %d items", MAX_RANGE);
    }
    struct jinja_range *range;
    TRY(jinja_take(render, 1, sizeof(*range), &range));
    *range = (struct jinja_range){
        .start = bounds[0], .stop = bounds[1], .step = bounds[2], .num_items = (size_t)num_items};
    *result = (struct jinja_value){.kind = JINJA_RANGE, .as.range = range};
    return IMBREX_STATUS_OK;
}

/* dict(...) and namespace(...): a mapping or pairs, then keywords. variant: the kind */
static enum imbrex_status mapping_new(struct jinja_render *render, const struct jinja_call *call,
                                      struct jinja_value *result)
{
    const struct jinja_args *args = call->all;
    struct jinja_dict *dict;
    TRY(jinja_dict_new(render, args->num_named, &dict));
    if (args->num_positional > 1) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "%s expected at most 1 argument, got %zu",
                          call->entry->name, args->num_positional);
    }
    if (args->num_positional == 1 && args->positional[0].kind == JINJA_DICT) {
        const struct jinja_dict *from = args->positional[0].as.dict;
        for (size_t i = 0; i < from->num_entries; i++) {
            TRY(jinja_dict_set(render, dict, from->entries[i].key, from->entries[i].value));
        }
    } else if (args->num_positional == 1) {
        struct jinja_list *pairs, *pair;
        TRY(jinja_to_list(render, &args->positional[0], &pairs));
        for (size_t i = 0; i < pairs->num_items; i++) {
            TRY(jinja_to_list(render, &pairs->items[i], &pair));
            if (pair->num_items != 2) {
                return jinja_fail(render, IMBREX_STATUS_FORMAT,
                                  "%s update sequence element #%zu has length %zu; 2 is required",
                                  call->entry->name, i, pair->num_items);
            }
            TRY(jinja_dict_set(render, dict, pair->items[0], pair->items[1]));
        }
    }
    for (size_t i = 0; i < args->num_named; i++) {
        TRY(jinja_dict_set(render, dict, jinja_string_value(args->named[i].name),
                           args->named[i].value));
    }
    *result = jinja_dict_value(dict);
    result->kind = (enum jinja_kind)call->entry->variant;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status cycler_new(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    struct jinja_list *items;
    struct jinja_cycler *cycler;
    if (call->all->num_positional == 0 || call->all->num_named != 0) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "at least one item has to be provided");
    }
    TRY(jinja_list_new(render, JINJA_FLAVOR_TUPLE, 0, &items));
    items->items = call->all->positional;
    items->num_items = items->capacity = call->all->num_positional;
    TRY(jinja_take(render, 1, sizeof(*cycler), &cycler));
    *cycler = (struct jinja_cycler){.items = items};
    *result = (struct jinja_value){.kind = JINJA_CYCLER, .as.cycler = cycler};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status joiner_new(struct jinja_render *render, const struct jinja_call *call,
                                     struct jinja_value *result)
{
    static const struct jinja_run run = {SIZE_MAX, false};
    static const struct jinja_string comma = {
        .bytes = ", ", .num_bytes = 2, .num_chars = 2, .runs = &run};
    struct jinja_joiner *joiner;
    TRY(jinja_take(render, 1, sizeof(*joiner), &joiner));
    *joiner = (struct jinja_joiner){.separator = call->args[0].kind == JINJA_MISSING
                                                     ? jinja_string_value(&comma)
                                                     : call->args[0]};
    *result = (struct jinja_value){.kind = JINJA_JOINER, .as.joiner = joiner};
    return IMBREX_STATUS_OK;
}

static enum imbrex_status raise_exception(struct jinja_render *render,
                                          const struct jinja_call *call, struct jinja_value *result)
{
    const struct jinja_string *message;
    (void)result;
    TRY(jinja_to_string(render, &call->args[0], &message));
    size_t num_bytes = message->num_bytes < IMBREX_ERROR_MESSAGE_BYTES ? message->num_bytes
                                                                       : IMBREX_ERROR_MESSAGE_BYTES;
    return jinja_fail(render, IMBREX_STATUS_INVALID_ARGUMENT, "%.*s", (int)num_bytes,
                      message->bytes);
}

/* ---- strftime_now ---------------------------------------------------------------------------- */

struct moment {
    int64_t year;
    int month, day; /* from 1 */
    int hour, minute, second;
    int week_day; /* from Sunday, 0 */
    int year_day; /* from 1 */
};

/* The proleptic Gregorian calendar, counted in eras of 400 years that begin in March. */
static struct moment moment_of(int64_t now)
{
    int64_t days = now / 86400 - (now % 86400 < 0);
    int second_of_day = (int)(now - days * 86400);
    int64_t shifted = days + 719468; /* from 0000-03-01 */
    int64_t era = shifted / 146097 - (shifted % 146097 < 0);
    int64_t day_of_era = shifted - era * 146097;
    int64_t year_of_era =
        (day_of_era - day_of_era / 1460 + day_of_era / 36524 - day_of_era / 146096) / 365;
    int64_t day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    int64_t month = (5 * day_of_year + 2) / 153; /* from March, 0 */
    struct moment moment = {.year = year_of_era + era * 400 + (month >= 10),
                            .month = (int)(month < 10 ? month + 3 : month - 9),
                            .day = (int)(day_of_year - (153 * month + 2) / 5 + 1),
                            .hour = second_of_day / 3600,
                            .minute = second_of_day / 60 % 60,
                            .second = second_of_day % 60,
                            .week_day = (int)(((days + 4) % 7 + 7) % 7)};
    static const int days_before[12] = {0, 31, 59, 90, 120, 151, 181, 212, 243, 273, 304, 334};
    bool is_leap = moment.year % 4 == 0 && (moment.year % 100 != 0 || moment.year % 400 == 0);
    moment.year_day = days_before[moment.month - 1] + moment.day + (is_leap && moment.month > 2);
    return moment;
}

/* One directive; false if it is unknown. is_bare: no leading zeros, as %-d has it. */
static bool format_directive(const struct moment *moment, char directive, bool is_bare,
                             char text[32])
{
    static const char *const days[] = {"Sunday",   "Monday", "Tuesday", "Wednesday",
                                       "Thursday", "Friday", "Saturday"};
    static const char *const months[] = {"January",   "February", "March",    "April",
                                         "May",       "June",     "July",     "August",
                                         "September", "October",  "November", "December"};
    int number = 0, width = 2;
    switch (directive) {
    case 'A':
        snprintf(text, 32, "%s", days[moment->week_day]);
        return true;
    case 'a':
        snprintf(text, 32, "%.3s", days[moment->week_day]);
        return true;
    case 'B':
        snprintf(text, 32, "%s", months[moment->month - 1]);
        return true;
    case 'b':
    case 'h':
        snprintf(text, 32, "%.3s", months[moment->month - 1]);
        return true;
    case 'p':
        snprintf(text, 32, "%s", moment->hour < 12 ? "AM" : "PM");
        return true;
    case 'Y':
        snprintf(text, 32, "%lld", (long long)moment->year);
        return true;
    case 'F':
        snprintf(text, 32, "%lld-%02d-%02d", (long long)moment->year, moment->month, moment->day);
        return true;
    case 'T':
        snprintf(text, 32, "%02d:%02d:%02d", moment->hour, moment->minute, moment->second);
        return true;
    case 'R':
        snprintf(text, 32, "%02d:%02d", moment->hour, moment->minute);
        return true;
    case 'D':
        snprintf(text, 32, "%02d/%02d/%02d", moment->month, moment->day,
                 (int)((moment->year % 100 + 100) % 100));
        return true;
    case 'e':
        snprintf(text, 32, is_bare ? "%d" : "%2d", moment->day);
        return true;
    case '%':
        snprintf(text, 32, "%%");
        return true;
    case 'n':
        snprintf(text, 32, "\n");
        return true;
    case 't':
        snprintf(text, 32, "\t");
        return true;
    case 'd':
        number = moment->day;
        break;
    case 'm':
        number = moment->month;
        break;
    case 'y':
        number = (int)((moment->year % 100 + 100) % 100);
        break;
    case 'H':
        number = moment->hour;
        break;
    case 'I':
        number = (moment->hour + 11) % 12 + 1;
        break;
    case 'M':
        number = moment->minute;
        break;
    case 'S':
        number = moment->second;
        break;
    case 'j':
        number = moment->year_day;
        width = 3;
        break;
    case 'w':
        number = moment->week_day;
        width = 1;
        break;
    case 'u':
        number = moment->week_day == 0 ? 7 : moment->week_day;
        width = 1;
        break;
    default:
        return false;
    }
    snprintf(text, 32, "%0*d", is_bare ? 1 : width, number);
    return true;
}

static enum imbrex_status strftime_now(struct jinja_render *render, const struct jinja_call *call,
                                       struct jinja_value *result)
{
    struct jinja_text text = {0};
    const struct jinja_string *string;
    struct moment moment = moment_of(render->options.now);
    if (call->args[0].kind != JINJA_STRING) {
        return jinja_fail(render, IMBREX_STATUS_FORMAT, "strftime_now expects a string, found %s",
                          jinja_type_name(&call->args[0]));
    }
    const struct jinja_string *format = call->args[0].as.string;
    for (size_t i = 0; i < format->num_bytes; i++) {
        char shown[32];
        if (format->bytes[i] != '%') {
            TRY(jinja_text_append_part(render, &text, format, i, i + 1));
            continue;
        }
        bool is_bare = i + 1 < format->num_bytes && format->bytes[i + 1] == '-';
        i += 1 + (size_t)is_bare;
        char directive = i < format->num_bytes ? format->bytes[i] : '\0';
        if (!format_directive(&moment, directive, is_bare, shown)) {
            return jinja_fail(render, IMBREX_STATUS_UNSUPPORTED,
                              "the date directive '%%%c' is not supported",
                              directive == '\0' ? ' ' : directive);
        }
        TRY(jinja_charge(render, 1));
        TRY(jinja_text_append(render, &text, shown, strlen(shown), false));
    }
    TRY(jinja_text_finish(render, &text, &string));
    *result = jinja_string_value(string);
    return IMBREX_STATUS_OK;
}

static const struct jinja_function functions[] = {
    {{"range", range_new, "start,stop,step", 1, 0, false}},
    {{"dict", mapping_new, "*", 0, JINJA_DICT, false}},
    {{"namespace", mapping_new, "*", 0, JINJA_NAMESPACE, false}},
    {{"cycler", cycler_new, "*", 0, 0, false}},
    {{"joiner", joiner_new, "sep", 0, 0, false}},
    {{"lipsum", NULL, "", 0, 0, false}},
    {{"raise_exception", raise_exception, "message", 1, 0, false}},
    {{"strftime_now", strftime_now, "format", 1, 0, false}},
};

const struct jinja_function *jinja_function_find(const char *name, size_t num_bytes)
{
    for (size_t i = 0; i < sizeof(functions) / sizeof(functions[0]); i++) {
        if (strlen(functions[i].entry.name) == num_bytes &&
            memcmp(functions[i].entry.name, name, num_bytes) == 0) {
            return &functions[i];
        }
    }
    return NULL;
}
