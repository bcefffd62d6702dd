/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix_tiers.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/file.h"
#include "engine/request.h"
#include "kv/kv_tiers_faults.h"

/* Of the queue, what one look sees: those that may run soon. */
#define MAX_REQUESTS 16
#define MAX_LOOKUPS 8192           /* of keys in one look */
#define MAX_KNOWN_BLOCKS (1 << 16) /* below the first tier, that can be predicted; 11 MiB */
/* Until a step has been measured: a guess on the slow side, since a disk is faster than most
 * machines compute, and the first requests after a restart are those that a disk is for. */
#define UNKNOWN_TOKEN_NS INT64_C(1000000)
#define WAIT_NS INT64_C(1000000)
/* More groups begin sooner, but each copy takes the host its time, and small ones lose rate. Of 1,
 * 2, 4 and 8 groups these are the best on an H200: four of 224 KiB of a block, two of 96 KiB
 * (bench_kv_layers). */
#define MAX_GROUPS 4
#define MIN_SLICE_BYTES ((size_t)96 << 10)
#define MIN_SECRET_BYTES 32
#define MAX_SECRET_BYTES 4096

static int32_t min_int32(int32_t a, int32_t b)
{
    return a < b ? a : b;
}

/* ---- create and destroy ---------------------------------------------------------------------- */

/* One of a file's contents, or of nothing. */
static enum imbrex_status read_shared_secret(const char *path, unsigned char secret[32],
                                             struct imbrex_error *err)
{
    const struct kv_identity identity = {.model_id = "secret of a remote tier", .layout = ""};
    struct file file = {0};
    struct kv_hasher *hasher;
    struct kv_key digest;
    enum imbrex_status status = IMBREX_STATUS_OK;
    TRY(kv_hasher_create(&hasher, err));
    if (path != NULL) {
        struct imbrex_error reason;
        status = file_read(path, MAX_SECRET_BYTES, &file, &reason);
        if (status != IMBREX_STATUS_OK) {
            (void)error_set_field(err, status, "kv_remote_secret_path", ": %s", reason.message);
            goto fail;
        }
        if (file.num_bytes < MIN_SECRET_BYTES) {
            status = error_set_field(err, IMBREX_STATUS_INVALID_ARGUMENT, "kv_remote_secret_path",
                                     ": %.180s: expected %d bytes at least, found %zu", path,
                                     MIN_SECRET_BYTES, file.num_bytes);
            goto fail;
        }
    }
    kv_hasher_root(hasher, &identity, file.bytes, file.num_bytes, &digest);
    memcpy(secret, digest.words, sizeof(digest.words));
fail:
    file_close(&file);
    kv_hasher_destroy(hasher);
    return status;
}

enum imbrex_status prefix_tiers_prepare(const struct prefix_tiers_options *options,
                                        struct prefix_tiers *tiers, struct imbrex_error *err)
{
    struct prefix_tiers prepared = {.folder = {.lock_fd = -1}};
    size_t count = (size_t)options->num_blocks;
    prepared.origins = calloc(count, sizeof(*prepared.origins));
    if (prepared.origins == NULL) {
        return error_out_of_memory(err, "the KV tiers", count * sizeof(*prepared.origins));
    }
    enum imbrex_status status = IMBREX_STATUS_OK;
    if (options->remote_url != NULL) {
        TRY_OR_FAIL(read_shared_secret(options->remote_secret_path, prepared.shared_secret, err));
    }
    if (options->disk_path != NULL) {
        struct imbrex_error reason;
        status = kv_folder_open(options->disk_path, &prepared.folder, &reason);
        if (status != IMBREX_STATUS_OK) {
            (void)error_set_field(err, status, "kv_disk_path", ": %s", reason.message);
            goto fail;
        }
        if (prepared.folder.replaced_bytes >= 0) {
            log_write(options->log, IMBREX_LOG_LEVEL_WARNING,
                      "KV folder %s: imbrex-kv.secret: expected 32 bytes, found %" PRId64
                      ": a new one was made, and blocks that were kept under the old one are not "
                      "found any more",
                      prepared.folder.path, prepared.folder.replaced_bytes);
        }
    }
    *tiers = prepared;
    return IMBREX_STATUS_OK;
fail:
    free(prepared.origins);
    return status;
}

