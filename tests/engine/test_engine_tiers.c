/* SPDX-License-Identifier: Apache-2.0 */
/* Requests whose blocks go down to RAM and disk and come up again: the same bits as alone and
 * computed, whatever moved, failed or was cancelled meanwhile. */
#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/clock.h"
#include "engine/engine.h"
#include "kv/kv_remote_link.h"
#include "ops/fake/device_fake.h"
#include "tests/base/fixture.h"
#include "tests/engine/request_cases.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/redis_server.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-tiers"
#define COPY TEST_BUILD_DIR "/tests/kv-tiers-copy"
#define SECRET TEST_BUILD_DIR "/tests/kv-tiers-secret"
#define OTHER_SECRET TEST_BUILD_DIR "/tests/kv-tiers-secret-too"
#define NUM_CASES (TEST_SANITIZED ? 20 : CASE_BED_MAX_CASES)
#define NUM_SOME (TEST_SANITIZED ? 12 : 50) /* where more rounds show more than more cases */
#define CONTEXT_SIZE 352
#define MIN_TOKENS (TEST_SANITIZED ? 0 : 1000) /* that come up, of all cases */
#define DISK_BYTES ((size_t)256 << 20)
#define BLOCK_BYTES ((size_t)20480) /* of the built-in model */

struct mix {
    int32_t kv_cache_tokens, max_running, max_step_tokens;
    uint64_t fake_seed; /* 0: the CPU */
    int32_t num_rounds;
    int32_t num_cases;      /* 0: all */
    size_t num_host_blocks; /* 0: none */
    bool has_disk;
    int32_t evict_every;      /* steps between evictions of all that is idle; 0: never */
    bool is_impatient;        /* nobody waits for what is on its way */
    const char *policy;       /* NULL: lru */
    struct fake_redis *redis; /* NULL: none */
    int32_t redis_port;       /* without it: of a server; 0: none */
    const char *secret_path;  /* of the remote tier; NULL: none */
    bool changes_faults;      /* the server does wrong, now in one way, now in another */
    enum imbrex_kv_write kv_write;
};

struct logged {
    int32_t num_lines;
    char last[512];
};

struct fixture {
    struct case_bed bed;
    struct logged logged;
};

/* ---- engines --------------------------------------------------------------------------------- */

static struct imbrex_engine *create_engine(struct imbrex_model *model, const struct mix *mix,
                                           struct device *device)
{
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_cache_tokens = mix->kv_cache_tokens;
    options.max_running = mix->max_running;
    options.max_step_tokens = mix->max_step_tokens;
    options.num_threads = 1;
    options.kv_policy = mix->policy;
    options.kv_host_bytes = mix->num_host_blocks * BLOCK_BYTES;
    options.kv_disk_path = mix->has_disk ? FOLDER : NULL;
    options.kv_disk_bytes = mix->has_disk ? DISK_BYTES : 0;
    options.kv_write = mix->kv_write;
    char url[64];
    int32_t port = mix->redis != NULL ? fake_redis_port(mix->redis) : mix->redis_port;
    if (port != 0) {
        (void)snprintf(url, sizeof(url), "redis://127.0.0.1:%d", (int)port);
        options.kv_remote_url = url;
        options.kv_remote_secret_path = mix->secret_path;
    }
    struct imbrex_engine *engine = request_cases_engine(model, &options, device);
    if (mix->is_impatient) {
        engine->tiers.patience_ns = 1;
    }
    return engine;
}

static void note_log(void *user, enum imbrex_log_level level, const char *message)
{
    struct logged *logged = user;
    if (level == IMBREX_LOG_LEVEL_WARNING) {
        logged->num_lines++;
        (void)snprintf(logged->last, sizeof(logged->last), "%s", message);
    }
}

static int set_up(void **state)
{
    static struct fixture fixture;
    const struct imbrex_model_options options = {.log = note_log, .log_user = &fixture.logged};
    case_bed_open(&fixture.bed, &options, NUM_CASES, CONTEXT_SIZE, 5);
    *state = &fixture;
    return 0;
}

static int tear_down(void **state)
{
    struct fixture *fixture = *state;
    case_bed_close(&fixture->bed);
    fixture_empty_folder(FOLDER);
    return 0;
}

static void after_step(void *user, struct imbrex_engine *engine, int32_t step,
                       int32_t num_submitted)
{
    const struct mix *mix = user;
    (void)num_submitted;
    /* Not SILENT: that one would be waited for, for seconds. */
    if (mix->changes_faults && step % 8 == 0) {
        int32_t num_faults = FAKE_REDIS_NUM_FAULTS - FAKE_REDIS_HANG_UP;
        int32_t fault = FAKE_REDIS_HANG_UP + step / 8 % num_faults;
        fake_redis_set_fault(mix->redis, (enum fake_redis_fault)fault, 7);
    }
    if (mix->evict_every > 0 && step % mix->evict_every == 0) {
        kv_cache_clear(engine->prefix.cache, 0);
    }
}

