/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex inspect: what a checkpoint holds and what running it will take, without running it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <jansson.h>

#include "cli/command.h"
#include "cli/engine_settings.h"
#include "cli/output.h"
#include "cli/report_header.h"
#include "cli/session.h"
#include "cli/signals.h"
#include "imbrex.h"
#include "imbrex_ops.h"

struct inspect_settings {
    struct engine_settings engine;
    bool json, tensors;
};

static const struct inspect_settings inspect_defaults = {.engine = ENGINE_SETTINGS_DEFAULT};

static const struct option_spec inspect_options[] = {
    {.long_name = "json",
     .type = OPTION_TYPE_FLAG,
     .group = "Output",
     .help = "print a JSON object, all tensors included",
     .offset = offsetof(struct inspect_settings, json)},
    {.long_name = "tensors",
     .type = OPTION_TYPE_FLAG,
     .group = "Output",
     .help = "list every tensor: name, type, shape, bytes, file",
     .offset = offsetof(struct inspect_settings, tensors)},
    ENGINE_OPTION_CTX_SIZE(struct inspect_settings, "4096, or what the model was made for if that "
                                                    "is less"),
    ENGINE_OPTION_KV_POLICY(struct inspect_settings, ENGINE_KV_POLICY_DEFAULT),
    ENGINE_OPTION_KV_CACHE(struct inspect_settings, "one context"),
    ENGINE_OPTION_KV_TIERS(struct inspect_settings),
    ENGINE_OPTION_KV_PREFETCH(struct inspect_settings),
    ENGINE_OPTION_DEVICE(struct inspect_settings),
    ENGINE_OPTION_COMPUTE(struct inspect_settings),
    ENGINE_OPTION_KV_DTYPE(struct inspect_settings),
    ENGINE_OPTION_TUNED(struct inspect_settings),
    ENGINE_OPTION_THREADS(struct inspect_settings),
    ENGINE_OPTION_CPU(struct inspect_settings),
};

/* Everything that is shown. */
struct inspection {
    const struct imbrex_model *model;
    struct imbrex_model_info description;
    struct imbrex_request_options sampling;
    struct imbrex_memory_plan plan;
    const char *kv_policy;
    const char *kv_remote; /* the address without its login; NULL: none */
    char tuned[1024];      /* plans of a GPU: which are in use, or why none are; "": on a CPU */
    const struct imbrex_tokenizer *tokenizer; /* NULL: there is none */
    const struct imbrex_tensor_info *tensors; /* [num_tensors] */
    int32_t num_tensors;
};

#define MAX_TYPES 48 /* more than there are */
struct type_count {
    const char *name;
    int32_t num_tensors;
    size_t num_bytes;
};

static const struct {
    enum imbrex_generation_field field;
    const char *name;
} sampling_fields[] = {
    {IMBREX_GENERATION_TEMPERATURE, "temperature"},
    {IMBREX_GENERATION_TOP_K, "top_k"},
    {IMBREX_GENERATION_TOP_P, "top_p"},
    {IMBREX_GENERATION_MIN_P, "min_p"},
    {IMBREX_GENERATION_REPETITION_PENALTY, "repetition_penalty"},
};
#define NUM_SAMPLING_FIELDS (sizeof(sampling_fields) / sizeof(sampling_fields[0]))

/* The shortest decimal that a float stands for, so that 0.7 is not shown as 0.699999988. */
static double decimal_of_float(float value)
{
    char text[32];

    snprintf(text, sizeof(text), "%.7g", (double)value);
    return strtod(text, NULL);
}

static double sampling_value(const struct imbrex_request_options *sampling,
                             enum imbrex_generation_field field)
{
    switch (field) {
    case IMBREX_GENERATION_TEMPERATURE:
        return decimal_of_float(sampling->temperature);
    case IMBREX_GENERATION_TOP_K:
        return sampling->top_k;
    case IMBREX_GENERATION_TOP_P:
        return decimal_of_float(sampling->top_p);
    case IMBREX_GENERATION_MIN_P:
        return decimal_of_float(sampling->min_p);
    case IMBREX_GENERATION_REPETITION_PENALTY:
        return decimal_of_float(sampling->repetition_penalty);
    }
    return 0;
}

