/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/harness.h"

#include <inttypes.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/thread_pool.h"
#include "ops/cpu/cpu_kernels.h"
#include "ops/quant.h"

#define MAX_BUFFERS 64
#define CANARY_BYTE 0xa5
#define POISON_BITS 0x7fc5a5a5u /* a NaN that no computation makes */
#define MAX_PRINTED_FAILURES 20
#define SCRATCH_TOKENS 512 /* the largest bench */
#define SCRATCH_FEATURES 4864
#define SCRATCH_POISONED_BYTES 65536 /* before each run: what a small case uses */

#define NUM_PATHS CPU_NUM_PATHS

static const int32_t thread_counts[] = {1, 2, 5};
#define NUM_THREAD_COUNTS ((int)(sizeof(thread_counts) / sizeof(thread_counts[0])))

struct buffer {
    unsigned char *map; /* guard page, pages, guard page; NULL for plain memory */
    size_t map_bytes;
    unsigned char *at;
    size_t num_bytes;
};

struct harness {
    int64_t num_passed, num_failed, num_skipped;
    int64_t group_passed, group_failed;
    char group_name[128], case_name[160];
    bool group_open, failure_in_case, case_was_checked;
    uint64_t random_state;
    enum placement placement;
    struct buffer buffers[MAX_BUFFERS];
    int num_buffers;
    struct ops *ops[NUM_PATHS][NUM_THREAD_COUNTS]; /* NULL: not on this machine */
    struct ops *bench_ops[NUM_PATHS][2];           /* 1 thread, all CPUs */
    double read_gbps[2];                           /* memory bandwidth of the same two */
    void *scratch;                                 /* of whichever ops runs */
    size_t scratch_bytes;
};

/* For the signal handler only. */
static struct harness *current_harness;

static void die(const char *what)
{
    fprintf(stderr, "check: %s\n", what);
    exit(2);
}

/* ---- reporting --------------------------------------------------------------------------------*/

static void end_group(struct harness *harness)
{
    if (harness->group_open) {
        printf("%-58s %5" PRId64 " cases %s\n", harness->group_name,
               harness->group_passed + harness->group_failed,
               harness->group_failed == 0 ? "ok" : "FAILED");
        harness->group_open = false;
    }
}

static void print_summary(struct harness *harness)
{
    if (harness->num_skipped > 0) {
        printf("%" PRId64 " skipped\n", harness->num_skipped);
    }
    printf("%" PRId64 " passed, %" PRId64 " failed\n", harness->num_passed, harness->num_failed);
}

void harness_group(struct harness *harness, const char *format, ...)
{
    end_group(harness);
    va_list args;
    va_start(args, format);
    vsnprintf(harness->group_name, sizeof(harness->group_name), format, args);
    va_end(args);
    harness->group_passed = harness->group_failed = 0;
    harness->group_open = true;
}

void harness_case(struct harness *harness, const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(harness->case_name, sizeof(harness->case_name), format, args);
    va_end(args);
    harness->failure_in_case = harness->case_was_checked = false;
}

static void fail_case(struct harness *harness, const char *format, va_list args)
{
    if (!harness->failure_in_case) {
        harness->failure_in_case = true;
        harness->num_failed++;
        harness->group_failed++;
    }
    if (harness->num_failed <= MAX_PRINTED_FAILURES) {
        printf("FAIL %s, %s: ", harness->group_name, harness->case_name);
        vprintf(format, args);
        printf("\n");
    }
}

bool harness_expect(struct harness *harness, bool condition, const char *format, ...)
{
    if (!condition) {
        va_list args;
        va_start(args, format);
        fail_case(harness, format, args);
        va_end(args);
    }
    return condition;
}

/* A fault is a failed case like any other, but the last one: memory outside of a buffer was
 * touched, or an input written. */
static void on_fault(int signal_number, siginfo_t *fault, void *context)
{
    struct harness *harness = current_harness;
    (void)context;
    printf("FAIL %s, %s: signal %d at address %p: outside of its buffers, or a write to an input\n",
           harness->group_name, harness->case_name, signal_number, fault->si_addr);
    for (int idx = 0; idx < harness->num_buffers; idx++) {
        const struct buffer *buffer = &harness->buffers[idx];
        if (buffer->map != NULL) {
            printf("     buffer %d: [%p, %p)\n", idx, (void *)buffer->at,
                   (void *)(buffer->at + buffer->num_bytes));
        }
    }
    harness->num_failed++;
    print_summary(harness);
    fflush(stdout);
    _exit(1);
}

/* ---- buffers ----------------------------------------------------------------------------------*/

static struct buffer *add_buffer(struct harness *harness)
{
    if (harness->num_buffers == MAX_BUFFERS) {
        die("too many buffers in a case");
    }
    return &harness->buffers[harness->num_buffers++];
}

