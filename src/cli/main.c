/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex, the program: finds the command, reads its options and runs it. Commands are the table
 * below; see cli/command.h for adding one. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/options.h"
#include "cli/output.h"
#include "cli/signals.h"
#include "imbrex.h"

static const struct command *const commands[] = {
    &command_run,      &command_chat,   &command_inspect, &command_tokenize, &command_perplexity,
    &command_quantize, &command_kv_sim, &command_tune,    &command_bench,
};
#define NUM_COMMANDS (sizeof(commands) / sizeof(commands[0]))
#define MAX_SUBCOMMANDS 8 /* of one command */

static void print_overview(void)
{
    output_printf("Usage: imbrex COMMAND [MODEL] [options]\n\n"
                  "Runs large language models. MODEL is a Hugging Face folder (config.json,\n"
                  "*.safetensors, tokenizer.json) or a GGUF file; without it the small built-in\n"
                  "model is used.\n\n"
                  "Commands:\n");
    for (size_t i = 0; i < NUM_COMMANDS; i++) {
        output_printf("  %-14s%s\n", commands[i]->name, commands[i]->summary);
    }
    output_printf("  %-14s%s\n", "help COMMAND", "show the options of a command");
    output_printf(
        "\nOptions:\n"
        "  -h, --help    print this text\n"
        "      --version print the version\n\n"
        "An option that is given twice counts as it was given last, unless its help says\n"
        "that it may be given several times.\n\n"
        "Exit codes: 0 success, 1 failure (memory, output), 2 bad arguments or input,\n"
        "130 ended by Ctrl-C, 143 by SIGTERM, 141 whoever read the output went away.\n\n"
        "Try: imbrex run -p \"Once upon a time\"\n");
}

/* The word behind the command's name, by which a subcommand is called. */
static const char *subcommand_word(const struct command *command, const struct command *subcommand)
{
    return subcommand->name + strlen(command->name) + 1;
}

static void print_subcommands(const struct command *command)
{
    output_printf("\nCommands:\n");
    for (size_t i = 0; command->subcommands[i] != NULL; i++) {
        output_printf("  %-14s%s\n", subcommand_word(command, command->subcommands[i]),
                      command->subcommands[i]->summary);
    }
}

static int print_command_help(const struct command *command)
{
    output_printf("Usage: imbrex %s %s\n\n", command->name, command->synopsis);
    options_print_wrapped(command->description, 0, false);
    if (command->subcommands != NULL) {
        print_subcommands(command);
    } else if (!options_print_help(&command->options, command->defaults)) {
        return EXIT_CODE_FAILURE;
    }
    output_printf("\nExamples:\n%s", command->examples);
    return EXIT_CODE_OK;
}

/* `before` is the command in front of the word, "" for none; names is [count], what there is. */
static void report_unknown(const char *before, const char *word, const char *const *names,
                           size_t count)
{
    const char *nearest = options_nearest_name(word, names, count, sizeof(names[0]));
    const char *kind = word[0] == '-' ? "option" : "command";
    bool is_first = before[0] == '\0';

    output_error("%s%sunknown %s %s%s%s%s; see imbrex %s%s--help", before, is_first ? "" : ": ",
                 kind, word, nearest != NULL ? " (did you mean " : "",
                 nearest != NULL ? nearest : "", nearest != NULL ? "?)" : "", before,
                 is_first ? "" : " ");
}

/* NULL if there is no such command: reported. */
static const struct command *find_command(const char *name)
{
    const char *names[NUM_COMMANDS + 1];

    for (size_t i = 0; i < NUM_COMMANDS; i++) {
        if (strcmp(commands[i]->name, name) == 0) {
            return commands[i];
        }
        names[i] = commands[i]->name;
    }
    names[NUM_COMMANDS] = "help";
    report_unknown("", name, names, NUM_COMMANDS + 1);
    return NULL;
}

/* The same for the word behind a command that has subcommands; NULL: reported. */
static const struct command *find_subcommand(const struct command *command, const char *word)
{
    const char *names[MAX_SUBCOMMANDS];
    size_t count = 0;

    for (; command->subcommands[count] != NULL && count < MAX_SUBCOMMANDS; count++) {
        names[count] = subcommand_word(command, command->subcommands[count]);
        if (strcmp(names[count], word) == 0) {
            return command->subcommands[count];
        }
    }
    report_unknown(command->name, word, names, count);
    return NULL;
}

