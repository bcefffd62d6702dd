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

#include "kv/kv_codec.h"
#include "kv/kv_ring.h"
#include "kv/kv_segment.h"
#include "tests/kv/disk_blocks.h"
#include "tests/kv/faulty_files.h"
#include "tests/test.h"

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

/* Ends at random bytes of what is written: in headers, blocks, entries and between. A ring takes
 * its time to go, and of ten thousand cuts make soak has all.
 * Catches: an entry before its block, a torn block or entry that is served, a block lost that was
 * whole, a folder that cannot be used afterwards. */
static void test_killed_anywhere(void **state)
{
    (void)state;
    cut_anywhere(disk_way.forbids_ring && !TEST_SANITIZED ? 1000 : 150, 3);
}

/* Catches: a segment that goes before its blocks are whole in their new place. */
static void test_killed_while_cleaned(void **state)
{
    (void)state;
    cut_while_cleaned(disk_way.forbids_ring && !TEST_SANITIZED ? 150 : 30, 5);
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
    assert_int_equal(metrics_of(tier.disk).read_failure, EIO);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 8);

    faulty.read_every = 0;
    faulty.write_every = 4;
    num_lost = 0;
    for (int32_t i = 20; i < 36; i++) {
        num_lost += !put(tier.disk, i);
    }
    assert_true(num_lost > 0 && num_lost < 16);
    assert_int_equal(metrics_of(tier.disk).num_write_faults, num_lost);
    assert_int_equal(metrics_of(tier.disk).write_failure, EIO);
    assert_true(kv_disk_check(tier.disk));

    /* No segment can be made: puts are refused for a while, and taken again. */
    faulty.write_every = 0;
    faulty.failure = EACCES;
    faulty.resize_every = 1;
    num_lost = 0;
    for (int32_t i = 40; i < 60; i++) {
        num_lost += !put(tier.disk, i);
    }
    assert_true(num_lost > 10);
    assert_true(metrics_of(tier.disk).num_refused > 10);
    /* Catches: blocks that go without a word after the first one. */
    assert_int_equal(metrics_of(tier.disk).num_left_out, num_lost);
    assert_int_equal(metrics_of(tier.disk).segment_failure, EACCES);
    faulty.resize_every = 0;
    int32_t num_tries = 0;
    while (!put(tier.disk, 60)) {
        num_tries++;
        assert_true(num_tries < 1000);
    }
    assert_true(kv_disk_check(tier.disk));

    /* A signal while room is set aside is no refusal. */
    faulty.failure = EINTR;
    faulty.resize_every = 2;
    for (int32_t i = 60; i < 100; i++) {
        assert_true(put(tier.disk, i));
    }
    faulty.failure = EIO;
    faulty.resize_every = 0;

    faulty.open_every = 1;
    assert_false(get(tier.disk, 99));
    faulty.open_every = 0;
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

/* A disk that is full before the folder has what it may have, at its limit of `room_segments`
 * whole segments and a bit, which says so when a file is made or, is_late, when it is written.
 * Catches: blocks that are refused because nothing goes for them, or that go without a word while
 * they are on their way to a file that could not be made; a folder that goes as a whole; one that
 * stays small when there is room again; files that are not counted as they are. */
