/* SPDX-License-Identifier: Apache-2.0 */
#include "model/rope.h"

#include <math.h>
#include <stdlib.h>

#include "tests/test.h"

#define NUM_PAIRS 8
#define MAX_PAIRS 64

/* Frequencies that the functions of Hugging Face transformers 5.17 (modeling_rope_utils.py) give in
 * double for these parameters: pair and frequency. */
static const struct {
    int32_t head_dim;
    double rope_theta;
    struct rope_scaling scaling;
    struct {
        int32_t pair;
        double frequency;
    } expected[NUM_PAIRS];
} rows[] = {
    {64,
     1e4,
     {.type = ROPE_SCALING_LINEAR, .factor = 2.5},
     {{0, 0.40000000000000002},
      {1, 0.29995768373298237},
      {8, 0.040000000000000001},
      {10, 0.02249365300761396},
      {16, 0.0040000000000000001},
      {20, 0.001264911064067352},
      {24, 0.00040000000000000002},
      {31, 5.3340857286532955e-05}}},
    /* Llama-3.1-8B */
    {128,
     5e5,
     {.type = ROPE_SCALING_LLAMA3,
      .factor = 8.0,
      .low_freq_factor = 1.0,
      .high_freq_factor = 4.0,
      .original_max_position_embeddings = 8192.0},
     {{0, 1},
      {1, 0.81461723385654472},
      {16, 0.037606030930863933},
      {21, 0.013490419890226748},
      {32, 0.00052484616099295468},
      {40, 3.4281021959525912e-05},
      {48, 6.6478698711812362e-06},
      {63, 3.0689259889145111e-07}}},
    /* Llama-3.2-1B */
    {64,
     5e5,
     {.type = ROPE_SCALING_LLAMA3,
      .factor = 32.0,
      .low_freq_factor = 1.0,
      .high_freq_factor = 4.0,
      .original_max_position_embeddings = 8192.0},
     {{0, 1},
      {1, 0.66360123769608848},
      {8, 0.037606030930863933},
      {10, 0.016560440080994446},
      {16, 0.00042955679655936815},
      {20, 8.5702554898814781e-06},
      {24, 1.6619674677953091e-06},
      {31, 9.4183067254349113e-08}}},
    /* Qwen2.5-7B with the published rope_scaling */
    {128,
     1e6,
     {.type = ROPE_SCALING_YARN,
      .factor = 4.0,
      .original_max_position_embeddings = 32768.0,
      .beta_fast = 32.0,
      .beta_slow = 1.0,
      .truncate = true,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.80584218776148187},
      {16, 0.031622776601683791},
      {21, 0.010746078283213174},
      {32, 0.00060294117647058821},
      {40, 4.4456985250973067e-05},
      {48, 7.9056941504209488e-06},
      {63, 3.1023444018792988e-07}}},
    /* Ends of the ramp between pairs */
    {64,
     1.5e5,
     {.type = ROPE_SCALING_YARN,
      .factor = 32.0,
      .original_max_position_embeddings = 4096.0,
      .beta_fast = 32.0,
      .beta_slow = 1.0,
      .truncate = false,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.68904430588816334},
      {8, 0.050813274815461475},
      {10, 0.019335001126540362},
      {16, 0.00045648391922324086},
      {20, 1.818833668168956e-05},
      {24, 4.0999784818029795e-06},
      {31, 3.0235114281192144e-07}}},
    {64,
     1e4,
     {.type = ROPE_SCALING_YARN,
      .factor = 40.0,
      .original_max_position_embeddings = 4096.0,
      .beta_fast = 32.0,
      .beta_slow = 1.0,
      .truncate = true,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.74989420933245587},
      {8, 0.10000000000000001},
      {10, 0.056234132519034905},
      {16, 0.0054999999999999997},
      {20, 0.00079056941504209474},
      {24, 2.5000000000000001e-05},
      {31, 3.3338035804083101e-06}}},
    /* A ramp without length */
    {64,
     1e4,
     {.type = ROPE_SCALING_YARN,
      .factor = 16.0,
      .original_max_position_embeddings = 256.0,
      .beta_fast = 3.0,
      .beta_slow = 3.0,
      .truncate = false,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.74989420933245587},
      {8, 0.10000000000000001},
      {10, 0.0035146332824396815},
      {16, 0.00062500000000000001},
      {20, 0.00019764235376052374},
      {24, 6.2500000000000001e-05},
      {31, 8.3345089510207747e-06}}},
    /* An original length in which no pair turns once: the ramp ends before it begins */
    {64,
     1e4,
     {.type = ROPE_SCALING_YARN,
      .factor = 16.0,
      .original_max_position_embeddings = 4.0,
      .beta_fast = 32.0,
      .beta_slow = 1.0,
      .truncate = true,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.74989420933245587},
      {8, 0.10000000000000001},
      {10, 0.056234132519034905},
      {16, 0.01},
      {20, 0.0031622776601683798},
      {24, 0.001},
      {31, 0.0001333521432163324}}},
    /* A ramp that ends behind the last pair */
    {64,
     1e4,
     {.type = ROPE_SCALING_YARN,
      .factor = 8.0,
      .original_max_position_embeddings = 131072.0,
      .beta_fast = 32.0,
      .beta_slow = 1.0,
      .truncate = true,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.74989420933245587},
      {8, 0.10000000000000001},
      {10, 0.056234132519034905},
      {16, 0.01},
      {20, 0.0031622776601683798},
      {24, 0.00086538461538461541},
      {31, 5.2571517998746431e-05}}},
    /* The same, where it is cut to head_dim - 1 */
    {64,
     1e4,
     {.type = ROPE_SCALING_YARN,
      .factor = 8.0,
      .original_max_position_embeddings = 1e9,
      .beta_fast = 1e6,
      .beta_slow = 1.0,
      .truncate = true,
      .attention_factor = 1.0},
     {{0, 1},
      {1, 0.74989420933245587},
      {8, 0.10000000000000001},
      {10, 0.056234132519034905},
      {16, 0.01},
      {20, 0.0029818215980392062},
      {24, 0.00086684782608695645},
      {31, 9.7839887685896045e-05}}},
};

