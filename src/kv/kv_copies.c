/* SPDX-License-Identifier: Apache-2.0 */
#include "kv/kv_copies.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"

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
struct move {
    struct kv_copy copy;
    bool is_covered; /* see num_covered */
};

/* Copies that are told together. */
struct batch {
    struct move own_moves[MAX_MOVES];
    struct move *moves; /* [num_moves] those, or the copies' sliced_moves */
    struct device_event *event;
    int32_t num_moves;
    int32_t num_told; /* of the moves, those that take has given back */
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

struct kv_copies {
    struct device *device;
    unsigned char *blocks;
    const struct kv_host *host;
    struct direction out, in;
    struct move *sliced_moves; /* [KV_COPIES_MAX_SLICED] of the one batch in slices */
    bool has_sliced;           /* it is among the batches in */
    struct device_event
        *slice_events[KV_COPIES_MAX_SLICES - 1]; /* behind all slices but the last */
    size_t slice_ends[KV_COPIES_MAX_SLICES];     /* [num_slices] bytes in a block */
    int32_t num_slices;
    double block_ns;                  /* see kv_copies_block_ns; 0: not known */
    int32_t num_learned;              /* blocks that it stands for */
    struct device_event *timed_begin; /* before what is timed */
    const struct batch *timed;        /* the last of these batches in; NULL: nothing is timed */
    int32_t num_timed;                /* blocks */
    bool has_failed;                  /* the device no longer says what is done */
};

/* ---- batches --------------------------------------------------------------------------------- */

static struct batch *batch_at(struct direction *direction, int32_t idx)
{
    return &direction->batches[(direction->first + idx) % NUM_BATCHES];
}

/* Whether the oldest batch is done, waiting for it if it must. */
static bool is_oldest_done(struct kv_copies *copies, struct direction *direction, bool must_wait)
{
    struct batch *batch = batch_at(direction, 0);
    bool is_done = true;
    if (direction->num_batches == 0 || !batch->is_given) {
        return false;
    }
    if (batch->num_told > 0) {
        return true;
    }
    enum imbrex_status status = must_wait
                                    ? device_event_synchronize(copies->device, batch->event)
                                    : device_event_query(copies->device, batch->event, &is_done);
    batch->is_failed |= is_done && status != IMBREX_STATUS_OK;
    return is_done;
}

/* The next move of the oldest batch, which goes with its last one. */
static void tell(struct direction *direction, struct kv_copy *copy)
{
    struct batch *batch = batch_at(direction, 0);
    *copy = batch->moves[batch->num_told].copy;
    batch->num_told++;
    if (batch->num_told == batch->num_moves) {
        direction->first = (direction->first + 1) % NUM_BATCHES;
        direction->num_batches--;
    }
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

/* Whether open_batch has one. */
static bool can_add(const struct direction *direction)
{
    if (direction->num_batches < NUM_BATCHES) {
        return true;
    }
    const struct batch *last =
        &direction->batches[(direction->first + direction->num_batches - 1) % NUM_BATCHES];
    return !last->is_given && !last->is_sliced && last->num_moves < MAX_MOVES;
}

/* The batch that the next move goes into, which has one then; NULL: all are under way. */
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
static struct batch *open_sliced(struct kv_copies *copies)
{
    struct direction *in = &copies->in;
    if (copies->has_sliced) {
        struct batch *last = batch_at(in, in->num_batches - 1);
        bool is_open = last->is_sliced && !last->is_given && last->num_moves < KV_COPIES_MAX_SLICED;
        return is_open ? last : NULL;
    }
    if (!kv_copies_can_slice(copies)) {
        return NULL;
    }
    struct batch *batch = add_batch(in);
    batch->moves = copies->sliced_moves;
    batch->is_sliced = true;
    copies->has_sliced = true;
    return batch;
}

/* ---- what waits for what --------------------------------------------------------------------- */

/* What failed on the stream before was told by another batch's event. Where this cannot be said,
 * the batch fails with the one before. */
static void count_from_here(struct kv_copies *copies, const struct batch *batch,
                            enum device_stream stream)
{
    (void)device_event_record(copies->device, batch->event, stream);
}

/* Waits for a stream whose event could not be put where it was meant to be. */
static void drain(struct kv_copies *copies, const struct batch *batch, enum device_stream stream)
{
    if (device_event_record(copies->device, batch->event, stream) != IMBREX_STATUS_OK ||
        device_event_synchronize(copies->device, batch->event) == IMBREX_STATUS_DEVICE) {
        copies->has_failed = true;
    }
}

/* The last copies out that a step could write under; NULL: none, or only covered ones. */
static const struct batch *find_uncovered(struct kv_copies *copies)
{
    for (int32_t i = copies->out.num_batches - 1; i >= 0; i--) {
        const struct batch *batch = batch_at(&copies->out, i);
        if (batch->num_covered < batch->num_moves) {
            return batch;
        }
    }
    return NULL;
}

/* Gives bytes [begin, end) of the batch's blocks to the direction's stream. Copies that are refused
 * may be under way all the same: their slots and blocks are nobody else's before the batch is done.
 */
static void give_copies(struct kv_copies *copies, struct batch *batch,
                        const struct direction *direction, size_t begin, size_t end)
{
    struct device_copy given[MAX_MOVES];
    bool is_out = direction == &copies->out;
    for (int32_t next = 0; next < batch->num_moves && !batch->is_failed;) {
        int32_t num_copies = 0;
        for (; next < batch->num_moves && num_copies < MAX_MOVES; next++, num_copies++) {
            const struct move *move = &batch->moves[next];
            unsigned char *slot = kv_host_block(copies->host, move->copy.slot_idx) + begin;
            unsigned char *block =
                copies->blocks + (size_t)move->copy.block_idx * copies->host->block_bytes + begin;
            given[num_copies] = (struct device_copy){.destination = is_out ? slot : block,
                                                     .source = is_out ? block : slot,
                                                     .num_bytes = end - begin};
        }
        batch->is_failed = device_copy_batch_async(copies->device, direction->stream, given,
                                                   num_copies) != IMBREX_STATUS_OK;
    }
}

/* Gives the copies out that were asked for: the step's stream and the one of copies in go on behind
 * them only, the step's where it has to. Told again each time, as long as copies out are under way:
 * a stream on which something failed forgets what it was to wait for. */
static void fence_out(struct kv_copies *copies)
{
    struct device *device = copies->device;
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (copies->out.num_batches == 0) {
        return;
    }
    struct batch *batch = batch_at(&copies->out, copies->out.num_batches - 1);
    if (!batch->is_given) {
        batch->is_given = true;
        count_from_here(copies, batch, copies->out.stream);
        give_copies(copies, batch, &copies->out, 0, copies->host->block_bytes);
        status = device_event_record(device, batch->event, copies->out.stream);
    }
    const struct batch *uncovered = find_uncovered(copies);
    if (status == IMBREX_STATUS_OK && uncovered != NULL) {
        status = device_event_wait(device, uncovered->event, DEVICE_STREAM_STEP);
    }
    if (status != IMBREX_STATUS_OK ||
        device_event_wait(device, batch->event, copies->in.stream) != IMBREX_STATUS_OK) {
        drain(copies, batch, copies->out.stream);
        batch->is_failed = true;
    }
}

/* A copy in to the block is to come: behind the copy out from it, if one has just been given. */
static void cover_out(struct kv_copies *copies, int32_t block_idx)
{
    if (copies->out.num_batches == 0) {
        return;
    }
    struct batch *batch = batch_at(&copies->out, copies->out.num_batches - 1);
    for (int32_t i = batch->num_moves - 1; !batch->is_given && i >= 0; i--) {
        struct move *move = &batch->moves[i];
        if (move->copy.block_idx == block_idx && !move->is_covered) {
            move->is_covered = true;
            batch->num_covered++;
            return;
        }
    }
}

void kv_copies_uncover(struct kv_copies *copies, int32_t slot_idx)
{
    for (int32_t i = 0; i < copies->out.num_batches; i++) {
        struct batch *batch = batch_at(&copies->out, i);
        for (int32_t k = 0; k < batch->num_moves; k++) {
            struct move *move = &batch->moves[k];
            if (move->copy.slot_idx == slot_idx && move->is_covered) {
                move->is_covered = false;
                batch->num_covered -= batch->num_covered > 0;
            }
        }
    }
}

/* A copy in failed: blocks may come back to steps earlier than the copies out from them are done.
 */
static void uncover_out(struct kv_copies *copies)
{
    for (int32_t i = 0; i < copies->out.num_batches; i++) {
        batch_at(&copies->out, i)->num_covered = 0;
    }
}

/* ---- in: giving and timing ------------------------------------------------------------------- */

/* What was timed has come up. */
static void learn(struct kv_copies *copies)
{
    const struct batch *timed = copies->timed;
    int64_t elapsed_ns = 0;
    copies->timed = NULL;
    if (device_event_elapsed(copies->device, copies->timed_begin, timed->event, &elapsed_ns) !=
            IMBREX_STATUS_OK ||
        elapsed_ns <= 0) {
        return;
    }
    double seen_ns = (double)elapsed_ns / copies->num_timed;
    if (copies->num_learned > 0) {
        double max_ns = copies->block_ns * MAX_LEARNED_FACTOR;
        double min_ns = copies->block_ns / MAX_LEARNED_FACTOR;
        seen_ns = seen_ns > max_ns ? max_ns : seen_ns < min_ns ? min_ns : seen_ns;
    }
    int32_t num_learned = copies->num_learned + copies->num_timed;
    copies->num_learned = num_learned < MAX_LEARNED ? num_learned : MAX_LEARNED;
    double weight = (double)copies->num_timed / copies->num_learned;
    double max_weight = num_learned > MAX_LEARNED ? MAX_LEARNED_WEIGHT : 1;
    copies->block_ns += (seen_ns - copies->block_ns) * (weight < max_weight ? weight : max_weight);
}

int64_t kv_copies_block_ns(const struct kv_copies *copies)
{
    return copies->block_ns > 1 || copies->num_learned == 0 ? (int64_t)copies->block_ns : 1;
}

/* Where a slice is not given, or its event not recorded, whoever waits for it reads anything: poll
 * says that the batch has failed. */
static void give_batch(struct kv_copies *copies, struct batch *batch)
{
    int32_t num_slices = batch->is_sliced ? copies->num_slices : 1;
    size_t begin = 0;
    batch->is_given = true;
    count_from_here(copies, batch, copies->in.stream);
    for (int32_t i = 0; i < num_slices && !batch->is_failed; i++) {
        bool is_last = i == num_slices - 1;
        size_t end = is_last ? copies->host->block_bytes : copies->slice_ends[i];
        give_copies(copies, batch, &copies->in, begin, end);
        if (!is_last && device_event_record(copies->device, copies->slice_events[i],
                                            copies->in.stream) != IMBREX_STATUS_OK) {
            batch->is_failed = true;
        }
        begin = end;
    }
    if (device_event_record(copies->device, batch->event, copies->in.stream) != IMBREX_STATUS_OK) {
        drain(copies, batch, copies->in.stream);
        batch->is_failed = true;
    }
}

static void give_in(struct kv_copies *copies)
{
    const struct batch *last = NULL;
    bool is_timing = false;
    int32_t num_timed = 0;
    for (int32_t i = 0; i < copies->in.num_batches; i++) {
        struct batch *batch = batch_at(&copies->in, i);
        if (batch->is_given) {
            continue;
        }
        give_batch(copies, batch);
        if (is_timing) {
            last = batch;
            num_timed += batch->num_moves;
            is_timing = !batch->is_sliced && !batch->is_failed;
        } else if (last == NULL && copies->timed == NULL && !batch->is_sliced &&
                   batch->num_moves == MAX_MOVES) {
            is_timing = device_event_record(copies->device, copies->timed_begin,
                                            copies->in.stream) == IMBREX_STATUS_OK;
        }
    }
    if (is_timing && num_timed >= MIN_TIMED) {
        copies->timed = last;
        copies->num_timed = num_timed;
    }
}

/* ---- out: the interface ---------------------------------------------------------------------- */

bool kv_copies_make_room(struct kv_copies *copies)
{
    if (copies->out.num_batches > 0) {
        const struct batch *last = batch_at(&copies->out, copies->out.num_batches - 1);
        if (!last->is_given && last->num_moves == MAX_MOVES) {
            fence_out(copies);
        }
    }
    return can_add(&copies->out);
}

void kv_copies_add_out(struct kv_copies *copies, int32_t slot_idx, int32_t block_idx,
                       bool is_covered)
{
    struct batch *batch = open_batch(&copies->out);
    batch->moves[batch->num_moves] = (struct move){
        .copy = {.slot_idx = slot_idx, .block_idx = block_idx}, .is_covered = is_covered};
    batch->num_moves++;
    batch->num_covered += is_covered;
}

bool kv_copies_is_out_busy(const struct kv_copies *copies)
{
    return copies->out.num_batches > NUM_BATCHES / 2;
}

void kv_copies_start_out(struct kv_copies *copies)
{
    fence_out(copies);
}

bool kv_copies_take_out(struct kv_copies *copies, bool must_wait, struct kv_copy *copy,
                        bool *is_good)
{
    if (!is_oldest_done(copies, &copies->out, must_wait)) {
        return false;
    }
    *is_good = !batch_at(&copies->out, 0)->is_failed;
    tell(&copies->out, copy);
    return true;
}

/* ---- in: the interface ----------------------------------------------------------------------- */

bool kv_copies_can_add_in(const struct kv_copies *copies)
{
    return can_add(&copies->in);
}

/* batch: NULL: too many are under way. */
static bool add_in(struct kv_copies *copies, struct batch *batch, const struct kv_copy *copy)
{
    if (batch == NULL) {
        return false;
    }
    batch->moves[batch->num_moves] = (struct move){.copy = *copy};
    batch->num_moves++;
    cover_out(copies, copy->block_idx);
    return true;
}

bool kv_copies_add_in(struct kv_copies *copies, const struct kv_copy *copy)
{
    return add_in(copies, open_batch(&copies->in), copy);
}

void kv_copies_set_slices(struct kv_copies *copies, const size_t *ends, int32_t num_slices)
{
    assert(num_slices >= 1 && num_slices <= KV_COPIES_MAX_SLICES && !copies->has_sliced);
    assert(ends[num_slices - 1] == copies->host->block_bytes);
    memcpy(copies->slice_ends, ends, (size_t)num_slices * sizeof(*ends));
    copies->num_slices = num_slices;
}

bool kv_copies_add_sliced(struct kv_copies *copies, const struct kv_copy *copy)
{
    return add_in(copies, open_sliced(copies), copy);
}

bool kv_copies_can_slice(const struct kv_copies *copies)
{
    return copies->num_slices > 1 && !copies->has_sliced && copies->in.num_batches < NUM_BATCHES;
}

int32_t kv_copies_slice_events(struct kv_copies *copies,
                               struct device_event *events[KV_COPIES_MAX_SLICES])
{
    for (int32_t i = 0; i < copies->in.num_batches; i++) {
        const struct batch *batch = batch_at(&copies->in, i);
        if (batch->is_sliced && batch->is_given) {
            memcpy(events, copies->slice_events,
                   (size_t)(copies->num_slices - 1) * sizeof(struct device_event *));
            events[copies->num_slices - 1] = batch->event;
            return copies->num_slices;
        }
    }
    return 0;
}

bool kv_copies_take_in(struct kv_copies *copies, struct kv_copy *copy, bool *is_sliced,
                       bool *is_good)
{
    struct batch *batch = batch_at(&copies->in, 0);
    if (!is_oldest_done(copies, &copies->in, false)) {
        return false;
    }
    if (batch->num_told == 0 && batch->is_failed) {
        copies->timed = NULL;
        uncover_out(copies);
    }
    if (copies->timed == batch) {
        learn(copies);
    }
    *is_sliced = batch->is_sliced;
    *is_good = !batch->is_failed;
    copies->has_sliced &= !batch->is_sliced || batch->num_told + 1 < batch->num_moves;
    tell(&copies->in, copy);
    return true;
}

int32_t kv_copies_num_in(const struct kv_copies *copies)
{
    int32_t num_moves = 0;
    for (int32_t i = 0; i < copies->in.num_batches; i++) {
        const struct batch *batch = &copies->in.batches[(copies->in.first + i) % NUM_BATCHES];
        num_moves += batch->num_moves - batch->num_told;
    }
    return num_moves;
}

/* ---- both ------------------------------------------------------------------------------------ */

enum imbrex_status kv_copies_start(struct kv_copies *copies)
{
    fence_out(copies);
    give_in(copies);
    return copies->has_failed ? IMBREX_STATUS_DEVICE : IMBREX_STATUS_OK;
}

bool kv_copies_is_under_way(const struct kv_copies *copies, enum kv_direction direction)
{
    return (direction == KV_DIRECTION_OUT ? &copies->out : &copies->in)->num_batches > 0;
}

void kv_copies_wait(struct kv_copies *copies, enum kv_direction direction)
{
    const struct batch *batch =
        batch_at(direction == KV_DIRECTION_OUT ? &copies->out : &copies->in, 0);
    if (batch->is_given && !batch->is_failed) {
        (void)device_event_synchronize(copies->device, batch->event);
    }
}

/* ---- create and destroy ---------------------------------------------------------------------- */

/* Copies in are timed, up to the event of their last batch. */
static enum imbrex_status create_events(struct kv_copies *copies, struct direction *direction,
                                        enum device_stream stream, struct imbrex_error *err)
{
    direction->stream = stream;
    for (int32_t i = 0; i < NUM_BATCHES; i++) {
        struct device_event **event = &direction->batches[i].event;
        TRY(stream == DEVICE_STREAM_KV_IN ? device_event_create_timed(copies->device, event, err)
                                          : device_event_create(copies->device, event, err));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_copies_create(struct device *device, unsigned char *blocks,
                                    const struct kv_host *host, struct kv_copies **copies,
                                    struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_copies *created = calloc(1, sizeof(*created));
    if (created == NULL) {
        return error_out_of_memory(err, "the KV tiers' copies", sizeof(*created));
    }
    *created = (struct kv_copies){.device = device,
                                  .blocks = blocks,
                                  .host = host,
                                  .num_slices = 1,
                                  .sliced_moves =
                                      calloc(KV_COPIES_MAX_SLICED, sizeof(*created->sliced_moves))};
    if (created->sliced_moves == NULL) {
        status = error_out_of_memory(err, "the KV tiers' copies",
                                     KV_COPIES_MAX_SLICED * sizeof(*created->sliced_moves));
        goto fail;
    }
    TRY_OR_FAIL(create_events(created, &created->out, DEVICE_STREAM_KV_OUT, err));
    TRY_OR_FAIL(create_events(created, &created->in, DEVICE_STREAM_KV_IN, err));
    for (int32_t i = 0; i < KV_COPIES_MAX_SLICES - 1; i++) {
        TRY_OR_FAIL(device_event_create(device, &created->slice_events[i], err));
    }
    TRY_OR_FAIL(device_event_create_timed(device, &created->timed_begin, err));
    *copies = created;
    return IMBREX_STATUS_OK;
fail:
    kv_copies_destroy(created);
    return status;
}

void kv_copies_destroy(struct kv_copies *copies)
{
    if (copies == NULL) {
        return;
    }
    if (copies->out.num_batches > 0 || copies->in.num_batches > 0) {
        (void)kv_copies_start(copies);
    }
    /* The step's stream was told to wait for copies out: nothing may be left there either. */
    const enum device_stream streams[] = {DEVICE_STREAM_KV_OUT, DEVICE_STREAM_KV_IN,
                                          DEVICE_STREAM_STEP};
    struct device_event *last = copies->in.batches[NUM_BATCHES - 1].event;
    for (size_t i = 0; last != NULL && i < sizeof(streams) / sizeof(streams[0]); i++) {
        if (device_event_record(copies->device, last, streams[i]) == IMBREX_STATUS_OK) {
            (void)device_event_synchronize(copies->device, last);
        }
    }
    for (int32_t i = 0; i < NUM_BATCHES; i++) {
        device_event_destroy(copies->device, copies->out.batches[i].event);
        device_event_destroy(copies->device, copies->in.batches[i].event);
    }
    for (int32_t i = 0; i < KV_COPIES_MAX_SLICES - 1; i++) {
        device_event_destroy(copies->device, copies->slice_events[i]);
    }
    device_event_destroy(copies->device, copies->timed_begin);
    free(copies->sliced_moves);
    free(copies);
}

/* ---- measuring ------------------------------------------------------------------------------- */

/* Gives the first num_copies blocks, cut at `ends`: one slice of all of them behind the other. */
static enum imbrex_status give_measured(struct kv_copies *copies, int32_t num_copies,
                                        const size_t *ends, int32_t num_slices)
{
    struct device_copy given[NUM_MEASURED];
    for (int32_t slice = 0; slice < num_slices; slice++) {
        size_t begin = slice > 0 ? ends[slice - 1] : 0;
        for (int32_t i = 0; i < num_copies; i++) {
            given[i] = (struct device_copy){
                .destination = copies->blocks + (size_t)i * copies->host->block_bytes + begin,
                .source = kv_host_block(copies->host, i) + begin,
                .num_bytes = ends[slice] - begin};
        }
        TRY(device_copy_batch_async(copies->device, copies->in.stream, given, num_copies));
    }
    return IMBREX_STATUS_OK;
}

/* What is timed comes behind as much again, so that the stream has it before its turn comes. */
static enum imbrex_status measure(struct kv_copies *copies, int32_t num_blocks, const size_t *ends,
                                  int32_t num_slices, int64_t *block_ns, int32_t *num_measured)
{
    struct device_event *begin = copies->timed_begin, *end = copies->in.batches[0].event;
    int32_t num_copies =
        num_blocks < copies->host->num_slots ? num_blocks : copies->host->num_slots;
    num_copies = num_copies < NUM_MEASURED ? num_copies : NUM_MEASURED;
    int64_t best_ns = INT64_MAX;
    for (int32_t round = 0; round < 2; round++) {
        int64_t begin_ns = clock_now_ns(), elapsed_ns;
        TRY(give_measured(copies, num_copies, ends, num_slices));
        TRY(device_event_record(copies->device, begin, copies->in.stream));
        TRY(give_measured(copies, num_copies, ends, num_slices));
        TRY(device_event_record(copies->device, end, copies->in.stream));
        TRY(device_event_synchronize(copies->device, end));
        int64_t round_ns = (clock_now_ns() - begin_ns) / 2;
        TRY(device_event_elapsed(copies->device, begin, end, &elapsed_ns));
        round_ns = elapsed_ns > 0 ? elapsed_ns : round_ns; /* not all devices have a clock */
        best_ns = round_ns < best_ns ? round_ns : best_ns;
    }
    *block_ns = best_ns > num_copies ? best_ns / num_copies : 1;
    *num_measured = num_copies;
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_copies_measure(struct kv_copies *copies, int32_t num_blocks,
                                     int64_t *block_ns)
{
    TRY(measure(copies, num_blocks, &copies->host->block_bytes, 1, block_ns, &copies->num_learned));
    copies->block_ns = (double)*block_ns;
    return IMBREX_STATUS_OK;
}

enum imbrex_status kv_copies_measure_sliced(struct kv_copies *copies, int32_t num_blocks,
                                            int64_t *block_ns)
{
    int32_t num_measured;
    return measure(copies, num_blocks, copies->slice_ends, copies->num_slices, block_ns,
                   &num_measured);
}
