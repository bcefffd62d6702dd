/* SPDX-License-Identifier: Apache-2.0 */
#include "tests/kv/tiers_set_up.h"

#include "kv/kv_remote_link.h"
#include "tests/test.h"

enum imbrex_status tiers_set_up(const struct tiers_set_up *set_up, struct kv_tiers **tiers,
                                struct imbrex_error *err)
{
    const struct kv_key owner = {{1, 2, 3, 4}};
    struct kv_remote_url url = {.host = "127.0.0.1"};
    if (set_up->redis != NULL) {
        url.port = fake_redis_port(set_up->redis);
    }
    const struct kv_remote_options remote = {
        .url = &url,
        .owner = owner,
        .block_bytes = set_up->block_bytes,
        .answer_timeout_ms = TEST_SANITIZED ? 200 : 20,
        .min_retry_ms = 1,
        .max_retry_ms = 4,
    };
    size_t segment_bytes = (size_t)set_up->segment_blocks * set_up->block_bytes;
    const struct kv_disk_options disk = {
        .folder = set_up->folder,
        .owner = owner,
        .block_bytes = set_up->block_bytes,
        .max_bytes = (size_t)set_up->num_segments / 2 *
                     kv_disk_min_bytes(set_up->block_bytes, segment_bytes),
        .segment_bytes = segment_bytes,
        .num_readers = 2,
        .forbids_ring = set_up->forbids_ring,
        .files = &set_up->files->files,
    };
    return kv_tiers_create(
        &(struct kv_tiers_options){.device = set_up->device,
                                   .blocks = set_up->blocks,
                                   .block_bytes = set_up->block_bytes,
                                   .host_bytes = (size_t)set_up->num_slots * set_up->block_bytes,
                                   .disk = set_up->folder != NULL ? &disk : NULL,
                                   .remote = set_up->redis != NULL ? &remote : NULL,
                                   .log = set_up->log},
        tiers, err);
}
