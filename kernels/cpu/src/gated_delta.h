/* The gated delta rule (arXiv 2412.06464): each value head has a state that maps keys to values.
 *
 * A row multiplies the state by its decay, corrects the value at the row's key by a share of the
 * error, and reads the state with the row's query. Rows are processed one by one, in prompts as in
 * answers, so the result does not depend on how a prompt is cut. This takes one pass over the rows
 * less than the chunked form.
 */
#ifndef AP_GATED_DELTA_H
#define AP_GATED_DELTA_H

#include "state_columns.h"

typedef struct {
    float decay;
    float share; /* of the error that is corrected */
} delta_rates;

/* Update some columns of the state by one row; the state has `stride` columns. */
INLINE void delta_row(const float *query, const float *key, const float *value, delta_rates rates,
                      float *state, int32_t key_dim, int64_t stride, int32_t vectors, float *out) {
    vfloat sums[STATE_SUMS][STATE_VECTORS];
    for (int32_t j = 0; j < STATE_SUMS; j++)
        for (int32_t v = 0; v < vectors; v++) sums[j][v] = vf_zero();
    for (int32_t i = 0; i < key_dim; i += STATE_SUMS)
        for (int32_t j = 0; j < STATE_SUMS; j++) {
            state_row held = load_state(state + (i + j) * stride, vectors);
            for (int32_t v = 0; v < vectors; v++)
                sums[j][v] = vf_fma(vf_set(key[i + j]), held.of[v], sums[j][v]);
        }
    vfloat decay = vf_set(rates.decay), share = vf_set(rates.share), change[STATE_VECTORS];
    for (int32_t v = 0; v < vectors; v++) {
        vfloat said = vf_add(vf_add(sums[0][v], sums[1][v]), vf_add(sums[2][v], sums[3][v]));
        vfloat error = vf_sub(vf_load(value + v * AP_LANES), vf_mul(said, decay));
        change[v] = vf_mul(error, share);
        for (int32_t j = 0; j < STATE_SUMS; j++) sums[j][v] = vf_zero();
    }
    for (int32_t i = 0; i < key_dim; i += STATE_SUMS)
        for (int32_t j = 0; j < STATE_SUMS; j++) {
            float *place = state + (i + j) * stride;
            state_row held = load_state(place, vectors);
            for (int32_t v = 0; v < vectors; v++) {
                vfloat now = vf_fma(vf_set(key[i + j]), change[v], vf_mul(held.of[v], decay));
                vf_store(place + v * AP_LANES, now);
                sums[j][v] = vf_fma(vf_set(query[i + j]), now, sums[j][v]);
            }
        }
    for (int32_t v = 0; v < vectors; v++)
        vf_store(out + v * AP_LANES,
                 vf_add(vf_add(sums[0][v], sums[1][v]), vf_add(sums[2][v], sums[3][v])));
}

/* Process all rows of a sequence in some columns of a value head. */
static void delta_part(void *context, const state_span *span, int32_t part) {
    step_state *s = context;
    const ap_gated_delta *d = s->layer->gated_delta;
    int32_t parts = state_parts(d->value_dim);
    int32_t head = part / parts, column = part % parts * STATE_COLUMNS;
    int32_t key_head = head / (d->num_value_heads / d->num_key_heads);
    int32_t keys = d->num_key_heads * d->key_dim, values = d->num_value_heads * d->value_dim;
    int64_t stride = inputs_width(s->layer), size = (int64_t)d->key_dim * d->value_dim;
    bool is_whole = d->value_dim - column >= STATE_COLUMNS;
    state_columns c;
    c.state = state_of(s, span, d->state);
    c.first = head * size + column;
    c.rows = d->key_dim;
    c.width = d->value_dim;
    c.columns = is_whole ? STATE_COLUMNS : AP_LANES;
    hold_columns(&c, span);
    for (int32_t row = span->first; row < span->first + span->rows; row++) {
        const float *in = s->inputs + row * stride;
        const float *query = in + key_head * d->key_dim, *key = query + keys;
        int32_t place = head * d->value_dim + column;
        const float *rates = in + 2 * keys + 2 * values + head;
        delta_rates of = {.share = rates[0], .decay = rates[d->num_value_heads]};
        float *out = s->mixed + (int64_t)row * values + place;
        if (is_whole)
            delta_row(query, key, in + 2 * keys + place, of, c.held, d->key_dim, c.pitch,
                      STATE_VECTORS, out);
        else
            delta_row(query, key, in + 2 * keys + place, of, c.held, d->key_dim, c.pitch, 1, out);
    }
    put_columns_back(&c);
}

/* Scale a vector to a length. */
static void set_length(float *x, int32_t width, float length) {
    scale_row(x, length / sqrtf(sum_of_squares(x, width) + 1e-6f), width);
}

/* Scale queries and keys to their lengths; compute shares and decays from the linears' outputs. */
static void delta_inputs_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_gated_delta *d = s->layer->gated_delta;
    float *in = s->inputs + row * (int64_t)inputs_width(s->layer);
    for (int32_t i = 0; i < 2 * d->num_key_heads; i++)
        set_length(in + i * d->key_dim, d->key_dim,
                   i < d->num_key_heads ? 1.0f / sqrtf((float)d->key_dim) : 1.0f);
    float *share = in + 2 * d->num_key_heads * d->key_dim + 2 * d->num_value_heads * d->value_dim;
    float *decay = share + d->num_value_heads;
    for (int32_t i = 0; i < d->num_value_heads; i++) {
        share[i] = 1.0f / (1.0f + expf(-share[i]));
        decay[i] = expf(-d->rates[i] * softplus(decay[i] + d->decay_bias[i]));
    }
}

/* Norm each head and multiply it by its gate. */
static void delta_outputs_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_gated_delta *d = s->layer->gated_delta;
    int32_t keys = d->num_key_heads * d->key_dim, values = d->num_value_heads * d->value_dim;
    float *out = s->mixed + (int64_t)row * values;
    const float *gate = s->inputs + row * (int64_t)inputs_width(s->layer) + 2 * keys + values;
    for (int32_t i = 0; i < d->num_value_heads; i++)
        rms_norm_row(out + i * d->value_dim, &d->norm, d->value_dim, out + i * d->value_dim);
    gate_with(gate, out, AP_SILU, values, out);
}

static void run_gated_delta(step_state *s, const ap_norm *post_norm) {
    const ap_gated_delta *d = s->layer->gated_delta;
    run_mixer_inputs(s, post_norm);
    int64_t stride = inputs_width(s->layer);
    conv_run run = {.s = s, .filters = &d->filters, .in = s->inputs, .stride = stride,
                    .out = s->inputs, .out_stride = stride};
    run_filters(&run);
    for_rows(s->engine, delta_inputs_row, s, s->rows);
    for_states(s, delta_part, s, d->num_value_heads * state_parts(d->value_dim),
               4 * d->key_dim * STATE_COLUMNS);
    for_rows(s->engine, delta_outputs_row, s, s->rows);
}

#endif
