/* SPDX-License-Identifier: Apache-2.0 */
/* imbrex: its fused kernels alone, for programs that have their own tensors. Raw device pointers,
 * shapes and a stream; no model, no engine, no framework.
 *
 * A device is opened once and used by one thread at a time. It works in the primary context of its
 * GPU, so pointers and streams of the CUDA runtime, PyTorch or JAX are usable as they are. Calls
 * that launch are asynchronous on the caller's stream, allocate nothing, may be captured into a
 * CUDA graph, and leave the calling thread's current context as it was. A captured launch keeps
 * pointers and shapes, not the params struct.
 *
 * The last part does the same products on a CPU.
 *
 * Statuses of all functions here: INVALID_ARGUMENT, an argument breaks the rule that the message
 * names, nothing was launched; UNSUPPORTED, valid but not for these kernels or this GPU, nothing
 * was launched; OUT_OF_MEMORY; DEVICE, the GPU or its driver failed, and work launched earlier may
 * be what failed. `err` may be NULL. */
#ifndef IMBREX_OPS_H
#define IMBREX_OPS_H

#include "imbrex.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- device ---------------------------------------------------------------------------------- */

struct imbrex_device;

struct imbrex_device_options {
    /* How many descriptors of matrices (about 512 bytes each) are kept. A launch uses one for each
     * matrix; with fewer than a program's matrices, some are encoded again at each launch. */
    int32_t max_tensor_maps;
    /* Launches may begin while the kernel before them on the stream ends (programmatic dependent
     * launch); they wait for its results before they touch memory, but for weights that the caller
     * calls settled. */
    bool overlap_launches;
    /* A GPU of compute capability 9.0 too uses the kernels of all others from 8.0 on, as the driver
     * compiles them: to test and to compare them. */
    bool portable_kernels;
    /* Plans that imbrex tune measured, which go before the library's own table: a file, or a folder
     * in which the file of this card is looked for (imbrex_tune_file_name). NULL: none. A table
     * whose key is another one is never used; the log is told why in one line. */
    const char *tuned;
    /* What if `tuned` is not there or is no table. False: the device is not opened. True: the log
     * is told if it is no table, and the device is opened without. */
    bool tuned_is_optional;
    imbrex_log_fn *log; /* NULL: silent. Called while the device is opened alone */
    void *log_user;
};

IMBREX_API struct imbrex_device_options imbrex_device_options_default(void);

/* Opens GPU number device_idx, counted as CUDA counts them. `options` may be NULL. Kernels are
 * loaded when first launched. Those for Hopper (compute capability 9.0) and 8.x are machine code;
 * other GPUs' driver compiles them then, which takes it seconds once: it keeps what it made.
 * UNSUPPORTED, with the reason, if this build has no CUDA kernels, there is no driver, it is older
 * than release 580, or the GPU is of a compute capability below 8.0; NOT_FOUND for a number beyond
 * the last GPU. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_device_open(
    int32_t device_idx, const struct imbrex_device_options *options, struct imbrex_device **device,
    struct imbrex_error *err);
/* Work launched through the device must have ended, and no graph that holds it may be launched
 * again. */
IMBREX_API void imbrex_device_close(struct imbrex_device *device);

struct imbrex_device_info {
    char name[128]; /* of the GPU */
    int32_t device_idx;
    int32_t compute_capability; /* 90 is 9.0 */
    int32_t num_sms;
    int32_t driver_version; /* of CUDA: 13000 is 13.0 */
    int64_t l2_bytes;
    int64_t kernel_image_bytes; /* of the kernels loaded so far */
    int64_t kernel_load_ns;     /* what loading them took, together */
    const char *tuned;          /* file of the tuned plans in use, the device's; NULL: none are */
    int32_t num_tuned;          /* plans in it that go before the library's own choice */
};

IMBREX_API void imbrex_device_describe(const struct imbrex_device *device,
                                       struct imbrex_device_info *info);

/* ---- kernels --------------------------------------------------------------------------------- */

/* How the bf16 matrix kernels want their matrices (the copy engine's rules, TMA): row-major, base
 * addresses multiples of 16 bytes, row strides multiples of 8 elements and at least the width; the
 * width of D a multiple of 8 (any of the portable kernels), that of A and the weights any where the
 * strides allow it. Memory is the device's own, or host memory that is registered with CUDA, whole
 * from the first element to the last; where it lies is looked at when a matrix (address, shape and
 * strides) is new to the device. Outputs overlap no input. */