static void run_round(struct fixture *fixture, const struct mix *mix, struct imbrex_engine *engine)
{
    const struct request_round round = {.after_step = after_step, .user = (void *)(uintptr_t)mix};
    int32_t num_cases = mix->num_cases == 0 ? NUM_CASES : mix->num_cases;
    (void)request_cases_run(fixture->bed.cases, num_cases, engine, &round);
}

static struct imbrex_engine_metrics run_mix(struct fixture *fixture, const struct mix *mix)
{
    struct device *device = NULL;
    struct imbrex_engine_metrics metrics;
    if (mix->fake_seed != 0) {
        assert_int_equal(device_fake_create(mix->fake_seed, &device, NULL), IMBREX_STATUS_OK);
    }
    struct imbrex_engine *engine = create_engine(fixture->bed.model, mix, device);
    for (int32_t round = 0; round < mix->num_rounds; round++) {
        run_round(fixture, mix, engine);
    }
    assert_true(scheduler_is_idle(&engine->scheduler));
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.num_kv_faults, 0);
    assert_true(metrics.num_host_tokens + metrics.num_disk_tokens + metrics.num_remote_tokens <=
                metrics.num_cached_tokens);
    imbrex_engine_destroy(engine);
    device_destroy(device);
    return metrics;
}

/* ---- round trips ----------------------------------------------------------------------------- */

/* Catches: a block that comes up with other contents, in another place or before its copy is done;
 * one that is written over before it was copied down; tokens counted for the wrong tier. */
static void test_host(void **state)
{
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 4); seed++) {
        const struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .fake_seed = seed,
                                .num_rounds = 2,
                                .num_host_blocks = 2000};
        struct imbrex_engine_metrics metrics = run_mix(*state, &mix);
        assert_true(metrics.num_host_tokens > MIN_TOKENS);
        assert_int_equal(metrics.num_disk_tokens, 0);
        assert_true(metrics.num_kv_demoted > 0);
        assert_int_equal(metrics.num_kv_lost, 0);
    }
}

static void test_disk(void **state)
{
    for (uint64_t seed = 0; seed < (TEST_SANITIZED ? 2 : 3); seed++) {
        const struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .fake_seed = seed,
                                .num_rounds = 2,
                                .has_disk = true};
        fixture_empty_folder(FOLDER);
        /* How many of them were still in the slots they pass through, threads decide. */
        struct imbrex_engine_metrics metrics = run_mix(*state, &mix);
        assert_true(metrics.num_disk_tokens > 0 || TEST_SANITIZED);
        assert_true(metrics.num_host_tokens + metrics.num_disk_tokens > MIN_TOKENS);
    }
}

/* Few slots between: everything passes them all the time, what the policy expects too. Catches: two
 * half-loaded requests that wait for each other, a slot that is taken while something reads or
 * fills it, blocks brought up ahead that a running sequence cannot get. */
static void test_narrow(void **state)
{
    static const char *const policies[] = {"lru", "predictive", "seed"};
    for (uint64_t seed = 0; seed < 3; seed++) {
        struct mix mix = {.kv_cache_tokens = CONTEXT_SIZE + 32,
                          .max_running = 8,
                          .max_step_tokens = 48,
                          .fake_seed = seed,
                          .num_rounds = 2,
                          .num_cases = NUM_SOME,
                          .num_host_blocks = KV_TIERS_MIN_SLOTS,
                          .has_disk = true,
                          .policy = policies[seed]};
        fixture_empty_folder(FOLDER);
        struct imbrex_engine_metrics metrics = run_mix(*state, &mix);
        assert_true(metrics.num_host_tokens + metrics.num_disk_tokens > 0);
        assert_true(metrics.num_preemptions > 0);
        mix.is_impatient = true;
        (void)run_mix(*state, &mix);
        assert_true(metrics.num_kv_ahead_used + metrics.num_kv_ahead_wasted <=
                    metrics.num_kv_ahead);
    }
}

/* All that is idle goes down again and again, also what was promoted for a request that still
 * waits. Catches: a promotion behind a parent that has gone, a request that waits for ever. */
static void test_forced_eviction(void **state)
{
    for (uint64_t seed = 0; seed < 2; seed++) {
        const struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .fake_seed = seed,
                                .num_rounds = 2,
                                .num_host_blocks = 300,
                                .has_disk = true,
                                .evict_every = 2};
        fixture_empty_folder(FOLDER);
        assert_true(run_mix(*state, &mix).num_host_tokens > 0);
    }
}

/* ---- restarts -------------------------------------------------------------------------------- */

#define NUM_IDS 200 /* of the plain prompt: 12 whole blocks */

/* The prompt alone; how many of its tokens were found, in *from_disk how many of them there. */
static int32_t count_cached(struct imbrex_engine *engine, const int32_t *ids, int32_t *from_host,
                            int32_t *from_disk)
{
    struct imbrex_request_metrics metrics = plain_prompt_run(engine, ids, NUM_IDS);
    *from_host = metrics.num_host_tokens;
    *from_disk = metrics.num_disk_tokens;
    return metrics.num_cached_tokens;
}

