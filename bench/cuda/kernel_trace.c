/* SPDX-License-Identifier: Apache-2.0 */
#include "bench/cuda/kernel_trace.h"

#include <math.h>
#include <stdio.h>

static const char *const stage_names[GATE_FIRST_NUM_STAGES] = {
#define STAGE_NAME(stage, text) [GATE_FIRST_STAGE_##stage] = text,
    GATE_FIRST_STAGES(STAGE_NAME)
#undef STAGE_NAME
};

static const char *const track_names[GATE_FIRST_TRACKS] = {"consumer 0", "consumer 1", "producer"};

struct span {
    double begin_us, end_us;
    uint32_t stage, block;
};

static const struct gate_first_track *track_at(const struct kernel_trace *trace, int32_t cta,
                                               int track)
{
    return &trace->tracks[(int64_t)cta * GATE_FIRST_TRACKS + track];
}

/* Events of a track that were kept. */
static uint32_t num_kept(const struct kernel_trace *trace, const struct gate_first_track *track)
{
    return track->num_events < trace->max_events ? track->num_events : trace->max_events;
}

static uint64_t begin_of(const struct kernel_trace *trace)
{
    uint64_t begin_ns = UINT64_MAX;
    for (int64_t i = 0; i < (int64_t)trace->num_ctas * GATE_FIRST_TRACKS; i++) {
        if (trace->tracks[i].begin_ns < begin_ns) {
            begin_ns = trace->tracks[i].begin_ns;
        }
    }
    return begin_ns;
}

/* Between the two points where a track knows both clocks. */
static double time_us(const struct gate_first_track *track, uint64_t clock, uint64_t origin_ns)
{
    double clocks = (double)(track->end_clock - track->begin_clock);
    double ns_per_clock = clocks > 0.0 ? (double)(track->end_ns - track->begin_ns) / clocks : 0.0;
    double ns =
        (double)(track->begin_ns - origin_ns) + (double)(clock - track->begin_clock) * ns_per_clock;
    return ns * 1e-3;
}

static struct span span_at(const struct kernel_trace *trace, int32_t cta, int track_idx,
                           uint32_t event_idx, uint64_t origin_ns)
{
    const struct gate_first_track *track = track_at(trace, cta, track_idx);
    const struct gate_first_event *events =
        trace->events + ((int64_t)cta * GATE_FIRST_TRACKS + track_idx) * trace->max_events;
    /* Of a track that lost events the last one that was kept has no end. */
    bool is_last = event_idx + 1 == track->num_events;
    uint64_t end = is_last                                  ? track->end_clock
                   : event_idx + 1 < num_kept(trace, track) ? events[event_idx + 1].clock
                                                            : events[event_idx].clock;
    return (struct span){time_us(track, events[event_idx].clock, origin_ns),
                         time_us(track, end, origin_ns), events[event_idx].stage,
                         events[event_idx].block};
}

/* How much of a span the other consumer of the CTA spends in a k-loop. */
static double covered_us(const struct kernel_trace *trace, int32_t cta, int other,
                         const struct span *span, uint64_t origin_ns)
{
    double sum = 0.0;
    for (uint32_t i = 0; i < num_kept(trace, track_at(trace, cta, other)); i++) {
        struct span loop = span_at(trace, cta, other, i, origin_ns);
        if (loop.stage == GATE_FIRST_STAGE_gate || loop.stage == GATE_FIRST_STAGE_up) {
            double begin_us = fmax(loop.begin_us, span->begin_us);
            double end_us = fmin(loop.end_us, span->end_us);
            sum += fmax(end_us - begin_us, 0.0);
        }
    }
    return sum;
}

struct kernel_trace_figures kernel_trace_figures(const struct kernel_trace *trace)
{
    struct kernel_trace_figures figures = {.num_lost = 0};
    int64_t counts[GATE_FIRST_NUM_STAGES] = {0};
    uint64_t origin_ns = begin_of(trace);
    double hidden_us = 0.0, swish_us = 0.0;

    for (int32_t cta = 0; cta < trace->num_ctas; cta++) {
        for (int track_idx = 0; track_idx < GATE_FIRST_TRACKS; track_idx++) {
            const struct gate_first_track *track = track_at(trace, cta, track_idx);
            figures.num_lost += track->num_events - num_kept(trace, track);
            figures.total_us = fmax(figures.total_us, time_us(track, track->end_clock, origin_ns));
            for (uint32_t i = 0; i < num_kept(trace, track); i++) {
                struct span span = span_at(trace, cta, track_idx, i, origin_ns);
                if (span.stage >= GATE_FIRST_NUM_STAGES) {
                    continue;
                }
                figures.stage_us[span.stage] += span.end_us - span.begin_us;
                counts[span.stage]++;
                if (span.stage == GATE_FIRST_STAGE_swish) {
                    swish_us += span.end_us - span.begin_us;
                    hidden_us += covered_us(trace, cta, 1 - track_idx, &span, origin_ns);
                }
            }
        }
    }
    for (int i = 0; i < GATE_FIRST_NUM_STAGES; i++) {
        figures.stage_us[i] = counts[i] > 0 ? figures.stage_us[i] / (double)counts[i] : 0.0;
    }
    figures.hidden_share = swish_us > 0.0 ? hidden_us / swish_us : 0.0;
    return figures;
}

/* Takes a reference to item, which may be NULL. */
static bool append(json_t *list, json_t *item)
{
    return item != NULL && json_array_append_new(list, item) == 0;
}

static bool append_name(json_t *list, const char *what, uint32_t sm, int track, const char *name)
{
    return append(list, json_pack("{s:s, s:s, s:i, s:i, s:{s:s}}", "name", what, "ph", "M", "pid",
                                  (int)sm, "tid", track, "args", "name", name));
}

static bool append_cta(json_t *list, const struct kernel_trace *trace, int32_t cta,
                       uint64_t origin_ns)
{
    uint32_t sm = track_at(trace, cta, 0)->sm;
    char name[32];
    snprintf(name, sizeof(name), "SM %u", sm);
    bool is_ok = append_name(list, "process_name", sm, 0, name);
    for (int track_idx = 0; is_ok && track_idx < GATE_FIRST_TRACKS; track_idx++) {
        is_ok = append_name(list, "thread_name", sm, track_idx, track_names[track_idx]);
        for (uint32_t i = 0; is_ok && i < num_kept(trace, track_at(trace, cta, track_idx)); i++) {
            struct span span = span_at(trace, cta, track_idx, i, origin_ns);
            is_ok = append(
                list,
                json_pack("{s:s, s:s, s:f, s:f, s:i, s:i, s:{s:i}}", "name",
                          span.stage < GATE_FIRST_NUM_STAGES ? stage_names[span.stage] : "?", "ph",
                          "X", "ts", span.begin_us, "dur", span.end_us - span.begin_us, "pid",
                          (int)sm, "tid", track_idx, "args", "block", (int)span.block));
        }
    }
    return is_ok;
}

json_t *kernel_trace_json(const struct kernel_trace *trace, const char *kernel)
{
    json_t *list = json_array();
    uint64_t origin_ns = begin_of(trace);
    bool is_ok = list != NULL;
    for (int32_t cta = 0; is_ok && cta < trace->num_ctas; cta++) {
        is_ok = append_cta(list, trace, cta, origin_ns);
    }
    if (!is_ok) {
        json_decref(list);
        return NULL;
    }
    return json_pack("{s:o, s:s, s:{s:s}}", "traceEvents", list, "displayTimeUnit", "ns",
                     "otherData", "kernel", kernel);
}
