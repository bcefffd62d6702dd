/* SPDX-License-Identifier: Apache-2.0 */
/* Tiers as random walks have them: small, over a disk that may fail and a server that answers late
 * or not at all. */
#ifndef IMBREX_TESTS_TIERS_SET_UP_H
#define IMBREX_TESTS_TIERS_SET_UP_H

#include "kv/kv_tiers.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/faulty_files.h"

struct tiers_set_up {
    struct device *device;
    unsigned char *blocks;
    size_t block_bytes;
    int32_t num_slots;
    struct kv_folder *folder;         /* open; NULL: no disk */
    const struct faulty_files *files; /* of the disk */
    int32_t segment_blocks;
    int32_t num_segments; /* of the disk at most */
    bool forbids_ring;
    struct fake_redis *redis; /* NULL: no remote tier */
    const struct log *log;
};

enum imbrex_status tiers_set_up(const struct tiers_set_up *set_up, struct kv_tiers **tiers,
                                struct imbrex_error *err);

#endif