/* Catches: a cache that is cold after a restart, one that another kernel's or model's blocks are
 * taken from, tokens of a tier that are counted again when the block has stayed. */
static void test_restart(void **state)
{
    struct fixture *fixture = *state;
    const struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE, .has_disk = true};
    int32_t ids[PLAIN_PROMPT_TOKENS], from_host, from_disk;
    plain_prompt_fill(ids);
    fixture_empty_folder(FOLDER);
    struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 0);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_host + from_disk, 0);
    imbrex_engine_destroy(engine);

    engine = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_disk, 192);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_host + from_disk, 0);
    kv_cache_clear(engine->prefix.cache, 0);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    /* Still in the slots they came through, which belong to the disk. */
    assert_int_equal(from_host, 0);
    assert_int_equal(from_disk, 192);
    ids[100]++;
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 96);
    imbrex_engine_destroy(engine);

    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.kv_disk_path = FOLDER;
    options.kv_disk_bytes = DISK_BYTES;
    options.context_size = CONTEXT_SIZE;
    options.cpu_features = 0;
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, NULL),
                     IMBREX_STATUS_OK);
    engine->tiers.patience_ns = INT64_MAX;
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 0);
    imbrex_engine_destroy(engine);

    /* What was there before is still. */
    engine = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_disk, 192);
    imbrex_engine_destroy(engine);
}

/* The whole mix on a warm disk, through a device whose copies come late. Catches: bits that differ
 * after a restart. */
static void test_warm_mix(void **state)
{
    const struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE,
                            .max_running = 8,
                            .max_step_tokens = 64,
                            .num_rounds = 1,
                            .num_host_blocks = 64,
                            .has_disk = true};
    struct mix warm = mix;
    fixture_empty_folder(FOLDER);
    (void)run_mix(*state, &mix);
    for (uint64_t seed = 0; seed < 2; seed++) {
        warm.fake_seed = seed;
        struct imbrex_engine_metrics metrics = run_mix(*state, &warm);
        assert_true(metrics.num_disk_tokens > 0);
        assert_true(metrics.num_host_tokens + metrics.num_disk_tokens > MIN_TOKENS);
    }
}

/* ---- ahead of time --------------------------------------------------------------------------- */

static struct {
    atomic_uint_fast64_t key_hash;
    atomic_int num_asked;
} expected;

static int32_t predict(struct kv_policy *policy, struct kv_prediction *predictions,
                       int32_t max_predictions, int64_t now_ns)
{
    (void)policy, (void)max_predictions, (void)now_ns;
    expected.num_asked++;
    predictions[0] = (struct kv_prediction){.key_hash = expected.key_hash, .value = 1e9};
    return 1;
}

/* Nobody asks for anything, and what the policy expects comes up. Catches: an engine that does
 * nothing ahead while it is idle, or that asks all the time. */
static void test_idle(void **state)
{
    struct fixture *fixture = *state;
    const struct mix mix = {
        .kv_cache_tokens = 4 * CONTEXT_SIZE, .num_host_blocks = 100, .policy = "predictive"};
    struct imbrex_engine_metrics metrics;
    int32_t from_host, from_disk, ids[PLAIN_PROMPT_TOKENS];
    plain_prompt_fill(ids);
    struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, NULL);
    struct kv_policy *policy = kv_cache_policy(engine->prefix.cache);
    struct kv_policy_functions functions = *policy->functions;
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 0);
    int32_t tail = 0;
    while (kv_cache_depth(engine->prefix.cache, tail) != 11) {
        tail++;
    }
    expected.key_hash = kv_cache_key_hash(engine->prefix.cache, tail);
    expected.num_asked = 0;
    functions.predict = predict;
    policy->functions = &functions;
    kv_cache_clear(engine->prefix.cache, clock_now_ns());
    assert_int_equal(prefix_tiers_start(&engine->tiers), IMBREX_STATUS_OK);
    int64_t begin_ns = clock_now_ns();
    engine->prefix.now_ns = begin_ns;
    prefix_tiers_look(&engine->tiers, &engine->scheduler); /* the end of the last step */
    assert_int_equal(imbrex_engine_start(engine, NULL), IMBREX_STATUS_OK);
    metrics.num_kv_ahead = 0;
    for (int32_t i = 0; metrics.num_kv_ahead < 12; i++) {
        assert_true(i < 100000);
        (void)usleep(1000);
        imbrex_engine_read_metrics(engine, &metrics);
    }
    (void)usleep(300000); /* not for anything to happen, but for what should not */
    imbrex_engine_stop(engine);
    assert_true(expected.num_asked <=
                2 + (clock_now_ns() - begin_ns) / PREFETCH_PREDICTION_LIFE_NS);
    imbrex_engine_read_metrics(engine, &metrics);
    assert_int_equal(metrics.num_kv_ahead, 12);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_host, 192);
    imbrex_engine_destroy(engine);
}

