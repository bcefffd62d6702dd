/* SPDX-License-Identifier: Apache-2.0 */
/* What a command of the program is. A new command is one file that defines a struct command, one
 * declaration here and one line in main.c's table; its options, their parsing and its --help come
 * from its option table. */
#ifndef IMBREX_CLI_COMMAND_H
#define IMBREX_CLI_COMMAND_H

#include <stddef.h>

#include "cli/options.h"

enum exit_code {
    EXIT_CODE_OK = 0,
    EXIT_CODE_FAILURE = 1, /* no memory, output cannot be written, device, defect */
    EXIT_CODE_INPUT = 2,   /* bad arguments or bad input */
    EXIT_CODE_SIGNAL = 128 /* plus the signal's number: 130 after Ctrl-C */
};

struct command {
    const char *name;
    const char *synopsis;    /* what follows the name in the usage line */
    const char *summary;     /* one line of `imbrex --help` */
    const char *description; /* paragraphs separated by '\n', wrapped for the reader */
    const char *examples;    /* lines, shown as they are */
    struct option_table options;
    const void *defaults;  /* [settings_bytes] values before parsing */
    size_t settings_bytes; /* size of the struct that the option offsets point into */
    /* Where in the settings a second operand goes, a const char *; NULL: there is none. */
    const size_t *second_operand;
    /* `model` is the operand, NULL if omitted. Returns an exit code. */
    int (*run)(const void *settings, const char *model);
    /* NULL, or commands behind this one, ended by NULL: their names are "name word". Such a command
     * has a name, a synopsis, a summary, a description and examples, and nothing else. */
    const struct command *const *subcommands;
};

extern const struct command command_run, command_chat, command_inspect, command_tokenize,
    command_perplexity, command_quantize, command_kv_sim, command_tune, command_bench;
/* Behind command_bench; bench_ops and command_tune stand on the kernel API alone. */
extern const struct command bench_engine, bench_kv, bench_model, bench_ops;

/* The name under which the library knows the model that is used when MODEL is omitted. */
#define BUILTIN_MODEL "builtin:stories260K"

/* For messages: MODEL as given, or the built-in model's name. */
static inline const char *model_display_name(const char *model)
{
    return model != NULL ? model : BUILTIN_MODEL;
}

#endif
