/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/prefix.h"

#include <assert.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine/prefix_tiers.h"
#include "engine/request.h"

/* ---- of a request ---------------------------------------------------------------------------- */

enum imbrex_status request_prefix_create(const struct request_prefix_options *options,
                                         struct request_prefix *prefix, struct imbrex_error *err)
{
    enum imbrex_status status;
    struct kv_hasher *hasher = NULL;
    int32_t num_keys = options->num_prompt_ids / KV_BLOCK_SIZE;
    size_t max_blocks = (size_t)(options->max_tokens / KV_BLOCK_SIZE);
    size_t block_bytes = sizeof(*prefix->keys) + KV_BLOCK_SIZE * sizeof(*prefix->token_ids) +
                         sizeof(*prefix->wants) + sizeof(*prefix->blocks);
    struct request_prefix created = {.max_blocks = (int32_t)max_blocks};
    TRY(kv_hasher_create(&hasher, err));
    /* One more: none is asked for with size 0. */
    created.keys = calloc(max_blocks + 1, sizeof(*created.keys));
    created.token_ids = calloc(max_blocks + 1, KV_BLOCK_SIZE * sizeof(*created.token_ids));
    created.wants = calloc(max_blocks + 1, sizeof(*created.wants));
    created.blocks = calloc(max_blocks + 1, sizeof(*created.blocks));
    if (created.keys == NULL || created.token_ids == NULL || created.wants == NULL ||
        created.blocks == NULL) {
        status =
            error_out_of_memory(err, "the request's block keys", (max_blocks + 1) * block_bytes);
        goto fail;
    }
    memcpy(created.token_ids, options->prompt_ids,
           (size_t)num_keys * KV_BLOCK_SIZE * sizeof(*created.token_ids));
    kv_hasher_weaken(hasher, options->identity->num_weak_bits);
    kv_hasher_root(hasher, options->identity, options->salt, options->salt_bytes, &created.root);
    kv_hasher_blocks(hasher, &created.root, created.token_ids, KV_BLOCK_SIZE, num_keys,
                     created.keys);
    kv_hasher_destroy(hasher);
    created.kv = (struct kv_request){
        .keys = created.keys,
        .token_ids = created.token_ids,
        .wants = created.wants,
        .blocks = created.blocks,
        .num_keys = num_keys,
        .request_idx = -1,
    };
    *prefix = created;
    return IMBREX_STATUS_OK;
fail:
    kv_hasher_destroy(hasher);
    request_prefix_destroy(&created);
    return status;
}

void request_prefix_destroy(struct request_prefix *prefix)
{
    free(prefix->keys);
    free(prefix->token_ids);
    free(prefix->wants);
    free(prefix->blocks);
    *prefix = (struct request_prefix){0};
}

/* ---- the cache ------------------------------------------------------------------------------- */

/* One link of the digest: name, dtype, sizes and contents of a tensor, behind the link before. */
static void digest_tensor(struct kv_hasher *hasher, const struct checkpoint_tensor *tensor,
                          bool has_contents, struct kv_key *digest)
{
    char layout[24 * (IMBREX_MAX_TENSOR_DIMS + 1) + 40];
    size_t num_bytes = has_contents ? tensor->num_bytes : 0;
    size_t num_written =
        (size_t)snprintf(layout, sizeof(layout), "%.32s %zu", tensor->dtype_name, num_bytes);
    for (int32_t i = 0; i < tensor->num_dims; i++) {
        num_written += (size_t)snprintf(layout + num_written, sizeof(layout) - num_written,
                                        " %" PRId64, tensor->shape[i]);
    }
    struct kv_identity link = {.model_id = tensor->name, .layout = layout};
    memcpy(link.weight_digest, digest->words, sizeof(link.weight_digest));
    kv_hasher_root(hasher, &link, tensor->elements, num_bytes, digest);
}

