/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex bench ops: which kernels are measured on which shapes. */
#include "cli/bench_ops.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/output.h"
#include "cli/tuned_path.h"

static const struct bench_ops_settings bench_ops_defaults = {
    .op = {.value = BENCH_OP_GEMM_SWIGLU},
    .cpu = {.value = IMBREX_CPU_ALL},
    .num_pairs = {.value = 15},
    .replay_ms = {.value = 4.0},
    .rest_ms = {.value = 1000.0},
    .near = {.value = 1.25},
    .baselines = {.value = BENCH_BASELINES_BOTH},
    .num_streams = {.value = 4},
};

#define CUDA_ROWS "128,256,512,1024,2048,4096,8192,16384"
#define CUDA_SHAPES "qwen2.5"
/* What is over within a minute. */
#define CPU_ROWS "1,512"
#define CPU_SHAPES "0.5B"

static const struct option_choice op_choices[] = {{"gemm_swiglu", BENCH_OP_GEMM_SWIGLU},
                                                  {"gemm", BENCH_OP_GEMM},
                                                  {"embedding", BENCH_OP_EMBEDDING},
                                                  {"rmsnorm", BENCH_OP_RMSNORM},
                                                  {"qkv_proj", BENCH_OP_QKV_PROJ},
                                                  {"rope_kv", BENCH_OP_ROPE_KV},
                                                  {"attention", BENCH_OP_ATTENTION},
                                                  {"o_proj", BENCH_OP_O_PROJ},
                                                  {"down_proj", BENCH_OP_DOWN_PROJ},
                                                  {"lm_head", BENCH_OP_LM_HEAD},
                                                  {NULL, 0}};
static const struct option_choice plans_choices[] = {{"chosen", BENCH_PLANS_CHOSEN},
                                                     {"schedules", BENCH_PLANS_SCHEDULES},
                                                     {"all", BENCH_PLANS_ALL},
                                                     {NULL, 0}};
static const struct option_choice baselines_choices[] = {{"both", BENCH_BASELINES_BOTH},
                                                         {"heuristic", BENCH_BASELINES_HEURISTIC},
                                                         {"streams", BENCH_BASELINES_STREAMS},
                                                         {"none", BENCH_BASELINES_NONE},
                                                         {NULL, 0}};
static const struct option_choice weights_choices[] = {{"gate-up", BENCH_WEIGHTS_GATE_UP},
                                                       {"up-gate", BENCH_WEIGHTS_UP_GATE},
                                                       {"separate", BENCH_WEIGHTS_SEPARATE},
                                                       {NULL, 0}};
static const struct option_choice rounding_choices[] = {
    {"exact", IMBREX_ROUNDING_EXACT}, {"match-unfused", IMBREX_ROUNDING_MATCH_UNFUSED}, {NULL, 0}};
static const struct option_choice interleave_choices[] = {{"0", 0}, {"1", 1}, {"8", 8}, {NULL, 0}};

static const struct bench_gating gatings[] = {
    {"silu", {.activation = IMBREX_ACTIVATION_SILU}},
    {"gelu", {.activation = IMBREX_ACTIVATION_GELU_ERF}},
    {"gelu-tanh", {.activation = IMBREX_ACTIVATION_GELU_TANH}},
    {"relu", {.activation = IMBREX_ACTIVATION_RELU}},
    {"gpt-oss", {.alpha = 1.702f, .limit = 7.0f, .up_offset = 1.0f}},
    /* A limit that no value meets: what the kernels for any gating take longer. */
    {"silu-general", {.limit = 1e30f}},
};
#define NUM_GATINGS (int)(sizeof(gatings) / sizeof(gatings[0]))

static const struct option_choice clock_choices[] = {{"warm", BENCH_CLOCK_WARM},
                                                     {"burst", BENCH_CLOCK_BURST},
                                                     {"sustained", BENCH_CLOCK_SUSTAINED},
                                                     {NULL, 0}};