const unsigned char *prefix_tiers_secret(const struct prefix_tiers *tiers,
                                         const struct prefix_tiers_options *options)
{
    if (options->remote_url != NULL) {
        return tiers->shared_secret;
    }
    return options->disk_path != NULL ? tiers->folder.secret : NULL;
}

/* A key for one use that tells nothing of the root that the blocks' keys begin with. */
static struct kv_key derive_key(const struct prefix_cache *cache, const char *use)
{
    struct kv_identity identity = cache->identity;
    struct kv_key key;
    identity.model_id = use;
    kv_hasher_root(cache->hasher, &identity, NULL, 0, &key);
    return key;
}

static enum imbrex_status create_prefetch(const struct prefix_tiers_options *options,
                                          struct prefix_cache *cache, struct prefix_tiers *tiers,
                                          struct imbrex_error *err)
{
    const struct kv_policy_functions *policy = kv_cache_policy(cache->cache)->functions;
    if (options->prefetch_percent == 0 || policy->predict == NULL || policy->value == NULL) {
        return IMBREX_STATUS_OK;
    }
    return prefix_prefetch_create(
        &(struct prefix_prefetch_options){.num_blocks = options->num_blocks,
                                          .max_known = MAX_KNOWN_BLOCKS,
                                          .block_ns = tiers->block_ns,
                                          .percent = options->prefetch_percent},
        cache, tiers->tiers, &tiers->prefetch, err);
}

void prefix_tiers_set_groups(struct prefix_tiers *tiers, const struct kv_view *kv,
                             int32_t num_groups)
{
    size_t ends[KV_TIERS_MAX_SLICES];
    num_groups = min_int32(min_int32(num_groups, kv->num_layers), KV_TIERS_MAX_SLICES);
    tiers->num_groups = num_groups > 1 ? num_groups : 1;
    tiers->sliced_block_ns = tiers->block_ns;
    for (int32_t i = 0; i < tiers->num_groups; i++) {
        tiers->first_layers[i] = i * kv->num_layers / tiers->num_groups;
        if (i > 0) {
            ends[i - 1] = kv_view_layer_offset(kv, tiers->first_layers[i]);
        }
    }
    ends[tiers->num_groups - 1] = kv->block_bytes;
    kv_tiers_set_slices(tiers->tiers, ends, tiers->num_groups);
}

/* On a device that does nothing meanwhile there is one group. */
static enum imbrex_status create_groups(const struct prefix_tiers_options *options,
                                        struct prefix_tiers *tiers)
{
    size_t max_groups = options->kv->block_bytes / MIN_SLICE_BYTES;
    if (!device_is_async(options->device)) {
        max_groups = 1;
    }
    prefix_tiers_set_groups(tiers, options->kv,
                            max_groups < MAX_GROUPS ? (int32_t)max_groups : MAX_GROUPS);
    if (tiers->num_groups > 1) {
        TRY(kv_tiers_measure_sliced(tiers->tiers, options->num_blocks, &tiers->sliced_block_ns));
    }
    return IMBREX_STATUS_OK;
}

