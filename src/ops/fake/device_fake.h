/* SPDX-License-Identifier: Apache-2.0 */
/* A device for tests: everything given to a stream waits in a queue. Each query and each call that
 * gives work moves a random number of items of random streams on; synchronising moves what the
 * event needs, and random others. So copies and work finish as late, and streams overtake each
 * other as much, as a real device might; the same seed gives the same run.
 *
 * Caught by this: whoever reads a destination before its event, since a destination is filled with
 * poison (0xA5) when the copy is given, or, where something that was given before may still use it,
 * when its stream comes to the copy; whoever overwrites a source too early, since it is read when
 * the copy is done; whoever forgets an event between two streams. Of host memory that copies write,
 * work may not touch anything. */
#ifndef IMBREX_OPS_FAKE_DEVICE_FAKE_H
#define IMBREX_OPS_FAKE_DEVICE_FAKE_H

#include "ops/device.h"

enum device_fake_fault {
    DEVICE_FAKE_FAULT_CALL = 0, /* giving work, a copy, a record or a wait fails at once */
    DEVICE_FAKE_FAULT_WORK = 1, /* a piece of work is not done, and its event tells the status */
    DEVICE_FAKE_FAULT_COPY = 2, /* a copy is not done, and its event tells the status */
    DEVICE_FAKE_FAULT_COUNT = 3,
};

enum imbrex_status device_fake_create(uint64_t seed, struct device **device,
                                      struct imbrex_error *err);

/* From now on, fault number `countdown` (1: the next) of that kind happens with this status, once,
 * or for ever after if it is DEVICE. 0: none. */
void device_fake_fail(struct device *device, enum device_fake_fault fault, int64_t countdown,
                      enum imbrex_status status);

/* From now on faults happen on that stream only, and only what it is given counts down;
 * DEVICE_STREAM_COUNT: on any. */
void device_fake_aim(struct device *device, enum device_stream stream);

/* From now on copies that the stream is given take so long, as timed events tell: when they are
 * done is random as before. 0, at first: no time. */
void device_fake_set_rate(struct device *device, enum device_stream stream, double ns_per_byte);
/* How long all copies of the stream take that it was given so far. */
int64_t device_fake_time(const struct device *device, enum device_stream stream);

/* Graphs that were given to a stream so far. */
int64_t device_fake_num_launches(const struct device *device);

/* So many more registrations of host memory succeed, the rest are OUT_OF_MEMORY; -1: all do. */
void device_fake_limit_registrations(struct device *device, int64_t num_registrations);

/* From now on no graph can be captured: UNSUPPORTED. */
void device_fake_refuse_graphs(struct device *device);

/* Items that were given and have not run. */
int64_t device_fake_num_pending(const struct device *device);

#endif