void harness_set_placement(struct harness *harness, enum placement placement)
{
    harness->placement = placement;
}

void *harness_place(struct harness *harness, size_t num_bytes, size_t shift)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    size_t used_bytes = (num_bytes + shift + page - 1) / page * page;
    used_bytes = used_bytes == 0 ? page : used_bytes;
    struct buffer *buffer = add_buffer(harness);
    buffer->map_bytes = used_bytes + 2 * page;
    void *map = mmap(NULL, buffer->map_bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (map == MAP_FAILED) {
        die("out of memory");
    }
    buffer->map = map;
    if (mprotect(buffer->map + page, used_bytes, PROT_READ | PROT_WRITE) != 0) {
        die("mprotect failed");
    }
    memset(buffer->map + page, CANARY_BYTE, used_bytes);
    buffer->num_bytes = num_bytes;
    buffer->at = buffer->map + page;
    buffer->at += harness->placement == PLACEMENT_BEGIN ? shift : used_bytes - num_bytes - shift;
    return buffer->at;
}

void *harness_alloc(struct harness *harness, size_t count, size_t element_bytes)
{
    struct buffer *buffer = add_buffer(harness);
    *buffer = (struct buffer){.at = calloc(count == 0 ? 1 : count, element_bytes)};
    if (buffer->at == NULL) {
        die("out of memory");
    }
    return buffer->at;
}

void harness_seal(struct harness *harness, const void *at)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int idx = 0; idx < harness->num_buffers; idx++) {
        struct buffer *buffer = &harness->buffers[idx];
        if (buffer->map != NULL && buffer->at == at) {
            if (mprotect(buffer->map + page, buffer->map_bytes - 2 * page, PROT_READ) != 0) {
                die("mprotect failed");
            }
            return;
        }
    }
    die("harness_seal: not a placed buffer");
}

void harness_end_case(struct harness *harness)
{
    for (int idx = 0; idx < harness->num_buffers; idx++) {
        struct buffer *buffer = &harness->buffers[idx];
        if (buffer->map != NULL) {
            munmap(buffer->map, buffer->map_bytes);
        } else {
            free(buffer->at);
        }
    }
    harness->num_buffers = 0;
}

static bool is_filled(const unsigned char *begin, const unsigned char *end)
{
    for (const unsigned char *byte = begin; byte < end; byte++) {
        if (*byte != CANARY_BYTE) {
            return false;
        }
    }
    return true;
}

static bool canaries_live(const struct harness *harness)
{
    size_t page = (size_t)sysconf(_SC_PAGESIZE);
    for (int idx = 0; idx < harness->num_buffers; idx++) {
        const struct buffer *buffer = &harness->buffers[idx];
        if (buffer->map != NULL &&
            (!is_filled(buffer->map + page, buffer->at) ||
             !is_filled(buffer->at + buffer->num_bytes, buffer->map + buffer->map_bytes - page))) {
            return false;
        }
    }
    return true;
}

/* ---- inputs -----------------------------------------------------------------------------------*/

const char *input_kind_name(enum input_kind kind)
{
    static const char *const names[] = {"normal", "large", "denormal"};
    return names[kind];
}

double input_kind_scale(enum input_kind kind)
{
    static const double scales[] = {1.0, 1e15, 1e-40};
    return scales[kind];
}

/* splitmix64. */
static uint64_t random_bits(struct harness *harness)
{
    uint64_t bits = harness->random_state += 0x9e3779b97f4a7c15u;
    bits = (bits ^ (bits >> 30)) * 0xbf58476d1ce4e5b9u;
    bits = (bits ^ (bits >> 27)) * 0x94d049bb133111ebu;
    return bits ^ (bits >> 31);
}

double harness_random(struct harness *harness)
{
    /* The sum of four 16-bit uniforms: standard deviation 2^16 / sqrt(3), close to normal. */
    uint64_t bits = random_bits(harness);
    double sum = (double)(bits & 0xffff) + (double)(bits >> 16 & 0xffff) +
                 (double)(bits >> 32 & 0xffff) + (double)(bits >> 48);
    return (sum - 2.0 * 65535.0) * (sqrt(3.0) / 65536.0);
}

int32_t harness_random_below(struct harness *harness, int32_t limit)
{
    return (int32_t)(random_bits(harness) % (uint64_t)limit);
}

static void poison(float *values, int64_t count)
{
    uint32_t bits = POISON_BITS;
    for (int64_t idx = 0; idx < count; idx++) {
        memcpy(values + idx, &bits, sizeof(bits));
    }
}

