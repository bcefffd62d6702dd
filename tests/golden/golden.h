/* SPDX-License-Identifier: Apache-2.0 */
/* What the golden tests share: cmocka, JSON files, greedy runs over every kernel path. */
#ifndef IMBREX_TESTS_GOLDEN_H
#define IMBREX_TESTS_GOLDEN_H

#include <setjmp.h>
#include <stdarg.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <jansson.h>

#include "imbrex.h"
#include "ops/cpu/cpu_kernels.h" /* cpu_paths */

/* Fails the test with the message unless the call succeeded. */
void golden_check(enum imbrex_status status, const struct imbrex_error *err);

/* A JSON document from the tree; the caller owns it. */
json_t *golden_read_json(const char *path);
/* The integers of a JSON array, allocated with malloc. */
int32_t *golden_ids(const json_t *array, int32_t *num_ids);

/* Whether the machine has cpu_paths[path]: one that it lacks would only repeat a lower one. */
bool golden_has_path(int32_t path);

struct imbrex_model *golden_open(const char *path);
struct imbrex_engine *golden_engine(struct imbrex_model *model, uint32_t cpu_features,
                                    int32_t num_threads);

/* Greedy continuation of num_prompt_ids ids: writes up to max_tokens ids, returns their number. */
int32_t golden_greedy(struct imbrex_engine *engine, struct imbrex_model *model,
                      const int32_t *prompt_ids, int32_t num_prompt_ids, int32_t max_tokens,
                      int32_t *token_ids);

/* Logits after the last of the ids, [vocab_size], by the forward pass alone, with the engine's
 * chunks, threads and kernels; a view, valid until the next call. */
const float *golden_logits(struct imbrex_engine *engine, const int32_t *token_ids,
                           int32_t num_tokens);

/* Fails the test unless each of the first num_paths paths has the same logits, bit for bit, for
 * several numbers of threads and lengths of chunks. */
void golden_expect_bit_equal(struct imbrex_model *model, const int32_t *token_ids,
                             int32_t num_tokens, int32_t num_paths);

#endif
