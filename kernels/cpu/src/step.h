/* One whole step of a decoder: every row of a ragged batch through all layers.
 *
 * The order of the paper, as in appliance/model/layers.py. Between two linears everything that
 * belongs to a row is done in one go: norms, sums, rotation, and the quantized form that the next
 * linear needs. After the last layer's attention only the rows whose logits are wanted continue.
 *
 * The model may be a part of one: without an embedding it continues from the stream of the part
 * before; without a head it ends with the stream for the part after.
 */
#ifndef AP_STEP_H
#define AP_STEP_H

#include "step_check.h"

/* ---- one row ---- */

/* A rank's part of a row of the embedding: the whole row, or zeros. */
static void embed_part_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_model *model = s->model;
    float *part = s->part + (int64_t)row * model->hidden_size;
    int64_t index = s->batch->token_ids[row] - model->first_token;
    if (index >= 0 && index < model->embedding.out_features)
        linear_row(&model->embedding, index, part);
    else
        memset(part, 0, (size_t)model->hidden_size * sizeof(float));
}

/* A row's place among the embeddings that are given, negative if its token's is looked up. */
static int32_t source_of(const ap_batch *batch, int64_t row) {
    return batch->sources ? batch->sources[row] : -1;
}

/* The positions that a row is rotated by: one for each axis. */
static void axes_of(const ap_batch *batch, int64_t row, int64_t *positions) {
    for (int64_t axis = 0; axis < AP_AXES; axis++)
        positions[axis] =
            batch->axes ? batch->axes[axis * batch->num_tokens + row] : batch->positions[row];
}

static void embed_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_model *model = s->model;
    int32_t hidden = model->hidden_size, source = source_of(s->batch, row);
    float *stream = s->stream + (int64_t)row * hidden;
    if (source >= 0)
        memcpy(stream, s->batch->embeddings + (int64_t)source * hidden,
               (size_t)hidden * sizeof(float));
    else if (!has_linear(&model->embedding))
        memcpy(stream, s->batch->given + (int64_t)row * hidden, (size_t)hidden * sizeof(float));
    else if (!s->part)
        linear_row(&model->embedding, s->batch->token_ids[row], stream);
    if (source < 0 && model->embedding_scale != 1.0f)
        scale_row(stream, model->embedding_scale, hidden);
    if (has_linear(&model->positions)) {
        float *own = s->normed + (int64_t)row * model->hidden_size;
        linear_row(&model->positions, s->batch->positions[row], own);
        add_row(stream, own, model->hidden_size);
    }
    int64_t positions[AP_AXES];
    axes_of(s->batch, row, positions);
    for (int32_t i = 0; i < model->num_ropes; i++) {
        const ap_rope *rope = &model->ropes[i];
        int64_t place = i * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
        rope_angles(rope, positions, s->cosines + place, s->sines + place);
    }
}

static void rotate_and_write_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    const ap_rope *rope = &s->model->ropes[a->rope];
    int64_t place = a->rope * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
    float *heads = s->inputs + (int64_t)row * qkv_width(a);
    float *key = heads + (int64_t)a->num_heads * a->head_dim;
    float *value = key + (int64_t)a->num_kv_heads * a->head_dim;
    size_t keys = a->only_reads ? 0 : (size_t)a->num_kv_heads;
    if (a->keys_are_values) memcpy(value, key, keys * (size_t)a->head_dim * sizeof(float));
    for (size_t i = 0; i < keys && a->value_norm.weight; i++) {
        float *head = value + i * (size_t)a->head_dim;
        rms_norm_row(head, &a->value_norm, a->head_dim, head);
    }
    bool at_once = a->head_norms == AP_NORM_ALL, last = a->head_norms == AP_NORM_ROTATED;
    if (at_once) {
        rms_norm_row(heads, &a->query_norm, a->num_heads * a->head_dim, heads);
        rms_norm_row(key, &a->key_norm, (int32_t)keys * a->head_dim, key);
    }
    for (int32_t i = 0; i < a->num_heads + (int32_t)keys; i++) {
        float *head = heads + (int64_t)i * a->head_dim;
        const ap_norm *norm = i < a->num_heads ? &a->query_norm : &a->key_norm;
        bool normed = norm->weight && !at_once;
        if (normed && !last) rms_norm_row(head, norm, a->head_dim, head);
        rotate_head(head, s->cosines + place, s->sines + place, rope->rotary_dim);
        if (normed && last) rms_norm_row(head, norm, a->head_dim, head);
    }
    if (rope->query_beta != 0.0f)
        scale_row(heads, query_scale(rope, s->batch->positions[row]), a->num_heads * a->head_dim);
    if (a->only_reads) return;
    int32_t of = s->layer->cache_layer;
    bool sealed = is_sealed(s->cache->layers[of].format);
    kv_write_token(a, s->cache, of, key, value,
                   (sealed ? s->open_slots : s->batch->slot_mapping)[row]);
}

