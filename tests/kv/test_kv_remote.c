/* SPDX-License-Identifier: Apache-2.0 */
/* The remote tier: what was put comes back whole or not at all, whatever the server does; and a
 * server that does nothing costs nobody more than one wait. */
#include "kv/kv_remote.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kv/kv_pool.h"
#include "kv/kv_remote_known.h"
#include "kv/kv_remote_link.h"
#include "kv/kv_remote_value.h"
#include "tests/kv/fake_redis.h"
#include "tests/kv/noted_lines.h"
#include "tests/kv/redis_server.h"
#include "tests/test.h"

enum { BLOCK_BYTES = 8192, WAIT_NS = 1000000, MAX_WAITS = 20000, NUM_WALK_STEPS = 3000 };

static const struct kv_key owner = {{1, 2, 3, 4}};
static const unsigned char secret[32] = "what the engines share, no more";
static const unsigned char other_secret[32] = "what somebody else made up";

/* ---- blocks ---------------------------------------------------------------------------------- */

/* Block number i: its key, its ids, its contents. */
static struct kv_key key_of(int32_t i)
{
    return (struct kv_key){{(uint64_t)i * 0x9e3779b97f4a7c15u + 1, (uint64_t)i, 5, 7}};
}

static void ids_of(int32_t i, int32_t ids[KV_BLOCK_SIZE])
{
    for (int32_t j = 0; j < KV_BLOCK_SIZE; j++) {
        ids[j] = 100 * i + j;
    }
}

/* Half of it can be compressed. */
static void fill(int32_t i, unsigned char block[BLOCK_BYTES])
{
    uint32_t random = (uint32_t)i * 2654435761u + 1;
    for (int32_t j = 0; j < BLOCK_BYTES; j++) {
        random = random * 1664525u + 1013904223u;
        block[j] = j % 2 == 0 ? (unsigned char)(random >> 24) : 3;
    }
}

/* ---- tiers ----------------------------------------------------------------------------------- */

static struct kv_remote_url url_of(int32_t port)
{
    char text[64];
    struct kv_remote_url url;
    (void)snprintf(text, sizeof(text), "redis://127.0.0.1:%d", (int)port);
    assert_int_equal(kv_remote_url_parse(text, &url, NULL), IMBREX_STATUS_OK);
    return url;
}

static struct kv_remote_options options_of(const struct kv_remote_url *url)
{
    return (struct kv_remote_options){.url = url,
                                      .owner = owner,
                                      .block_bytes = BLOCK_BYTES,
                                      .connect_timeout_ms = 10000,
                                      .answer_timeout_ms = 10000,
                                      .min_retry_ms = 1,
                                      .max_retry_ms = 8};
}