/* ---- text ---- */

static void print_label(const char *label)
{
    output_printf("%-18s", label);
}

static void print_string(const char *label, const char *text)
{
    print_label(label);
    output_escaped(text, strlen(text));
    output_printf("\n");
}

static void print_size(const char *label, size_t num_bytes, const char *note)
{
    char text[SIZE_TEXT_BYTES];

    print_label(label);
    output_printf("%s%s\n", output_format_size(text, num_bytes), note);
}

static void print_end_tokens(const struct inspection *inspection)
{
    const struct imbrex_model_info *description = &inspection->description;

    print_label("end tokens");
    for (int32_t i = 0; i < description->num_eos_token_ids; i++) {
        int32_t token_id = description->eos_token_ids[i];
        size_t num_bytes = 0;
        const char *bytes = NULL;
        if (inspection->tokenizer != NULL) {
            bytes = imbrex_token_bytes(inspection->tokenizer, token_id, &num_bytes);
        }
        output_printf("%s%" PRId32, i == 0 ? "" : ", ", token_id);
        if (bytes != NULL) {
            output_printf(" '");
            output_escaped(bytes, num_bytes);
            output_printf("'");
        }
    }
    output_printf(description->num_eos_token_ids == 0 ? "none\n" : "\n");
}

static void print_sampling(const struct imbrex_request_options *sampling)
{
    bool is_default = sampling->temperature > 0 &&
                      (sampling->from_checkpoint & (unsigned)IMBREX_GENERATION_TEMPERATURE) == 0;
    bool any = sampling->temperature == 0 || is_default;
    bool from_checkpoint = false;

    print_label("sampling");
    if (is_default) {
        output_printf("temperature %g (default)",
                      sampling_value(sampling, IMBREX_GENERATION_TEMPERATURE));
    } else if (any) {
        output_printf("the most likely token");
    }
    for (size_t i = 0; i < NUM_SAMPLING_FIELDS; i++) {
        if ((sampling->from_checkpoint & (unsigned)sampling_fields[i].field) != 0) {
            output_printf("%s%s %g", any ? ", " : "", sampling_fields[i].name,
                          sampling_value(sampling, sampling_fields[i].field));
            any = true;
            from_checkpoint = true;
        }
    }
    output_printf(from_checkpoint ? " (from generation_config.json)\n" : "\n");
}

/* Types in the order in which they are first met, with their number of tensors and bytes. */
static int32_t count_types(const struct inspection *inspection, struct type_count *counts)
{
    int32_t num_types = 0;

    for (int32_t i = 0; i < inspection->num_tensors; i++) {
        const struct imbrex_tensor_info *tensor = &inspection->tensors[i];
        int32_t idx = 0;
        while (idx < num_types && strcmp(counts[idx].name, tensor->dtype) != 0) {
            idx++;
        }
        if (idx == MAX_TYPES) {
            continue;
        }
        if (idx == num_types) {
            counts[num_types++] = (struct type_count){.name = tensor->dtype};
        }
        counts[idx].num_tensors++;
        counts[idx].num_bytes += tensor->num_bytes;
    }
    return num_types;
}

static void print_types(const struct inspection *inspection)
{
    struct type_count counts[MAX_TYPES];
    int32_t num_types = count_types(inspection, counts);
    char size[SIZE_TEXT_BYTES];

    for (int32_t i = 0; i < num_types; i++) {
        print_label(i == 0 ? "types" : "");
        output_printf("%s: %" PRId32 " tensor%s, %s\n", counts[i].name, counts[i].num_tensors,
                      output_plural((uint64_t)counts[i].num_tensors),
                      output_format_size(size, counts[i].num_bytes));
    }
}

