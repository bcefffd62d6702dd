/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_tiers.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/line.h"
#include "kv/kv_copies.h"
#include "kv/kv_host.h"
#include "kv/kv_tiers_faults.h"

/* Without a host tier: so many slots, room for a disk's jobs and as many blocks that wait. */
#define NUM_PASSING_SLOTS (2 * KV_DISK_MAX_JOBS)
#define MAX_FETCHES 48 /* a disk is busy with them, and a nearer request never waits for more */
/* Blocks that are copied down, saved and sent at once although the first tier keeps them: as many
 * as a disk's and a server's jobs. */
#define MAX_WRITING 64
#define FLUSH_WAIT_NS INT64_C(100000000)
/* Where two may be waited for, one of them is, for so long. */
#define SHORT_WAIT_NS INT64_C(1000000)
/* A server may be slow without an end: an engine's end does not wait for all of it. */
#define MAX_FLUSH_SEND_NS INT64_C(10000000000)

/* Of a block that was copied down although the first tier keeps it. */
enum early {
    EARLY_NONE = 0, /* it does not keep it any more, or never did */
    EARLY_WRITING,  /* it is on its way to the slot, or from there to disk and remote */
    EARLY_WRITTEN,  /* that is over: the slot goes before all others */
};

struct slot {
    uint64_t wanted;     /* the last look that asked for it */
    enum kv_tier origin; /* DISK, REMOTE: fetched from there, not promoted yet */
    enum early early;
    bool is_unsaved, is_unsent; /* it is in the list */
    bool is_saving, is_sending; /* the disk, the remote has been given it */
    bool is_moving;             /* a promotion is under way */
};

struct kv_tiers {
    struct kv_host host;
    bool is_passing; /* slots are for moves only: what the disk has is not kept there */
    struct kv_disk *disk;
    const struct kv_folder *folder; /* of the disk */
    struct kv_remote *remote;       /* NULL: none */
    const struct log *log;
    struct kv_copies *copies;
    uint64_t look;       /* number of the look, from 1 on */
    struct slot *slots;  /* [num_slots] what kv_host does not know of them */
    int32_t num_writing; /* slots whose `early` is WRITING */
    struct block_links unsaved_links, unsent_links;
    struct block_list unsaved;    /* slots that the disk does not have, the oldest first */
    struct block_list unsent;     /* the same, of the remote */
    int64_t send_until_ns;        /* while it is flushed */
    uint64_t num_unsent_before;   /* num_unsent when that began */
    int32_t fetches[MAX_FETCHES]; /* [num_fetches] slots that disk or remote are to fill */
    int32_t num_fetches;
    bool is_flushing;
    struct kv_fault_log told, told_folder;
    bool has_told_full;
    struct kv_tiers_metrics metrics;
};

/* ---- slots ----------------------------------------------------------------------------------- */

int32_t kv_tiers_num_slots(size_t block_bytes, size_t host_bytes, bool has_lower)
{
    size_t num_slots = host_bytes / block_bytes;
    if (host_bytes == 0) {
        return has_lower ? NUM_PASSING_SLOTS : 0;
    }
    num_slots = num_slots < INT32_MAX / 4 ? num_slots : INT32_MAX / 4;
    return num_slots >= KV_TIERS_MIN_SLOTS ? (int32_t)num_slots : 0;
}

static void forget_unsaved(struct kv_tiers *tiers, int32_t slot_idx)
{
    if (tiers->slots[slot_idx].is_unsaved) {
        block_list_remove(&tiers->unsaved, tiers->unsaved_links, slot_idx);
        tiers->slots[slot_idx].is_unsaved = false;
    }
}

static void forget_unsent(struct kv_tiers *tiers, int32_t slot_idx)
{
    if (tiers->slots[slot_idx].is_unsent) {
        block_list_remove(&tiers->unsent, tiers->unsent_links, slot_idx);
        tiers->slots[slot_idx].is_unsent = false;
    }
}

/* The slot is READY and the disk may want it. */
static void note_for_disk(struct kv_tiers *tiers, int32_t slot_idx)
{
    struct slot *slot = &tiers->slots[slot_idx];
    if (tiers->disk != NULL && !slot->is_unsaved && !slot->is_saving &&
        !kv_disk_has(tiers->disk, &tiers->host.keys[slot_idx],
                     tiers->host.slots[slot_idx].token_ids)) {
        block_list_append(&tiers->unsaved, tiers->unsaved_links, slot_idx);
        slot->is_unsaved = true;
    }
}

