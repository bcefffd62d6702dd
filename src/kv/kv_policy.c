/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_policy.h"

#include <stdlib.h>
#include <string.h>

static const struct {
    const char *name;
    bool predicts;
    enum imbrex_status (*create)(const struct kv_policy_options *options, struct kv_policy **policy,
                                 struct imbrex_error *err);
} policies[] = {
#define X(name, predicts) {#name, predicts, kv_policy_##name##_create},
    KV_POLICY_LIST(X)
#undef X
};

#define X(name, predicts) " " #name
static const char names[] = KV_POLICY_LIST(X);
#undef X

const struct kv_predictive_knobs kv_predictive_knobs_default = {
#define X(name, value, low, high) .name = (value),
    KV_PREDICTIVE_KNOB_LIST(X)
#undef X
};

struct kv_policy_options kv_policy_options_default(void)
{
    return (struct kv_policy_options){
        .use_queue = true,
        .use_table = true,
        .use_guard = true,
        .use_hints = true,
        .use_lookahead = true,
        .use_ghosts = true,
        .knobs = kv_predictive_knobs_default,
    };
}

enum imbrex_status kv_policy_create(const char *name, const struct kv_policy_options *options,
                                    struct kv_policy **policy, struct imbrex_error *err)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        if (strcmp(name, policies[i].name) == 0) {
            return policies[i].create(options, policy, err);
        }
    }
    return error_set(err, IMBREX_STATUS_NOT_FOUND, "policy: expected one of%s, found '%s'", names,
                     name);
}

void kv_policy_destroy(struct kv_policy *policy)
{
    if (policy != NULL) {
        policy->functions->destroy(policy);
    }
}

const char *kv_policy_names(void)
{
    return names;
}

bool kv_policy_find(const char *name, bool *predicts)
{
    for (size_t i = 0; i < sizeof(policies) / sizeof(policies[0]); i++) {
        if (strcmp(name, policies[i].name) == 0) {
            if (predicts != NULL) {
                *predicts = policies[i].predicts;
            }
            return true;
        }
    }
    return false;
}

const char *kv_policy_name(int32_t policy_idx)
{
    return policy_idx >= 0 && (size_t)policy_idx < sizeof(policies) / sizeof(policies[0])
               ? policies[policy_idx].name
               : NULL;
}
