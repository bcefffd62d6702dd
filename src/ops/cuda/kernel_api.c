/* SPDX-License-Identifier: Apache-2.0 */
/* The public list of kernels and the public face of the choice among them. */
#include "ops/cuda/gemm_launch.h"

struct tile_machine cuda_device_machine(const struct imbrex_device *device)
{
    return (struct tile_machine){
        .num_sms = device->description.num_sms,
        .max_shared_bytes = device->max_shared_bytes,
        .is_portable = device->is_portable,
    };
}

static enum imbrex_status choose_untuned(const struct tile_machine *machine,
                                         const struct tile_problem *problem, int32_t begin,
                                         int32_t end, struct tile_plan *plan,
                                         struct imbrex_error *err)
{
    size_t num_rows;
    const struct tile_measurement *rows = tile_measured_table(&num_rows);
    return tile_choose_measured(machine, problem, rows, num_rows, begin, end, plan, err);
}

enum imbrex_status cuda_device_choose(const struct imbrex_device *device,
                                      const struct tile_problem *problem, int32_t begin,
                                      int32_t end, struct tile_plan *plan, struct imbrex_error *err)
{
    struct tile_machine machine = cuda_device_machine(device);

    return tune_table_find_plan(device->tuned, &machine, problem, begin, end, plan)
               ? IMBREX_STATUS_OK
               : choose_untuned(&machine, problem, begin, end, plan, err);
}

int32_t imbrex_kernel_num_variants(enum imbrex_kernel_op op)
{
    int32_t begin, end;
    kernel_table_range(op, &begin, &end);
    return end - begin;
}

static enum imbrex_status find_variant(enum imbrex_kernel_op op, int32_t variant_idx,
                                       int32_t *kernel_idx, struct imbrex_error *err)
{
    int32_t begin, end;
    kernel_table_range(op, &begin, &end);
    if (variant_idx < 0 || variant_idx >= end - begin) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "variant: expected a number from 0 to %d, found %d",
                         (int)(end - begin) - 1, (int)variant_idx);
    }
    *kernel_idx = begin + variant_idx;
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_kernel_variant_describe(enum imbrex_kernel_op op, int32_t variant_idx,
                                                  struct imbrex_kernel_variant *variant,
                                                  struct imbrex_error *err)
{
    static const char *const schedules[] = {
        [TILE_SCHEDULE_pingpong] = "pingpong",
        [TILE_SCHEDULE_cooperative] = "cooperative",
        [TILE_SCHEDULE_gate_first] = "gate_first",
        [TILE_SCHEDULE_multistage] = "multistage",
    };
    int32_t kernel_idx = 0;

    TRY(find_variant(op, variant_idx, &kernel_idx, err));
    const struct kernel_variant *kernel = kernel_table_at(kernel_idx);
    *variant = (struct imbrex_kernel_variant){
        .name = kernel->name,
        .schedule = schedules[kernel->schedule],
        .is_split = (kernel->form == TILE_FORM_SPLIT && !kernel_serves(kernel, TILE_FORM_PAIR)) ||
                    (kernel->form == TILE_FORM_GENERAL_SPLIT &&
                     !kernel_serves(kernel, TILE_FORM_GENERAL_PAIR)),
        .is_general = tile_form_is_general(kernel->form),
        .block_m = kernel->block_m,
        .block_n = kernel->block_n,
        .num_stages = kernel->num_stages,
        .shared_bytes = kernel->shared_bytes,
        .is_portable = kernel->is_portable,
    };
    return IMBREX_STATUS_OK;
}

enum imbrex_status kernel_shape_problem(const struct imbrex_kernel_shape *shape,
                                        struct tile_problem *problem, struct imbrex_error *err)
{
    if (shape->op != IMBREX_KERNEL_OP_GEMM_SWIGLU && shape->op != IMBREX_KERNEL_OP_GEMM) {
        return error_set(err, IMBREX_STATUS_INVALID_ARGUMENT,
                         "shape: op: expected one of enum imbrex_kernel_op, found %d",
                         (int)shape->op);
    }
    *problem = (struct tile_problem){
        .form = shape->op == IMBREX_KERNEL_OP_GEMM
                    ? TILE_FORM_PLAIN
                    : tile_fused_form(shape->is_split, shape->is_general),
        .m = shape->m,
        .columns = shape->n,
        .k = shape->k,
    };
    return IMBREX_STATUS_OK;
}

enum imbrex_status kernel_plan_tile(enum imbrex_kernel_op op, const struct imbrex_kernel_plan *plan,
                                    struct tile_plan *tile, struct imbrex_error *err)
{
    int32_t kernel_idx = 0;

    TRY(find_variant(op, plan->variant_idx, &kernel_idx, err));
    *tile = (struct tile_plan){
        .kernel_idx = kernel_idx,
        .cluster_m = plan->cluster_m,
        .cluster_n = plan->cluster_n,
        .group_m = plan->group_m,
        .num_tiles_n = plan->num_tiles_n,
    };
    return IMBREX_STATUS_OK;
}

enum imbrex_status imbrex_kernel_check(const struct imbrex_device *device,
                                       const struct imbrex_kernel_shape *shape,
                                       const struct imbrex_kernel_plan *plan,
                                       struct imbrex_error *err)
{
    struct tile_machine machine = cuda_device_machine(device);
    struct tile_problem problem;
    struct tile_plan tile;

    TRY(kernel_shape_problem(shape, &problem, err));
    TRY(kernel_plan_tile(shape->op, plan, &tile, err));
    return tile_check(&machine, &problem, &tile, err);
}

enum imbrex_status imbrex_kernel_choose(const struct imbrex_device *device,
                                        const struct imbrex_kernel_shape *shape,
                                        int32_t variant_idx, struct imbrex_kernel_plan *plan,
                                        struct imbrex_error *err)
{
    struct tile_machine machine = cuda_device_machine(device);
    struct tile_problem problem;
    struct tile_plan tile;
    int32_t begin, end;

    TRY(kernel_shape_problem(shape, &problem, err));
    kernel_table_range(shape->op, &begin, &end);
    if (variant_idx == IMBREX_KERNEL_ANY_VARIANT) {
        TRY(cuda_device_choose(device, &problem, begin, end, &tile, err));
    } else if (variant_idx == IMBREX_KERNEL_ANY_UNTUNED) {
        TRY(choose_untuned(&machine, &problem, begin, end, &tile, err));
    } else {
        int32_t kernel_idx = 0;
        TRY(find_variant(shape->op, variant_idx, &kernel_idx, err));
        TRY(tile_choose(&machine, &problem, kernel_idx, kernel_idx + 1, &tile, err));
    }
    *plan = (struct imbrex_kernel_plan){
        .variant_idx = tile.kernel_idx - begin,
        .cluster_m = tile.cluster_m,
        .cluster_n = tile.cluster_n,
        .group_m = tile.group_m,
        .num_tiles_n = tile.num_tiles_n,
        .num_waves = (int32_t)tile_grid_of(&machine, &problem, &tile).num_waves,
        .expected_us = tile_cost_us(&machine, &problem, &tile),
    };
    return IMBREX_STATUS_OK;
}
