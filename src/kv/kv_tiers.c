/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_tiers.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/line.h"
#include "kv/kv_host.h"
#include "kv/kv_tiers_faults.h"

/* Without a host tier: so many slots, room for a disk's jobs and as many blocks that wait. */
#define NUM_PASSING_SLOTS (2 * KV_DISK_MAX_JOBS)
#define MAX_FETCHES 48 /* a disk is busy with them, and a nearer request never waits for more */
/* Of copies under way, each way. The engine looks once a step: what it gives then has to keep the
 * link busy until the next look has seen that it is done, 10 ms of 1,000 blocks of 512 KiB. */
#define NUM_BATCHES 16
#define MAX_MOVES 64 /* of one batch */
#define NUM_MEASURED 32
/* What is given behind a full batch is timed, from so many blocks on: the stream has it before that
 * one is done, so what is timed is the link. */
#define MIN_TIMED 8
/* The rate is that of the last moves: so many blocks. What was timed once counts for a quarter, and
 * as four times what was known, at most: a machine may have been busy with something else. */
#define MAX_LEARNED 1024
#define MAX_LEARNED_WEIGHT 0.25
#define MAX_LEARNED_FACTOR 4
/* Blocks that are copied down, saved and sent at once although the first tier keeps them: as many
 * as a disk's and a server's jobs. */
#define MAX_WRITING 64
#define FLUSH_WAIT_NS INT64_C(100000000)
/* Where two may be waited for, one of them is, for so long. */
#define SHORT_WAIT_NS INT64_C(1000000)
/* A server may be slow without an end: an engine's end does not wait for all of it. */
#define MAX_FLUSH_SEND_NS INT64_C(10000000000)

struct move {
    struct kv_key parent_key; /* of a promotion */
    int32_t slot_idx, block_idx;
    enum kv_tier from;
    bool has_parent;
    bool is_covered; /* see num_covered */
};

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

/* Copies that are told together. */
struct batch {
    struct move own_moves[MAX_MOVES];
    struct move *moves; /* [num_moves] those, or the tiers' sliced_moves */
    struct device_event *event;
    int32_t num_moves;
    int32_t num_told; /* of the moves, those that poll has given back */
    /* Of copies out, those that no step need wait for: a copy in comes behind them before any step
     * may write over the block, or the first tier keeps it. */
    int32_t num_covered;
    bool is_sliced; /* the event is that behind the last slice */
    bool is_given;  /* the event is recorded behind all of them */
    bool is_failed; /* none of them counts */
};

/* Batches one way: num_batches from first on are filled, given or read. */
struct direction {
    struct batch batches[NUM_BATCHES];
    int32_t first, num_batches;
    enum device_stream stream;
};

struct kv_tiers {
    struct device *device;
    unsigned char *blocks;
    struct kv_host host;
    bool is_passing; /* slots are for moves only: what the disk has is not kept there */
    struct kv_disk *disk;
    const struct kv_folder *folder; /* of the disk */
    struct kv_remote *remote;       /* NULL: none */
    const struct log *log;
    struct direction out, in;
    struct move *sliced_moves; /* [KV_TIERS_MAX_SLICED] of the one batch in slices */
    bool has_sliced;           /* it is among the batches in */
    struct device_event *slice_events[KV_TIERS_MAX_SLICES - 1]; /* behind all slices but the last */
    size_t slice_ends[KV_TIERS_MAX_SLICES];                     /* [num_slices] bytes in a block */
    int32_t num_slices;
    double block_ns;                  /* see kv_tiers_block_ns; 0: not known */
    int32_t num_learned;              /* blocks that it stands for */
    struct device_event *timed_begin; /* before what is timed */
    const struct batch *timed;        /* the last of these batches in; NULL: nothing is timed */
    int32_t num_timed;                /* blocks */
    uint64_t look;                    /* number of the look, from 1 on */
    struct slot *slots;               /* [num_slots] what kv_host does not know of them */
    int32_t num_writing;              /* slots whose `early` is WRITING */
    struct block_links unsaved_links, unsent_links;
    struct block_list unsaved;    /* slots that the disk does not have, the oldest first */
    struct block_list unsent;     /* the same, of the remote */
    int64_t send_until_ns;        /* while it is flushed */
    uint64_t num_unsent_before;   /* num_unsent when that began */
    int32_t fetches[MAX_FETCHES]; /* [num_fetches] slots that disk or remote are to fill */
    int32_t num_fetches;
    bool is_flushing;
    bool has_failed; /* the device no longer says what is done */
    struct kv_fault_log told;
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

/* Gives the disk what it does not have, as far as it takes it. False if it refused one. */
static bool save(struct kv_tiers *tiers)
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
            return false;
        }
        slot->is_saving = true;
        kv_host_hold(&tiers->host, slot_idx);
    }
    return true;
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