enum imbrex_status prefix_tiers_create(const struct prefix_tiers_options *options,
                                       struct prefix_cache *cache, struct prefix_tiers *tiers,
                                       struct imbrex_error *err)
{
    struct kv_disk_options disk = {
        .folder = &tiers->folder,
        .block_bytes = options->kv->block_bytes,
        .max_bytes = options->disk_bytes,
        .zstd_level = options->disk_zstd_level,
    };
    kv_hasher_root(cache->hasher, &cache->identity, NULL, 0, &disk.owner);
    struct kv_remote_url url;
    struct kv_key mac_key = derive_key(cache, "MAC of remote values");
    const struct kv_remote_options remote = {
        .url = &url,
        .owner = derive_key(cache, "owner of remote values"),
        .secret = options->remote_secret_path != NULL ? (const unsigned char *)mac_key.words : NULL,
        .block_bytes = options->kv->block_bytes,
    };
    if (options->remote_url != NULL) {
        TRY(kv_remote_read_url(options->remote_url, &url, err));
    }
    TRY(kv_tiers_create(
        &(struct kv_tiers_options){.device = options->device,
                                   .blocks = options->kv->blocks,
                                   .block_bytes = options->kv->block_bytes,
                                   .host_bytes = options->host_bytes,
                                   .disk = options->disk_path != NULL ? &disk : NULL,
                                   .remote = options->remote_url != NULL ? &remote : NULL,
                                   .log = options->log},
        &tiers->tiers, err));
    TRY(kv_tiers_measure(tiers->tiers, options->num_blocks, &tiers->block_ns));
    TRY(create_groups(options, tiers));
    TRY(create_prefetch(options, cache, tiers, err));
    if (options->writes_through && (options->disk_path != NULL || options->remote_url != NULL)) {
        TRY(prefix_write_create(cache, tiers->tiers, options->num_blocks, tiers->block_ns,
                                &tiers->write, err));
    }
    tiers->cache = cache;
    cache->tiers = tiers;
    return IMBREX_STATUS_OK;
}

static void take_promotions(struct prefix_tiers *tiers, struct scheduler *scheduler);

void prefix_tiers_destroy(struct prefix_tiers *tiers, bool keeps)
{
    if (tiers->tiers != NULL) {
        assert(tiers->arrival.sequence == NULL);
        while (prefix_tiers_start(tiers) == IMBREX_STATUS_OK &&
               kv_tiers_is_promoting(tiers->tiers)) {
            kv_tiers_wait(tiers->tiers, WAIT_NS);
            take_promotions(tiers, NULL);
        }
        if (keeps) {
            kv_tiers_begin_flush(tiers->tiers);
            kv_cache_clear(tiers->cache->cache, tiers->cache->now_ns);
            kv_tiers_end_flush(tiers->tiers);
        }
        tiers->cache->tiers = NULL;
    }
    prefix_prefetch_destroy(tiers->prefetch);
    prefix_write_destroy(tiers->write);
    kv_tiers_destroy(tiers->tiers);
    if (tiers->folder.path != NULL) {
        kv_folder_close(&tiers->folder);
    }
    free(tiers->origins);
    *tiers = (struct prefix_tiers){0};
}

/* ---- down ------------------------------------------------------------------------------------ */

void prefix_tiers_forget(void *user, const struct kv_key *key, const int32_t *token_ids,
                         int32_t block_idx)
{
    struct prefix_tiers *tiers = user;
    if (tiers->tiers != NULL) {
        tiers->origins[block_idx] = KV_TIER_NONE;
        prefix_prefetch_forget(tiers->prefetch, key, token_ids, block_idx);
        prefix_write_forget(tiers->write, block_idx);
        kv_tiers_demote(tiers->tiers, key, token_ids, block_idx);
    }
}

void prefix_tiers_insert(struct prefix_tiers *tiers, int32_t block_idx)
{
    prefix_write_add(tiers->write, block_idx);
}

void prefix_tiers_write(struct prefix_tiers *tiers)
{
    prefix_write_look(tiers->write);
}

int64_t prefix_tiers_due_ns(const struct prefix_tiers *tiers)
{
    int64_t prefetch_ns = prefix_prefetch_due_ns(tiers->prefetch);
    int64_t write_ns = prefix_write_due_ns(tiers->write);
    return prefetch_ns < write_ns ? prefetch_ns : write_ns;
}

enum imbrex_status prefix_tiers_start(struct prefix_tiers *tiers)
{
    return kv_tiers_start(tiers->tiers);
}

/* ---- up -------------------------------------------------------------------------------------- */

/* What has been copied becomes an idle block of the cache; what has not, or is there by now, a free
 * one. */