static bool is_poisoned(const float *values, int64_t count)
{
    uint32_t bits;
    for (int64_t idx = 0; idx < count; idx++) {
        memcpy(&bits, values + idx, sizeof(bits));
        if (bits != POISON_BITS) {
            return false;
        }
    }
    return true;
}

void harness_fill(struct harness *harness, float *rows, int64_t num_rows, int64_t width,
                  int64_t stride, double scale)
{
    for (int64_t row = 0; row < num_rows; row++) {
        for (int64_t col = 0; col < width; col++) {
            rows[row * stride + col] = (float)(harness_random(harness) * scale);
        }
        if (row + 1 < num_rows) {
            poison(rows + row * stride + width, stride - width);
        }
    }
}

static uint16_t f16_from_double(double value)
{
    uint16_t sign = signbit(value) ? 0x8000 : 0;
    double magnitude = fabs(value);
    if (isnan(value)) {
        return 0x7e00;
    }
    if (magnitude >= 65520.0) {
        return sign | 0x7c00;
    }
    int exponent = magnitude < 0x1p-14 ? -14 : ilogb(magnitude);
    /* In units of the last place; a carry out of the mantissa raises the exponent as it should. */
    double units = nearbyint(ldexp(magnitude, 10 - exponent));
    return (uint16_t)(sign + ((exponent + 14) << 10) + (int)units);
}

void harness_store_weight(void *weights, enum dtype dtype, int64_t idx, double value)
{
    unsigned char *at = (unsigned char *)weights + idx * (int64_t)dtype_block_bytes(dtype);
    float narrow = (float)value;
    uint16_t half;
    switch (dtype) {
    case DTYPE_BF16: {
        uint32_t bits;
        memcpy(&bits, &narrow, sizeof(bits));
        half = (uint16_t)(bits >> 16); /* cut, not rounded: any bf16 will do */
        memcpy(at, &half, sizeof(half));
        break;
    }
    case DTYPE_F16:
        half = f16_from_double(value);
        memcpy(at, &half, sizeof(half));
        break;
    default:
        memcpy(at, &narrow, sizeof(narrow));
        break;
    }
}

/* The root mean square of the integers, and the offsets of scale and min in a block. */
struct block_shape {
    double scale_divisor, min_factor; /* scale = size / divisor; min = -factor * scale */
    int scale_offset, min_offset;     /* min_offset < 0: there is none */
};

static const struct block_shape block_shapes[DTYPE_COUNT] = {
    [DTYPE_Q8_0] = {74.0, 0.0, 0, -1},   [DTYPE_Q4_0] = {4.6, 0.0, 0, -1},
    [DTYPE_Q4_1] = {4.6, 7.5, 0, 2},     [DTYPE_Q5_0] = {9.2, 0.0, 0, -1},
    [DTYPE_Q5_1] = {9.2, 15.5, 0, 2},    [DTYPE_Q4_K] = {170.0, -7.5, 0, 2},
    [DTYPE_Q5_K] = {340.0, -15.5, 0, 2}, [DTYPE_Q6_K] = {1370.0, 0.0, 208, -1},
};

void harness_store_scale(void *weights, enum dtype dtype, int64_t idx, double scale)
{
    int64_t block = idx / dtype_block_elements(dtype);
    uint16_t half = f16_from_double(scale);
    memcpy((unsigned char *)weights + block * (int64_t)dtype_block_bytes(dtype) +
               block_shapes[dtype].scale_offset,
           &half, sizeof(half));
}

static void fill_blocks(struct harness *harness, unsigned char *blocks, enum dtype dtype,
                        int64_t count, double scale)
{
    const struct block_shape *shape = &block_shapes[dtype];
    size_t num_bytes = dtype_row_bytes(dtype, count), block_bytes = dtype_block_bytes(dtype);
    for (size_t idx = 0; idx < num_bytes; idx++) {
        blocks[idx] = (unsigned char)random_bits(harness);
    }
    for (size_t at = 0; at < num_bytes; at += block_bytes) {
        /* Scales of either sign: the formats allow it. */
        double spread = 0.5 + (double)harness_random_below(harness, 1000) / 1000.0;
        double block_scale = scale * spread / shape->scale_divisor;
        block_scale = harness_random_below(harness, 2) == 0 ? block_scale : -block_scale;
        uint16_t half = f16_from_double(block_scale);
        memcpy(blocks + at + shape->scale_offset, &half, sizeof(half));
        if (shape->min_offset >= 0) {
            half = f16_from_double(-shape->min_factor * block_scale);
            memcpy(blocks + at + shape->min_offset, &half, sizeof(half));
        }
    }
}