/* Catches a formula that differs from Hugging Face's where the tiny golden models do not reach. */
static void test_frequencies(void **state)
{
    (void)state;
    for (size_t i = 0; i < sizeof(rows) / sizeof(rows[0]); i++) {
        struct model_config config = {.head_dim = rows[i].head_dim,
                                      .rope_theta = rows[i].rope_theta,
                                      .rope_scaling = rows[i].scaling};
        double frequencies[MAX_PAIRS];
        rope_frequencies(&config, NULL, frequencies);
        for (int32_t j = 0; j < NUM_PAIRS; j++) {
            double expected = rows[i].expected[j].frequency;
            double found = frequencies[rows[i].expected[j].pair];
            if (!(fabs(found - expected) < 1e-12 * expected)) {
                fail_msg("row %zu, pair %d: expected %.17g, found %.17g", i,
                         rows[i].expected[j].pair, expected, found);
            }
        }
    }
}

/* Catches factors that are left out or applied to the wrong pair. */
static void test_factors(void **state)
{
    (void)state;
    struct model_config config = {.head_dim = 8, .rope_theta = 1e4};
    const float factors[] = {1.0f, 2.0f, 4.0f, 32.0f};
    double plain[4], divided[4];
    rope_frequencies(&config, NULL, plain);
    rope_frequencies(&config, factors, divided);
    for (int32_t pair = 0; pair < 4; pair++) {
        assert_true(divided[pair] == plain[pair] / factors[pair]);
    }
    assert_true(plain[0] == 1.0 && fabs(plain[2] - 0.01) < 1e-15);
}

/* Catches a factor that reaches models without yarn, and each branch of its default. */
static void test_attention_factor(void **state)
{
    (void)state;
    struct model_config config = {.rope_scaling = {.attention_factor = 3.0}};
    assert_true(rope_attention_factor(&config) == 1.0);
    config.rope_scaling.type = ROPE_SCALING_LLAMA3;
    assert_true(rope_attention_factor(&config) == 1.0);
    config.rope_scaling.type = ROPE_SCALING_YARN;
    assert_true(rope_attention_factor(&config) == 3.0);
    assert_true(fabs(rope_yarn_attention_factor(4.0, 0.0, 0.0) - 1.138629436111989) < 1e-14);
    assert_true(fabs(rope_yarn_attention_factor(40.0, 1.0, 0.8) - 1.0569662567531275) < 1e-14);
    assert_true(rope_yarn_attention_factor(40.0, 1.0, 0.0) ==
                rope_yarn_attention_factor(40.0, 0.0, 0.0));
    assert_true(rope_yarn_attention_factor(1.0, 5.0, 2.0) == 1.0);
}

int run_rope_tests(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_frequencies),
        cmocka_unit_test(test_factors),
        cmocka_unit_test(test_attention_factor),
    };
    return cmocka_run_group_tests_name("rope", tests, NULL, NULL);
}