static void take_promotion(struct prefix_tiers *tiers, const struct kv_promotion *promotion)
{
    struct prefix_cache *cache = tiers->cache;
    int32_t block_idx = promotion->block_idx;
    kv_pool_retain(cache->pool, block_idx);
    bool is_kept = promotion->is_good &&
                   kv_cache_promote(cache->cache, &promotion->key,
                                    promotion->has_parent ? &promotion->parent_key : NULL,
                                    promotion->token_ids, block_idx, cache->now_ns);
    prefix_prefetch_promoted(tiers->prefetch, &promotion->key, block_idx, is_kept);
    if (is_kept) {
        tiers->origins[block_idx] = promotion->from;
        if (promotion->from == KV_TIER_DISK) {
            prefix_write_add(tiers->write, block_idx); /* the server may not have it */
        }
    } else {
        kv_pool_release(cache->pool, block_idx);
    }
}

static void count_tokens(struct prefix_tiers *tiers, const int32_t num_tokens[KV_NUM_TIERS],
                         struct imbrex_request_metrics *metrics)
{
    struct metrics *totals = tiers->cache->metrics;
    metrics->num_host_tokens += num_tokens[KV_TIER_HOST];
    metrics->num_disk_tokens += num_tokens[KV_TIER_DISK];
    metrics->num_remote_tokens += num_tokens[KV_TIER_REMOTE];
    metrics_add(&totals->num_host_tokens, (uint64_t)num_tokens[KV_TIER_HOST]);
    metrics_add(&totals->num_disk_tokens, (uint64_t)num_tokens[KV_TIER_DISK]);
    metrics_add(&totals->num_remote_tokens, (uint64_t)num_tokens[KV_TIER_REMOTE]);
}

/* A block of the request that runs already. What the cache cannot take now, since somebody else's
 * block of that key came first, or one before it did, prefix_insert sees to. */
static void take_arrival(struct prefix_tiers *tiers, struct scheduler *scheduler,
                         const struct kv_promotion *promotion)
{
    struct prefix_arrival *arrival = &tiers->arrival;
    struct sequence *sequence = arrival->sequence;
    struct request_prefix *prefix = prefix_of(sequence);
    struct prefix_cache *cache = tiers->cache;
    int32_t i = arrival->next_block++;
    if (!promotion->is_good) {
        if (!sequence->is_spoilt) {
            prefix->was_spoilt = true;
            scheduler_restart(scheduler, sequence, arrival->num_tokens, arrival->score_begin);
        }
        return;
    }
    if (prefix->kv.num_blocks == i) {
        (void)kv_cache_promote_for(cache->cache, &prefix->kv, &prefix->keys[i],
                                   promotion->token_ids, promotion->block_idx,
                                   arrival->metrics == NULL, cache->now_ns);
    }
    if (arrival->metrics != NULL) {
        int32_t num_tokens[KV_NUM_TIERS] = {0};
        num_tokens[promotion->from] = KV_BLOCK_SIZE;
        count_tokens(tiers, num_tokens, arrival->metrics);
        arrival->metrics->num_cached_tokens += KV_BLOCK_SIZE;
        metrics_add(&cache->metrics->num_cached_tokens, KV_BLOCK_SIZE);
    }
}

static void take_promotions(struct prefix_tiers *tiers, struct scheduler *scheduler)
{
    struct prefix_arrival *arrival = &tiers->arrival;
    struct kv_promotion promotion;
    while (kv_tiers_poll(tiers->tiers, &promotion)) {
        if (promotion.is_sliced && arrival->sequence != NULL) {
            take_arrival(tiers, scheduler, &promotion);
        } else {
            take_promotion(tiers, &promotion);
        }
        kv_pool_unpin(tiers->cache->pool, promotion.block_idx);
        arrival->num_left -= promotion.is_sliced;
        if (arrival->num_left == 0) {
            arrival->sequence = NULL;
        }
    }
}

/* A block for what comes up, pinned, with no user: nobody waits for it before the request, nor the
 * request itself. False: there is none. */
