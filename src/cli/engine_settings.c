/* SPDX-License-Identifier: Apache-2.0 */
/* From the shared options to what the library takes. */
#include "cli/engine_settings.h"

#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cli/command.h"
#include "cli/disk_room.h"
#include "cli/nvtx.h"
#include "cli/output.h"
#include "cli/progress_bar.h"
#include "cli/signals.h"
#include "imbrex_kv.h"

#define VNNI_FEATURES (IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512 | IMBREX_CPU_AVX512_VNNI)

/* Whatever rounds to bf16, and what the machine has beside it. */
#define ANY_BF16 (IMBREX_CPU_ALL | IMBREX_CPU_AMX_BF16 | IMBREX_CPU_AVX512_BF16)

const struct option_choice engine_cpu_choices[] = {
    {"auto", IMBREX_CPU_ALL},
    {"bf16", ANY_BF16},
    {"amx-bf16", VNNI_FEATURES | IMBREX_CPU_AMX_BF16},
    {"avx512-bf16", VNNI_FEATURES | IMBREX_CPU_AVX512_BF16},
    {"amx-int8", VNNI_FEATURES | IMBREX_CPU_AMX_INT8},
    {"vnni", VNNI_FEATURES},
    {"avx512", IMBREX_CPU_AVX2 | IMBREX_CPU_AVX512},
    {"avx2", IMBREX_CPU_AVX2},
    {"ref", 0},
    {NULL, 0},
};

const struct option_choice engine_compute_choices[] = {
    {"auto", IMBREX_COMPUTE_AUTO},
    {"f32", IMBREX_COMPUTE_F32},
    {"bf16", IMBREX_COMPUTE_BF16},
    {NULL, 0},
};

const struct option_choice engine_kv_dtype_choices[] = {
    {"auto", IMBREX_KV_DTYPE_AUTO},
    {"bf16", IMBREX_KV_DTYPE_BF16},
    {"fp16", IMBREX_KV_DTYPE_FP16},
    {"fp32", IMBREX_KV_DTYPE_FP32},
    {"int8", IMBREX_KV_DTYPE_INT8},
    {"fp8", IMBREX_KV_DTYPE_FP8},
    {NULL, 0},
};

const struct option_choice engine_kv_write_choices[] = {
    {"computed", IMBREX_KV_WRITE_COMPUTED},
    {"demoted", IMBREX_KV_WRITE_DEMOTED},
    {NULL, 0},
};

const struct option_choice engine_ablations[] = {
    {"mlp", IMBREX_ABLATE_MLP},       {"attention", IMBREX_ABLATE_ATTENTION},
    {"pdl", IMBREX_ABLATE_PDL},       {"graph", IMBREX_ABLATE_GRAPH},
    {"hopper", IMBREX_ABLATE_HOPPER}, {NULL, 0},
};

/* ---- devices --------------------------------------------------------------------------------- */

static bool is_cuda(const char *device)
{
    static const char prefix[] = "cuda:";
    size_t length = strspn(device, "0123456789");

    if (strncmp(device, prefix, strlen(prefix)) == 0) {
        device += strlen(prefix);
        length = strspn(device, "0123456789");
        return length > 0 && length <= 4 && device[length] == '\0';
    }
    return strcmp(device, "cuda") == 0;
}

/* The name that the library gets. */
static int choose_device(const struct engine_settings *settings, const char **device)
{
    const char *name = settings->device != NULL ? settings->device : "cpu";

    if (strcmp(name, "auto") != 0 && strcmp(name, "cpu") != 0 && !is_cuda(name)) {
        output_error("--device: expected auto, cpu, cuda or cuda:N, found \"%s\"", name);
        return EXIT_CODE_INPUT;
    }
    if (settings->cpu.given && is_cuda(name)) {
        output_error("--cpu: expected --device cpu with it, found %s", name);
        return EXIT_CODE_INPUT;
    }
    *device = settings->cpu.given ? "cpu" : name;
    return EXIT_CODE_OK;
}

/* Of a list between commas. */
static int parse_ablations(const char *list, uint32_t *ablations)
{
    *ablations = 0;
    for (const char *word = list; word != NULL;) {
        size_t length = strcspn(word, ",");
        const struct option_choice *choice = engine_ablations;
        while (choice->name != NULL &&
               (strlen(choice->name) != length || strncmp(choice->name, word, length) != 0)) {
            choice++;
        }
        if (choice->name == NULL) {
            output_error("--ablate: expected mlp, attention, pdl, graph, hopper or some of them "
                         "between commas, found \"%.*s\"",
                         (int)length, word);
            return EXIT_CODE_INPUT;
        }
        *ablations |= (uint32_t)choice->value;
        word = word[length] == ',' ? word + length + 1 : NULL;
    }
    return EXIT_CODE_OK;
}