/* The slot is READY, and disk and remote may want it. */
static void note_unsaved(struct kv_tiers *tiers, int32_t slot_idx)
{
    struct slot *slot = &tiers->slots[slot_idx];
    note_for_disk(tiers, slot_idx);
    if (tiers->remote != NULL && !slot->is_unsent && !slot->is_sending &&
        !kv_remote_has(tiers->remote, &tiers->host.keys[slot_idx])) {
        block_list_append(&tiers->unsent, tiers->unsent_links, slot_idx);
        slot->is_unsent = true;
    }
}

/* Whether the block would be nowhere else, as far as it should be, if the slot went: with a disk,
 * there; else remote. */
static bool is_sole(const struct kv_tiers *tiers, int32_t slot_idx)
{
    const struct slot *slot = &tiers->slots[slot_idx];
    return slot->early == EARLY_NONE && (tiers->disk != NULL ? slot->is_unsaved : slot->is_unsent);
}

/* Whether disk and remote have nothing to take from it any more. */
static bool is_clean(const struct kv_tiers *tiers, int32_t slot_idx)
{
    return !tiers->slots[slot_idx].is_unsaved && !tiers->slots[slot_idx].is_unsent;
}

/* The slot to go next: of those that nothing holds and this look has not asked for, the least
 * recently used one that is where it should be; or that the first tier has as well; or that is
 * safe; or at all. -1: none. */
static int32_t find_victim(const struct kv_tiers *tiers)
{
    const struct kv_host *host = &tiers->host;
    int32_t early = -1, safe = -1, sole = -1;
    for (int32_t i = host->used.first; i != -1; i = host->links.next[i]) {
        if (host->slots[i].state != KV_HOST_READY || host->slots[i].num_holds > 0 ||
            tiers->slots[i].wanted == tiers->look) {
            continue;
        }
        if (is_clean(tiers, i)) {
            return i;
        }
        int32_t *kind = tiers->slots[i].early != EARLY_NONE ? &early
                        : is_sole(tiers, i)                 ? &sole
                                                            : &safe;
        *kind = *kind == -1 ? i : *kind;
    }
    return early != -1 ? early : safe != -1 ? safe : sole;
}

/* The first tier does not keep the slot's block any more, or the slot goes. */
static void end_early(struct kv_tiers *tiers, int32_t slot_idx)
{
    struct slot *slot = &tiers->slots[slot_idx];
    tiers->num_writing -= slot->early == EARLY_WRITING;
    slot->early = EARLY_NONE;
}

/* Whether all that disk and remote were to do with a block that the first tier keeps is over, asked
 * whenever something of it is. */
static void settle_early(struct kv_tiers *tiers, int32_t slot_idx)
{
    struct slot *slot = &tiers->slots[slot_idx];
    if (slot->early == EARLY_WRITING && is_clean(tiers, slot_idx) && !slot->is_saving &&
        !slot->is_sending) {
        slot->early = EARLY_WRITTEN;
        tiers->num_writing--;
        kv_host_yield(&tiers->host, slot_idx);
    }
}

/* Gives the disk what it does not have, up to what it refuses, as far as it is ready. */
static void save(struct kv_tiers *tiers)
{
    while (tiers->unsaved.first != -1 && kv_disk_is_ready(tiers->disk)) {
        int32_t slot_idx = tiers->unsaved.first;
        struct slot *slot = &tiers->slots[slot_idx];
        forget_unsaved(tiers, slot_idx);
        if (!kv_disk_put(tiers->disk, &tiers->host.keys[slot_idx],
                         tiers->host.slots[slot_idx].token_ids,
                         kv_host_block(&tiers->host, slot_idx), slot_idx)) {
            tiers->metrics.num_lost += slot->early == EARLY_NONE;
            settle_early(tiers, slot_idx);
            return;
        }
        slot->is_saving = true;
        kv_host_hold(&tiers->host, slot_idx);
    }
}

static bool is_too_late_to_send(const struct kv_tiers *tiers)
{
    return tiers->is_flushing && clock_now_ns() >= tiers->send_until_ns;
}

/* Gives the remote what it does not have. What it does not take now it does not get from this slot:
 * nothing waits for a server that is not there. */