static void check_full(bool is_late, int32_t room_segments)
{
    enum { NUM_SEGMENTS = 64, NUM_PUTS = 400 };
    int64_t segment_bytes = (int64_t)kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2;
    struct tier tier;
    struct faulty_files faulty;
    int32_t num_there = 0;
    empty_folder();
    faulty_files_init(&faulty);
    faulty.is_late = is_late;
    open_tier(&tier, &faulty.files, NUM_SEGMENTS);
    faulty.room_bytes = room_segments * segment_bytes + segment_bytes / 2;
    for (int32_t i = 0; i < NUM_PUTS; i++) {
        assert_true(put(tier.disk, i));
        assert_true(get(tier.disk, i));
        assert_true(kv_disk_check(tier.disk));
    }
    struct kv_disk_metrics metrics = metrics_of(tier.disk);
    assert_int_equal(metrics.num_put, NUM_PUTS);
    assert_int_equal(metrics.num_refused + metrics.num_left_out + metrics.num_write_faults, 0);
    assert_int_equal(metrics.num_segment_faults, 0);
    assert_true(metrics.num_full > 0 && metrics.needed_bytes == 0);
    assert_true(faulty.room_bytes >= 0);
    /* The newest are there: at least half of what there is room for. */
    for (int32_t i = NUM_PUTS - 1; i >= 0 && has(tier.disk, i); i--) {
        num_there++;
    }
    assert_true(num_there >= SLOTS * room_segments / 2);
    close_tier(&tier);

    /* Found again, also in segments that are smaller. */
    open_tier(&tier, &faulty.files, NUM_SEGMENTS);
    assert_int_equal(metrics_of(tier.disk).num_foreign_bytes, 0);
    for (int32_t i = NUM_PUTS - num_there; i < NUM_PUTS; i++) {
        assert_true(get(tier.disk, i));
    }
    /* With room again, all that may be there is there in the end. */
    for (int32_t i = NUM_PUTS; i < NUM_PUTS + 20; i++) {
        assert_true(put(tier.disk, i));
    }
    faulty.room_bytes = 2 * NUM_SEGMENTS * segment_bytes;
    for (int32_t i = NUM_PUTS + 20; i < 2 * NUM_PUTS + 20; i++) {
        assert_true(put(tier.disk, i));
    }
    assert_true(metrics_of(tier.disk).num_bytes > (NUM_SEGMENTS - 2) * segment_bytes);
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

static void test_full(void **state)
{
    (void)state;
    for (int32_t room_segments = 1; room_segments < 12; room_segments += 5) {
        check_full(false, room_segments);
        check_full(true, room_segments);
    }
}

/* As many puts as there can be, all at once, into a folder of a few blocks. Catches: a put that is
 * refused because what could go for it is being written, or for want of a job; one that waits for
 * ever. */
static void test_full_at_once(void **state)
{
    (void)state;
    enum { NUM_AT_ONCE = 60, NUM_ROUNDS = 30 };
    static unsigned char blocks[NUM_AT_ONCE][BLOCK_BYTES];
    int64_t segment_bytes = (int64_t)kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2;
    struct tier tier;
    struct faulty_files faulty;
    struct kv_disk_result result;
    int32_t ids[KV_BLOCK_SIZE];
    empty_folder();
    faulty_files_init(&faulty);
    for (int32_t max_segments = 2; max_segments <= 64; max_segments += 62) {
        open_tier(&tier, &faulty.files, max_segments);
        faulty.room_bytes = max_segments == 2 ? -1 : 2 * segment_bytes + segment_bytes / 3;
        for (int32_t round = 0; round < NUM_ROUNDS; round++) {
            int32_t num_given = 0, num_done = 0;
            while (num_done < NUM_AT_ONCE) {
                if (num_given < NUM_AT_ONCE && kv_disk_is_ready(tier.disk)) {
                    int32_t idx = round * NUM_AT_ONCE + num_given;
                    struct kv_key key = key_of(idx);
                    ids_of(idx, ids);
                    fill(idx, blocks[num_given]);
                    assert_true(kv_disk_put(tier.disk, &key, ids, blocks[num_given], num_given));
                    num_given++;
                } else if (kv_disk_poll(tier.disk, &result)) {
                    assert_true(result.is_good);
                    num_done++;
                } else {
                    kv_disk_wait(tier.disk, WAIT_NS);
                }
            }
            /* Packed, they do not come in the order in which they were given. */
            int32_t num_there = 0;
            for (int32_t i = 0; i < NUM_AT_ONCE; i++) {
                int32_t idx = round * NUM_AT_ONCE + i;
                num_there += has(tier.disk, idx) && get(tier.disk, idx);
            }
            assert_true(num_there >= SLOTS);
        }
        assert_int_equal(metrics_of(tier.disk).num_refused, 0);
        assert_true(kv_disk_check(tier.disk));
        close_tier(&tier);
        remove_segments();
    }
}

/* Less room than a segment takes, and less than a block does. Catches: a disk that keeps nothing
 * although a block fits; an end that is never said; asking without an end. */
static void test_hardly_any_room(void **state)
{
    (void)state;
    enum { NUM_PUTS = 2000 };
    struct tier tier;
    struct faulty_files faulty;
    const int64_t block_file_bytes = 2 * 4096 + BLOCK_BYTES;
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 64);
    faulty.room_bytes = 2 * block_file_bytes;
    for (int32_t i = 0; i < 100; i++) {
        assert_true(put(tier.disk, i));
        assert_true(get(tier.disk, i));
    }
    assert_true(has(tier.disk, 98) && kv_disk_check(tier.disk));
    close_tier(&tier);

    remove_segments();
    open_tier(&tier, &faulty.files, 64);
    faulty.room_bytes = block_file_bytes - 1;
    faulty.num_resizes = 0;
    for (int32_t i = 0; i < NUM_PUTS; i++) {
        assert_false(put(tier.disk, i));
    }
    struct kv_disk_metrics metrics = metrics_of(tier.disk);
    assert_int_equal(metrics.needed_bytes, block_file_bytes);
    assert_int_equal(metrics.segment_failure, ENOSPC);
    assert_int_equal(metrics.num_left_out, NUM_PUTS);
    assert_true(metrics.num_segment_faults >= NUM_PUTS / 300);
    assert_true(faulty.num_resizes < NUM_PUTS / 30);
    assert_true(kv_disk_check(tier.disk));
    faulty.room_bytes = -1;
    int32_t num_tries = 0;
    while (!put(tier.disk, NUM_PUTS)) {
        num_tries++;
        assert_true(num_tries < 300);
    }
    close_tier(&tier);
}

