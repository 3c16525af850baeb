/* The second half of a layer: an MLP, experts, or both in parallel. */
#ifndef AP_MLP_H
#define AP_MLP_H

#include "adapter.h"
#include "experts.h"
#include "partial.h"

/* Norm a row of the stream; without a norm return it unchanged. */
static void norm_stream(const step_state *s, const float *stream, float *normed) {
    int32_t width = s->model->hidden_size;
    if (!s->norm->weight)
        memcpy(normed, stream, (size_t)width * sizeof(float));
    else if (s->norm->bias)
        layer_norm_row(stream, s->norm, width, normed);
    else
        rms_norm_row(stream, s->norm, width, normed);
}

/* Norm the last linear's output and add it to the stream, if it has a post norm. */
static void settle_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    if (!s->post_norm->weight) return;
    float *added = s->added + (int64_t)row * width;
    rms_norm_row(added, s->post_norm, width, added);
    add_row(s->stream + (int64_t)row * width, added, width);
}

static void settle(step_state *s, const ap_norm *post_norm) {
    s->post_norm = post_norm;
    for_rows(s->engine, settle_row, s, s->rows);
}

static bool replaces_stream(const step_state *s) {
    if (s->model->norms_replace == 2) return s->norm == &s->model->layers[0].mixer_norm;
    return s->model->norms_replace;
}

/* Complete the stream, and norm it. */
static void norm_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    float *stream = s->stream + (int64_t)row * width;
    settle_row(context, row);
    float *normed = s->normed + (int64_t)row * width;
    norm_stream(s, stream, normed);
    if (replaces_stream(s)) memcpy(stream, normed, (size_t)width * sizeof(float));
    if (s->bounds) clip_row(normed, s->bounds[0], s->bounds[1], width);
    prepare_row(&s->in, row);
}

/* Norm the stream and convert it to the forms of some linears. */
static void run_norm(step_state *s, const ap_norm *post_norm, const ap_norm *norm,
                     const ap_linear *const *linears, int32_t count) {
    s->post_norm = post_norm;
    s->norm = norm;
    s->bounds = linears[0]->bounds;
    s->in = input_of(linears, count, s->normed, s->rows, s->codes);
    for_rows(s->engine, norm_row, s, s->rows);
}

/* The outputs of a linear with bounds. */
typedef struct {
    const ap_linear *linear;
    float *out;
    int32_t stride;
} clipped_ends;

static void end_clipped(void *context, int32_t row, int32_t first, int32_t last) {
    const clipped_ends *ends = context;
    clip_outputs(ends->out + (int64_t)row * ends->stride + first, ends->linear, first, last);
}

typedef struct {
    float *x;
    const ap_linear *linear;
} clipped_inputs;

static void clip_input_row(void *context, int32_t row) {
    const clipped_inputs *in = context;
    int32_t width = in->linear->in_features;
    clip_row(in->x + (int64_t)row * width, in->linear->bounds[0], in->linear->bounds[1], width);
}

static void prepare_input_row(void *context, int32_t row) {
    step_state *s = context;
    prepare_row(&s->in, row);
}

/* Norm the stream and multiply it by the linears of a mixer's input. In a drafting head the first
 * mixer may read both halves of the join instead. */
static void run_mixer_inputs(step_state *s, const ap_norm *post_norm) {
    const ap_linear *linears[MOST_FORMS];
    int32_t count = mixer_linears(s->layer, linears);
    if (s->joined) {
        s->in = input_of(linears, count, s->joined, s->rows, s->codes);
        for_rows(s->engine, prepare_input_row, s, s->rows);
        s->joined = NULL;
    } else {
        run_norm(s, post_norm, &s->layer->mixer_norm, linears, count);
        run_shrink(s, AP_INTO_MIXER);
    }
    float *out = s->inputs;
    for (int32_t i = 0; i < count; i++) {
        clipped_ends ends = {linears[i], out, inputs_width(s->layer)};
        linear_section section = {
            .linears = {linears[i]},
            .in = {form_of(&s->in, linears[i])},
            .out = {out},
            .out_stride = inputs_width(s->layer),
            .finish = linears[i]->bounds ? end_clipped : NULL,
            .context = &ends,
            .adapted = &s->adapted,
            .place = AP_INTO_MIXER,
            .first_output = (int32_t)(out - s->inputs),
        };
        run_linear(s->engine, &section);
        out += linears[i]->out_features;
    }
    ap_advance(s->engine);
}