int engine_settings_to_options(const struct engine_settings *settings, int32_t context_size,
                               struct imbrex_engine_options *options)
{
    struct imbrex_engine_options made = imbrex_engine_options_default();

    made.num_threads = (int32_t)settings->threads.value;
    made.cpu_features = (uint32_t)settings->cpu.value;
    made.context_size = settings->ctx_size.given ? (int32_t)settings->ctx_size.value : context_size;
    made.kv_policy = "none";
    made.compute = (enum imbrex_compute)settings->compute.value;
    made.kv_dtype = (enum imbrex_kv_dtype)settings->kv_dtype.value;
    if (settings->batch_invariant) {
        made.batch_invariant = IMBREX_INVARIANCE_ON;
    }
    int exit_code = choose_device(settings, &made.device);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = tuned_choose("", settings->tuned, &made.tuned, &made.tuned_is_optional);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = parse_ablations(settings->ablate, &made.ablations);
    }
    if (exit_code == EXIT_CODE_OK) {
        *options = made;
    }
    return exit_code;
}

/* ---- the KV cache ---------------------------------------------------------------------------- */

const char *engine_settings_policy(const struct engine_settings *settings)
{
    return settings->kv_policy != NULL ? settings->kv_policy : ENGINE_KV_POLICY_DEFAULT;
}

int engine_settings_check_policy(const char *option, const char *name)
{
    char names[256] = "";
    size_t length = 0;

    if (strcmp(name, "none") == 0) {
        return EXIT_CODE_OK;
    }
    for (int32_t i = 0; imbrex_kv_policy_name(i) != NULL; i++) {
        if (strcmp(name, imbrex_kv_policy_name(i)) == 0) {
            return EXIT_CODE_OK;
        }
        if (length < sizeof(names)) {
            length += (size_t)snprintf(names + length, sizeof(names) - length, "%s, ",
                                       imbrex_kv_policy_name(i));
        }
    }
    output_error("--%s: expected one of %snone, found \"%s\"", option, names, name);
    return EXIT_CODE_INPUT;
}

/* A number, with a power of 1024 (K or KiB, M or MiB, ...) if `shift` becomes more than 0. False
 * for anything else. */
static bool read_amount(const char *text, int64_t *amount, int *shift)
{
    static const char units[] = "KMGT";
    int64_t value = 0;
    size_t length = 0;

    for (; text[length] >= '0' && text[length] <= '9' && length < 12; length++) {
        value = value * 10 + (text[length] - '0');
    }
    const char *unit = text[length] != '\0' ? strchr(units, text[length]) : NULL;
    *shift = unit != NULL ? 10 * (int)(unit - units + 1) : 0;
    *amount = value;
    const char *rest = text + length + (unit != NULL);
    return length > 0 && value > 0 && value <= INT64_MAX >> *shift &&
           (*rest == '\0' || (unit != NULL && strcmp(rest, "iB") == 0));
}

int engine_settings_choose_kv_cache(const struct engine_settings *settings,
                                    const struct imbrex_model *model,
                                    struct imbrex_engine_options *options)
{
    const char *text = settings->kv_cache;
    struct imbrex_memory_plan plan;
    int64_t num_tokens = 0;
    int shift = 0;
    char of_size[96] = "";

    if (text == NULL) {
        return EXIT_CODE_OK;
    }
    if (!read_amount(text, &num_tokens, &shift)) {
        output_error("--kv-cache: expected a number of tokens, or a size such as 512M, found "
                     "\"%s\"",
                     text);
        return EXIT_CODE_INPUT;
    }
    int exit_code = engine_settings_plan(model, options, &plan);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    if (shift > 0) {
        int64_t block_bytes = (int64_t)plan.kv_bytes / plan.kv_num_blocks;
        num_tokens = (num_tokens << shift) / block_bytes * plan.kv_block_size;
        (void)snprintf(of_size, sizeof(of_size),
                       ", which is %" PRId64 " in blocks of %" PRId32 " tokens and %" PRId64
                       " bytes",
                       num_tokens, plan.kv_block_size, block_bytes);
    }
    if (num_tokens < plan.context_size || num_tokens > IMBREX_MAX_KV_CACHE_TOKENS) {
        output_error("--kv-cache: expected at least the context of %" PRId32
                     " tokens, at most %d, found %s%s",
                     plan.context_size, IMBREX_MAX_KV_CACHE_TOKENS, text, of_size);
        return EXIT_CODE_INPUT;
    }
    options->kv_cache_tokens = (int32_t)num_tokens;
    return EXIT_CODE_OK;
}

