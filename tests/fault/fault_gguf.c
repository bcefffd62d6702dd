/* SPDX-License-Identifier: Apache-2.0 */
/* Writing a GGUF file and opening it, with every single request for memory, threads and files
 * refused in turn: the right status, nothing leaked, no file left. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "fault.h"
#include "imbrex.h"

#define OUT_PATH TEST_BUILD_DIR "/fault.gguf"

static bool exists(const char *path)
{
    struct stat status;
    return stat(path, &status) == 0;
}

/* Writes the built-in model, writes what came out once more, and opens that. */
static enum imbrex_status live(void *arg)
{
    (void)arg;
    static const char *const models[] = {"models/stories260K", OUT_PATH, OUT_PATH,
                                         "random:qwen2.5-0.5b"};
    struct imbrex_quantize_options options = imbrex_quantize_options_default();
    enum imbrex_status status = IMBREX_STATUS_OK;
    options.path = OUT_PATH;
    options.overwrite = true;
    options.num_threads = 2;
    (void)unlink(OUT_PATH);
    for (size_t i = 0; i < sizeof(models) / sizeof(models[0]) && status == IMBREX_STATUS_OK; i++) {
        struct imbrex_error err = {0};
        struct imbrex_model *model = NULL;
        status = imbrex_model_open(models[i], NULL, &model, &err);
        if (status == IMBREX_STATUS_OK && i < 2) {
            status = imbrex_quantize(model, &options, NULL, &err);
        }
        /* Whoever fails says so in one line. */
        assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
        imbrex_model_close(model);
    }
    assert_false(exists(OUT_PATH ".partial"));
    assert_true(exists(OUT_PATH) || status != IMBREX_STATUS_OK);
    (void)unlink(OUT_PATH);
    return status;
}

/* Catches: an unchecked allocation (crash), a leak on a failure path, a wrong status, a partial
 * file that stays. */
static void test_each_allocation(void **state)
{
    (void)state;
    int64_t num_failed =
        fault_each_call(FAULT_MEMORY, false, IMBREX_STATUS_OUT_OF_MEMORY, live, NULL);
    print_message("%ld allocations failed one by one\n", (long)num_failed);
    assert_true(num_failed > 60);
}

/* Catches: an unchecked open or read. */
static void test_each_file_call(void **state)
{
    (void)state;
    assert_true(fault_each_call(FAULT_FILE, false, IMBREX_STATUS_IO, live, NULL) >= 8);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation),
        cmocka_unit_test(test_each_file_call),
    };
    return cmocka_run_group_tests_name("fault_gguf", tests, NULL, NULL);
}