/* Multiply rows x, after conversion to the linear's form, into `out`; with bounds x is clipped. The
 * linear is the only one of its place; AP_NUM_PLACES if no adapter may change it. */
static void run_from(step_state *s, const ap_linear *linear, ap_place place, float *x, float *out,
                     bool add) {
    const ap_linear *linears[] = {linear};
    clipped_inputs clipped = {x, linear};
    clipped_ends ends = {linear, out, linear->out_features};
    if (linear->bounds) for_rows(s->engine, clip_input_row, &clipped, s->rows);
    s->in = input_of(linears, 1, x, s->rows, s->codes);
    if (is_prepared(linear)) for_rows(s->engine, prepare_input_row, s, s->rows);
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&s->in, linear)},
        .out = {out},
        .out_stride = linear->out_features,
        .add = add,
        .finish = linear->bounds ? end_clipped : NULL,
        .context = &ends,
    };
    if (place != AP_NUM_PLACES) {
        run_shrink(s, place);
        section.adapted = &s->adapted;
        section.place = place;
    }
    run_linear(s->engine, &section);
}

/* Multiply by the linear back into the stream: directly, or before a post norm. */
static void run_into_stream(step_state *s, const ap_linear *linear, ap_place place,
                            float *x, const ap_norm *post_norm, bool is_part) {
    bool waits = post_norm->weight != NULL;
    float *part = begin_partial(s, is_part), *out = waits ? s->added : s->stream;
    run_from(s, linear, place, x, part ? part : out, !part && !waits);
    if (part) sum_parts(s, out, !waits);
}

static void activate(void *context, int32_t row, int32_t first, int32_t last) {
    step_state *s = context;
    const ap_layer *layer = s->layer;
    int64_t place = (int64_t)row * layer->gate.out_features + first;
    float *up = has_linear(&layer->up) ? s->up + place : NULL;
    if (layer->gate.bounds) clip_outputs(s->gate + place, &layer->gate, first, last);
    if (up && layer->up.bounds) clip_outputs(up, &layer->up, first, last);
    gated_row(s->gate + place, up, &s->layer->gating, last - first, s->gate + place);
}

static void run_gate_up(step_state *s) {
    const ap_layer *layer = s->layer;
    bool is_gated = has_linear(&layer->up);
    run_shrink(s, AP_INTO_MLP);
    linear_section section = {
        .linears = {&layer->gate, is_gated ? &layer->up : NULL},
        .in = {form_of(&s->in, &layer->gate), is_gated ? form_of(&s->in, &layer->up) : NULL},
        .out = {s->gate, s->up},
        .out_stride = layer->gate.out_features,
        .finish = activate,
        .context = s,
        .adapted = &s->adapted,
        .place = AP_INTO_MLP,
    };
    run_linear(s->engine, &section);
}

/* Multiply normed rows by a linear of the router, or by the one into latents. */
static void run_router(step_state *s, const ap_linear *linear, float *out) {
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&s->in, linear)},
        .out = {out},
        .out_stride = linear->out_features,
    };
    run_linear(s->engine, &section);
}

/* ---- experts with norms of their own ---- */

/* Norm the output of the layer's MLP; then apply the router's norm to the stream. */
static void norm_for_router_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    float *added = s->added + (int64_t)row * width;
    rms_norm_row(added, &s->layer->experts->shared_norm, width, added);
    rms_norm_row(s->stream + (int64_t)row * width, &s->layer->experts->router_norm, width,
                 s->normed + (int64_t)row * width);
}

