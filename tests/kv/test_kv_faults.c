/* SPDX-License-Identifier: Apache-2.0 */
/* What the log says of faults of the KV tiers: what was lost, why and where, once a minute. */
#include <errno.h>
#include <string.h>

#include "kv/kv_tiers_faults.h"
#include "tests/kv/noted_lines.h"
#include "tests/test.h"

#define MINUTE_NS INT64_C(60000000000)

/* Catches: a fault that is told once though there is more of it each minute, one that fills the
 * log, one that is told again though nothing is new. */
static void test_minutes(void **state)
{
    (void)state;
    struct kv_fault_log told = {.num_told = 0};
    assert_false(kv_fault_log_is_due(&told, 0, 0));
    assert_true(kv_fault_log_is_due(&told, 1, 0));
    assert_false(kv_fault_log_is_due(&told, 2, MINUTE_NS - 1));
    assert_true(kv_fault_log_is_due(&told, 2, MINUTE_NS));
    assert_false(kv_fault_log_is_due(&told, 2, 5 * MINUTE_NS));
    assert_true(kv_fault_log_is_due(&told, 3, 5 * MINUTE_NS));
    assert_false(kv_fault_log_is_due(&told, 4, 5 * MINUTE_NS + 1));
    assert_true(kv_fault_log_is_due(&told, 4, INT64_MAX));
}

/* Catches: parts of a line that are there for nothing, "1 blocks", a reason of one fault told of
 * another, a folder that is not named. */
static void test_reasons(void **state)
{
    (void)state;
    struct noted_lines lines = {0};
    const struct log log = {.write = note_line, .user = &lines};
    struct kv_fault_log told = {.num_told = 0};
    struct kv_tiers_metrics metrics = {.num_lost = 5};
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, 0);
    assert_int_equal(lines.num_lines, 0);
    metrics.disk.num_left_out = 1;
    metrics.disk.num_segment_faults = 1;
    metrics.disk.segment_failure = ENOSPC;
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, 0);
    assert_string_equal(
        lines.last, "KV tiers in /cache: 1 block lost, computed again when asked for: 1 without "
                    "room on the disk (No space left on device), 1 file that could not be made "
                    "(No space left on device)");
    metrics.disk.num_segment_faults = 2;
    metrics.disk.needed_bytes = 24576;
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, MINUTE_NS / 2);
    assert_int_equal(lines.num_lines, 1);
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, MINUTE_NS);
    assert_non_null(strstr(lines.last, "1 without room on the disk (No space left on device: "
                                       "expected room for one block, 24576 bytes)"));
    told = (struct kv_fault_log){.num_told = 0};
    lines.num_lines = 1;
    metrics = (struct kv_tiers_metrics){.num_copy_faults = 2};
    metrics.disk.num_read_faults = 3;
    metrics.disk.read_failure = EIO;
    metrics.disk.num_damaged = 4;
    metrics.disk.num_gone = 2;
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, MINUTE_NS);
    assert_string_equal(lines.last,
                        "KV tiers in /cache: 11 blocks lost, computed again when asked for: 3 not "
                        "read from the disk (Input/output error), 4 damaged on the disk, 2 gone "
                        "with their files, 2 not copied by the device");
    metrics = (struct kv_tiers_metrics){.num_copy_faults = 1};
    kv_tiers_tell_faults(&told, &metrics, NULL, &log, 2 * MINUTE_NS);
    assert_string_equal(lines.last, "KV tiers: 1 block lost, computed again when asked for: 1 not "
                                    "copied by the device");
    metrics = (struct kv_tiers_metrics){0};
    metrics.disk.num_remove_faults = 2;
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, 3 * MINUTE_NS);
    assert_string_equal(lines.last, "KV tiers in /cache: 2 files that could not be removed");
    assert_int_equal(lines.num_lines, 4);
}

/* Catches: a full disk that nobody is told of, or is told of with every segment; one that is told
 * of where nothing is kept, so that nothing goes for anything. */
