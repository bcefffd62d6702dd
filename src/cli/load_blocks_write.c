/* SPDX-License-Identifier: Apache-2.0 */
/* A load as a trace in the format of Bailian, a request a line:
 *   {"chat_id": N, "parent_chat_id": -1, "timestamp": s, "input_length": N, "output_length": N,
 *    "turn": 1, "block_size": N, "hash_ids": [one for each full block of the prompt]}
 * The block_size is the engine's, and so that of the ids: imbrex kv-sim replays with it.
 * No request says which conversation it belongs to: the plan does not know. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cli/command.h"
#include "cli/load_plan.h"
#include "cli/output.h"
#include "cli/report_header.h"

/* Whole numbers up to there are the same in every reader of JSON. */
#define ID_BITS 53

/* Equal for blocks that stand for equal tokens. */
static uint64_t block_id(const struct load_plan *plan, const struct load_request *request,
                         int32_t first_token, int32_t num_tokens)
{
    uint64_t hash = 0;

    for (int32_t i = first_token; i < first_token + num_tokens; i++) {
        uint64_t id = plan->block_ids[request->first_block + (size_t)(i / plan->block_tokens)];
        hash = (hash ^ id) * UINT64_C(0xbf58476d1ce4e5b9);
        hash = (hash ^ (hash >> 31) ^ (uint64_t)(i % plan->block_tokens)) *
               UINT64_C(0x94d049bb133111eb);
        hash ^= hash >> 29;
    }
    return hash >> (64 - ID_BITS);
}

static void write_request(const struct load_plan *plan, size_t request_idx, int32_t block_size,
                          FILE *file)
{
    const struct load_request *request = &plan->requests[request_idx];

    fprintf(file,
            "{\"chat_id\": %zu, \"parent_chat_id\": -1, \"timestamp\": %.6f, \"input_length\": "
            "%" PRId32 ", \"output_length\": %" PRId32 ", \"turn\": 1, \"block_size\": %" PRId32
            ", \"hash_ids\": [",
            request_idx, (double)request->arrival_ns / 1e9, request->num_prompt_tokens,
            request->num_output_tokens, block_size);
    for (int32_t i = 0; i < request->num_prompt_tokens / block_size; i++) {
        fprintf(file, "%s%" PRIu64, i > 0 ? ", " : "",
                block_id(plan, request, i * block_size, block_size));
    }
    fputs("]}\n", file);
}

int load_plan_write_blocks(const struct load_plan *plan, const char *path, int32_t block_size)
{
    char *text = NULL;
    size_t num_bytes;
    FILE *file = open_memstream(&text, &num_bytes), *target = NULL;

    for (size_t i = 0; i < plan->count && file != NULL; i++) {
        write_request(plan, i, block_size, file);
    }
    bool is_good = file != NULL && ferror(file) == 0;
    if (file == NULL || fclose(file) != 0 || !is_good) {
        free(text);
        output_error("%s: out of memory", path);
        return EXIT_CODE_FAILURE;
    }
    int exit_code = EXIT_CODE_OK;
    /* The writers of reports end a text with a line end of their own. */
    text[num_bytes > 0 ? num_bytes - 1 : 0] = '\0';
    if (report_is_dash(path)) {
        output_printf("%s\n", text);
    } else {
        exit_code = report_open(path, &target);
        if (exit_code == EXIT_CODE_OK) {
            exit_code = report_write_text(path, target, text);
            fclose(target);
        }
    }
    free(text);
    return exit_code;
}