void prefix_weight_digest(struct kv_hasher *hasher, const struct checkpoint *checkpoint,
                          unsigned char weight_digest[32])
{
    const struct kv_identity start = {.model_id = "weights", .layout = ""};
    struct kv_key digest;
    kv_hasher_root(hasher, &start, &checkpoint->seed, sizeof(checkpoint->seed), &digest);
    for (int32_t i = 0; i < checkpoint->num_tensors; i++) {
        digest_tensor(hasher, checkpoint->tensors[i], !checkpoint->is_random, &digest);
    }
    memcpy(weight_digest, digest.words, sizeof(digest.words));
}

void prefix_model_digest(struct kv_hasher *hasher, const struct imbrex_model *model,
                         unsigned char model_digest[32])
{
    char text[512];
    const struct model_config *config = &model->config;
    const struct rope_scaling *scaling = &config->rope_scaling;
    snprintf(text, sizeof(text),
             "%s %d %d %d %d %d %d; %a %a; rope %d %a %a %a %a %a %a %d %a; %d %d %d %d %d %d",
             architecture_name(config->architecture), config->hidden_size,
             config->intermediate_size, config->num_layers, config->num_heads, config->num_kv_heads,
             config->head_dim, config->rope_theta, config->rms_norm_eps, (int)scaling->type,
             scaling->factor, scaling->original_max_position_embeddings, scaling->low_freq_factor,
             scaling->high_freq_factor, scaling->beta_fast, scaling->beta_slow, scaling->truncate,
             scaling->attention_factor, config->is_rope_interleaved, config->sliding_window,
             config->qk_norm, config->qkv_bias, config->o_bias, config->mlp_bias);
    struct kv_identity link = {.model_id = "model", .layout = text};
    struct kv_key digest;
    prefix_weight_digest(hasher, &model->checkpoint, link.weight_digest);
    kv_hasher_root(hasher, &link, config->sliding_layers, sizeof(config->sliding_layers), &digest);
    memcpy(model_digest, digest.words, sizeof(digest.words));
}

enum imbrex_status prefix_cache_create(const struct imbrex_model *model,
                                       const struct prefix_cache_options *options,
                                       struct kv_pool *pool, struct prefix_cache *prefix,
                                       struct imbrex_error *err)
{
    enum imbrex_status status;
    struct prefix_cache created = {.pool = pool, .identity = {.model_id = model->path}};
    TRY_OR_FAIL(kv_hasher_create(&created.hasher, err));
    TRY_OR_FAIL(kv_cache_create(&options->cache, pool, &created.cache, err));
    if (options->kept_secret != NULL) {
        /* The model is what it computes with, wherever it lies. */
        created.identity.model_id = "";
        memcpy(created.identity.secret, options->kept_secret, sizeof(created.identity.secret));
        prefix_model_digest(created.hasher, model, created.identity.weight_digest);
    } else {
        TRY_OR_FAIL(kv_random_secret(created.identity.secret, err));
        TRY_OR_FAIL(kv_random_secret(created.identity.weight_digest, err));
    }
    *prefix = created;
    snprintf(prefix->layout, sizeof(prefix->layout), "%d tokens, layer, K V, head, token; %s",
             KV_BLOCK_SIZE, options->computation);
    prefix->identity.layout = prefix->layout;
    return IMBREX_STATUS_OK;
fail:
    prefix_cache_destroy(&created);
    return status;
}

void prefix_cache_destroy(struct prefix_cache *prefix)
{
    kv_cache_destroy(prefix->cache);
    kv_hasher_destroy(prefix->hasher);
    *prefix = (struct prefix_cache){0};
}

/* ---- what the scheduler says ----------------------------------------------------------------- */

static struct request_choice *choice_of(const struct sequence *sequence)
{
    return sequence->owner;
}

struct request_prefix *prefix_of(const struct sequence *sequence)
{
    const struct request_choice *choice = choice_of(sequence);
    return choice->choice_idx == 0 ? &choice->request->prefix : NULL;
}