static void test_full_disk(void **state)
{
    (void)state;
    struct noted_lines lines = {0};
    const struct log log = {.write = note_line, .user = &lines};
    struct kv_disk_metrics metrics = {.num_blocks = 5, .max_bytes = 9000};
    bool has_told = false;
    kv_tiers_tell_full(&has_told, &metrics, "/cache", &log);
    metrics.num_full = 1;
    metrics.num_blocks = 0;
    kv_tiers_tell_full(&has_told, &metrics, "/cache", &log);
    assert_int_equal(lines.num_lines, 0);
    metrics.num_blocks = 5;
    for (int32_t i = 0; i < 2; i++) {
        kv_tiers_tell_full(&has_told, &metrics, "/cache", &log);
        assert_int_equal(lines.num_lines, 1);
        metrics.num_full++;
    }
    assert_string_equal(lines.last, "KV folder /cache: the disk is full before it has the 9000 "
                                    "bytes of KV blocks that it may have: from now on the oldest "
                                    "go for new ones");
}

/* Catches: a folder that is not named, a loss that is told as if nothing were kept, or the other
 * way round; one that fills the log. */
static void test_folder_removed(void **state)
{
    (void)state;
    struct noted_lines lines = {0};
    const struct log log = {.write = note_line, .user = &lines};
    struct kv_fault_log told = {.num_told = 0};
    struct kv_disk_metrics metrics = {.num_blocks = 5};
    kv_tiers_tell_folder(&told, &metrics, "/cache", &log, 0);
    assert_int_equal(lines.num_lines, 0);
    metrics.num_folder_losses = 1;
    kv_tiers_tell_folder(&told, &metrics, "/cache", &log, 0);
    assert_string_equal(lines.last, "KV folder /cache: it or its lock was removed, or is out of "
                                    "reach: it was made anew");
    metrics.num_folder_losses = 2;
    metrics.folder_failure = EWOULDBLOCK;
    kv_tiers_tell_folder(&told, &metrics, "/cache", &log, MINUTE_NS - 1);
    assert_int_equal(lines.num_lines, 1);
    kv_tiers_tell_folder(&told, &metrics, "/cache", &log, MINUTE_NS);
    assert_non_null(strstr(lines.last, "reach: it is not used until it is free again: another "
                                       "process has locked what is there"));
    metrics.num_folder_losses = 3;
    metrics.folder_failure = EACCES;
    kv_tiers_tell_folder(&told, &metrics, "/cache", &log, 2 * MINUTE_NS);
    assert_non_null(strstr(lines.last, "free again: Permission denied"));
}

/* Catches: a file that is not named, or a reason that is not the system's. */
static void test_strange_files(void **state)
{
    (void)state;
    struct noted_lines lines = {0};
    const struct log log = {.write = note_line, .user = &lines};
    struct kv_disk_metrics metrics = {.strange_name = "00000000.imbrex-kv"};
    kv_tiers_tell_strange(&metrics, "/cache", &log);
    assert_int_equal(lines.num_lines, 0);
    metrics.num_strange = 1;
    kv_tiers_tell_strange(&metrics, "/cache", &log);
    assert_string_equal(lines.last, "KV folder: /cache/00000000.imbrex-kv: expected a file of KV "
                                    "blocks, as its name says, found something else: it is left "
                                    "alone");
    metrics.num_strange = 2;
    metrics.strange_failure = EACCES;
    kv_tiers_tell_strange(&metrics, "/cache", &log);
    assert_non_null(strstr(lines.last, "found one that cannot be read: Permission denied: it is "
                                       "left alone, and so is 1 other"));
    metrics.num_strange = 4;
    metrics.strange_failure = ENOTSUP;
    kv_tiers_tell_strange(&metrics, "/cache", &log);
    assert_non_null(
        strstr(lines.last, "found no regular file: it is left alone, and so are 3 others"));
}

int run_kv_faults_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_minutes),       cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_full_disk),     cmocka_unit_test(test_folder_removed),
        cmocka_unit_test(test_strange_files),
    };
    return cmocka_run_group_tests_name("kv_faults", tests, NULL, NULL);
}
