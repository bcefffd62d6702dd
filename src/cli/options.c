/* SPDX-License-Identifier: Apache-2.0 */
/* Parsing and --help, both driven by the option table. getopt_long does the splitting of argv; its
 * own messages are off, so that every error reads alike and names what was expected. */
#include "cli/options.h"

#include <assert.h>
#include <errno.h>
#include <float.h>
#include <getopt.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/output.h"

#define HELP_COLUMNS 80
#define HELP_LEFT_COLUMNS 26
#define MAX_OPTIONS 64
/* Of any int64_t, and of any double in %g. */
#define NUMBER_TEXT_BYTES 32
/* getopt's value for the long option at index i is FIRST_LONG_VALUE + i, above every character. */
#define FIRST_LONG_VALUE 256
#define HELP_VALUE (FIRST_LONG_VALUE + MAX_OPTIONS)

/* Since options are parsed once in a process. */
static const struct option_table *parsed_table;

static void *option_target(const struct option_spec *option, void *settings)
{
    return (unsigned char *)settings + option->offset;
}

/* Edits (insert, delete, replace, swap neighbours) that turn a into b; both under 32 bytes. */
static unsigned edit_distance(const char *a, const char *b)
{
    enum { MAX_LENGTH = 32 };
    unsigned rows[3][MAX_LENGTH + 1];
    size_t a_length = strlen(a), b_length = strlen(b);

    if (a_length > MAX_LENGTH || b_length > MAX_LENGTH) {
        return MAX_LENGTH;
    }
    for (size_t j = 0; j <= b_length; j++) {
        rows[0][j] = (unsigned)j;
    }
    for (size_t i = 1; i <= a_length; i++) {
        unsigned *row = rows[i % 3], *above = rows[(i - 1) % 3], *above_two = rows[(i + 1) % 3];
        row[0] = (unsigned)i;
        for (size_t j = 1; j <= b_length; j++) {
            unsigned best = above[j - 1] + (a[i - 1] != b[j - 1]);
            if (above[j] + 1 < best) {
                best = above[j] + 1;
            }
            if (row[j - 1] + 1 < best) {
                best = row[j - 1] + 1;
            }
            if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1] &&
                above_two[j - 2] + 1 < best) {
                best = above_two[j - 2] + 1;
            }
            row[j] = best;
        }
    }
    return rows[a_length % 3][b_length];
}

const char *options_nearest_name(const char *word, const char *const *names, size_t count,
                                 size_t stride)
{
    const char *nearest = NULL;
    unsigned nearest_distance = 3;

    for (size_t i = 0; i < count; i++) {
        const char *name =
            *(const char *const *)(const void *)((const unsigned char *)names + i * stride);
        unsigned distance = edit_distance(word, name);
        /* A name of which most letters are wrong is no likely slip. */
        if (distance < nearest_distance && distance * 2 <= strlen(name)) {
            nearest = name;
            nearest_distance = distance;
        }
    }
    return nearest;
}

static bool parse_integer(const char *text, double min, double max, int64_t *value)
{
    char *end;
    errno = 0;
    long long parsed = strtoll(text, &end, 10);
    if (end == text || *end != '\0' || errno != 0 || (double)parsed < min || (double)parsed > max) {
        return false;
    }
    *value = parsed;
    return true;
}

static bool parse_unsigned(const char *text, uint64_t *value)
{
    char *end;
    /* strtoull would read "-1" as the largest value. */
    if (text[0] < '0' || text[0] > '9') {
        return false;
    }
    errno = 0;
    unsigned long long parsed = strtoull(text, &end, 10);
    if (*end != '\0' || errno != 0) {
        return false;
    }
    *value = parsed;
    return true;
}

static bool parse_real(const struct option_spec *option, const char *text, double *value)
{
    char *end;
    double parsed = strtod(text, &end);
    if (!(fabs(parsed) <= FLT_MAX)) {
        return false;
    }
    /* Where the library takes floats, what rounds to an end of the range is that end. */
    double rounded = option->is_double ? parsed : (double)(float)parsed;
    double min = option->is_double ? option->min : (double)(float)option->min;
    double max = option->is_double ? option->max : (double)(float)option->max;
    if (end == text || *end != '\0' || rounded > max || rounded < min ||
        (option->above_min && rounded == min) || (option->below_max && rounded == max)) {
        return false;
    }
    *value = rounded;
    return true;
}