enum imbrex_activation {
    IMBREX_ACTIVATION_SILU,      /* x / (1 + exp(-alpha * x)) */
    IMBREX_ACTIVATION_GELU_ERF,  /* x * (1 + erf(x / sqrt(2))) / 2 */
    IMBREX_ACTIVATION_GELU_TANH, /* x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 x^3))) / 2 */
    IMBREX_ACTIVATION_RELU,      /* max(x, 0) */
};

enum imbrex_rounding {
    /* fp32 from the products to the result, which is rounded once. */
    IMBREX_ROUNDING_EXACT,
    /* As if a framework computed one operation after the other on bf16 tensors: gate and up are
     * rounded (after the bias, as imbrex_gemm has it), and so is every result of imbrex_gating. */
    IMBREX_ROUNDING_MATCH_UNFUSED,
};

/* How gate and up, each a product and its bias, become one result. In this order:
 *
 *   gate = min(gate, limit)             up = max(-limit, min(up, limit))
 *   gate = activation(gate)             up = up + up_offset
 *   d    = gate * up
 *
 * Rounded as IMBREX_ROUNDING_MATCH_UNFUSED has it, the result of every line is a bf16 (limit too),
 * and with an alpha other than 1 the activation is three operations: alpha * gate, its sigmoid, and
 * the product with gate. Infinities and NaN come out as PyTorch has them; NaN is never clamped. An
 * activation of less than 1.1e-36 may come out as 0.
 *
 * All zero is SwiGLU. GPT-OSS has alpha 1.702, limit 7, up_offset 1 (swiglu in
 * github.com/openai/gpt-oss, gpt_oss/torch/model.py), with gate and up interleaved by one row. */
struct imbrex_gating {
    enum imbrex_activation activation;
    float alpha; /* of SILU, which alone has one; 0: 1 */
    float limit; /* 0: none */
    float up_offset;
};

/* D = act(A · gateᵀ + gate_bias) * (A · upᵀ + up_bias), without storing either product. fp32
 * accumulation. Source: GLU variants, arXiv 2002.05202.
 *
 * Concatenated weights are told by where gate and up point: [gate; up] in one matrix w is gate = w,
 * up = w + intermediate_size * stride; [up; gate] the other way round. Interleaved weights, one
 * matrix in which r rows of gate and r rows of up take turns, are interleave_rows = r, gate and up
 * at the first row of each (they are r rows apart, and which comes first is for them to say), and
 * the stride of that matrix for both. No form needs a repacked copy. num_tokens = 0 does nothing.
 */
struct imbrex_gemm_swiglu_params {
    const void *a;    /* [num_tokens, hidden_size] bf16 */
    const void *gate; /* [intermediate_size, hidden_size] bf16 */
    const void *up;   /* [intermediate_size, hidden_size] bf16 */
    void *d;          /* [num_tokens, intermediate_size] bf16, written; overlaps no input */
    /* Elements from one row to the next; 0: the rows follow each other without a gap. */
    int64_t a_stride, gate_stride, up_stride, d_stride;
    int32_t num_tokens, hidden_size, intermediate_size;
    /* A promise, see overlap_launches: no work on the stream that has not ended writes gate or up,
     * so that they may be read while it ends. */
    bool weights_settled;
    int32_t interleave_rows; /* 0: gate and up are matrices of their own; else 1 or 8 */
    /* [intermediate_size] fp32, or NULL. In one vector in which both take turns, interleave_biases
     * = r is 1 or 8 and value i lies at [i + i / r * r]; 0: values follow each other. */
    const float *gate_bias, *up_bias;
    int32_t interleave_biases;
    enum imbrex_rounding rounding;
    struct imbrex_gating gating;
};

/* D = A · Bᵀ + bias. The same kernel without its activation; num_tokens = 0 does nothing. */
struct imbrex_gemm_params {
    const void *a;     /* [num_tokens, in_features] bf16 */
    const void *b;     /* [out_features, in_features] bf16 */
    const float *bias; /* [out_features] fp32, or NULL */
    void *d;           /* [num_tokens, out_features] bf16, written; overlaps no input */
    int64_t a_stride, b_stride, d_stride; /* as above */
    int32_t num_tokens, in_features, out_features;
    bool weights_settled; /* as above, of b and bias */
};