static int read_size(const char *option, const char *text, size_t *num_bytes)
{
    int64_t amount = 0;
    int shift = 0;

    if (!read_amount(text, &amount, &shift) || shift == 0) {
        output_error("--%s: expected a whole number and K, M, G or T, such as 512M or 8GiB, found "
                     "\"%s\"",
                     option, text);
        return EXIT_CODE_INPUT;
    }
    *num_bytes = (size_t)amount << shift;
    return EXIT_CODE_OK;
}

/* "zstd" or "zstd=LEVEL". */
static bool read_zstd(const char *text, int32_t *level)
{
    char *end;
    long found = 1;

    if (strncmp(text, "zstd", strlen("zstd")) != 0) {
        return false;
    }
    text += strlen("zstd");
    if (*text == '=') {
        found = strtol(text + 1, &end, 10);
        text = isdigit((unsigned char)text[1]) ? end : text;
    }
    *level = found >= 1 && found <= 19 ? (int32_t)found : 0;
    return *text == '\0' && *level > 0;
}

/* The size stands behind the last colon: a folder may have others. */
static int read_kv_disk(const char *text, char folder[ENGINE_MAX_PATH_BYTES],
                        struct imbrex_engine_options *options)
{
    const char *colon = strrchr(text, ':');
    const char *comma = colon != NULL ? strchr(colon, ',') : NULL;
    size_t length = colon != NULL ? (size_t)(colon - text) : 0;
    char size[64] = "";

    if (length == 0) {
        output_error("--kv-disk: expected a folder and a size such as cache:20G, found \"%s\"",
                     text);
        return EXIT_CODE_INPUT;
    }
    if (length >= ENGINE_MAX_PATH_BYTES) {
        output_error("--kv-disk: expected a folder's path of at most %d bytes, found one of %zu: "
                     "\"%.60s...\"",
                     ENGINE_MAX_PATH_BYTES - 1, length, text);
        return EXIT_CODE_INPUT;
    }
    if (comma != NULL && !read_zstd(comma + 1, &options->kv_disk_zstd_level)) {
        output_error(
            "--kv-disk: expected zstd, or zstd=LEVEL with a level from 1 to 19, behind the "
            "size and a comma, found \"%s\"",
            comma + 1);
        return EXIT_CODE_INPUT;
    }
    memcpy(folder, text, length);
    folder[length] = '\0';
    if (strncmp(folder, "~/", 2) == 0) {
        output_error("--kv-disk: expected a folder whose ~ the shell has replaced, as it does in "
                     "--kv-disk ~/... without = and quotes, found \"%s\"",
                     folder);
        return EXIT_CODE_INPUT;
    }
    const char *last_colon = strrchr(folder, ':');
    int64_t amount;
    int shift;
    if (last_colon != NULL && read_amount(last_colon + 1, &amount, &shift) && shift > 0) {
        output_error("--kv-disk: expected one size behind the folder, found two in \"%s\"", text);
        return EXIT_CODE_INPUT;
    }
    const char *last_comma = strrchr(folder, ',');
    int32_t ignored;
    if (last_comma != NULL && read_zstd(last_comma + 1, &ignored)) {
        output_error("--kv-disk: expected %s behind the size, found it behind the folder in \"%s\"",
                     last_comma + 1, text);
        return EXIT_CODE_INPUT;
    }
    (void)snprintf(size, sizeof(size), "%.*s",
                   comma != NULL ? (int)(comma - colon) - 1 : (int)sizeof(size), colon + 1);
    return read_size("kv-disk", size, &options->kv_disk_bytes);
}

/* The options of the command that take less memory with less: "; less is taken with less of
 * --ctx-size". "": none. */
