/* SPDX-License-Identifier: Apache-2.0 */
/* A file of any bytes as model.safetensors of a tiny llama: the header is parsed, and what it
 * promises about the tensors is checked by reading them; then they are bound. */
#include <stdlib.h>
#include <string.h>

#include "model/safetensors.h"
#include "model/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

/* fuzz/seeds/safetensors/llama-tiny holds exactly its tensors. */
static const struct model_config config = {
    .architecture = ARCHITECTURE_LLAMA,
    .hidden_size = 2,
    .intermediate_size = 3,
    .num_layers = 1,
    .num_heads = 1,
    .num_kv_heads = 1,
    .head_dim = 2,
    .vocab_size = 4,
    .max_position_embeddings = 8,
    .rope_theta = 1e4,
    .rms_norm_eps = 1e-5,
};

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

/* Tensors are in order, inside the file, and together take every byte of its data once. */
static void check_tensors(const struct safetensors *parsed, const uint8_t *bytes, size_t num_bytes)
{
    size_t header_bytes = 0, tensor_bytes = 0;
    memcpy(&header_bytes, bytes, 8);
    size_t data_bytes = num_bytes - 8 - header_bytes;
    volatile unsigned char sink;
    for (int32_t i = 0; i < parsed->num_tensors; i++) {
        const struct checkpoint_tensor *tensor = &parsed->tensors[i];
        require(i == 0 || strcmp(tensor[-1].name, tensor->name) < 0);
        require(tensor->num_dims >= 0 && tensor->num_dims <= IMBREX_MAX_TENSOR_DIMS);
        require(tensor->elements >= bytes + 8 + header_bytes);
        require(tensor->num_bytes <= data_bytes - tensor_bytes);
        tensor_bytes += tensor->num_bytes;
        if (tensor->num_bytes > 0) {
            sink = tensor->elements[0];
            sink = tensor->elements[tensor->num_bytes - 1];
            (void)sink;
        }
        if (tensor->dtype != DTYPE_COUNT) {
            require(strcmp(tensor->dtype_name, dtype_name(tensor->dtype)) == 0);
        }
    }
    require(tensor_bytes == data_bytes);
}

static void bind_tensors(struct safetensors *parsed)
{
    struct weights weights = {0};
    struct imbrex_error err;
    const struct checkpoint_tensor **by_name =
        calloc((size_t)parsed->num_tensors + 1, sizeof(*by_name));
    require(by_name != NULL);
    for (int32_t i = 0; i < parsed->num_tensors; i++) {
        by_name[i] = &parsed->tensors[i];
    }
    struct checkpoint checkpoint = {
        .headers = parsed, .tensors = by_name, .num_tensors = parsed->num_tensors};
    if (weights_bind(&checkpoint, &config, "fuzz", &weights, &err) == IMBREX_STATUS_OK) {
        require(weights.num_converted == 6);
        volatile float last = weight_load(weights.lm_head, 4 * 2 - 1);
        (void)last;
    }
    weights_release(&weights);
    free(by_name);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct safetensors parsed = {0};
    struct imbrex_error err = {0};
    enum imbrex_status status = safetensors_parse("fuzz", bytes, num_bytes, &parsed, &err);
    if (status == IMBREX_STATUS_OK) {
        check_tensors(&parsed, bytes, num_bytes);
        bind_tensors(&parsed);
    } else {
        require(err.status == status && err.message[0] != '\0');
        require(parsed.tensors == NULL && parsed.header == NULL);
    }
    safetensors_release(&parsed);
    return 0;
}