static void send_unsent(struct kv_tiers *tiers)
{
    bool is_too_late = is_too_late_to_send(tiers);
    while (tiers->unsent.first != -1 && kv_remote_can_put(tiers->remote)) {
        int32_t slot_idx = tiers->unsent.first;
        struct slot *slot = &tiers->slots[slot_idx];
        forget_unsent(tiers, slot_idx);
        if (is_too_late || !kv_remote_put(tiers->remote, &tiers->host.keys[slot_idx],
                                          tiers->host.slots[slot_idx].token_ids,
                                          kv_host_block(&tiers->host, slot_idx), slot_idx)) {
            tiers->metrics.num_unsent += slot->early == EARLY_NONE;
            settle_early(tiers, slot_idx);
        } else {
            slot->is_sending = true;
            kv_host_hold(&tiers->host, slot_idx);
        }
    }
}

/* ---- results of disk and remote -------------------------------------------------------------- */

static void forget_fetch(struct kv_tiers *tiers, int32_t slot_idx)
{
    for (int32_t i = 0; i < tiers->num_fetches; i++) {
        if (tiers->fetches[i] == slot_idx) {
            tiers->num_fetches--;
            tiers->fetches[i] = tiers->fetches[tiers->num_fetches];
            return;
        }
    }
    assert(!"every fetch is known");
}

static void poll_disk(struct kv_tiers *tiers)
{
    struct kv_disk_result result;
    while (tiers->disk != NULL && kv_disk_poll(tiers->disk, &result)) {
        if (result.is_get) {
            forget_fetch(tiers, result.tag);
            tiers->slots[result.tag].origin = KV_TIER_DISK;
            kv_host_end(&tiers->host, result.tag, result.is_good);
        } else {
            tiers->slots[result.tag].is_saving = false;
            kv_host_release(&tiers->host, result.tag);
            settle_early(tiers, result.tag);
        }
    }
}

static void poll_remote(struct kv_tiers *tiers)
{
    struct kv_remote_result result;
    while (tiers->remote != NULL && kv_remote_poll(tiers->remote, &result)) {
        if (!result.is_get) {
            tiers->slots[result.tag].is_sending = false;
            kv_host_release(&tiers->host, result.tag);
            settle_early(tiers, result.tag);
            continue;
        }
        forget_fetch(tiers, result.tag);
        kv_host_end(&tiers->host, result.tag, result.is_good);
        if (result.is_good) {
            tiers->slots[result.tag].origin = KV_TIER_REMOTE;
            note_for_disk(tiers, result.tag);
        }
    }
}

/* ---- copies on the device -------------------------------------------------------------------- */

/* Takes in what has been copied out. False: nothing has; must_wait: nothing is under way. */
static bool collect_out(struct kv_tiers *tiers, bool must_wait)
{
    struct kv_copy copy;
    bool is_good;
    if (!kv_copies_take_out(tiers->copies, must_wait, &copy, &is_good)) {
        return false;
    }
    bool is_early = tiers->slots[copy.slot_idx].early != EARLY_NONE;
    kv_host_end(&tiers->host, copy.slot_idx, is_good);
    if (!is_good) {
        tiers->metrics.num_copy_faults++;
        end_early(tiers, copy.slot_idx);
        return true;
    }
    tiers->metrics.num_demoted += !is_early;
    tiers->metrics.num_written += is_early;
    note_unsaved(tiers, copy.slot_idx);
    settle_early(tiers, copy.slot_idx);
    return true;
}

int64_t kv_tiers_block_ns(const struct kv_tiers *tiers)
{
    return kv_copies_block_ns(tiers->copies);
}

enum imbrex_status kv_tiers_measure(struct kv_tiers *tiers, int32_t num_blocks, int64_t *block_ns)
{
    return kv_copies_measure(tiers->copies, num_blocks, block_ns);
}

enum imbrex_status kv_tiers_measure_sliced(struct kv_tiers *tiers, int32_t num_blocks,
                                           int64_t *block_ns)
{
    return kv_copies_measure_sliced(tiers->copies, num_blocks, block_ns);
}

enum imbrex_status kv_tiers_start(struct kv_tiers *tiers)
{
    return kv_copies_start(tiers->copies);
}

/* ---- demotion -------------------------------------------------------------------------------- */

/* A FILLING slot for the block; -1: there is no room. */
static int32_t take_slot(struct kv_tiers *tiers, const struct kv_key *key, const int32_t *token_ids)
{
    if (tiers->host.empty.first == -1) {
        int32_t victim = find_victim(tiers);
        if (victim == -1) {
            return -1;
        }
        tiers->metrics.num_lost += is_sole(tiers, victim);
        tiers->metrics.num_unsent +=
            tiers->slots[victim].is_unsent && tiers->slots[victim].early == EARLY_NONE;
        forget_unsaved(tiers, victim);
        forget_unsent(tiers, victim);
        end_early(tiers, victim);
        kv_host_evict(&tiers->host, victim);
    }
    return kv_host_begin(&tiers->host, key, token_ids);
}

