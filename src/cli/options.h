/* SPDX-License-Identifier: Apache-2.0 */
/* Options of a command, declared once in a table: parsing, range checks and the grouped --help are
 * all generated from it. Every command also has -h, --help without listing it. */
#ifndef IMBREX_CLI_OPTIONS_H
#define IMBREX_CLI_OPTIONS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What lies at an option's offset. Numbers remember whether they were given. */
struct option_integer {
    bool given;
    int64_t value;
};
struct option_unsigned {
    bool given;
    uint64_t value;
};
struct option_real {
    bool given;
    double value;
};
struct option_strings {
    const char **values; /* [count] pointers into argv; freed by options_release() */
    size_t count;
};

enum option_type {
    OPTION_TYPE_FLAG,     /* bool, true when given */
    OPTION_TYPE_STRING,   /* const char *, a pointer into argv */
    OPTION_TYPE_STRINGS,  /* struct option_strings: may be given several times */
    OPTION_TYPE_INTEGER,  /* struct option_integer, in [min, max] */
    OPTION_TYPE_UNSIGNED, /* struct option_unsigned, any 64-bit value */
    OPTION_TYPE_REAL,     /* struct option_real, in [min, max], less the ends excluded below */
    OPTION_TYPE_CHOICE,   /* struct option_integer: the value beside the name */
};

struct option_choice {
    const char *name; /* NULL ends the list */
    int64_t value;
};

struct option_spec {
    const char *long_name; /* without the dashes */
    char short_name;       /* 0: none */
    const char *argument;  /* what --help calls it; NULL for flags */
    enum option_type type;
    const char *group; /* heading in --help; options of a group stand together in the table */
    const char *help;
    const char *default_text; /* where the default is not a number in the settings */
    double min, max;
    bool above_min, below_max; /* the end itself is not allowed */
    bool is_double;            /* OPTION_TYPE_REAL: not rounded to a float */
    const struct option_choice *choices;
    /* Names of fields of the library's options that the option sets, between spaces, for messages
     * of the library that begin with one of them. NULL: none. */
    const char *fields;
    size_t offset; /* into the command's settings */
};

struct option_table {
    const struct option_spec *options; /* [count] */
    size_t count;
};

enum options_result {
    OPTIONS_RESULT_OK,
    OPTIONS_RESULT_HELP,          /* --help was given */
    OPTIONS_RESULT_ERROR,         /* reported */
    OPTIONS_RESULT_OUT_OF_MEMORY, /* reported */
};

/* Reads argv[1, argc) into `settings`, which holds the defaults. On OK, argv[*first_operand, argc)
 * are the arguments that are not options (argv is reordered). argv[0] is the command's name. May
 * be called once in a process: getopt keeps state. */
enum options_result options_parse(const struct option_table *table, int argc, char **argv,
                                  void *settings, int *first_operand);
/* Frees what parsing allocated. Safe on unparsed settings. */
void options_release(const struct option_table *table, void *settings);

/* Prints the table, grouped and wrapped to 80 columns, to standard output. False if
 * memory is out: reported. */
bool options_print_help(const struct option_table *table, const void *defaults);
/* Prints words wrapped to 80 columns; each line, but not the first if `hanging`, is indented. */
void options_print_wrapped(const char *text, int indent, bool hanging);

/* The name most like `word`, or NULL if none is near. names is [count], `stride` bytes apart. */
const char *options_nearest_name(const char *word, const char *const *names, size_t count,
                                 size_t stride);

#endif