static struct batch *batch_at(struct direction *direction, int32_t idx)
{
    return &direction->batches[(direction->first + idx) % NUM_BATCHES];
}

static void end_out(struct kv_tiers *tiers, const struct batch *batch)
{
    for (int32_t i = 0; i < batch->num_moves; i++) {
        int32_t slot_idx = batch->moves[i].slot_idx;
        bool is_early = tiers->slots[slot_idx].early != EARLY_NONE;
        kv_host_end(&tiers->host, slot_idx, !batch->is_failed);
        if (batch->is_failed) {
            tiers->metrics.num_copy_faults++;
            end_early(tiers, slot_idx);
            continue;
        }
        tiers->metrics.num_demoted += !is_early;
        tiers->metrics.num_written += is_early;
        note_unsaved(tiers, slot_idx);
        settle_early(tiers, slot_idx);
    }
}

/* Takes the oldest batch of copies out in if it is done, or waits for it. False: it is not. */
static bool collect_out(struct kv_tiers *tiers, bool must_wait)
{
    struct batch *batch = batch_at(&tiers->out, 0);
    bool is_done = true;
    if (tiers->out.num_batches == 0 || !batch->is_given) {
        return false;
    }
    enum imbrex_status status = must_wait
                                    ? device_event_synchronize(tiers->device, batch->event)
                                    : device_event_query(tiers->device, batch->event, &is_done);
    if (!is_done) {
        return false;
    }
    batch->is_failed |= status != IMBREX_STATUS_OK;
    end_out(tiers, batch);
    tiers->out.first = (tiers->out.first + 1) % NUM_BATCHES;
    tiers->out.num_batches--;
    return true;
}

static struct batch *add_batch(struct direction *direction)
{
    struct batch *batch = batch_at(direction, direction->num_batches);
    direction->num_batches++;
    batch->moves = batch->own_moves;
    batch->num_moves = 0;
    batch->num_told = 0;
    batch->num_covered = 0;
    batch->is_sliced = false;
    batch->is_given = false;
    batch->is_failed = false;
    return batch;
}

/* The batch that the next move goes into; NULL: all are under way. */
static struct batch *open_batch(struct direction *direction)
{
    if (direction->num_batches > 0) {
        struct batch *last = batch_at(direction, direction->num_batches - 1);
        if (!last->is_given && !last->is_sliced && last->num_moves < MAX_MOVES) {
            return last;
        }
    }
    return direction->num_batches < NUM_BATCHES ? add_batch(direction) : NULL;
}

/* The same for a move in slices: there is one such batch. */
static struct batch *open_sliced(struct kv_tiers *tiers)
{
    struct direction *in = &tiers->in;
    if (tiers->has_sliced) {
        struct batch *last = batch_at(in, in->num_batches - 1);
        bool is_open = last->is_sliced && !last->is_given && last->num_moves < KV_TIERS_MAX_SLICED;
        return is_open ? last : NULL;
    }
    if (!kv_tiers_can_slice(tiers)) {
        return NULL;
    }
    struct batch *batch = add_batch(in);
    batch->moves = tiers->sliced_moves;
    batch->is_sliced = true;
    tiers->has_sliced = true;
    return batch;
}

/* What failed on the stream before was told by another batch's event. Where this cannot be said,
 * the batch fails with the one before. */
static void count_from_here(struct kv_tiers *tiers, const struct batch *batch,
                            enum device_stream stream)
{
    (void)device_event_record(tiers->device, batch->event, stream);
}

/* Waits for a stream whose event could not be put where it was meant to be. */
static void drain(struct kv_tiers *tiers, const struct batch *batch, enum device_stream stream)
{
    if (device_event_record(tiers->device, batch->event, stream) != IMBREX_STATUS_OK ||
        device_event_synchronize(tiers->device, batch->event) == IMBREX_STATUS_DEVICE) {
        tiers->has_failed = true;
    }
}