static void print_model(const struct inspection *inspection)
{
    const struct imbrex_model_info *model = &inspection->description;

    print_string("model", model->path);
    print_label("format");
    output_printf("%s", model->format);
    if (model->file_type != NULL) {
        output_printf(", file type %s", model->file_type);
    }
    output_printf("\n");
    print_string("architecture", model->architecture);
    print_label("layers");
    output_printf("%" PRId32 "\n", model->num_layers);
    print_label("hidden size");
    output_printf("%" PRId32 ", intermediate %" PRId32 "\n", model->hidden_size,
                  model->intermediate_size);
    print_label("heads");
    output_printf("%" PRId32 ", of keys and values %" PRId32 ", of %" PRId32 " dimensions each\n",
                  model->num_heads, model->num_kv_heads, model->head_dim);
    print_label("positions");
    output_printf("%" PRId32 ", rope theta %g", model->max_position_embeddings, model->rope_theta);
    if (strcmp(model->rope_scaling, "default") != 0) {
        output_printf(", rope scaling %s by %g", model->rope_scaling, model->rope_scaling_factor);
    }
    output_printf("\n");
    if (model->num_sliding_layers > 0) {
        print_label("window");
        output_printf("%" PRId32 " position%s in %" PRId32 " layer%s\n", model->sliding_window,
                      output_plural((uint64_t)model->sliding_window), model->num_sliding_layers,
                      output_plural((uint64_t)model->num_sliding_layers));
    }
    print_label("norm epsilon");
    output_printf("%g\n", model->rms_norm_eps);
    print_label("vocabulary");
    output_printf("%" PRId32 " rows", model->vocab_size);
    if (inspection->tokenizer != NULL) {
        output_printf(", %" PRId32 " tokens in the tokenizer\n",
                      imbrex_tokenizer_vocab_size(inspection->tokenizer));
    } else {
        output_printf(", no tokenizer\n");
    }
    print_end_tokens(inspection);
    print_label("output matrix");
    output_printf("%s (%s)\n", model->tied ? "tied to the embedding" : "its own",
                  model->tied_reason);
    print_label("parameters");
    output_printf("%" PRId64 "\n", model->num_parameters);
    print_label("tensors");
    output_printf("%" PRId32 "\n", inspection->num_tensors);
    print_types(inspection);
    print_size("weights", model->weight_bytes, "");
    print_size("KV per token", inspection->plan.kv_token_bytes, "");
    print_sampling(&inspection->sampling);
}

static void print_plan_head(const struct imbrex_memory_plan *plan)
{
    output_printf("\nmemory plan for %" PRId32 " tokens of context, ", plan->context_size);
    if (engine_settings_has_gpu(plan)) {
        output_printf("%s:%" PRId32 ", %s, ", plan->device, plan->device_idx, plan->compute);
    } else {
        output_printf("%" PRId32 " thread%s, ", plan->num_threads,
                      output_plural((uint64_t)plan->num_threads));
    }
    output_printf("%s kernels,\nat most %" PRId32 " sequence%s at once, %" PRId32
                  " waiting request%s\n",
                  plan->kernels, plan->max_running, output_plural((uint64_t)plan->max_running),
                  plan->max_waiting, output_plural((uint64_t)plan->max_waiting));
}

