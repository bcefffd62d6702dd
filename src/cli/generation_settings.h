/* SPDX-License-Identifier: Apache-2.0 */
/* The options that several commands share because they generate text, and what a person wants to
 * know about a generation: sampling, speed, why it ended. */
#ifndef IMBREX_CLI_GENERATION_SETTINGS_H
#define IMBREX_CLI_GENERATION_SETTINGS_H

#include "cli/engine_settings.h"
#include "cli/options.h"
#include "imbrex.h"

struct generation_settings {
    bool ignore_eos;
    struct option_integer max_tokens, min_tokens;
    struct option_real temperature, top_p, min_p, repeat_penalty, frequency_penalty;
    struct option_real presence_penalty;
    struct option_integer top_k;
    struct option_unsigned seed;
    struct option_strings stop;
};

/* Lines of an option table, for a settings struct that has a struct generation_settings
 * `generation`: the groups "Length" and "Sampling". */
#define CHECKPOINT_DEFAULT "generation_config.json, else off"
/* clang-format off */
#define GENERATION_OPTIONS_LENGTH(settings)                                        \
    {.long_name = "max-tokens",                                                    \
     .fields = "max_tokens",                                                       \
     .short_name = 'n',                                                            \
     .argument = "N",                                                              \
     .type = OPTION_TYPE_INTEGER,                                                  \
     .group = "Length",                                                            \
     .help = "end after N tokens; 0: at an end token or when the context is full", \
     .max = IMBREX_MAX_CONTEXT_SIZE,                                                    \
     .offset = offsetof(settings, generation.max_tokens)},                         \
    {.long_name = "stop",                                                          \
     .fields = "stop",                                                             \
     .argument = "TEXT",                                                           \
     .type = OPTION_TYPE_STRINGS,                                                  \
     .group = "Length",                                                            \
     .help = "end before this text; may be given several times",                   \
     .offset = offsetof(settings, generation.stop)},                               \
    {.long_name = "min-tokens",                                                    \
     .fields = "min_tokens",                                                       \
     .argument = "N",                                                              \
     .type = OPTION_TYPE_INTEGER,                                                  \
     .group = "Length",                                                            \
     .help = "no end token before N tokens",                                       \
     .max = IMBREX_MAX_CONTEXT_SIZE,                                                    \
     .offset = offsetof(settings, generation.min_tokens)},                         \
    {.long_name = "ignore-eos",                                                    \
     .type = OPTION_TYPE_FLAG,                                                     \
     .group = "Length",                                                            \
     .help = "do not end at the model's end tokens",                               \
     .offset = offsetof(settings, generation.ignore_eos)}

#define GENERATION_OPTIONS_SAMPLING(settings)                                                      \
    {.long_name = "temp",                                                                          \
     .fields = "temperature",                                                                      \
     .argument = "T",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "temperature; 0: always the most likely token, and what generation_config.json says " \
             "about sampling is ignored",                                                          \
     .default_text = "generation_config.json, else 0",                                             \
     .max = 100,                                                                                   \
     .offset = offsetof(settings, generation.temperature)},                                        \
    {.long_name = "top-k",                                                                         \
     .fields = "top_k",                                                                            \
     .argument = "K",                                                                              \
     .type = OPTION_TYPE_INTEGER,                                                                  \
     .group = "Sampling",                                                                          \
     .help = "choose among the K most likely tokens; 0: off",                                      \
     .default_text = CHECKPOINT_DEFAULT,                                                           \
     .max = INT32_MAX,                                                                             \
     .offset = offsetof(settings, generation.top_k)},                                              \
    {.long_name = "top-p",                                                                         \
     .fields = "top_p",                                                                            \
     .argument = "P",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "choose among the most likely tokens whose probabilities sum to P; 1: off",           \
     .default_text = CHECKPOINT_DEFAULT,                                                           \
     .max = 1,                                                                                     \
     .above_min = true,                                                                            \
     .offset = offsetof(settings, generation.top_p)},                                              \
    {.long_name = "min-p",                                                                         \
     .fields = "min_p",                                                                            \
     .argument = "P",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "leave out tokens less likely than P times the most likely; 0: off",                  \
     .default_text = CHECKPOINT_DEFAULT,                                                           \
     .max = 1,                                                                                     \
     .below_max = true,                                                                            \
     .offset = offsetof(settings, generation.min_p)},                                              \
    {.long_name = "repeat-penalty",                                                                \
     .fields = "repetition_penalty",                                                               \
     .argument = "R",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "make tokens seen before less likely; 1: off",                                        \
     .default_text = CHECKPOINT_DEFAULT,                                                           \
     .min = 0.01,                                                                                  \
     .max = 100,                                                                                   \
     .offset = offsetof(settings, generation.repeat_penalty)},                                     \
    {.long_name = "frequency-penalty",                                                             \
     .fields = "frequency_penalty",                                                                \
     .argument = "F",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "make tokens less likely by F for each time they were generated",                     \
     .min = -2,                                                                                    \
     .max = 2,                                                                                     \
     .offset = offsetof(settings, generation.frequency_penalty)},                                  \
    {.long_name = "presence-penalty",                                                              \
     .fields = "presence_penalty",                                                                 \
     .argument = "F",                                                                              \
     .type = OPTION_TYPE_REAL,                                                                     \
     .group = "Sampling",                                                                          \
     .help = "make tokens less likely by F once they were generated",                              \
     .min = -2,                                                                                    \
     .max = 2,                                                                                     \
     .offset = offsetof(settings, generation.presence_penalty)},                                   \
    {.long_name = "seed",                                                                          \
     .argument = "S",                                                                              \
     .type = OPTION_TYPE_UNSIGNED,                                                                 \
     .group = "Sampling",                                                                          \
     .help = "the same seed gives the same text",                                                  \
     .default_text = "random, and printed",                                                        \
     .offset = offsetof(settings, generation.seed)}
/* clang-format on */

/* Refuses what the library would not take. `command` is for the message. Returns an exit code. */
int generation_settings_check(const struct generation_settings *settings, const char *command);
/* The checkpoint's sampling defaults under what the command line says; the prompt is left out.
 * Warns of options without effect. */
struct imbrex_request_options generation_settings_to_options(
    const struct generation_settings *settings, const struct imbrex_model *model);

/* One line each, to standard error. `settings` tells which values were given. */
void generation_print_sampling(const struct generation_settings *settings,
                               const struct imbrex_request_options *options);
void generation_print_statistics(const struct imbrex_request_metrics *metrics);

#endif