/* The last copies out that a step could write under; NULL: none, or only covered ones. */
static const struct batch *find_uncovered(struct kv_tiers *tiers)
{
    for (int32_t i = tiers->out.num_batches - 1; i >= 0; i--) {
        const struct batch *batch = batch_at(&tiers->out, i);
        if (batch->num_covered < batch->num_moves) {
            return batch;
        }
    }
    return NULL;
}

/* Gives bytes [begin, end) of the batch's blocks to the direction's stream. Copies that are refused
 * may be under way all the same: their slots and blocks are nobody else's before the batch is done.
 */
static void give_copies(struct kv_tiers *tiers, struct batch *batch,
                        const struct direction *direction, size_t begin, size_t end)
{
    struct device_copy copies[MAX_MOVES];
    bool is_out = direction == &tiers->out;
    for (int32_t next = 0; next < batch->num_moves && !batch->is_failed;) {
        int32_t num_copies = 0;
        for (; next < batch->num_moves && num_copies < MAX_MOVES; next++, num_copies++) {
            const struct move *move = &batch->moves[next];
            unsigned char *slot = kv_host_block(&tiers->host, move->slot_idx) + begin;
            unsigned char *block =
                tiers->blocks + (size_t)move->block_idx * tiers->host.block_bytes + begin;
            copies[num_copies] = (struct device_copy){.destination = is_out ? slot : block,
                                                      .source = is_out ? block : slot,
                                                      .num_bytes = end - begin};
        }
        batch->is_failed = device_copy_batch_async(tiers->device, direction->stream, copies,
                                                   num_copies) != IMBREX_STATUS_OK;
    }
}

/* Gives the copies out that were asked for: the step's stream and the one of copies in go on behind
 * them only, the step's where it has to. Told again each time, as long as copies out are under way:
 * a stream on which something failed forgets what it was to wait for. */
static void fence_out(struct kv_tiers *tiers)
{
    struct device *device = tiers->device;
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (tiers->out.num_batches == 0) {
        return;
    }
    struct batch *batch = batch_at(&tiers->out, tiers->out.num_batches - 1);
    if (!batch->is_given) {
        batch->is_given = true;
        count_from_here(tiers, batch, tiers->out.stream);
        give_copies(tiers, batch, &tiers->out, 0, tiers->host.block_bytes);
        status = device_event_record(device, batch->event, tiers->out.stream);
    }
    const struct batch *uncovered = find_uncovered(tiers);
    if (status == IMBREX_STATUS_OK && uncovered != NULL) {
        status = device_event_wait(device, uncovered->event, DEVICE_STREAM_STEP);
    }
    if (status != IMBREX_STATUS_OK ||
        device_event_wait(device, batch->event, tiers->in.stream) != IMBREX_STATUS_OK) {
        drain(tiers, batch, tiers->out.stream);
        batch->is_failed = true;
    }
}

/* A copy in to the block is to come: behind the copy out from it, if one has just been given. */
static void cover_out(struct kv_tiers *tiers, int32_t block_idx)
{
    if (tiers->out.num_batches == 0) {
        return;
    }
    struct batch *batch = batch_at(&tiers->out, tiers->out.num_batches - 1);
    for (int32_t i = batch->num_moves - 1; !batch->is_given && i >= 0; i--) {
        struct move *move = &batch->moves[i];
        if (move->block_idx == block_idx && !move->is_covered) {
            move->is_covered = true;
            batch->num_covered++;
            return;
        }
    }
}

/* A block that the first tier kept when its copy out was asked for, and does not any more: if that
 * is under way, steps go on behind it. */
static void uncover_slot(struct kv_tiers *tiers, int32_t slot_idx)
{
    for (int32_t i = 0; i < tiers->out.num_batches; i++) {
        struct batch *batch = batch_at(&tiers->out, i);
        for (int32_t k = 0; k < batch->num_moves; k++) {
            struct move *move = &batch->moves[k];
            if (move->slot_idx == slot_idx && move->is_covered) {
                move->is_covered = false;
                batch->num_covered -= batch->num_covered > 0;
            }
        }
    }
}