static void print_plan(const struct inspection *inspection)
{
    const struct imbrex_memory_plan *plan = &inspection->plan;
    bool has_gpu = engine_settings_has_gpu(plan);
    /* Half of the batches' bytes lie on either side. */
    size_t staging_bytes = plan->batch_bytes / 2;
    char note[96];

    print_plan_head(plan);
    print_size("  weights", plan->weight_bytes, ", mapped");
    print_size("  converted", plan->converted_bytes, ", norms and biases");
    if (has_gpu) {
        print_size("  staging", staging_bytes, ", pinned, inputs and results of a step");
        output_printf("on the GPU\n");
        print_size("  weights", plan->device_weight_bytes, "");
    }
    if (inspection->tuned[0] != '\0') {
        print_string("  tuned plans", inspection->tuned);
    }
    snprintf(note, sizeof(note), ", %" PRId32 " block%s of %" PRId32 " tokens in %s, policy %s",
             plan->kv_num_blocks, output_plural((uint64_t)plan->kv_num_blocks), plan->kv_block_size,
             plan->kv_dtype, inspection->kv_policy);
    print_size("  KV", plan->kv_bytes, note);
    snprintf(note, sizeof(note), ", steps of %" PRId32 " token%s", plan->max_step_tokens,
             output_plural((uint64_t)plan->max_step_tokens));
    print_size("  activations", plan->activation_bytes, note);
    print_size("  batches", has_gpu ? staging_bytes : plan->batch_bytes,
               ", inputs and results of a step");
    size_t together = plan->kv_bytes + plan->activation_bytes;
    together += has_gpu ? plan->device_weight_bytes + staging_bytes
                        : plan->weight_bytes + plan->converted_bytes + plan->batch_bytes;
    together += has_gpu ? 0 : plan->kv_host_bytes;
    print_size("  together", together, "");
    if (plan->kv_host_bytes > 0 || plan->kv_disk_bytes > 0) {
        output_printf("below the KV cache\n");
        print_size("  host", plan->kv_host_bytes, has_gpu ? ", pinned, KV blocks" : ", KV blocks");
        if (plan->kv_disk_bytes > 0) {
            print_size("  disk", plan->kv_disk_bytes, ", KV blocks, at most");
        }
        if (inspection->kv_remote != NULL) {
            print_string("  remote", inspection->kv_remote);
        }
    }
}

static void print_tensors(const struct inspection *inspection)
{
    output_printf("\n");
    for (int32_t i = 0; i < inspection->num_tensors; i++) {
        const struct imbrex_tensor_info *tensor = &inspection->tensors[i];
        output_escaped(tensor->name, strlen(tensor->name));
        output_printf("  %s [", tensor->dtype);
        for (int32_t j = 0; j < tensor->num_dims; j++) {
            output_printf("%s%" PRId64, j == 0 ? "" : ", ", tensor->shape[j]);
        }
        output_printf("]  %zu bytes  ", tensor->num_bytes);
        output_escaped(tensor->file, strlen(tensor->file));
        output_printf("\n");
    }
}

/* ---- JSON ---- */

/* A path need not be UTF-8, which JSON is: then its other bytes are shown as '?'. */
static json_t *json_text(const char *bytes, size_t num_bytes)
{
    json_t *text = json_stringn(bytes, num_bytes);
    if (text != NULL) {
        return text;
    }
    char *ascii = malloc(num_bytes + 1);
    if (ascii == NULL) {
        return NULL;
    }
    for (size_t i = 0; i < num_bytes; i++) {
        ascii[i] = (char)((unsigned char)bytes[i] < 0x80 ? bytes[i] : '?');
    }
    text = json_stringn(ascii, num_bytes);
    free(ascii);
    return text;
}

static json_t *json_path(const char *path)
{
    return json_text(path, strlen(path));
}

static json_t *json_size(size_t num_bytes)
{
    return json_integer((json_int_t)num_bytes);
}

/* Adds `value`, which it takes over also on failure. False if there is no memory for it, or for the
 * value: NULL. */
static bool json_append(json_t *array, json_t *value)
{
    return json_array_append_new(array, value) == 0;
}

static json_t *json_end_tokens(const struct inspection *inspection)
{
    json_t *tokens = json_array();

    for (int32_t i = 0; i < inspection->description.num_eos_token_ids; i++) {
        int32_t token_id = inspection->description.eos_token_ids[i];
        size_t num_bytes = 0;
        const char *bytes = NULL;
        if (inspection->tokenizer != NULL) {
            bytes = imbrex_token_bytes(inspection->tokenizer, token_id, &num_bytes);
        }
        json_t *token = json_pack("{s:i, s:o}", "id", (int)token_id, "text",
                                  bytes != NULL ? json_text(bytes, num_bytes) : json_null());
        if (!json_append(tokens, token)) {
            json_decref(tokens);
            return NULL;
        }
    }
    return tokens;
}

