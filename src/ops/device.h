/* SPDX-License-Identifier: Apache-2.0 */
/* The only door to a device for kv and engine: memory, copies, events, work on streams.
 *
 *   cpu    everything happens in the call; device memory is host memory
 *   cuda   a GPU; streams, copies and graphs are CUDA's
 *   fake   for tests: host memory too, but copies and work happen late, those of different streams
 *          in any order, and fail on demand (device_fake.h)
 *
 * Work on one stream runs in the order in which it was given; streams know of each other only
 * through events. Whatever a copy or a piece of work touches belongs to the stream from the call
 * until an event recorded behind it is done: nobody may read or write it meanwhile.
 *
 * A device is used by one thread at a time. A failure that leaves the device unusable has status
 * DEVICE and is sticky: every later call but the destroying ones gives it again. Any other status
 * belongs to the one call, which gives it (of work too, where the device runs it in the call), or
 * to the one copy or piece of work, and is then told by the event behind it. Until the host has
 * been told, the stream does nothing more: what it was given by then builds on what failed, is not
 * done, and counts as failed too. Other streams go on. */
#ifndef IMBREX_OPS_DEVICE_H
#define IMBREX_OPS_DEVICE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/log.h"
#include "base/status.h"

struct device;
struct device_event; /* a place in a stream */
struct device_graph; /* work that was captured once, to be given many times */

/* The streams every device has. */
enum device_stream {
    DEVICE_STREAM_STEP = 0,      /* the step */
    DEVICE_STREAM_PREFILL = 1,   /* a prefill chunk beside a decode step */
    DEVICE_STREAM_KV_IN = 2,     /* KV blocks towards the device */
    DEVICE_STREAM_KV_OUT = 3,    /* KV blocks away from it */
    DEVICE_STREAM_KV_MANAGE = 4, /* evictions, write-back, compaction */
    DEVICE_STREAM_COUNT = 5,
};

struct device_copy {
    void *destination;
    const void *source;
    size_t num_bytes;
};

/* Issues or does a piece of work of a stream: kernels on a device that has them, the computation
 * itself on a host. It may be called at once or later, on the thread that uses the device, and must
 * not call the device. What it returns is the work's status; see the head of this file. */
typedef enum imbrex_status device_work_fn(void *arg, void *stream_handle);

enum device_kind {
    DEVICE_KIND_CPU = 0, /* computes as a host does, fake devices too */
    DEVICE_KIND_CUDA = 1,
    DEVICE_KIND_AUTO = 2, /* the first GPU if it can be opened, else the CPU */
};

/* What fills a device: one table of functions each, called through the functions below only. */
struct device_functions {
    const char *name; /* "cpu"; static storage */
    enum device_kind kind;
    bool is_async; /* work may still be going on when the call that gave it returns */
    void (*destroy)(struct device *device);
    enum imbrex_status (*alloc)(struct device *device, const char *what, size_t num_bytes,
                                void **memory, struct imbrex_error *err);
    void (*free)(struct device *device, void *memory);
    enum imbrex_status (*host_register)(struct device *device, void *memory, size_t num_bytes,
                                        struct imbrex_error *err);
    void (*host_unregister)(struct device *device, void *memory);
    int32_t (*host_node)(struct device *device); /* NULL: -1 */
    enum imbrex_status (*copy_batch_async)(struct device *device, enum device_stream stream,
                                           const struct device_copy *copies, int32_t num_copies);
    enum imbrex_status (*run_async)(struct device *device, enum device_stream stream,
                                    device_work_fn *work, void *arg);
    enum imbrex_status (*event_create)(struct device *device, bool is_timed,
                                       struct device_event **event, struct imbrex_error *err);
    void (*event_destroy)(struct device *device, struct device_event *event);
    enum imbrex_status (*event_record)(struct device *device, struct device_event *event,
                                       enum device_stream stream);
    enum imbrex_status (*event_wait)(struct device *device, struct device_event *event,
                                     enum device_stream stream);
    enum imbrex_status (*event_query)(struct device *device, struct device_event *event,
                                      bool *is_done);
    enum imbrex_status (*event_synchronize)(struct device *device, struct device_event *event);
    enum imbrex_status (*event_elapsed)(struct device *device, const struct device_event *begin,
                                        const struct device_event *end, int64_t *elapsed_ns);
    enum imbrex_status (*graph_capture)(struct device *device, device_work_fn *work, void *arg,
                                        struct device_graph **graph, struct imbrex_error *err);
    enum imbrex_status (*graph_launch)(struct device *device, enum device_stream stream,
                                       struct device_graph *graph);
    void (*graph_destroy)(struct device *device, struct device_graph *graph);
};

/* The head of every device's struct. */
struct device {
    const struct device_functions *functions;
    bool has_failed; /* for good: set when a call says DEVICE, or by the device itself */
    /* Why, if the device knows; its message is "" otherwise. Of one that goes on: what the last
     * work that failed said. */
    struct imbrex_error failure;
};

