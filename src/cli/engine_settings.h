/* SPDX-License-Identifier: Apache-2.0 */
/* The options that several commands share because they make an engine. */
#ifndef IMBREX_CLI_ENGINE_SETTINGS_H
#define IMBREX_CLI_ENGINE_SETTINGS_H

#include "cli/options.h"
#include "cli/tuned_path.h"
#include "imbrex.h"

#define ENGINE_MAX_PATH_BYTES 1024

struct engine_settings {
    struct option_integer threads;     /* 0: all */
    struct option_integer cpu;         /* mask for imbrex_engine_options.cpu_features */
    struct option_integer ctx_size;    /* 0: chosen by the command */
    const char *kv_policy;             /* NULL: ENGINE_KV_POLICY_DEFAULT */
    const char *kv_cache;              /* tokens or a size; NULL: chosen by the command */
    const char *kv_host;               /* a size; NULL: none */
    const char *kv_disk;               /* DIR:SIZE[,zstd[=LEVEL]]; NULL: none */
    struct option_integer kv_prefetch; /* percent */
    const char *kv_remote;             /* redis://...; NULL: none */
    const char *kv_remote_secret;      /* a file; NULL: none */
    struct option_integer kv_write;    /* enum imbrex_kv_write */
    const char *device;                /* as imbrex_engine_options; NULL: "cpu" */
    struct option_integer compute;     /* enum imbrex_compute */
    struct option_integer kv_dtype;    /* enum imbrex_kv_dtype */
    const char *ablate;                /* names between commas, or NULL */
    const char *tuned;                 /* --tuned; NULL: not given */
    bool batch_invariant;              /* also where that is slower */
    bool nvtx;
};

#define ENGINE_SETTINGS_DEFAULT                                                           \
    {                                                                                     \
        .cpu = {.value = IMBREX_CPU_ALL}, .device = "auto", .kv_prefetch = {.value = 50 } \
    }

#define ENGINE_KV_POLICY_DEFAULT "lru"

extern const struct option_choice engine_cpu_choices[];
extern const struct option_choice engine_compute_choices[];
extern const struct option_choice engine_kv_dtype_choices[];
extern const struct option_choice engine_kv_write_choices[];
/* What --ablate takes, with bits of enum imbrex_ablation. */
extern const struct option_choice engine_ablations[];

/* Lines of an option table, for a settings struct that has a struct engine_settings `engine`;
 * ENGINE_OPTION_MAX_RUNNING is for a struct option_integer of its own, `max_running`. */
/* clang-format off */
#define ENGINE_OPTION_DEVICE(settings)                                 \
    {.long_name = "device",                                            \
     .fields = "device",                                               \
     .argument = "NAME",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "where the model runs: cpu, cuda (the first GPU), cuda:N, " \
             "or auto, a GPU if there is one that can, and --cpu is "  \
             "not given",                                              \
     .default_text = "auto",                                           \
     .offset = offsetof(settings, engine.device)}

#define ENGINE_OPTION_COMPUTE(settings)                                \
    {.long_name = "compute",                                           \
     .fields = "compute",                                              \
     .argument = "TYPE",                                               \
     .type = OPTION_TYPE_CHOICE,                                       \
     .group = "Engine",                                                \
     .help = "what activations are kept in: f32, bf16 (on a GPU "      \
             "only), or auto, f32 on a CPU and bf16 on a GPU",         \
     .choices = engine_compute_choices,                                \
     .offset = offsetof(settings, engine.compute)}

#define ENGINE_OPTION_KV_DTYPE(settings)                               \
    {.long_name = "kv-dtype",                                          \
     .fields = "kv_dtype",                                             \
     .argument = "TYPE",                                               \
     .type = OPTION_TYPE_CHOICE,                                       \
     .group = "Engine",                                                \
     .help = "what keys and values are kept in: bf16, fp16, fp32, "    \
             "int8 or fp8 (E4M3), these two with a scale for each 32 " \
             "elements, or auto, what activations are kept in",        \
     .choices = engine_kv_dtype_choices,                               \
     .offset = offsetof(settings, engine.kv_dtype)}

#define ENGINE_OPTION_ABLATE(settings, text)                           \
    {.long_name = "ablate",                                            \
     .argument = "LIST",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = text,                                                     \
     .default_text = "nothing",                                        \
     .offset = offsetof(settings, engine.ablate)}

#define ENGINE_ABLATE_TEXT                                             \
    "on a GPU, do without: mlp (gate, up and the activation in one "   \
    "kernel), attention (the fast kernels of it), pdl (kernels that "  \
    "begin while the one ahead of them ends), graph (decode steps "    \
    "that are launched as a whole), hopper (kernels that older GPUs "  \
    "do not run)"