void harness_fill_weights(struct harness *harness, void *weights, enum dtype dtype, int64_t count,
                          double scale)
{
    if (dtype_is_quantized(dtype)) {
        fill_blocks(harness, weights, dtype, count, scale);
        return;
    }
    for (int64_t idx = 0; idx < count; idx++) {
        harness_store_weight(weights, dtype, idx, harness_random(harness) * scale);
    }
}

double harness_weight(const void *weights, enum dtype dtype, int64_t idx)
{
    const unsigned char *at =
        (const unsigned char *)weights + idx * (int64_t)dtype_block_bytes(dtype);
    if (dtype == DTYPE_F32) {
        float value;
        memcpy(&value, at, sizeof(value));
        return value;
    }
    uint16_t bits;
    memcpy(&bits, at, sizeof(bits));
    int num_mantissa_bits = dtype == DTYPE_BF16 ? 7 : 10;
    int max_exponent = dtype == DTYPE_BF16 ? 255 : 31;
    int mantissa = bits & ((1 << num_mantissa_bits) - 1);
    int exponent = (bits & 0x7fff) >> num_mantissa_bits;
    double sign = (bits & 0x8000) != 0 ? -1.0 : 1.0;
    if (exponent == max_exponent) {
        return mantissa == 0 ? sign * INFINITY : NAN;
    }
    int implicit = exponent == 0 ? 0 : 1 << num_mantissa_bits;
    int unbiased = (exponent == 0 ? 1 : exponent) - max_exponent / 2;
    return sign * ldexp(implicit + mantissa, unbiased - num_mantissa_bits);
}

void harness_weight_row(struct harness *harness, struct weight_view weight, int64_t row_idx,
                        int64_t count, double *row)
{
    if (!dtype_is_quantized(weight.dtype)) {
        for (int64_t k = 0; k < count; k++) {
            row[k] = harness_weight(weight.elements, weight.dtype, row_idx * count + k);
        }
        return;
    }
    if (count > SCRATCH_FEATURES) {
        die("a row of blocks is longer than SCRATCH_FEATURES");
    }
    float wide[SCRATCH_FEATURES];
    (void)harness;
    const unsigned char *blocks = weight.elements;
    quant_dequantize_row(weight.dtype,
                         blocks + row_idx * (int64_t)dtype_row_bytes(weight.dtype, count), wide,
                         count);
    for (int64_t k = 0; k < count; k++) {
        row[k] = wide[k];
    }
}

void harness_activations(struct harness *harness, enum dtype dtype, const float *a, int64_t count,
                         double *row)
{
    enum activation_form form = quant_activation_form(dtype);
    float wide[SCRATCH_FEATURES];
    const float *seen = a;
    if (form != ACTIVATION_FORM_PLAIN) {
        if (count > SCRATCH_FEATURES) {
            die("a row of blocks is longer than SCRATCH_FEATURES");
        }
        quant_quantize_activations(form, a, harness->scratch, count);
        quant_dequantize_activations(form, harness->scratch, wide, count);
        seen = wide;
    }
    for (int64_t k = 0; k < count; k++) {
        row[k] = seen[k];
    }
}

bool harness_rounds(const struct harness *harness)
{
    for (int path_idx = CPU_NUM_FP32_PATHS; path_idx < NUM_PATHS; path_idx++) {
        if (harness->ops[path_idx][0] != NULL) {
            return true;
        }
    }
    return false;
}

void harness_rounded_activations(const float *a, int64_t count, double *row)
{
    for (int64_t k = 0; k < count; k++) {
        uint16_t bits = bf16_from_float(a[k]);
        row[k] = harness_weight(&bits, DTYPE_BF16, 0);
    }
}

double harness_rounded_bound(int64_t count, double magnitude, double weight_magnitude,
                             double a_magnitude)
{
    /* A tile product adds up 16 pairs before it adds them to the sum so far. */
    return ((double)count / 4.0 + 20.0) * HARNESS_UNIT * magnitude +
           (weight_magnitude + a_magnitude + 3.0 * (double)count) * 0x1p-126;
}

double harness_activation_scale(enum dtype dtype, enum input_kind kind)
{
    bool has_f16_scale = quant_activation_form(dtype) == ACTIVATION_FORM_Q8;
    return kind == INPUT_LARGE && has_f16_scale ? 1e5 : input_kind_scale(kind);
}

double harness_product_bound(enum dtype dtype, int64_t count, double magnitude)
{
    if (dtype_is_quantized(dtype)) {
        return 1e-6 * magnitude + 0x1p-149; /* what quant.h promises */
    }
    /* With four partial sums or more each term is rounded at most count / 4 + 3 times, its product
     * once. One sum of all of a block rounds its terms more often, but at what has been added up so
     * far, which is much less than the magnitude. A subnormal product is off by half of 2^-149. */
    return ((double)count / 4.0 + 6.0) * HARNESS_UNIT * magnitude + (double)count * 0x1p-150;
}

