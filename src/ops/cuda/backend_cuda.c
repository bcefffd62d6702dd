/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/cuda/backend_cuda.h"

#include <stdlib.h>

#include "ops/cuda/device_cuda.h"

static struct backend_cuda *cuda_of(struct backend *backend)
{
    return (struct backend_cuda *)(void *)backend;
}

bool cuda_is_without(const struct backend_cuda *cuda, enum imbrex_ablation part)
{
    return (cuda->options.ablations & (uint32_t)part) != 0;
}

void cuda_keep(struct backend_cuda *cuda, enum imbrex_status status)
{
    if (cuda->status == IMBREX_STATUS_OK) {
        cuda->status = status;
    }
}

static uint32_t one_or(uint32_t count)
{
    return count == 0 ? 1 : count;
}

void cuda_launch(struct backend_cuda *cuda, const struct op_launch *launch, const void *params)
{
    CUfunction function = NULL;
    CUlaunchAttribute attributes[2];
    unsigned int num_attributes = 0;

    if (cuda->status != IMBREX_STATUS_OK || launch->grid_x == 0) {
        return;
    }
    cuda_keep(cuda, cuda_device_op_function(cuda->device, launch->kernel, &function, &cuda->error));
    if (cuda->status != IMBREX_STATUS_OK) {
        return;
    }
    if (cuda->device->overlap_launches) {
        attributes[num_attributes++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                                .value.programmaticStreamSerializationAllowed = 1};
    }
    if (launch->cluster_x > 1) {
        attributes[num_attributes++] =
            (CUlaunchAttribute){.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
                                .value.clusterDim = {.x = launch->cluster_x, .y = 1, .z = 1}};
    }
    CUlaunchConfig config = {
        .gridDimX = launch->grid_x,
        .gridDimY = one_or(launch->grid_y),
        .gridDimZ = one_or(launch->grid_z),
        .blockDimX = launch->num_threads,
        .blockDimY = 1,
        .blockDimZ = 1,
        .sharedMemBytes = launch->shared_bytes,
        .hStream = cuda->stream,
        .attrs = attributes,
        .numAttrs = num_attributes,
    };
    /* The driver reads the params in the call and does not write them. */
    void *arguments[] = {(void *)(uintptr_t)params};
    cuda_keep(cuda, DRIVER_CALL(&cuda->device->driver, &cuda->error, launch_kernel_ex, &config,
                                function, arguments, NULL));
}

static void cuda_destroy(struct backend *backend)
{
    free(backend);
}

static void cuda_begin(struct backend *backend, void *stream_handle)
{
    struct backend_cuda *cuda = cuda_of(backend);
    cuda->stream = stream_handle;
    cuda->device->is_portable = cuda->is_portable;
    cuda->device->overlap_launches =
        !cuda->is_portable && !cuda_is_without(cuda, IMBREX_ABLATE_PDL);
    cuda->status = IMBREX_STATUS_OK;
}

static enum imbrex_status cuda_end(struct backend *backend)
{
    struct backend_cuda *cuda = cuda_of(backend);
    if (cuda->status != IMBREX_STATUS_OK) {
        cuda->device->work_error = cuda->error;
    }
    return cuda->status;
}

static bool is_few(const struct backend_cuda *cuda, int32_t num_tokens)
{
    return !cuda->options.batch_invariant && cuda_small_takes(cuda, num_tokens);
}

static void call_rope_table(struct backend *backend, const struct rope_table_params *params)
{
    cuda_rope_table(cuda_of(backend), params);
}

static void call_history(struct backend *backend, const struct history_params *params)
{
    cuda_history(cuda_of(backend), params);
}

static void call_embedding(struct backend *backend, const struct embedding_params *params)
{
    cuda_embedding(cuda_of(backend), params);
}

static void call_qkv(struct backend *backend, const struct qkv_params *params)
{
    struct backend_cuda *cuda = cuda_of(backend);
    if (cuda->is_plain) {
        cuda_plain_qkv(cuda, params);
    } else if (is_few(cuda, params->num_tokens)) {
        cuda_small_qkv(cuda, params);
    } else {
        cuda_large_qkv(cuda, params);
    }
}

static void call_attend(struct backend *backend, const struct attend_params *params)
{
    struct backend_cuda *cuda = cuda_of(backend);
    int32_t head_dim = params->kv.head_dim;
    bool is_ablated = cuda_is_without(cuda, IMBREX_ABLATE_ATTENTION);
    if (cuda_is_without(cuda, IMBREX_OMIT_ATTENTION)) {
        return;
    }
    if (cuda->options.activation_dtype != DTYPE_BF16 || !cuda_tensor_attend_takes(cuda, head_dim)) {
        cuda_plain_attend(cuda, params);
        return;
    }
    if (cuda->is_plain || cuda->is_portable || is_ablated || (head_dim != 64 && head_dim != 128)) {
        cuda_tensor_attend(cuda, params);
        return;
    }
    if (cuda->options.batch_invariant) {
        cuda_prefill_attend(cuda, params, 1);
        return;
    }
    if (params->max_query > 1) {
        cuda_prefill_attend(cuda, params, 2);
    }
    if (params->max_query == 1 || params->num_seqs > 1) {
        cuda_decode_attend(cuda, params);
    }
}