/* ---- a server that engines share ------------------------------------------------------------- */

static void skip_without_hiredis(void)
{
    if (!kv_remote_link_is_built()) {
        skip();
    }
}

static void write_secret(const char *path, const char *text)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_true(fputs(text, file) >= 0);
    assert_int_equal(fclose(file), 0);
}

/* Of 200 tokens, those that were found; all must have come from the server, or none. */
static int32_t count_remote(struct imbrex_engine *engine)
{
    int32_t ids[PLAIN_PROMPT_TOKENS];
    plain_prompt_fill(ids);
    struct imbrex_request_metrics metrics = plain_prompt_run(engine, ids, NUM_IDS);
    assert_int_equal(metrics.num_remote_tokens, metrics.num_cached_tokens);
    return metrics.num_cached_tokens;
}

/* Catches: an engine that does not find what another one, or the one before it, has sent; one that
 * finds it though it has another secret, or computes otherwise; a folder that is not found beside a
 * server. */
static void test_remote(void **state)
{
    struct fixture *fixture = *state;
    skip_without_hiredis();
    struct fake_redis *redis = fake_redis_create();
    const struct mix mix = {
        .kv_cache_tokens = 4 * CONTEXT_SIZE, .redis = redis, .kv_write = IMBREX_KV_WRITE_DEMOTED};
    struct mix with_secret = mix;
    int32_t from_host, from_disk, ids[PLAIN_PROMPT_TOKENS];
    write_secret(SECRET, "0123456789abcdef0123456789abcdef");
    write_secret(OTHER_SECRET, "0123456789abcdef0123456789abcdeF");
    struct imbrex_engine *first = create_engine(fixture->bed.model, &mix, NULL);
    struct imbrex_engine *second = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(count_remote(first), 0);
    kv_cache_clear(first->prefix.cache, 0);
    assert_int_equal(prefix_tiers_start(&first->tiers), IMBREX_STATUS_OK);
    while (fake_redis_num_values(redis) < 12) {
        kv_tiers_update(first->tiers.tiers, 0);
        kv_tiers_wait(first->tiers.tiers, 1000000);
    }
    assert_int_equal(count_remote(second), 192);
    imbrex_engine_destroy(first);
    imbrex_engine_destroy(second);

    with_secret.secret_path = SECRET;
    first = create_engine(fixture->bed.model, &with_secret, NULL);
    assert_int_equal(count_remote(first), 0);
    imbrex_engine_destroy(first); /* sends what it has */
    first = create_engine(fixture->bed.model, &with_secret, NULL);
    assert_int_equal(count_remote(first), 192);
    imbrex_engine_destroy(first);
    with_secret.secret_path = OTHER_SECRET;
    first = create_engine(fixture->bed.model, &with_secret, NULL);
    assert_int_equal(count_remote(first), 0);
    imbrex_engine_destroy(first);

    struct imbrex_engine_options options = imbrex_engine_options_default();
    char url[64];
    (void)snprintf(url, sizeof(url), "redis://127.0.0.1:%d", (int)fake_redis_port(redis));
    options.kv_remote_url = url;
    options.context_size = CONTEXT_SIZE;
    options.cpu_features = 0;
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &first, NULL),
                     IMBREX_STATUS_OK);
    first->tiers.patience_ns = INT64_MAX;
    assert_int_equal(count_remote(first), 0);
    imbrex_engine_destroy(first);

    /* What comes from the server goes to the disk, and is found there when the server is gone. */
    const struct mix both = {.kv_cache_tokens = 4 * CONTEXT_SIZE, .redis = redis, .has_disk = true};
    fixture_empty_folder(FOLDER);
    first = create_engine(fixture->bed.model, &both, NULL);
    assert_int_equal(count_remote(first), 192);
    imbrex_engine_destroy(first);
    fake_redis_stop(redis, false);
    first = create_engine(fixture->bed.model, &both, NULL);
    plain_prompt_fill(ids);
    assert_int_equal(count_cached(first, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_disk, 192);
    imbrex_engine_destroy(first);
    fake_redis_destroy(redis);
    (void)unlink(SECRET);
    (void)unlink(OTHER_SECRET);
}

static void wait_for_values(struct fake_redis *redis, int32_t num_values)
{
    for (int32_t i = 0; fake_redis_num_values(redis) < num_values; i++) {
        assert_true(i < 100000);
        (void)usleep(1000);
    }
}

/* Two engines and a server: nothing is evicted, and neither of them ends. Catches: blocks that
 * others find only once their engine has no room for them; an engine with nothing to do that stops
 * half-way; a server that is away when they are computed, or breaks, and never gets them; blocks
 * written through that were to be written when they go. */
