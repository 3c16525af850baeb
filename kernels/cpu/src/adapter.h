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
    s->adapted.num_layers = s->model->num_layers;
    if (!s->adapter_of) return;
    for (int32_t i = 0; i < batch->num_seqs; i++)
        for (int32_t row = batch->query_start[i]; row < batch->query_start[i + 1]; row++)
            s->adapter_of[row] = batch->adapter_slots[i];
    find_adapted(s, NULL);
}

/* ---- shrinking ---- */

/* A chunk reads at least this many bytes of factors, counted for each row: some microseconds. */
#define LEAST_FACTORS 32768

typedef struct {
    const step_state *s;
    ap_place place;
    int32_t tiles; /* of the adapter with the most */
    int32_t units; /* spans times tiles */
    int32_t units_per_chunk;
} shrink_section;

static void shrink_unit(const shrink_section *section, int32_t unit) {
    const step_state *s = section->s;
    const adapted_rows *adapted = &s->adapted;
    const adapter_span *span = &adapted->spans[unit / section->tiles];
    const ap_low_rank *factors = factors_at(span, adapted->layer, section->place);
    const ap_linear *shrink = &factors->shrink;
    int32_t tile = unit % section->tiles, stride = adapted->stride;
    if (!has_linear(shrink) || tile >= num_tiles(shrink)) return;
    const rows_in *in = is_quantized(shrink) ? form_of(&s->in, shrink) : &s->in.forms[0];
    linear_tiles(shrink, in, span->first, span->first + span->rows, tile, tile + 1,
                 adapted->shrunk, stride, false);
    const float *scales = factors->scales + tile * AP_LANES;
    int32_t count = outputs_of(shrink, tile);
    rows_in coded = shrunk_tile(adapted, s->rows, tile * AP_LANES);
    for (int32_t row = span->first; row < span->first + span->rows; row++) {
        float *ranks = adapted->shrunk + (int64_t)row * stride + tile * AP_LANES;
        for (int32_t i = 0; i < count; i++) ranks[i] *= scales[i];
        if (is_quantized(shrink))
            quantize_inputs(ranks, row_codes(&coded, row, AP_LANES), 4 * block_rows(&coded, row),
                            row_scales(&coded, row, AP_LANES));
    }
}

static void shrink_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const shrink_section *section = context;
    int32_t first = chunk * section->units_per_chunk;
    int32_t last = smaller(first + section->units_per_chunk, section->units);
    for (int32_t unit = first; unit < last; unit++) shrink_unit(section, unit);
}

/* Shrink the rows of the current input for a place, whose linears expand them next. */
static void run_shrink(step_state *s, ap_place place) {
    adapted_rows *adapted = &s->adapted;
    adapted->layer = (int32_t)(s->layer - s->model->layers);
    shrink_section section = {.s = s, .place = place};
    int64_t bytes = 0;
    for (int32_t i = 0; i < adapted->count; i++) {
        const ap_linear *shrink = &factors_at(&adapted->spans[i], adapted->layer, place)->shrink;
        if (!has_linear(shrink)) continue;
        section.tiles = (int32_t)larger(section.tiles, num_tiles(shrink));
        bytes += adapted->spans[i].rows * num_tiles(shrink) * tile_bytes(shrink);
    }
    if (!section.tiles) return;
    section.units = adapted->count * section.tiles;
    int64_t pieces = PIECES_PER_THREAD * ap_pool_threads(s->engine->pool);
    int64_t chunks = bytes / LEAST_FACTORS + 1 < pieces ? bytes / LEAST_FACTORS + 1 : pieces;
    section.units_per_chunk = ceil_div(section.units, chunks);
    ap_pool_run(s->engine->pool, shrink_chunk, &section,
                ceil_div(section.units, section.units_per_chunk));
}

/* ---- validation ---- */

/* The first linear of a place whose inputs a step quantizes as they are; NULL: there is none. */
static const ap_linear *quantized_linear(const ap_layer *layer, ap_place place) {
    const ap_linear *linears[MOST_FORMS] = {&layer->down};
    int32_t count = 1;
    if (place == AP_INTO_MIXER)
        count = mixer_linears(layer, linears);
    else if (place == AP_OUT_OF_MIXER)
        linears[0] = mixer_output(layer);
    else if (place == AP_INTO_MLP)
        linears[0] = &layer->gate, linears[1] = &layer->up, count = 2;
    for (int32_t i = 0; i < count; i++)
        if (is_quantized(linears[i]) && !is_trellis(linears[i])) return linears[i];
    return NULL;
}

static const ap_linear *quantized_at(const ap_model *model, int32_t layer, int32_t place) {
    if (layer < 0 || layer >= model->num_layers || place < 0 || place >= AP_NUM_PLACES)
        return NULL;
    return quantized_linear(&model->layers[layer], (ap_place)place);
}

/* True if a step quantizes its rows to the codes that these factors multiply. */
static bool codes_fit(const ap_linear *shrink, const ap_linear *quantized) {
    return shrink->scale_format == AP_SCALES_NONE && quantized &&
           shrink->input_order == quantized->input_order;
}

static bool expansion_fits(const ap_low_rank *factors, const ap_expansion *e, int32_t outputs) {
    const ap_linear *shrink = &factors->shrink, *expand = &e->linear;
    if (!linear_supported(expand) || expand->scale_format != shrink->scale_format ||
        is_quantized(expand) != is_quantized(shrink))
        return false;
    if (is_quantized(expand) && (expand->in_features != AP_LANES || e->first_rank % AP_LANES))
        return false;
    return e->first_output >= 0 && e->first_output + expand->out_features <= outputs &&
           e->first_rank >= 0 && e->first_rank + expand->in_features <= shrink->out_features;
}

static bool factors_fit(const ap_layer *layer, const ap_adapter *adapter,
                        const ap_low_rank *places, ap_place place, int32_t inputs,
                        int32_t outputs) {
    const ap_low_rank *factors = &places[place];
    const ap_linear *shrink = &factors->shrink;
    if (!has_linear(shrink)) return true;
    if (!linear_supported(shrink)) return false;
    if (is_quantized(shrink) && !codes_fit(shrink, quantized_linear(layer, place))) return false;
    if (shrink->in_features != inputs || !factors->scales) return false;
    if (shrink->out_features > adapter->most_ranks) return false;
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
        int32_t hidden = model->hidden_size, middle = layer->gate.out_features;
        if (!factors_fit(layer, adapter, at, AP_INTO_MIXER, hidden, inputs_width(layer)) ||
            !factors_fit(layer, adapter, at, AP_OUT_OF_MIXER, out->in_features, hidden))
            return false;
        if (!has_linear(&layer->gate)) {
            if (has_linear(&at[AP_INTO_MLP].shrink) || has_linear(&at[AP_OUT_OF_MLP].shrink))
                return false;
            continue;
        }
        if (!factors_fit(layer, adapter, at, AP_INTO_MLP, hidden, 2 * middle) ||
            !factors_fit(layer, adapter, at, AP_OUT_OF_MLP, layer->down.in_features, hidden))
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