/* Whether a slot can be had without a loss. */
static bool has_safe_slot(const struct kv_tiers *tiers)
{
    if (tiers->host.empty.first != -1) {
        return true;
    }
    int32_t victim = find_victim(tiers);
    return victim != -1 && !is_sole(tiers, victim);
}

/* Waits for disk or remote, whichever has something to do for us. */
static void wait_below(struct kv_tiers *tiers, int64_t num_disk_jobs, int64_t num_remote_jobs,
                       int64_t timeout_ns)
{
    if (num_disk_jobs > 0) {
        bool is_short = num_remote_jobs > 0 && timeout_ns > SHORT_WAIT_NS;
        kv_disk_wait(tiers->disk, is_short ? SHORT_WAIT_NS : timeout_ns);
    } else if (num_remote_jobs > 0) {
        kv_remote_wait(tiers->remote, timeout_ns);
    }
}

/* One round of waiting for disk and remote to take what is in the host tier, or to refuse it.
 * False: nothing is left. */
static bool flush_some(struct kv_tiers *tiers)
{
    kv_copies_start_out(tiers->copies);
    while (collect_out(tiers, true)) {
    }
    if (tiers->disk != NULL) {
        save(tiers);
    }
    if (tiers->remote != NULL) {
        send_unsent(tiers);
    }
    int32_t num_disk_jobs = tiers->disk != NULL ? kv_disk_num_jobs(tiers->disk) : 0;
    /* What a slow server still has is not waited for in the end. */
    int32_t num_puts = tiers->remote != NULL && !is_too_late_to_send(tiers)
                           ? kv_remote_num_puts(tiers->remote)
                           : 0;
    if (num_disk_jobs + num_puts == 0) {
        return tiers->unsaved.first != -1;
    }
    wait_below(tiers, num_disk_jobs, num_puts, FLUSH_WAIT_NS);
    poll_disk(tiers);
    poll_remote(tiers);
    return true;
}

/* Whether disk and remote have all that they are to have of the block, as far as is known. */
static bool is_below(const struct kv_tiers *tiers, const struct kv_key *key,
                     const int32_t *token_ids)
{
    return (tiers->disk == NULL || kv_disk_has(tiers->disk, key, token_ids)) &&
           (tiers->remote == NULL || kv_remote_has(tiers->remote, key));
}

/* The copy of a block to a FILLING slot; is_covered: the first tier keeps it. Returns the slot; -1:
 * there is no room. */
static int32_t add_copy_out(struct kv_tiers *tiers, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx, bool is_covered)
{
    while (!kv_copies_make_room(tiers->copies)) {
        (void)collect_out(tiers, true);
    }
    int32_t slot_idx = take_slot(tiers, key, token_ids);
    if (slot_idx != -1) {
        tiers->slots[slot_idx].wanted = 0;
        tiers->slots[slot_idx].origin = KV_TIER_HOST;
        kv_copies_add_out(tiers->copies, slot_idx, block_idx, is_covered);
    }
    return slot_idx;
}

/* The first tier gives up a block of which there is a slot. */
static void demote_slot(struct kv_tiers *tiers, int32_t slot_idx)
{
    kv_host_touch(&tiers->host, slot_idx);
    if (tiers->slots[slot_idx].early != EARLY_NONE) {
        end_early(tiers, slot_idx);
        kv_copies_uncover(tiers->copies, slot_idx);
        if (tiers->host.slots[slot_idx].state == KV_HOST_READY) {
            note_unsaved(tiers, slot_idx);
        }
    }
}

void kv_tiers_demote(struct kv_tiers *tiers, const struct kv_key *key, const int32_t *token_ids,
                     int32_t block_idx)
{
    int32_t slot_idx = kv_table_find(&tiers->host.table, key);
    if (slot_idx != -1) {
        demote_slot(tiers, slot_idx);
        return;
    }
    if ((tiers->is_passing || tiers->is_flushing) && is_below(tiers, key, token_ids)) {
        return;
    }
    if (tiers->is_passing && tiers->disk != NULL && kv_disk_has(tiers->disk, key, token_ids) &&
        !kv_remote_is_taking(tiers->remote)) {
        return;
    }
    while (tiers->is_flushing && !has_safe_slot(tiers) && flush_some(tiers)) {
    }
    if (add_copy_out(tiers, key, token_ids, block_idx, false) == -1) {
        tiers->metrics.num_lost++;
    }
}

