/* SPDX-License-Identifier: Apache-2.0 */
#include "base/status.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/log.h"

/* Catches a code whose number moves (it is part of the ABI) or whose name or text is lost. */
static void test_status_names_and_texts(void **state)
{
    (void)state;
    assert_int_equal(IMBREX_STATUS_OK, 0);
    assert_int_equal(IMBREX_STATUS_FORMAT, 4);
    assert_int_equal(IMBREX_STATUS_INTERNAL, 10);
    assert_string_equal(imbrex_status_name(IMBREX_STATUS_OUT_OF_MEMORY), "OUT_OF_MEMORY");
    assert_string_equal(imbrex_status_text(IMBREX_STATUS_CANCELLED), "cancelled by the caller");
    for (int value = 0; value <= 10; value++) {
        assert_string_not_equal(imbrex_status_name((enum imbrex_status)value), "UNKNOWN");
        assert_true(strlen(imbrex_status_text((enum imbrex_status)value)) > 0);
    }
}

/* Catches NULL, or a read outside a table, for a value that a newer library might return. */
static void test_status_unknown_value(void **state)
{
    (void)state;
    assert_string_equal(imbrex_status_name((enum imbrex_status)12), "UNKNOWN");
    assert_non_null(imbrex_status_text((enum imbrex_status)12));
}

/* Catches a header and a library of different versions. */
static void test_version(void **state)
{
    (void)state;
    assert_string_equal(imbrex_version(), IMBREX_VERSION);
    imbrex_free(NULL);
}

/* Catches a status that gets lost on the way, and a crash when the caller wants no message. */
static void test_error_set_returns_status(void **state)
{
    (void)state;
    struct imbrex_error err = {0};
    assert_int_equal(error_set(NULL, IMBREX_STATUS_IO, "%d", 1), IMBREX_STATUS_IO);
    assert_int_equal(error_set(&err, IMBREX_STATUS_IO, "%s: %d", "a", 5), IMBREX_STATUS_IO);
    assert_int_equal(err.status, IMBREX_STATUS_IO);
    assert_string_equal(err.message, "a: 5");
    assert_int_equal(error_out_of_memory(&err, "activations", 4096), IMBREX_STATUS_OUT_OF_MEMORY);
    assert_string_equal(err.message, "activations: cannot allocate 4096 bytes");
}

/* Catches a field that is not told beside the message, one that the next message still has, and a
 * message that does not begin with it. */
