/* SPDX-License-Identifier: Apache-2.0 */
/* The disk tier: what was put comes back whole or not at all, whatever happened between. */
#include "kv/kv_disk.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "kv/kv_pool.h"
#include "kv/kv_segment.h"
#include "tests/kv/faulty_files.h"
#include "tests/test.h"

#define FOLDER TEST_BUILD_DIR "/tests/kv-disk"

enum { BLOCK_BYTES = 4096, SLOTS = 4, SEGMENT_BYTES = SLOTS * BLOCK_BYTES, WAIT_NS = 1000000000 };

static const struct kv_key owner = {{1, 2, 3, 4}};

/* ---- a folder -------------------------------------------------------------------------------- */

static void empty_folder(void)
{
    char path[512];
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
        if (item->d_name[0] != '.') {
            assert_int_equal(unlink(path), 0);
        }
    }
    if (folder != NULL) {
        (void)closedir(folder);
        assert_int_equal(rmdir(FOLDER), 0);
    }
}

struct tier {
    struct kv_folder folder;
    struct kv_disk *disk;
};

static void open_tier(struct tier *tier, const struct kv_files *files, int32_t max_segments)
{
    struct imbrex_error err = {0};
    if (kv_folder_open(FOLDER, &tier->folder, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
    struct kv_disk_options options = {
        .folder = &tier->folder,
        .owner = owner,
        .block_bytes = BLOCK_BYTES,
        .max_bytes = kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2 * (size_t)max_segments,
        .segment_bytes = SEGMENT_BYTES,
        .num_readers = 1,
        .files = files,
    };
    if (kv_disk_open(&options, &tier->disk, &err) != IMBREX_STATUS_OK) {
        fail_msg("%s", err.message);
    }
}

static void close_tier(struct tier *tier)
{
    kv_disk_close(tier->disk);
    kv_folder_close(&tier->folder);
}

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

static void fill(int32_t i, unsigned char block[BLOCK_BYTES])
{
    uint32_t random = (uint32_t)i * 2654435761u + 1;
    for (int32_t j = 0; j < BLOCK_BYTES; j++) {
        random = random * 1664525u + 1013904223u;
        block[j] = (unsigned char)(random >> 24);
    }
}

static struct kv_disk_result await(struct kv_disk *disk)
{
    struct kv_disk_result result;
    while (!kv_disk_poll(disk, &result)) {
        kv_disk_wait(disk, WAIT_NS);
    }
    return result;
}

/* Whether the block was taken and is there now. */
static bool put(struct kv_disk *disk, int32_t i)
{
    unsigned char block[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    fill(i, block);
    ids_of(i, ids);
    if (!kv_disk_put(disk, &key, ids, block, i)) {
        return false;
    }
    struct kv_disk_result result = await(disk);
    assert_int_equal(result.tag, i);
    assert_false(result.is_get);
    assert_int_equal(kv_disk_has(disk, &key, ids), result.is_good);
    return result.is_good;
}

static bool has(const struct kv_disk *disk, int32_t i)
{
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    return kv_disk_has(disk, &key, ids);
}

/* Whether the block came back; what comes back is the block. */
static bool get(struct kv_disk *disk, int32_t i)
{
    unsigned char block[BLOCK_BYTES], expected[BLOCK_BYTES];
    int32_t ids[KV_BLOCK_SIZE];
    struct kv_key key = key_of(i);
    ids_of(i, ids);
    if (!kv_disk_get(disk, &key, ids, block, i)) {
        return false;
    }
    struct kv_disk_result result = await(disk);
    assert_int_equal(result.tag, i);
    assert_true(result.is_get);
    if (result.is_good) {
        fill(i, expected);
        assert_memory_equal(block, expected, BLOCK_BYTES);
    } else {
        assert_false(kv_disk_has(disk, &key, ids));
    }
    return result.is_good;
}

static struct kv_disk_metrics metrics_of(const struct kv_disk *disk)
{
    struct kv_disk_metrics metrics;
    kv_disk_read_metrics(disk, &metrics);
    return metrics;
}

/* ---- tests ----------------------------------------------------------------------------------- */

/* Catches: a block that is found by its key alone, one that does not survive a restart, one that
 * goes before others that were used longer ago, a folder larger than its limit. */
static void test_round_trip(void **state)
{
    (void)state;
    struct tier tier;
    int32_t ids[KV_BLOCK_SIZE];
    empty_folder();
    open_tier(&tier, NULL, 3);
    for (int32_t i = 0; i < 10; i++) {
        assert_false(has(tier.disk, i));
        assert_true(put(tier.disk, i));
    }
    for (int32_t i = 0; i < 10; i++) {
        assert_true(get(tier.disk, i));
    }
    struct kv_key key = key_of(3);
    ids_of(4, ids);
    assert_false(kv_disk_has(tier.disk, &key, ids));
    close_tier(&tier);

    open_tier(&tier, NULL, 3);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 10);
    for (int32_t i = 9; i >= 0; i--) {
        assert_true(get(tier.disk, i));
    }
    /* 0..3 were used last but the segment that is filled: 4..7 go first. */
    for (int32_t i = 10; i < 13; i++) {
        assert_true(put(tier.disk, i));
    }
    for (int32_t i = 0; i < 13; i++) {
        assert_int_equal(has(tier.disk, i), i < 4 || i > 7);
    }
    assert_int_equal(metrics_of(tier.disk).num_evicted, 4);
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);

    open_tier(&tier, NULL, 2); /* less than there is */
    assert_true(kv_disk_check(tier.disk));
    assert_true(metrics_of(tier.disk).num_blocks <= 2 * SLOTS);
    close_tier(&tier);
}

/* Catches: two engines that write one folder, a message that does not say who has it, a secret that
 * others can read or that changes from one run to the next. */
static void test_folder(void **state)
{
    (void)state;
    struct kv_folder first, second;
    struct imbrex_error err;
    struct stat status;
    char pid[32];
    empty_folder();
    assert_int_equal(kv_folder_open(FOLDER, &first, &err), IMBREX_STATUS_OK);
    assert_int_equal(kv_folder_open(FOLDER, &second, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    (void)snprintf(pid, sizeof(pid), "process %ld", (long)getpid());
    assert_non_null(strstr(err.message, pid));
    assert_int_equal(stat(FOLDER "/imbrex-kv.secret", &status), 0);
    assert_int_equal(status.st_mode & 0777, 0600);
    kv_folder_close(&first);
    assert_int_equal(kv_folder_open(FOLDER, &second, &err), IMBREX_STATUS_OK);
    unsigned char secret[32];
    memcpy(secret, second.secret, 32);
    kv_folder_close(&second);
    assert_int_equal(kv_folder_open(FOLDER, &first, &err), IMBREX_STATUS_OK);
    assert_memory_equal(first.secret, secret, 32);
    kv_folder_close(&first);
    assert_int_equal(truncate(FOLDER "/imbrex-kv.secret", 31), 0);
    assert_int_equal(kv_folder_open(FOLDER, &first, &err), IMBREX_STATUS_OK);
    assert_memory_not_equal(first.secret, secret, 32);
    kv_folder_close(&first);
    assert_int_equal(kv_folder_open("Makefile/none", &first, &err), IMBREX_STATUS_IO);
    assert_int_equal(kv_folder_open("Makefile", &first, &err), IMBREX_STATUS_INVALID_ARGUMENT);
}

/* The folder keeps its secret and its lock. */
static void remove_segments(void)
{
    char path[512];
    DIR *folder = opendir(FOLDER);
    for (const struct dirent *item; folder != NULL && (item = readdir(folder)) != NULL;) {
        if (strchr("0123456789abcdef", item->d_name[0]) != NULL) {
            (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, item->d_name);
            assert_int_equal(unlink(path), 0);
        }
    }
    if (folder != NULL) {
        (void)closedir(folder);
    }
}

/* What a tier writes until it dies after num_bytes; returns how many blocks it knew to be there. */
static int32_t write_until(int64_t num_bytes, int32_t num_blocks, int64_t *num_written)
{
    struct tier tier;
    struct faulty_files faulty;
    int32_t num_put = 0;
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 4);
    faulty.num_bytes_left = num_bytes;
    for (int32_t i = 0; i < num_blocks && put(tier.disk, i); i++) {
        num_put++;
    }
    close_tier(&tier);
    *num_written = faulty.num_bytes_written;
    return num_put;
}

/* Ends at random bytes of what is written: in headers, blocks, entries and between.
 * Catches: an entry before its block, a torn block or entry that is served, a block lost that was
 * whole, a folder that cannot be used afterwards. */
static void test_killed_anywhere(void **state)
{
    (void)state;
    enum { NUM_BLOCKS = 6, NUM_CUTS = TEST_SANITIZED ? 300 : 2000 };
    int64_t num_bytes = 0, num_written;
    uint64_t random = 3;
    int32_t num_seen[NUM_BLOCKS + 1] = {0};
    empty_folder();
    assert_int_equal(write_until(INT64_MAX, NUM_BLOCKS, &num_bytes), NUM_BLOCKS);
    for (int32_t cut = 0; cut < NUM_CUTS; cut++) {
        struct tier tier;
        random = random * 6364136223846793005u + 1442695040888963407u;
        int64_t cut_at = 1 + (int64_t)((random >> 33) % (uint64_t)num_bytes);
        /* Every second one near an edge between two writes. */
        if (cut % 2 == 0) {
            cut_at = cut_at / BLOCK_BYTES * BLOCK_BYTES + (int64_t)((random >> 20) % 512);
            cut_at = cut_at < 1 ? 1 : cut_at;
        }
        remove_segments();
        int32_t num_put = write_until(cut_at, NUM_BLOCKS, &num_written);
        open_tier(&tier, NULL, 4);
        assert_true(kv_disk_check(tier.disk));
        assert_int_equal(metrics_of(tier.disk).num_blocks, num_put);
        for (int32_t i = 0; i < NUM_BLOCKS; i++) {
            assert_int_equal(get(tier.disk, i), i < num_put);
        }
        assert_true(put(tier.disk, num_put));
        assert_true(get(tier.disk, num_put));
        num_seen[num_put]++;
        close_tier(&tier);
    }
    for (int32_t i = 0; i < NUM_BLOCKS; i++) {
        assert_true(num_seen[i] > 0);
    }
}

/* The same by a process that is really killed. Catches: what only the end of a process shows, such
 * as a lock that outlives it. */
static void test_killed_process(void **state)
{
    (void)state;
    for (int32_t round = 0; round < 10; round++) {
        struct tier tier;
        int ends[2];
        int32_t num_put = 0, num_found = 0;
        empty_folder();
        assert_int_equal(pipe(ends), 0);
        pid_t child = fork();
        assert_true(child >= 0);
        if (child == 0) {
            open_tier(&tier, NULL, 64);
            for (int32_t i = 0; i < 200; i++) {
                bool is_put = put(tier.disk, i);
                if (!is_put || write(ends[1], &i, sizeof(i)) != sizeof(i)) {
                    _exit(1);
                }
            }
            _exit(0);
        }
        (void)close(ends[1]);
        int32_t last = 0;
        while (num_put <= 7 * round && read(ends[0], &last, sizeof(last)) == sizeof(last)) {
            num_put = last + 1;
        }
        assert_int_equal(kill(child, SIGKILL), 0);
        while (read(ends[0], &last, sizeof(last)) == sizeof(last)) {
            num_put = last + 1;
        }
        (void)close(ends[0]);
        assert_int_equal(waitpid(child, NULL, 0), child);
        open_tier(&tier, NULL, 64);
        for (int32_t i = 0; i < 200; i++) {
            bool is_there = get(tier.disk, i);
            assert_true(is_there || i >= num_put);
            num_found += is_there;
        }
        assert_true(num_found <= num_put + 1);
        close_tier(&tier);
    }
}

/* Catches: a failure that is not counted, one that costs more than its block, a buffer with half a
 * block taken for one, an interrupted or short call taken for a failure. */
static void test_faults(void **state)
{
    (void)state;
    struct tier tier;
    struct faulty_files faulty;
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 16);
    faulty.is_short = true;
    for (int32_t i = 0; i < 8; i++) {
        assert_true(put(tier.disk, i));
        assert_true(get(tier.disk, i));
    }
    faulty.is_short = false;
    faulty.failure = EINTR;
    faulty.read_every = 2;
    faulty.write_every = 3;
    for (int32_t i = 8; i < 16; i++) {
        assert_true(put(tier.disk, i));
        assert_true(get(tier.disk, i));
    }
    faulty.failure = EIO;
    faulty.write_every = 0;
    int32_t num_lost = 0;
    for (int32_t i = 0; i < 16; i++) {
        num_lost += !get(tier.disk, i);
    }
    assert_int_equal(num_lost, 8);
    assert_int_equal(metrics_of(tier.disk).num_read_faults, 8);
    assert_int_equal(metrics_of(tier.disk).last_failure, EIO);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 8);

    faulty.read_every = 0;
    faulty.write_every = 4;
    faulty.failure = ENOSPC;
    num_lost = 0;
    for (int32_t i = 20; i < 36; i++) {
        num_lost += !put(tier.disk, i);
    }
    assert_true(num_lost > 0 && num_lost < 16);
    assert_int_equal(metrics_of(tier.disk).num_write_faults, num_lost);
    assert_int_equal(metrics_of(tier.disk).last_failure, ENOSPC);
    assert_true(kv_disk_check(tier.disk));

    /* No room for a segment: puts are refused for a while, and taken again. */
    faulty.write_every = 0;
    faulty.resize_every = 1;
    num_lost = 0;
    for (int32_t i = 40; i < 60; i++) {
        num_lost += !put(tier.disk, i);
    }
    assert_true(num_lost > 10);
    assert_true(metrics_of(tier.disk).num_refused > 10);
    faulty.resize_every = 0;
    int32_t num_tries = 0;
    while (!put(tier.disk, 60)) {
        num_tries++;
        assert_true(num_tries < 1000);
    }
    assert_true(kv_disk_check(tier.disk));

    faulty.open_every = 1;
    assert_false(get(tier.disk, 60));
    faulty.open_every = 0;
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

/* Catches: a flipped bit that is served, wherever it is; one that costs more than one block. */
static void test_bit_flips(void **state)
{
    (void)state;
    struct tier tier;
    struct faulty_files faulty;
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 64);
    for (int32_t i = 0; i < 200; i++) {
        assert_true(put(tier.disk, i));
    }
    faulty.flip_every = 2;
    int32_t num_lost = 0;
    for (int32_t i = 0; i < 200; i++) {
        num_lost += !get(tier.disk, i);
    }
    assert_int_equal(num_lost, 100);
    assert_int_equal(metrics_of(tier.disk).num_damaged, 100);
    close_tier(&tier);

    /* In a file, at any byte that means something: of header, entries, blocks. */
    char path[512], name[KV_SEGMENT_NAME_BYTES];
    kv_segment_name(1, name);
    (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    for (int32_t round = 0; round < (TEST_SANITIZED ? 50 : 500); round++) {
        remove_segments();
        open_tier(&tier, NULL, 64);
        for (int32_t i = 0; i < 2 * SLOTS; i++) {
            assert_true(put(tier.disk, i));
        }
        close_tier(&tier);
        /* Of 72 bytes of header, SLOTS entries, SLOTS blocks. */
        int32_t at = round % 3 == 0   ? round / 3 % 72
                     : round % 3 == 1 ? 4096 + round * 31 % (SLOTS * 128)
                                      : 8192 + round * 1009 % (SLOTS * BLOCK_BYTES);
        unsigned char byte;
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        assert_int_equal(pread(fd, &byte, 1, at), 1);
        byte ^= (unsigned char)(1 << round % 8);
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        (void)close(fd);
        open_tier(&tier, NULL, 64);
        num_lost = 0;
        for (int32_t i = 0; i < 2 * SLOTS; i++) {
            num_lost += !get(tier.disk, i);
        }
        assert_int_equal(num_lost, round % 3 == 0 ? SLOTS : 1);
        assert_true(kv_disk_check(tier.disk));
        close_tier(&tier);
    }
}

/* Catches: a block of another model, layout or secret taken for ours; one of theirs that is never
 * removed, or removed while there is room; files of others that are removed. */
static void test_foreign(void **state)
{
    (void)state;
    struct tier tier;
    struct imbrex_error err;
    char path[512], name[KV_SEGMENT_NAME_BYTES];
    empty_folder();
    open_tier(&tier, NULL, 3);
    for (int32_t i = 0; i < 8; i++) {
        assert_true(put(tier.disk, i));
    }
    kv_disk_close(tier.disk);
    /* Such a name, but not such a file. */
    kv_segment_name(77, name);
    (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    (void)fputs("a letter", file);
    (void)fclose(file);
    struct kv_disk_options options = {
        .folder = &tier.folder,
        .owner = {{1, 2, 3, 5}},
        .block_bytes = BLOCK_BYTES,
        .max_bytes = kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2 * 3,
        .segment_bytes = SEGMENT_BYTES,
        .num_readers = 1,
    };
    assert_int_equal(kv_disk_open(&options, &tier.disk, &err), IMBREX_STATUS_OK);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 0);
    for (int32_t i = 0; i < 4; i++) {
        assert_false(has(tier.disk, i));
        assert_true(put(tier.disk, i));
    }
    kv_disk_close(tier.disk);
    /* One segment of ours was added, none of theirs went. */
    options.owner = owner;
    assert_int_equal(kv_disk_open(&options, &tier.disk, &err), IMBREX_STATUS_OK);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 8);
    for (int32_t i = 8; i < 12; i++) {
        assert_true(put(tier.disk, i)); /* the foreign one goes */
    }
    for (int32_t i = 0; i < 12; i++) {
        assert_true(get(tier.disk, i));
    }
    close_tier(&tier);
    assert_int_equal(access(path, F_OK), 0);
    assert_int_equal(kv_folder_open(FOLDER, &tier.folder, &err), IMBREX_STATUS_OK);
    options.max_bytes--;
    options.max_bytes /= 2;
    assert_int_equal(kv_disk_open(&options, &tier.disk, &err), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_non_null(strstr(err.message, "kv_disk_bytes"));
    kv_folder_close(&tier.folder);
}

/* Catches: a truncated segment that is served, or one that takes blocks before the cut with it. */
static void test_truncated(void **state)
{
    (void)state;
    char path[512], name[KV_SEGMENT_NAME_BYTES];
    kv_segment_name(0, name);
    (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    for (int32_t kept = 0; kept < SLOTS; kept++) {
        struct tier tier;
        remove_segments();
        open_tier(&tier, NULL, 4);
        for (int32_t i = 0; i < SLOTS; i++) {
            assert_true(put(tier.disk, i));
        }
        close_tier(&tier);
        assert_int_equal(truncate(path, 8192 + kept * BLOCK_BYTES + 100), 0);
        open_tier(&tier, NULL, 4);
        for (int32_t i = 0; i < SLOTS; i++) {
            assert_int_equal(get(tier.disk, i), i < kept);
        }
        assert_int_equal(metrics_of(tier.disk).num_damaged, SLOTS - kept);
        close_tier(&tier);
    }
}

/* Puts, gets and cancels in any order, many at once, under faults, with restarts between.
 * Catches: a job that is lost, a result for another block, a segment that goes while a job has it,
 * counters that drift. */
static void test_random_walk(void **state)
{
    (void)state;
    enum { NUM_BLOCKS = 60, NUM_STEPS = TEST_SANITIZED ? 20000 : 100000 };
    static unsigned char blocks[NUM_BLOCKS][BLOCK_BYTES], expected[BLOCK_BYTES];
    enum { FREE, PUT, GET } doing[NUM_BLOCKS] = {FREE};
    struct tier tier;
    struct faulty_files faulty;
    uint32_t random = 11;
    int32_t ids[KV_BLOCK_SIZE], num_good = 0, num_bad = 0, num_cancelled = 0;
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 8);
    faulty.read_every = 97;
    faulty.write_every = 89;
    faulty.flip_every = 83;
    for (int32_t step = 0; step < NUM_STEPS; step++) {
        random = random * 1664525u + 1013904223u;
        int32_t i = (int32_t)((random >> 8) % NUM_BLOCKS);
        struct kv_key key = key_of(i);
        ids_of(i, ids);
        if (doing[i] == FREE && random >> 31 == 0) {
            fill(i, blocks[i]);
            doing[i] = !kv_disk_has(tier.disk, &key, ids) &&
                               kv_disk_put(tier.disk, &key, ids, blocks[i], i)
                           ? PUT
                           : FREE;
        } else if (doing[i] == FREE) {
            memset(blocks[i], 0, BLOCK_BYTES);
            doing[i] = kv_disk_get(tier.disk, &key, ids, blocks[i], i) ? GET : FREE;
        } else if (doing[i] == GET && kv_disk_cancel_get(tier.disk, i)) {
            doing[i] = FREE;
            num_cancelled++;
        }
        struct kv_disk_result result;
        while (kv_disk_poll(tier.disk, &result)) {
            assert_int_equal(doing[result.tag], result.is_get ? GET : PUT);
            doing[result.tag] = FREE;
            if (result.is_get && result.is_good) {
                fill(result.tag, expected);
                assert_memory_equal(blocks[result.tag], expected, BLOCK_BYTES);
            }
            num_good += result.is_good;
            num_bad += !result.is_good;
        }
        if (step % 997 == 0) {
            assert_true(kv_disk_check(tier.disk));
        }
        if (step % 9973 == 0) {
            close_tier(&tier);
            memset(doing, 0, sizeof(doing));
            open_tier(&tier, &faulty.files, 8);
        }
    }
    assert_true(num_good > 100 && num_bad > 10 && num_cancelled > 10);
    close_tier(&tier);
}

static int remove_folder(void **state)
{
    (void)state;
    empty_folder();
    return 0;
}

int run_kv_disk_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_round_trip),      cmocka_unit_test(test_folder),
        cmocka_unit_test(test_killed_anywhere), cmocka_unit_test(test_killed_process),
        cmocka_unit_test(test_faults),          cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_foreign),         cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_random_walk),
    };
    return cmocka_run_group_tests_name("kv_disk", tests, NULL, remove_folder);
}