bool kv_tiers_write_through(struct kv_tiers *tiers, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx)
{
    int32_t slot_idx = kv_table_find(&tiers->host.table, key);
    int32_t max_writing = tiers->host.num_slots / 2;
    max_writing = max_writing < MAX_WRITING ? max_writing : MAX_WRITING;
    if (slot_idx != -1) {
        bool is_ready = tiers->host.slots[slot_idx].state == KV_HOST_READY;
        if (is_ready) {
            note_unsaved(tiers, slot_idx);
        }
        return is_ready;
    }
    if (is_below(tiers, key, token_ids)) {
        return true;
    }
    bool is_for_disk = tiers->disk != NULL && !kv_disk_has(tiers->disk, key, token_ids);
    if ((!is_for_disk && !kv_remote_is_taking(tiers->remote)) ||
        tiers->num_writing == max_writing || kv_copies_is_out_busy(tiers->copies)) {
        return false;
    }
    int32_t victim = tiers->host.empty.first == -1 ? find_victim(tiers) : -1;
    if (tiers->host.empty.first == -1 && (victim == -1 || !is_clean(tiers, victim))) {
        return false;
    }
    slot_idx = add_copy_out(tiers, key, token_ids, block_idx, true);
    if (slot_idx == -1) {
        return false;
    }
    tiers->slots[slot_idx].early = EARLY_WRITING;
    tiers->num_writing++;
    return true;
}

bool kv_tiers_is_writing(const struct kv_tiers *tiers)
{
    return tiers->num_writing > 0 || tiers->unsaved.first != -1 || tiers->unsent.first != -1;
}

/* ---- what is wanted -------------------------------------------------------------------------- */

void kv_tiers_begin_look(struct kv_tiers *tiers)
{
    tiers->look++;
}

static enum kv_place look_remote(struct kv_tiers *tiers, const struct kv_key *key)
{
    switch (kv_remote_look(tiers->remote, key)) {
    case KV_REMOTE_ABSENT:
        break;
    case KV_REMOTE_ASKED:
        return KV_PLACE_ASKED;
    case KV_REMOTE_THERE:
        return KV_PLACE_REMOTE;
    }
    return KV_PLACE_NONE;
}

enum kv_place kv_tiers_look(struct kv_tiers *tiers, const struct kv_key *key,
                            const int32_t *token_ids)
{
    int32_t slot_idx = kv_host_find(&tiers->host, key, token_ids);
    if (slot_idx == -1) {
        if (tiers->disk != NULL && kv_disk_has(tiers->disk, key, token_ids)) {
            return KV_PLACE_DISK;
        }
        return tiers->remote != NULL ? look_remote(tiers, key) : KV_PLACE_NONE;
    }
    tiers->slots[slot_idx].wanted = tiers->look;
    kv_host_touch(&tiers->host, slot_idx);
    if (tiers->host.slots[slot_idx].state == KV_HOST_FILLING) {
        return KV_PLACE_COMING;
    }
    return tiers->slots[slot_idx].is_moving ? KV_PLACE_MOVING : KV_PLACE_HOST;
}

bool kv_tiers_fetch(struct kv_tiers *tiers, const struct kv_key *key, const int32_t *token_ids)
{
    /* An equal key of other tokens has the slot. */
    if (kv_table_find(&tiers->host.table, key) != -1) {
        return false;
    }
    bool is_on_disk = tiers->disk != NULL && kv_disk_has(tiers->disk, key, token_ids);
    bool is_ready = is_on_disk ? kv_disk_is_ready(tiers->disk)
                               : tiers->remote != NULL && kv_remote_can_get(tiers->remote);
    if (tiers->num_fetches == MAX_FETCHES || !is_ready || !has_safe_slot(tiers)) {
        return false;
    }
    int32_t slot_idx = take_slot(tiers, key, token_ids);
    unsigned char *block = kv_host_block(&tiers->host, slot_idx);
    tiers->slots[slot_idx].origin = is_on_disk ? KV_TIER_DISK : KV_TIER_REMOTE;
    if (!(is_on_disk ? kv_disk_get(tiers->disk, key, token_ids, block, slot_idx)
                     : kv_remote_get(tiers->remote, key, token_ids, block, slot_idx))) {
        kv_host_end(&tiers->host, slot_idx, false);
        return false;
    }
    tiers->slots[slot_idx].wanted = tiers->look;
    tiers->fetches[tiers->num_fetches] = slot_idx;
    tiers->num_fetches++;
    return true;
}