/* Ids of the sequence that the host knows. */
static int32_t count_known(const struct sequence *sequence)
{
    const struct request_choice *choice = choice_of(sequence);
    return choice->request->num_prompt_ids + choice->num_output;
}

/* Keys of all full blocks of the first num_tokens tokens, which the host knows. */
static void extend_keys(struct prefix_cache *cache, struct request_prefix *prefix,
                        const struct request_choice *choice, int32_t num_tokens)
{
    int32_t num_prompt_ids = choice->request->num_prompt_ids;
    while (prefix->kv.num_keys < num_tokens / KV_BLOCK_SIZE) {
        int32_t i = prefix->kv.num_keys;
        int32_t *ids = prefix->token_ids + (size_t)i * KV_BLOCK_SIZE;
        assert(i < prefix->max_blocks);
        for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
            int32_t position = i * KV_BLOCK_SIZE + j;
            ids[j] = position < num_prompt_ids ? choice->request->prompt_ids[position]
                                               : choice->output_ids[position - num_prompt_ids];
        }
        kv_hasher_blocks(cache->hasher, i == 0 ? &prefix->root : &prefix->keys[i - 1], ids,
                         KV_BLOCK_SIZE, 1, &prefix->keys[i]);
        prefix->kv.num_keys++;
    }
}

static void on_arrive(void *user, struct sequence *sequence)
{
    struct prefix_cache *cache = user;
    struct request_prefix *prefix = prefix_of(sequence);
    if (prefix == NULL) {
        return;
    }
    extend_keys(cache, prefix, choice_of(sequence), count_known(sequence));
    prefix->kv.order = sequence->order_key;
    prefix->is_loading = false;
    prefix->held_until_ns = 0;
    prefix->starts_in_layers = false;
    prefix->is_known =
        kv_cache_arrive(cache->cache, &prefix->kv, cache->now_ns) == IMBREX_STATUS_OK;
}

static void on_leave(void *user, struct sequence *sequence)
{
    struct prefix_cache *cache = user;
    struct request_prefix *prefix = prefix_of(sequence);
    if (prefix != NULL && prefix->is_known) {
        kv_cache_leave(cache->cache, &prefix->kv, cache->now_ns);
        prefix->is_known = false;
    }
}

static bool on_is_held(void *user, const struct sequence *sequence)
{
    const struct prefix_cache *cache = user;
    return cache->tiers != NULL && prefix_tiers_is_held(cache->tiers, prefix_of(sequence));
}

static void note_collisions(struct prefix_cache *cache)
{
    struct kv_cache_metrics metrics;
    kv_cache_read_metrics(cache->cache, &metrics);
    atomic_store_explicit(&cache->metrics->num_key_collisions, metrics.num_collisions,
                          memory_order_relaxed);
}

static int32_t on_admit(void *user, struct sequence *sequence, int32_t max_blocks, int32_t *table)
{
    struct prefix_cache *cache = user;
    struct request_prefix *prefix = prefix_of(sequence);
    if (prefix == NULL || !prefix->is_known) {
        return 0;
    }
    kv_cache_admit(cache->cache, &prefix->kv, max_blocks, prefix->has_run, cache->now_ns);
    note_collisions(cache);
    memcpy(table, prefix->blocks, (size_t)prefix->kv.num_blocks * sizeof(*table));
    struct imbrex_request *request = choice_of(sequence)->request;
    int32_t num_blocks = prefix->kv.num_blocks;
    if (cache->tiers != NULL) {
        num_blocks += prefix_tiers_admit(
            cache->tiers, sequence, prefix->has_run ? NULL : &request->metrics, max_blocks, table);
    }
    if (!prefix->has_run) {
        request->metrics.num_cached_tokens = prefix->kv.num_blocks * KV_BLOCK_SIZE;
        metrics_add(&cache->metrics->num_queried_tokens, (uint64_t)request->num_prompt_ids);
        metrics_add(&cache->metrics->num_cached_tokens,
                    (uint64_t)request->metrics.num_cached_tokens);
    }
    prefix->has_run = true;
    return num_blocks;
}