/* Somebody else takes all room that there is. Catches: a folder that is given up whole for that. */
static void test_room_taken(void **state)
{
    (void)state;
    enum { NUM_SEGMENTS = 32, NUM_PUTS = (NUM_SEGMENTS - 1) * SLOTS };
    struct tier tier;
    struct faulty_files faulty;
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, NUM_SEGMENTS);
    for (int32_t i = 0; i < NUM_PUTS; i++) {
        assert_true(put(tier.disk, i));
    }
    faulty.failure = ENOSPC;
    faulty.resize_every = 1;
    for (int32_t i = 0; i < 200; i++) {
        assert_false(put(tier.disk, NUM_PUTS + i));
    }
    struct kv_disk_metrics metrics = metrics_of(tier.disk);
    assert_int_equal(metrics.num_left_out, 200);
    assert_true(metrics.num_evicted <= 8 * SLOTS);
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

static bool is_there(const char *name)
{
    char path[512];
    (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    return access(path, F_OK) == 0;
}

static void remove_all(void)
{
    remove_segments();
    assert_int_equal(unlink(FOLDER "/imbrex-kv.lock"), 0);
    assert_int_equal(unlink(FOLDER "/imbrex-kv.secret"), 0);
}

/* Somebody removes the folder, or what is in it, while it is in use. Catches: blocks that go to
 * files that nobody will find, or that are said to be there; a loss that is not counted; a folder
 * that is not made anew, or with another secret, so that a restart finds nothing. */
static void test_removed(void **state)
{
    (void)state;
    for (int32_t round = 0; round < 2; round++) {
        struct tier tier;
        empty_folder();
        open_tier(&tier, NULL, 16);
        for (int32_t i = 0; i < 3 * SLOTS + 1; i++) {
            assert_true(put(tier.disk, i));
        }
        remove_all();
        if (round == 1) {
            assert_int_equal(rmdir(FOLDER), 0);
        }
        /* One get finds it out for its segment, one put for all. */
        assert_false(get(tier.disk, SLOTS));
        assert_false(has(tier.disk, SLOTS + 1));
        assert_true(has(tier.disk, 0));
        assert_true(put(tier.disk, 100));
        struct kv_disk_metrics metrics = metrics_of(tier.disk);
        assert_int_equal(metrics.num_blocks, 1);
        assert_int_equal(metrics.num_segments, 1);
        assert_int_equal(metrics.num_gone, 3 * SLOTS + 1);
        assert_int_equal(metrics.num_folder_losses, 1);
        assert_int_equal(metrics.folder_failure, 0);
        assert_int_equal(metrics.num_write_faults + metrics.num_read_faults, 0);
        for (int32_t i = 0; i < 20 * SLOTS; i++) {
            assert_true(put(tier.disk, 200 + i));
            assert_true(get(tier.disk, 200 + i));
        }
        assert_true(kv_disk_check(tier.disk));
        assert_int_equal(metrics_of(tier.disk).num_remove_faults, 0);
        unsigned char secret[32];
        memcpy(secret, tier.folder.secret, sizeof(secret));
        close_tier(&tier);
        open_tier(&tier, NULL, 16);
        assert_memory_equal(tier.folder.secret, secret, sizeof(secret));
        assert_true(get(tier.disk, 200 + 20 * SLOTS - 1));
        close_tier(&tier);
    }
}

/* Catches: blocks given up although only the lock was removed; one file that is removed and takes
 * others with it, or that is written to for ever. */
static void test_partly_removed(void **state)
{
    (void)state;
    struct tier tier;
    empty_folder();
    open_tier(&tier, NULL, 16);
    for (int32_t i = 0; i < 2 * SLOTS + 1; i++) {
        assert_true(put(tier.disk, i));
    }
    assert_int_equal(unlink(FOLDER "/imbrex-kv.lock"), 0);
    assert_true(put(tier.disk, 50));
    assert_int_equal(metrics_of(tier.disk).num_folder_losses, 1);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 2 * SLOTS + 2);
    assert_true(is_there("imbrex-kv.lock"));
    assert_true(get(tier.disk, 0) && get(tier.disk, 50));
    assert_int_equal(unlink(FOLDER "/00000002.imbrex-kv"), 0); /* that puts go to */
    assert_true(put(tier.disk, 51));
    assert_true(get(tier.disk, 51));
    assert_false(has(tier.disk, 50));
    assert_int_equal(metrics_of(tier.disk).num_gone, 2);
    assert_true(get(tier.disk, 1) && kv_disk_check(tier.disk));
    close_tier(&tier);
}