static bool cancel_fetch(struct kv_tiers *tiers, int32_t slot_idx)
{
    return tiers->slots[slot_idx].origin == KV_TIER_REMOTE
               ? kv_remote_cancel_get(tiers->remote, slot_idx)
               : kv_disk_cancel_get(tiers->disk, slot_idx);
}

void kv_tiers_end_look(struct kv_tiers *tiers)
{
    for (int32_t i = tiers->num_fetches - 1; i >= 0; i--) {
        int32_t slot_idx = tiers->fetches[i];
        if (tiers->slots[slot_idx].wanted != tiers->look && cancel_fetch(tiers, slot_idx)) {
            forget_fetch(tiers, slot_idx);
            kv_host_end(&tiers->host, slot_idx, false);
            tiers->metrics.num_cancelled++;
        }
    }
}

bool kv_tiers_can_promote(const struct kv_tiers *tiers)
{
    return kv_copies_can_add_in(tiers->copies);
}

/* What a slot that blocks only pass through has is what the tier below has, or will have. */
static enum kv_tier origin_of(const struct kv_tiers *tiers, int32_t slot_idx)
{
    enum kv_tier origin = tiers->slots[slot_idx].origin;
    if (!tiers->is_passing || origin != KV_TIER_HOST) {
        return origin;
    }
    return tiers->disk != NULL ? KV_TIER_DISK : KV_TIER_REMOTE;
}

static bool add_promotion(struct kv_tiers *tiers, const struct kv_key *key,
                          const struct kv_key *parent_key, const int32_t *token_ids,
                          int32_t block_idx, bool is_sliced)
{
    int32_t slot_idx = kv_host_find(&tiers->host, key, token_ids);
    const struct kv_copy copy = {
        .slot_idx = slot_idx,
        .block_idx = block_idx,
        .from = origin_of(tiers, slot_idx),
        .has_parent = parent_key != NULL,
        .parent_key = parent_key != NULL ? *parent_key : (struct kv_key){{0}},
    };
    if (!(is_sliced ? kv_copies_add_sliced(tiers->copies, &copy)
                    : kv_copies_add_in(tiers->copies, &copy))) {
        return false;
    }
    kv_host_hold(&tiers->host, slot_idx);
    tiers->slots[slot_idx].origin = KV_TIER_HOST;
    tiers->slots[slot_idx].is_moving = true;
    return true;
}

bool kv_tiers_promote(struct kv_tiers *tiers, const struct kv_key *key,
                      const struct kv_key *parent_key, const int32_t *token_ids, int32_t block_idx)
{
    return add_promotion(tiers, key, parent_key, token_ids, block_idx, false);
}

void kv_tiers_set_slices(struct kv_tiers *tiers, const size_t *ends, int32_t num_slices)
{
    kv_copies_set_slices(tiers->copies, ends, num_slices);
}

bool kv_tiers_promote_sliced(struct kv_tiers *tiers, const struct kv_key *key,
                             const struct kv_key *parent_key, const int32_t *token_ids,
                             int32_t block_idx)
{
    return add_promotion(tiers, key, parent_key, token_ids, block_idx, true);
}

bool kv_tiers_can_slice(const struct kv_tiers *tiers)
{
    return kv_copies_can_slice(tiers->copies);
}

int32_t kv_tiers_slice_events(struct kv_tiers *tiers,
                              struct device_event *events[KV_TIERS_MAX_SLICES])
{
    return kv_copies_slice_events(tiers->copies, events);
}

bool kv_tiers_poll(struct kv_tiers *tiers, struct kv_promotion *promotion)
{
    struct kv_copy copy;
    bool is_sliced, is_good;
    if (!kv_copies_take_in(tiers->copies, &copy, &is_sliced, &is_good)) {
        return false;
    }
    *promotion = (struct kv_promotion){
        .key = tiers->host.keys[copy.slot_idx],
        .parent_key = copy.parent_key,
        .has_parent = copy.has_parent,
        .block_idx = copy.block_idx,
        .from = copy.from,
        .is_sliced = is_sliced,
        .is_good = is_good,
    };
    memcpy(promotion->token_ids, tiers->host.slots[copy.slot_idx].token_ids,
           sizeof(promotion->token_ids));
    kv_host_release(&tiers->host, copy.slot_idx);
    tiers->slots[copy.slot_idx].is_moving = false;
    tiers->metrics.num_promoted[copy.from] += is_good;
    tiers->metrics.num_copy_faults += !is_good;
    return true;
}

/* ---- progress -------------------------------------------------------------------------------- */