static void test_write_through(void **state)
{
    struct fixture *fixture = *state;
    skip_without_hiredis();
    struct fake_redis *redis = fake_redis_create();
    struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE, .redis = redis};
    struct imbrex_engine_metrics metrics;
    struct imbrex_engine *first = create_engine(fixture->bed.model, &mix, NULL);
    struct imbrex_engine *second = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(imbrex_engine_start(first, NULL), IMBREX_STATUS_OK);
    assert_int_equal(count_remote(first), 0);
    wait_for_values(redis, 12);
    assert_int_equal(count_remote(second), 192);
    do { /* the engine publishes its counts after the fact */
        (void)usleep(1000);
        imbrex_engine_read_metrics(first, &metrics);
    } while (metrics.num_kv_written < 12);
    assert_int_equal(metrics.num_kv_written, 12);
    assert_int_equal(metrics.num_kv_demoted + metrics.num_kv_lost + metrics.num_kv_faults, 0);
    imbrex_engine_destroy(first);
    imbrex_engine_destroy(second);
    assert_int_equal(fake_redis_count(redis, 'S'), 12); /* none of them twice */

    /* Away while they are computed. */
    fake_redis_stop(redis, false);
    first = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(imbrex_engine_start(first, NULL), IMBREX_STATUS_OK);
    assert_int_equal(count_remote(first), 0);
    fake_redis_go_on(redis);
    wait_for_values(redis, 12);
    imbrex_engine_destroy(first);

    /* It breaks the connection in place of an answer: what was under way goes at the end. */
    fake_redis_stop(redis, false);
    fake_redis_go_on(redis);
    first = create_engine(fixture->bed.model, &mix, NULL);
    fake_redis_set_fault(redis, FAKE_REDIS_HANG_UP, 1);
    assert_int_equal(imbrex_engine_start(first, NULL), IMBREX_STATUS_OK);
    assert_int_equal(count_remote(first), 0);
    do {
        (void)usleep(1000);
        imbrex_engine_read_metrics(first, &metrics);
    } while (metrics.num_kv_faults == 0);
    fake_redis_set_fault(redis, FAKE_REDIS_WELL, 1);
    imbrex_engine_stop(first);
    struct kv_tiers_metrics counted;
    do {
        (void)usleep(1000);
        kv_tiers_update(first->tiers.tiers, 0);
        kv_tiers_read_metrics(first->tiers.tiers, &counted);
    } while (!counted.remote.is_up);
    imbrex_engine_destroy(first);
    assert_int_equal(fake_redis_num_values(redis), 12);

    /* Not before they go. */
    fake_redis_stop(redis, false);
    fake_redis_go_on(redis);
    mix.kv_write = IMBREX_KV_WRITE_DEMOTED;
    first = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(imbrex_engine_start(first, NULL), IMBREX_STATUS_OK);
    assert_int_equal(count_remote(first), 0);
    imbrex_engine_read_metrics(first, &metrics);
    assert_int_equal(metrics.num_kv_written, 0);
    imbrex_engine_destroy(first);
    assert_int_equal(fake_redis_num_values(redis), 12);
    fake_redis_destroy(redis);
}

/* The files of a folder, to one that is made if need be. */
static void copy_folder(const char *from, const char *to)
{
    DIR *folder = opendir(from);
    const struct dirent *entry;
    assert_non_null(folder);
    (void)mkdir(to, 0700);
    while ((entry = readdir(folder)) != NULL) {
        char path[FIXTURE_PATH_BYTES];
        size_t num_bytes;
        if (entry->d_name[0] != '.') {
            (void)snprintf(path, sizeof(path), "%s/%s", from, entry->d_name);
            char *bytes = fixture_read(path, &num_bytes);
            fixture_write_in(to, entry->d_name, bytes, num_bytes);
            free(bytes);
        }
    }
    (void)closedir(folder);
}

/* What a folder has before its engine ends is found by the next one. Catches: a process that is
 * killed and loses all that it has not evicted. */
static void test_write_through_disk(void **state)
{
    struct fixture *fixture = *state;
    struct mix mix = {.kv_cache_tokens = 4 * CONTEXT_SIZE, .has_disk = true, .fake_seed = 3};
    struct device *device;
    int32_t ids[PLAIN_PROMPT_TOKENS], from_host, from_disk;
    plain_prompt_fill(ids);
    fixture_empty_folder(FOLDER);
    fixture_empty_folder(COPY);
    assert_int_equal(device_fake_create(mix.fake_seed, &device, NULL), IMBREX_STATUS_OK);
    struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, device);
    assert_int_equal(imbrex_engine_start(engine, NULL), IMBREX_STATUS_OK);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 0);
    struct imbrex_engine_metrics metrics;
    do {
        (void)usleep(1000);
        imbrex_engine_read_metrics(engine, &metrics);
    } while (metrics.kv_disk_blocks < 12);
    imbrex_engine_stop(engine);
    assert_int_equal(metrics.num_kv_demoted, 0);
    copy_folder(FOLDER, COPY); /* as it would be if the process ended here */
    imbrex_engine_destroy(engine);
    device_destroy(device);

    fixture_empty_folder(FOLDER);
    copy_folder(COPY, FOLDER);
    engine = create_engine(fixture->bed.model, &mix, NULL);
    assert_int_equal(count_cached(engine, ids, &from_host, &from_disk), 192);
    assert_int_equal(from_disk, 192);
    imbrex_engine_destroy(engine);
    fixture_empty_folder(COPY);
}

