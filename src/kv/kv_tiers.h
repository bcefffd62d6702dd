/* SPDX-License-Identifier: Apache-2.0 */
/* The tiers below the first one, and all moves between them (docs/kv-cache.md has the picture).
 * Blocks go device -> host -> disk and remote and come back the same way; without a host tier a few
 * slots of RAM are what they pass through.
 *
 *   demote    a block of the device is about to be written over: copied to a slot first
 *   write through  a block that stays there is copied all the same, for what is below
 *   save      a slot that the disk does not have is written there, in the background
 *   send      the same for the remote tier
 *   fetch     disk or remote -> slot, for somebody who waits
 *   promote   slot -> a block of the device that the caller has for it
 *
 * On the device, copies out run on DEVICE_STREAM_KV_OUT and copies in on DEVICE_STREAM_KV_IN.
 * Neither the next step nor a copy in begins before the copies out that were given by then
 * (kv_tiers_start); only where a block is promoted into as soon as it has been demoted, the step
 * goes on, for the copy in waits. kv_tiers_poll tells of a promoted block when its copy is done,
 * and it may be read from then on. What a step wrote can be copied out once the step has been
 * collected.
 *
 * Blocks that a step is to read while they come up are promoted in slices: the first slice of each
 * block, an event, the second slice of each, an event, ... A stream that waits for event i may read
 * slices [0, i] of all of them, if poll then says that they are good.
 *
 * One thread uses it, the one that uses the device. Nothing here waits but what says so. */
#ifndef IMBREX_KV_KV_TIERS_H
#define IMBREX_KV_KV_TIERS_H

#include "base/log.h"
#include "kv/kv_copies.h"
#include "kv/kv_disk.h"
#include "kv/kv_key.h"
#include "kv/kv_pool.h"
#include "kv/kv_remote.h"
#include "kv/kv_tier.h"
#include "ops/device.h"

#define KV_TIERS_MIN_SLOTS 8 /* fewer could be all held by moves */
#define KV_TIERS_MAX_SLICES KV_COPIES_MAX_SLICES
#define KV_TIERS_MAX_SLICED KV_COPIES_MAX_SLICED

/* Where a block below the first tier is. */
enum kv_place {
    KV_PLACE_NONE = 0,
    KV_PLACE_ASKED,  /* the remote tier is asked */
    KV_PLACE_REMOTE, /* can be fetched, from there */
    KV_PLACE_DISK,   /* can be fetched */
    KV_PLACE_COMING, /* a slot is being filled with it */
    KV_PLACE_HOST,   /* can be promoted */
    KV_PLACE_MOVING, /* is being promoted */
};

struct kv_tiers_options {
    struct device *device; /* outlives the tiers */
    unsigned char *blocks; /* of the first tier: device memory, block_bytes each */
    size_t block_bytes;
    size_t host_bytes;                      /* of slots; 0: as few as disk and remote need */
    const struct kv_disk_options *disk;     /* read during the call; NULL: no disk */
    const struct kv_remote_options *remote; /* the same */
    const struct log *log;                  /* outlives the tiers */
};

/* A block that was copied up, or was not. */
struct kv_promotion {
    struct kv_key key, parent_key;
    int32_t token_ids[KV_BLOCK_SIZE];
    int32_t block_idx;
    enum kv_tier from; /* where it lay when it was asked for; without a host tier, never there */
    bool has_parent;
    bool is_sliced; /* as kv_tiers_promote_sliced */
    bool is_good;
};

struct kv_tiers_metrics {
    uint64_t num_demoted;                     /* blocks copied from the device */
    uint64_t num_written;                     /* the same, while the first tier keeps them */
    uint64_t num_lost;                        /* demoted, and gone before the disk had them */
    uint64_t num_unsent;                      /* gone, or flushed, before the remote had them */
    uint64_t num_promoted[KV_NUM_TIERS];      /* by enum kv_tier */
    uint64_t num_cancelled;                   /* fetches taken back */
    uint64_t num_copy_faults;                 /* on the device */
    int64_t num_host_blocks, max_host_blocks; /* now; slots */
    struct kv_disk_metrics disk;              /* zeroed without one */
    struct kv_remote_metrics remote;          /* the same */
};

struct kv_tiers;

/* The slots that host_bytes gives, or what is below needs (has_lower: a disk or a remote tier). 0:
 * fewer than there must be. */
int32_t kv_tiers_num_slots(size_t block_bytes, size_t host_bytes, bool has_lower);

enum imbrex_status kv_tiers_create(const struct kv_tiers_options *options, struct kv_tiers **tiers,
                                   struct imbrex_error *err);
/* Waits for all moves but those of the remote tier; what the disk does not have yet is lost, unless
 * kv_tiers_end_flush came before. NULL does nothing. */
void kv_tiers_destroy(struct kv_tiers *tiers);

/* How long a block takes from a slot to the device, one behind the other: copies whatever slots
 * hold into the first ones of num_blocks, so before anything else, and waits. */
enum imbrex_status kv_tiers_measure(struct kv_tiers *tiers, int32_t num_blocks, int64_t *block_ns);
/* The same as it was lately: of the last thousand blocks or so that came up while the link had more
 * to do, or as measured at first; a few percent in use of many, whatever else the link carries. 0:
 * nothing is known. */
