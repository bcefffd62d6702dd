/* SPDX-License-Identifier: Apache-2.0 */
#include "sim/sim_builder.h"

#include <stdlib.h>
#include <string.h>

#include "base/memory.h"
#include "sim/sim_random.h"

#define FIRST_ACCESSES 4096

/* Doubles an array. */
static enum imbrex_status grow(void **array, size_t num_elements, size_t element_bytes,
                               const char *what, struct imbrex_error *err)
{
    size_t num_bytes = 0;

    if (!size_mul(num_elements, element_bytes, &num_bytes)) {
        return error_out_of_memory(err, what, SIZE_MAX);
    }
    void *grown = realloc(*array, num_bytes);
    if (grown == NULL) {
        return error_out_of_memory(err, what, num_bytes);
    }
    *array = grown;
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_builder_init(struct sim_builder *builder, struct sim_trace *trace,
                                    struct imbrex_error *err)
{
    struct sim_builder made = {.trace = trace, .table_size = 1024, .max_accesses = FIRST_ACCESSES};

    made.table = malloc(made.table_size * sizeof(*made.table));
    trace->accesses = malloc(FIRST_ACCESSES * sizeof(*trace->accesses));
    if (made.table == NULL || trace->accesses == NULL) {
        free(made.table);
        free(trace->accesses);
        trace->accesses = NULL;
        return error_out_of_memory(err, "blocks of a trace", made.table_size * sizeof(*made.table));
    }
    memset(made.table, -1, made.table_size * sizeof(*made.table));
    *builder = made;
    return IMBREX_STATUS_OK;
}

void sim_builder_deinit(struct sim_builder *builder)
{
    free(builder->hashes);
    free(builder->table);
    free(builder->path);
    *builder = (struct sim_builder){.trace = NULL};
}

struct sim_builder_mark sim_builder_mark(const struct sim_builder *builder)
{
    return (struct sim_builder_mark){.num_requests = builder->trace->num_requests,
                                     .num_accesses = builder->trace->num_accesses,
                                     .num_tokens = builder->trace->num_tokens,
                                     .num_early = builder->trace->num_early};
}

void sim_builder_undo(struct sim_builder *builder, struct sim_builder_mark mark)
{
    builder->trace->num_requests = mark.num_requests;
    builder->trace->num_accesses = mark.num_accesses;
    builder->trace->num_tokens = mark.num_tokens;
    builder->trace->num_early = mark.num_early;
}

void sim_builder_begin_path(struct sim_builder *builder, uint64_t space, int32_t ids_a_block)
{
    builder->hash = sim_mix(space + 0x9e3779b97f4a7c15u);
    builder->ids_a_block = ids_a_block;
    builder->num_ids = 0;
    builder->num_path_blocks = 0;
}

static enum imbrex_status grow_table(struct sim_builder *builder, struct imbrex_error *err)
{
    uint32_t table_size = 2 * builder->table_size;
    size_t num_bytes = (size_t)table_size * sizeof(int32_t);
    int32_t *table = table_size != 0 ? malloc(num_bytes) : NULL;

    if (table == NULL) {
        return error_out_of_memory(err, "blocks of a trace", num_bytes);
    }
    memset(table, -1, num_bytes);
    for (int32_t node = 0; node < builder->trace->num_nodes; node++) {
        uint32_t slot = (uint32_t)builder->hashes[node] & (table_size - 1);
        while (table[slot] >= 0) {
            slot = (slot + 1) & (table_size - 1);
        }
        table[slot] = node;
    }
    free(builder->table);
    builder->table = table;
    builder->table_size = table_size;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status find_node(struct sim_builder *builder, uint64_t hash, int32_t *node,
                                    struct imbrex_error *err)
{
    struct sim_trace *trace = builder->trace;

    if ((uint32_t)trace->num_nodes >= builder->table_size / 4 * 3) {
        TRY(grow_table(builder, err));
    }
    uint32_t slot = (uint32_t)hash & (builder->table_size - 1);
    for (; builder->table[slot] >= 0; slot = (slot + 1) & (builder->table_size - 1)) {
        if (builder->hashes[builder->table[slot]] == hash) {
            *node = builder->table[slot];
            return IMBREX_STATUS_OK;
        }
    }
    if (trace->num_nodes == builder->max_nodes) {
        int32_t max_nodes = builder->max_nodes > 0 ? builder->max_nodes * 2 : 1024;
        if (max_nodes > INT32_MAX / 4) {
            return error_set(err, IMBREX_STATUS_CAPACITY,
                             "expected at most %d different blocks in a trace, found more",
                             builder->max_nodes);
        }
        TRY(grow((void **)&builder->hashes, (size_t)max_nodes, sizeof(*builder->hashes),
                 "blocks of a trace", err));
        builder->max_nodes = max_nodes;
    }
    *node = trace->num_nodes++;
    builder->hashes[*node] = hash;
    builder->table[slot] = *node;
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_builder_add_id(struct sim_builder *builder, uint64_t id,
                                      struct imbrex_error *err)
{
    builder->hash = sim_mix(builder->hash + sim_mix(id + 1));
    if (++builder->num_ids < builder->ids_a_block) {
        return IMBREX_STATUS_OK;
    }
    builder->num_ids = 0;
    if (builder->num_path_blocks == builder->max_path_blocks) {
        int32_t max_blocks = builder->max_path_blocks > 0 ? builder->max_path_blocks * 2 : 1024;
        if (max_blocks > INT32_MAX / 4) {
            return error_set(err, IMBREX_STATUS_CAPACITY,
                             "expected at most %d blocks in a prompt, found more",
                             builder->max_path_blocks);
        }
        TRY(grow((void **)&builder->path, (size_t)max_blocks, sizeof(*builder->path),
                 "blocks of a prompt", err));
        builder->max_path_blocks = max_blocks;
    }
    builder->path[builder->num_path_blocks++] = builder->hash;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status add_accesses(struct sim_builder *builder, int32_t num_blocks,
                                       struct imbrex_error *err)
{
    struct sim_trace *trace = builder->trace;

    while (builder->max_accesses - trace->num_accesses < num_blocks) {
        int64_t max_accesses = builder->max_accesses * 2;
        TRY(grow((void **)&trace->accesses, (size_t)max_accesses, sizeof(*trace->accesses),
                 "block accesses of a trace", err));
        builder->max_accesses = max_accesses;
    }
    for (int32_t i = 0; i < num_blocks; i++) {
        int32_t node = -1;
        TRY(find_node(builder, builder->path[i], &node, err));
        trace->accesses[trace->num_accesses++] = node;
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status sim_builder_add_request(struct sim_builder *builder,
                                           const struct sim_request *request, int32_t *request_idx,
                                           struct imbrex_error *err)
{
    struct sim_trace *trace = builder->trace;
    int64_t first_access = trace->num_accesses;
    int32_t num_blocks = request->num_tokens / trace->block_size;

    if (trace->num_requests == builder->max_requests) {
        int32_t max_requests = builder->max_requests > 0 ? builder->max_requests * 2 : 1024;
        if (max_requests > INT32_MAX / 4) {
            return error_set(err, IMBREX_STATUS_CAPACITY,
                             "expected at most %d requests in a trace, found more",
                             builder->max_requests);
        }
        TRY(grow((void **)&trace->requests, (size_t)max_requests, sizeof(*trace->requests),
                 "requests of a trace", err));
        builder->max_requests = max_requests;
    }
    if (num_blocks > builder->num_path_blocks) {
        num_blocks = builder->num_path_blocks;
    }
    TRY(add_accesses(builder, num_blocks, err));
    trace->num_tokens += request->num_tokens;
    struct sim_request *added = &trace->requests[trace->num_requests];
    *added = *request;
    added->first_access = first_access;
    added->num_blocks = num_blocks;
    *request_idx = trace->num_requests++;
    return IMBREX_STATUS_OK;
}