static bool take_block(struct prefix_cache *cache, const struct kv_request *kv, int32_t *block_idx)
{
    struct kv_pool *pool = cache->pool;
    if (pool->num_free == 0) {
        int32_t victim = kv_cache_next_victim(cache->cache, cache->now_ns);
        if (victim == -1 || kv_cache_wanted(cache->cache, victim) <= kv->order) {
            return false;
        }
    }
    if (kv_pool_acquire(pool, block_idx) != IMBREX_STATUS_OK) {
        return false;
    }
    kv_pool_pin(pool, *block_idx);
    kv_pool_release(pool, *block_idx);
    return true;
}

static bool promote(struct prefix_tiers *tiers, const struct request_prefix *prefix,
                    int32_t key_idx)
{
    struct kv_pool *pool = tiers->cache->pool;
    int32_t block_idx;
    if (!kv_tiers_can_promote(tiers->tiers) || !take_block(tiers->cache, &prefix->kv, &block_idx)) {
        return false;
    }
    if (!kv_tiers_promote(tiers->tiers, &prefix->keys[key_idx],
                          key_idx > 0 ? &prefix->keys[key_idx - 1] : NULL,
                          prefix->token_ids + (size_t)key_idx * KV_BLOCK_SIZE, block_idx)) {
        kv_pool_unpin(pool, block_idx);
        return false;
    }
    return true;
}

/* Whether the blocks of the head of the queue may come up while it runs: it has room now, all that
 * the tiers have for it lies in RAM, and whoever else is in the step waits for no longer than its
 * chunk takes to compute, or there is nobody. What is under way already comes up first. */
static bool can_start_in_layers(struct prefix_tiers *tiers, const struct scheduler *scheduler,
                                const struct sequence *sequence, int32_t num_resident,
                                int32_t max_blocks)
{
    const struct request_prefix *prefix = prefix_of(sequence);
    int32_t i = num_resident;
    if (!kv_tiers_can_slice(tiers->tiers) || tiers->arrival.num_left > 0 || prefix->was_spoilt ||
        !scheduler_has_room(scheduler, sequence)) {
        return false;
    }
    for (; i < max_blocks; i++) {
        enum kv_place place = kv_tiers_look(tiers->tiers, &prefix->keys[i],
                                            prefix->token_ids + (size_t)i * KV_BLOCK_SIZE);
        if (place == KV_PLACE_NONE) {
            break;
        }
        if (place != KV_PLACE_HOST) {
            return false;
        }
    }
    if (i == num_resident || i - num_resident > KV_TIERS_MAX_SLICED) {
        return false;
    }
    if (scheduler->num_running == 0 && scheduler->num_waiting == 1) {
        return true;
    }
    int64_t load_ns = tiers->block_ns * kv_tiers_num_promoting(tiers->tiers) +
                      tiers->sliced_block_ns * (i - num_resident);
    int32_t num_tokens = min_int32(sequence_num_wanted(sequence) - i * KV_BLOCK_SIZE,
                                   scheduler->options.max_step_tokens - scheduler->num_running);
    int64_t max_ns =
        tiers->max_layered_ns > 0 ? tiers->max_layered_ns : tiers->token_ns * num_tokens;
    return load_ns <= max_ns;
}

/* Looks for the blocks of one request that the cache does not have. Returns how many of them are
 * below it; *is_loading: the first one is on its way. may_promote: else what is in RAM stays there
 * for now, and counts as on its way. */
static int32_t look_for(struct prefix_tiers *tiers, const struct request_prefix *prefix,
                        int32_t num_resident, int32_t max_blocks, bool may_promote,
                        bool *is_loading)
{
    /* A block can be promoted behind one that is there, or will be. */
    bool is_chained = may_promote;
    int32_t i = num_resident;
    *is_loading = false;
    for (; i < max_blocks; i++) {
        const struct kv_key *key = &prefix->keys[i];
        const int32_t *token_ids = prefix->token_ids + (size_t)i * KV_BLOCK_SIZE;
        bool is_coming = true;
        switch (kv_tiers_look(tiers->tiers, key, token_ids)) {
        case KV_PLACE_NONE:
            return i - num_resident;
        case KV_PLACE_ASKED:
            is_chained = false;
            break;
        case KV_PLACE_REMOTE:
        case KV_PLACE_DISK:
            is_coming =
                kv_tiers_fetch(tiers->tiers, key, token_ids) || kv_tiers_is_moving(tiers->tiers);
            is_chained = false;
            break;
        case KV_PLACE_COMING:
            is_chained = false;
            break;
        case KV_PLACE_HOST:
            is_chained = is_chained && promote(tiers, prefix, i);
            is_coming = is_chained || !may_promote;
            break;
        case KV_PLACE_MOVING:
            break;
        }
        *is_loading |= i == num_resident && is_coming;
    }
    return i - num_resident;
}