/* Another engine has made the folder anew and has it. Catches: blocks written to its files, files
 * of it that are removed, ours that is not told; a tier that stays away when the folder is free. */
static void test_taken_over(void **state)
{
    (void)state;
    struct tier tier, other;
    empty_folder();
    open_tier(&tier, NULL, 4);
    for (int32_t i = 0; i < 4 * SLOTS; i++) {
        assert_true(put(tier.disk, i));
    }
    remove_all();
    open_tier(&other, NULL, 4);
    for (int32_t i = 0; i < 4 * SLOTS; i++) {
        assert_true(put(other.disk, 1000 + i));
    }
    for (int32_t i = 0; i < 3 * SLOTS; i++) {
        assert_false(put(tier.disk, 100 + i));
    }
    struct kv_disk_metrics metrics = metrics_of(tier.disk);
    assert_int_equal(metrics.num_blocks, 0);
    assert_int_equal(metrics.num_folder_losses, 1);
    assert_int_equal(metrics.folder_failure, EWOULDBLOCK);
    assert_int_equal(metrics.num_left_out, 3 * SLOTS);
    assert_true(kv_disk_check(tier.disk));
    for (int32_t i = 0; i < 4 * SLOTS; i++) {
        assert_true(get(other.disk, 1000 + i));
    }
    close_tier(&other);
    /* It has another secret: still not ours. */
    for (int32_t i = 0; i < 600; i++) {
        assert_false(put(tier.disk, 200 + i));
    }
    assert_int_equal(metrics_of(tier.disk).folder_failure, EEXIST);
    assert_true(is_there("00000003.imbrex-kv"));
    remove_all();
    int32_t num_tries = 0;
    while (!put(tier.disk, 900)) {
        num_tries++;
        assert_true(num_tries < 300);
    }
    assert_true(get(tier.disk, 900));
    assert_int_equal(metrics_of(tier.disk).folder_failure, 0);
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
    kv_segment_name(1, false, name);
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
    kv_segment_name(77, false, name);
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

static void write_file(const char *name, const void *bytes, size_t num_bytes)
{
    char path[512];
    (void)snprintf(path, sizeof(path), "%s/%s", FOLDER, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, num_bytes, file), num_bytes);
    assert_int_equal(fclose(file), 0);
}

