/* One whole step of a decoder: every row of a ragged batch through all layers.
 *
 * The order of the paper, as in appliance/model/layers.py. Between two linears everything that
 * belongs to a row is done in one go: norms, sums, rotation, and the quantized form that the next
 * linear wants. After the last layer's attention only the rows whose logits are wanted go on.
 */
#ifndef AP_STEP_H
#define AP_STEP_H

#include "gated_delta.h"
#include "latent.h"
#include "mamba2.h"
#include "token_input.h"

/* Whether what rotates is pairs inside a head. */
static bool rope_fits(const ap_model *model, const ap_attention *a) {
    if (a->rope < 0 || a->rope >= model->num_ropes) return false;
    int32_t rotary_dim = model->ropes[a->rope].rotary_dim;
    return rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= a->head_dim;
}

/* Whether a slot of the states has room for what a layer keeps there. */
static bool filters_fit(const ap_cache *cache, const ap_filters *f) {
    if (f->width < 1 || f->taps < 2 || f->taps > AP_MOST_TAPS || f->state < 0) return false;
    int64_t bytes = (int64_t)(f->taps - 1) * f->width * (int64_t)sizeof(float);
    return f->state % 64 == 0 && f->state + bytes <= cache->state_bytes;
}

static bool delta_fits(const ap_cache *cache, const ap_gated_delta *d) {
    if (d->num_key_heads < 1 || d->num_value_heads % d->num_key_heads) return false;
    if (d->key_dim < AP_LANES || d->key_dim % AP_LANES || d->state < 0) return false;
    if (d->value_dim < AP_LANES || d->value_dim % AP_LANES || d->state % 64) return false;
    int32_t width = 2 * d->num_key_heads * d->key_dim + d->num_value_heads * d->value_dim;
    int64_t floats = (int64_t)d->num_value_heads * d->key_dim * d->value_dim;
    return d->filters.width == width && filters_fit(cache, &d->filters) &&
           d->state + floats * (int64_t)sizeof(float) <= cache->state_bytes;
}

static bool slots_fit(const ap_cache *cache, const ap_batch *batch) {
    if (!cache->states || !batch->state_slots) return false;
    for (int32_t i = 0; i < batch->num_seqs; i++)
        if (batch->state_slots[i] < 0 || batch->state_slots[i] >= cache->num_states) return false;
    return true;
}

static bool mixer_supported(const ap_model *model, const ap_cache *cache, const ap_batch *batch,
                            const ap_layer *layer) {
    if (layer->short_conv)
        return slots_fit(cache, batch) && filters_fit(cache, &layer->short_conv->filters);
    if (layer->gated_delta)
        return slots_fit(cache, batch) && delta_fits(cache, layer->gated_delta);
    if (layer->mamba2)
        return slots_fit(cache, batch) && filters_fit(cache, &layer->mamba2->filters) &&
               mamba2_fits(cache, layer->mamba2);
    if (!has_mixer(layer)) return has_mlp(layer);
    if (layer->latent)
        return attention_supported(&layer->attention, cache, layer->cache_layer) &&
               latent_fits(model, cache, layer);
    const ap_attention *a = &layer->attention;
    if (!attention_supported(a, cache, layer->cache_layer) || !rope_fits(model, a)) return false;
    return !is_sealed(cache->layers[layer->cache_layer].format) || open_blocks_fit(cache, batch);
}

static bool position_fits(const ap_model *model, int64_t position) {
    const ap_linear *table = &model->positions;
    return !has_linear(table) || (position >= 0 && position < table->out_features);
}

static bool join_fits(const ap_model *model, const ap_batch *batch) {
    const ap_linear *join = &model->join.linear, *linears[MOST_FORMS];
    if (!has_join(model)) return true;
    if (!batch->given || !model->num_layers) return false;
    int32_t width = 2 * model->hidden_size;
    if (has_linear(join))
        return join->in_features == width && join->out_features == model->hidden_size;
    if (!is_attention(model->layers) || batch->adapter_slots) return false;
    int32_t count = mixer_linears(model->layers, linears);
    for (int32_t i = 0; i < count; i++)
        if (linears[i]->in_features != width) return false;
    return true;
}

static bool records_fit(const ap_model *model, const ap_batch *batch) {
    if (!batch->num_recorded) return true;
    if (batch->num_recorded < 0 || !batch->recorded_layers || !batch->recorded) return false;
    for (int32_t i = 0; i < batch->num_recorded; i++)
        if (batch->recorded_layers[i] < 0 || batch->recorded_layers[i] >= model->num_layers)
            return false;
    return true;
}

/* Whether a step's rows and what they see lie in blocks that there are. */
static bool places_fit(const ap_cache *cache, const ap_batch *batch) {
    int64_t slots = (int64_t)cache->num_blocks * cache->block_size;
    for (int32_t i = 0; i < batch->num_tokens; i++)
        if (batch->slot_mapping[i] < 0 || batch->slot_mapping[i] >= slots) return false;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t blocks = ceil_div(batch->context_lens[i], cache->block_size);
        if (blocks > batch->table_width) return false;
        for (int32_t j = 0; j < blocks; j++) {
            int32_t block = batch->block_tables[(int64_t)i * batch->table_width + j];
            if (block < 0 || block >= cache->num_blocks) return false;
        }
    }
    return true;
}