/* ---- checking ---------------------------------------------------------------------------------*/

static void reset_outputs(const struct check_plan *plan)
{
    for (int32_t idx = 0; idx < plan->num_outputs; idx++) {
        const struct check_output *output = &plan->outputs[idx];
        for (int64_t row = 0; row < output->num_rows; row++) {
            float *at = output->at + row * output->stride;
            if (output->initial == NULL) {
                poison(at, output->width);
            } else {
                memcpy(at, output->initial + row * output->width,
                       (size_t)output->width * sizeof(float));
            }
        }
    }
}

/* Whether the gaps between rows are as harness_place or harness_fill left them: outputs that share
 * rows (the q, k and v of one buffer) cannot be asked. */
static bool gaps_live(const struct check_plan *plan)
{
    const struct check_output *output = &plan->outputs[0];
    if (plan->num_outputs != 1) {
        return true;
    }
    for (int64_t row = 0; row + 1 < output->num_rows; row++) {
        if (!is_poisoned(output->at + row * output->stride + output->width,
                         output->stride - output->width)) {
            return false;
        }
    }
    return true;
}

static void poison_gaps(const struct check_plan *plan)
{
    const struct check_output *output = &plan->outputs[0];
    for (int64_t row = 0; plan->num_outputs == 1 && row + 1 < output->num_rows; row++) {
        poison(output->at + row * output->stride + output->width, output->stride - output->width);
    }
}

static double error_of(double result, double expected)
{
    if (isnan(expected)) {
        return isnan(result) ? 0.0 : INFINITY;
    }
    if (result == expected) {
        return 0.0;
    }
    double error = fabs(result - expected);
    return isnan(error) ? INFINITY : error;
}

static void compare_output(struct harness *harness, const struct check_output *output,
                           int32_t output_idx, const char *run_name)
{
    int64_t worst = -1, num_wrong = 0, num_rated = 0;
    double worst_ratio = 0.0, sum_squares = 0.0;
    for (int64_t idx = 0; idx < output->num_rows * output->width; idx++) {
        float result = output->at[idx / output->width * output->stride + idx % output->width];
        double error = error_of(result, output->expected[idx]), bound = output->bound[idx];
        if (isinf(bound)) {
            continue;
        }
        bool is_within = error <= bound; /* no bound of NaN holds */
        double ratio = bound > 0.0 ? error / bound : is_within ? 0.0 : INFINITY;
        num_wrong += !is_within;
        if (bound > 0.0 && isfinite(output->expected[idx])) {
            sum_squares += ratio * ratio;
            num_rated++;
        }
        if (worst < 0 || ratio > worst_ratio) {
            worst = idx;
            worst_ratio = ratio;
        }
    }
    if (!harness_expect(harness, worst >= 0, "%s: output %d: nothing was compared", run_name,
                        (int)output_idx)) {
        return;
    }
    double rms = num_rated == 0 ? 0.0 : sqrt(sum_squares / (double)num_rated);
    float result = output->at[worst / output->width * output->stride + worst % output->width];
    harness_expect(harness, num_wrong == 0,
                   "%s: output %d: %" PRId64 " of %" PRId64 " wrong; worst at row %" PRId64
                   ", column %" PRId64 ": %.9g, expected %.9g, allowed +-%.3g",
                   run_name, (int)output_idx, num_wrong, output->num_rows * output->width,
                   worst / output->width, worst % output->width, (double)result,
                   output->expected[worst], output->bound[worst]);
    harness_expect(harness, output->global_ratio <= 0.0 || rms <= output->global_ratio,
                   "%s: output %d: root mean square of error / bound is %.3g, allowed %.3g; worst "
                   "at row %" PRId64 ", column %" PRId64 ": %.9g, expected %.9g",
                   run_name, (int)output_idx, rms, output->global_ratio, worst / output->width,
                   worst % output->width, (double)result, output->expected[worst]);
}

static bool bits_equal(float left, float right)
{
    /* Which of two NaN operands an addition returns depends on the order in which a compiler
     * writes it. */
    return memcmp(&left, &right, sizeof(left)) == 0 || (isnan(left) && isnan(right));
}

static void save_outputs(const struct check_plan *plan, float *const *saved)
{
    for (int32_t idx = 0; idx < plan->num_outputs; idx++) {
        const struct check_output *output = &plan->outputs[idx];
        for (int64_t row = 0; row < output->num_rows; row++) {
            memcpy(saved[idx] + row * output->width, output->at + row * output->stride,
                   (size_t)output->width * sizeof(float));
        }
    }
}

