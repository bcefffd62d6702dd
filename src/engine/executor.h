/* SPDX-License-Identifier: Apache-2.0 */
/* Runs planned steps on a device: weights, KV cache, activations, and for each step in flight its
 * inputs and results, on the host and on the device. It talks to the device through ops/device.h
 * only.
 *
 *   host:    fill batch i | submit i | fill batch i+1 | submit i+1 | collect i | ...
 *   stream:                 [copies | upload | history | forward | logits | sample | download] [...
 *
 * A step can be told to wait before some of its layers, for KV blocks that come up meanwhile:
 *
 *   stream:  [copies | upload | wait 0 | history | layers of part 0 | wait 1 | layers of part 1 ...
 *
 * What lies between upload and download is captured as a graph when a padded step (batch.h) of the
 * same shape comes for the second time, and launched as one from then on: one graph for each shape
 * and place, since their addresses differ. A step that waits is none. */
#ifndef IMBREX_ENGINE_EXECUTOR_H
#define IMBREX_ENGINE_EXECUTOR_H

#include "engine/batch.h"
#include "model/forward.h"
#include "model/model.h"
#include "model/weights_place.h"
#include "ops/device.h"

#define EXECUTOR_MAX_IN_FLIGHT 2
#define EXECUTOR_MAX_WAITS 8

struct executor_options {
    struct batch_limits limits; /* with pads_decode, padded steps are launched as graphs */
    int32_t context_size;       /* positions of one sequence */
    int32_t num_blocks;
    /* Of the rows whose logits exist at once, one at least; 0: 64 MiB, on a GPU 256 MiB and one row
     * for each sequence. */
    size_t max_logits_bytes;
    int32_t num_threads;
    uint32_t cpu_features;
    enum device_kind kind; /* what computes: CUDA on a device that is a GPU, else CPU */
    enum dtype dtype;      /* of activations and placed weights; F32 on a CPU */
    enum kv_dtype kv_dtype;
    bool places_weights;  /* the device computes with a copy of the weights in its memory */
    bool batch_invariant; /* of a GPU */
    uint32_t ablations;   /* bits of enum imbrex_ablation */
    weights_progress_fn *load_progress; /* NULL: none */
    void *load_user;
    imbrex_range_begin_fn *range_begin;
    imbrex_range_end_fn *range_end;
    void *range_user;
};

/* In bytes, reserved as a whole; a host device commits what is touched. */
struct executor_plan {
    size_t weight_bytes; /* of the copy, if there is one */
    size_t kv_bytes;
    size_t kv_token_bytes;   /* of a token, without the rest of the blocks' last pages */
    size_t activation_bytes; /* the token history and all scratch memory included */
    size_t batch_bytes; /* inputs and results of EXECUTOR_MAX_IN_FLIGHT steps, on host and device */
};

/* What the device waits for within a step: before layer first_layers[i], for events[i]. */
struct executor_waits {
    struct device_event *events[EXECUTOR_MAX_WAITS]; /* recorded; read during the call only */
    int32_t first_layers[EXECUTOR_MAX_WAITS];        /* ascending from 0 on */
    int32_t num_waits;                               /* 0: none */
};

/* What a step gave; views, valid until the step's place is submitted again. */
struct executor_results {
    const struct sample_result *results;       /* [num_samples] */
    const struct imbrex_logprob *top_logprobs; /* [num_samples, layout.max_logprobs] */
    /* Forward pass and logits, as a host computed them; on a GPU the whole step, from when it was
     * given or the one before it was done. */
    int64_t forward_ns;
    int64_t sample_ns;
};

struct executor;

/* Sizes without creating anything. OUT_OF_MEMORY if they cannot be addressed. */
enum imbrex_status executor_plan(const struct imbrex_model *model,
                                 const struct executor_options *options, struct executor_plan *plan,
                                 struct imbrex_error *err);

/* The device stays the caller's and outlives the executor. CANCELLED if load_progress says so. */
enum imbrex_status executor_create(struct imbrex_model *model, struct device *device,
                                   const struct executor_options *options,
                                   struct executor **executor, struct imbrex_error *err);
/* No step may be in flight, except on a device that failed. NULL does nothing. */
void executor_destroy(struct executor *executor);

/* Where its KV blocks lie: device memory, a view. */
const struct kv_view *executor_kv(const struct executor *executor);

/* Steps that may be in flight at once: 1, or EXECUTOR_MAX_IN_FLIGHT on an asynchronous device. */
int32_t executor_max_in_flight(const struct executor *executor);

/* Where the next step's batch is filled: memory of batch_max_bytes for batch_fill. A view, the
 * caller's until executor_submit. No more than max_in_flight steps may be uncollected. */
void *executor_batch_memory(struct executor *executor);

/* Gives that step to the device, the plan's copies before it: blocks, then slots, each kind in
 * order. After a failure the step has not been submitted and is not collected, and nothing of it is
 * going on any more; but some of the plan's copies and of the step's work may have been done, so
 * what the plan's sequences have in the cache and in the history means nothing. waits: NULL: none.
 * Allocates nothing. */
enum imbrex_status executor_submit(struct executor *executor, const struct step_plan *plan,
                                   const struct batch_layout *layout,
                                   const struct executor_waits *waits);

/* Waits for the oldest step that was submitted. After a failure the results mean nothing, but the
 * step is over. A step that was submitted behind it without knowing builds on it and fails too:
 * collect that one before submitting the next. */
enum imbrex_status executor_collect(struct executor *executor, struct executor_results *results);

/* See ops_kernels_name. Static storage. */
const char *executor_kernels_name(const struct executor *executor);

#endif
