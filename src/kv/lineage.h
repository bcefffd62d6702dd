/* SPDX-License-Identifier: Apache-2.0 */
/* Which turn of which session a request is, where its client does not say: its prompt goes on from
 * the prompt of an earlier request. A bounded table remembers the last blocks of the prompts of
 * ended requests; of those that an arriving prompt goes through, the deepest is its predecessor. A
 * block from which many requests went on is a common beginning and no predecessor. */
#ifndef IMBREX_KV_LINEAGE_H
#define IMBREX_KV_LINEAGE_H

#include "kv/kv_key.h"
#include "kv/kv_policy.h"

struct lineage;

/* max_entries >= 1; a request that ends takes up to two. */
enum imbrex_status lineage_create(int32_t max_entries, struct lineage **lineage,
                                  struct imbrex_error *err);
/* NULL does nothing. */
void lineage_destroy(struct lineage *lineage);
size_t lineage_bytes(const struct lineage *lineage);

/* A request with these keys [num_keys] of its full prompt blocks arrives. If its turn is 0: turn,
 * last gap and, if that is 0 too, session of the fingerprint are what the table says, or those of a
 * first turn. */
void lineage_arrive(struct lineage *lineage, const struct kv_key *keys, int32_t num_keys,
                    int64_t now_ns, struct kv_fingerprint *fingerprint);
/* It ends, with the fingerprint that it has by now. */
void lineage_finish(struct lineage *lineage, const struct kv_key *keys, int32_t num_keys,
                    int64_t now_ns, const struct kv_fingerprint *fingerprint);

#endif