/* D = act(gate) * up: what stands behind two products in the unfused form, at the speed of memory.
 * gate and up have the rules of A, d as above, intermediate_size a multiple of 8. num_tokens = 0
 * does nothing. With IMBREX_ROUNDING_MATCH_UNFUSED behind two calls of imbrex_gemm, it has the same
 * bits as imbrex_gemm_swiglu with that rounding. */
struct imbrex_gated_activation_params {
    const void *gate, *up; /* [num_tokens, intermediate_size] bf16 */
    void *d;               /* [num_tokens, intermediate_size] bf16, written; overlaps no input */
    int64_t gate_stride, up_stride, d_stride; /* as above */
    int32_t num_tokens, intermediate_size;
    enum imbrex_rounding rounding;
    struct imbrex_gating gating;
};

struct imbrex_kernel_plan;

/* `plan` says which kernel runs; NULL: the one that is expected to be the fastest. `stream` is a
 * CUstream or cudaStream_t of the device's GPU; NULL is the default stream. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_gemm_swiglu(
    struct imbrex_device *device, const struct imbrex_gemm_swiglu_params *params,
    const struct imbrex_kernel_plan *plan, void *stream, struct imbrex_error *err);
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_gemm(struct imbrex_device *device,
                                                          const struct imbrex_gemm_params *params,
                                                          const struct imbrex_kernel_plan *plan,
                                                          void *stream, struct imbrex_error *err);

IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_gated_activation(
    struct imbrex_device *device, const struct imbrex_gated_activation_params *params, void *stream,
    struct imbrex_error *err);

/* ---- choice of a kernel ---------------------------------------------------------------------- */

enum imbrex_kernel_op { IMBREX_KERNEL_OP_GEMM_SWIGLU, IMBREX_KERNEL_OP_GEMM };

/* A compiled kernel: one tile size and one schedule. */
struct imbrex_kernel_variant {
    const char *name; /* static storage */
    /* "pingpong", "cooperative", "multistage" if portable, or "gate_first": all of k for gate, then
     * all of it for up, with Swish between the two (arXiv 2607.02521, Kernel-1). */
    const char *schedule;
    bool is_split;   /* for shapes that are, and only for these; gate_first: for both */
    bool is_general; /* likewise */
    int32_t block_m; /* rows of A and D in a tile */
    int32_t block_n; /* rows of weights in a tile; of gemm_swiglu, gate and up together */
    int32_t num_stages;
    int32_t shared_bytes;
    bool is_portable; /* for compute capability 8.0 and newer; else for 9.0 alone */
};

/* The variants of an op are numbered [0, count). */
IMBREX_API int32_t imbrex_kernel_num_variants(enum imbrex_kernel_op op);
/* INVALID_ARGUMENT for a number outside. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_kernel_variant_describe(
    enum imbrex_kernel_op op, int32_t variant_idx, struct imbrex_kernel_variant *variant,
    struct imbrex_error *err);

/* D[m, n] = A[m, k] · B[n, k]ᵀ without the pointers; for gemm_swiglu n is intermediate_size. */
struct imbrex_kernel_shape {
    enum imbrex_kernel_op op;
    int32_t m, n, k;
    /* gemm_swiglu: gate and up cannot be seen as one tensor: they differ in row stride or lie 2^40
     * bytes or more apart. */
    bool is_split;
    /* gemm_swiglu: anything but SiLU in exact rounding alone: a bias, another activation, an alpha,
     * a limit, an offset, rounding as unfused. */
    bool is_general;
};

/* A variant and how it is launched. */
struct imbrex_kernel_plan {
    int32_t variant_idx;
    int32_t cluster_m, cluster_n; /* tiles that share the loads of weights, of A; 1, 2 or 4 */
    int32_t group_m; /* clusters of rows that are walked before the next columns of weights */
    /* Tiles along n, the last ones 16 rows of weights narrower so that they fit together; 0: all of
     * block_n. */
    int32_t num_tiles_n;
    /* Told by imbrex_kernel_choose, not read. */
    int32_t num_waves;  /* rounds in which all SMs take a tile */
    double expected_us; /* of the cost model: it orders plans, and is no promise */
};