static const struct option_spec bench_ops_options[] = {
    {.long_name = "device",
     .argument = "NAME",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "cpu, cuda, or cuda:1 for the second GPU",
     .default_text = "cuda if there is a GPU, else cpu",
     .offset = offsetof(struct bench_ops_settings, device)},
    {.long_name = "op",
     .argument = "NAME",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "gemm_swiglu (gate_proj, up_proj and the activation); on a GPU gemm (down_proj) too; "
             "on a CPU embedding, rmsnorm, qkv_proj, rope_kv, attention, o_proj, down_proj or "
             "lm_head",
     .default_text = "gemm_swiglu; on a CPU all",
     .choices = op_choices,
     .offset = offsetof(struct bench_ops_settings, op)},
    {.long_name = "shapes",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "qwen2.5 (its seven models), some of them (7B,72B), or HxI: hidden_size x "
             "intermediate_size",
     .default_text = CUDA_SHAPES "; on a CPU " CPU_SHAPES,
     .offset = offsetof(struct bench_ops_settings, shapes)},
    {.long_name = "m",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "numbers of tokens",
     .default_text = CUDA_ROWS "; on a CPU " CPU_ROWS,
     .offset = offsetof(struct bench_ops_settings, rows)},
    {.long_name = "dtype",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "types of weights, such as bf16,q8_0,q4_0; on a CPU only",
     .default_text = "bf16",
     .offset = offsetof(struct bench_ops_settings, dtypes)},
    {.long_name = "cpu",
     .argument = "KIND",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "kernels: vnni, avx512, avx2 or ref alone, or auto, all that this machine has; on a "
             "CPU only",
     .choices = engine_cpu_choices,
     .offset = offsetof(struct bench_ops_settings, cpu)},
    {.long_name = "ways",
     .type = OPTION_TYPE_FLAG,
     .group = "What",
     .help = "of up to 8 tokens, or one of quantised weights, each way to read weights too, beside "
             "what the kernels choose for themselves; on a CPU only",
     .offset = offsetof(struct bench_ops_settings, ways)},
    {.long_name = "plans",
     .argument = "KIND",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help =
         "chosen: the kernel that the library chooses, and those that it would without tuned plans "
         "and by its cost model; schedules: the "
         "best of each too, and with tiles of one width; all: every variant, cluster and walk that "
         "is not expected to be far slower",
     .choices = plans_choices,
     .offset = offsetof(struct bench_ops_settings, plans)},
    {.long_name = "near",
     .argument = "FACTOR",
     .type = OPTION_TYPE_REAL,
     .group = "What",
     .help = "all plans are those expected to take less than this times the chosen one",
     .min = 1,
     .max = 100,
     .offset = offsetof(struct bench_ops_settings, near)},
    {.long_name = "baselines",
     .argument = "KIND",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "gemm_swiglu in slices of intermediate_size, two products of cuBLASLt and an "
             "activation each, of the width that a rule of thumb has for the GPU: heuristic, one "
             "after the other; streams, over several streams; both; or none",
     .choices = baselines_choices,
     .offset = offsetof(struct bench_ops_settings, baselines)},
    {.long_name = "streams",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "What",
     .help = "how many the baseline of that name has",
     .min = 1,
     .max = BENCH_MAX_STREAMS,
     .offset = offsetof(struct bench_ops_settings, num_streams)},
    {.long_name = "tuned",
     .argument = "PATH",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = TUNED_HELP,
     .default_text = TUNED_DEFAULT_TEXT,
     .offset = offsetof(struct bench_ops_settings, tuned)},
    {.long_name = "weights",
     .argument = "ORDER",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "where gate and up lie: gate-up and up-gate are one matrix, separate is two",
     .choices = weights_choices,
     .offset = offsetof(struct bench_ops_settings, weights)},
    {.long_name = "activation",
     .argument = "LIST",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help = "silu, gelu, gelu-tanh, relu, gpt-oss (scaled, clamped SiLU and an offset), "
             "silu-general (SiLU by the kernels of all others); of gemm_swiglu on a GPU, the first "
             "by all plans, each other by the one that is chosen for it",
     .default_text = "silu",
     .offset = offsetof(struct bench_ops_settings, activations)},
    {.long_name = "rounding",
     .argument = "KIND",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "exact, or match-unfused: as if each operation had a bf16 result; of gemm_swiglu on a "
             "GPU",
     .choices = rounding_choices,
     .offset = offsetof(struct bench_ops_settings, rounding)},
    {.long_name = "interleave",
     .argument = "ROWS",
     .type = OPTION_TYPE_CHOICE,
     .group = "What",
     .help = "0, 1 or 8: rows of gate and of up that take turns in one matrix, which --weights "
             "says begins with which; of gemm_swiglu on a GPU",
     .choices = interleave_choices,
     .offset = offsetof(struct bench_ops_settings, interleave)},
    {.long_name = "bias",
     .type = OPTION_TYPE_FLAG,
     .group = "What",
     .help = "add a bias to gate and to up, which what runs beside does not; of gemm_swiglu on a "
             "GPU",
     .offset = offsetof(struct bench_ops_settings, bias)},
    {.long_name = "numerics",
     .type = OPTION_TYPE_FLAG,
     .group = "What",
     .help =
         "no times, but how many results lie more than one bf16 ulp from the fp64 reference, at "
         "input scales 0.3, 1, 3 and 10, beside other ways to compute them",
     .offset = offsetof(struct bench_ops_settings, numerics)},
    {.long_name = "hidden-share",
     .type = OPTION_TYPE_FLAG,
     .group = "What",
     .help =
         "how much of Swish gate_first hides: its kernel beside the same with Swish serialised, "
         "with Swish removed, and with the turn held but no Swish; from 32 pairs on, each share is "
         "of the sums over a sixteenth of them; gemm_swiglu on a GPU only",
     .offset = offsetof(struct bench_ops_settings, hidden_share)},
    {.long_name = "trace",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "What",
     .help =
         "no times, but what each warpgroup of gate_first does when, as a trace for Perfetto or "
         "chrome://tracing; one shape and one number of tokens, gemm_swiglu on a GPU only",
     .default_text = "none",
     .offset = offsetof(struct bench_ops_settings, trace)},
    {.long_name = "threads",
     .short_name = 't',
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "How",
     .help = "compute threads; on a CPU only",
     .default_text = "all CPUs of this process",
     .min = 1,
     .max = 1024,
     .offset = offsetof(struct bench_ops_settings, threads)},
    {.long_name = "pairs",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "How",
     .help = "times that all contestants run, one after the other; fewer where that takes long on "
             "a CPU",
     .min = 1,
     .max = 1000,
     .offset = offsetof(struct bench_ops_settings, num_pairs)},
    {.long_name = "replay-ms",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "How",
     .help = "about how long one measurement is, on a GPU only: calls on rotating inputs in a CUDA "
             "graph",
     .min = 0.01,
     .max = 1000,
     .offset = offsetof(struct bench_ops_settings, replay_ms)},
    {.long_name = "clock",
     .argument = "STATE",
     .type = OPTION_TYPE_CHOICE,
     .group = "How",
     .help = "warm: cells follow each other; burst: a rest and an untimed call before each pair, "
             "which is at most 10 ms long; sustained: after three seconds of work",
     .choices = clock_choices,
     .offset = offsetof(struct bench_ops_settings, clock)},
    {.long_name = "rest-ms",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "How",
     .help = "how long the GPU rests before each pair of --clock burst",
     .min = 1,
     .max = 60000,
     .offset = offsetof(struct bench_ops_settings, rest_ms)},
    {.long_name = "energy-ms",
     .argument = "MS",
     .type = OPTION_TYPE_REAL,
     .group = "How",
     .help = "then run each contestant alone for so long and read the energy counter; 0: not",
     .min = 0,
     .max = 60000,
     .offset = offsetof(struct bench_ops_settings, energy_ms)},
    {.long_name = "group-m",
     .argument = "N",
     .type = OPTION_TYPE_INTEGER,
     .group = "How",
     .help = "clusters of rows that are walked before the next columns",
     .default_text = "chosen for each plan",
     .min = 1,
     .max = 1 << 20,
     .offset = offsetof(struct bench_ops_settings, group_m)},
    {.long_name = "no-overlap",
     .type = OPTION_TYPE_FLAG,
     .group = "How",
     .help = "kernels start when the one before them has ended",
     .offset = offsetof(struct bench_ops_settings, no_overlap)},
    {.long_name = "portable",
     .type = OPTION_TYPE_FLAG,
     .group = "How",
     .help = "on a Hopper GPU too, the kernels of all others from Ampere on",
     .offset = offsetof(struct bench_ops_settings, portable)},
    {.long_name = "no-roofs",
     .type = OPTION_TYPE_FLAG,
     .group = "How",
     .help = "do not measure what the machine can do; on a CPU only",
     .offset = offsetof(struct bench_ops_settings, no_roofs)},
    {.long_name = "cublaslt",
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "How",
     .help = "the library to measure against",
     .default_text = "libcublasLt.so.13",
     .offset = offsetof(struct bench_ops_settings, cublaslt)},
    {.long_name = "output",
     .short_name = 'o',
     .argument = "FILE",
     .type = OPTION_TYPE_STRING,
     .group = "How",
     .help = "write everything as JSON too",
     .default_text = "none",
     .offset = offsetof(struct bench_ops_settings, output)},
};