static void report_choices(const char *command, const struct option_spec *option, const char *text)
{
    char expected[128] = "";
    size_t length = 0;
    for (const struct option_choice *choice = option->choices; choice->name != NULL; choice++) {
        int added = snprintf(expected + length, sizeof(expected) - length, "%s%s",
                             choice == option->choices ? "" : ", ", choice->name);
        if (added < 0 || (size_t)added >= sizeof(expected) - length) {
            break;
        }
        length += (size_t)added;
    }
    output_error("%s: --%s: expected one of %s, found \"%s\"", command, option->long_name, expected,
                 text);
}

static enum options_result option_store(const char *command, const struct option_spec *option,
                                        const char *text, void *settings)
{
    void *target = option_target(option, settings);

    switch (option->type) {
    case OPTION_TYPE_FLAG:
        *(bool *)target = true;
        return OPTIONS_RESULT_OK;
    case OPTION_TYPE_STRING:
        *(const char **)target = text;
        return OPTIONS_RESULT_OK;
    case OPTION_TYPE_STRINGS: {
        struct option_strings *strings = target;
        const char **values = realloc(strings->values, (strings->count + 1) * sizeof(*values));
        if (values == NULL) {
            (void)output_out_of_memory();
            return OPTIONS_RESULT_OUT_OF_MEMORY;
        }
        values[strings->count] = text;
        strings->values = values;
        strings->count++;
        return OPTIONS_RESULT_OK;
    }
    case OPTION_TYPE_INTEGER: {
        struct option_integer *integer = target;
        if (!parse_integer(text, option->min, option->max, &integer->value)) {
            output_error("%s: --%s: expected an integer in [%.0f, %.0f], found \"%s\"", command,
                         option->long_name, option->min, option->max, text);
            return OPTIONS_RESULT_ERROR;
        }
        integer->given = true;
        return OPTIONS_RESULT_OK;
    }
    case OPTION_TYPE_UNSIGNED: {
        struct option_unsigned *number = target;
        if (!parse_unsigned(text, &number->value)) {
            output_error("%s: --%s: expected an integer in [0, %llu], found \"%s\"", command,
                         option->long_name, (unsigned long long)UINT64_MAX, text);
            return OPTIONS_RESULT_ERROR;
        }
        number->given = true;
        return OPTIONS_RESULT_OK;
    }
    case OPTION_TYPE_REAL: {
        struct option_real *real = target;
        if (!parse_real(option, text, &real->value)) {
            output_error("%s: --%s: expected a number in %c%g, %g%c, found \"%s\"", command,
                         option->long_name, option->above_min ? '(' : '[', option->min, option->max,
                         option->below_max ? ')' : ']', text);
            return OPTIONS_RESULT_ERROR;
        }
        real->given = true;
        return OPTIONS_RESULT_OK;
    }
    case OPTION_TYPE_CHOICE: {
        struct option_integer *integer = target;
        for (const struct option_choice *choice = option->choices; choice->name != NULL; choice++) {
            if (strcmp(choice->name, text) == 0) {
                integer->value = choice->value;
                integer->given = true;
                return OPTIONS_RESULT_OK;
            }
        }
        report_choices(command, option, text);
        return OPTIONS_RESULT_ERROR;
    }
    }
    return OPTIONS_RESULT_ERROR;
}

/* Options whose names begin with the first `length` bytes of `word`; "help" is one. */
static size_t count_prefixed(const struct option_table *table, const char *word, size_t length)
{
    size_t count = strncmp("help", word, length) == 0;
    for (size_t i = 0; i < table->count; i++) {
        count += strncmp(table->options[i].long_name, word, length) == 0;
    }
    return count;
}

static void report_unknown_long(const struct option_table *table, const char *command,
                                const char *argument)
{
    char name[64];
    size_t length = strcspn(argument, "=");
    if (length >= sizeof(name)) {
        length = sizeof(name) - 1;
    }
    memcpy(name, argument, length);
    name[length] = '\0';

    if (length > 0 && count_prefixed(table, name, length) > 1) {
        output_error("%s: --%s is short for several options; see imbrex %s --help", command, name,
                     command);
        return;
    }
    const char *nearest = options_nearest_name(name, &table->options[0].long_name, table->count,
                                               sizeof(table)->options[0]);
    if (nearest != NULL) {
        output_error("%s: unknown option --%s (did you mean --%s?); see imbrex %s --help", command,
                     name, nearest, command);
    } else {
        output_error("%s: unknown option --%s; see imbrex %s --help", command, name, command);
    }
}

