/* SPDX-License-Identifier: Apache-2.0 */
/* The tiers below the first one, nearest first. */
#ifndef IMBREX_KV_KV_TIER_H
#define IMBREX_KV_KV_TIER_H

enum kv_tier { KV_TIER_NONE = 0, KV_TIER_HOST = 1, KV_TIER_DISK = 2, KV_TIER_REMOTE = 3 };
enum { KV_NUM_TIERS = 4 };

#endif