/* Source: config.json of Qwen/Qwen2.5-*. */
static const struct bench_shape qwen2_5_shapes[] = {
    {"0.5B", 896, 4864, 14, 2, 64, 151936},   {"1.5B", 1536, 8960, 12, 2, 128, 151936},
    {"3B", 2048, 11008, 16, 2, 128, 151936},  {"7B", 3584, 18944, 28, 4, 128, 152064},
    {"14B", 5120, 13824, 40, 8, 128, 152064}, {"32B", 5120, 27648, 40, 8, 128, 152064},
    {"72B", 8192, 29568, 64, 8, 128, 152064},
};
#define NUM_QWEN2_5_SHAPES (int)(sizeof(qwen2_5_shapes) / sizeof(qwen2_5_shapes[0]))

/* A whole number in [1, BENCH_MAX_SIDE]; *end is behind it. */
static bool parse_side(const char *text, const char **end, int32_t *side)
{
    char *after = NULL;
    errno = 0;
    long value = strtol(text, &after, 10);
    if (after == text || errno != 0 || value < 1 || value > BENCH_MAX_SIDE) {
        return false;
    }
    *end = after;
    *side = (int32_t)value;
    return true;
}

int bench_shapes_of_word(const char *word, struct bench_shape shapes[BENCH_MAX_SHAPES])
{
    struct bench_shape shape = {.name = ""};
    const char *end = NULL;

    if (strcmp(word, "qwen2.5") == 0) {
        memcpy(shapes, qwen2_5_shapes, sizeof(qwen2_5_shapes));
        return NUM_QWEN2_5_SHAPES;
    }
    for (int i = 0; i < NUM_QWEN2_5_SHAPES; i++) {
        if (strcmp(word, qwen2_5_shapes[i].name) == 0) {
            shapes[0] = qwen2_5_shapes[i];
            return 1;
        }
    }
    if (!parse_side(word, &end, &shape.hidden_size) || *end != 'x' ||
        !parse_side(end + 1, &end, &shape.intermediate_size) || *end != '\0') {
        return 0;
    }
    snprintf(shape.name, sizeof(shape.name), "%dx%d", (int)shape.hidden_size,
             (int)shape.intermediate_size);
    shapes[0] = shape;
    return 1;
}