/* The whole mix over a server, with RAM, with a disk, with neither. Catches: bits that differ after
 * a round trip. */
static void test_remote_mix(void **state)
{
    skip_without_hiredis();
    for (int32_t kind = 0; kind < 3; kind++) {
        struct fake_redis *redis = fake_redis_create();
        struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                          .max_running = 8,
                          .max_step_tokens = 64,
                          .num_rounds = 1,
                          .num_host_blocks = kind == 0 ? 64 : 0,
                          .has_disk = kind == 1,
                          .redis = redis};
        fixture_empty_folder(FOLDER);
        (void)run_mix(*state, &mix);
        for (uint64_t seed = 0; seed < 2; seed++) {
            mix.fake_seed = seed;
            fixture_empty_folder(FOLDER); /* all that is found was sent */
            struct imbrex_engine_metrics metrics = run_mix(*state, &mix);
            assert_true(metrics.num_remote_tokens > 0);
            assert_true(metrics.num_host_tokens + metrics.num_disk_tokens +
                            metrics.num_remote_tokens >
                        MIN_TOKENS);
            assert_int_equal(metrics.kv_remote_up, 1);
        }
        fake_redis_destroy(redis);
    }
}

/* The same over a server of Debian's. Catches: what the fake one does otherwise. */
static void test_redis_mix(void **state)
{
    struct redis_server server;
    skip_without_hiredis();
    if (!redis_server_is_there()) {
        skip();
    }
    redis_server_start(&server, NULL, NULL);
    struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                      .max_running = 8,
                      .max_step_tokens = 64,
                      .num_rounds = 1,
                      .redis_port = server.port};
    (void)run_mix(*state, &mix);
    mix.fake_seed = 1;
    struct imbrex_engine_metrics metrics = run_mix(*state, &mix);
    assert_true(metrics.num_remote_tokens > 0);
    assert_true(metrics.num_host_tokens + metrics.num_remote_tokens > MIN_TOKENS);
    redis_server_kill(&server);
}

static void assert_one_line_a_minute(const struct fixture *fixture, int64_t begin_ns)
{
    int64_t num_minutes = (clock_now_ns() - begin_ns) / 60000000000;
    assert_true(fixture->logged.num_lines >= 1 && fixture->logged.num_lines <= 1 + num_minutes);
}

/* A server that does wrong in every way, one after the other, and is gone now and then. Catches: a
 * request that ends with it or waits for it, text that differs, faults that are not counted or fill
 * the log. */
static void test_remote_faults(void **state)
{
    struct fixture *fixture = *state;
    skip_without_hiredis();
    struct fake_redis *redis = fake_redis_create();
    struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                      .max_running = 8,
                      .max_step_tokens = 64,
                      .num_cases = NUM_SOME,
                      .redis = redis};
    struct imbrex_engine_metrics metrics;
    struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, NULL);
    run_round(fixture, &mix, engine);
    fixture->logged.num_lines = 0;
    fake_redis_set_error(redis, "MOVED 1 127.0.0.1:1", false);
    mix.changes_faults = true;
    int64_t begin_ns = clock_now_ns();
    bool is_seen = TEST_SANITIZED;
    /* Until one is seen: where the connection's thread has to wait, rounds may end before it. */
    for (int32_t round = 0; round < 3 || (round < 20 && !is_seen); round++) {
        run_round(fixture, &mix, engine);
        fake_redis_stop(redis, round % 2 == 0);
        fake_redis_go_on(redis);
        imbrex_engine_read_metrics(engine, &metrics);
        is_seen |= metrics.num_kv_faults > 0;
    }
    /* The few cases there send too little for more than broken connections, which are no faults. */
    assert_true(is_seen);
    assert_one_line_a_minute(fixture, begin_ns);
    assert_non_null(strstr(fixture->logged.last, "KV remote 127.0.0.1"));
    imbrex_engine_destroy(engine);
    fake_redis_destroy(redis);
}

/* ---- faults ---------------------------------------------------------------------------------- */