static int report_extra_word(const char *word, const char *before)
{
    output_error("unexpected argument \"%s\" after %s; see imbrex --help", word, before);
    return EXIT_CODE_INPUT;
}

static int help_main(int argc, char **argv)
{
    if (argc < 2 || strcmp(argv[1], "help") == 0) {
        if (argc > 2) {
            return report_extra_word(argv[2], argv[1]);
        }
        print_overview();
        return EXIT_CODE_OK;
    }
    const struct command *command = find_command(argv[1]);
    int num_words = 2;
    if (command != NULL && command->subcommands != NULL && argc > 2) {
        command = find_subcommand(command, argv[2]);
        num_words = 3;
    }
    if (command == NULL) {
        return EXIT_CODE_INPUT;
    }
    if (argc > num_words) {
        return report_extra_word(argv[num_words], argv[num_words - 1]);
    }
    return print_command_help(command);
}

/* Runs a command on parsed settings. argv[first_operand, argc) are the operands. */
static int run_operands(const struct command *command, int argc, char **argv, int first_operand,
                        void *settings)
{
    const char *model = first_operand < argc ? argv[first_operand] : NULL;
    int max_operands = command->second_operand != NULL ? 2 : 1;

    if (max_operands == 2 && first_operand + 1 < argc) {
        const char **target =
            (const char **)(void *)((unsigned char *)settings + *command->second_operand);
        *target = argv[first_operand + 1];
    }
    if (first_operand + max_operands < argc) {
        output_error("%s: unexpected argument \"%s\" after %s; see imbrex %s --help", command->name,
                     argv[first_operand + max_operands], argv[first_operand + max_operands - 1],
                     command->name);
        return EXIT_CODE_INPUT;
    }
    signals_install();
    return command->run(settings, model);
}

static int command_main(const struct command *command, int argc, char **argv)
{
    int first_operand = argc;
    int exit_code = EXIT_CODE_INPUT;
    void *settings = malloc(command->settings_bytes);

    if (settings == NULL) {
        return output_out_of_memory();
    }
    memcpy(settings, command->defaults, command->settings_bytes);
    switch (options_parse(&command->options, argc, argv, settings, &first_operand)) {
    case OPTIONS_RESULT_HELP:
        exit_code = print_command_help(command);
        break;
    case OPTIONS_RESULT_OK:
        exit_code = run_operands(command, argc, argv, first_operand, settings);
        break;
    case OPTIONS_RESULT_OUT_OF_MEMORY:
        exit_code = EXIT_CODE_FAILURE;
        break;
    case OPTIONS_RESULT_ERROR:
        break;
    }
    options_release(&command->options, settings);
    free(settings);
    return exit_code;
}

/* argv[0] is the command's name. */
static int subcommand_main(const struct command *command, int argc, char **argv)
{
    if (argc < 2) {
        output_error("%s: expected a command behind it, found none; see imbrex %s --help",
                     command->name, command->name);
        return EXIT_CODE_INPUT;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0) {
        return argc > 2 ? report_extra_word(argv[2], argv[1]) : print_command_help(command);
    }
    const struct command *subcommand = find_subcommand(command, argv[1]);
    if (subcommand == NULL) {
        return EXIT_CODE_INPUT;
    }
    /* Only read, for messages. */
    argv[1] = (char *)subcommand->name;
    return command_main(subcommand, argc - 1, argv + 1);
}

static int dispatch(int argc, char **argv)
{
    if (argc < 2) {
        output_error("expected a command, found none; see imbrex --help");
        return EXIT_CODE_INPUT;
    }
    if (strcmp(argv[1], "--help") == 0 || strcmp(argv[1], "-h") == 0 ||
        strcmp(argv[1], "help") == 0) {
        return help_main(argc - 1, argv + 1);
    }
    if (strcmp(argv[1], "--version") == 0) {
        if (argc > 2) {
            return report_extra_word(argv[2], argv[1]);
        }
        output_printf("imbrex %s\n", imbrex_version());
        return EXIT_CODE_OK;
    }
    const struct command *command = find_command(argv[1]);
    if (command == NULL) {
        return EXIT_CODE_INPUT;
    }
    if (command->subcommands != NULL) {
        return subcommand_main(command, argc - 1, argv + 1);
    }
    return command_main(command, argc - 1, argv + 1);
}

int main(int argc, char **argv)
{
    return output_finish(dispatch(argc, argv));
}