static bool parse_shape(const char *word, struct bench_ops_cells *cells)
{
    struct bench_shape shapes[BENCH_MAX_SHAPES];
    int num_shapes = bench_shapes_of_word(word, shapes);

    if (num_shapes == 0) {
        output_error("bench ops: --shapes: expected qwen2.5, one of its models (7B), or two whole "
                     "numbers from 1 to %d (3584x18944), found \"%s\"",
                     BENCH_MAX_SIDE, word);
        return false;
    }
    if (cells->num_shapes + num_shapes > BENCH_MAX_SHAPES) {
        output_error("bench ops: --shapes: expected at most %d shapes, found more",
                     BENCH_MAX_SHAPES);
        return false;
    }
    memcpy(&cells->shapes[cells->num_shapes], shapes, (size_t)num_shapes * sizeof(shapes[0]));
    cells->num_shapes += num_shapes;
    return true;
}

static bool parse_rows(const char *word, struct bench_ops_cells *cells)
{
    const char *end = NULL;
    int32_t rows = 0;
    if (!parse_side(word, &end, &rows) || *end != '\0') {
        output_error("bench ops: --m: expected whole numbers from 1 to %d, found \"%s\"",
                     BENCH_MAX_SIDE, word);
        return false;
    }
    if (cells->num_rows == BENCH_MAX_ROWS) {
        output_error("bench ops: --m: expected at most %d numbers, found more", BENCH_MAX_ROWS);
        return false;
    }
    cells->rows[cells->num_rows++] = rows;
    return true;
}

