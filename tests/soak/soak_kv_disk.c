/* SPDX-License-Identifier: Apache-2.0 */
/* Ten thousand ends of a process that writes blocks to a disk, by injected faults, in each of the
 * ways in which blocks are read and stored.
 *
 * Catches: what test_killed_anywhere of test_kv_disk.c catches, at the byte that its sample misses.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>

#include <cmocka.h>

#include "kv/kv_codec.h"
#include "tests/kv/disk_blocks.h"

#define NUM_CUTS 10000
#define NUM_CUTS_WITH_RING 1000 /* a ring takes its time to go, and changes nothing of writes */

static void test_threads(void **state)
{
    (void)state;
    disk_way = (struct disk_way){.forbids_ring = true};
    cut_anywhere(NUM_CUTS, 7);
    cut_while_cleaned(NUM_CUTS / 10, 7);
}

static void test_ring(void **state)
{
    (void)state;
    disk_way = (struct disk_way){.forbids_ring = false};
    cut_anywhere(NUM_CUTS_WITH_RING, 11);
    cut_while_cleaned(NUM_CUTS_WITH_RING / 10, 11);
}

static void test_zstd(void **state)
{
    (void)state;
    if (!kv_codec_is_available()) {
        skip();
    }
    disk_way = (struct disk_way){.forbids_ring = true, .zstd_level = 1};
    cut_anywhere(NUM_CUTS, 13);
    cut_while_cleaned(NUM_CUTS / 10, 13);
}

static int remove_folder(void **state)
{
    (void)state;
    empty_folder();
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_threads),
        cmocka_unit_test(test_ring),
        cmocka_unit_test(test_zstd),
    };
    return cmocka_run_group_tests_name("soak_kv_disk", tests, NULL, remove_folder);
}