enum imbrex_status device_cpu_create(struct device **device, struct imbrex_error *err);
/* GPU number device_idx, as imbrex_device_open. UNSUPPORTED in a build without the CUDA toolkit. */
enum imbrex_status device_cuda_create(int32_t device_idx, struct device **device,
                                      struct imbrex_error *err);

/* What the name of a device says. */
struct device_choice {
    enum device_kind kind;
    int32_t idx; /* of the GPU */
    /* Of a GPU: as imbrex_device_options. device_parse says none. */
    const char *tuned;
    bool tuned_is_optional;
};

/* "cpu", "cuda", "cuda:N" or "auto"; NULL: "cpu". INVALID_ARGUMENT for any other name. */
enum imbrex_status device_parse(const char *name, struct device_choice *choice,
                                struct imbrex_error *err);
/* Opens what was chosen, a GPU with its tuned plans. AUTO says in the log, in one line, why it is
 * the CPU that it takes; on success *opened is the choice with its kind decided. */
enum imbrex_status device_open(const struct device_choice *choice, const struct log *log,
                               struct device **device, struct device_choice *opened,
                               struct imbrex_error *err);
/* Gives a GPU that device_cuda_create made the table of tuned plans that `choice` names. Failures
 * are those of imbrex_device_open; the device goes on without. */
enum imbrex_status device_cuda_tune(struct device *device, const struct device_choice *choice,
                                    const struct log *log, struct imbrex_error *err);
/* Whether there is a GPU with a driver, be they such that device_cuda_create takes them or not. */
bool device_cuda_is_present(void);
/* No work may be left on its streams, and everything taken from it must have been given back. NULL
 * does nothing. */
void device_destroy(struct device *device);

/* "cpu"; static storage. */
const char *device_name(const struct device *device);
enum device_kind device_kind(const struct device *device);
/* Whether work goes on while the host does something else: then a second step is worth planning. */
bool device_is_async(const struct device *device);

/* Device memory, zeroed, aligned to 4 KiB; `what` names it in the error. OUT_OF_MEMORY. NULL is
 * given for 0 bytes and may be freed. */
enum imbrex_status device_alloc(struct device *device, const char *what, size_t num_bytes,
                                void **memory, struct imbrex_error *err);
void device_free(struct device *device, void *memory);

/* Makes host memory (whole pages) a fast source and destination of copies; it stays the caller's
 * and must be unregistered before it is unmapped. Unregistering NULL does nothing. */
enum imbrex_status device_host_register(struct device *device, void *memory, size_t num_bytes,
                                        struct imbrex_error *err);
void device_host_unregister(struct device *device, void *memory);
/* The NUMA node whose memory lies nearest to the device; -1: unknown, or there is but one. */
int32_t device_host_node(struct device *device);

/* Gives num_copies copies to a stream, in any direction between host and device. They may run in
 * any order among each other, so no destination may overlap another copy's source or destination.
 * The array is read during the call only. */
enum imbrex_status device_copy_batch_async(struct device *device, enum device_stream stream,
                                           const struct device_copy *copies, int32_t num_copies);

/* Gives a piece of work to a stream; arg must live until an event behind it is done. */
enum imbrex_status device_run_async(struct device *device, enum device_stream stream,
                                    device_work_fn *work, void *arg);

enum imbrex_status device_event_create(struct device *device, struct device_event **event,
                                       struct imbrex_error *err);
/* The same, of which device_event_elapsed can ask; it costs the device a little more. */
enum imbrex_status device_event_create_timed(struct device *device, struct device_event **event,
                                             struct imbrex_error *err);
void device_event_destroy(struct device *device, struct device_event *event);
/* Puts the event behind all that the stream was given so far. An event can be recorded again; it
 * then forgets where it was. One that was never recorded counts as done. */
enum imbrex_status device_event_record(struct device *device, struct device_event *event,
                                       enum device_stream stream);
/* The stream goes on only when the event is done. The host does not wait. */
enum imbrex_status device_event_wait(struct device *device, struct device_event *event,
                                     enum device_stream stream);
/* Whether all before the event is done; true on a device that failed. The status is that of the
 * first piece of work or copy that failed on the event's stream since it was last recorded there
 * (or was created); *is_done is written all the same. */
enum imbrex_status device_event_query(struct device *device, struct device_event *event,
                                      bool *is_done);
/* Waits for the event on the host; status as device_event_query. */
enum imbrex_status device_event_synchronize(struct device *device, struct device_event *event);
/* How long the stream took from one timed event to another one: both recorded there, and done. */
enum imbrex_status device_event_elapsed(struct device *device, const struct device_event *begin,
                                        const struct device_event *end, int64_t *elapsed_ns);

/* Calls work once to capture what it issues; each launch gives the same to a stream, with arg's
 * contents as they are by then. A host device calls nothing yet, and a launch is device_run_async.
 */
enum imbrex_status device_graph_capture(struct device *device, device_work_fn *work, void *arg,
                                        struct device_graph **graph, struct imbrex_error *err);
enum imbrex_status device_graph_launch(struct device *device, enum device_stream stream,
                                       struct device_graph *graph);
void device_graph_destroy(struct device *device, struct device_graph *graph);

#endif
