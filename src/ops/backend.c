/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/backend.h"

#include <stddef.h>

void backend_destroy(struct backend *backend)
{
    if (backend != NULL) {
        backend->functions->destroy(backend);
    }
}

void backend_begin(struct backend *backend, void *stream_handle)
{
    backend->functions->begin(backend, stream_handle);
}

enum imbrex_status backend_end(struct backend *backend)
{
    return backend->functions->end(backend);
}

void backend_rope_table(struct backend *backend, const struct rope_table_params *params)
{
    if (params->begin < params->end) {
        backend->functions->rope_table(backend, params);
    }
}

#define DEFINE_BACKEND_CALL(op, count)                                           \
    void backend_##op(struct backend *backend, const struct op##_params *params) \
    {                                                                            \
        if (params->count > 0) {                                                 \
            backend->functions->op(backend, params);                             \
        }                                                                        \
    }
DEFINE_BACKEND_CALL(history, num_tokens)
DEFINE_BACKEND_CALL(embedding, num_tokens)
DEFINE_BACKEND_CALL(qkv, num_tokens)
DEFINE_BACKEND_CALL(attend, num_tokens)
DEFINE_BACKEND_CALL(project, num_tokens)
DEFINE_BACKEND_CALL(mlp, num_tokens)
DEFINE_BACKEND_CALL(logits, num_rows)
DEFINE_BACKEND_CALL(sample, num_rows)