static void compare_saved(struct harness *harness, const struct check_plan *plan,
                          float *const *saved, const char *run_name)
{
    for (int32_t output_idx = 0; output_idx < plan->num_outputs; output_idx++) {
        const struct check_output *output = &plan->outputs[output_idx];
        for (int64_t idx = 0; idx < output->num_rows * output->width; idx++) {
            int64_t row = idx / output->width, col = idx % output->width;
            float result = output->at[row * output->stride + col];
            if (!harness_expect(harness, bits_equal(result, saved[output_idx][idx]),
                                "%s: output %d: row %" PRId64 ", column %" PRId64
                                ": %.9g, but %.9g in the first run",
                                run_name, (int)output_idx, row, col, (double)result,
                                (double)saved[output_idx][idx])) {
                break;
            }
        }
    }
}

/* How a batch is cut for one run. */
struct cut {
    const char *name;
    int32_t threads_idx;
    int32_t rows_per_call; /* 0: all */
    bool is_for_bits;      /* touches no memory in another way than the others */
    bool is_for_fast;      /* proves nothing of the reference, which takes a row at a time */
};

/* A sanitizer, which makes runs many times slower, looks for wrong accesses; that results are the
 * same to the bit is proved without one. */
static bool is_left_out(const struct cut *cut, int path_idx)
{
    bool is_reference = path_idx == 0;
    return (is_reference && cut->is_for_fast) ||
           (TEST_SANITIZED && (cut->is_for_bits || (is_reference && cut->rows_per_call > 0)));
}

static void check_path(struct harness *harness, const struct check_plan *plan, int path_idx,
                       float *const *saved)
{
    const struct cut cuts[] = {
        {"1 thread", 0, 0, false, false},
        {"1 thread, again", 0, 0, true, true},
        {"2 threads", 1, 0, true, true},
        {"5 threads", 2, 0, false, false},
        {"1 thread, in halves", 0, (plan->num_rows + 1) / 2, false, false},
        {"1 thread, row by row", 0, 1, false, true},
    };
    size_t num_cuts = sizeof(cuts) / sizeof(cuts[0]) - (plan->whole_only ? 2 : 0);
    for (size_t cut_idx = 0; cut_idx < num_cuts; cut_idx++) {
        const struct cut *cut = &cuts[cut_idx];
        char run_name[64];
        snprintf(run_name, sizeof(run_name), "%s, %s", cpu_paths[path_idx].name, cut->name);
        int32_t rows_per_call = cut->rows_per_call == 0 ? plan->num_rows : cut->rows_per_call;
        if (cut_idx >= 4 && rows_per_call >= plan->num_rows) {
            continue; /* the same call as before */
        }
        if (is_left_out(cut, path_idx)) {
            continue;
        }
        reset_outputs(plan);
        memset(harness->scratch, 0xff, SCRATCH_POISONED_BYTES);
        for (int32_t row = 0; row < plan->num_rows; row += rows_per_call) {
            int32_t num_left = plan->num_rows - row;
            plan->run(harness->ops[path_idx][cut->threads_idx], plan->arg, row,
                      num_left < rows_per_call ? num_left : rows_per_call);
        }
        harness_expect(harness, canaries_live(harness), "%s: wrote outside of a buffer", run_name);
        harness_expect(harness, gaps_live(plan), "%s: wrote between two rows", run_name);
        if (cut_idx == 0) {
            for (int32_t idx = 0; idx < plan->num_outputs; idx++) {
                struct check_output output = plan->outputs[idx];
                if (path_idx >= CPU_NUM_FP32_PATHS && output.rounded_expected != NULL) {
                    output.expected = output.rounded_expected;
                    output.bound = output.rounded_bound;
                }
                compare_output(harness, &output, idx, run_name);
            }
            save_outputs(plan, saved);
        } else {
            compare_saved(harness, plan, saved, run_name);
        }
        if (harness->failure_in_case) {
            return;
        }
    }
}

bool harness_check(struct harness *harness, const struct check_plan *plan)
{
    float *saved[HARNESS_MAX_OUTPUTS] = {NULL};
    for (int32_t idx = 0; idx < plan->num_outputs; idx++) {
        const struct check_output *output = &plan->outputs[idx];
        saved[idx] =
            harness_alloc(harness, (size_t)(output->num_rows * output->width), sizeof(float));
    }
    poison_gaps(plan);
    for (int path_idx = plan->fast_only ? 1 : 0; path_idx < NUM_PATHS; path_idx++) {
        if (harness->ops[path_idx][0] != NULL) {
            check_path(harness, plan, path_idx, saved);
        }
    }
    harness->case_was_checked = true;
    if (!harness->failure_in_case) {
        harness->num_passed++;
        harness->group_passed++;
    }
    return !harness->failure_in_case;
}