#define ENGINE_OPTION_TUNED(settings)                                  \
    {.long_name = "tuned",                                             \
     .fields = "tuned",                                                \
     .argument = "PATH",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = TUNED_HELP,                                               \
     .default_text = TUNED_DEFAULT_TEXT,                               \
     .offset = offsetof(settings, engine.tuned)}

#define ENGINE_OPTION_INVARIANT(settings)                              \
    {.long_name = "batch-invariant",                                   \
     .type = OPTION_TYPE_FLAG,                                         \
     .group = "Engine",                                                \
     .help = "on a GPU too, let a text depend neither on those beside it " \
             "nor on how its prompt is cut: slower there; on a CPU it "  \
             "never does",                                             \
     .offset = offsetof(settings, engine.batch_invariant)}

#define ENGINE_OPTION_NVTX(settings)                                   \
    {.long_name = "nvtx",                                              \
     .type = OPTION_TYPE_FLAG,                                         \
     .group = "Engine",                                                \
     .help = "mark the parts of a step for NVIDIA's profilers",        \
     .offset = offsetof(settings, engine.nvtx)}

#define ENGINE_OPTIONS_GPU(settings)                                   \
    ENGINE_OPTION_DEVICE(settings), ENGINE_OPTION_COMPUTE(settings),   \
    ENGINE_OPTION_ABLATE(settings, ENGINE_ABLATE_TEXT),                \
    ENGINE_OPTION_TUNED(settings),                                     \
    ENGINE_OPTION_NVTX(settings)

#define ENGINE_OPTION_THREADS(settings)                                \
    {.long_name = "threads",                                           \
     .fields = "num_threads",                                          \
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
     .fields = "context_size",                                         \
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
     .fields = "kv_policy",                                            \
     .argument = "NAME",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "which KV blocks stay for later prompts with the same "   \
             "beginning, when there is not room for all: a policy "    \
             "that imbrex kv-sim knows, or none, which keeps none",    \
     .default_text = default_policy,                                   \
     .offset = offsetof(settings, engine.kv_policy)}

#define ENGINE_OPTION_MAX_RUNNING(settings)                            \
    {.long_name = "max-running",                                       \
     .fields = "max_running",                                          \
     .argument = "N",                                                  \
     .type = OPTION_TYPE_INTEGER,                                      \
     .group = "Engine",                                                \
     .help = "sequences in one step",                                  \
     .default_text = "the engine's",                                   \
     .min = 1,                                                         \
     .max = IMBREX_MAX_RUNNING,                                        \
     .offset = offsetof(settings, max_running)}

#define ENGINE_OPTION_KV_CACHE(settings, default_size)                 \
    {.long_name = "kv-cache",                                          \
     .fields = "kv_cache_tokens",                                      \
     .argument = "N|SIZE",                                             \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "KV cache: tokens of all that runs and of all that is "   \
             "kept, or a size in memory with K, M, G or T behind it, " \
             "such as 512M (powers of 1024)",                          \
     .default_text = default_size,                                     \
     .offset = offsetof(settings, engine.kv_cache)}

#define ENGINE_OPTION_KV_WRITE(settings)                               \
    {.long_name = "kv-write",                                          \
     .fields = "kv_write",                                             \
     .argument = "WHEN",                                               \
     .type = OPTION_TYPE_CHOICE,                                       \
     .group = "Engine",                                                \
     .help = "when blocks go to disk and server: computed, as soon "   \
             "as they are, in the background; or demoted, when the "   \
             "KV cache has no room for them, and at the end",          \
     .choices = engine_kv_write_choices,                               \
     .default_text = "computed",                                       \
     .offset = offsetof(settings, engine.kv_write)}

/* Only where more than one text runs: what nobody waits for is brought up for the next ones. */
#define ENGINE_OPTION_KV_PREFETCH(settings)                            \
    {.long_name = "kv-prefetch",                                       \
     .fields = "kv_prefetch_percent",                                  \
     .argument = "PERCENT",                                            \
     .type = OPTION_TYPE_INTEGER,                                      \
     .min = 0,                                                         \
     .max = 100,                                                       \
     .group = "Engine",                                                \
     .help = "how much of the time for copies up may go to blocks "    \
             "that the policy expects to be asked for; 0: none",       \
     .default_text = "50",                                             \
     .offset = offsetof(settings, engine.kv_prefetch)}