static json_t *json_sampling(const struct imbrex_request_options *sampling)
{
    json_t *names = json_array();

    for (size_t i = 0; i < NUM_SAMPLING_FIELDS; i++) {
        if ((sampling->from_checkpoint & (unsigned)sampling_fields[i].field) != 0 &&
            !json_append(names, json_string(sampling_fields[i].name))) {
            json_decref(names);
            return NULL;
        }
    }
    return json_pack(
        "{s:f, s:i, s:f, s:f, s:f, s:o}", "temperature",
        sampling_value(sampling, IMBREX_GENERATION_TEMPERATURE), "top_k", (int)sampling->top_k,
        "top_p", sampling_value(sampling, IMBREX_GENERATION_TOP_P), "min_p",
        sampling_value(sampling, IMBREX_GENERATION_MIN_P), "repetition_penalty",
        sampling_value(sampling, IMBREX_GENERATION_REPETITION_PENALTY), "from_checkpoint", names);
}

static json_t *json_plan(const struct inspection *inspection)
{
    const struct imbrex_memory_plan *plan = &inspection->plan;

    return json_pack(
        "{s:s, s:i, s:s, s:s, s:i, s:i, s:i, s:i, s:i, s:s, s:o, s:o, s:o, s:o, s:i, s:i, "
        "s:s, s:o, s:o, s:o, s:o, s:o, s:o}",
        "device", plan->device, "device_idx", (int)plan->device_idx, "compute", plan->compute,
        "kv_dtype", plan->kv_dtype, "context_size", (int)plan->context_size, "max_step_tokens",
        (int)plan->max_step_tokens, "max_running", (int)plan->max_running, "max_waiting",
        (int)plan->max_waiting, "num_threads", (int)plan->num_threads, "kernels", plan->kernels,
        "weight_bytes", json_size(plan->weight_bytes), "converted_bytes",
        json_size(plan->converted_bytes), "device_weight_bytes",
        json_size(plan->device_weight_bytes), "kv_bytes", json_size(plan->kv_bytes),
        "kv_block_size", (int)plan->kv_block_size, "kv_num_blocks", (int)plan->kv_num_blocks,
        "kv_policy", inspection->kv_policy, "activation_bytes", json_size(plan->activation_bytes),
        "batch_bytes", json_size(plan->batch_bytes), "kv_host_bytes",
        json_size(plan->kv_host_bytes), "kv_disk_bytes", json_size(plan->kv_disk_bytes),
        "kv_remote", inspection->kv_remote != NULL ? json_path(inspection->kv_remote) : json_null(),
        "tuned", inspection->tuned[0] != '\0' ? json_path(inspection->tuned) : json_null());
}

static json_t *json_tensor(const struct imbrex_tensor_info *tensor)
{
    json_t *shape = json_array();

    for (int32_t i = 0; i < tensor->num_dims; i++) {
        if (!json_append(shape, json_integer(tensor->shape[i]))) {
            json_decref(shape);
            return NULL;
        }
    }
    return json_pack("{s:o, s:s, s:o, s:o, s:o}", "name", json_path(tensor->name), "dtype",
                     tensor->dtype, "shape", shape, "bytes", json_size(tensor->num_bytes), "file",
                     json_path(tensor->file));
}

static json_t *json_types(const struct inspection *inspection)
{
    struct type_count counts[MAX_TYPES];
    int32_t num_types = count_types(inspection, counts);
    json_t *types = json_object();

    for (int32_t i = 0; i < num_types; i++) {
        json_t *count = json_pack("{s:i, s:o}", "tensors", (int)counts[i].num_tensors, "bytes",
                                  json_size(counts[i].num_bytes));
        if (json_object_set_new(types, counts[i].name, count) != 0) {
            json_decref(types);
            return NULL;
        }
    }
    return types;
}