/* The option that getopt returned or refused, or NULL. */
static const struct option_spec *option_of_value(const struct option_table *table, int value)
{
    if (value >= FIRST_LONG_VALUE && (size_t)(value - FIRST_LONG_VALUE) < table->count) {
        return &table->options[value - FIRST_LONG_VALUE];
    }
    for (size_t i = 0; value > 0 && value < FIRST_LONG_VALUE && i < table->count; i++) {
        if (table->options[i].short_name == value) {
            return &table->options[i];
        }
    }
    return NULL;
}

/* getopt gives one byte, and stays in an argument of which it has not read all: the rest of a
 * character stands there. */
static void report_unknown_short(const char *command, char byte, const char *unfinished)
{
    const char *character = unfinished != NULL ? strchr(unfinished, byte) : NULL;
    size_t num_bytes = character != NULL ? output_character_bytes(character, strlen(character)) : 0;

    if (num_bytes > 1) {
        output_error("%s: unknown option -%.*s; see imbrex %s --help", command, (int)num_bytes,
                     character, command);
    } else if ((unsigned char)byte >= 0x80) {
        output_error("%s: unknown option -\\x%02x; see imbrex %s --help", command,
                     (unsigned char)byte, command);
    } else {
        output_error("%s: unknown option -%c; see imbrex %s --help", command, byte, command);
    }
}

/* `argument` was read last, `unfinished` is the next one, or NULL. */
static void report_refused(const struct option_table *table, const char *command, int value,
                           const char *argument, const char *unfinished)
{
    const struct option_spec *option = option_of_value(table, value);
    if (option != NULL && option->type != OPTION_TYPE_FLAG) {
        output_error("%s: --%s needs an argument: %s; see imbrex %s --help", command,
                     option->long_name, option->argument, command);
    } else if (option != NULL || value == HELP_VALUE) {
        output_error("%s: --%s takes no argument, found \"%s\"", command,
                     option != NULL ? option->long_name : "help", argument);
    } else if (value == 0) {
        report_unknown_long(table, command, argument + 2);
    } else {
        report_unknown_short(command, (char)value, unfinished);
    }
}

/* Whether `word` is one of the words of the list. */
static bool has_word(const char *list, const char *word)
{
    size_t length = strlen(word);

    for (const char *at = list; at != NULL && *at != '\0'; at += strspn(at, " ")) {
        size_t word_length = strcspn(at, " ");
        if (word_length == length && strncmp(at, word, length) == 0) {
            return true;
        }
        at += word_length;
    }
    return false;
}

/* An output_field_fn. */
static const char *name_of_field(const char *field)
{
    for (size_t i = 0; parsed_table != NULL && i < parsed_table->count; i++) {
        if (has_word(parsed_table->options[i].fields, field)) {
            return parsed_table->options[i].long_name;
        }
    }
    return NULL;
}

enum options_result options_parse(const struct option_table *table, int argc, char **argv,
                                  void *settings, int *first_operand)
{
    struct option long_options[MAX_OPTIONS + 2] = {{0}};
    char short_options[2 * MAX_OPTIONS + 3] = ":h";
    size_t num_short = 2;

    assert(table->count <= MAX_OPTIONS);
    for (size_t i = 0; i < table->count; i++) {
        const struct option_spec *option = &table->options[i];
        bool has_argument = option->type != OPTION_TYPE_FLAG;
        long_options[i] = (struct option){.name = option->long_name,
                                          .has_arg = has_argument ? required_argument : no_argument,
                                          .val = FIRST_LONG_VALUE + (int)i};
        if (option->short_name != 0) {
            short_options[num_short++] = option->short_name;
            if (has_argument) {
                short_options[num_short++] = ':';
            }
        }
    }
    short_options[num_short] = '\0';
    long_options[table->count] = (struct option){.name = "help", .val = HELP_VALUE};

    parsed_table = table;
    output_name_fields(name_of_field);
    opterr = 0;
    for (;;) {
        int value = getopt_long(argc, argv, short_options, long_options, NULL);
        if (value == -1) {
            break;
        }
        if (value == 'h' || value == HELP_VALUE) {
            return OPTIONS_RESULT_HELP;
        }
        if (value == '?' || value == ':') {
            report_refused(table, argv[0], optopt, argv[optind - 1],
                           optind < argc ? argv[optind] : NULL);
            return OPTIONS_RESULT_ERROR;
        }
        enum options_result result =
            option_store(argv[0], option_of_value(table, value), optarg, settings);
        if (result != OPTIONS_RESULT_OK) {
            return result;
        }
    }
    *first_operand = optind;
    return OPTIONS_RESULT_OK;
}