/* Whether a plan can compute a shape on this device: OK, INVALID_ARGUMENT for a plan that is none,
 * or UNSUPPORTED with the limit that is in the way and its cause. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_kernel_check(
    const struct imbrex_device *device, const struct imbrex_kernel_shape *shape,
    const struct imbrex_kernel_plan *plan, struct imbrex_error *err);

#define IMBREX_KERNEL_ANY_VARIANT (-1)
#define IMBREX_KERNEL_ANY_UNTUNED (-2) /* of all variants, as if there were no tuned plans */

/* The plan that is expected to be the fastest: of all variants, where a tuned plan goes before the
 * choices that the library was measured with, and these before the cost model; or of one variant,
 * by the cost model alone. UNSUPPORTED if there is none. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_kernel_choose(
    const struct imbrex_device *device, const struct imbrex_kernel_shape *shape,
    int32_t variant_idx, struct imbrex_kernel_plan *plan, struct imbrex_error *err);

/* ---- the same products on a CPU -------------------------------------------------------------- */

/* The CPU's threads and its best kernels, used by one thread at a time. Calls return when their
 * result is there. */
struct imbrex_cpu;

/* num_threads counts the caller's; 0: all CPUs that it may use. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_cpu_open(int32_t num_threads,
                                                              struct imbrex_cpu **cpu,
                                                              struct imbrex_error *err);
IMBREX_API void imbrex_cpu_close(struct imbrex_cpu *cpu);

enum imbrex_dtype { IMBREX_DTYPE_F32 = 0, IMBREX_DTYPE_BF16 = 1 };

/* D = silu(A · gateᵀ + gate_bias) * (A · upᵀ + up_bias), in fp32 with one rounding at the store.
 * Matrices are row-major and aligned to their elements. The result of a row depends neither on the
 * other rows nor on the number of threads. num_tokens = 0 does nothing. */
struct imbrex_cpu_gemm_swiglu_params {
    const void *a;                    /* [num_tokens, hidden_size] dtype */
    const void *gate, *up;            /* [intermediate_size, hidden_size] weight_dtype, no gaps */
    const float *gate_bias, *up_bias; /* [intermediate_size] fp32, or NULL */
    void *d; /* [num_tokens, intermediate_size] dtype, written; overlaps no input */
    /* Elements from one row to the next; 0: the rows follow each other without a gap. */
    int64_t a_stride, d_stride;
    int32_t num_tokens, hidden_size, intermediate_size;
    int32_t dtype, weight_dtype; /* of enum imbrex_dtype */
};
/* What is not fp32 without gaps passes through at most 256 rows of fp32 that the call allocates. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_cpu_gemm_swiglu(
    struct imbrex_cpu *cpu, const struct imbrex_cpu_gemm_swiglu_params *params,
    struct imbrex_error *err);

/* D = A · Bᵀ + bias, likewise. */
struct imbrex_cpu_gemm_params {
    const void *a;              /* [num_tokens, in_features] dtype */
    const void *b;              /* [out_features, in_features] weight_dtype, no gaps */
    const float *bias;          /* [out_features] fp32, or NULL */
    void *d;                    /* [num_tokens, out_features] dtype, written; overlaps no input */
    int64_t a_stride, d_stride; /* as above */
    int32_t num_tokens, in_features, out_features;
    int32_t dtype, weight_dtype;
};
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_cpu_gemm(
    struct imbrex_cpu *cpu, const struct imbrex_cpu_gemm_params *params, struct imbrex_error *err);

/* ---- tuned plans ----------------------------------------------------------------------------- */

/* Plans that were measured on this machine; see imbrex_device_options.tuned. A table holds what was
 * measured of each shape, also where nothing was faster than the choice without it, so that a run
 * that was ended can go on. Files are JSON, and name kernels by their symbols. */
struct imbrex_tune_table;