/* Flips bits in all segments, cuts some, removes others. */
static void damage_folder(uint64_t *random)
{
    char path[600];
    DIR *folder = opendir(FOLDER);
    assert_non_null(folder);
    for (const struct dirent *item; (item = readdir(folder)) != NULL;) {
        (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
        if (strstr(item->d_name, ".imbrex-kv") == NULL) {
            continue;
        }
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        /* Entries, and blocks behind them. */
        for (int32_t i = 0; i < 40; i++) {
            unsigned char byte;
            off_t at = 4096 + (off_t)request_case_random(random, 400 * 20480);
            if (i % 4 == 0) {
                at = 4096 + (off_t)request_case_random(random, 400 * 128);
            }
            assert_int_equal(pread(fd, &byte, 1, at), 1);
            byte ^= (unsigned char)(1 << request_case_random(random, 8));
            assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        }
        (void)close(fd);
    }
    (void)closedir(folder);
}

/* Catches: a damaged block that is used, a fault that ends a request or the engine, faults that are
 * not counted or fill the log, a folder that is removed without a word or not made anew. */
static void test_damaged(void **state)
{
    struct fixture *fixture = *state;
    const struct mix mix = {.kv_cache_tokens = 3 * CONTEXT_SIZE,
                            .max_running = 8,
                            .max_step_tokens = 64,
                            .num_host_blocks = 32,
                            .has_disk = true};
    uint64_t random = 17;
    struct imbrex_engine_metrics metrics;
    fixture_empty_folder(FOLDER);
    struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, NULL);
    run_round(fixture, &mix, engine);
    imbrex_engine_destroy(engine);
    damage_folder(&random);
    engine = create_engine(fixture->bed.model, &mix, NULL);
    int64_t begin_ns = clock_now_ns();
    fixture->logged.num_lines = 0;
    run_round(fixture, &mix, engine);
    damage_folder(&random); /* under it */
    run_round(fixture, &mix, engine);
    assert_one_line_a_minute(fixture, begin_ns);
    assert_non_null(strstr(fixture->logged.last, FOLDER));
    fixture_empty_folder(FOLDER); /* under it, too */
    int32_t num_lines = fixture->logged.num_lines;
    run_round(fixture, &mix, engine);
    imbrex_engine_read_metrics(engine, &metrics);
    assert_true(metrics.num_kv_faults > 10);
    assert_true(metrics.num_disk_tokens > 0);
    assert_true(fixture->logged.num_lines > num_lines);
    imbrex_engine_destroy(engine);
    assert_int_equal(access(FOLDER "/imbrex-kv.secret", F_OK), 0);
}

static void fail_copies(void *user, struct imbrex_engine *engine, int32_t step,
                        int32_t num_submitted)
{
    struct device *device = user;
    (void)engine, (void)num_submitted;
    if (step % 5 == 0) {
        device_fake_fail(device, step % 2 == 0 ? DEVICE_FAKE_FAULT_COPY : DEVICE_FAKE_FAULT_CALL,
                         1 + step % 7, IMBREX_STATUS_IO);
    }
}

/* Copies of blocks fail now and then, and calls: a copy of a step takes its requests with it.
 * Catches: a block that is used although its copy failed, a pin or a slot that stays, a fork that
 * goes on although the step that was to copy its prompt's ids failed. */
static void test_failing_copies(void **state)
{
    struct fixture *fixture = *state;
    for (uint64_t seed = 1; seed <= 3; seed++) {
        const struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                                .max_running = 8,
                                .max_step_tokens = 64,
                                .num_host_blocks = 500};
        struct device *device;
        struct imbrex_engine_metrics metrics;
        int32_t num_failed = 0;
        assert_int_equal(device_fake_create(seed, &device, NULL), IMBREX_STATUS_OK);
        struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, device);
        const struct request_round round = {
            .num_at_once = 1, .before_step = fail_copies, .user = device, .may_fail = true};
        for (int32_t i = 0; i < 3; i++) {
            num_failed += request_cases_run(fixture->bed.cases, NUM_SOME, engine, &round);
            device_fake_fail(device, DEVICE_FAKE_FAULT_COPY, 0, IMBREX_STATUS_OK);
            device_fake_fail(device, DEVICE_FAKE_FAULT_CALL, 0, IMBREX_STATUS_OK);
        }
        imbrex_engine_read_metrics(engine, &metrics);
        assert_true(num_failed > 0 && num_failed < 3 * NUM_SOME);
        assert_true(metrics.num_kv_faults > 0);
        assert_int_equal(metrics.kv_num_free, metrics.kv_num_blocks);
        imbrex_engine_destroy(engine);
        device_destroy(device);
    }
}

struct canceller {
    struct case_bed *bed;
    uint64_t random;
};

static void cancel_some(void *user, struct imbrex_engine *engine, int32_t step,
                        int32_t num_submitted)
{
    struct canceller *canceller = user;
    (void)engine, (void)step;
    for (int32_t i = 0; i < 3; i++) {
        int32_t chosen = (int32_t)request_case_random(&canceller->random, (uint32_t)num_submitted);
        imbrex_request_cancel(canceller->bed->cases[chosen].request);
    }
}

/* Requests that are cancelled while their blocks are on the way. Catches: a load that goes on for
 * nobody and takes the place of others', a request that cannot end before its load has. */
