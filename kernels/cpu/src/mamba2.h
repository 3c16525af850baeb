/* Mamba-2 (arXiv 2405.21060): each head has a state that maps keys to values.
 *
 * A row multiplies the state by its decay, adds its value at its key, and reads the state with its
 * query. Rows are processed one by one, in prompts as in answers, as in gated_delta.h.
 */
#ifndef AP_MAMBA2_H
#define AP_MAMBA2_H

#include <string.h>

#include "group.h"
#include "state_columns.h"

/* Update some columns of the state by one row; the state has `stride` columns, and `size`
 * multiplies the values. */
INLINE void scan_row(const float *query, const float *key, const float *value, float size,
                     float decay, float *state, int32_t state_dim, int64_t stride, int32_t vectors,
                     float skip, float *out) {
    vfloat sums[STATE_SUMS][STATE_VECTORS], taken[STATE_VECTORS], kept = vf_set(decay);
    for (int32_t v = 0; v < vectors; v++)
        taken[v] = vf_mul(vf_load(value + v * AP_LANES), vf_set(size));
    for (int32_t j = 0; j < STATE_SUMS; j++)
        for (int32_t v = 0; v < vectors; v++) sums[j][v] = vf_zero();
    for (int32_t i = 0; i < state_dim; i += STATE_SUMS)
        for (int32_t j = 0; j < STATE_SUMS; j++) {
            float *place = state + (i + j) * stride;
            state_row held = load_state(place, vectors);
            for (int32_t v = 0; v < vectors; v++) {
                vfloat now = vf_fma(vf_set(key[i + j]), taken[v], vf_mul(held.of[v], kept));
                vf_store(place + v * AP_LANES, now);
                sums[j][v] = vf_fma(vf_set(query[i + j]), now, sums[j][v]);
            }
        }
    for (int32_t v = 0; v < vectors; v++) {
        vfloat read = vf_add(vf_add(sums[0][v], sums[1][v]), vf_add(sums[2][v], sums[3][v]));
        vfloat passed = vf_load(value + v * AP_LANES);
        vf_store(out + v * AP_LANES, vf_fma(passed, vf_set(skip), read));
    }
}

/* Process all rows of a sequence in some columns of a head. */
static void scan_part(void *context, const state_span *span, int32_t part) {
    step_state *s = context;
    const ap_mamba2 *m = s->layer->mamba2;
    int32_t parts = state_parts(m->head_dim);
    int32_t head = part / parts, column = part % parts * STATE_COLUMNS;
    int32_t group = head / (m->num_heads / m->num_groups);
    int32_t values = m->num_heads * m->head_dim, keys = m->num_groups * m->state_dim;
    int32_t place = head * m->head_dim + column;
    bool is_whole = m->head_dim - column >= STATE_COLUMNS;
    state_columns c;
    c.state = state_of(s, span, m->state);
    c.first = (int64_t)head * m->state_dim * m->head_dim + column;
    c.rows = m->state_dim;
    c.width = m->head_dim;
    c.columns = is_whole ? STATE_COLUMNS : AP_LANES;
    hold_columns(&c, span);
    for (int32_t row = span->first; row < span->first + span->rows; row++) {
        const float *in = s->inputs + row * (int64_t)inputs_width(s->layer);
        const float *value = in + values + place;
        const float *key = in + 2 * values + group * m->state_dim, *query = key + keys;
        float size = in[2 * values + 2 * keys + head];
        float decay = expf(-m->rates[head] * size);
        float *out = s->mixed + (int64_t)row * values + place;
        if (is_whole)
            scan_row(query, key, value, size, decay, c.held, m->state_dim, c.pitch, STATE_VECTORS,
                     m->skip[head], out);
        else
            scan_row(query, key, value, size, decay, c.held, m->state_dim, c.pitch, 1,
                     m->skip[head], out);
    }
    put_columns_back(&c);
}

static void scan_sizes_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_mamba2 *m = s->layer->mamba2;
    int64_t stride = inputs_width(s->layer);
    float *sizes = s->inputs + (row + 1) * stride - m->num_heads;
    for (int32_t i = 0; i < m->num_heads; i++) sizes[i] = softplus(sizes[i] + m->step_bias[i]);
}