/* Calls `parse` on the words between commas. */
static int parse_list(const char *list, bool (*parse)(const char *, struct bench_ops_cells *),
                      struct bench_ops_cells *cells)
{
    char *copy = strdup(list), *rest = copy;
    bool is_ok = true;
    if (copy == NULL) {
        return output_out_of_memory();
    }
    while (is_ok && rest != NULL) {
        char *word = strsep(&rest, ",");
        is_ok = parse(word, cells);
    }
    free(copy);
    return is_ok ? EXIT_CODE_OK : EXIT_CODE_INPUT;
}

static bool parse_gating(const char *word, struct bench_ops_cells *cells)
{
    for (int i = 0; i < NUM_GATINGS; i++) {
        if (strcmp(word, gatings[i].name) != 0) {
            continue;
        }
        if (cells->num_gatings == BENCH_MAX_GATINGS) {
            output_error("bench ops: --activation: expected at most %d, found more",
                         BENCH_MAX_GATINGS);
            return false;
        }
        cells->gatings[cells->num_gatings++] = gatings[i];
        return true;
    }
    output_error("bench ops: --activation: expected silu, gelu, gelu-tanh, relu, gpt-oss or "
                 "silu-general, found \"%s\"",
                 word);
    return false;
}

static bool parse_dtype(const char *word, struct bench_ops_cells *cells)
{
    if (!bench_dtype_is_known(word)) {
        output_error("bench ops: --dtype: expected types of weights, such as bf16 or q4_0, found "
                     "\"%s\"",
                     word);
        return false;
    }
    if (cells->num_dtypes == BENCH_MAX_DTYPES) {
        output_error("bench ops: --dtype: expected at most %d, found more", BENCH_MAX_DTYPES);
        return false;
    }
    snprintf(cells->dtypes[cells->num_dtypes++], sizeof(cells->dtypes[0]), "%s", word);
    return true;
}

const char *bench_op_name(enum bench_op op)
{
    for (const struct option_choice *choice = op_choices; choice->name != NULL; choice++) {
        if (choice->value == (int64_t)op) {
            return choice->name;
        }
    }
    return "?";
}

/* ---- devices --------------------------------------------------------------------------------- */

/* Of no device that is named: the first GPU, if there is one. */
static bool has_gpu(void)
{
#if IMBREX_CUDA
    struct imbrex_device *device = NULL;
    if (imbrex_device_open(0, NULL, &device, NULL) == IMBREX_STATUS_OK) {
        imbrex_device_close(device);
        return true;
    }
#endif
    return false;
}

bool bench_parse_gpu(const char *name, int32_t *device_idx)
{
    const char *end = NULL;
    int32_t above = 0;
    *device_idx = 0;
    if (name == NULL || strcmp(name, "cuda") == 0 || strcmp(name, "cuda:0") == 0) {
        return true;
    }
    if (strncmp(name, "cuda:", 5) != 0 || !parse_side(name + 5, &end, &above) || *end != '\0') {
        return false;
    }
    *device_idx = above;
    return true;
}

static int parse_device(const char *name, int32_t *device_idx, bool *is_cpu)
{
    *device_idx = 0;
    *is_cpu = false;
    if (name == NULL || strcmp(name, "cpu") == 0) {
        *is_cpu = name != NULL || !has_gpu();
        return EXIT_CODE_OK;
    }
    if (bench_parse_gpu(name, device_idx)) {
        return EXIT_CODE_OK;
    }
    output_error("bench ops: --device: expected cpu, cuda or cuda:N, found \"%s\"", name);
    return EXIT_CODE_INPUT;
}