static json_t *json_tensors(const struct inspection *inspection)
{
    json_t *tensors = json_array();

    for (int32_t i = 0; i < inspection->num_tensors; i++) {
        if (!json_append(tensors, json_tensor(&inspection->tensors[i]))) {
            json_decref(tensors);
            return NULL;
        }
    }
    return tensors;
}

static json_t *json_config(const struct imbrex_model_info *model)
{
    return json_pack(
        "{s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:i, s:f, s:f, s:s, s:f, s:i, s:i}", "hidden_size",
        (int)model->hidden_size, "intermediate_size", (int)model->intermediate_size, "num_layers",
        (int)model->num_layers, "num_heads", (int)model->num_heads, "num_kv_heads",
        (int)model->num_kv_heads, "head_dim", (int)model->head_dim, "vocab_size",
        (int)model->vocab_size, "max_position_embeddings", (int)model->max_position_embeddings,
        "rope_theta", model->rope_theta, "rms_norm_eps", model->rms_norm_eps, "rope_scaling",
        model->rope_scaling, "rope_scaling_factor", model->rope_scaling_factor, "sliding_window",
        (int)model->sliding_window, "num_sliding_layers", (int)model->num_sliding_layers);
}

static int print_json(const struct inspection *inspection)
{
    const struct imbrex_model_info *model = &inspection->description;
    json_t *vocab_size = inspection->tokenizer != NULL
                             ? json_integer(imbrex_tokenizer_vocab_size(inspection->tokenizer))
                             : json_null();
    json_t *root = json_pack(
        "{s:o, s:s, s:s?, s:o, s:s, s:o, s:o, s:b, s:s, s:I, s:o, s:o, s:o, s:o, s:o, s:o}",
        "model", json_path(model->path), "format", model->format, "file_type", model->file_type,
        "types", json_types(inspection), "architecture", model->architecture, "config",
        json_config(model), "tokenizer_vocab_size", vocab_size, "tied", (int)model->tied,
        "tied_reason", model->tied_reason, "parameters", (json_int_t)model->num_parameters,
        "weight_bytes", json_size(model->weight_bytes), "kv_bytes_per_token",
        json_size(inspection->plan.kv_token_bytes), "end_tokens", json_end_tokens(inspection),
        "sampling", json_sampling(&inspection->sampling), "memory_plan", json_plan(inspection),
        "tensors", json_tensors(inspection));
    /* json_pack fails only for want of memory: what it packs is made above. */
    return report_print(root, 15);
}

/* ---- command ---- */

static int collect_tensors(struct inspection *inspection, struct imbrex_tensor_info **tensors)
{
    struct imbrex_error err = {.status = IMBREX_STATUS_INTERNAL};

    inspection->num_tensors = imbrex_model_num_tensors(inspection->model);
    *tensors = calloc((size_t)inspection->num_tensors + 1, sizeof(**tensors));
    if (*tensors == NULL) {
        return output_out_of_memory();
    }
    for (int32_t i = 0; i < inspection->num_tensors; i++) {
        if (imbrex_model_tensor(inspection->model, i, &(*tensors)[i]) != IMBREX_STATUS_OK) {
            return output_library_error(&err);
        }
    }
    inspection->tensors = *tensors;
    return EXIT_CODE_OK;
}