/* The two halves of a join: the embedding and the given row, each normed. */
static void join_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_join *join = &s->model->join;
    int32_t hidden = s->model->hidden_size;
    const float *given = s->batch->given + (int64_t)row * hidden;
    float *joined = s->joined + 2 * (int64_t)row * hidden;
    float *stream = s->stream + (int64_t)row * hidden;
    rms_norm_row(stream, &join->token_norm, hidden, joined);
    rms_norm_row(given, &join->hidden_norm, hidden, joined + hidden);
    if (!has_linear(&join->linear))
        memcpy(stream, join->stream_is_normed ? joined + hidden : given,
               (size_t)hidden * sizeof(float));
}

static void embed(step_state *s) {
    s->part = begin_partial(s, true);
    if (s->part) {
        for_rows(s->engine, embed_part_row, s, s->rows);
        sum_parts(s, s->stream, false);
    }
    for_rows(s->engine, embed_row, s, s->rows);
    s->part = NULL;
    if (!s->joined) return;
    for_rows(s->engine, join_row, s, s->rows);
    if (!has_linear(&s->model->join.linear)) return; /* the first layer reads them */
    run_from(s, &s->model->join.linear, AP_NUM_PLACES, s->joined, s->stream, false);
    s->joined = NULL;
}

/* ---- linears ---- */

typedef struct {
    float *logits;
    const ap_model *model;
} logit_ends;

static void end_logits(void *context, int32_t row, int32_t first, int32_t last) {
    const logit_ends *ends = context;
    const ap_model *model = ends->model;
    float *logits = ends->logits + row * (int64_t)model->vocab_size + first;
    if (model->logit_scale != 1.0f) scale_row(logits, model->logit_scale, last - first);
    if (model->logit_softcap != 0.0f) softcap_row(logits, model->logit_softcap, last - first);
}

static void gate_output_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    int32_t heads = a->num_heads * a->head_dim;
    float *mixed = s->mixed + (int64_t)row * heads;
    const float *end = s->inputs + (int64_t)(row + 1) * qkv_width(a);
    if (a->output_gate == AP_GATE_ELEMENTS) {
        sigmoid_gate_row(mixed, end - heads, heads);
        return;
    }
    for (int32_t i = 0; i < a->num_heads; i++)
        scale_row(mixed + i * a->head_dim, 1.0f / (1.0f + expf(-end[i - a->num_heads])),
                  a->head_dim);
}

/* Attend with every row, or with `only_write` only write keys and values to the cache. */
static void run_attention(step_state *s, const ap_norm *post_norm, bool only_write) {
    const ap_attention *a = &s->layer->attention;
    int32_t of = s->layer->cache_layer;
    run_mixer_inputs(s, post_norm);
    for_rows(s->engine, rotate_and_write_row, s, s->rows);
    if (s->num_full && !a->only_reads && is_sealed(s->cache->layers[of].format))
        kv_seal(s->engine, a, s->cache, of, s->num_full, s->full_open, s->full_blocks);
    if (only_write) return;
    attend(s->engine, s->attention, a, s->cache, of, s->batch, s->inputs, qkv_width(a), s->mixed);
    if (a->output_gate) for_rows(s->engine, gate_output_row, s, s->rows);
}

/* Record the stream before a layer; the layer's norm has completed it, and nothing is added yet. */
static void record_stream(const step_state *s, int32_t layer) {
    const ap_batch *batch = s->batch;
    int64_t hidden = s->model->hidden_size;
    for (int32_t i = 0; i < batch->num_recorded; i++)
        for (int64_t row = 0; batch->recorded_layers[i] == layer && row < s->rows; row++)
            memcpy(batch->recorded + (row * batch->num_recorded + i) * hidden,
                   s->stream + row * hidden, (size_t)hidden * sizeof(float));
}

static void add_given_row(void *context, int32_t row) {
    step_state *s = context;
    int64_t hidden = s->model->hidden_size, layer = s->layer - s->model->layers;
    int64_t source = source_of(s->batch, row);
    if (source < 0) return;
    source += layer * s->batch->num_embeddings;
    add_row(s->stream + row * hidden, s->batch->addends + source * hidden, (int32_t)hidden);
}

/* Complete the stream after a layer, and add what is given to it there. */
static void add_given(step_state *s, const ap_norm *post_norm) {
    settle(s, post_norm);
    for_rows(s->engine, add_given_row, s, s->rows);
}

/* Continue with only the rows whose logits are wanted. */
static void select_rows(step_state *s) {
    const ap_batch *batch = s->batch;
    int32_t hidden = s->model->hidden_size;
    int32_t mixed = has_mixer(s->layer) ? mixer_output(s->layer)->in_features : 0;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        memcpy(s->kept + (int64_t)i * hidden, s->stream + batch->rows[i] * hidden,
               (size_t)hidden * sizeof(float));
        memcpy(s->selected + (int64_t)i * mixed, s->mixed + batch->rows[i] * mixed,
               (size_t)mixed * sizeof(float));
    }
    s->stream = s->kept;
    s->mixed = s->selected;
    s->rows = batch->num_rows;
    s->kept_rows = batch->rows;
    find_adapted(s, batch->rows);
}

