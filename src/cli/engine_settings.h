/* SPDX-License-Identifier: Apache-2.0 */
/* The options that several commands share because they make an engine. */
#ifndef IMBREX_CLI_ENGINE_SETTINGS_H
#define IMBREX_CLI_ENGINE_SETTINGS_H

#include "cli/options.h"
#include "imbrex.h"

struct engine_settings {
    struct option_integer threads;  /* 0: all */
    struct option_integer cpu;      /* mask for imbrex_engine_options.cpu_features */
    struct option_integer ctx_size; /* 0: chosen by the command */
    const char *kv_policy;          /* NULL: ENGINE_KV_POLICY_DEFAULT */
    const char *kv_blocks;          /* a number of blocks or a size; NULL: chosen by the command */
};

#define ENGINE_SETTINGS_DEFAULT           \
    {                                     \
        .cpu = {.value = IMBREX_CPU_ALL } \
    }

#define ENGINE_KV_POLICY_DEFAULT "lru"

extern const struct option_choice engine_cpu_choices[];

/* Lines of an option table, for a settings struct that has a struct engine_settings `engine`. */
/* clang-format off */
#define ENGINE_OPTION_THREADS(settings)                                \
    {.long_name = "threads",                                           \
     .short_name = 't',                                                \
     .argument = "N",                                                  \
     .type = OPTION_TYPE_INTEGER,                                      \
     .group = "Engine",                                                \
     .help = "compute threads; the results do not depend on them",     \
     .default_text = "all CPUs of this process",                       \
     .min = 1,                                                         \
     .max = 1024,                                                      \
     .offset = offsetof(settings, engine.threads)}

#define ENGINE_OPTION_CPU(settings)                                    \
    {.long_name = "cpu",                                               \
     .argument = "KIND",                                               \
     .type = OPTION_TYPE_CHOICE,                                       \
     .group = "Engine",                                                \
     .help = "kernels to use: bf16 (the best that round activations "  \
             "to bf16, which auto never does: amx-bf16 or "            \
             "avx512-bf16), amx-int8 (for quantised weights, not "     \
             "chosen by auto either), "                                \
             "vnni (AVX-512 with VNNI), avx512, avx2 (AVX2, FMA and " \
             "F16C), ref (plain C), or auto, the best that this " \
             "machine has", \
     .choices = engine_cpu_choices,                                    \
     .offset = offsetof(settings, engine.cpu)}

#define ENGINE_OPTION_CTX_SIZE(settings, default_size)                 \
    {.long_name = "ctx-size",                                          \
     .short_name = 'c',                                                \
     .argument = "N",                                                  \
     .type = OPTION_TYPE_INTEGER,                                      \
     .group = "Engine",                                                \
     .help = "context: tokens of prompt and continuation together",    \
     .default_text = default_size,                                     \
     .min = 2,                                                         \
     .max = IMBREX_MAX_CONTEXT_SIZE,                                        \
     .offset = offsetof(settings, engine.ctx_size)}

#define ENGINE_OPTION_KV_POLICY(settings, default_policy)              \
    {.long_name = "kv-policy",                                         \
     .argument = "NAME",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "which KV blocks stay for later prompts with the same "   \
             "beginning, when there is not room for all: a policy "    \
             "that imbrex kv-sim knows, or none, which keeps none",    \
     .default_text = default_policy,                                   \
     .offset = offsetof(settings, engine.kv_policy)}

#define ENGINE_OPTION_KV_BLOCKS(settings)                              \
    {.long_name = "kv-blocks",                                         \
     .argument = "N|SIZE",                                             \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "KV cache: a number of blocks, or a size with K, M, G "   \
             "or T behind it, such as 512M (powers of 1024)",          \
     .default_text = "one context",                                    \
     .offset = offsetof(settings, engine.kv_blocks)}
/* clang-format on */

/* What the library takes. `context_size` is used unless --ctx-size was given. No prefix cache:
 * commands that profit from one go on with engine_settings_choose_kv. */
struct imbrex_engine_options engine_settings_to_options(const struct engine_settings *settings,
                                                        int32_t context_size);
/* Refuses a name that is no policy, with those that are; `option` is for the message. Returns an
 * exit code. */
int engine_settings_check_policy(const char *option, const char *name);
/* Sets what --kv-policy and --kv-blocks say, after all other options. Returns an exit code. */
int engine_settings_choose_kv(const struct engine_settings *settings,
                              const struct imbrex_model *model,
                              struct imbrex_engine_options *options);
/* The policy by name: as given, or the default. */
const char *engine_settings_policy(const struct engine_settings *settings);
/* Refuses kernels that were asked for by name but are not there. Returns an exit code. */
int engine_settings_check(const struct engine_settings *settings,
                          const struct imbrex_memory_plan *plan);

#endif
