/* Parts of a step, for a caller that computes the rest of the model itself. */
#ifndef AP_PARTS_H
#define AP_PARTS_H

#include "step.h"

typedef struct {
    step_state s; /* only what locates rows is set */
    const ap_attention *attention;
    const float *qkv; /* (rows, qkv_width) */
    int32_t layer;
} layer_write;

static void write_layer_row(void *context, int32_t row) {
    const layer_write *w = context;
    const ap_attention *a = w->attention;
    const float *key = w->qkv + (int64_t)row * qkv_width(a) + (int64_t)a->num_heads * a->head_dim;
    const float *value = key + (int64_t)a->num_kv_heads * a->head_dim;
    bool sealed = is_sealed(w->s.cache->layers[w->layer].format);
    kv_write_token(a, w->s.cache, w->layer, key, value,
                   (sealed ? w->s.open_slots : w->s.batch->slot_mapping)[row]);
}

static ap_status attend_layer(ap_engine *engine, const ap_attention *a, const ap_cache *cache,
                              int32_t layer, const ap_batch *batch, const float *qkv, float *out) {
    if (a->output_gate || !places_fit(cache, batch) || !attention_supported(a, cache, layer))
        return AP_BAD_ARGUMENT;
    bool sealed = is_sealed(cache->layers[layer].format);
    if (sealed && !open_blocks_fit(cache, batch)) return AP_BAD_ARGUMENT;
    int64_t attention = attend_bytes(engine, a, cache, layer, batch);
    int64_t open = sealed ? batch->num_tokens * (int64_t)sizeof(int64_t) : 0;
    int64_t full = sealed ? batch->num_seqs * (int64_t)sizeof(int32_t) : 0;
    ap_status status = ap_reserve(engine, ap_claim_bytes(attention) + ap_claim_bytes(open) +
                                              2 * ap_claim_bytes(full));
    if (status) return status;
    char *memory = ap_claim(engine, attention);
    layer_write w = {.attention = a, .qkv = qkv, .layer = layer};
    w.s = (step_state){.cache = cache, .batch = batch};
    w.s.open_slots = ap_claim(engine, open);
    w.s.full_open = ap_claim(engine, full);
    w.s.full_blocks = ap_claim(engine, full);
    if (sealed) find_open_slots(&w.s);
    for_rows(engine, write_layer_row, &w, batch->num_tokens);
    if (w.s.num_full)
        kv_seal(engine, a, cache, layer, w.s.num_full, w.s.full_open, w.s.full_blocks);
    attend(engine, memory, a, cache, layer, batch, qkv, qkv_width(a), out);
    ap_advance(engine);
    return AP_OK;
}

static ap_status multiply_rows(ap_engine *engine, const ap_linear *linear, const float *x,
                               int32_t rows, float *out) {
    const ap_linear *linears[] = {linear};
    int64_t bytes = input_bytes(linears, 1, rows);
    ap_status status = ap_reserve(engine, ap_claim_bytes(bytes));
    if (status || !rows) return status;
    input in = input_of(linears, 1, x, rows, ap_claim(engine, bytes));
    if (is_prepared(linear)) for_rows(engine, prepare_head_row, &in, rows);
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&in, linear)},
        .out = {out},
        .out_stride = linear->out_features,
    };
    run_linear(engine, &section);
    return AP_OK;
}

typedef struct {
    const ap_linear *linear;
    const int64_t *ids;
    float *out;
} row_search;

static void find_row(void *context, int32_t row) {
    const row_search *search = context;
    int64_t width = search->linear->in_features;
    linear_row(search->linear, search->ids[row], search->out + row * width);
}

static ap_status find_rows(ap_engine *engine, const ap_linear *linear, const int64_t *ids,
                           int32_t count, float *out) {
    for (int32_t i = 0; i < count; i++)
        if (ids[i] < 0 || ids[i] >= linear->out_features) return AP_BAD_ARGUMENT;
    row_search search = {linear, ids, out};
    for_rows(engine, find_row, &search, count);
    return AP_OK;
}

#endif
