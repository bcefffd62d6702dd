/* SPDX-License-Identifier: Apache-2.0 */
/* What a machine says of its memory, as files of a folder that the tests write. */
#include "base/machine_memory.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "tests/test.h"

#define ROOT TEST_BUILD_DIR "/tests/machine-memory"

static void write_file(const char *path, const char *text)
{
    char joined[512];
    (void)snprintf(joined, sizeof(joined), "%s%s", ROOT, path);
    for (char *slash = strchr(joined + strlen(TEST_BUILD_DIR) + 1, '/'); slash != NULL;
         slash = strchr(slash + 1, '/')) {
        *slash = '\0';
        (void)mkdir(joined, 0777);
        *slash = '/';
    }
    FILE *file = fopen(joined, "w");
    assert_non_null(file);
    (void)fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static void forget(const char *path)
{
    char joined[512];
    (void)snprintf(joined, sizeof(joined), "%s%s", ROOT, path);
    (void)remove(joined);
}

static int forget_all(void **state)
{
    (void)state;
    forget("/proc/meminfo");
    forget("/proc/self/cgroup");
    forget("/sys/fs/cgroup/a/b/memory.max");
    forget("/sys/fs/cgroup/a/memory.max");
    forget("/sys/fs/cgroup/memory.max");
    forget("/sys/fs/cgroup/memory/a/memory.limit_in_bytes");
    return 0;
}

/* Catches: the total, or what is free without caches, taken for what is available; a limit of a
 * group further up that is not seen; "max" read as 0. */
static void test_version_2(void **state)
{
    (void)forget_all(state);
    assert_true(machine_memory_bytes(ROOT) == SIZE_MAX);
    write_file("/proc/meminfo", "MemTotal:  64 kB\nMemFree:  1 kB\nMemAvailable:   32 kB\n");
    assert_int_equal(machine_memory_bytes(ROOT), 32768);
    write_file("/proc/self/cgroup", "0::/a/b\n");
    write_file("/sys/fs/cgroup/a/b/memory.max", "max\n");
    assert_int_equal(machine_memory_bytes(ROOT), 32768);
    write_file("/sys/fs/cgroup/a/memory.max", "16384\n");
    assert_int_equal(machine_memory_bytes(ROOT), 16384);
    write_file("/sys/fs/cgroup/a/b/memory.max", "8192\n");
    assert_int_equal(machine_memory_bytes(ROOT), 8192);
    write_file("/sys/fs/cgroup/memory.max", "4096\n");
    assert_int_equal(machine_memory_bytes(ROOT), 4096);
}

/* Catches: limits of the older version that are not read, a group that is not there taken for one
 * without memory, a line without colons. */
static void test_version_1(void **state)
{
    (void)forget_all(state);
    write_file("/proc/meminfo", "MemAvailable: 32 kB\n");
    write_file("/proc/self/cgroup", "nonsense\n5:cpu,cpuacct:/x\n4:memory:/a/gone\n1:\n");
    write_file("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "12288\n");
    assert_int_equal(machine_memory_bytes(ROOT), 12288);
    write_file("/sys/fs/cgroup/memory/a/memory.limit_in_bytes", "9223372036854771712\n");
    assert_int_equal(machine_memory_bytes(ROOT), 32768);
    write_file("/proc/self/cgroup", "4:memory");
    assert_int_equal(machine_memory_bytes(ROOT), 32768);
}

/* Catches: a file name or a unit that only the tests have. */
static void test_this_machine(void **state)
{
    (void)state;
    size_t num_bytes = machine_memory_bytes("");
    assert_true(num_bytes > (size_t)16 << 20);
    assert_true(num_bytes < (size_t)1 << 46 || num_bytes == SIZE_MAX);
}

int run_machine_memory_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_version_2),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_this_machine),
    };
    return cmocka_run_group_tests_name("machine_memory", tests, NULL, forget_all);
}
