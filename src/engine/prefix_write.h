/* SPDX-License-Identifier: Apache-2.0 */
/* Writes through: what the prefix cache has taken in goes down to the disk and the server while the
 * first tier keeps it, so that other engines, and one that starts after a crash, find it there.
 *
 *   add     a block is in the cache, complete: it is in line from then on
 *   look    the first in line are copied down, as many as slots and the link's share allow
 *   forget  the cache forgets a block: what is still in line goes the way of all that is demoted
 *
 * The line is as long as the first tier has blocks, so nothing is dropped while the disk or the
 * server is slow, or not there: it waits in the first tier, at no cost. */
#ifndef IMBREX_ENGINE_PREFIX_WRITE_H
#define IMBREX_ENGINE_PREFIX_WRITE_H

#include "engine/prefix.h"
#include "kv/kv_tiers.h"

/* Of the link's time, at most. Prompts are computed at less than that: 42,000 tokens/s of a 7B on
 * an H200 make 2.4 GB/s of blocks, where the link brings 52. */
#define PREFIX_WRITE_PERCENT 10

struct prefix_write;

/* cache and tiers outlive it. num_blocks: of the first tier. block_ns: to copy one, until
 * the tiers know; > 0. */
enum imbrex_status prefix_write_create(struct prefix_cache *cache, struct kv_tiers *tiers,
                                       int32_t num_blocks, int64_t block_ns,
                                       struct prefix_write **write, struct imbrex_error *err);
/* NULL does nothing, here and below. */
void prefix_write_destroy(struct prefix_write *write);

/* A block of the cache: the steps that filled it have been collected. */
void prefix_write_add(struct prefix_write *write, int32_t block_idx);
void prefix_write_forget(struct prefix_write *write, int32_t block_idx);
/* When a step has been collected, or is due. */
void prefix_write_look(struct prefix_write *write);
/* When there is something to do although nobody asks for anything; INT64_MAX: never. */
int64_t prefix_write_due_ns(const struct prefix_write *write);

/* True if the line has blocks of the cache only. For tests and idle moments. */
bool prefix_write_check(const struct prefix_write *write);

#endif
