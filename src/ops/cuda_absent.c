/* SPDX-License-Identifier: Apache-2.0 */
/* The kernel API of a library that was built without the CUDA toolkit: it says so. */
#include "base/status.h"
#include "imbrex_ops.h"
#include "ops/backend.h"

static enum imbrex_status report_absent(struct imbrex_error *err)
{
    return error_set(err, IMBREX_STATUS_UNSUPPORTED,
                     "CUDA: this library was built without the CUDA toolkit");
}

struct imbrex_device_options imbrex_device_options_default(void)
{
    return (struct imbrex_device_options){.max_tensor_maps = 1024, .overlap_launches = true};
}

enum imbrex_status imbrex_device_open(int32_t device_idx,
                                      const struct imbrex_device_options *options,
                                      struct imbrex_device **device, struct imbrex_error *err)
{
    (void)device_idx;
    (void)options;
    (void)device;
    return report_absent(err);
}

bool device_cuda_is_present(void)
{
    return false;
}

/* No device can be open: what follows is called only with a pointer that came from elsewhere. */
void imbrex_device_close(struct imbrex_device *device)
{
    (void)device;
}

void imbrex_device_describe(const struct imbrex_device *device, struct imbrex_device_info *info)
{
    (void)device;
    *info = (struct imbrex_device_info){.name = ""};
}

enum imbrex_status imbrex_gemm_swiglu(struct imbrex_device *device,
                                      const struct imbrex_gemm_swiglu_params *params,
                                      const struct imbrex_kernel_plan *plan, void *stream,
                                      struct imbrex_error *err)
{
    (void)device;
    (void)params;
    (void)plan;
    (void)stream;
    return report_absent(err);
}

enum imbrex_status imbrex_gemm(struct imbrex_device *device,
                               const struct imbrex_gemm_params *params,
                               const struct imbrex_kernel_plan *plan, void *stream,
                               struct imbrex_error *err)
{
    (void)device;
    (void)params;
    (void)plan;
    (void)stream;
    return report_absent(err);
}

enum imbrex_status imbrex_gated_activation(struct imbrex_device *device,
                                           const struct imbrex_gated_activation_params *params,
                                           void *stream, struct imbrex_error *err)
{
    (void)device;
    (void)params;
    (void)stream;
    return report_absent(err);
}

int32_t imbrex_kernel_num_variants(enum imbrex_kernel_op op)
{
    (void)op;
    return 0;
}

enum imbrex_status imbrex_kernel_variant_describe(enum imbrex_kernel_op op, int32_t variant_idx,
                                                  struct imbrex_kernel_variant *variant,
                                                  struct imbrex_error *err)
{
    (void)op;
    (void)variant_idx;
    (void)variant;
    return report_absent(err);
}

enum imbrex_status imbrex_kernel_check(const struct imbrex_device *device,
                                       const struct imbrex_kernel_shape *shape,
                                       const struct imbrex_kernel_plan *plan,
                                       struct imbrex_error *err)
{
    (void)device;
    (void)shape;
    (void)plan;
    return report_absent(err);
}

enum imbrex_status imbrex_kernel_choose(const struct imbrex_device *device,
                                        const struct imbrex_kernel_shape *shape,
                                        int32_t variant_idx, struct imbrex_kernel_plan *plan,
                                        struct imbrex_error *err)
{
    (void)device;
    (void)shape;
    (void)variant_idx;
    (void)plan;
    return report_absent(err);
}

enum imbrex_status imbrex_tune_key_read(struct imbrex_device *device, struct imbrex_tune_key *key,
                                        struct imbrex_error *err)
{
    (void)device;
    (void)key;
    return report_absent(err);
}

void imbrex_tune_file_name(const struct imbrex_tune_key *key, char name[IMBREX_TUNE_NAME_BYTES])
{
    (void)key;
    name[0] = '\0';
}

void imbrex_tune_judge(const double *us, const double *default_us, int32_t num_pairs,
                       struct imbrex_tune_row *row)
{
    (void)us;
    (void)default_us;
    (void)num_pairs;
    row->is_faster = false;
}

enum imbrex_status imbrex_tune_table_create(const struct imbrex_tune_key *key,
                                            struct imbrex_tune_table **table,
                                            struct imbrex_error *err)
{
    (void)key;
    (void)table;
    return report_absent(err);
}

enum imbrex_status imbrex_tune_table_open(const char *path, const struct imbrex_tune_key *key,
                                          struct imbrex_tune_table **table,
                                          struct imbrex_error *err)
{
    (void)path;
    (void)key;
    (void)table;
    return report_absent(err);
}

/* No table can be there either. */
void imbrex_tune_table_destroy(struct imbrex_tune_table *table)
{
    (void)table;
}

int32_t imbrex_tune_table_count(const struct imbrex_tune_table *table)
{
    (void)table;
    return 0;
}

const struct imbrex_tune_row *imbrex_tune_table_at(const struct imbrex_tune_table *table,
                                                   int32_t row_idx)
{
    (void)table;
    (void)row_idx;
    return NULL;
}

const struct imbrex_tune_row *imbrex_tune_table_find(const struct imbrex_tune_table *table,
                                                     const struct imbrex_kernel_shape *shape)
{
    (void)table;
    (void)shape;
    return NULL;
}

enum imbrex_status imbrex_tune_table_set(struct imbrex_tune_table *table,
                                         const struct imbrex_tune_row *row,
                                         struct imbrex_error *err)
{
    (void)table;
    (void)row;
    return report_absent(err);
}

enum imbrex_status imbrex_tune_table_write(const struct imbrex_tune_table *table, const char *path,
                                           struct imbrex_error *err)
{
    (void)table;
    (void)path;
    return report_absent(err);
}

enum imbrex_status device_cuda_tune(struct device *device, const struct device_choice *choice,
                                    const struct log *log, struct imbrex_error *err)
{
    (void)device;
    (void)choice;
    (void)log;
    return report_absent(err);
}

enum imbrex_status device_cuda_create(int32_t device_idx, struct device **device,
                                      struct imbrex_error *err)
{
    (void)device_idx;
    (void)device;
    return report_absent(err);
}

enum imbrex_status backend_cuda_create(struct device *device,
                                       const struct backend_cuda_options *options,
                                       const struct backend_shape *shape, void *scratch,
                                       size_t scratch_bytes, struct backend **backend,
                                       struct imbrex_error *err)
{
    (void)device;
    (void)options;
    (void)shape;
    (void)scratch;
    (void)scratch_bytes;
    (void)backend;
    return report_absent(err);
}

size_t backend_cuda_scratch_bytes(const struct backend_shape *shape)
{
    (void)shape;
    return 0;
}