int64_t kv_tiers_block_ns(const struct kv_tiers *tiers);
/* As kv_tiers_measure, in slices; num_slices >= 2. It is not learned. */
enum imbrex_status kv_tiers_measure_sliced(struct kv_tiers *tiers, int32_t num_blocks,
                                           int64_t *block_ns);

/* The block's contents will be written over. Does nothing if nowhere is room for it. */
void kv_tiers_demote(struct kv_tiers *tiers, const struct kv_key *key, const int32_t *token_ids,
                     int32_t block_idx);

/* Copies a block that the first tier keeps to a slot, for disk and remote: in the background, so no
 * step waits for it unless the block is demoted meanwhile. True: nothing is left to ask for, they
 * have the block or it is on its way. False, and nothing has happened: too many are under way, no
 * slot can be had without a loss, or the remote, which alone lacks it, is not there now. */
bool kv_tiers_write_through(struct kv_tiers *tiers, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx);
/* Whether kv_tiers_update has something to give disk or remote, or to hear of such blocks. */
bool kv_tiers_is_writing(const struct kv_tiers *tiers);

/* Takes in what disk, remote and device have done. now_ns is for the log. */
void kv_tiers_update(struct kv_tiers *tiers, int64_t now_ns);

/* A look at what is wanted: between begin and end, every block that somebody waits for is asked
 * for; a fetch that nobody asked for is taken back at the end if it has not begun. */
void kv_tiers_begin_look(struct kv_tiers *tiers);
void kv_tiers_end_look(struct kv_tiers *tiers);

enum kv_place kv_tiers_look(struct kv_tiers *tiers, const struct kv_key *key,
                            const int32_t *token_ids);
/* Begins to fetch what look said is on DISK or REMOTE. False: not now, too many are under way. */
bool kv_tiers_fetch(struct kv_tiers *tiers, const struct kv_key *key, const int32_t *token_ids);
/* Whether promote will take one more: before a block is taken for it. */
bool kv_tiers_can_promote(const struct kv_tiers *tiers);
/* Copies what look said is in the HOST place to block_idx, which nobody may touch until poll has
 * given it back. parent_key: for the promotion; NULL: it is a head. False, and nothing has
 * happened: too many are under way. */
bool kv_tiers_promote(struct kv_tiers *tiers, const struct kv_key *key,
                      const struct kv_key *parent_key, const int32_t *token_ids, int32_t block_idx);

/* How blocks are parted: slice i is bytes [ends[i - 1], ends[i]) of each, the last end is
 * block_bytes. num_slices 1, as it is at first: promote_sliced takes nothing. Not while it has
 * blocks under way. */
void kv_tiers_set_slices(struct kv_tiers *tiers, const size_t *ends, int32_t num_slices);
/* As kv_tiers_promote, in slices: of all blocks that are asked for so until the next start, first
 * the first slices are copied, and so on. False too while blocks of an earlier start are under way
 * so: poll has not given the last of them back. */
bool kv_tiers_promote_sliced(struct kv_tiers *tiers, const struct kv_key *key,
                             const struct kv_key *parent_key, const int32_t *token_ids,
                             int32_t block_idx);
/* Whether promote_sliced would take a first block. */
bool kv_tiers_can_slice(const struct kv_tiers *tiers);
/* The event behind each slice of the blocks that are under way so, since start; the tiers', until
 * poll has given the last of the blocks back. Returns how many there are: 0, or num_slices. */
int32_t kv_tiers_slice_events(struct kv_tiers *tiers,
                              struct device_event *events[KV_TIERS_MAX_SLICES]);

/* Gives the device what demote and promote asked for. Called before a step is given that may write
 * to demoted blocks; DEVICE: the device does not say when it has copied them, so no step may. */
enum imbrex_status kv_tiers_start(struct kv_tiers *tiers);
/* The next promotion that is over, in the order in which they were asked for; false: none yet. */
bool kv_tiers_poll(struct kv_tiers *tiers, struct kv_promotion *promotion);

/* Whether a block is on its way up, or down into a slot, or the remote tier is asked for one. */
bool kv_tiers_is_moving(const struct kv_tiers *tiers);
/* Whether poll has promotions to give back, now or later. */
bool kv_tiers_is_promoting(const struct kv_tiers *tiers);
/* How many. */
int32_t kv_tiers_num_promoting(const struct kv_tiers *tiers);
/* Waits for one of these moves or answers, at most timeout_ns. */
void kv_tiers_wait(struct kv_tiers *tiers, int64_t timeout_ns);

/* From now on nothing is lost for want of room: demote waits, and what is in the host tier goes to
 * the disk and the remote tier, to that one for ten seconds. For the end, when no steps and no
 * promotions are under way. */
void kv_tiers_begin_flush(struct kv_tiers *tiers);
/* Waits until they have everything, or take no more; what was lost on the way is logged. */
void kv_tiers_end_flush(struct kv_tiers *tiers);

void kv_tiers_read_metrics(const struct kv_tiers *tiers, struct kv_tiers_metrics *metrics);
/* True if all parts agree. For tests and idle moments. */
bool kv_tiers_check(const struct kv_tiers *tiers);

#endif
