/* SPDX-License-Identifier: Apache-2.0 */
/* In place of kv_remote_link.c where there is no hiredis: no link can be made. */
#include "kv/kv_remote_link.h"

bool kv_remote_link_is_built(void)
{
    return false;
}

enum imbrex_status kv_remote_link_create(const struct kv_remote_link_options *options,
                                         struct kv_remote_link **link, struct imbrex_error *err)
{
    (void)options;
    (void)link;
    return error_set_field(err, IMBREX_STATUS_UNSUPPORTED, "kv_remote_url",
                           ": expected a build with hiredis (libhiredis-dev), found one "
                           "without");
}

/* Without one there is nothing to do. */
void kv_remote_link_destroy(struct kv_remote_link *link)
{
    (void)link;
}

void kv_remote_link_begin(struct kv_remote_link *link, int64_t now_ns)
{
    (void)link;
    (void)now_ns;
}

int kv_remote_link_fd(const struct kv_remote_link *link, short *events)
{
    (void)link;
    *events = 0;
    return -1;
}

int64_t kv_remote_link_deadline_ns(const struct kv_remote_link *link)
{
    (void)link;
    return INT64_MAX;
}

void kv_remote_link_work(struct kv_remote_link *link, short revents, int64_t now_ns)
{
    (void)link;
    (void)revents;
    (void)now_ns;
}

void kv_remote_link_send(struct kv_remote_link *link, const struct kv_remote_part *parts,
                         int32_t num_parts, int64_t now_ns)
{
    (void)link;
    (void)parts;
    (void)num_parts;
    (void)now_ns;
}

size_t kv_remote_link_num_unsent(const struct kv_remote_link *link)
{
    (void)link;
    return 0;
}

void kv_remote_link_drop(struct kv_remote_link *link, const char *why)
{
    (void)link;
    (void)why;
}

void kv_remote_link_note(struct kv_remote_link *link, const char *why, const char *bytes,
                         size_t num_bytes)
{
    (void)link;
    (void)why;
    (void)bytes;
    (void)num_bytes;
}

enum kv_remote_link_state kv_remote_link_state(const struct kv_remote_link *link)
{
    (void)link;
    return KV_REMOTE_LINK_DOWN;
}

bool kv_remote_link_is_hung_up(const struct kv_remote_link *link)
{
    (void)link;
    return false;
}

bool kv_remote_link_is_overrun(const struct kv_remote_link *link)
{
    (void)link;
    return false;
}

const char *kv_remote_link_failure(const struct kv_remote_link *link)
{
    (void)link;
    return "";
}
