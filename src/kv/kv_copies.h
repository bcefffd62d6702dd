/* SPDX-License-Identifier: Apache-2.0 */
/* Copies between slots of the host tier and blocks of the first tier on the device: in batches, out
 * on DEVICE_STREAM_KV_OUT, in on DEVICE_STREAM_KV_IN, in the order that keeps steps from reading
 * what is not there and from writing over what has not been copied. Which block goes where, and
 * what becomes of it then, is kv_tiers.h's.
 *
 *   add    a copy is asked for: in the batch that is open
 *   start  what was asked for is given to the device. Neither the next step nor a copy in begins
 *          before the copies out that were given by then, but for covered ones: no step writes to
 *          their block before they are done
 *   take   what is done comes back, in the order in which it was asked for
 *
 * Slots and blocks of copies under way are nobody else's. One thread uses it. */
#ifndef IMBREX_KV_KV_COPIES_H
#define IMBREX_KV_KV_COPIES_H

#include <stdbool.h>

#include "kv/kv_host.h"
#include "kv/kv_tier.h"
#include "ops/device.h"

#define KV_COPIES_MAX_SLICES 8    /* of a block */
#define KV_COPIES_MAX_SLICED 2048 /* copies in slices at once: 32,768 tokens */

struct kv_copy {
    int32_t slot_idx, block_idx;
    /* Of a copy in, for its user. */
    struct kv_key parent_key;
    enum kv_tier from;
    bool has_parent;
};

enum kv_direction { KV_DIRECTION_OUT = 0, KV_DIRECTION_IN = 1 };

struct kv_copies;

/* blocks: of the first tier, device memory of host->block_bytes each. Both, and the device, outlive
 * the copies. */
enum imbrex_status kv_copies_create(struct device *device, unsigned char *blocks,
                                    const struct kv_host *host, struct kv_copies **copies,
                                    struct imbrex_error *err);
/* Gives what was asked for, and waits for all. NULL does nothing. */
void kv_copies_destroy(struct kv_copies *copies);

/* ---- out ------------------------------------------------------------------------------------- */

/* Before one more copy out; a full batch is given to the device. False: all are under way, and
 * take_out is to be called first. */
bool kv_copies_make_room(struct kv_copies *copies);
/* There is room. is_covered: the first tier keeps the block, so no step need wait. */
void kv_copies_add_out(struct kv_copies *copies, int32_t slot_idx, int32_t block_idx,
                       bool is_covered);
/* So many batches are under way that what can wait should. */
bool kv_copies_is_out_busy(const struct kv_copies *copies);
/* The first tier does not keep the slot's block any more: steps go on behind its copy out. */
void kv_copies_uncover(struct kv_copies *copies, int32_t slot_idx);
/* Gives the copies out alone. */
void kv_copies_start_out(struct kv_copies *copies);
/* The next copy out that is over, waiting for it if it must; *is_good: it was done. False: none is
 * given, or none is done yet. */
bool kv_copies_take_out(struct kv_copies *copies, bool must_wait, struct kv_copy *copy,
                        bool *is_good);

/* ---- in -------------------------------------------------------------------------------------- */

bool kv_copies_can_add_in(const struct kv_copies *copies);
/* False: too many are under way. A copy out from the same block that was asked for and not given
 * yet is covered: this one comes behind it. */
bool kv_copies_add_in(struct kv_copies *copies, const struct kv_copy *copy);

/* How blocks are parted: slice i is bytes [ends[i - 1], ends[i]) of each, the last end is
 * block_bytes. num_slices 1, as it is at first: add_sliced takes nothing. Not while such copies are
 * under way. */
void kv_copies_set_slices(struct kv_copies *copies, const size_t *ends, int32_t num_slices);
/* As add_in, in slices: of all copies that are asked for so until the next start, first the first
 * slices are done, and so on. False too while those of an earlier start are under way. */
bool kv_copies_add_sliced(struct kv_copies *copies, const struct kv_copy *copy);
/* Whether add_sliced would take a first copy. */
bool kv_copies_can_slice(const struct kv_copies *copies);
/* The event behind each slice of the copies that are under way so, since start; the copies', until
 * take_in has given the last of them back. Returns how many there are: 0, or num_slices. */
int32_t kv_copies_slice_events(struct kv_copies *copies,
                               struct device_event *events[KV_COPIES_MAX_SLICES]);

/* The next copy in that is over; false: none yet. */
bool kv_copies_take_in(struct kv_copies *copies, struct kv_copy *copy, bool *is_sliced,
                       bool *is_good);
/* Copies in that take_in has not given back. */
int32_t kv_copies_num_in(const struct kv_copies *copies);

/* ---- both ------------------------------------------------------------------------------------ */

/* DEVICE: the device does not say when it has copied, so no step may be given. */
enum imbrex_status kv_copies_start(struct kv_copies *copies);
bool kv_copies_is_under_way(const struct kv_copies *copies, enum kv_direction direction);
/* Waits for the oldest batch, if it has been given: no longer than a step. */
void kv_copies_wait(struct kv_copies *copies, enum kv_direction direction);

/* How long a block takes in, one behind the other: copies whatever slots hold into the first ones
 * of num_blocks, so before anything else, and waits. */
enum imbrex_status kv_copies_measure(struct kv_copies *copies, int32_t num_blocks,
                                     int64_t *block_ns);
/* The same in slices; it is not learned. */
enum imbrex_status kv_copies_measure_sliced(struct kv_copies *copies, int32_t num_blocks,
                                            int64_t *block_ns);
/* As it was lately: of the last thousand blocks or so that came in while the link had more to do,
 * or as measured at first. 0: nothing is known. */
int64_t kv_copies_block_ns(const struct kv_copies *copies);

#endif