/* An option or op that the device has nothing to do with. */
static int check_device(const struct bench_ops_settings *settings, bool is_cpu)
{
    bool is_cpu_op = settings->op.value >= BENCH_OP_EMBEDDING;
    const char *foreign = NULL;

    if (is_cpu) {
        foreign = settings->plans.given                 ? "plans"
                  : settings->weights.given             ? "weights"
                  : settings->activations != NULL       ? "activation"
                  : settings->rounding.given            ? "rounding"
                  : settings->interleave.given          ? "interleave"
                  : settings->bias                      ? "bias"
                  : settings->numerics                  ? "numerics"
                  : settings->hidden_share              ? "hidden-share"
                  : settings->trace != NULL             ? "trace"
                  : settings->replay_ms.given           ? "replay-ms"
                  : settings->clock.given               ? "clock"
                  : settings->rest_ms.given             ? "rest-ms"
                  : settings->energy_ms.given           ? "energy-ms"
                  : settings->group_m.given             ? "group-m"
                  : settings->no_overlap                ? "no-overlap"
                  : settings->portable                  ? "portable"
                  : settings->cublaslt != NULL          ? "cublaslt"
                  : settings->baselines.given           ? "baselines"
                  : settings->num_streams.given         ? "streams"
                  : settings->tuned != NULL             ? "tuned"
                  : settings->op.value == BENCH_OP_GEMM ? "op gemm"
                                                        : NULL;
    } else {
        foreign = settings->dtypes != NULL  ? "dtype"
                  : settings->cpu.given     ? "cpu"
                  : settings->threads.given ? "threads"
                  : settings->no_roofs      ? "no-roofs"
                  : settings->ways          ? "ways"
                  : is_cpu_op               ? "op"
                                            : NULL;
    }
    if (foreign == NULL) {
        return EXIT_CODE_OK;
    }
    output_error("bench ops: --%s%s%s: expected --device %s with it, found %s", foreign,
                 !is_cpu && is_cpu_op ? " " : "",
                 !is_cpu && is_cpu_op ? bench_op_name((enum bench_op)settings->op.value) : "",
                 is_cpu ? "cuda" : "cpu", is_cpu ? "cpu" : "cuda");
    return EXIT_CODE_INPUT;
}