/* A copy in failed: blocks may come back to steps earlier than the copies out from them are done.
 */
static void uncover_out(struct kv_tiers *tiers)
{
    for (int32_t i = 0; i < tiers->out.num_batches; i++) {
        batch_at(&tiers->out, i)->num_covered = 0;
    }
}

/* A batch for one more copy out, waiting for one where all are under way. */
static struct batch *open_out(struct kv_tiers *tiers)
{
    if (tiers->out.num_batches > 0) {
        const struct batch *last = batch_at(&tiers->out, tiers->out.num_batches - 1);
        if (!last->is_given && last->num_moves == MAX_MOVES) {
            fence_out(tiers);
        }
    }
    struct batch *batch = open_batch(&tiers->out);
    if (batch == NULL) {
        (void)collect_out(tiers, true);
        batch = open_batch(&tiers->out);
    }
    return batch;
}

/* What was timed has come up. */
static void learn(struct kv_tiers *tiers)
{
    const struct batch *timed = tiers->timed;
    int64_t elapsed_ns = 0;
    tiers->timed = NULL;
    if (device_event_elapsed(tiers->device, tiers->timed_begin, timed->event, &elapsed_ns) !=
            IMBREX_STATUS_OK ||
        elapsed_ns <= 0) {
        return;
    }
    double seen_ns = (double)elapsed_ns / tiers->num_timed;
    if (tiers->num_learned > 0) {
        double max_ns = tiers->block_ns * MAX_LEARNED_FACTOR;
        double min_ns = tiers->block_ns / MAX_LEARNED_FACTOR;
        seen_ns = seen_ns > max_ns ? max_ns : seen_ns < min_ns ? min_ns : seen_ns;
    }
    int32_t num_learned = tiers->num_learned + tiers->num_timed;
    tiers->num_learned = num_learned < MAX_LEARNED ? num_learned : MAX_LEARNED;
    double weight = (double)tiers->num_timed / tiers->num_learned;
    double max_weight = num_learned > MAX_LEARNED ? MAX_LEARNED_WEIGHT : 1;
    tiers->block_ns += (seen_ns - tiers->block_ns) * (weight < max_weight ? weight : max_weight);
}

int64_t kv_tiers_block_ns(const struct kv_tiers *tiers)
{
    return tiers->block_ns > 1 || tiers->num_learned == 0 ? (int64_t)tiers->block_ns : 1;
}

/* Where a slice is not given, or its event not recorded, whoever waits for it reads anything: poll
 * says that the batch has failed. */
static void give_batch(struct kv_tiers *tiers, struct batch *batch)
{
    int32_t num_slices = batch->is_sliced ? tiers->num_slices : 1;
    size_t begin = 0;
    batch->is_given = true;
    count_from_here(tiers, batch, tiers->in.stream);
    for (int32_t i = 0; i < num_slices && !batch->is_failed; i++) {
        bool is_last = i == num_slices - 1;
        size_t end = is_last ? tiers->host.block_bytes : tiers->slice_ends[i];
        give_copies(tiers, batch, &tiers->in, begin, end);
        if (!is_last && device_event_record(tiers->device, tiers->slice_events[i],
                                            tiers->in.stream) != IMBREX_STATUS_OK) {
            batch->is_failed = true;
        }
        begin = end;
    }
    if (device_event_record(tiers->device, batch->event, tiers->in.stream) != IMBREX_STATUS_OK) {
        drain(tiers, batch, tiers->in.stream);
        batch->is_failed = true;
    }
}

static void give_in(struct kv_tiers *tiers)
{
    const struct batch *last = NULL;
    bool is_timing = false;
    int32_t num_timed = 0;
    for (int32_t i = 0; i < tiers->in.num_batches; i++) {
        struct batch *batch = batch_at(&tiers->in, i);
        if (batch->is_given) {
            continue;
        }
        give_batch(tiers, batch);
        if (is_timing) {
            last = batch;
            num_timed += batch->num_moves;
            is_timing = !batch->is_sliced && !batch->is_failed;
        } else if (last == NULL && tiers->timed == NULL && !batch->is_sliced &&
                   batch->num_moves == MAX_MOVES) {
            is_timing = device_event_record(tiers->device, tiers->timed_begin, tiers->in.stream) ==
                        IMBREX_STATUS_OK;
        }
    }
    if (is_timing && num_timed >= MIN_TIMED) {
        tiers->timed = last;
        tiers->num_timed = num_timed;
    }
}