/* From the first time on that a block is on its way, the request waits as long as computing all
 * that is below would take. */
static void hold(const struct prefix_tiers *tiers, struct request_prefix *prefix, int32_t num_below)
{
    int64_t now_ns = tiers->cache->now_ns;
    int64_t token_ns = tiers->token_ns > 0 ? tiers->token_ns : UNKNOWN_TOKEN_NS;
    int64_t patience_ns = tiers->patience_ns;
    if (prefix->held_until_ns != 0) {
        return;
    }
    if (patience_ns == 0) {
        patience_ns = token_ns * KV_BLOCK_SIZE * num_below;
    }
    prefix->held_until_ns = patience_ns > INT64_MAX - now_ns ? INT64_MAX : now_ns + patience_ns;
}

static void look_once(struct prefix_tiers *tiers, const struct scheduler *scheduler)
{
    struct kv_cache *cache = tiers->cache->cache;
    int32_t num_requests = 0;
    int64_t num_lookups = 0;
    bool is_loading = false, may_promote = true;
    kv_tiers_begin_look(tiers->tiers);
    for (const struct sequence *sequence = scheduler->first_waiting; sequence != NULL;
         sequence = sequence->next) {
        struct request_prefix *prefix = prefix_of(sequence);
        if (prefix == NULL || !prefix->is_known || sequence->is_preempted) {
            continue;
        }
        int32_t max_blocks = sequence_max_cached(sequence) / KV_BLOCK_SIZE;
        if (num_requests == MAX_REQUESTS || num_lookups > MAX_LOOKUPS) {
            break;
        }
        max_blocks = max_blocks < prefix->kv.num_keys ? max_blocks : prefix->kv.num_keys;
        num_requests++;
        num_lookups += max_blocks;
        prefix->is_loading = false;
        int32_t num_resident = kv_cache_match(cache, &prefix->kv, max_blocks);
        prefix->starts_in_layers =
            sequence == scheduler->first_waiting && num_resident < max_blocks &&
            can_start_in_layers(tiers, scheduler, sequence, num_resident, max_blocks);
        if (prefix->starts_in_layers) {
            /* What it needs comes up first. */
            may_promote = false;
            is_loading = true;
        } else if (num_resident < max_blocks) {
            int32_t num_below =
                look_for(tiers, prefix, num_resident, max_blocks, may_promote, &prefix->is_loading);
            if (prefix->is_loading) {
                hold(tiers, prefix, num_below);
                is_loading = true;
            }
        }
    }
    if (!is_loading) {
        prefix_prefetch_look(tiers->prefetch);
    }
    kv_tiers_end_look(tiers->tiers);
}

void prefix_tiers_look(struct prefix_tiers *tiers, struct scheduler *scheduler)
{
    kv_tiers_update(tiers->tiers, tiers->cache->now_ns);
    take_promotions(tiers, scheduler);
    int64_t block_ns = kv_tiers_block_ns(tiers->tiers);
    tiers->block_ns = block_ns > 0 ? block_ns : tiers->block_ns;
    if (scheduler->first_waiting == NULL && tiers->prefetch == NULL &&
        !kv_tiers_is_moving(tiers->tiers)) {
        return;
    }
    /* Where copies are done at once, more than fit one batch come up in one look. */
    bool was_promoting;
    do {
        look_once(tiers, scheduler);
        was_promoting = kv_tiers_is_promoting(tiers->tiers);
        if (kv_tiers_start(tiers->tiers) != IMBREX_STATUS_OK) {
            return;
        }
        take_promotions(tiers, scheduler);
    } while (was_promoting && !kv_tiers_is_promoting(tiers->tiers));
}