/* What the kernels of gate_first that are looked at more closely ask for. */
static int check_gate_first(const struct bench_ops_settings *settings,
                            const struct bench_ops_cells *cells)
{
    if ((settings->hidden_share || settings->trace != NULL) &&
        settings->op.value != BENCH_OP_GEMM_SWIGLU) {
        output_error("bench ops: --%s: expected --op gemm_swiglu with it, found %s",
                     settings->trace != NULL ? "trace" : "hidden-share",
                     bench_op_name((enum bench_op)settings->op.value));
        return EXIT_CODE_INPUT;
    }
    const char *foreign = settings->portable              ? "portable"
                          : settings->activations != NULL ? "activation"
                          : settings->rounding.given      ? "rounding"
                          : settings->interleave.given    ? "interleave"
                          : settings->bias                ? "bias"
                                                          : NULL;
    if ((settings->hidden_share || settings->trace != NULL) && foreign != NULL) {
        output_error("bench ops: --%s: expected no --%s with it, which gate_first does not have",
                     settings->trace != NULL ? "trace" : "hidden-share", foreign);
        return EXIT_CODE_INPUT;
    }
    if (settings->trace != NULL && cells->num_shapes * cells->num_rows != 1) {
        output_error("bench ops: --trace: expected one shape and one number of tokens, found %d "
                     "and %d",
                     cells->num_shapes, cells->num_rows);
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

/* Options of gemm_swiglu, and those of them that exclude each other. */
static int check_semantics(const struct bench_ops_settings *settings)
{
    const char *foreign = settings->op.value != BENCH_OP_GEMM ? NULL
                          : settings->activations != NULL     ? "activation"
                          : settings->rounding.given          ? "rounding"
                          : settings->interleave.given        ? "interleave"
                          : settings->bias                    ? "bias"
                                                              : NULL;
    if (foreign != NULL) {
        output_error("bench ops: --%s: expected --op gemm_swiglu with it, found gemm", foreign);
        return EXIT_CODE_INPUT;
    }
    if (settings->interleave.value != 0 && settings->weights.value == BENCH_WEIGHTS_SEPARATE) {
        output_error("bench ops: --interleave: expected --weights gate-up or up-gate with it, "
                     "found separate");
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

static int parse_lists(const struct bench_ops_settings *settings, bool is_cpu,
                       struct bench_ops_cells *cells)
{
    const char *rows = settings->rows != NULL ? settings->rows : is_cpu ? CPU_ROWS : CUDA_ROWS;
    const char *shapes = settings->shapes != NULL ? settings->shapes
                         : is_cpu                 ? CPU_SHAPES
                                                  : CUDA_SHAPES;
    int exit_code = parse_list(shapes, parse_shape, cells);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = parse_list(rows, parse_rows, cells);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = parse_list(settings->activations != NULL ? settings->activations : "silu",
                               parse_gating, cells);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code =
            parse_list(settings->dtypes != NULL ? settings->dtypes : "bf16", parse_dtype, cells);
    }
    return exit_code;
}

/* What the defaults of a CPU leave out. */
static void print_left_out(const struct bench_ops_settings *settings)
{
    if (settings->shapes == NULL) {
        output_printf("left out: the other shapes of Qwen2.5; --shapes qwen2.5 has all\n");
    }
    if (settings->rows == NULL) {
        output_printf("left out: other numbers of tokens; --m 1,8,64,512 has what lies between\n");
    }
}

static int run(const void *settings_bytes, const char *model)
{
    const struct bench_ops_settings *settings = settings_bytes;
    struct bench_ops_cells cells = {0};
    bool is_cpu;

    if (model != NULL) {
        output_error("bench ops: expected no model, found \"%s\"; see imbrex help bench ops",
                     model);
        return EXIT_CODE_INPUT;
    }
    int exit_code = parse_device(settings->device, &cells.device_idx, &is_cpu);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = check_device(settings, is_cpu);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = check_semantics(settings);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = parse_lists(settings, is_cpu, &cells);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = check_gate_first(settings, &cells);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (is_cpu) {
        exit_code = bench_ops_cpu(settings, &cells);
        if (exit_code == EXIT_CODE_OK) {
            print_left_out(settings);
        }
        return exit_code;
    }
#if IMBREX_CUDA
    return bench_ops_cuda(settings, &cells);
#else
    output_error("bench ops: this program was built without the CUDA toolkit");
    return EXIT_CODE_INPUT;
#endif
}

const struct command bench_ops = {
    .name = "bench ops",
    .synopsis = "[options]",
    .summary = "the kernels, beside other libraries and beside what the machine can do",
    .description =
        "Proves kernels against a reference, then times them. On a GPU beside cuBLASLt: its bare "
        "GEMM, its GEMM followed by one activation kernel, and two baselines that cut the work "
        "into "
        "slices. On a CPU, each kernel path beside "
        "the others and beside the measured rates of memory and arithmetic; the fused MLP beside "
        "two products and a pass for the activation. All run in one process, one after the other, "
        "on random inputs that rotate through more memory than the caches hold; figures are "
        "medians, with the 10th and 90th percentile beside them.",
    .examples = "  imbrex bench ops -o bench/results/2026-11-29-h200-gemm_swiglu.json\n"
                "  imbrex bench ops --op gemm --shapes 7B --m 512,4096 -o down_proj.json\n"
                "  imbrex bench ops --shapes 72B --m 4096 --clock burst\n"
                "  imbrex bench ops --shapes 7B --m 2048 --activation silu,gelu,relu,gpt-oss\n"
                "  imbrex bench ops --device cpu --shapes 0.5B --dtype bf16,q8_0,q4_0\n",
    .options = {bench_ops_options, sizeof(bench_ops_options) / sizeof(bench_ops_options[0])},
    .defaults = &bench_ops_defaults,
    .settings_bytes = sizeof(bench_ops_defaults),
    .run = run,
};