static void log_faults(struct kv_tiers *tiers, int64_t now_ns)
{
    struct kv_tiers_metrics metrics;
    if (tiers->remote != NULL) {
        kv_remote_log_faults(tiers->remote, tiers->log, now_ns);
    }
    kv_tiers_read_metrics(tiers, &metrics);
    const char *folder = tiers->folder != NULL ? tiers->folder->path : NULL;
    kv_tiers_tell_folder(&tiers->told_folder, &metrics.disk, folder, tiers->log, now_ns);
    kv_tiers_tell_full(&tiers->has_told_full, &metrics.disk, folder, tiers->log);
    kv_tiers_tell_faults(&tiers->told, &metrics, folder, tiers->log, now_ns);
}

void kv_tiers_update(struct kv_tiers *tiers, int64_t now_ns)
{
    poll_disk(tiers);
    poll_remote(tiers);
    while (collect_out(tiers, false)) {
    }
    if (tiers->disk != NULL) {
        save(tiers);
    }
    if (tiers->remote != NULL) {
        send_unsent(tiers);
    }
    log_faults(tiers, now_ns);
}

static int32_t count_asks(const struct kv_tiers *tiers)
{
    return tiers->remote != NULL ? kv_remote_num_asks(tiers->remote) : 0;
}

bool kv_tiers_is_moving(const struct kv_tiers *tiers)
{
    return tiers->num_fetches > 0 || count_asks(tiers) > 0 ||
           kv_copies_is_under_way(tiers->copies, KV_DIRECTION_IN) ||
           kv_copies_is_under_way(tiers->copies, KV_DIRECTION_OUT);
}

bool kv_tiers_is_promoting(const struct kv_tiers *tiers)
{
    return kv_copies_is_under_way(tiers->copies, KV_DIRECTION_IN);
}

int32_t kv_tiers_num_promoting(const struct kv_tiers *tiers)
{
    return kv_copies_num_in(tiers->copies);
}

void kv_tiers_wait(struct kv_tiers *tiers, int64_t timeout_ns)
{
    if (kv_copies_is_under_way(tiers->copies, KV_DIRECTION_IN)) {
        kv_copies_wait(tiers->copies, KV_DIRECTION_IN);
    } else if (tiers->num_fetches > 0 || count_asks(tiers) > 0) {
        int32_t num_gets = tiers->remote != NULL ? kv_remote_num_gets(tiers->remote) : 0;
        wait_below(tiers, tiers->num_fetches - num_gets, num_gets + count_asks(tiers), timeout_ns);
    } else if (kv_copies_is_under_way(tiers->copies, KV_DIRECTION_OUT)) {
        kv_copies_wait(tiers->copies, KV_DIRECTION_OUT);
    }
}

void kv_tiers_begin_flush(struct kv_tiers *tiers)
{
    tiers->look++;
    tiers->is_flushing = tiers->disk != NULL || tiers->remote != NULL;
    tiers->send_until_ns = clock_now_ns() + MAX_FLUSH_SEND_NS;
    tiers->num_unsent_before = tiers->metrics.num_unsent;
}

/* Tells what a server that is there was too slow for. */
static void tell_unsent(const struct kv_tiers *tiers)
{
    if (tiers->remote == NULL || !is_too_late_to_send(tiers)) {
        return;
    }
    uint64_t num_blocks = tiers->metrics.num_unsent - tiers->num_unsent_before +
                          (uint64_t)tiers->unsent.num_members +
                          (uint64_t)kv_remote_num_puts(tiers->remote);
    if (num_blocks > 0) {
        log_write(tiers->log, IMBREX_LOG_LEVEL_WARNING,
                  "KV remote: %" PRIu64
                  " block%s not sent within %d s at the end: nobody will find "
                  "them there",
                  num_blocks, line_plural(num_blocks), (int)(MAX_FLUSH_SEND_NS / 1000000000));
    }
}

void kv_tiers_end_flush(struct kv_tiers *tiers)
{
    while (flush_some(tiers)) {
    }
    /* The last word: no minute is waited for. */
    log_faults(tiers, INT64_MAX);
    tell_unsent(tiers);
}

/* ---- create and destroy ---------------------------------------------------------------------- */

