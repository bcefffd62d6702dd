/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer of each kind opened, used and closed with every single request for memory refused in
 * turn: the right status, nothing leaked. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "fault.h"
#include "imbrex.h"

/* Decomposed, with white space, an unknown character and a word long enough for the heap. */
#define TEXT                                                                          \
    "e\xcc\x81 <mask>  12345 \xf0\x9f\x98\x80 ``abababababababababababababababababab" \
    "ababababababababababababababababababababababababababab\n"

static enum imbrex_status live(const char *path)
{
    struct imbrex_error err = {0};
    struct imbrex_tokenizer *tokenizer = NULL;
    int32_t *ids = NULL;
    char *text = NULL;
    size_t num_ids = 0, num_bytes;
    enum imbrex_status status = imbrex_tokenizer_open(path, &tokenizer, &err);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_tokenize(tokenizer, TEXT, strlen(TEXT),
                                 IMBREX_TOKENIZE_ADD_SPECIAL | IMBREX_TOKENIZE_PARSE_SPECIAL, &ids,
                                 &num_ids, &err);
    }
    assert_true(status == IMBREX_STATUS_OK || strlen(err.message) > 0);
    if (status == IMBREX_STATUS_OK) {
        status = imbrex_detokenize(tokenizer, ids, num_ids, true, &text, &num_bytes, &err);
    }
    imbrex_free(ids);
    imbrex_free(text);
    imbrex_tokenizer_close(tokenizer);
    return status;
}

/* Catches an allocation that is not checked (crash), a leak on a failure path, a wrong status. An
 * expression that PCRE2 has no memory to compile to machine code still matches, so there success
 * is an answer too. */
static void test_each_allocation(void **state)
{
    (void)state;
    static const struct {
        const char *path;
        bool may_do_without;
    } kinds[] = {
        {"tests/golden/tokenizers/gpt2", false},      {"tests/golden/tokenizers/llama3", false},
        {"tests/golden/tokenizers/llama2", false},    {"tests/golden/tokenizers/mistral", false},
        {"tests/golden/tokenizers/metaspace", false}, {"tests/golden/tokenizers/tekken", true},
        {"tests/golden/tokenizers/mixed", true},
    };
    for (size_t i = 0; i < sizeof(kinds) / sizeof(kinds[0]); i++) {
        /* What PCRE2 keeps for machine code of its own, it keeps from the first time on. */
        assert_int_equal(live(kinds[i].path), IMBREX_STATUS_OK);
        int64_t num_before = fault_num_calls(FAULT_MEMORY);
        assert_int_equal(live(kinds[i].path), IMBREX_STATUS_OK);
        int64_t num_calls = fault_num_calls(FAULT_MEMORY) - num_before;
        /* The JSON tree has thousands; one in a few, but all of the last ones. */
        for (int64_t call = 1; call <= num_calls; call += call + 400 < num_calls ? 37 : 1) {
            int64_t num_live = fault_num_live();
            fault_arm(FAULT_MEMORY, call, false);
            enum imbrex_status status = live(kinds[i].path);
            bool has_failed = fault_disarm();
            assert_true(has_failed);
            if (fault_num_live() != num_live) {
                fail_msg("%s: call %ld failing: %ld allocations leaked", kinds[i].path, (long)call,
                         (long)(fault_num_live() - num_live));
            }
            if (status != IMBREX_STATUS_OUT_OF_MEMORY &&
                !(status == IMBREX_STATUS_OK && kinds[i].may_do_without)) {
                fail_msg("%s: call %ld failing: %s", kinds[i].path, (long)call,
                         imbrex_status_name(status));
            }
        }
        print_message("%s: %ld allocations\n", kinds[i].path, (long)num_calls);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_allocation),
    };
    return cmocka_run_group_tests_name("fault tokenizer", tests, NULL, NULL);
}