static void name_remedies(char *text, size_t max_bytes)
{
    static const char *const fields[] = {"context_size", "kv_cache_tokens", "max_step_tokens",
                                         "num_threads"};
    size_t length = 0;

    text[0] = '\0';
    for (size_t i = 0; i < sizeof(fields) / sizeof(fields[0]) && length < max_bytes; i++) {
        const char *option = output_option_of(fields[i]);
        if (option != NULL) {
            length += (size_t)snprintf(text + length, max_bytes - length, "%s--%s",
                                       length > 0 ? ", " : "; less is taken with less of ", option);
        }
    }
}

/* What a GPU is missed for names the option that asked for it, and what there is no memory for
 * those that take less. */
static int report_failure(const struct imbrex_engine_options *options, struct imbrex_error *err)
{
    struct imbrex_error named = *err;
    bool is_missing =
        err->status == IMBREX_STATUS_UNSUPPORTED || err->status == IMBREX_STATUS_NOT_FOUND;

    if (is_missing && err->field == NULL && is_cuda(options->device)) {
        (void)snprintf(named.message, sizeof(named.message), "--device %s: %.*s", options->device,
                       (int)sizeof(named.message) - 32, err->message);
    }
    if (err->status == IMBREX_STATUS_OUT_OF_MEMORY) {
        char remedies[96];
        name_remedies(remedies, sizeof(remedies));
        (void)snprintf(named.message, sizeof(named.message), "%.*s%s",
                       (int)(sizeof(named.message) - sizeof(remedies)), err->message, remedies);
    }
    return output_library_error(&named);
}

int engine_settings_plan(const struct imbrex_model *model, struct imbrex_engine_options *options,
                         struct imbrex_memory_plan *plan)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    if (imbrex_engine_plan(model, options, plan, &err) != IMBREX_STATUS_OK) {
        return report_failure(options, &err);
    }
    if (!engine_settings_has_gpu(plan)) {
        options->device = "cpu";
    }
    return EXIT_CODE_OK;
}

int engine_settings_choose_tiers(const struct engine_settings *settings,
                                 char kv_folder[ENGINE_MAX_PATH_BYTES],
                                 struct imbrex_engine_options *options)
{
    int exit_code = EXIT_CODE_OK;

    options->kv_prefetch_percent = (int32_t)settings->kv_prefetch.value;
    options->kv_write = (enum imbrex_kv_write)settings->kv_write.value;
    if (settings->kv_host != NULL) {
        exit_code = read_size("kv-host", settings->kv_host, &options->kv_host_bytes);
    }
    if (exit_code == EXIT_CODE_OK && settings->kv_disk != NULL) {
        exit_code = read_kv_disk(settings->kv_disk, kv_folder, options);
        options->kv_disk_path = kv_folder;
        if (exit_code == EXIT_CODE_OK) {
            disk_room_warn("kv-disk", kv_folder, options->kv_disk_bytes);
        }
    }
    options->kv_remote_url = settings->kv_remote;
    options->kv_remote_secret_path = settings->kv_remote_secret;
    return exit_code;
}

int engine_settings_check_write(const struct engine_settings *settings, bool has_lower_tiers)
{
    if (settings->kv_write.given && !has_lower_tiers) {
        output_error("--kv-write: expected a tier with it that blocks are written to (--kv-disk or "
                     "--kv-remote), found none");
        return EXIT_CODE_INPUT;
    }
    return EXIT_CODE_OK;
}

int engine_settings_check_prefetch(const struct engine_settings *settings, bool has_tiers,
                                   const char *policy)
{
    char names[128] = "";
    size_t length = 0;

    if (!settings->kv_prefetch.given || settings->kv_prefetch.value == 0) {
        return EXIT_CODE_OK;
    }
    if (!has_tiers) {
        output_error("--kv-prefetch: expected a tier with it that blocks can come up from "
                     "(--kv-host, --kv-disk or --kv-remote), found none");
        return EXIT_CODE_INPUT;
    }
    for (int32_t i = 0; imbrex_kv_policy_name(i) != NULL && length < sizeof(names); i++) {
        if (imbrex_kv_policy_predicts(imbrex_kv_policy_name(i))) {
            length += (size_t)snprintf(names + length, sizeof(names) - length, "%s%s",
                                       length > 0 ? ", " : "", imbrex_kv_policy_name(i));
        }
    }
    if (policy != NULL && !imbrex_kv_policy_predicts(policy)) {
        output_warning("--kv-prefetch: nothing will come up ahead, since the policy %s expects no "
                       "blocks; those that do, where --kv-policy chooses: %s",
                       policy, names);
    }
    return EXIT_CODE_OK;
}

