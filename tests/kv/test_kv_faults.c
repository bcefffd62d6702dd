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
    metrics = (struct kv_tiers_metrics){.num_copy_faults = 2};
    metrics.disk.num_read_faults = 3;
    metrics.disk.read_failure = EIO;
    metrics.disk.num_damaged = 4;
    kv_tiers_tell_faults(&told, &metrics, "/cache", &log, MINUTE_NS);
    assert_string_equal(lines.last,
                        "KV tiers in /cache: 9 blocks lost, computed again when asked for: 3 not "
                        "read from the disk (Input/output error), 4 damaged on the disk, 2 not "
                        "copied by the device");
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
        cmocka_unit_test(test_minutes),
        cmocka_unit_test(test_reasons),
        cmocka_unit_test(test_strange_files),
    };
    return cmocka_run_group_tests_name("kv_faults", tests, NULL, NULL);
}