static ap_status check_batch(const ap_model *model, const ap_cache *cache, const ap_batch *batch) {
    int64_t tokens = has_join(model) ? model->embedding.out_features : model->vocab_size;
    for (int32_t i = 0; i < batch->num_tokens; i++) {
        if (batch->token_ids[i] < 0 || batch->token_ids[i] >= tokens) return AP_BAD_ARGUMENT;
        if (!position_fits(model, batch->positions[i])) return AP_BAD_ARGUMENT;
    }
    if (!places_fit(cache, batch)) return AP_BAD_ARGUMENT;
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_layer *layer = &model->layers[i];
        if (!mixer_supported(model, cache, batch, layer)) return AP_BAD_ARGUMENT;
        if (!experts_supported(model, layer)) return AP_BAD_ARGUMENT;
    }
    if (!join_fits(model, batch) || !records_fit(model, batch)) return AP_BAD_ARGUMENT;
    if (!token_inputs_supported(model) || !adapters_fit(model, batch)) return AP_BAD_ARGUMENT;
    if (batch->num_rows < 0 || batch->num_rows > batch->num_tokens) return AP_BAD_ARGUMENT;
    for (int32_t i = 0; batch->rows && i < batch->num_rows; i++)
        if (batch->rows[i] < 0 || batch->rows[i] >= batch->num_tokens) return AP_BAD_ARGUMENT;
    return AP_OK;
}

/* ---- what is done with one row ---- */

/* A rank's part of a row of the embedding: all of it, or nothing. */
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

static void embed_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_model *model = s->model;
    float *stream = s->stream + (int64_t)row * model->hidden_size;
    if (!s->part) linear_row(&model->embedding, s->batch->token_ids[row], stream);
    if (model->embedding_scale != 1.0f)
        scale_row(stream, model->embedding_scale, model->hidden_size);
    if (has_linear(&model->positions)) {
        float *own = s->normed + (int64_t)row * model->hidden_size;
        linear_row(&model->positions, s->batch->positions[row], own);
        add_row(stream, own, model->hidden_size);
    }
    for (int32_t i = 0; i < model->num_ropes; i++) {
        const ap_rope *rope = &model->ropes[i];
        int64_t place = i * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
        rope_angles(rope, s->batch->positions[row], s->cosines + place, s->sines + place);
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
    for (int32_t i = 0; i < a->num_heads + (int32_t)keys; i++) {
        float *head = heads + (int64_t)i * a->head_dim;
        const ap_norm *norm = i < a->num_heads ? &a->query_norm : &a->key_norm;
        if (norm->weight) rms_norm_row(head, norm, a->head_dim, head);
        rotate_head(head, s->cosines + place, s->sines + place, rope->rotary_dim);
    }
    if (rope->query_beta != 0.0f)
        scale_row(heads, query_scale(rope, s->batch->positions[row]), a->num_heads * a->head_dim);
    if (a->only_reads) return;
    int32_t of = s->layer->cache_layer;
    bool sealed = is_sealed(s->cache->layers[of].format);
    kv_write_token(a, s->cache, of, key, value,
                   (sealed ? s->open_slots : s->batch->slot_mapping)[row]);
}

/* The two halves of a join: the embedding and what the target said, each normed. */
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
    const float *gates = s->inputs + (int64_t)(row + 1) * qkv_width(a) - heads;
    sigmoid_gate_row(s->mixed + (int64_t)row * heads, gates, heads);
}

/* Attend with every row, or with `only_write` bring keys and values into the cache alone. */
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

/* Record the stream before a layer, which has normed it, but added nothing yet. */
static void record_stream(const step_state *s, int32_t layer) {
    const ap_batch *batch = s->batch;
    int64_t hidden = s->model->hidden_size;
    for (int32_t i = 0; i < batch->num_recorded; i++)
        for (int64_t row = 0; batch->recorded_layers[i] == layer && row < s->rows; row++)
            memcpy(batch->recorded + (row * batch->num_recorded + i) * hidden,
                   s->stream + row * hidden, (size_t)hidden * sizeof(float));
}

/* Go on with the rows whose logits are wanted only. */
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

/* Multiply rows that are normed, and in the forms that the head wants, by the head. */
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

/* How a step ends: well, unless a rank has ended. */
static ap_status ended(const ap_engine *engine) {
    return engine->group && group_is_broken(engine->group) ? AP_RANK_LOST : AP_OK;
}

/* All ranks start, or none. */
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
    if (is_quantized(&model->head)) for_rows(engine, prepare_head_row, &in, rows);
    run_head(engine, model, &in, logits);
    ap_advance(engine);
    return ended(engine);
}

static ap_status step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                      const ap_batch *batch, float *hidden, float *logits) {
    static const ap_norm no_norm = {0};
    step_state s = {.engine = engine, .model = model, .cache = cache, .batch = batch,
                    .rows = batch->num_tokens};
    ap_status status = check_batch(model, cache, batch);
    if (!parts_fit(engine, model, s.rows)) status = AP_BAD_ARGUMENT;
    if (!status) status = claim_buffers(&s);
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
            run_mlp(&s, &no_norm); /* reads the stream, to which the mixer adds after it */
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
    }
    const ap_linear *linears[] = {&model->head};
    run_norm(&s, post_norm, &model->final_norm, linears, 1);
    if (batch->streams)
        memcpy(batch->streams, s.stream, (size_t)s.rows * model->hidden_size * sizeof(float));
    if (hidden)
        memcpy(hidden, s.normed, (size_t)s.rows * model->hidden_size * sizeof(float));
    if (logits) run_head(engine, model, &s.in, logits);
    return ended(engine);
}

#endif