/* Lines of the tiers below. */
#define ENGINE_OPTION_KV_TIERS(settings)                               \
    {.long_name = "kv-host",                                           \
     .fields = "kv_host_bytes",                                        \
     .argument = "SIZE",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "RAM for KV blocks that the KV cache has no room for, to " \
             "be copied back instead of computed again, such as 8G",   \
     .default_text = "none",                                           \
     .offset = offsetof(settings, engine.kv_host)},                    \
    {.long_name = "kv-disk",                                           \
     .fields = "kv_disk_path kv_disk_bytes kv_disk_zstd_level",        \
     .argument = "DIR:SIZE[,zstd[=LEVEL]]",                            \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "a folder for the same, which the next run finds as this " \
             "one left it, such as ~/.cache/imbrex/kv:20G; with zstd " \
             "blocks lie there packed, at a level of 1 (as alone) to " \
             "19",                                                     \
     .default_text = "none",                                           \
     .offset = offsetof(settings, engine.kv_disk)},                    \
    {.long_name = "kv-remote",                                         \
     .fields = "kv_remote_url",                                        \
     .argument = "URL",                                                \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "a Redis or Valkey server for the same, which engines of " \
             "one model may share: redis://:PASSWORD@HOST:PORT/DB, of " \
             "which HOST alone must be there, and "                    \
             "?ttl=SECONDS&zstd=LEVEL behind it",                      \
     .default_text = "none",                                           \
     .offset = offsetof(settings, engine.kv_remote)},                  \
    {.long_name = "kv-remote-secret",                                  \
     .fields = "kv_remote_secret_path",                                \
     .argument = "FILE",                                               \
     .type = OPTION_TYPE_STRING,                                       \
     .group = "Engine",                                                \
     .help = "32 bytes or more that these engines have and nobody else, " \
             "so that nobody else can make blocks for them",           \
     .default_text = "none",                                           \
     .offset = offsetof(settings, engine.kv_remote_secret)},           \
    ENGINE_OPTION_KV_WRITE(settings)
/* clang-format on */

/* What the library takes. `context_size` is used unless --ctx-size was given. No prefix cache:
 * commands that profit from one go on with engine_settings_choose_kv. Refuses names of devices and
 * ablations that are none. Returns an exit code. */
int engine_settings_to_options(const struct engine_settings *settings, int32_t context_size,
                               struct imbrex_engine_options *options);
/* Refuses a name that is no policy, with those that are; `option` is for the message. Returns an
 * exit code. */
int engine_settings_check_policy(const char *option, const char *name);
/* Sets the tokens that --kv-cache says, if it was given: after all other options that blocks and
 * context depend on. Refuses fewer than a context. Returns an exit code. */
int engine_settings_choose_kv_cache(const struct engine_settings *settings,
                                    const struct imbrex_model *model,
                                    struct imbrex_engine_options *options);
/* Sets what --kv-policy and --kv-cache say, and what the next function does, after all other
 * options. Returns an exit code. */
int engine_settings_choose_kv(const struct engine_settings *settings,
                              const struct imbrex_model *model,
                              char kv_folder[ENGINE_MAX_PATH_BYTES],
                              struct imbrex_engine_options *options);
/* Sets what --kv-host, --kv-disk, --kv-remote, --kv-remote-secret and --kv-write say, and warns
 * where the disk has less room. The folder's name is written to kv_folder, which the options point
 * to then; NULL: there is no --kv-disk. Returns an exit code. */
int engine_settings_choose_tiers(const struct engine_settings *settings,
                                 char kv_folder[ENGINE_MAX_PATH_BYTES],
                                 struct imbrex_engine_options *options);
/* Refuses --kv-write where nothing is below RAM. Returns an exit code. */
int engine_settings_check_write(const struct engine_settings *settings, bool has_lower_tiers);
/* Refuses --kv-prefetch where there is no tier, and warns where the policy, NULL for several, makes
 * nothing of it. Returns an exit code. */
int engine_settings_check_prefetch(const struct engine_settings *settings, bool has_tiers,
                                   const char *policy);
/* The address of the remote tier without its login, which is nobody's to see, as a part of
 * --kv-remote; NULL: there is none. */
const char *engine_settings_remote_place(const struct engine_settings *settings);
/* Whether any tier below the KV cache was asked for. */
bool engine_settings_has_tiers(const struct engine_settings *settings);
/* The policy by name: as given, or the default. */
const char *engine_settings_policy(const struct engine_settings *settings);
/* Refuses what was asked for by name but is not there: kernels, or a GPU's options on a CPU.
 * Returns an exit code. */
int engine_settings_check(const struct engine_settings *settings,
                          const struct imbrex_memory_plan *plan);
/* Whether the plan is a GPU's. */
bool engine_settings_has_gpu(const struct imbrex_memory_plan *plan);
/* The plan for these options, reported on failure; where it is a CPU's, the options take the CPU
 * from then on, so that a GPU that cannot be used is told once. Returns an exit code. */
int engine_settings_plan(const struct imbrex_model *model, struct imbrex_engine_options *options,
                         struct imbrex_memory_plan *plan);
/* Creates the engine and tells its plan, which is checked as above. While weights go to a GPU there
 * is a bar on standard error, if that is a terminal and `may_draw`. Returns an exit code; the
 * engine must be destroyed also after a failure. */
int engine_settings_create(const struct engine_settings *settings, struct imbrex_model *model,
                           struct imbrex_engine_options *options, bool may_draw,
                           struct imbrex_engine **engine, struct imbrex_memory_plan *plan);

#endif