static void test_error_set_names_field(void **state)
{
    (void)state;
    static const char field[] = "context_size";
    struct imbrex_error err = {.status = IMBREX_STATUS_OK};
    assert_int_equal(error_set_field(NULL, IMBREX_STATUS_INVALID_ARGUMENT, field, ": found %d", -1),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(error_set_field(&err, IMBREX_STATUS_INVALID_ARGUMENT, field, ": found %d", -1),
                     IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(err.status, IMBREX_STATUS_INVALID_ARGUMENT);
    assert_ptr_equal(err.field, field);
    assert_string_equal(err.message, "context_size: found -1");
    /* The reason may lie where the message goes. */
    (void)error_set_field(&err, IMBREX_STATUS_IO, field, ": %s", err.message);
    assert_string_equal(err.message, "context_size: context_size: found -1");
    (void)error_set(&err, IMBREX_STATUS_IO, "a: %s", "b");
    assert_null(err.field);
}

/* Catches a path or key from a file that reaches the terminal as an escape sequence or a second
 * line, and bytes that are not UTF-8. */
static void test_error_set_makes_text_printable(void **state)
{
    (void)state;
    struct imbrex_error err;
    error_set(&err, IMBREX_STATUS_FORMAT, "%s", "a\nb\tc\x1b[2Jd\x7f");
    assert_string_equal(err.message, "a?b?c?[2Jd?");
    error_set(&err, IMBREX_STATUS_FORMAT, "%s", "CSI \xc2\x9b, break \xe2\x80\xa8, \xff, \xc3\xa9");
    assert_string_equal(err.message, "CSI ??, break ???, ?, \xc3\xa9");
    error_set(&err, IMBREX_STATUS_FORMAT, "%s", "half \xe2\x82");
    assert_string_equal(err.message, "half ??");
}

/* Catches a write past the message, a missing NUL, half a character at the cut, and a long path
 * that pushes out what was expected and found: three-byte characters cross both edges at each
 * offset. */
static void test_error_set_cuts_in_the_middle(void **state)
{
    (void)state;
    struct {
        struct imbrex_error err;
        unsigned char canary[16];
    } box;
    const char *end = "config.json: expected 1, found 2";
    for (size_t lead_bytes = 0; lead_bytes < 6; lead_bytes++) {
        char text[6000];
        size_t num_bytes = lead_bytes;
        memset(text, 'x', lead_bytes);
        while (num_bytes < 5000) {
            memcpy(text + num_bytes, "\xe2\x82\xac", 3);
            num_bytes += 3;
        }
        strcpy(text + num_bytes, end);
        num_bytes += strlen(end);
        memset(&box, 0xa5, sizeof(box));
        error_set(&box.err, IMBREX_STATUS_FORMAT, "%s", text);

        size_t message_bytes = strlen(box.err.message);
        const char *gap = strstr(box.err.message, "...");
        assert_non_null(gap);
        size_t head_bytes = (size_t)(gap - box.err.message);
        size_t tail_bytes = message_bytes - head_bytes - 3;
        assert_in_range(message_bytes, 507, 511);
        assert_memory_equal(box.err.message, text, head_bytes);
        assert_string_equal(gap + 3, text + num_bytes - tail_bytes);
        assert_int_equal((head_bytes - lead_bytes) % 3, 0);
        assert_int_equal((tail_bytes - strlen(end)) % 3, 0);
        for (size_t i = 0; i < sizeof(box.canary); i++) {
            assert_int_equal(box.canary[i], 0xa5);
        }
    }
    /* The longest message that is whole, and the first that is not. */
    error_set(&box.err, IMBREX_STATUS_FORMAT, "%0511d", 1);
    assert_int_equal(strlen(box.err.message), 511);
    assert_null(strstr(box.err.message, "..."));
    error_set(&box.err, IMBREX_STATUS_FORMAT, "%0512d", 1);
    assert_int_equal(strlen(box.err.message), 511);
    assert_non_null(strstr(box.err.message, "..."));
}

/* Catches formatting into the buffer that the arguments are read from. */
static void test_error_set_wraps_its_own_message(void **state)
{
    (void)state;
    struct imbrex_error err;
    error_set(&err, IMBREX_STATUS_FORMAT, "bad header");
    error_set(&err, err.status, "model.safetensors: %s", err.message);
    assert_string_equal(err.message, "model.safetensors: bad header");
}

static enum imbrex_status double_positive(int number, int *doubled)
{
    if (number <= 0) {
        return IMBREX_STATUS_INVALID_ARGUMENT;
    }
    *doubled = 2 * number;
    return IMBREX_STATUS_OK;
}

static enum imbrex_status double_twice(int number, int *result, int *num_frees)
{
    enum imbrex_status status;
    int doubled;
    TRY(double_positive(number, &doubled));
    TRY_OR_FAIL(double_positive(doubled - 10, result));
    return IMBREX_STATUS_OK;
fail:
    (*num_frees)++;
    return status;
}

/* Catches a TRY that goes on after a failure, or one that returns when there was none. */
static void test_try(void **state)
{
    (void)state;
    int result = -1;
    int num_frees = 0;
    assert_int_equal(double_twice(0, &result, &num_frees), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(num_frees, 0);
    assert_int_equal(double_twice(5, &result, &num_frees), IMBREX_STATUS_INVALID_ARGUMENT);
    assert_int_equal(num_frees, 1);
    assert_int_equal(result, -1);
    assert_int_equal(double_twice(6, &result, &num_frees), IMBREX_STATUS_OK);
    assert_int_equal(num_frees, 1);
    assert_int_equal(result, 4);
}

struct log_record {
    int num_lines;
    enum imbrex_log_level level;
    char line[1024];
};

static void log_keep(void *user, enum imbrex_log_level level, const char *message)
{
    struct log_record *record = user;
    record->num_lines++;
    record->level = level;
    assert_true(strlen(message) < sizeof(record->line));
    strcpy(record->line, message);
}

/* Catches a log line that is dropped, comes twice, runs over its buffer or breaks in two, and a
 * call through a function that is not there. */
static void test_log_write(void **state)
{
    (void)state;
    struct log_record record = {0};
    struct log log = {.write = log_keep, .user = &record};
    log_write(NULL, IMBREX_LOG_LEVEL_INFO, "nobody listens");
    log_write(&(struct log){0}, IMBREX_LOG_LEVEL_INFO, "nobody listens");
    log_write(&log, IMBREX_LOG_LEVEL_WARNING, "%s\n", "one line");
    assert_int_equal(record.num_lines, 1);
    assert_int_equal(record.level, IMBREX_LOG_LEVEL_WARNING);
    assert_string_equal(record.line, "one line?");

    log_write(&log, IMBREX_LOG_LEVEL_DEBUG, "%0700d", 1);
    assert_int_equal(record.num_lines, 2);
    assert_int_equal(strlen(record.line), 511);
}

int run_status_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_status_names_and_texts),
        cmocka_unit_test(test_status_unknown_value),
        cmocka_unit_test(test_version),
        cmocka_unit_test(test_error_set_returns_status),
        cmocka_unit_test(test_error_set_names_field),
        cmocka_unit_test(test_error_set_makes_text_printable),
        cmocka_unit_test(test_error_set_cuts_in_the_middle),
        cmocka_unit_test(test_error_set_wraps_its_own_message),
        cmocka_unit_test(test_try),
        cmocka_unit_test(test_log_write),
    };
    return cmocka_run_group_tests_name("status", tests, NULL, NULL);
}