/* Opens the GPU, which a plan need not: where that fails, the reason is what is shown. */
static int describe_tuned(const struct imbrex_engine_options *options,
                          struct inspection *inspection)
{
    struct imbrex_device_options device_options = imbrex_device_options_default();
    struct imbrex_device_info opened;
    struct imbrex_device *device = NULL;
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};

    device_options.tuned = options->tuned;
    device_options.tuned_is_optional = options->tuned_is_optional;
    device_options.log = output_log;
    enum imbrex_status status =
        imbrex_device_open(inspection->plan.device_idx, &device_options, &device, &err);
    if (status == IMBREX_STATUS_FORMAT || status == IMBREX_STATUS_IO ||
        (status == IMBREX_STATUS_NOT_FOUND && options->tuned != NULL &&
         !options->tuned_is_optional)) {
        return output_library_error(&err);
    }
    if (status != IMBREX_STATUS_OK) {
        snprintf(inspection->tuned, sizeof(inspection->tuned), "none: %s", err.message);
        return EXIT_CODE_OK;
    }
    imbrex_device_describe(device, &opened);
    if (opened.tuned == NULL) {
        snprintf(inspection->tuned, sizeof(inspection->tuned), "none");
    } else {
        snprintf(inspection->tuned, sizeof(inspection->tuned), "%s, %" PRId32 " in use",
                 opened.tuned, opened.num_tuned);
    }
    imbrex_device_close(device);
    return EXIT_CODE_OK;
}

static int inspect(const struct inspect_settings *settings, const struct imbrex_model *model)
{
    struct inspection inspection = {
        .model = model,
        .sampling = imbrex_request_options_default(model),
        .tokenizer = imbrex_model_tokenizer(model),
    };
    struct imbrex_tensor_info *tensors = NULL;
    struct imbrex_engine_options options;
    char kv_folder[ENGINE_MAX_PATH_BYTES];

    imbrex_model_describe(model, &inspection.description);
    int exit_code = engine_settings_to_options(&settings->engine, 0, &options);
    if (exit_code == EXIT_CODE_OK) {
        exit_code = engine_settings_choose_kv(&settings->engine, model, kv_folder, &options);
    }
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    inspection.kv_policy = options.kv_policy;
    inspection.kv_remote = engine_settings_remote_place(&settings->engine);
    exit_code = engine_settings_plan(model, &options, &inspection.plan);
    if (exit_code != EXIT_CODE_OK) {
        return exit_code;
    }
    exit_code = engine_settings_check(&settings->engine, &inspection.plan);
    if (exit_code == EXIT_CODE_OK && engine_settings_has_gpu(&inspection.plan)) {
        exit_code = describe_tuned(&options, &inspection);
    }
    if (exit_code == EXIT_CODE_OK) {
        exit_code = collect_tensors(&inspection, &tensors);
    }
    if (exit_code == EXIT_CODE_OK && settings->json) {
        exit_code = print_json(&inspection);
    } else if (exit_code == EXIT_CODE_OK) {
        print_model(&inspection);
        print_plan(&inspection);
        if (settings->tensors) {
            print_tensors(&inspection);
        }
    }
    free(tensors);
    return exit_code;
}

static int run(const void *settings, const char *model)
{
    struct imbrex_model *opened = NULL;
    int exit_code = session_open(model, &opened);

    if (exit_code == EXIT_CODE_OK) {
        exit_code = inspect(settings, opened);
    }
    signals_set_model(NULL);
    imbrex_model_close(opened);
    return exit_code;
}

const struct command command_inspect = {
    .name = "inspect",
    .synopsis = "[MODEL] [options]",
    .summary = "show what a model holds and the memory it needs",
    .description =
        "Shows a model's architecture, sizes, tensors and sampling defaults, and the memory that "
        "running it takes. MODEL is a Hugging Face folder, a GGUF file or \"random:SHAPE\"; "
        "without it the built-in model is "
        "shown.",
    .examples = "  imbrex inspect\n"
                "  imbrex inspect Qwen2.5-0.5B --ctx-size 32768\n"
                "  imbrex inspect Qwen2.5-0.5B --json\n",
    .options = {inspect_options, sizeof(inspect_options) / sizeof(inspect_options[0])},
    .defaults = &inspect_defaults,
    .settings_bytes = sizeof(inspect_defaults),
    .run = run,
};