/* ---- timing -----------------------------------------------------------------------------------*/

#define MIN_SAMPLES 5
#define MAX_SAMPLES 201
#define SAMPLE_BUDGET_NS 1000000000

static int compare_ns(const void *left, const void *right)
{
    int64_t a = *(const int64_t *)left, b = *(const int64_t *)right;
    return (a > b) - (a < b);
}

struct read_loop {
    const uint64_t *words;
    _Atomic uint64_t sum; /* so that the reads are not optimised away */
};

static void read_piece(void *arg, int64_t begin, int64_t end, int32_t thread_idx)
{
    struct read_loop *loop = arg;
    (void)thread_idx;
    uint64_t sum_0 = 0, sum_1 = 0, sum_2 = 0, sum_3 = 0;
    /* Every word: one word a cache line was slower (14 instead of 23 GB/s on an EPYC 9004). */
    for (const uint64_t *word = loop->words + begin * 8; word < loop->words + end * 8; word += 4) {
        sum_0 += word[0];
        sum_1 += word[1];
        sum_2 += word[2];
        sum_3 += word[3];
    }
    loop->sum += (sum_0 + sum_1) + (sum_2 + sum_3);
}

/* What reading memory alone gives, the best of five: the roof for an op that reads weights once. */
static double measure_read_gbps(int32_t num_threads)
{
    size_t num_bytes = (size_t)256 << 20;
    unsigned char *memory = malloc(num_bytes);
    struct thread_pool *pool = NULL;
    if (memory == NULL || thread_pool_create(num_threads, &pool, NULL) != IMBREX_STATUS_OK) {
        die("out of memory");
    }
    memset(memory, 1, num_bytes);
    struct read_loop loop = {(const uint64_t *)(void *)memory, 0};
    double best = 0.0;
    for (int round = 0; round < 5; round++) {
        int64_t begin_ns = clock_now_ns();
        thread_pool_run(pool, (int64_t)num_bytes / 64, 1 << 14, read_piece, &loop);
        best = fmax(best, (double)num_bytes / (double)(clock_now_ns() - begin_ns));
    }
    thread_pool_destroy(pool);
    free(memory);
    return best;
}

static void print_machine(struct harness *harness)
{
    char line[256] = "", *model = NULL;
    FILE *cpuinfo = fopen("/proc/cpuinfo", "r");
    while (cpuinfo != NULL && model == NULL && fgets(line, sizeof(line), cpuinfo) != NULL) {
        model = strncmp(line, "model name", 10) == 0 ? strchr(line, ':') : NULL;
    }
    if (cpuinfo != NULL) {
        fclose(cpuinfo);
    }
    if (model != NULL) {
        model[strcspn(model, "\n")] = '\0';
    }
    printf("%s, %d CPUs, memory read %.1f GB/s by 1 thread, %.1f by all\n",
           model == NULL ? "CPU unknown" : model + 2, (int)thread_pool_num_cpus(),
           harness->read_gbps[0], harness->read_gbps[1]);
    printf("%-42s %-5s %7s %11s %9s %8s %5s\n", "", "path", "threads", "median us", "GFLOP/s",
           "GB/s", "roof");
}

void harness_bench(struct harness *harness, const struct check_plan *plan,
                   void (*before_run)(void *arg), double flops, double bytes)
{
    if (!harness->case_was_checked || harness->failure_in_case) {
        printf("%-42s not timed: its result was not proved\n", harness->case_name);
        return;
    }
    static int64_t samples[NUM_PATHS][2][MAX_SAMPLES];
    int32_t num_thread_counts = thread_pool_num_cpus() > 1 ? 2 : 1;
    int first_path = plan->fast_only ? 1 : 0;
    int32_t num_samples = 0;
    int64_t started_ns = clock_now_ns();
    while (num_samples < MIN_SAMPLES ||
           (num_samples < MAX_SAMPLES && clock_now_ns() - started_ns < SAMPLE_BUDGET_NS)) {
        for (int path_idx = first_path; path_idx < NUM_PATHS; path_idx++) {
            for (int32_t threads_idx = 0; threads_idx < num_thread_counts; threads_idx++) {
                struct ops *ops = harness->bench_ops[path_idx][threads_idx];
                if (ops == NULL) {
                    continue;
                }
                if (before_run != NULL) {
                    before_run(plan->arg);
                }
                int64_t begin_ns = clock_now_ns();
                plan->run(ops, plan->arg, 0, plan->num_rows);
                samples[path_idx][threads_idx][num_samples] = clock_now_ns() - begin_ns;
            }
        }
        num_samples++;
    }
    for (int path_idx = first_path; path_idx < NUM_PATHS; path_idx++) {
        for (int32_t threads_idx = 0; threads_idx < num_thread_counts; threads_idx++) {
            struct ops *ops = harness->bench_ops[path_idx][threads_idx];
            if (ops == NULL) {
                continue;
            }
            int64_t *times = samples[path_idx][threads_idx];
            qsort(times, (size_t)num_samples, sizeof(times[0]), compare_ns);
            double median_ns = (double)times[num_samples / 2];
            printf("%-42s %-5s %7d %11.1f %9.1f %8.1f %4.0f%%\n", harness->case_name,
                   cpu_paths[path_idx].name, (int)ops_num_threads(ops), median_ns / 1e3,
                   flops / median_ns, bytes / median_ns,
                   100.0 * bytes / median_ns / harness->read_gbps[threads_idx]);
        }
    }
    fflush(stdout);
}

