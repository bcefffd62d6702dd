/* SPDX-License-Identifier: Apache-2.0 */
/* cmocka with what it needs before it, and the entry points of all suites. */
#ifndef IMBREX_TESTS_TEST_H
#define IMBREX_TESTS_TEST_H

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#define X(name) int run_##name##_tests(void);
#include "tests/suites.h"
#undef X

#endif
