/* What a token's own embeddings add to the stream at the end of each layer (Gemma's per-layer
 * embeddings), and the factor that the stream may have there. */
#ifndef AP_TOKEN_INPUT_H
#define AP_TOKEN_INPUT_H

#include "mlp.h"

/* ---- once per step: the inputs of all layers ---- */

static void token_input_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_token_inputs *t = &s->model->token_inputs;
    int32_t width = t->width, all = s->model->num_layers * width;
    float *inputs = s->token_inputs + (int64_t)row * all;
    float *own = s->token_rows + (int64_t)row * all;
    linear_row(&t->embedding, s->batch->token_ids[row], own);
    scale_row(own, t->embedding_scale, all);
    scale_row(inputs, t->projection_scale, all);
    for (int32_t at = 0; at < all; at += width)
        rms_norm_row(inputs + at, &t->norm, width, inputs + at);
    add_row(inputs, own, all);
    scale_row(inputs, t->scale, all);
}

/* Compute them from the stream before the first layer. */
static void make_token_inputs(step_state *s) {
    const ap_linear *projection = &s->model->token_inputs.projection;
    s->in = input_of(&projection, 1, s->stream, s->rows, s->codes);
    if (is_prepared(projection)) for_rows(s->engine, prepare_input_row, s, s->rows);
    linear_section section = {
        .linears = {projection},
        .in = {form_of(&s->in, projection)},
        .out = {s->token_inputs},
        .out_stride = projection->out_features,
    };
    run_linear(s->engine, &section);
    for_rows(s->engine, token_input_row, s, s->rows);
}

/* ---- at the end of a layer ---- */

static void gate_input_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_token_inputs *t = &s->model->token_inputs;
    const ap_gating gating = {.activation = t->activation};
    int64_t source = s->kept_rows ? s->kept_rows[row] : row;
    int64_t at = source * s->model->num_layers + (s->layer - s->model->layers);
    float *gate = s->token_gate + (int64_t)row * t->width;
    gated_row(gate, s->token_inputs + at * t->width, &gating, t->width, gate);
}

static void end_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    float *stream = s->stream + (int64_t)row * width;
    if (has_linear(&s->layer->token_input.gate)) {
        float *added = s->added + (int64_t)row * width;
        rms_norm_row(added, &s->layer->token_input.norm, width, added);
        add_row(stream, added, width);
    }
    if (s->layer->output_scale != 0.0f) scale_row(stream, s->layer->output_scale, width);
}

static bool has_ending(const ap_layer *layer) {
    return has_linear(&layer->token_input.gate) || layer->output_scale != 0.0f;
}

/* Complete the stream, and do what a layer does after its MLP. */
static void run_ending(step_state *s) {
    const ap_token_input *in = &s->layer->token_input;
    settle(s, &s->layer->mlp_post_norm);
    if (has_linear(&in->gate)) {
        run_from(s, &in->gate, AP_NUM_PLACES, s->stream, s->token_gate, false);
        for_rows(s->engine, gate_input_row, s, s->rows);
        run_from(s, &in->up, AP_NUM_PLACES, s->token_gate, s->added, false);
    }
    for_rows(s->engine, end_row, s, s->rows);
}

static bool token_inputs_supported(const ap_model *model) {
    const ap_token_inputs *t = &model->token_inputs;
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_token_input *in = &model->layers[i].token_input;
        if (!has_linear(&in->gate)) continue;
        if (!t->width || in->gate.out_features != t->width || in->up.in_features != t->width ||
            in->gate.in_features != model->hidden_size ||
            in->up.out_features != model->hidden_size)
            return false;
    }
    int64_t all = (int64_t)model->num_layers * t->width;
    return !t->width ||
           (t->embedding.in_features == all && t->embedding.out_features >= model->vocab_size &&
            t->projection.in_features == model->hidden_size && t->projection.out_features == all);
}

#endif