/* What a table was measured on. It is used where all of this is the same. */
struct imbrex_tune_key {
    char gpu[128];              /* name of the card */
    char driver[64];            /* its release, "580.159.04"; "" where NVML does not tell */
    char version[32];           /* of the library */
    int32_t num_sms;            /* a part of a card (MIG) has fewer */
    int32_t compute_capability; /* 90 is 9.0 */
    int32_t driver_version;     /* of CUDA: 13000 is 13.0 */
    int32_t max_clock_mhz;      /* of the SMs */
    int32_t power_limit_watts;  /* 0 where NVML does not tell */
};

/* Asks driver and NVML, which takes milliseconds. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tune_key_read(struct imbrex_device *device,
                                                                   struct imbrex_tune_key *key,
                                                                   struct imbrex_error *err);
#define IMBREX_TUNE_NAME_BYTES 192
/* "nvidia-h200-132sm-1980mhz-700w.json": what a folder of tables calls that of a card. A table for
 * another driver or version has the same name, and is told as such. */
IMBREX_API void imbrex_tune_file_name(const struct imbrex_tune_key *key,
                                      char name[IMBREX_TUNE_NAME_BYTES]);

/* What was measured of a shape. */
struct imbrex_tune_row {
    struct imbrex_kernel_shape shape; /* is_split is false */
    struct imbrex_kernel_plan plan;   /* the fastest but for the choice without a table */
    double us, default_us;            /* of a call: with the plan, and with that choice; medians */
    double gain;                      /* default_us / us, median of runs side by side */
    bool is_faster;                   /* beyond chance: then the plan is used */
};

/* Sets us, default_us, gain and is_faster from times that were taken in turns: us[i] next to
 * default_us[i], num_pairs >= 1 of them, microseconds. Faster is a plan that gains at least 0.2 %
 * in the median and won four of five pairs; of less than ten pairs, all. */
IMBREX_API void imbrex_tune_judge(const double *us, const double *default_us, int32_t num_pairs,
                                  struct imbrex_tune_row *row);

/* An empty table. OUT_OF_MEMORY. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tune_table_create(
    const struct imbrex_tune_key *key, struct imbrex_tune_table **table, struct imbrex_error *err);
/* Reads a file. NOT_FOUND: there is none; IO; FORMAT: it is no table, or a row is wrong, which the
 * message names; UNSUPPORTED: the table's key is not `key`, and what differs. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tune_table_open(
    const char *path, const struct imbrex_tune_key *key, struct imbrex_tune_table **table,
    struct imbrex_error *err);
/* NULL does nothing. */
IMBREX_API void imbrex_tune_table_destroy(struct imbrex_tune_table *table);

IMBREX_API int32_t imbrex_tune_table_count(const struct imbrex_tune_table *table);
/* Row row_idx of [0, count): a view, until the table is changed. */
IMBREX_API const struct imbrex_tune_row *imbrex_tune_table_at(const struct imbrex_tune_table *table,
                                                              int32_t row_idx);
/* The row of exactly this shape, or NULL: a view, as above. */
IMBREX_API const struct imbrex_tune_row *imbrex_tune_table_find(
    const struct imbrex_tune_table *table, const struct imbrex_kernel_shape *shape);
/* Adds a row, in place of the one of the same shape. INVALID_ARGUMENT for a plan that is none;
 * CAPACITY beyond 16,384 rows; OUT_OF_MEMORY. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tune_table_set(
    struct imbrex_tune_table *table, const struct imbrex_tune_row *row, struct imbrex_error *err);
/* Writes the file whole or not at all, over one that is there. IO if it cannot be created, OUTPUT
 * if it cannot be written, INVALID_ARGUMENT if the path is a folder or another run writes it. */
IMBREX_API IMBREX_MUST_USE enum imbrex_status imbrex_tune_table_write(
    const struct imbrex_tune_table *table, const char *path, struct imbrex_error *err);

/* ---- baseline -------------------------------------------------------------------------------- */

/* The rule for the width of slices of intermediate_size, each computed as two products and an
 * activation, that `imbrex bench ops` measures against: by the GPU's name 1024 on H100 and H200
 * for several tokens and 512 for one, 512 and 256 on A100, 256 elsewhere; twice as much for weights
 * of 8 bits; halved until it divides intermediate_size >= 1. */
IMBREX_API int32_t imbrex_slice_width(const char *gpu_name, int32_t num_tokens,
                                      int32_t intermediate_size, int32_t weight_bits);

#ifdef __cplusplus
}
#endif

#endif