/* Multiply rows by the head; they are normed and in the form that it needs. */
static void run_head(ap_engine *engine, const ap_model *model, const input *in, float *logits) {
    logit_ends ends = {logits + model->first_token, model};
    bool is_plain = model->logit_scale == 1.0f && model->logit_softcap == 0.0f;
    linear_section section = {
        .linears = {&model->head},
        .in = {form_of(in, &model->head)},
        .out = {logits + model->first_token},
        .out_stride = model->vocab_size,
        .finish = is_plain ? NULL : end_logits,
        .context = &ends,
    };
    run_linear(engine, &section);
    if (engine->group) gather_logits(engine->group, model, logits, in->forms[0].rows);
}

/* The status at the end of a step: AP_OK, unless a rank has ended. */
static ap_status ended(const ap_engine *engine) {
    return engine->group && group_is_broken(engine->group) ? AP_RANK_LOST : AP_OK;
}

/* Start on all ranks or on none: return the worst status. */
static ap_status started(ap_engine *engine, ap_status status) {
    return engine->group ? group_agree(engine->group, status) : status;
}

static void prepare_head_row(void *context, int32_t row) { prepare_row(context, row); }

static ap_status head(ap_engine *engine, const ap_model *model, const float *hidden, int32_t rows,
                      float *logits) {
    const ap_linear *linears[] = {&model->head};
    int64_t bytes = input_bytes(linears, 1, rows);
    ap_status status = ap_reserve(engine, ap_claim_bytes(bytes));
    if ((status = started(engine, status)) || !rows) return status;
    input in = input_of(linears, 1, hidden, rows, ap_claim(engine, bytes));
    if (is_prepared(&model->head)) for_rows(engine, prepare_head_row, &in, rows);
    run_head(engine, model, &in, logits);
    ap_advance(engine);
    return ended(engine);
}

/* Check a step and make room for it. */
static ap_status prepare(step_state *s) {
    if (check_batch(s->model, s->cache, s->batch)) return AP_BAD_ARGUMENT;
    if (!parts_fit(s->engine, s->model, s->rows)) return AP_BAD_ARGUMENT;
    return claim_buffers(s);
}

static ap_status make_room(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                           const ap_batch *batch) {
    step_state s = {.engine = engine, .model = model, .cache = cache, .batch = batch,
                    .rows = batch->num_tokens};
    return prepare(&s);
}

static ap_status step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                      const ap_batch *batch, float *hidden, float *logits) {
    static const ap_norm no_norm = {0};
    step_state s = {.engine = engine, .model = model, .cache = cache, .batch = batch,
                    .rows = batch->num_tokens};
    ap_status status = prepare(&s);
    if ((hidden || logits) && !has_linear(&model->head)) status = AP_BAD_ARGUMENT;
    if ((status = started(engine, status))) return status;
    start_adapters(&s);
    embed(&s);
    if (model->token_inputs.width) make_token_inputs(&s);
    const ap_norm *post_norm = &no_norm;
    for (int32_t i = 0; i < model->num_layers; i++) {
        s.layer = &model->layers[i];
        bool is_last = i == model->num_layers - 1;
        bool stops = is_last && batch->rows && !batch->num_rows;
        if (s.layer->short_conv)
            run_short_conv(&s, post_norm);
        else if (s.layer->gated_delta)
            run_gated_delta(&s, post_norm);
        else if (s.layer->mamba2)
            run_mamba2(&s, post_norm);
        else if (s.layer->latent)
            run_latent(&s, post_norm, stops);
        else if (has_mixer(s.layer))
            run_attention(&s, post_norm, stops);
        if (batch->num_recorded) record_stream(&s, i);
        if (stops) return ended(engine);
        ap_advance(engine);
        if (is_last && batch->rows) select_rows(&s);
        if (s.layer->is_parallel) {
            run_mlp(&s, &no_norm); /* reads the stream before the mixer adds to it */
            ap_advance(engine);
        }
        if (has_mixer(s.layer)) {
            run_into_stream(&s, mixer_output(s.layer), AP_OUT_OF_MIXER, s.mixed,
                            &s.layer->mixer_post_norm, s.layer->mixer_is_part);
            post_norm = &s.layer->mixer_post_norm;
            ap_advance(engine);
        }
        if (has_mlp(s.layer) && !s.layer->is_parallel) {
            run_mlp(&s, post_norm);
            post_norm = &s.layer->mlp_post_norm;
            ap_advance(engine);
        }
        if (has_ending(s.layer)) {
            run_ending(&s);
            post_norm = &no_norm;
        }
        if (i < batch->num_addends) {
            add_given(&s, post_norm);
            post_norm = &no_norm;
        }
    }
    const ap_linear *linears[] = {&model->head};
    if (has_linear(&model->head))
        run_norm(&s, post_norm, &model->final_norm, linears, 1);
    else
        settle(&s, post_norm);
    if (batch->streams)
        memcpy(batch->streams, s.stream, (size_t)s.rows * model->hidden_size * sizeof(float));
    if (hidden)
        memcpy(hidden, s.normed, (size_t)s.rows * model->hidden_size * sizeof(float));
    if (logits) run_head(engine, model, &s.in, logits);
    return ended(engine);
}

#endif
