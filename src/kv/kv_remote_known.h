/* SPDX-License-Identifier: Apache-2.0 */
/* What is known of a remote tier's keys: answers, each for a while, and what has been asked. Of
 * bounded size: the oldest answer goes for a new one; what is asked stays. */
#ifndef IMBREX_KV_KV_REMOTE_KNOWN_H
#define IMBREX_KV_KV_REMOTE_KNOWN_H

#include "kv/kv_remote.h"
#include "kv/kv_table.h"

struct kv_remote_known_entry {
    enum kv_remote_state state;
    bool is_used;
    int64_t until_ns; /* an answer counts as long */
};

struct kv_remote_known {
    struct kv_key *keys;                   /* [max_entries] */
    struct kv_remote_known_entry *entries; /* [max_entries] */
    struct kv_table table;
    int32_t max_entries;
    int32_t next; /* the place for the next one, if it may go */
    int32_t num_asked;
};

/* More than max_entries / 2 keys are never asked at once. */
enum imbrex_status kv_remote_known_create(int32_t max_entries, struct kv_remote_known *known,
                                          struct imbrex_error *err);
/* Safe on a zeroed struct. */
void kv_remote_known_destroy(struct kv_remote_known *known);

/* False: nothing is known. */
bool kv_remote_known_find(const struct kv_remote_known *known, const struct kv_key *key,
                          int64_t now_ns, enum kv_remote_state *state);
void kv_remote_known_note(struct kv_remote_known *known, const struct kv_key *key,
                          enum kv_remote_state state, int64_t until_ns);
void kv_remote_known_forget(struct kv_remote_known *known, const struct kv_key *key);

bool kv_remote_known_check(const struct kv_remote_known *known);

#endif