bool prefix_tiers_is_moving(const struct prefix_tiers *tiers)
{
    return kv_tiers_is_moving(tiers->tiers);
}

void prefix_tiers_wait(struct prefix_tiers *tiers)
{
    kv_tiers_wait(tiers->tiers, WAIT_NS);
}

/* ---- what came of it ------------------------------------------------------------------------- */

bool prefix_tiers_is_held(struct prefix_tiers *tiers, const struct request_prefix *prefix)
{
    int64_t now_ns = tiers->cache->now_ns;
    bool is_held =
        prefix != NULL && prefix->is_known && prefix->is_loading && now_ns < prefix->held_until_ns;
    if (is_held && tiers->held_since_ns == 0) {
        tiers->held_since_ns = now_ns;
    } else if (!is_held && tiers->held_since_ns != 0) {
        metrics_add(&tiers->cache->metrics->kv_wait_ns, (uint64_t)(now_ns - tiers->held_since_ns));
        tiers->held_since_ns = 0;
    }
    return is_held;
}

/* A block for the request's next key, which lies in RAM, and the copy into it. False: it does not
 * lie there any more, or cannot come up. */
static bool begin_arrival(struct prefix_tiers *tiers, const struct request_prefix *prefix,
                          int32_t key_idx, int32_t *block_idx)
{
    struct kv_pool *pool = tiers->cache->pool;
    const struct kv_key *key = &prefix->keys[key_idx];
    const int32_t *token_ids = prefix->token_ids + (size_t)key_idx * KV_BLOCK_SIZE;
    if (kv_tiers_look(tiers->tiers, key, token_ids) != KV_PLACE_HOST ||
        kv_pool_acquire(pool, block_idx) != IMBREX_STATUS_OK) {
        return false;
    }
    if (!kv_tiers_promote_sliced(tiers->tiers, key, key_idx > 0 ? &prefix->keys[key_idx - 1] : NULL,
                                 token_ids, *block_idx)) {
        kv_pool_release(pool, *block_idx);
        return false;
    }
    kv_pool_pin(pool, *block_idx);
    return true;
}

static int32_t start_in_layers(struct prefix_tiers *tiers, struct sequence *sequence,
                               struct imbrex_request_metrics *metrics, int32_t max_blocks,
                               int32_t *table)
{
    const struct request_prefix *prefix = prefix_of(sequence);
    int32_t num_resident = prefix->kv.num_blocks, i = num_resident;
    max_blocks = min_int32(max_blocks, prefix->kv.num_keys);
    while (i < max_blocks && begin_arrival(tiers, prefix, i, &table[i])) {
        i++;
    }
    if (i > num_resident) {
        tiers->arrival = (struct prefix_arrival){
            .sequence = sequence,
            .metrics = metrics,
            .next_block = num_resident,
            .num_left = i - num_resident,
            .num_tokens = sequence->num_tokens,
            .score_begin = sequence->score_begin,
        };
        metrics_add(&tiers->cache->metrics->num_kv_layered, 1);
    }
    return i - num_resident;
}

int32_t prefix_tiers_admit(struct prefix_tiers *tiers, struct sequence *sequence,
                           struct imbrex_request_metrics *metrics, int32_t max_blocks,
                           int32_t *table)
{
    struct request_prefix *prefix = prefix_of(sequence);
    int32_t num_tokens[KV_NUM_TIERS] = {0};
    int32_t num_arriving = 0;
    for (int32_t i = 0; i < prefix->kv.num_blocks; i++) {
        enum kv_tier *origin = &tiers->origins[prefix->blocks[i]];
        num_tokens[*origin] += KV_BLOCK_SIZE;
        *origin = KV_TIER_NONE;
        prefix_prefetch_used(tiers->prefetch, prefix->blocks[i]);
    }
    if (metrics != NULL) {
        count_tokens(tiers, num_tokens, metrics);
    }
    if (prefix->starts_in_layers && tiers->arrival.num_left == 0) {
        num_arriving = start_in_layers(tiers, sequence, metrics, max_blocks, table);
    }
    prefix->starts_in_layers = false;
    prefix->is_loading = false;
    return num_arriving;
}

