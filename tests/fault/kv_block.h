/* SPDX-License-Identifier: Apache-2.0 */
/* Blocks for the faults of KV tiers: what block i holds, a function of its number. */
#ifndef IMBREX_TESTS_FAULT_KV_BLOCK_H
#define IMBREX_TESTS_FAULT_KV_BLOCK_H

#include "kv/kv_key.h"
#include "kv/kv_pool.h"

enum { BLOCK_BYTES = 4096 };

void make_block(int32_t i, struct kv_key *key, int32_t ids[KV_BLOCK_SIZE],
                unsigned char contents[BLOCK_BYTES]);

#endif
