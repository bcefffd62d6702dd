/* SPDX-License-Identifier: Apache-2.0 */
/* A file of any bytes as a GGUF model: read, and what it promises about values and tensors checked
 * by reading them; then its metadata becomes a configuration, and its tensors are bound by it. */
#include <stdlib.h>
#include <string.h>

#include "model/gguf_config.h"
#include "model/tokenizer.h"
#include "model/weights.h"

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes);

static void require(bool condition)
{
    if (!condition) {
        abort();
    }
}

static void touch(const void *bytes, size_t num_bytes)
{
    volatile unsigned char sink;
    if (num_bytes > 0) {
        sink = ((const unsigned char *)bytes)[0];
        sink = ((const unsigned char *)bytes)[num_bytes - 1];
        (void)sink;
    }
}

static int compare(const struct gguf_string *a, const struct gguf_string *b)
{
    size_t shared = a->num_bytes < b->num_bytes ? a->num_bytes : b->num_bytes;
    int order = memcmp(a->bytes, b->bytes, shared);
    return order != 0 ? order : (a->num_bytes > b->num_bytes) - (a->num_bytes < b->num_bytes);
}

static void check_value(const struct gguf_value *value)
{
    touch(value->key.bytes, value->key.num_bytes);
    require(value->element_type != GGUF_TYPE_ARRAY);
    require(value->type == GGUF_TYPE_ARRAY || value->num_elements == 1);
    require((value->strings != NULL) == (value->element_type == GGUF_TYPE_STRING));
    touch(value->bytes, gguf_value_bytes(value));
    if (value->num_elements == 0) {
        return;
    }
    if (value->strings != NULL) {
        const struct gguf_string *last = &value->strings[value->num_elements - 1];
        touch(value->strings[0].bytes, value->strings[0].num_bytes);
        touch(last->bytes, last->num_bytes);
    } else {
        volatile double sink = gguf_value_number(value, value->num_elements - 1);
        (void)sink;
    }
}

/* Values and tensors are in order, each there once; what they point to is in the file. */
static void check_parts(const struct gguf *gguf, size_t num_bytes)
{
    size_t tensor_bytes = 0;
    for (uint64_t i = 0; i < gguf->num_values; i++) {
        require(i == 0 || compare(&gguf->values[i - 1].key, &gguf->values[i].key) < 0);
        check_value(&gguf->values[i]);
    }
    for (uint64_t i = 0; i < gguf->num_tensors; i++) {
        const struct gguf_tensor *tensor = &gguf->tensors[i];
        require(i == 0 || compare(&tensor[-1].name, &tensor->name) < 0);
        require(tensor->num_dims >= 0 && tensor->num_dims <= 4);
        require(tensor->dtype == DTYPE_COUNT ||
                gguf_tensor_type_id(tensor->dtype) == tensor->type_id);
        require(tensor->num_bytes <= num_bytes - tensor_bytes);
        tensor_bytes += tensor->num_bytes;
        touch(tensor->elements, tensor->num_bytes);
        touch(gguf_tensor_type_name(tensor->type_id), 1);
    }
}

static void bind(const struct checkpoint *checkpoint)
{
    struct imbrex_error err = {0};
    struct model_config config;
    struct weights weights = {0};
    struct imbrex_tokenizer *tokenizer = NULL;
    enum imbrex_status status = gguf_read_config(&checkpoint->gguf, &config, &err);
    if (status == IMBREX_STATUS_OK &&
        weights_bind(checkpoint, &config, "fuzz", &weights, &err) == IMBREX_STATUS_OK) {
        require(config.head_dim % 2 == 0 && config.num_heads % config.num_kv_heads == 0);
        int64_t row_elements = config.hidden_size;
        touch(weights.lm_head.elements,
              dtype_row_bytes(weights.lm_head.dtype, row_elements) * (size_t)config.vocab_size);
        touch(weights.norm, (size_t)row_elements * sizeof(float));
    }
    weights_release(&weights);
    if (tokenizer_from_gguf(&checkpoint->gguf, &tokenizer, &err) == IMBREX_STATUS_OK) {
        imbrex_tokenizer_close(tokenizer);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t num_bytes)
{
    struct gguf gguf = {0};
    struct checkpoint checkpoint = {0};
    struct imbrex_error err = {0};
    enum imbrex_status status = gguf_parse("fuzz", bytes, num_bytes, &gguf, &err);
    if (status == IMBREX_STATUS_OK) {
        check_parts(&gguf, num_bytes);
    } else {
        require(err.status == status && err.message[0] != '\0' && gguf.values == NULL);
    }
    gguf_release(&gguf);
    if (checkpoint_read_gguf("fuzz", bytes, num_bytes, &checkpoint, &err) == IMBREX_STATUS_OK) {
        bind(&checkpoint);
    }
    checkpoint_close(&checkpoint);
    return 0;
}
