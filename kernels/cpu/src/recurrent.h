/* Shares work on recurrent states among the threads.
 *
 * Work on states is handed out by sequence and part of a layer (some channels, a head), never by
 * rows: the rows of a sequence go through its state in order, each in the same way, so that no bit
 * depends on how a prompt was cut or on the other sequences.
 */
#ifndef AP_RECURRENT_H
#define AP_RECURRENT_H

#include "step_state.h"

static float *state_of(const step_state *s, const state_span *span, int64_t offset) {
    return (float *)(s->cache->states + span->slot * s->cache->state_bytes + offset);
}

typedef void (*state_function)(void *context, const state_span *span, int32_t part);

typedef struct {
    state_function function;
    void *context;
    const state_span *spans;
    int32_t parts;
    int32_t units;
    int32_t units_per_chunk;
} state_section;

static void state_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const state_section *section = context;
    int32_t first = chunk * section->units_per_chunk;
    int32_t last = first + section->units_per_chunk;
    if (last > section->units) last = section->units;
    for (int32_t unit = first; unit < last; unit++)
        section->function(section->context, &section->spans[unit / section->parts],
                          unit % section->parts);
}

/* function(context, each span, 0 .. parts - 1); `row_work`: multiplications of a row in a part */
static void for_states(step_state *s, state_function function, void *context, int32_t parts,
                       int64_t row_work) {
    state_section section = {.function = function, .context = context, .spans = s->spans,
                             .parts = parts, .units = s->num_spans * parts};
    int64_t most = s->batch->num_tokens * parts * row_work / LEAST_WORK + 1;
    int64_t pieces = PIECES_PER_THREAD * ap_pool_threads(s->engine->pool);
    section.units_per_chunk = ceil_div(section.units, pieces < most ? pieces : most);
    ap_pool_run(s->engine->pool, state_chunk, &section,
                ceil_div(section.units, section.units_per_chunk));
}

#endif