static void test_cancel(void **state)
{
    struct fixture *fixture = *state;
    for (uint64_t seed = 0; seed < 2; seed++) {
        const struct mix mix = {.kv_cache_tokens = 2 * CONTEXT_SIZE,
                                .max_running = 4,
                                .max_step_tokens = 64,
                                .num_host_blocks = 64,
                                .has_disk = true};
        struct device *device = NULL;
        struct canceller canceller = {.bed = &fixture->bed, .random = 23};
        int32_t num_cancelled = 0;
        fixture_empty_folder(FOLDER);
        if (seed != 0) {
            assert_int_equal(device_fake_create(seed, &device, NULL), IMBREX_STATUS_OK);
        }
        struct imbrex_engine *engine = create_engine(fixture->bed.model, &mix, device);
        run_round(fixture, &mix, engine);
        kv_cache_clear(engine->prefix.cache, 0);
        const struct request_round round = {
            .num_at_once = 6, .after_step = cancel_some, .user = &canceller};
        (void)request_cases_run(fixture->bed.cases, NUM_CASES, engine, &round);
        for (int32_t i = 0; i < NUM_CASES; i++) {
            const struct request_record *record = &fixture->bed.cases[i].mixed;
            num_cancelled += record->choices[0].reason == IMBREX_FINISH_REASON_CANCELLED;
        }
        assert_true(num_cancelled > 0 && (num_cancelled < NUM_CASES || TEST_SANITIZED));
        imbrex_engine_destroy(engine);
        device_destroy(device);
    }
}

/* Catches: options that are taken although they contradict each other, a message without the name
 * of what is wrong, a folder that two engines write. */
static void test_options(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = NULL, *second = NULL;
    struct imbrex_error err;
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    fixture_empty_folder(FOLDER);
    options.kv_host_bytes = KV_TIERS_MIN_SLOTS * BLOCK_BYTES - 1;
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_host_bytes"));
    options.kv_host_bytes++;
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(plan.kv_host_bytes, KV_TIERS_MIN_SLOTS * BLOCK_BYTES);
    options.kv_policy = "none";
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_policy"));
    options.kv_policy = NULL;
    options.kv_disk_path = FOLDER;
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_disk_bytes"));
    options.kv_disk_bytes = 1 << 20;
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_disk_bytes"));
    options.kv_disk_bytes = DISK_BYTES;
    options.kv_host_bytes = 0;
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_OK);
    assert_true(plan.kv_host_bytes > 0);
    assert_int_equal(plan.kv_disk_bytes, DISK_BYTES);
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_OK);
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &second, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, FOLDER));
    imbrex_engine_destroy(engine);
    options.kv_disk_path = "Makefile/none";
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_IO);
}

/* Catches: an address or a secret that is taken though it is none, a message that does not name the
 * option, or shows the password. */
static void test_remote_options(void **state)
{
    struct fixture *fixture = *state;
    struct imbrex_engine *engine = NULL;
    struct imbrex_error err;
    struct imbrex_memory_plan plan;
    struct imbrex_engine_options options = imbrex_engine_options_default();
    options.context_size = CONTEXT_SIZE;
    options.kv_remote_secret_path = SECRET;
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_remote_secret_path"));
    options.kv_remote_url = "redis://:hunter2@127.0.0.1:x";
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_remote_url"));
    assert_null(strstr(err.message, "hunter2"));
    options.kv_remote_url = "redis://127.0.0.1:1";
    if (!kv_remote_link_is_built()) {
        assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                         IMBREX_STATUS_UNSUPPORTED);
        assert_non_null(strstr(err.message, "hiredis"));
        return;
    }
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_OK);
    assert_true(plan.kv_host_bytes > 0);
    options.kv_policy = "none";
    assert_int_equal(imbrex_engine_plan(fixture->bed.model, &options, &plan, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_policy"));
    options.kv_policy = NULL;
    (void)unlink(SECRET);
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_NOT_FOUND);
    assert_non_null(strstr(err.message, SECRET));
    write_secret(SECRET, "0123456789abcdef0123456789abcde");
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "32 bytes"));
    write_secret(SECRET, "0123456789abcdef0123456789abcdef");
    /* No server is there: that is no reason to refuse. */
    assert_int_equal(imbrex_engine_create(fixture->bed.model, &options, &engine, &err),
                     IMBREX_STATUS_OK);
    imbrex_engine_destroy(engine);
    (void)unlink(SECRET);
}

int run_engine_tiers_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_restart),        cmocka_unit_test(test_options),
        cmocka_unit_test(test_host),           cmocka_unit_test(test_disk),
        cmocka_unit_test(test_narrow),         cmocka_unit_test(test_forced_eviction),
        cmocka_unit_test(test_warm_mix),       cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_failing_copies), cmocka_unit_test(test_cancel),
        cmocka_unit_test(test_idle),           cmocka_unit_test(test_remote),
        cmocka_unit_test(test_write_through),  cmocka_unit_test(test_write_through_disk),
        cmocka_unit_test(test_remote_mix),     cmocka_unit_test(test_redis_mix),
        cmocka_unit_test(test_remote_faults),  cmocka_unit_test(test_remote_options),
    };
    return cmocka_run_group_tests_name("engine_tiers", tests, set_up, tear_down);
}
