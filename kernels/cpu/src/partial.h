/* Partial results that the ranks of a group sum: rows of the stream, and logits.
 *
 * Every rank adds the same numbers in the same order, so all continue with the same bits, and a
 * row's sum does not depend on the rows beside it. */
#ifndef AP_PARTIAL_H
#define AP_PARTIAL_H

#include <string.h>

#include "group.h"
#include "step_state.h"

/* The place for this rank's part of a sum of rows; NULL if this rank computes the whole sum. */
static float *begin_partial(const step_state *s, bool is_partial) {
    ap_group *group = s->engine->group;
    return is_partial && group ? group_slot(group, group_rank(group)) : NULL;
}

static void sum_parts_row(void *context, int32_t row) {
    const step_state *s = context;
    const ap_group *group = s->engine->group;
    int32_t width = s->model->hidden_size, size = group_size(group);
    float *out = s->summed + (int64_t)row * width;
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        int64_t place = (int64_t)row * width + i;
        vfloat sum = load_next(group_slot(group, 0) + place, left);
        for (int32_t rank = 1; rank < size; rank++)
            sum = vf_add(sum, load_next(group_slot(group, rank) + place, left));
        if (s->adds_sum) sum = vf_add(load_next(out + i, left), sum);
        store_next(out + i, sum, left);
    }
}

/* Sum all ranks' parts into rows of `out`; with `add`, accumulate. */
static void sum_parts(step_state *s, float *out, bool add) {
    if (!group_meet(s->engine->group)) return; /* the step fails at its end */
    s->summed = out;
    s->adds_sum = add;
    for_rows(s->engine, sum_parts_row, s, s->rows);
    group_turn(s->engine->group);
}

/* True if a slot has room for the parts of this many rows. */
static bool parts_fit(const ap_engine *engine, const ap_model *model, int32_t rows) {
    if (!engine->group) return true;
    int64_t floats = group_floats(engine->group);
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_mamba2 *m = model->layers[i].mamba2;
        if (m && (int64_t)rows * m->split_groups > floats) return false;
    }
    return (int64_t)rows * model->hidden_size <= floats && model->widest_vocab > 0 &&
           model->widest_vocab <= floats && model->first_token >= 0 &&
           model->first_token + model->embedding.out_features <= model->vocab_size;
}

/* Copy columns first .. first + count - 1 of rows of logits to or from rows of `count` floats. */
static void copy_columns(float *logits, int32_t vocab_size, int32_t first, int32_t count,
                         int32_t rows, float *part, bool out) {
    for (int32_t row = 0; row < rows; row++) {
        float *there = logits + (int64_t)row * vocab_size + first;
        float *here = part + (int64_t)row * count;
        memcpy(out ? here : there, out ? there : here, (size_t)count * sizeof(float));
    }
}

/* Gather all ranks' columns of logits in rank 0; a slot begins with its rank's columns. */
static void gather_logits(ap_group *group, const ap_model *model, float *logits, int32_t rows) {
    int32_t rank = group_rank(group), size = group_size(group), vocab = model->vocab_size;
    int32_t at_once = (int32_t)(group_floats(group) / model->widest_vocab);
    for (int32_t first = 0; first < rows; first += at_once) {
        int32_t some = smaller(at_once, rows - first);
        float *from = logits + (int64_t)first * vocab;
        if (rank)
            copy_columns(from, vocab, model->first_token, model->head.out_features, some,
                         group_slot(group, rank), true);
        if (!group_meet(group)) return;
        for (int32_t other = 1; !rank && other < size; other++)
            copy_columns(from, vocab, model->first_tokens[other],
                         model->first_tokens[other + 1] - model->first_tokens[other], some,
                         group_slot(group, other), false);
        group_turn(group);
    }
}

#endif