const char *engine_settings_remote_place(const struct engine_settings *settings)
{
    const char *place = NULL;

    for (const char *at = settings->kv_remote; at != NULL && *at != '\0' && *at != '?'; at++) {
        if (*at == '@' || (place == NULL && strncmp(at, "://", 3) == 0)) {
            place = at + (*at == '@' ? 1 : 3);
        }
    }
    return place;
}

bool engine_settings_has_tiers(const struct engine_settings *settings)
{
    return settings->kv_host != NULL || settings->kv_disk != NULL || settings->kv_remote != NULL ||
           settings->kv_remote_secret != NULL;
}

int engine_settings_choose_kv(const struct engine_settings *settings,
                              const struct imbrex_model *model,
                              char kv_folder[ENGINE_MAX_PATH_BYTES],
                              struct imbrex_engine_options *options)
{
    int exit_code = engine_settings_check_policy("kv-policy", engine_settings_policy(settings));

    options->kv_policy = engine_settings_policy(settings);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_choose_kv_cache(settings, model, options);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_check_prefetch(settings, engine_settings_has_tiers(settings),
                                                   options->kv_policy);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_check_write(settings, settings->kv_disk != NULL ||
                                                              settings->kv_remote != NULL);
    }
    return exit_code == EXIT_CODE_OK ? engine_settings_choose_tiers(settings, kv_folder, options)
                                     : exit_code;
}

/* ---- engines --------------------------------------------------------------------------------- */

bool engine_settings_has_gpu(const struct imbrex_memory_plan *plan)
{
    return plan->device != NULL && strcmp(plan->device, "cpu") != 0;
}

static int check_kernels(const struct engine_settings *settings,
                         const struct imbrex_memory_plan *plan)
{
    for (const struct option_choice *choice = engine_cpu_choices; choice->name != NULL; choice++) {
        bool is_had = choice->value == ANY_BF16 ? strstr(plan->kernels, choice->name) != NULL
                                                : strcmp(plan->kernels, choice->name) == 0;
        if (choice->value == settings->cpu.value && choice->value != IMBREX_CPU_ALL && !is_had) {
            output_error("--cpu %s: expected a machine with these instructions, found one whose "
                         "best kernels are \"%s\"",
                         choice->name, plan->kernels);
            return EXIT_CODE_INPUT;
        }
    }
    return EXIT_CODE_OK;
}

int engine_settings_check(const struct engine_settings *settings,
                          const struct imbrex_memory_plan *plan)
{
    if (engine_settings_has_gpu(plan)) {
        return EXIT_CODE_OK;
    }
    if (settings->ablate != NULL) {
        output_error("--ablate: expected a model that runs on a GPU with it, found one on the CPU");
        return EXIT_CODE_INPUT;
    }
    if (settings->tuned != NULL) {
        output_error("--tuned: expected a model that runs on a GPU with it, found one on the CPU");
        return EXIT_CODE_INPUT;
    }
    return check_kernels(settings, plan);
}

/* An imbrex_load_fn; user: whether there is a bar. */
static bool draw_load(void *user, size_t bytes_done, size_t bytes_total)
{
    bool *has_bar = user;

    *has_bar = true;
    progress_bar_draw(bytes_total > 0 ? (double)bytes_done / (double)bytes_total : 1.0,
                      "weights to the GPU");
    return signals_interrupt() == 0;
}

int engine_settings_create(const struct engine_settings *settings, struct imbrex_model *model,
                           struct imbrex_engine_options *options, bool may_draw,
                           struct imbrex_engine **engine, struct imbrex_memory_plan *plan)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    bool has_bar = false;

    if (may_draw && isatty(STDERR_FILENO) == 1) {
        options->load_progress = draw_load;
        options->load_user = &has_bar;
    }
    if (settings->nvtx && !nvtx_open(options)) {
        output_error("--nvtx: expected a program that was built where the CUDA toolkit is, found "
                     "one without it");
        return EXIT_CODE_INPUT;
    }
    enum imbrex_status status = imbrex_engine_create(model, options, engine, &err);
    options->load_progress = NULL;
    if (has_bar) {
        progress_bar_clear();
    }
    if (status == IMBREX_STATUS_CANCELLED) {
        return EXIT_CODE_SIGNAL + signals_interrupt();
    }
    if (status != IMBREX_STATUS_OK) {
        return report_failure(options, &err);
    }
    imbrex_engine_memory_plan(*engine, plan);
    return engine_settings_check(settings, plan);
}