/* Files that somebody else named like segments. Catches: one that is removed when room is short, or
 * when the tier is opened; one that a new segment is written over, also where numbers begin again;
 * one that nobody is told of; remains of ours that stay. */
static void test_strange(void **state)
{
    (void)state;
    static const char *const names[] = {"00000001.imbrex-kv", "00000002.imbrex-kv",
                                        "00000003.imbrex-kv", "00000004.imbrex-kv.part",
                                        "ffffffff.imbrex-kv"};
    enum { NUM_NAMES = sizeof(names) / sizeof(names[0]) };
    static const unsigned char zeros[8192];
    char text[128];
    struct tier tier;
    empty_folder();
    open_tier(&tier, NULL, 2);
    close_tier(&tier);
    write_file(names[0], "a letter", 8);
    write_file(names[1], "", 0);
    write_file(names[2],
               "a longer letter, which is of more bytes than a header of a segment has, and "
               "so of another kind for who reads it",
               110);
    write_file(names[3], "half a letter", 13);
    write_file(names[4], "the last letter", 15);
    /* What is left of segments whose making was cut off. */
    write_file("00000005.imbrex-kv.part", "", 0);
    write_file("00000006.imbrex-kv.part", zeros, sizeof(zeros));
    for (int32_t round = 0; round < 3; round++) {
        open_tier(&tier, NULL, 2);
        struct kv_disk_metrics metrics = metrics_of(tier.disk);
        assert_int_equal(metrics.num_strange, NUM_NAMES);
        assert_string_equal(metrics.strange_name, names[0]);
        assert_int_equal(metrics.strange_failure, 0);
        assert_int_equal(metrics.num_read_faults + metrics.num_damaged, 0);
        for (int32_t i = 0; i < 10 * SLOTS; i++) {
            assert_true(put(tier.disk, 100 * round + i));
            assert_true(get(tier.disk, 100 * round + i));
        }
        assert_true(kv_disk_check(tier.disk));
        close_tier(&tier);
        for (int32_t i = 0; i < NUM_NAMES; i++) {
            assert_true(is_there(names[i]));
        }
        assert_false(is_there("00000005.imbrex-kv.part"));
        assert_false(is_there("00000006.imbrex-kv.part"));
    }
    (void)snprintf(text, sizeof(text), "%s/%s", FOLDER, names[0]);
    FILE *file = fopen(text, "r");
    assert_non_null(file);
    assert_non_null(fgets(text, sizeof(text), file));
    assert_string_equal(text, "a letter");
    (void)fclose(file);
    for (int32_t i = 0; i < NUM_NAMES; i++) {
        (void)snprintf(text, sizeof(text), "%s/%s", FOLDER, names[i]);
        assert_int_equal(unlink(text), 0);
    }
}

/* What a power failure leaves of a segment whose header was not written in time: its name, its size
 * and zeros. Catches: one that stays for ever, beside what the folder may have. */