enum imbrex_status kv_tiers_start(struct kv_tiers *tiers)
{
    fence_out(tiers);
    give_in(tiers);
    return tiers->has_failed ? IMBREX_STATUS_DEVICE : IMBREX_STATUS_OK;
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

/* One round of waiting for disk and remote to take what is in the host tier. False: they take no
 * more. */
static bool flush_some(struct kv_tiers *tiers)
{
    fence_out(tiers);
    while (collect_out(tiers, true)) {
    }
    bool is_taken = tiers->disk != NULL && save(tiers);
    if (tiers->remote != NULL) {
        send_unsent(tiers);
    }
    int32_t num_disk_jobs = tiers->disk != NULL ? kv_disk_num_jobs(tiers->disk) : 0;
    /* What a slow server still has is not waited for in the end. */
    int32_t num_puts = tiers->remote != NULL && !is_too_late_to_send(tiers)
                           ? kv_remote_num_puts(tiers->remote)
                           : 0;
    if (num_disk_jobs + num_puts == 0) {
        return is_taken && tiers->unsaved.first != -1;
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

/* The copy of a block to a FILLING slot. batch: NULL: too many are under way. Returns the slot; -1:
 * there is no room. */
static int32_t add_copy_out(struct kv_tiers *tiers, struct batch *batch, const struct kv_key *key,
                            const int32_t *token_ids, int32_t block_idx)
{
    int32_t slot_idx = batch != NULL ? take_slot(tiers, key, token_ids) : -1;
    if (slot_idx != -1) {
        tiers->slots[slot_idx].wanted = 0;
        tiers->slots[slot_idx].origin = KV_TIER_HOST;
        batch->moves[batch->num_moves] =
            (struct move){.slot_idx = slot_idx, .block_idx = block_idx};
        batch->num_moves++;
    }
    return slot_idx;
}

/* The first tier gives up a block of which there is a slot. */
static void demote_slot(struct kv_tiers *tiers, int32_t slot_idx)
{
    kv_host_touch(&tiers->host, slot_idx);
    if (tiers->slots[slot_idx].early != EARLY_NONE) {
        end_early(tiers, slot_idx);
        uncover_slot(tiers, slot_idx);
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
    if (add_copy_out(tiers, open_out(tiers), key, token_ids, block_idx) == -1) {
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
        tiers->num_writing == max_writing || tiers->out.num_batches > NUM_BATCHES / 2) {
        return false;
    }
    int32_t victim = tiers->host.empty.first == -1 ? find_victim(tiers) : -1;
    if (tiers->host.empty.first == -1 && (victim == -1 || !is_clean(tiers, victim))) {
        return false;
    }
    struct batch *batch = open_out(tiers);
    slot_idx = add_copy_out(tiers, batch, key, token_ids, block_idx);
    if (slot_idx == -1) {
        return false;
    }
    batch->moves[batch->num_moves - 1].is_covered = true;
    batch->num_covered++;
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
    const struct direction *in = &tiers->in;
    if (in->num_batches < NUM_BATCHES) {
        return true;
    }
    const struct batch *last = &in->batches[(in->first + in->num_batches - 1) % NUM_BATCHES];
    return !last->is_given && !last->is_sliced && last->num_moves < MAX_MOVES;
}

/* batch: NULL: too many are under way. */
static bool add_promotion(struct kv_tiers *tiers, struct batch *batch, const struct kv_key *key,
                          const struct kv_key *parent_key, const int32_t *token_ids,
                          int32_t block_idx)
{
    int32_t slot_idx = kv_host_find(&tiers->host, key, token_ids);
    if (batch == NULL) {
        return false;
    }
    kv_host_hold(&tiers->host, slot_idx);
    batch->moves[batch->num_moves] = (struct move){
        .slot_idx = slot_idx,
        .block_idx = block_idx,
        .from = tiers->slots[slot_idx].origin,
        .has_parent = parent_key != NULL,
        .parent_key = parent_key != NULL ? *parent_key : (struct kv_key){{0}},
    };
    batch->num_moves++;
    tiers->slots[slot_idx].origin = KV_TIER_HOST;
    tiers->slots[slot_idx].is_moving = true;
    cover_out(tiers, block_idx);
    return true;
}

bool kv_tiers_promote(struct kv_tiers *tiers, const struct kv_key *key,
                      const struct kv_key *parent_key, const int32_t *token_ids, int32_t block_idx)
{
    return add_promotion(tiers, open_batch(&tiers->in), key, parent_key, token_ids, block_idx);
}

void kv_tiers_set_slices(struct kv_tiers *tiers, const size_t *ends, int32_t num_slices)
{
    assert(num_slices >= 1 && num_slices <= KV_TIERS_MAX_SLICES && !tiers->has_sliced);
    assert(ends[num_slices - 1] == tiers->host.block_bytes);
    memcpy(tiers->slice_ends, ends, (size_t)num_slices * sizeof(*ends));
    tiers->num_slices = num_slices;
}

bool kv_tiers_promote_sliced(struct kv_tiers *tiers, const struct kv_key *key,
                             const struct kv_key *parent_key, const int32_t *token_ids,
                             int32_t block_idx)
{
    return add_promotion(tiers, open_sliced(tiers), key, parent_key, token_ids, block_idx);
}

bool kv_tiers_can_slice(const struct kv_tiers *tiers)
{
    return tiers->num_slices > 1 && !tiers->has_sliced && tiers->in.num_batches < NUM_BATCHES;
}

int32_t kv_tiers_slice_events(struct kv_tiers *tiers,
                              struct device_event *events[KV_TIERS_MAX_SLICES])
{
    for (int32_t i = 0; i < tiers->in.num_batches; i++) {
        const struct batch *batch = batch_at(&tiers->in, i);
        if (batch->is_sliced && batch->is_given) {
            memcpy(events, tiers->slice_events,
                   (size_t)(tiers->num_slices - 1) * sizeof(struct device_event *));
            events[tiers->num_slices - 1] = batch->event;
            return tiers->num_slices;
        }
    }
    return 0;
}

bool kv_tiers_poll(struct kv_tiers *tiers, struct kv_promotion *promotion)
{
    struct batch *batch = batch_at(&tiers->in, 0);
    bool is_done = true;
    if (tiers->in.num_batches == 0 || !batch->is_given) {
        return false;
    }
    if (batch->num_told == 0) {
        enum imbrex_status status = device_event_query(tiers->device, batch->event, &is_done);
        if (!is_done) {
            return false;
        }
        batch->is_failed |= status != IMBREX_STATUS_OK;
        if (batch->is_failed) {
            tiers->timed = NULL;
            uncover_out(tiers);
        }
        if (tiers->timed == batch) {
            learn(tiers);
        }
    }
    const struct move *move = &batch->moves[batch->num_told];
    *promotion = (struct kv_promotion){
        .key = tiers->host.keys[move->slot_idx],
        .parent_key = move->parent_key,
        .has_parent = move->has_parent,
        .block_idx = move->block_idx,
        .from = move->from,
        .is_sliced = batch->is_sliced,
        .is_good = !batch->is_failed,
    };
    memcpy(promotion->token_ids, tiers->host.slots[move->slot_idx].token_ids,
           sizeof(promotion->token_ids));
    kv_host_release(&tiers->host, move->slot_idx);
    tiers->slots[move->slot_idx].is_moving = false;
    tiers->metrics.num_promoted[move->from] += !batch->is_failed;
    tiers->metrics.num_copy_faults += batch->is_failed;
    batch->num_told++;
    if (batch->num_told == batch->num_moves) {
        tiers->has_sliced = tiers->has_sliced && !batch->is_sliced;
        tiers->in.first = (tiers->in.first + 1) % NUM_BATCHES;
        tiers->in.num_batches--;
    }
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
    kv_tiers_tell_faults(&tiers->told, &metrics, tiers->folder != NULL ? tiers->folder->path : NULL,
                         tiers->log, now_ns);
}

void kv_tiers_update(struct kv_tiers *tiers, int64_t now_ns)
{
    poll_disk(tiers);
    poll_remote(tiers);
    while (collect_out(tiers, false)) {
    }
    if (tiers->disk != NULL) {
        (void)save(tiers);
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
    return tiers->num_fetches > 0 || tiers->in.num_batches > 0 || tiers->out.num_batches > 0 ||
           count_asks(tiers) > 0;
}

bool kv_tiers_is_promoting(const struct kv_tiers *tiers)
{
    return tiers->in.num_batches > 0;
}

int32_t kv_tiers_num_promoting(const struct kv_tiers *tiers)
{
    int32_t num_moves = 0;
    for (int32_t i = 0; i < tiers->in.num_batches; i++) {
        const struct batch *batch = &tiers->in.batches[(tiers->in.first + i) % NUM_BATCHES];
        num_moves += batch->num_moves - batch->num_told;
    }
    return num_moves;
}

/* A copy takes no longer than a step; what it says, poll and update ask again. */
static void wait_for_copies(struct kv_tiers *tiers, struct direction *direction)
{
    const struct batch *batch = batch_at(direction, 0);
    if (batch->is_given && !batch->is_failed) {
        (void)device_event_synchronize(tiers->device, batch->event);
    }
}

void kv_tiers_wait(struct kv_tiers *tiers, int64_t timeout_ns)
{
    if (tiers->in.num_batches > 0) {
        wait_for_copies(tiers, &tiers->in);
    } else if (tiers->num_fetches > 0 || count_asks(tiers) > 0) {
        int32_t num_gets = tiers->remote != NULL ? kv_remote_num_gets(tiers->remote) : 0;
        wait_below(tiers, tiers->num_fetches - num_gets, num_gets + count_asks(tiers), timeout_ns);
    } else if (tiers->out.num_batches > 0) {
        wait_for_copies(tiers, &tiers->out);
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

/* Copies in are timed, up to the event of their last batch. */
static enum imbrex_status create_events(struct kv_tiers *tiers, struct direction *direction,
                                        enum device_stream stream, struct imbrex_error *err)
{
    direction->stream = stream;
    for (int32_t i = 0; i < NUM_BATCHES; i++) {
        struct device_event **event = &direction->batches[i].event;
        TRY(stream == DEVICE_STREAM_KV_IN ? device_event_create_timed(tiers->device, event, err)
                                          : device_event_create(tiers->device, event, err));
    }
    return IMBREX_STATUS_OK;
}

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
        .device = options->device,
        .blocks = options->blocks,
        .is_passing = options->host_bytes == 0,
        .log = options->log,
        .num_slices = 1,
        .look = 1,
        .unsaved = BLOCK_LIST_EMPTY,
        .unsent = BLOCK_LIST_EMPTY,
        .sliced_moves = calloc(KV_TIERS_MAX_SLICED, sizeof(*created->sliced_moves)),
        .slots = calloc(count, sizeof(*created->slots)),
        .unsaved_links.previous = calloc(count, sizeof(*created->unsaved_links.previous)),
        .unsaved_links.next = calloc(count, sizeof(*created->unsaved_links.next)),
        .unsent_links.previous = calloc(count, sizeof(*created->unsent_links.previous)),
        .unsent_links.next = calloc(count, sizeof(*created->unsent_links.next)),
        .folder = has_disk ? options->disk->folder : NULL,
    };
    if (created->sliced_moves == NULL || created->slots == NULL ||
        created->unsaved_links.previous == NULL || created->unsaved_links.next == NULL ||
        created->unsent_links.previous == NULL || created->unsent_links.next == NULL) {
        status = error_out_of_memory(err, "the KV tiers", count * sizeof(*created->slots));
        goto fail;
    }
    TRY_OR_FAIL(
        kv_host_create(created->device, num_slots, options->block_bytes, &created->host, err));
    TRY_OR_FAIL(create_events(created, &created->out, DEVICE_STREAM_KV_OUT, err));
    TRY_OR_FAIL(create_events(created, &created->in, DEVICE_STREAM_KV_IN, err));
    for (int32_t i = 0; i < KV_TIERS_MAX_SLICES - 1; i++) {
        TRY_OR_FAIL(device_event_create(created->device, &created->slice_events[i], err));
    }
    TRY_OR_FAIL(device_event_create_timed(created->device, &created->timed_begin, err));
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
    if (tiers->out.num_batches > 0 || tiers->in.num_batches > 0) {
        (void)kv_tiers_start(tiers);
    }
    /* The step's stream was told to wait for copies out: nothing may be left there either. */
    const enum device_stream streams[] = {DEVICE_STREAM_KV_OUT, DEVICE_STREAM_KV_IN,
                                          DEVICE_STREAM_STEP};
    struct device_event *last = tiers->in.batches[NUM_BATCHES - 1].event;
    for (size_t i = 0; last != NULL && i < sizeof(streams) / sizeof(streams[0]); i++) {
        if (device_event_record(tiers->device, last, streams[i]) == IMBREX_STATUS_OK) {
            (void)device_event_synchronize(tiers->device, last);
        }
    }
    for (int32_t i = 0; i < NUM_BATCHES; i++) {
        device_event_destroy(tiers->device, tiers->out.batches[i].event);
        device_event_destroy(tiers->device, tiers->in.batches[i].event);
    }
    for (int32_t i = 0; i < KV_TIERS_MAX_SLICES - 1; i++) {
        device_event_destroy(tiers->device, tiers->slice_events[i]);
    }
    device_event_destroy(tiers->device, tiers->timed_begin);
    kv_host_destroy(&tiers->host);
    free(tiers->sliced_moves);
    free(tiers->slots);
    free(tiers->unsaved_links.previous);
    free(tiers->unsaved_links.next);
    free(tiers->unsent_links.previous);
    free(tiers->unsent_links.next);
    free(tiers);
}

/* Gives the first num_copies blocks, cut at `ends`: one slice of all of them behind the other. */
static enum imbrex_status give_measured(struct kv_tiers *tiers, int32_t num_copies,
                                        const size_t *ends, int32_t num_slices)
{
    struct device_copy copies[NUM_MEASURED];
    for (int32_t slice = 0; slice < num_slices; slice++) {
        size_t begin = slice > 0 ? ends[slice - 1] : 0;
        for (int32_t i = 0; i < num_copies; i++) {
            copies[i] = (struct device_copy){
                .destination = tiers->blocks + (size_t)i * tiers->host.block_bytes + begin,
                .source = kv_host_block(&tiers->host, i) + begin,
                .num_bytes = ends[slice] - begin};
        }
        TRY(device_copy_batch_async(tiers->device, tiers->in.stream, copies, num_copies));
    }
    return IMBREX_STATUS_OK;
}

/* What is timed comes behind as much again, so that the stream has it before its turn comes. */
static enum imbrex_status measure(struct kv_tiers *tiers, int32_t num_blocks, const size_t *ends,
                                  int32_t num_slices, int64_t *block_ns, int32_t *num_measured)
{
    struct device_event *begin = tiers->timed_begin, *end = tiers->in.batches[0].event;
    int32_t num_copies = num_blocks < tiers->host.num_slots ? num_blocks : tiers->host.num_slots;
    num_copies = num_copies < NUM_MEASURED ? num_copies : NUM_MEASURED;
    int64_t best_ns = INT64_MAX;
    for (int32_t round = 0; round < 2; round++) {
        int64_t begin_ns = clock_now_ns(), elapsed_ns;
        TRY(give_measured(tiers, num_copies, ends, num_slices));
        TRY(device_event_record(tiers->device, begin, tiers->in.stream));
        TRY(give_measured(tiers, num_copies, ends, num_slices));
        TRY(device_event_record(tiers->device, end, tiers->in.stream));
        TRY(device_event_synchronize(tiers->device, end));
        int64_t round_ns = (clock_now_ns() - begin_ns) / 2;
        TRY(device_event_elapsed(tiers->device, begin, end, &elapsed_ns));
        round_ns = elapsed_ns > 0 ? elapsed_ns : round_ns; /* not all devices have a clock */
        best_ns = round_ns < best_ns ? round_ns : best_ns;
    }
    *block_ns = best_ns > num_copies ? best_ns / num_copies : 1;
    *num_measured = num_copies;
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_tiers_measure(struct kv_tiers *tiers, int32_t num_blocks, int64_t *block_ns)
{
    TRY(measure(tiers, num_blocks, &tiers->host.block_bytes, 1, block_ns, &tiers->num_learned));
    tiers->block_ns = (double)*block_ns;
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_tiers_measure_sliced(struct kv_tiers *tiers, int32_t num_blocks,
                                           int64_t *block_ns)
{
    int32_t num_measured;
    return measure(tiers, num_blocks, tiers->slice_ends, tiers->num_slices, block_ns,
                   &num_measured);
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