void options_release(const struct option_table *table, void *settings)
{
    for (size_t i = 0; i < table->count; i++) {
        if (table->options[i].type == OPTION_TYPE_STRINGS) {
            struct option_strings *strings = option_target(&table->options[i], settings);
            free(strings->values);
            *strings = (struct option_strings){0};
        }
    }
}

void options_print_wrapped(const char *text, int indent, bool hanging)
{
    int column = indent;
    bool line_open = hanging;

    while (*text != '\0') {
        if (*text == '\n') {
            output_printf("\n");
            line_open = false;
            text++;
            continue;
        }
        if (*text == ' ') {
            text++;
            continue;
        }
        int length = (int)strcspn(text, " \n");
        bool first = column == indent;
        if (line_open && !first && column + 1 + length > HELP_COLUMNS) {
            output_printf("\n");
            line_open = false;
        }
        if (!line_open) {
            output_printf("%*s", indent, "");
            column = indent;
            line_open = true;
            first = true;
        }
        output_printf("%s%.*s", first ? "" : " ", length, text);
        column += length + !first;
        text += length;
    }
    output_printf("\n");
}

/* What stands after "default: ", in `buffer` or elsewhere; NULL where off is the only sensible
 * reading. */
static const char *default_value(const struct option_spec *option, const void *defaults,
                                 char buffer[NUMBER_TEXT_BYTES])
{
    const void *target = (const unsigned char *)defaults + option->offset;

    if (option->default_text != NULL) {
        return option->default_text;
    }
    switch (option->type) {
    case OPTION_TYPE_INTEGER:
        snprintf(buffer, NUMBER_TEXT_BYTES, "%lld",
                 (long long)((const struct option_integer *)target)->value);
        return buffer;
    case OPTION_TYPE_REAL:
        snprintf(buffer, NUMBER_TEXT_BYTES, "%g", ((const struct option_real *)target)->value);
        return buffer;
    case OPTION_TYPE_CHOICE:
        for (const struct option_choice *choice = option->choices; choice->name != NULL; choice++) {
            if (choice->value == ((const struct option_integer *)target)->value) {
                return choice->name;
            }
        }
        break;
    case OPTION_TYPE_FLAG:
    case OPTION_TYPE_STRING:
    case OPTION_TYPE_STRINGS:
    case OPTION_TYPE_UNSIGNED:
        break;
    }
    return NULL;
}

static void print_option(const char *long_name, char short_name, const char *argument,
                         const char *help)
{
    char short_text[5] = "    ";

    if (short_name != 0) {
        snprintf(short_text, sizeof(short_text), "-%c, ", short_name);
    }
    size_t length = strlen("  -x, --") + strlen(long_name);
    output_printf("  %s--%s", short_text, long_name);
    if (argument != NULL) {
        length += 1 + strlen(argument);
        output_printf(" %s", argument);
    }
    if (length < HELP_LEFT_COLUMNS - 1) {
        output_printf("%*s", HELP_LEFT_COLUMNS - (int)length, "");
    } else {
        output_printf("\n%*s", HELP_LEFT_COLUMNS, "");
    }
    options_print_wrapped(help, HELP_LEFT_COLUMNS, true);
}

bool options_print_help(const struct option_table *table, const void *defaults)
{
    const char *group = "";

    for (size_t i = 0; i < table->count; i++) {
        const struct option_spec *option = &table->options[i];
        char buffer[NUMBER_TEXT_BYTES], *help = NULL;
        const char *value = default_value(option, defaults, buffer);
        if (strcmp(group, option->group) != 0) {
            group = option->group;
            output_printf("\n%s:\n", group);
        }
        if (value != NULL && asprintf(&help, "%s [default: %s]", option->help, value) < 0) {
            (void)output_out_of_memory();
            return false;
        }
        print_option(option->long_name, option->short_name, option->argument,
                     value != NULL ? help : option->help);
        free(help);
    }
    output_printf("\nOther:\n");
    print_option("help", 'h', NULL, "print this text");
    return true;
}
