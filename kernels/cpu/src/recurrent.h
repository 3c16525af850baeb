/* Shares work on recurrent states among the threads.
 *
 * Work on states is handed out by sequence and part of a layer (some channels, a head), never by
 * rows: the rows of a sequence go through its state in order, each in the same way, so that no bit
 * depends on how a prompt was cut or on the other sequences.
 */
#ifndef AP_RECURRENT_H
#define AP_RECURRENT_H

#include <string.h>

#include "step_state.h"

/* A sequence's numbers in its slot: floats, or rounded to 16 bits, in which nothing is computed. */
typedef struct {
    uint8_t *at;
    int32_t format; /* AP_F32, AP_F16 or AP_BF16 */
} kept_numbers;

static int32_t kept_bytes(int32_t format) { return format == AP_F32 ? 4 : 2; }

static kept_numbers state_of(const step_state *s, const state_span *span, int64_t offset) {
    return (kept_numbers){s->cache->states + span->slot * s->cache->state_bytes + offset,
                          s->cache->state_format};
}

/* Read AP_LANES numbers from `index`. */
INLINE vfloat read_kept(kept_numbers kept, int64_t index) {
    const void *at = kept.at + index * kept_bytes(kept.format);
    if (kept.format == AP_F16) return vf_load_half(at);
    return kept.format == AP_BF16 ? vf_load_bfloat(at) : vf_load(at);
}

/* Write AP_LANES numbers; what exceeds float16 becomes its largest number, and NaN stays NaN. */
INLINE void keep(kept_numbers kept, int64_t index, vfloat x) {
    void *at = kept.at + index * kept_bytes(kept.format);
    if (kept.format == AP_F16)
        vf_store_half(at, vf_min(vf_set(65504.0f), vf_max(vf_set(-65504.0f), x)));
    else if (kept.format == AP_BF16)
        vf_store_bfloat(at, x);
    else
        vf_store(at, x);
}

/* The same for the `left` numbers that are left of a row, if they are fewer than AP_LANES. */
INLINE vfloat read_next(kept_numbers kept, int64_t index, int32_t left) {
    if (left >= AP_LANES) return read_kept(kept, index);
    uint8_t some[AP_LANES * sizeof(float)] = {0};
    int64_t bytes = kept_bytes(kept.format);
    memcpy(some, kept.at + index * bytes, (size_t)(left * bytes));
    return read_kept((kept_numbers){some, kept.format}, 0);
}

INLINE void keep_next(kept_numbers kept, int64_t index, vfloat x, int32_t left) {
    if (left >= AP_LANES) {
        keep(kept, index, x);
        return;
    }
    uint8_t some[AP_LANES * sizeof(float)];
    int64_t bytes = kept_bytes(kept.format);
    keep((kept_numbers){some, kept.format}, 0, x);
    memcpy(kept.at + index * bytes, some, (size_t)(left * bytes));
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