static void test_lost_header(void **state)
{
    (void)state;
    static const unsigned char zeros[4096];
    int64_t segment_bytes = (int64_t)kv_disk_min_bytes(BLOCK_BYTES, SEGMENT_BYTES) / 2;
    struct tier tier;
    empty_folder();
    open_tier(&tier, NULL, 3);
    for (int32_t i = 0; i < 2 * SLOTS; i++) {
        assert_true(put(tier.disk, i));
    }
    close_tier(&tier);
    int fd = open(FOLDER "/00000000.imbrex-kv", O_WRONLY);
    assert_true(fd >= 0);
    assert_int_equal(pwrite(fd, zeros, sizeof(zeros), 0), sizeof(zeros));
    (void)close(fd);
    open_tier(&tier, NULL, 3);
    assert_int_equal(metrics_of(tier.disk).num_strange, 0);
    assert_int_equal(metrics_of(tier.disk).num_foreign_bytes, segment_bytes);
    for (int32_t i = 0; i < 2 * SLOTS; i++) {
        assert_int_equal(get(tier.disk, i), i >= SLOTS);
    }
    for (int32_t i = 2 * SLOTS; i < 4 * SLOTS; i++) {
        assert_true(put(tier.disk, i));
    }
    assert_false(is_there("00000000.imbrex-kv"));
    assert_int_equal(metrics_of(tier.disk).num_evicted, 0);
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

/* Catches: a truncated segment that is served, or one that takes blocks before the cut with it. */
static void test_truncated(void **state)
{
    (void)state;
    char path[512], name[KV_SEGMENT_NAME_BYTES];
    kv_segment_name(0, false, name);
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
    /* On a busy machine a step is soon done and a block is not: then there are more steps. */
    enum { NUM_BLOCKS = 60, NUM_STEPS = TEST_SANITIZED ? 20000 : 100000, MAX_STEPS = 20000000 };
    static _Alignas(4096) unsigned char blocks[NUM_BLOCKS][BLOCK_BYTES], expected[BLOCK_BYTES];
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
    bool has_seen_all = false;
    for (int32_t step = 0; step < NUM_STEPS || (!has_seen_all && step < MAX_STEPS); step++) {
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
        has_seen_all = num_good > 100 && num_bad > 10 && num_cancelled > 10;
        if (step % 997 == 0) {
            assert_true(kv_disk_check(tier.disk));
        }
        if (step % 9973 == 0) {
            close_tier(&tier);
            memset(doing, 0, sizeof(doing));
            open_tier(&tier, &faulty.files, 8);
        }
    }
    assert_true(has_seen_all);
    close_tier(&tier);
}

/* Catches: a block that was got and goes with the rest of its segment all the same; one that stays
 * for ever because it was got once; a segment that is there twice, or never goes, once its blocks
 * have moved; a block that is not found while it moves. */
static void test_cleaned(void **state)
{
    (void)state;
    enum { NUM_SEGMENTS = 10, HELD = NUM_SEGMENTS * SLOTS };
    struct tier tier;
    int32_t next = 0;
    empty_folder();
    open_tier(&tier, NULL, NUM_SEGMENTS);
    for (; next < HELD / 2; next++) {
        assert_true(put(tier.disk, next));
    }
    assert_true(get(tier.disk, 0));
    assert_true(get(tier.disk, 6));
    for (; next < 2 * HELD - HELD / 2; next++) {
        assert_true(put(tier.disk, next));
        assert_true(has(tier.disk, 0) && has(tier.disk, 6));
        assert_true(kv_disk_check(tier.disk));
    }
    assert_false(has(tier.disk, 1) || has(tier.disk, 5));
    assert_int_equal(metrics_of(tier.disk).num_moved, 2);
    assert_true(get(tier.disk, 6));
    for (; next < 3 * HELD; next++) {
        assert_true(put(tier.disk, next));
    }
    assert_false(has(tier.disk, 0));
    assert_true(has(tier.disk, 6));
    close_tier(&tier);
    open_tier(&tier, NULL, NUM_SEGMENTS);
    assert_true(get(tier.disk, 6) && get(tier.disk, next - 1));
    assert_true(metrics_of(tier.disk).num_blocks > HELD - 3 * SLOTS);
    close_tier(&tier);
}

/* What lies on the disk for a segment: num_entries of them that are not empty. */
static int32_t read_entries(uint32_t number, struct kv_segment_entry entries[2 * SLOTS],
                            char path[512])
{
    char name[KV_SEGMENT_NAME_BYTES];
    int32_t num_entries = 0;
    struct kv_segment_contents contents;
    struct kv_segment_layout layout = kv_segment_layout(BLOCK_BYTES, SEGMENT_BYTES, &owner);
    kv_segment_name(number, false, name);
    (void)snprintf(path, 512, "%s/%s", FOLDER, name);
    assert_int_equal(kv_segment_scan(&kv_files_system, path, &layout, entries, &contents), 0);
    assert_int_equal(contents.kind, KV_SEGMENT_OURS);
    while (num_entries < layout.num_slots && entries[num_entries].stored_bytes > 0) {
        num_entries++;
    }
    return num_entries;
}

/* Catches: packed blocks that take as much room as others, that are not found by a tier that does
 * not pack, or the other way round; a block that is packed although that gains nothing; a flipped
 * bit of a packed block that is served, or that ends the program. */
static void test_packed(void **state)
{
    (void)state;
    struct tier tier;
    struct kv_segment_entry entries[2 * SLOTS];
    char path[512];
    unsigned char byte;
    const struct disk_way plain = {.forbids_ring = disk_way.forbids_ring}, packed = disk_way;
    if (!kv_codec_is_available()) {
        skip();
    }
    empty_folder();
    open_tier(&tier, NULL, 4);
    for (int32_t i = 0; i < SLOTS + 1; i++) {
        assert_true(put(tier.disk, i));
    }
    /* Half of the bytes are noise: each block takes three pages of four. */
    assert_int_equal(metrics_of(tier.disk).num_segments, 1);
    assert_true(metrics_of(tier.disk).num_put_bytes < (SLOTS + 1) * (BLOCK_BYTES * 5 / 8));
    close_tier(&tier);
    assert_int_equal(read_entries(0, entries, path), SLOTS + 1);

    disk_way = plain;
    open_tier(&tier, NULL, 4);
    for (int32_t i = 0; i < SLOTS + 1; i++) {
        assert_true(get(tier.disk, i));
    }
    for (int32_t i = SLOTS + 1; i < 2 * SLOTS; i++) {
        assert_true(put(tier.disk, i));
    }
    close_tier(&tier);
    disk_way = packed;
    open_tier(&tier, NULL, 4);
    assert_int_equal(metrics_of(tier.disk).num_blocks, 2 * SLOTS);
    for (int32_t i = 0; i < 2 * SLOTS; i++) {
        assert_true(get(tier.disk, i));
    }
    close_tier(&tier);

    for (int32_t round = 0; round < (TEST_SANITIZED ? 20 : 200); round++) {
        int fd = open(path, O_RDWR);
        assert_true(fd >= 0);
        off_t at = 4096 * (off_t)entries[2].first_page +
                   (off_t)((uint32_t)round * 2654435761u % entries[2].stored_bytes);
        assert_int_equal(pread(fd, &byte, 1, at), 1);
        byte ^= (unsigned char)(1 << round % 8);
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        open_tier(&tier, NULL, 4);
        for (int32_t i = 0; i < 2 * SLOTS; i++) {
            assert_int_equal(get(tier.disk, i), i != 2);
        }
        assert_int_equal(metrics_of(tier.disk).num_damaged, 1);
        close_tier(&tier);
        byte ^= (unsigned char)(1 << round % 8);
        assert_int_equal(pwrite(fd, &byte, 1, at), 1);
        (void)close(fd);
    }
}

/* Catches: puts that wait for a buffer or a segment and never come to their turn, or are lost when
 * the tier is closed; a put that finds no room and is told of as if it had. */
static void test_many_packed(void **state)
{
    (void)state;
    enum { NUM_PUTS = 400 };
    static _Alignas(4096) unsigned char blocks[KV_DISK_MAX_JOBS][BLOCK_BYTES];
    struct tier tier;
    struct faulty_files faulty;
    struct kv_disk_result result;
    int32_t ids[KV_BLOCK_SIZE], num_given = 0, num_good = 0, num_done = 0;
    int32_t free_blocks[KV_DISK_MAX_JOBS], num_free = KV_DISK_MAX_JOBS, taken[NUM_PUTS];
    empty_folder();
    faulty_files_init(&faulty);
    open_tier(&tier, &faulty.files, 1000);
    for (int32_t i = 0; i < KV_DISK_MAX_JOBS; i++) {
        free_blocks[i] = i;
    }
    while (num_given < NUM_PUTS) {
        while (num_given < NUM_PUTS && num_free > 0 && kv_disk_is_ready(tier.disk)) {
            struct kv_key key = key_of(num_given);
            ids_of(num_given, ids);
            num_free--;
            taken[num_given] = free_blocks[num_free];
            fill(num_given, blocks[taken[num_given]]);
            assert_true(kv_disk_put(tier.disk, &key, ids, blocks[taken[num_given]], num_given));
            num_given++;
        }
        while (kv_disk_poll(tier.disk, &result)) {
            free_blocks[num_free] = taken[result.tag];
            num_free++;
            num_good += result.is_good;
            num_done++;
        }
        kv_disk_wait(tier.disk, num_given < NUM_PUTS ? WAIT_NS : 0);
    }
    assert_int_equal(num_good, num_done);
    close_tier(&tier);
    open_tier(&tier, &faulty.files, 1000);
    for (int32_t i = 0; i < NUM_PUTS; i++) {
        assert_true(get(tier.disk, i));
    }
    faulty.resize_every = 1;
    int32_t num_refused = 0;
    for (int32_t i = NUM_PUTS; i < NUM_PUTS + 20; i++) {
        num_refused += !put(tier.disk, i);
    }
    assert_true(num_refused > 10);
    assert_true(kv_disk_check(tier.disk));
    close_tier(&tier);
}

/* Catches: a ring that is taken for there where it is not, or that is not used where it is: then
 * these tests would test one way twice. */
static void test_way(void **state)
{
    (void)state;
    struct tier tier;
    struct kv_ring *ring;
    int failure = kv_ring_create(1, &ring);
    empty_folder();
    open_tier(&tier, NULL, 4);
    assert_int_equal(metrics_of(tier.disk).ring_failure,
                     disk_way.forbids_ring ? ENOTSUP : -failure);
    close_tier(&tier);
    if (failure == 0) {
        kv_ring_destroy(ring);
    }
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
        cmocka_unit_test(test_way),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_folder),
        cmocka_unit_test(test_killed_anywhere),
        cmocka_unit_test(test_killed_process),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_full_at_once),
        cmocka_unit_test(test_hardly_any_room),
        cmocka_unit_test(test_lost_header),
        cmocka_unit_test(test_room_taken),
        cmocka_unit_test(test_removed),
        cmocka_unit_test(test_partly_removed),
        cmocka_unit_test(test_taken_over),
        cmocka_unit_test(test_bit_flips),
        cmocka_unit_test(test_foreign),
        cmocka_unit_test(test_strange),
        cmocka_unit_test(test_truncated),
        cmocka_unit_test(test_cleaned),
        cmocka_unit_test(test_killed_while_cleaned),
        cmocka_unit_test(test_random_walk),
    };
    const struct CMUnitTest packed_tests[] = {
        cmocka_unit_test(test_packed),
        cmocka_unit_test(test_many_packed),
        cmocka_unit_test(test_killed_anywhere),
        cmocka_unit_test(test_killed_process),
        cmocka_unit_test(test_killed_while_cleaned),
        cmocka_unit_test(test_faults),
        cmocka_unit_test(test_full),
        cmocka_unit_test(test_full_at_once),
        cmocka_unit_test(test_random_walk),
    };
    int num_failed = 0;
    disk_way = (struct disk_way){.forbids_ring = true};
    num_failed += cmocka_run_group_tests_name("kv_disk", tests, NULL, remove_folder);
    disk_way = (struct disk_way){.forbids_ring = false};
    num_failed += cmocka_run_group_tests_name("kv_disk, ring", tests, NULL, remove_folder);
    disk_way = (struct disk_way){.forbids_ring = true, .zstd_level = kv_codec_is_available()};
    num_failed += cmocka_run_group_tests_name("kv_disk, zstd", packed_tests, NULL, remove_folder);
    return num_failed;
}
