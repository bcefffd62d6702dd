/* SPDX-License-Identifier: Apache-2.0 */
/* What tests look at inside `predictive`. */
#ifndef IMBREX_KV_POLICY_PREDICTIVE_H
#define IMBREX_KV_POLICY_PREDICTIVE_H

#include "kv/kv_policy.h"

/* True if its lists and counts agree. */
bool kv_policy_predictive_check(const struct kv_policy *policy);
/* True while the guard has it follow lru. */
bool kv_policy_predictive_follows_lru(const struct kv_policy *policy);

#endif