void prefix_tiers_finish(struct prefix_tiers *tiers, const struct sequence *sequence)
{
    if (tiers->arrival.sequence == sequence) {
        tiers->arrival.sequence = NULL;
    }
}

void prefix_tiers_take_waits(struct prefix_tiers *tiers, struct executor_waits *waits)
{
    struct prefix_arrival *arrival = &tiers->arrival;
    waits->num_waits = 0;
    if (arrival->sequence != NULL && !arrival->is_waited_for) {
        static_assert(KV_TIERS_MAX_SLICES <= EXECUTOR_MAX_WAITS, "a wait for each group");
        waits->num_waits = kv_tiers_slice_events(tiers->tiers, waits->events);
        memcpy(waits->first_layers, tiers->first_layers, sizeof(tiers->first_layers));
        arrival->is_waited_for = true;
    }
}

void prefix_tiers_collect(struct prefix_tiers *tiers, struct scheduler *scheduler,
                          const struct step_plan *plan)
{
    const struct prefix_arrival *arrival = &tiers->arrival;
    bool is_in_step = false;
    if (arrival->sequence == NULL) {
        return;
    }
    for (int32_t i = 0; i < plan->num_rows; i++) {
        is_in_step |= plan->rows[i].sequence == arrival->sequence;
    }
    take_promotions(tiers, scheduler);
    /* The step waited for them, so they are done. */
    while (is_in_step && arrival->num_left > 0) {
        kv_tiers_wait(tiers->tiers, WAIT_NS);
        take_promotions(tiers, scheduler);
    }
}

void prefix_tiers_step_failed(struct prefix_tiers *tiers)
{
    tiers->arrival.is_waited_for = false;
}

void prefix_tiers_observe_step(struct prefix_tiers *tiers, int32_t num_tokens, int64_t step_ns)
{
    /* Of a few tokens, the time is that of reading the weights. */
    if (num_tokens >= KV_BLOCK_SIZE && step_ns > 0) {
        int64_t token_ns = step_ns / num_tokens;
        tiers->token_ns = tiers->token_ns == 0 ? token_ns : (3 * tiers->token_ns + token_ns) / 4;
    }
}

void prefix_tiers_publish(const struct prefix_tiers *tiers)
{
    struct metrics *totals = tiers->cache->metrics;
    struct kv_tiers_metrics counted;
    struct prefetch_metrics ahead;
    kv_tiers_read_metrics(tiers->tiers, &counted);
    prefix_prefetch_read_metrics(tiers->prefetch, &ahead);
    metrics_set(&totals->num_kv_ahead, (int64_t)ahead.num_planned);
    metrics_set(&totals->num_kv_ahead_used, (int64_t)ahead.num_used);
    metrics_set(&totals->num_kv_ahead_wasted, (int64_t)ahead.num_wasted);
    metrics_set(&totals->num_kv_demoted, (int64_t)counted.num_demoted);
    metrics_set(&totals->num_kv_written, (int64_t)counted.num_written);
    metrics_set(&totals->num_kv_lost, (int64_t)counted.num_lost);
    metrics_set(&totals->num_kv_faults,
                (int64_t)(kv_tiers_num_faults(&counted) + kv_remote_num_faults(&counted.remote)));
    metrics_set(&totals->kv_remote_up, counted.remote.is_up);
    metrics_set(&totals->kv_block_ns, tiers->block_ns);
    metrics_set(&totals->kv_recompute_ns, tiers->token_ns * KV_BLOCK_SIZE);
    metrics_set(&totals->kv_host_blocks, counted.num_host_blocks);
    metrics_set(&totals->kv_disk_blocks, counted.disk.num_blocks);
}