static enum kv_finish finish_of(enum imbrex_finish_reason reason)
{
    switch (reason) {
    case IMBREX_FINISH_REASON_EOS:
    case IMBREX_FINISH_REASON_STOP_STRING:
        return KV_FINISH_STOP;
    case IMBREX_FINISH_REASON_LENGTH:
    case IMBREX_FINISH_REASON_CONTEXT:
        return KV_FINISH_LENGTH;
    case IMBREX_FINISH_REASON_CANCELLED:
    case IMBREX_FINISH_REASON_ERROR:
    case IMBREX_FINISH_REASON_DEADLINE:
        return KV_FINISH_CANCELLED;
    default:
        return KV_FINISH_UNKNOWN; /* preempted */
    }
}

static void on_finish(void *user, struct sequence *sequence)
{
    struct prefix_cache *cache = user;
    struct request_prefix *prefix = prefix_of(sequence);
    if (prefix != NULL && prefix->is_known) {
        const struct request_choice *choice = choice_of(sequence);
        if (cache->tiers != NULL) {
            prefix_tiers_finish(cache->tiers, sequence);
        }
        prefix->kv.fingerprint.num_output_tokens = choice->num_output;
        prefix->kv.fingerprint.finish = finish_of(choice->finish_reason);
        kv_cache_finish(cache->cache, &prefix->kv, cache->now_ns);
        prefix->is_known = false;
    }
}

struct scheduler_cache prefix_scheduler_cache(struct prefix_cache *prefix)
{
    return (struct scheduler_cache){
        .user = prefix,
        .arrive = on_arrive,
        .leave = on_leave,
        .is_held = on_is_held,
        .admit = on_admit,
        .finish = on_finish,
    };
}

/* ---- blocks ---------------------------------------------------------------------------------- */

void prefix_insert(struct prefix_cache *cache, const struct step_row *row, int32_t *table,
                   int32_t *pinned_blocks, int32_t *num_pinned_blocks)
{
    const struct sequence *sequence = row->sequence;
    struct request_prefix *prefix = prefix_of(sequence);
    if (prefix == NULL || !prefix->is_known || sequence->is_spoilt) {
        return;
    }
    /* Of a choice that has ended meanwhile some computed tokens are nobody's. */
    int32_t num_tokens = row->position + row->num_tokens, num_known = count_known(sequence);
    num_tokens = num_tokens < num_known ? num_tokens : num_known;
    extend_keys(cache, prefix, choice_of(sequence), num_tokens);
    struct kv_request *kv = &prefix->kv;
    bool was_cut = kv->is_cut;
    while (!kv->is_cut && kv->num_blocks < num_tokens / KV_BLOCK_SIZE) {
        int32_t i = kv->num_blocks, block_idx = table[i];
        bool is_read = sequence->num_in_flight > 1;
        if (is_read) {
            kv_pool_pin(cache->pool, block_idx);
        }
        table[i] = kv_cache_insert(cache->cache, kv, &prefix->keys[i],
                                   prefix->token_ids + (size_t)i * KV_BLOCK_SIZE, block_idx,
                                   cache->now_ns);
        if (cache->tiers != NULL && !kv->is_cut && table[i] == block_idx) {
            prefix_tiers_insert(cache->tiers, block_idx);
        }
        if (is_read && table[i] != block_idx) {
            pinned_blocks[*num_pinned_blocks] = block_idx;
            (*num_pinned_blocks)++;
        } else if (is_read) {
            kv_pool_unpin(cache->pool, block_idx);
        }
    }
    if (kv->is_cut && !was_cut) {
        note_collisions(cache);
    }
}