static struct kv_remote *open_with(const struct kv_remote_options *options)
{
    struct kv_remote *remote;
    struct imbrex_error err;
    if (kv_remote_open(options, &remote, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    return remote;
}

static struct kv_remote *open_tier(int32_t port)
{
    struct kv_remote_url url = url_of(port);
    struct kv_remote_options options = options_of(&url);
    return open_with(&options);
}

static struct kv_remote_metrics metrics_of(struct kv_remote *remote)
{
    struct kv_remote_metrics metrics;
    kv_remote_read_metrics(remote, &metrics);
    return metrics;
}

static struct kv_remote_result await(struct kv_remote *remote)
{
    struct kv_remote_result result;
    for (int32_t i = 0; i < MAX_WAITS; i++) {
        if (kv_remote_poll(remote, &result)) {
            return result;
        }
        kv_remote_wait(remote, WAIT_NS);
    }
    fail_msg("%s", "a job has no end");
    return (struct kv_remote_result){0};
}

/* Polls where no put and no get is under way. */
static void poll_asks(struct kv_remote *remote)
{
    struct kv_remote_result result;
    assert_false(kv_remote_poll(remote, &result));
}

static void await_up(struct kv_remote *remote)
{
    for (int32_t i = 0; i < MAX_WAITS && !metrics_of(remote).is_up; i++) {
        kv_remote_wait(remote, WAIT_NS);
        poll_asks(remote);
    }
    assert_true(metrics_of(remote).is_up);
}

static enum kv_remote_state look(struct kv_remote *remote, int32_t i)
{
    struct kv_key key = key_of(i);
    enum kv_remote_state state = kv_remote_look(remote, &key);
    for (int32_t j = 0; j < MAX_WAITS && state == KV_REMOTE_ASKED; j++) {
        kv_remote_wait(remote, WAIT_NS);
        poll_asks(remote);
        state = kv_remote_look(remote, &key);
    }
    assert_int_not_equal(state, KV_REMOTE_ASKED);
    return state;
}

static bool put(struct kv_remote *remote, int32_t i)
{
    unsigned char block[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    fill(i, block);
    ids_of(i, ids);
    if (!kv_remote_put(remote, &key, ids, block, i)) {
        return false;
    }
    struct kv_remote_result result = await(remote);
    assert_int_equal(result.tag, i);
    assert_false(result.is_get);
    return result.is_good;
}

/* Whether the block came back; what comes back is the block. */
static bool get(struct kv_remote *remote, int32_t i)
{
    unsigned char block[BLOCK_BYTES], expected[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    if (!kv_remote_get(remote, &key, ids, block, i)) {
        return false;
    }
    struct kv_remote_result result = await(remote);
    assert_int_equal(result.tag, i);
    assert_true(result.is_get);
    if (result.is_good) {
        fill(i, expected);
        assert_memory_equal(block, expected, BLOCK_BYTES);
    }
    return result.is_good;
}

/* As often as it takes until the server is there again. */
static void put_at_last(struct kv_remote *remote, int32_t i)
{
    for (int32_t j = 0; j < MAX_WAITS; j++) {
        if (put(remote, i)) {
            return;
        }
        kv_remote_wait(remote, WAIT_NS);
        poll_asks(remote);
    }
    fail_msg("%s", "the server does not come back");
}

/* ---- addresses ------------------------------------------------------------------------------- */

/* Catches: a part that is taken for another, a number that overflows or is cut, a password in a
 * message, TLS that is asked for and not there. */
static void test_url(void **state)
{
    (void)state;
    struct kv_remote_url url;
    struct imbrex_error err;
    static const char *const refused[] = {
        "",
        "redis:/",
        "redis://",
        "http://h",
        "rediss://h",
        "redis://:6379",
        "redis://h:",
        "redis://h:0",
        "redis://h:65536",
        "redis://h:99999999999999999999",
        "redis://h:6a",
        "redis://h/x",
        "redis://h/-1",
        "redis://h/1/2",
        "redis://h?ttl=",
        "redis://h?ttl=0",
        "redis://h?ttl=5&ttl=6",
        "redis://h?ttl=-1",
        "redis://h?ttl=1d",
        "redis://h?ttl=315360001",
        "redis://h?zstd=20",
        "redis://h?tls=1",
        "redis://h?",
        "redis://h?ttl=5&",
        "redis://hunter2@h",
        "redis://:@h",
        "redis://:hunter2%@h",
        "redis://:hunter2%4@h",
        "redis://:hunter2%00@h",
        "redis://:hunter2%zz@h",
        "redis://[::1",
        "redis://[::1]x",
        "redis://[]:1",
    };
    assert_int_equal(kv_remote_url_parse("redis://some.host", &url, &err), IMBREX_STATUS_OK);
    assert_string_equal(url.host, "some.host");
    assert_int_equal(url.port, 6379);
    assert_int_equal(url.database, 0);
    assert_int_equal(url.ttl_s, 86400);
    assert_int_equal(url.zstd_level, 0);
    assert_string_equal(url.password, "");
    assert_int_equal(
        kv_remote_url_parse("redis://me:p%40s%3as/%2F@[::1]:7000/12?ttl=1&zstd=0", &url, &err),
        IMBREX_STATUS_OK);
    assert_string_equal(url.host, "::1");
    assert_string_equal(url.user, "me");
    assert_string_equal(url.password, "p@s:s//");
    assert_int_equal(url.port, 7000);
    assert_int_equal(url.database, 12);
    assert_int_equal(url.ttl_s, 1);
    assert_int_equal(kv_remote_url_parse("redis://:x@h/?ttl=7", &url, &err), IMBREX_STATUS_OK);
    assert_string_equal(url.user, "");
    assert_int_equal(url.ttl_s, 7);
    for (size_t i = 0; i < sizeof(refused) / sizeof(refused[0]); i++) {
        if (kv_remote_url_parse(refused[i], &url, &err) != IMBREX_STATUS_INVALID_ARGUMENT) {
            fail_msg("taken: %s", refused[i]);
        }
        assert_non_null(strstr(err.message, "kv_remote_url"));
        assert_null(strstr(err.message, "hunter2"));
    }
    assert_int_equal(kv_remote_url_parse("rediss://h", &url, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "TLS"));
}

/* Catches: a refusal that does not say which part, what may stand there and what does, or one that
 * shows what may be a password. */
static void test_url_refusals(void **state)
{
    (void)state;
    static const struct {
        const char *url, *message;
    } cases[] = {
        {"redis://h:99999",
         "kv_remote_url: PORT: expected a number from 1 to 65535, found \"99999\""},
        {"redis://h:0", "PORT: expected a number from 1 to 65535, found \"0\""},
        {"redis://h:", "PORT: expected a number from 1 to 65535, found nothing"},
        {"redis://me:hunter2", "PORT: expected a number from 1 to 65535, found what is not shown"},
        {"redis://h/hunter2",
         "DB: expected a number from 0 to 2147483647, found what is not shown"},
        {"redis://h/4294967296",
         "DB: expected a number from 0 to 2147483647, found \"4294967296\""},
        {"redis://h?ttl=0", "ttl: expected a number from 1 to 315360000, found \"0\""},
        {"redis://h?ttl=1d", "ttl: expected a number from 1 to 315360000, found \"1d\""},
        {"redis://h?ttl=5&zstd=20", "zstd: expected a number from 0 to 19, found \"20\""},
        {"redis://h?ttl=5&ttl=5", "ttl: expected it once, found it twice"},
        {"redis://h?ttl=5&", "found an empty setting"},
        {"redis://h?tls=1",
         "expected the settings ttl=SECONDS and zstd=LEVEL, found an unknown one, tls"},
        {"redis://h?zstd", "found one without a value, zstd"},
        {"redis://me:12?hunter2@h", "found an @ behind the ?"},
        {"redis://:6379", "found no HOST"},
        {"redis://hunter2@h", "found no [USER]:PASSWORD before the @"},
    };
    struct kv_remote_url url;
    struct imbrex_error err;
    for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
        assert_int_equal(kv_remote_url_parse(cases[i].url, &url, &err),
                         IMBREX_STATUS_INVALID_ARGUMENT);
        if (strstr(err.message, cases[i].message) == NULL) {
            fail_msg("%s: %s", cases[i].url, err.message);
        }
        assert_string_equal(err.field, "kv_remote_url");
        assert_null(strstr(err.message, "hunter2"));
    }
}

/* ---- values ---------------------------------------------------------------------------------- */

static struct kv_remote_codec *codec_of(const unsigned char *signs_with, int32_t zstd_level)
{
    struct kv_remote_codec *codec;
    const struct kv_remote_codec_options options = {
        .owner = owner, .block_bytes = BLOCK_BYTES, .secret = signs_with, .zstd_level = zstd_level};
    assert_int_equal(kv_remote_codec_create(&options, &codec, NULL), IMBREX_STATUS_OK);
    return codec;
}

static bool opens(struct kv_remote_codec *codec, int32_t i, const unsigned char *value,
                  size_t num_bytes)
{
    unsigned char block[BLOCK_BYTES], expected[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    if (!kv_remote_value_open(codec, &key, ids, value, num_bytes, block)) {
        return false;
    }
    fill(i, expected);
    assert_memory_equal(block, expected, BLOCK_BYTES);
    return true;
}

/* A copy of block i's value, as long as it is: what lies behind it is not readable for ASan. */
static unsigned char *make_value(struct kv_remote_codec *codec, int32_t i, size_t *num_bytes)
{
    unsigned char block[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    fill(i, block);
    ids_of(i, ids);
    const unsigned char *made = kv_remote_value_make(codec, &key, ids, block, num_bytes);
    unsigned char *value = malloc(*num_bytes);
    assert_non_null(value);
    memcpy(value, made, *num_bytes);
    return value;
}

static void check_damage(struct kv_remote_codec *codec)
{
    size_t num_bytes;
    unsigned char *value = make_value(codec, 1, &num_bytes);
    assert_true(opens(codec, 1, value, num_bytes));
    assert_false(opens(codec, 2, value, num_bytes));
    /* Every bit of the header, some of the payload. */
    for (size_t at = 0; at < num_bytes; at += at < sizeof(struct kv_remote_header) ? 1 : 97) {
        for (int32_t bit = 0; bit < 8; bit++) {
            value[at] ^= (unsigned char)(1 << bit);
            assert_false(opens(codec, 1, value, num_bytes));
            value[at] ^= (unsigned char)(1 << bit);
        }
    }
    for (size_t length = 0; length < num_bytes; length += length < 300 ? 1 : 61) {
        unsigned char *cut = malloc(length + 1);
        assert_non_null(cut);
        memcpy(cut, value, length);
        assert_false(opens(codec, 1, cut, length));
        free(cut);
    }
    unsigned char *longer = calloc(1, num_bytes + 1);
    assert_non_null(longer);
    memcpy(longer, value, num_bytes);
    assert_false(opens(codec, 1, longer, num_bytes + 1));
    free(longer);
    free(value);
}

/* Catches: a field that no check covers, a value of another key, owner or length that is taken, a
 * read behind the value's end. */
static void test_value(void **state)
{
    (void)state;
    struct kv_remote_codec *codec = codec_of(NULL, 0), *signing = codec_of(secret, 0);
    check_damage(codec);
    check_damage(signing);
    size_t num_bytes;
    unsigned char *value = make_value(codec, 1, &num_bytes);
    assert_int_equal(num_bytes, sizeof(struct kv_remote_header) + BLOCK_BYTES);
    /* Another owner. */
    value[offsetof(struct kv_remote_header, owner)] ^= 1;
    kv_remote_value_seal(codec, value, num_bytes);
    assert_false(opens(codec, 1, value, num_bytes));
    free(value);
    kv_remote_codec_destroy(codec);
    kv_remote_codec_destroy(signing);
}

/* Somebody without the secret, or with another one, changes a value and makes all checksums right.
 * Catches: a forged value that is taken, a MAC over less than all. */
static void test_forged(void **state)
{
    (void)state;
    struct kv_remote_codec *codec = codec_of(NULL, 0), *signing = codec_of(secret, 0);
    struct kv_remote_codec *forging = codec_of(other_secret, 0);
    size_t num_bytes;
    unsigned char *value = make_value(signing, 1, &num_bytes);
    assert_true(opens(signing, 1, value, num_bytes));
    kv_remote_value_seal(forging, value, num_bytes);
    assert_true(opens(forging, 1, value, num_bytes));
    assert_false(opens(signing, 1, value, num_bytes));
    value[num_bytes - 1] ^= 1;
    kv_remote_value_seal(codec, value, num_bytes);
    assert_false(opens(signing, 1, value, num_bytes));
    free(value);
    /* What only the header says is signed too. */
    value = make_value(signing, 1, &num_bytes);
    struct kv_remote_header header;
    memcpy(&header, value, sizeof(header));
    unsigned char mac[32];
    memcpy(mac, header.mac, sizeof(mac));
    header.token_ids[3]++;
    memcpy(value, &header, sizeof(header));
    kv_remote_value_seal(signing, value, num_bytes);
    memcpy(&header, value, sizeof(header));
    assert_memory_not_equal(header.mac, mac, sizeof(mac));
    free(value);
    kv_remote_codec_destroy(codec);
    kv_remote_codec_destroy(signing);
    kv_remote_codec_destroy(forging);
}

/* Catches: a compressed value that does not come back, one that is kept though it is longer than
 * the block, a frame that says another length than the block's. */
static void test_compressed(void **state)
{
    (void)state;
#if IMBREX_HAS_ZSTD
    struct kv_remote_codec *codec = codec_of(secret, 3), *as_is = codec_of(secret, 0);
    size_t num_bytes;
    check_damage(codec);
    unsigned char *value = make_value(codec, 1, &num_bytes);
    assert_true(num_bytes < BLOCK_BYTES);
    assert_true(opens(as_is, 1, value, num_bytes)); /* whoever reads need not compress */
    /* The frame of another length, with checksums that are right. */
    struct kv_remote_header header;
    memcpy(&header, value, sizeof(header));
    header.payload_bytes = num_bytes - 1 - sizeof(header);
    memcpy(value, &header, sizeof(header));
    kv_remote_value_seal(codec, value, num_bytes - 1);
    assert_false(opens(codec, 1, value, num_bytes - 1));
    free(value);
    kv_remote_codec_destroy(codec);
    kv_remote_codec_destroy(as_is);
#else
    skip();
#endif
}

/* ---- answers --------------------------------------------------------------------------------- */

/* Catches: an answer that is believed for ever, a table that grows or loses what is asked. */
static void test_known(void **state)
{
    (void)state;
    struct kv_remote_known known;
    enum kv_remote_state found;
    assert_int_equal(kv_remote_known_create(8, &known, NULL), IMBREX_STATUS_OK);
    struct kv_key key = key_of(0);
    assert_false(kv_remote_known_find(&known, &key, 0, &found));
    kv_remote_known_note(&known, &key, KV_REMOTE_ASKED, 0);
    for (int32_t i = 1; i < 30; i++) {
        struct kv_key other = key_of(i);
        kv_remote_known_note(&known, &other, i % 2 == 0 ? KV_REMOTE_THERE : KV_REMOTE_ABSENT, 100);
        assert_true(kv_remote_known_find(&known, &other, 99, &found));
        assert_int_equal(found, i % 2 == 0 ? KV_REMOTE_THERE : KV_REMOTE_ABSENT);
        assert_false(kv_remote_known_find(&known, &other, 100, &found));
        assert_true(kv_remote_known_check(&known));
    }
    assert_true(kv_remote_known_find(&known, &key, 1000, &found));
    assert_int_equal(found, KV_REMOTE_ASKED);
    assert_int_equal(known.num_asked, 1);
    struct kv_key old = key_of(20);
    assert_false(kv_remote_known_find(&known, &old, 0, &found));
    kv_remote_known_note(&known, &key, KV_REMOTE_THERE, 5);
    assert_int_equal(known.num_asked, 0);
    kv_remote_known_forget(&known, &key);
    assert_false(kv_remote_known_find(&known, &key, 0, &found));
    assert_true(kv_remote_known_check(&known));
    kv_remote_known_destroy(&known);
}

/* ---- a server that is well ------------------------------------------------------------------- */

/* Catches: a block that another engine of the same model does not find, one that an engine of
 * another model does, a block that is sent though it is there, keys outside of the namespace, a
 * TTL that is not set. */
static void check_round_trip(int32_t port, struct fake_redis *redis)
{
    char text[256];
    struct kv_remote *first = open_tier(port), *second = open_tier(port);
    struct kv_remote_url url = url_of(port);
    struct kv_remote_options options = options_of(&url);
    options.owner.words[0]++;
    struct kv_remote *foreign = open_with(&options);
    for (int32_t i = 0; i < 10; i++) {
        assert_int_equal(look(first, i), KV_REMOTE_ABSENT);
        assert_true(put(first, i));
        assert_int_equal(look(first, i), KV_REMOTE_THERE);
        assert_true(get(first, i));
    }
    assert_int_equal(metrics_of(first).num_known, 0);
    for (int32_t i = 0; i < 10; i++) {
        assert_true(put(second, i));
        assert_int_equal(look(foreign, i), KV_REMOTE_ABSENT);
    }
    assert_int_equal(metrics_of(second).num_known, 10);
    assert_true(metrics_of(second).put_bytes == 0);
    for (int32_t i = 0; i < 10; i++) {
        assert_int_equal(look(second, i), KV_REMOTE_THERE);
        assert_true(get(second, i));
    }
    assert_int_equal(look(second, 10), KV_REMOTE_ABSENT);
    assert_false(get(second, 11));
    struct kv_remote_metrics metrics = metrics_of(second);
    assert_int_equal(metrics.num_gone, 1);
    assert_int_equal(kv_remote_num_faults(&metrics), 0);
    assert_int_equal(metrics.num_failures, 0);
    assert_true(kv_remote_check(first) && kv_remote_check(second) && kv_remote_check(foreign));
    if (redis != NULL) {
        fake_redis_last(redis, 'S', text, sizeof(text));
        assert_int_equal(strncmp(text, "SET imbrex-kv:1:0100000000000000:", 33), 0);
        assert_non_null(strstr(text, " EX 86400"));
        assert_int_equal(fake_redis_count(redis, 'S'), 10);
    }
    kv_remote_close(first);
    kv_remote_close(second);
    kv_remote_close(foreign);
}

static void test_round_trip(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    check_round_trip(fake_redis_port(redis), redis);
    fake_redis_destroy(redis);
}

/* Many at once. Catches: answers that go to the wrong job, a limit that is not one, a tag that is
 * given back twice or never, a cancelled get that is named. */
static void test_many(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote *remote = open_tier(fake_redis_port(redis));
    unsigned char(*blocks)[BLOCK_BYTES] = calloc(KV_REMOTE_MAX_PUTS, BLOCK_BYTES);
    unsigned char expected[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE], num_cancelled = 0;
    bool is_given[KV_REMOTE_MAX_GETS] = {false};
    assert_non_null(blocks);
    for (int32_t i = 0; i < KV_REMOTE_MAX_PUTS; i++) {
        struct kv_key key = key_of(i);
        ids_of(i, ids);
        fill(i, blocks[i]);
        assert_true(kv_remote_put(remote, &key, ids, blocks[i], i));
    }
    struct kv_key next = key_of(100);
    assert_false(kv_remote_can_put(remote));
    assert_false(kv_remote_put(remote, &next, ids, blocks[0], 100));
    for (int32_t i = 0; i < KV_REMOTE_MAX_PUTS; i++) {
        assert_true(await(remote).is_good);
    }
    memset(blocks, 0, KV_REMOTE_MAX_PUTS * BLOCK_BYTES);
    for (int32_t i = 0; i < KV_REMOTE_MAX_GETS; i++) {
        struct kv_key key = key_of(i);
        ids_of(i, ids);
        is_given[i] = kv_remote_get(remote, &key, ids, blocks[i], i);
        assert_true(is_given[i]);
        if (i % 3 == 0 && kv_remote_cancel_get(remote, i)) {
            is_given[i] = false;
            num_cancelled++;
        }
    }
    assert_false(kv_remote_cancel_get(remote, 1000));
    for (int32_t i = num_cancelled; i < KV_REMOTE_MAX_GETS; i++) {
        struct kv_remote_result result = await(remote);
        assert_true(result.is_get && result.is_good && is_given[result.tag]);
        is_given[result.tag] = false;
        fill(result.tag, expected);
        assert_memory_equal(blocks[result.tag], expected, BLOCK_BYTES);
    }
    /* Keys are asked for without a limit that anybody would notice. */
    for (int32_t i = 0; i < 3 * KV_REMOTE_MAX_ASKS; i++) {
        struct kv_key key = key_of(i);
        assert_true(kv_remote_look(remote, &key) != KV_REMOTE_ASKED ||
                    kv_remote_num_asks(remote) <= KV_REMOTE_MAX_ASKS);
    }
    for (int32_t i = 0; i < 3 * KV_REMOTE_MAX_ASKS; i += 100) {
        assert_int_equal(look(remote, i),
                         i < KV_REMOTE_MAX_PUTS ? KV_REMOTE_THERE : KV_REMOTE_ABSENT);
    }
    assert_true(kv_remote_check(remote));
    kv_remote_close(remote);
    fake_redis_destroy(redis);
    free(blocks);
}

/* Catches: a login or database that is not sent, or sent in another order. */
static void test_greeting(void **state)
{
    (void)state;
    char text[256];
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote_url url = url_of(fake_redis_port(redis));
    struct kv_remote_options options = options_of(&url);
    (void)snprintf(url.user, sizeof(url.user), "me");
    (void)snprintf(url.password, sizeof(url.password), "a word");
    url.database = 5;
    url.ttl_s = 17;
    struct kv_remote *remote = open_with(&options);
    fake_redis_last(redis, 'A', text, sizeof(text));
    assert_string_equal(text, "AUTH me a word");
    fake_redis_last(redis, 'S', text, sizeof(text));
    assert_string_equal(text, "SELECT 5");
    assert_true(metrics_of(remote).is_up);
    assert_true(put(remote, 1));
    fake_redis_last(redis, 'S', text, sizeof(text));
    assert_non_null(strstr(text, " EX 17"));
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* ---- a server that is not -------------------------------------------------------------------- */

static struct kv_remote *open_impatient(struct fake_redis *redis)
{
    struct kv_remote_url url = url_of(fake_redis_port(redis));
    struct kv_remote_options options = options_of(&url);
    options.answer_timeout_ms = TEST_SANITIZED ? 1000 : 100;
    return open_with(&options);
}

/* Catches: a wrong answer that becomes a block, an answer that goes to the job after its own, a
 * fault that is not counted, memory for what a server only says that it will send, a tier that does
 * not come back when the server is well again. */
static void test_faults(void **state)
{
    (void)state;
    for (int32_t fault = FAKE_REDIS_WELL + 1; fault < FAKE_REDIS_NUM_FAULTS; fault++) {
        struct fake_redis *redis = fake_redis_create();
        struct kv_remote *remote = open_impatient(redis);
        fake_redis_set_error(redis, "MOVED 3999 127.0.0.1:6381", false);
        for (int32_t i = 0; i < 4; i++) {
            assert_true(put(remote, i));
        }
        fake_redis_set_fault(redis, (enum fake_redis_fault)fault, 1);
        bool is_got = get(remote, 1), is_put = put(remote, 5);
        struct kv_remote_metrics metrics = metrics_of(remote);
        uint64_t num_faults = kv_remote_num_faults(&metrics) + metrics.num_gone;
        /* After one answer too many, that one is right; what follows is not believed. */
        assert_int_equal(is_got, fault == FAKE_REDIS_OUT_OF_MEMORY || fault == FAKE_REDIS_TWICE);
        if (is_put && fault != FAKE_REDIS_TWICE) {
            assert_true(fault >= FAKE_REDIS_OTHER_VALUE && fault <= FAKE_REDIS_GONE);
        }
        assert_true(num_faults > 0 || fault == FAKE_REDIS_TWICE);
        fake_redis_set_fault(redis, FAKE_REDIS_WELL, 1);
        await_up(remote);
        assert_true(get(remote, 2));
        if (fault != FAKE_REDIS_OUT_OF_MEMORY && fault != FAKE_REDIS_ERROR) {
            put_at_last(remote, 6);
        }
        assert_true(kv_remote_check(remote));
        kv_remote_close(remote);
        fake_redis_destroy(redis);
    }
}

/* A value that was damaged on the server is written over by who computes it again. Catches: one
 * that is fetched and refused for ever. */
static void test_repair(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote *remote = open_impatient(redis), *other = open_impatient(redis);
    assert_true(put(remote, 1));
    fake_redis_set_fault(redis, FAKE_REDIS_CUT_VALUE, 1);
    assert_false(get(other, 1));
    assert_int_equal(metrics_of(other).num_damaged, 1);
    assert_int_equal(look(other, 1), KV_REMOTE_ABSENT);
    fake_redis_set_fault(redis, FAKE_REDIS_WELL, 1);
    int32_t num_set = fake_redis_count(redis, 'S');
    assert_true(put(other, 1));
    assert_int_equal(fake_redis_count(redis, 'S'), num_set + 1);
    assert_true(get(other, 1));
    kv_remote_close(remote);
    kv_remote_close(other);
    fake_redis_destroy(redis);
}

/* Something else lies under a block's key: too long, too short, no string. Catches: a connection
 * that is given up for it, a key that is asked for again and again, a fault that is not counted,
 * one that stays until its time is over since the server "has" the block. */
static void test_foreign_value(void **state)
{
    (void)state;
    static const size_t lengths[] = {10, 1 << 20, 8 << 20, 0};
    for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
        struct fake_redis *redis = fake_redis_create();
        struct kv_remote *first = open_impatient(redis), *second = open_impatient(redis);
        assert_true(put(first, 1));
        if (lengths[i] > 0) {
            fake_redis_spoil(redis, lengths[i]);
        } else {
            fake_redis_spoil_with_lists(redis);
        }
        /* Who asks first, and who sends without asking. */
        assert_int_equal(look(second, 1), KV_REMOTE_ABSENT);
        int32_t num_asked = fake_redis_count(redis, 'L');
        assert_int_equal(look(second, 1), KV_REMOTE_ABSENT);
        assert_int_equal(fake_redis_count(redis, 'L'), num_asked);
        assert_true(put(second, 1));
        assert_true(get(second, 1));
        assert_int_equal(metrics_of(second).num_damaged, 1);
        if (lengths[i] > 0) {
            fake_redis_spoil(redis, lengths[i]);
        } else {
            fake_redis_spoil_with_lists(redis);
        }
        struct kv_remote *third = open_impatient(redis);
        assert_true(put(third, 1));
        assert_true(get(third, 1));
        assert_int_equal(metrics_of(third).num_damaged, 1);
        assert_int_equal(metrics_of(second).num_failures + metrics_of(third).num_failures, 0);
        assert_int_equal(metrics_of(second).num_errors + metrics_of(third).num_errors, 0);
        kv_remote_close(first);
        kv_remote_close(second);
        kv_remote_close(third);
        fake_redis_destroy(redis);
    }
}

/* The value grows between the question and the fetch. Catches: a key that ends the connection each
 * time. */
static void test_overlong_answer(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote *remote = open_impatient(redis);
    assert_true(put(remote, 1));
    assert_int_equal(look(remote, 1), KV_REMOTE_THERE);
    fake_redis_spoil(redis, 8 << 20);
    assert_false(get(remote, 1));
    await_up(remote);
    assert_int_equal(look(remote, 1), KV_REMOTE_ABSENT);
    assert_int_equal(metrics_of(remote).num_damaged, 1);
    put_at_last(remote, 1);
    assert_true(get(remote, 1));
    assert_int_equal(metrics_of(remote).num_failures, 1);
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* Catches: an engine that is not created because its server is down, one that never finds it, a
 * look that waits for a server that is not there. */
static void test_restart(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    fake_redis_stop(redis, true);
    struct kv_remote *remote = open_tier(fake_redis_port(redis));
    struct kv_key key = key_of(1);
    assert_false(metrics_of(remote).is_up);
    assert_int_equal(kv_remote_look(remote, &key), KV_REMOTE_ABSENT);
    assert_false(put(remote, 1));
    assert_false(get(remote, 1));
    assert_true(metrics_of(remote).num_refused == 1);
    fake_redis_go_on(redis);
    await_up(remote);
    assert_true(put(remote, 1));
    fake_redis_stop(redis, true);
    while (metrics_of(remote).is_up) {
        kv_remote_wait(remote, WAIT_NS);
    }
    fake_redis_go_on(redis);
    await_up(remote);
    assert_true(get(remote, 1));
    fake_redis_stop(redis, false);
    while (metrics_of(remote).is_up) {
        kv_remote_wait(remote, WAIT_NS);
    }
    assert_int_equal(look(remote, 1), KV_REMOTE_ABSENT);
    fake_redis_go_on(redis);
    await_up(remote);
    assert_false(get(remote, 1)); /* the table still says that it is there */
    assert_int_equal(metrics_of(remote).num_gone, 1);
    assert_true(put(remote, 1));
    assert_true(get(remote, 1));
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* Catches: more than one wait for a server that takes commands and answers none, a close that waits
 * for it, a connection that is tried without a pause. */
static void test_silent(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote_url url = url_of(fake_redis_port(redis));
    struct kv_remote_options options = options_of(&url);
    options.answer_timeout_ms = 100;
    options.min_retry_ms = 1000000;
    options.max_retry_ms = 1000000;
    struct kv_remote *remote = open_with(&options);
    assert_true(put(remote, 1));
    fake_redis_set_fault(redis, FAKE_REDIS_SILENT, 1);
    assert_int_equal(look(remote, 7), KV_REMOTE_ABSENT);
    assert_false(metrics_of(remote).is_up);
    int32_t num_asked = fake_redis_count(redis, 'L');
    for (int32_t i = 10; i < 100; i++) {
        assert_int_equal(look(remote, i), KV_REMOTE_ABSENT);
        assert_false(put(remote, i));
    }
    assert_int_equal(fake_redis_count(redis, 'L'), num_asked);
    assert_int_equal(fake_redis_count(redis, 'C'), 1);
    assert_int_equal(metrics_of(remote).num_failures, 1);
    kv_remote_close(remote);

    /* With a long timeout: what is under way when it is closed is given up. */
    options.answer_timeout_ms = 1000000;
    remote = open_with(&options);
    unsigned char block[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(1);
    ids_of(1, ids);
    assert_true(kv_remote_get(remote, &key, ids, block, 1));
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* Catches: a server that refuses all blocks and is sent every one of them, reads that stop because
 * writes do. */
static void test_out_of_memory(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote *remote = open_tier(fake_redis_port(redis));
    assert_true(put(remote, 1));
    fake_redis_set_fault(redis, FAKE_REDIS_OUT_OF_MEMORY, 1);
    assert_false(put(remote, 2));
    int32_t num_set = fake_redis_count(redis, 'S');
    for (int32_t i = 3; i < 20; i++) {
        (void)put(remote, i);
        assert_true(get(remote, 1));
    }
    /* A pause is longer than these took, or there were few. */
    assert_true(fake_redis_count(redis, 'S') <= num_set + 4);
    assert_true(metrics_of(remote).num_errors >= 1);
    assert_true(metrics_of(remote).is_up);
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* Catches: a log that is filled, one that does not say what the server said, or says the password,
 * or what a server sends to a terminal; a login that is refused and tried without a pause. */
static void test_refused_login(void **state)
{
    (void)state;
    struct noted_lines lines = {0};
    const struct log log = {.write = note_line, .user = &lines};
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote_url url = url_of(fake_redis_port(redis));
    struct kv_remote_options options = options_of(&url);
    (void)snprintf(url.password, sizeof(url.password), "hunter2");
    options.min_retry_ms = 1000000;
    options.max_retry_ms = 1000000;
    fake_redis_set_error(redis, "WRONGPASS invalid\033[31m password", true);
    struct kv_remote *remote = open_with(&options);
    assert_false(metrics_of(remote).is_up);
    assert_int_equal(metrics_of(remote).num_failures, 1);
    kv_remote_log_faults(remote, &log, 5);
    kv_remote_log_faults(remote, &log, INT64_C(70000000000));
    assert_int_equal(lines.num_lines, 1);
    assert_non_null(strstr(lines.last, "WRONGPASS invalid?[31m password"));
    assert_non_null(strstr(lines.last, "127.0.0.1"));
    assert_null(strstr(lines.last, "hunter2"));
    assert_int_equal(fake_redis_count(redis, 'C'), 1);
    kv_remote_close(remote);

    fake_redis_set_error(redis, "ERR", false);
    url.password[0] = '\0';
    options = options_of(&url);
    lines.num_lines = 0;
    remote = open_with(&options);
    assert_true(put(remote, 1));
    fake_redis_set_fault(redis, FAKE_REDIS_FLIP_VALUE, 1);
    for (int32_t i = 0; i < 5; i++) {
        assert_false(get(remote, 1));
        kv_remote_log_faults(remote, &log, INT64_C(100000000000) + i);
    }
    assert_int_equal(lines.num_lines, 1);
    kv_remote_log_faults(remote, &log, INT64_C(160000000001));
    assert_int_equal(lines.num_lines, 2);
    assert_non_null(strstr(lines.last, "5 damaged"));
    kv_remote_close(remote);
    fake_redis_destroy(redis);
}

/* Any order of everything over a server that fails in every way. Catches: a block that is not what
 * was put, a job without an end, a table and jobs that do not agree. */
static void test_walk(void **state)
{
    (void)state;
    struct fake_redis *redis = fake_redis_create();
    struct kv_remote_url url = url_of(fake_redis_port(redis));
    struct kv_remote_options options = options_of(&url);
    options.answer_timeout_ms = 20;
    options.secret = secret;
    url.zstd_level = IMBREX_HAS_ZSTD;
    struct kv_remote *remotes[2] = {open_with(&options), open_with(&options)};
    uint32_t random = 7;
    int32_t num_got = 0, num_failed = 0;
    fake_redis_set_error(redis, "LOADING Redis is loading the dataset in memory", false);
    for (int32_t step = 0; step < NUM_WALK_STEPS; step++) {
        random = random * 1664525u + 1013904223u;
        struct kv_remote *remote = remotes[(random >> 30) & 1];
        int32_t i = (int32_t)((random >> 20) % 50);
        if (step % 100 == 0) {
            int32_t fault = (int32_t)((random >> 8) % FAKE_REDIS_NUM_FAULTS);
            fake_redis_set_fault(redis, (enum fake_redis_fault)fault, 3);
        }
        if (step % 1000 == 999) {
            fake_redis_stop(redis, step % 2000 == 999);
            fake_redis_go_on(redis);
        }
        switch ((random >> 16) % 3) {
        case 0:
            (void)put(remote, i);
            break;
        case 1:
            num_got += get(remote, i);
            break;
        default:
            num_failed += look(remote, i) == KV_REMOTE_ABSENT;
        }
        assert_true(kv_remote_check(remote));
    }
    assert_true(num_got > 10 && num_failed > 10);
    for (int32_t i = 0; i < 2; i++) {
        kv_remote_close(remotes[i]);
    }
    fake_redis_destroy(redis);
}

/* ---- Debian's server ------------------------------------------------------------------------- */

static void test_redis(void **state)
{
    (void)state;
    struct redis_server server;
    if (!redis_server_is_there()) {
        skip();
    }
    redis_server_start(&server, NULL, NULL);
    check_round_trip(server.port, NULL);
    redis_server_kill(&server);
}

/* Catches: what only a real server does: a login that it takes or refuses, a limit of its memory, a
 * TTL that runs out. */
static void test_redis_settings(void **state)
{
    (void)state;
    struct redis_server server;
    if (!redis_server_is_there()) {
        skip();
    }
    redis_server_start(&server, "a word", "3mb");
    struct kv_remote_url url = url_of(server.port);
    struct kv_remote_options options = options_of(&url);
    struct kv_remote *remote = open_with(&options);
    assert_false(metrics_of(remote).is_up); /* NOAUTH */
    kv_remote_close(remote);
    (void)snprintf(url.password, sizeof(url.password), "a word");
    url.database = 3;
    url.ttl_s = 1;
    remote = open_with(&options);
    assert_true(metrics_of(remote).is_up);
    assert_true(put(remote, 0));
    assert_true(get(remote, 0));
    for (int32_t i = 0; i < MAX_WAITS && get(remote, 0); i++) {
        kv_remote_wait(remote, WAIT_NS);
    }
    assert_false(get(remote, 0)); /* its second is over */
    kv_remote_close(remote);
    url.ttl_s = 17;
    remote = open_with(&options);
    int32_t num_put = 0;
    while (num_put < 1000 && put(remote, num_put)) {
        num_put++;
    }
    assert_true(num_put < 1000);
    assert_int_equal(metrics_of(remote).num_errors, 1);
    assert_true(num_put == 0 || get(remote, 0));
    kv_remote_close(remote);
    redis_server_kill(&server);
}

/* Killed, started again, stopped and let go on. */
static void test_redis_faults(void **state)
{
    (void)state;
    struct redis_server server;
    if (!redis_server_is_there()) {
        skip();
    }
    redis_server_start(&server, NULL, NULL);
    struct kv_remote_url url = url_of(server.port);
    struct kv_remote_options options = options_of(&url);
    options.answer_timeout_ms = TEST_SANITIZED ? 1000 : 200;
    options.connect_timeout_ms = 200;
    struct kv_remote *remote = open_with(&options);
    assert_true(put(remote, 1));
    redis_server_kill(&server);
    assert_int_equal(look(remote, 2), KV_REMOTE_ABSENT);
    assert_false(put(remote, 2));
    redis_server_restart(&server);
    await_up(remote);
    assert_false(get(remote, 1));
    assert_true(put(remote, 1));
    redis_server_freeze(&server, true);
    assert_int_equal(look(remote, 3), KV_REMOTE_ABSENT);
    assert_false(get(remote, 1));
    assert_false(metrics_of(remote).is_up);
    redis_server_freeze(&server, false);
    await_up(remote);
    assert_true(get(remote, 1));
    kv_remote_close(remote);
    redis_server_kill(&server);
}

/* ---- a build without hiredis ----------------------------------------------------------------- */

/* Catches: an address that is taken by a build that can do nothing with it. */
static void test_absent(void **state)
{
    (void)state;
    struct kv_remote_url url;
    struct imbrex_error err;
    enum imbrex_status status = kv_remote_read_url("redis://127.0.0.1:1", &url, &err);
    assert_int_equal(status,
                     kv_remote_link_is_built() ? IMBREX_STATUS_OK : IMBREX_STATUS_UNSUPPORTED);
    if (!kv_remote_link_is_built()) {
        assert_non_null(strstr(err.message, "hiredis"));
    }
}

static const struct CMUnitTest all_tests[] = {
    cmocka_unit_test(test_url),
    cmocka_unit_test(test_url_refusals),
    cmocka_unit_test(test_foreign_value),
    cmocka_unit_test(test_overlong_answer),
    cmocka_unit_test(test_value),
    cmocka_unit_test(test_forged),
    cmocka_unit_test(test_compressed),
    cmocka_unit_test(test_known),
    cmocka_unit_test(test_absent),
    cmocka_unit_test(test_round_trip),
    cmocka_unit_test(test_many),
    cmocka_unit_test(test_greeting),
    cmocka_unit_test(test_faults),
    cmocka_unit_test(test_repair),
    cmocka_unit_test(test_restart),
    cmocka_unit_test(test_silent),
    cmocka_unit_test(test_out_of_memory),
    cmocka_unit_test(test_refused_login),
    cmocka_unit_test(test_walk),
    cmocka_unit_test(test_redis),
    cmocka_unit_test(test_redis_settings),
    cmocka_unit_test(test_redis_faults),
};
enum { NUM_TESTS_WITHOUT_LINK = 6 };

int run_kv_remote_tests(void)
{
    size_t num_tests = kv_remote_link_is_built() ? sizeof(all_tests) / sizeof(all_tests[0])
                                                 : NUM_TESTS_WITHOUT_LINK;
    return _cmocka_run_group_tests("kv_remote", all_tests, num_tests, NULL, NULL);
}