enum imbrex_status kv_tiers_create(const struct kv_tiers_options *options, struct kv_tiers **tiers,
                                   struct imbrex_error *err)
{
    enum imbrex_status status;
    bool has_disk = options->disk != NULL, has_lower = has_disk || options->remote != NULL;
    int32_t num_slots = kv_tiers_num_slots(options->block_bytes, options->host_bytes, has_lower);
    struct kv_tiers *created = calloc(1, sizeof(*created));
    assert(num_slots > 0);
    if (created == NULL) {
        return error_out_of_memory(err, "the KV tiers", sizeof(*created));
    }
    size_t count = (size_t)num_slots;
    *created = (struct kv_tiers){
        .is_passing = options->host_bytes == 0,
        .log = options->log,
        .look = 1,
        .unsaved = BLOCK_LIST_EMPTY,
        .unsent = BLOCK_LIST_EMPTY,
        .slots = calloc(count, sizeof(*created->slots)),
        .unsaved_links.previous = calloc(count, sizeof(*created->unsaved_links.previous)),
        .unsaved_links.next = calloc(count, sizeof(*created->unsaved_links.next)),
        .unsent_links.previous = calloc(count, sizeof(*created->unsent_links.previous)),
        .unsent_links.next = calloc(count, sizeof(*created->unsent_links.next)),
        .folder = has_disk ? options->disk->folder : NULL,
    };
    if (created->slots == NULL || created->unsaved_links.previous == NULL ||
        created->unsaved_links.next == NULL || created->unsent_links.previous == NULL ||
        created->unsent_links.next == NULL) {
        status = error_out_of_memory(err, "the KV tiers", count * sizeof(*created->slots));
        goto fail;
    }
    TRY_OR_FAIL(
        kv_host_create(options->device, num_slots, options->block_bytes, &created->host, err));
    TRY_OR_FAIL(
        kv_copies_create(options->device, options->blocks, &created->host, &created->copies, err));
    if (has_disk) {
        TRY_OR_FAIL(kv_disk_open(options->disk, &created->disk, err));
    }
    if (options->remote != NULL) {
        TRY_OR_FAIL(kv_remote_open(options->remote, &created->remote, err));
    }
    *tiers = created;
    return IMBREX_STATUS_OK;
fail:
    kv_tiers_destroy(created);
    return status;
}

void kv_tiers_destroy(struct kv_tiers *tiers)
{
    if (tiers == NULL) {
        return;
    }
    kv_disk_close(tiers->disk);
    kv_remote_close(tiers->remote);
    kv_copies_destroy(tiers->copies);
    kv_host_destroy(&tiers->host);
    free(tiers->slots);
    free(tiers->unsaved_links.previous);
    free(tiers->unsaved_links.next);
    free(tiers->unsent_links.previous);
    free(tiers->unsent_links.next);
    free(tiers);
}

/* ---- questions ------------------------------------------------------------------------------- */

void kv_tiers_read_metrics(const struct kv_tiers *tiers, struct kv_tiers_metrics *metrics)
{
    *metrics = tiers->metrics;
    metrics->num_host_blocks = tiers->host.used.num_members;
    metrics->max_host_blocks = tiers->host.num_slots;
    if (tiers->disk != NULL) {
        kv_disk_read_metrics(tiers->disk, &metrics->disk);
    }
    if (tiers->remote != NULL) {
        kv_remote_read_metrics(tiers->remote, &metrics->remote);
    }
}

/* Whether the list's slots are READY, and say that they are in it. */
static bool check_list(const struct kv_tiers *tiers, const struct block_list *list,
                       const struct block_links *links)
{
    int32_t num_members = 0;
    for (int32_t i = list->first; i != -1; i = links->next[i]) {
        bool is_in =
            list == &tiers->unsaved ? tiers->slots[i].is_unsaved : tiers->slots[i].is_unsent;
        if (num_members == tiers->host.num_slots || !is_in ||
            tiers->host.slots[i].state != KV_HOST_READY) {
            return false;
        }
        num_members++;
    }
    return num_members == list->num_members;
}

bool kv_tiers_check(const struct kv_tiers *tiers)
{
    for (int32_t i = 0; i < tiers->num_fetches; i++) {
        if (tiers->host.slots[tiers->fetches[i]].state != KV_HOST_FILLING) {
            return false;
        }
    }
    int32_t num_writing = 0;
    for (int32_t i = 0; i < tiers->host.num_slots; i++) {
        num_writing += tiers->slots[i].early == EARLY_WRITING;
        if (tiers->host.slots[i].state == KV_HOST_EMPTY && tiers->slots[i].early != EARLY_NONE) {
            return false;
        }
    }
    return num_writing == tiers->num_writing &&
           check_list(tiers, &tiers->unsaved, &tiers->unsaved_links) &&
           check_list(tiers, &tiers->unsent, &tiers->unsent_links) && kv_host_check(&tiers->host) &&
           (tiers->disk == NULL || kv_disk_check(tiers->disk)) &&
           (tiers->remote == NULL || kv_remote_check(tiers->remote));
}