static void norm_for_experts_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    rms_norm_row(s->stream + (int64_t)row * width, &s->layer->experts->input_norm, width,
                 s->normed + (int64_t)row * width);
}

static void run_experts_beside(step_state *s, const ap_norm *post_norm) {
    const ap_layer *layer = s->layer;
    const ap_linear *linears[] = {&layer->gate, &layer->up}, *logits = &layer->experts->logits;
    run_norm(s, post_norm, &layer->mlp_norm, linears, 2);
    run_gate_up(s);
    float *part = begin_partial(s, layer->mlp_is_part);
    run_from(s, &layer->down, AP_OUT_OF_MLP, s->gate, part ? part : s->added, false);
    if (part) sum_parts(s, s->added, false);
    ap_advance(s->engine);
    for_rows(s->engine, norm_for_router_row, s, s->rows);
    s->in = input_of(&logits, 1, s->normed, s->rows, s->codes);
    if (is_prepared(logits)) for_rows(s->engine, prepare_input_row, s, s->rows);
    run_router(s, logits, s->chosen.logits);
    for_rows(s->engine, norm_for_experts_row, s, s->rows);
    s->part = begin_partial(s, layer->mlp_is_part);
    run_experts(s);
    if (s->part) {
        sum_parts(s, s->normed, false);
        for_rows(s->engine, norm_chosen_row, s, s->rows);
    }
    s->part = NULL;
}

/* Give a row of `added` to the ranks' sum, or add it to the stream. */
static void settle_latent_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    int64_t at = (int64_t)row * width;
    if (s->part)
        memcpy(s->part + at, s->added + at, (size_t)width * sizeof(float));
    else if (!s->layer->mlp_post_norm.weight)
        add_row(s->stream + at, s->added + at, width);
}

/* Map the chosen experts' output from latents back, and add the shared expert's output. */
static void leave_latent(step_state *s) {
    run_from(s, &s->layer->experts->out_of_latent, AP_NUM_PLACES, s->chosen.latent, s->added,
             has_linear(&s->layer->gate));
    ap_advance(s->engine);
    for_rows(s->engine, settle_latent_row, s, s->rows);
}

static bool has_mlp(const ap_layer *layer) { return layer->experts || has_linear(&layer->gate); }

static void run_mlp(step_state *s, const ap_norm *post_norm) {
    const ap_layer *layer = s->layer;
    if (layer->experts && layer->experts->input_norm.weight) {
        run_experts_beside(s, post_norm);
        return;
    }
    const ap_linear *linears[MOST_FORMS];
    int32_t count = mlp_linears(layer, linears);
    run_norm(s, post_norm, &layer->mlp_norm, linears, count);
    if (layer->experts) {
        run_router(s, &layer->experts->logits, s->chosen.logits);
        if (has_linear(&layer->experts->shared_gate))
            run_router(s, &layer->experts->shared_gate, s->chosen.shared_gate);
        if (is_latent(layer->experts))
            run_router(s, &layer->experts->into_latent, s->chosen.latent);
    }
    if (has_linear(&layer->gate)) run_gate_up(s);
    if (!layer->experts) {
        run_into_stream(s, &layer->down, AP_OUT_OF_MLP, s->gate, &layer->mlp_post_norm,
                        layer->mlp_is_part);
        return;
    }
    if (has_linear(&layer->gate))
        run_from(s, &layer->down, AP_OUT_OF_MLP, s->gate, s->added, false);
    ap_advance(s->engine);
    bool waits = layer->mlp_post_norm.weight != NULL;
    s->part = begin_partial(s, layer->mlp_is_part);
    run_experts(s);
    if (is_latent(layer->experts)) leave_latent(s);
    if (s->part) sum_parts(s, waits ? s->added : s->stream, !waits);
    s->part = NULL;
}

#endif
