/* Adapters: low-rank factors added to the outputs of linears, for the rows that have one.
 *
 * The rows of a place are shrunk once, by the factors of all its parts, to a few numbers per row;
 * the place's linears expand these in the chunks that compute their outputs. Rows without an
 * adapter are not touched, and a row's sums do not depend on the rows beside it. */
#ifndef AP_ADAPTER_H
#define AP_ADAPTER_H

#include "step_state.h"

/* ---- the rows of each adapter ---- */

/* Find runs of rows that share an adapter; `kept` lists the step's remaining rows. */
static void find_adapted(step_state *s, const int64_t *kept) {
    const ap_batch *batch = s->batch;
    s->adapted.count = 0;
    for (int32_t row = 0; s->adapter_of && row < s->rows; row++) {
        int32_t slot = s->adapter_of[kept ? kept[row] : row];
        if (slot < 0) continue;
        const ap_adapter *adapter = &batch->adapters[slot];
        adapter_span *last = s->adapted.count ? &s->adapted.spans[s->adapted.count - 1] : NULL;
        bool follows = last && last->adapter == adapter && last->first + last->rows == row;
        if (follows && last->rows < ADAPTED_ROWS)
            last->rows++;
        else
            s->adapted.spans[s->adapted.count++] =
                (adapter_span){.adapter = adapter, .first = row, .rows = 1};
    }
}

static void start_adapters(step_state *s) {
    const ap_batch *batch = s->batch;
    if (!s->adapter_of) return;
    for (int32_t i = 0; i < batch->num_seqs; i++)
        for (int32_t row = batch->query_start[i]; row < batch->query_start[i + 1]; row++)
            s->adapter_of[row] = batch->adapter_slots[i];
    find_adapted(s, NULL);
}

/* ---- shrinking ---- */

typedef struct {
    const step_state *s;
    rows_in in;
    ap_place place;
    int32_t tiles; /* of the adapter with most */
    int32_t units; /* spans times tiles */
    int32_t units_per_chunk;
} shrink_section;

static void shrink_unit(const shrink_section *section, int32_t unit) {
    const step_state *s = section->s;
    const adapter_span *span = &s->adapted.spans[unit / section->tiles];
    const ap_low_rank *factors = factors_at(span, s->adapted.layer, section->place);
    int32_t tile = unit % section->tiles, stride = s->adapted.stride;
    if (!has_linear(&factors->shrink) || tile >= num_tiles(&factors->shrink)) return;
    linear_tiles(&factors->shrink, &section->in, span->first, span->first + span->rows, tile,
                 tile + 1, s->adapted.shrunk, stride, false);
    const float *scales = factors->scales + tile * AP_LANES;
    int32_t count = outputs_of(&factors->shrink, tile);
    for (int32_t row = span->first; row < span->first + span->rows; row++) {
        float *ranks = s->adapted.shrunk + (int64_t)row * stride + tile * AP_LANES;
        for (int32_t i = 0; i < count; i++) ranks[i] *= scales[i];
    }
}

static void shrink_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const shrink_section *section = context;
    int32_t first = chunk * section->units_per_chunk;
    int32_t last = smaller(first + section->units_per_chunk, section->units);
    for (int32_t unit = first; unit < last; unit++) shrink_unit(section, unit);
}

/* Shrink rows x (rows, width) for a place, whose linears expand them next. */
static void run_shrink(step_state *s, ap_place place, const float *x, int32_t width) {
    adapted_rows *adapted = &s->adapted;
    adapted->layer = (int32_t)(s->layer - s->model->layers);
    shrink_section section = {
        .s = s,
        .in = {.x = x, .stride = width, .rows = s->rows},
        .place = place,
    };
    int64_t work = 0;
    for (int32_t i = 0; i < adapted->count; i++) {
        const ap_linear *shrink = &factors_at(&adapted->spans[i], adapted->layer, place)->shrink;
        if (!has_linear(shrink)) continue;
        section.tiles = (int32_t)larger(section.tiles, num_tiles(shrink));
        work += (int64_t)adapted->spans[i].rows * width * shrink->out_features;
    }
    if (!section.tiles) return;
    section.units = adapted->count * section.tiles;
    int64_t pieces = PIECES_PER_THREAD * ap_pool_threads(s->engine->pool);
    int64_t chunks = work / LEAST_WORK + 1 < pieces ? work / LEAST_WORK + 1 : pieces;
    section.units_per_chunk = ceil_div(section.units, chunks);
    ap_pool_run(s->engine->pool, shrink_chunk, &section,
                ceil_div(section.units, section.units_per_chunk));
}

/* ---- validation ---- */

static bool expansion_fits(const ap_low_rank *factors, const ap_expansion *e, int32_t outputs) {
    return linear_supported(&e->linear) && !has_groups(&e->linear) && e->first_output >= 0 &&
           e->first_output + e->linear.out_features <= outputs && e->first_rank >= 0 &&
           e->first_rank + e->linear.in_features <= factors->shrink.out_features;
}

static bool factors_fit(const ap_adapter *adapter, const ap_low_rank *factors, int32_t inputs,
                        int32_t outputs) {
    if (!has_linear(&factors->shrink)) return true;
    if (!linear_supported(&factors->shrink) || has_groups(&factors->shrink)) return false;
    if (factors->shrink.in_features != inputs || !factors->scales) return false;
    if (factors->shrink.out_features > adapter->most_ranks) return false;
    for (int32_t i = 0; i < factors->num_expansions; i++)
        if (!expansion_fits(factors, &factors->expansions[i], outputs)) return false;
    return true;
}

static bool adapter_fits(const ap_model *model, const ap_adapter *adapter) {
    if (!adapter->places) return false;
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_layer *layer = &model->layers[i];
        const ap_low_rank *at = adapter->places + (int64_t)i * AP_NUM_PLACES;
        const ap_linear *out = mixer_output(layer);
        bool has_mlp = has_linear(&layer->gate);
        if (!factors_fit(adapter, &at[AP_INTO_MIXER], model->hidden_size, inputs_width(layer)) ||
            !factors_fit(adapter, &at[AP_OUT_OF_MIXER], out->in_features, model->hidden_size))
            return false;
        if (!has_mlp && (has_linear(&at[AP_INTO_MLP].shrink) ||
                         has_linear(&at[AP_OUT_OF_MLP].shrink)))
            return false;
        if (has_mlp && (!factors_fit(adapter, &at[AP_INTO_MLP], model->hidden_size,
                                     2 * layer->gate.out_features) ||
                        !factors_fit(adapter, &at[AP_OUT_OF_MLP], layer->down.in_features,
                                     model->hidden_size)))
            return false;
    }
    return true;
}

/* True if the batch's adapters exist and fit this model. */
static bool adapters_fit(const ap_model *model, const ap_batch *batch) {
    for (int32_t i = 0; batch->adapter_slots && i < batch->num_seqs; i++) {
        int32_t slot = batch->adapter_slots[i];
        if (slot < 0) continue;
        if (slot >= batch->num_adapters || !adapter_fits(model, &batch->adapters[slot]))
            return false;
    }
    return true;
}

#endif