/* ---- the program ------------------------------------------------------------------------------*/

static struct ops *create_ops(const struct harness *harness, int32_t num_threads, uint32_t features)
{
    struct ops *ops = NULL;
    struct imbrex_error err;
    if (ops_create(num_threads, features, harness->scratch, harness->scratch_bytes, &ops, &err) !=
        IMBREX_STATUS_OK) {
        die(err.message);
    }
    return ops;
}

static void create_paths(struct harness *harness)
{
    for (int path_idx = 0; path_idx < NUM_PATHS; path_idx++) {
        uint32_t wanted = cpu_paths[path_idx].features;
        if (cpu_features_detect(wanted) != wanted) {
            printf("skipped: path %s: this CPU does not have it\n", cpu_paths[path_idx].name);
            harness->num_skipped++;
            continue;
        }
        for (int idx = 0; idx < NUM_THREAD_COUNTS; idx++) {
            harness->ops[path_idx][idx] = create_ops(harness, thread_counts[idx], wanted);
        }
        const char *name = ops_kernels_name(harness->ops[path_idx][0]);
        if (strcmp(name, cpu_paths[path_idx].name) != 0) {
            printf("FAIL path %s: the kernels call themselves %s\n", cpu_paths[path_idx].name,
                   name);
            harness->num_failed++;
        }
    }
}

static void destroy_paths(struct harness *harness)
{
    for (int path_idx = 0; path_idx < NUM_PATHS; path_idx++) {
        for (int idx = 0; idx < NUM_THREAD_COUNTS; idx++) {
            ops_destroy(harness->ops[path_idx][idx]);
        }
        for (int idx = 0; idx < 2; idx++) {
            ops_destroy(harness->bench_ops[path_idx][idx]);
        }
    }
}

static void run_benches(struct harness *harness, void (*benches)(struct harness *harness))
{
    int32_t num_threads[2] = {1, thread_pool_num_cpus()};
    for (int idx = 0; idx < 2; idx++) {
        harness->read_gbps[idx] = measure_read_gbps(num_threads[idx]);
        for (int path_idx = 0; path_idx < NUM_PATHS; path_idx++) {
            if (harness->ops[path_idx][0] != NULL) {
                harness->bench_ops[path_idx][idx] =
                    create_ops(harness, num_threads[idx], cpu_paths[path_idx].features);
            }
        }
    }
    print_machine(harness);
    harness_set_placement(harness, PLACEMENT_END);
    benches(harness);
}

int harness_main(int argc, char **argv, void (*checks)(struct harness *harness),
                 void (*benches)(struct harness *harness))
{
    bool bench = argc == 2 && strcmp(argv[1], "--bench") == 0;
    if (argc > 1 && !bench) {
        fprintf(stderr, "usage: %s [--bench]\n", argv[0]);
        return 2;
    }
    static struct harness harness;
    current_harness = &harness;
    struct sigaction action = {.sa_sigaction = on_fault, .sa_flags = SA_SIGINFO};
    sigaction(SIGSEGV, &action, NULL);
    sigaction(SIGBUS, &action, NULL);

    harness.scratch_bytes =
        SCRATCH_TOKENS * (ops_scratch_token_bytes(SCRATCH_FEATURES) +
                          ops_bf16_token_bytes(cpu_paths[CPU_NUM_FP32_PATHS].features |
                                                   cpu_paths[NUM_PATHS - 1].features,
                                               SCRATCH_FEATURES));
    harness.scratch = malloc(harness.scratch_bytes);
    if (harness.scratch == NULL) {
        die("out of memory");
    }
    create_paths(&harness);
    checks(&harness);
    end_group(&harness);
    if (bench && harness.num_failed == 0) {
        run_benches(&harness, benches);
        end_group(&harness);
    }
    destroy_paths(&harness);
    free(harness.scratch);
    print_summary(&harness);
    return harness.num_failed == 0 ? 0 : 1;
}