/* Gate all heads of a row, and return them. */
static float *gate_heads(step_state *s, int32_t row) {
    const ap_mamba2 *m = s->layer->mamba2;
    int32_t values = m->num_heads * m->head_dim;
    float *out = s->mixed + (int64_t)row * values;
    gate_with(s->inputs + row * (int64_t)inputs_width(s->layer), out, AP_SILU, values, out);
    return out;
}

/* Gate all heads and norm each group of them. */
static void scan_outputs_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_mamba2 *m = s->layer->mamba2;
    int32_t width = m->num_heads * m->head_dim / m->num_groups;
    float *out = gate_heads(s, row);
    for (int32_t i = 0; i < m->num_groups; i++) {
        ap_norm norm = {.weight = m->norm.weight + i * width, .eps = m->norm.eps};
        rms_norm_row(out + i * width, &norm, width, out + i * width);
    }
}

/* Gate this rank's heads of a group, and write the sum of their squares to its slot. */
static void scan_part_outputs_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_mamba2 *m = s->layer->mamba2;
    const ap_group *group = s->engine->group;
    float *sums = group_slot(group, group_rank(group)) + (int64_t)row * m->split_groups;
    memset(sums, 0, (size_t)m->split_groups * sizeof(float));
    sums[m->split_group] = sum_of_squares(gate_heads(s, row), m->num_heads * m->head_dim);
}

/* Norm this rank's heads of a group by the sum of all ranks; each rank adds in the same order. */
static void norm_part_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_mamba2 *m = s->layer->mamba2;
    const ap_group *group = s->engine->group;
    int64_t place = (int64_t)row * m->split_groups + m->split_group;
    int32_t values = m->num_heads * m->head_dim;
    float *out = s->mixed + (int64_t)row * values, squares = group_slot(group, 0)[place];
    for (int32_t rank = 1; rank < group_size(group); rank++)
        squares += group_slot(group, rank)[place];
    norm_row_by(out, &m->norm, squares / (float)m->split_width, values, out);
}

static void run_scan_outputs(step_state *s) {
    ap_group *group = s->engine->group;
    if (!s->layer->mamba2->split_groups || !group) {
        for_rows(s->engine, scan_outputs_row, s, s->rows);
        return;
    }
    for_rows(s->engine, scan_part_outputs_row, s, s->rows);
    if (!group_meet(group)) return; /* the step fails at its end */
    for_rows(s->engine, norm_part_row, s, s->rows);
    group_turn(group);
}

static void run_mamba2(step_state *s, const ap_norm *post_norm) {
    const ap_mamba2 *m = s->layer->mamba2;
    run_mixer_inputs(s, post_norm);
    int64_t stride = inputs_width(s->layer);
    float *filtered = s->inputs + m->num_heads * m->head_dim;
    conv_run run = {.s = s, .filters = &m->filters, .in = filtered, .stride = stride,
                    .out = filtered, .out_stride = stride};
    run_filters(&run);
    for_rows(s->engine, scan_sizes_row, s, s->rows);
    for_states(s, scan_part, s, m->num_heads * state_parts(m->head_dim),
               3 * m->state_dim * STATE_COLUMNS);
    run_scan_outputs(s);
}

/* True if a rank's part of a group has a valid index and fits the whole group. */
static bool split_fits(const ap_mamba2 *m) {
    if (!m->split_groups) return true;
    return m->num_groups == 1 && m->split_group >= 0 && m->split_group < m->split_groups &&
           m->split_width >= m->num_heads * m->head_dim;
}

/* True if a state slot has room for a layer's state. */
static bool mamba2_fits(const ap_cache *cache, const ap_mamba2 *m) {
    if (m->num_groups < 1 || m->num_heads < 1 || m->num_heads % m->num_groups) return false;
    if (m->head_dim < AP_LANES || m->head_dim % AP_LANES || m->state < 0) return false;
    if (m->state_dim < AP_LANES || m->state_dim % AP_LANES || m->state % 64) return false;
    if (!split_fits(m)) return false;
    int32_t values = m->num_heads * m->head_dim, keys = m->num_groups * m->state_dim;
    int64_t numbers = (int64_t)m->num_heads * m->state_dim * m->head_dim;
    return m->filters.width == values + 2 * keys &&
           m->input.out_features == 2 * values + 2 * keys + m->num_heads &&
           (cache->state_format == AP_F32 || m->state_dim <= MOST_NEAR) &&
           m->state + numbers * kept_bytes(cache->state_format) <= cache->state_bytes;
}

#endif