static void call_project(struct backend *backend, const struct project_params *params)
{
    struct backend_cuda *cuda = cuda_of(backend);
    if (params->in_features == cuda->shape.intermediate_size &&
        cuda_is_without(cuda, IMBREX_OMIT_MLP)) {
        return;
    }
    if (cuda->is_plain) {
        cuda_plain_project(cuda, params);
    } else if (is_few(cuda, params->num_tokens)) {
        cuda_small_project(cuda, params);
    } else {
        cuda_large_project(cuda, params);
    }
}

static void call_mlp(struct backend *backend, const struct mlp_params *params)
{
    struct backend_cuda *cuda = cuda_of(backend);
    if (cuda_is_without(cuda, IMBREX_OMIT_MLP)) {
        return;
    }
    if (cuda->is_plain) {
        cuda_plain_mlp(cuda, params);
    } else if (is_few(cuda, params->num_tokens)) {
        cuda_small_mlp(cuda, params);
    } else {
        cuda_large_mlp(cuda, params);
    }
}

static void call_logits(struct backend *backend, const struct logits_params *params)
{
    struct backend_cuda *cuda = cuda_of(backend);
    if (cuda->is_plain) {
        cuda_plain_logits(cuda, params);
    } else if (is_few(cuda, params->num_rows)) {
        cuda_small_logits(cuda, params);
    } else {
        cuda_large_logits(cuda, params);
    }
}

static void call_sample(struct backend *backend, const struct sample_params *params)
{
    cuda_sample(cuda_of(backend), params);
}

static const struct backend_functions cuda_functions = {
    .name = "cuda",
    .destroy = cuda_destroy,
    .begin = cuda_begin,
    .end = cuda_end,
    .rope_table = call_rope_table,
    .history = call_history,
    .embedding = call_embedding,
    .qkv = call_qkv,
    .attend = call_attend,
    .project = call_project,
    .mlp = call_mlp,
    .logits = call_logits,
    .sample = call_sample,
};

size_t backend_cuda_scratch_bytes(const struct backend_shape *shape)
{
    const size_t sizes[] = {cuda_large_scratch_bytes(shape),
                            cuda_decode_attention_scratch_bytes(shape),
                            cuda_sample_scratch_bytes(shape)};
    size_t most = 0;
    for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
        most = sizes[i] > most ? sizes[i] : most;
    }
    return most;
}

/* Sizes that the copy engine and 16-byte loads can take. */
static bool is_regular(const struct backend_shape *shape)
{
    return shape->hidden_size % 64 == 0 && shape->intermediate_size % 64 == 0 &&
           shape->head_dim % 8 == 0 && shape->num_heads * shape->head_dim % 64 == 0;
}

enum imbrex_status backend_cuda_create_on(struct imbrex_device *device,
                                          const struct backend_cuda_options *options,
                                          const struct backend_shape *shape, void *scratch,
                                          size_t scratch_bytes, struct backend **backend,
                                          struct imbrex_error *err)
{
    if (shape->head_dim > 2 * ROPE_TABLE_MAX_PAIRS) {
        return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                         "CUDA: head_dim: expected at most %d, found %d", 2 * ROPE_TABLE_MAX_PAIRS,
                         (int)shape->head_dim);
    }
    struct backend_cuda *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "backend", sizeof(*created));
    }
    bool is_portable =
        device->only_portable || (options->ablations & (uint32_t)IMBREX_ABLATE_HOPPER) != 0;
    *created = (struct backend_cuda){
        .backend = {.functions = &cuda_functions,
                    .activation_dtype = options->activation_dtype,
                    .kernels_name = is_portable ? "sm80" : "sm90"},
        .device = device,
        .options = *options,
        .shape = *shape,
        .is_plain = options->activation_dtype != DTYPE_BF16 || !is_regular(shape),
        .is_portable = is_portable,
        .scratch = scratch,
        .scratch_bytes = scratch_bytes,
    };
    if (kv_dtype_has_scales(shape->kv_dtype) &&
        (created->is_plain || !cuda_rope_kv_takes(shape->head_dim) ||
         !cuda_tensor_attend_takes(created, shape->head_dim))) {
        free(created);
        return error_set_field(
            err, IMBREX_STATUS_UNSUPPORTED, "kv_dtype",
            ": expected bf16 on a GPU for this model, found %s, which needs "
            "BF16 activations, hidden_size, intermediate_size and the width of q in "
            "multiples of 64, and head_dim in multiples of 16 up to 256",
            kv_dtype_name(shape->kv_dtype));
    }
    *backend = &created->backend;
    return IMBREX_STATUS_OK;
}

enum imbrex_status backend_cuda_create(struct device *device,
                                       const struct backend_cuda_options *options,
                                       const struct backend_shape *shape, void *scratch,
                                       size_t scratch_bytes, struct backend **backend,
                                       struct imbrex_error *err)
{
    return backend_cuda_create_on(device_cuda_kernels(device), options, shape, scratch,
                                  scratch_bytes, backend, err);
}
