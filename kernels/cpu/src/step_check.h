/* Checks that a step can run: its rows, blocks, slots and the model's parts fit one another. */
#ifndef AP_STEP_CHECK_H
#define AP_STEP_CHECK_H

#include "gated_delta.h"
#include "latent.h"
#include "mamba2.h"
#include "token_input.h"

/* True if the rotary dimensions are pairs within a head. */
static bool rope_fits(const ap_model *model, const ap_attention *a) {
    if (a->rope < 0 || a->rope >= model->num_ropes) return false;
    int32_t rotary_dim = model->ropes[a->rope].rotary_dim;
    return rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= a->head_dim;
}

/* True if norms over all heads have weights, and keys to norm. */
static bool head_norms_fit(const ap_attention *a) {
    if (a->head_norms < AP_NORM_EACH || a->head_norms > AP_NORM_ROTATED) return false;
    if (a->head_norms != AP_NORM_ALL) return true;
    return a->query_norm.weight && a->key_norm.weight && !a->only_reads;
}

/* True if a state slot has room for the inputs that a layer's filters keep. */
static bool filters_fit(const ap_cache *cache, const ap_filters *f) {
    if (f->width < 1 || f->taps < 2 || f->taps > AP_MOST_TAPS || f->state < 0) return false;
    int64_t bytes = (int64_t)(f->taps - 1) * f->width * kept_bytes(cache->state_format);
    return f->state % 64 == 0 && f->state + bytes <= cache->state_bytes;
}

static bool delta_fits(const ap_cache *cache, const ap_gated_delta *d) {
    if (d->num_key_heads < 1 || d->num_value_heads % d->num_key_heads) return false;
    if (d->key_dim < AP_LANES || d->key_dim % AP_LANES || d->state < 0) return false;
    if (d->value_dim < AP_LANES || d->value_dim % AP_LANES || d->state % 64) return false;
    int32_t width = 2 * d->num_key_heads * d->key_dim + d->num_value_heads * d->value_dim;
    int64_t numbers = (int64_t)d->num_value_heads * d->key_dim * d->value_dim;
    return d->filters.width == width && filters_fit(cache, &d->filters) &&
           (cache->state_format == AP_F32 || d->key_dim <= MOST_NEAR) &&
           d->state + numbers * kept_bytes(cache->state_format) <= cache->state_bytes;
}

static bool slots_fit(const ap_cache *cache, const ap_batch *batch) {
    if (!cache->states || !batch->state_slots) return false;
    int32_t format = cache->state_format;
    if (format != AP_F32 && format != AP_F16 && format != AP_BF16) return false;
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
    if (!head_norms_fit(a)) return false;
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

/* True if a part of a model has an input and an output: without an embedding it begins with a given
 * stream, without a head it ends with the stream of all rows. */
static bool ends_fit(const ap_model *model, const ap_batch *batch) {
    if (!has_linear(&model->embedding) && (!batch->given || has_join(model))) return false;
    return has_linear(&model->head) || (batch->streams && !batch->rows);
}

static bool records_fit(const ap_model *model, const ap_batch *batch) {
    if (!batch->num_recorded) return true;
    if (batch->num_recorded < 0 || !batch->recorded_layers || !batch->recorded) return false;
    for (int32_t i = 0; i < batch->num_recorded; i++)
        if (batch->recorded_layers[i] < 0 || batch->recorded_layers[i] >= model->num_layers)
            return false;
    return true;
}

/* True if rows that take an embedding or an addend take one that is there. */
static bool embeddings_fit(const ap_model *model, const ap_batch *batch) {
    int32_t count = batch->num_addends;
    if (count < 0 || (count && count >= model->num_layers)) return false;
    if (!batch->sources) return !count;
    if (!batch->embeddings || (count && !batch->addends)) return false;
    for (int32_t i = 0; i < batch->num_tokens; i++)
        if (batch->sources[i] >= batch->num_embeddings) return false;
    return true;
}

/* True if the sequences after one go on with its tokens, up to so many, in the blocks of its
 * table. */
static bool goes_on(const ap_cache *cache, const ap_batch *batch, int32_t seq, int32_t tokens) {
    const int32_t *table = batch->block_tables + (int64_t)seq * batch->table_width;
    for (int32_t end = batch->context_lens[seq]; end < tokens; end = batch->context_lens[seq]) {
        if (!batch->open_blocks || ++seq == batch->num_seqs) return false;
        int32_t rows = batch->query_start[seq + 1] - batch->query_start[seq];
        if (!rows || batch->context_lens[seq] - rows != end) return false;
        int32_t block = (batch->context_lens[seq] - 1) / cache->block_size;
        if (block >= batch->table_width || block != end / cache->block_size) return false;
        if (end % cache->block_size) return false;
        if (table[block] != batch->block_tables[(int64_t)seq * batch->table_width + block])
            return false;
    }
    return true;
}

/* True if the rows of each sequence see tokens that exist, and none fewer than the row before. */
static bool sights_fit(const ap_cache *cache, const ap_batch *batch) {
    if (!batch->sees) return true;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t start = batch->query_start[i], end = batch->query_start[i + 1];
        int32_t seen = 0, own = batch->context_lens[i] - (end - start);
        for (int32_t row = start; row < end; row++) {
            if (batch->sees[row] < seen || batch->sees[row] <= own++) return false;
            seen = batch->sees[row];
        }
        if (!goes_on(cache, batch, i, seen)) return false;
    }
    return true;
}

/* True if what linears with bounds say is clipped before it is added to the stream. */
static bool bounds_fit(const ap_layer *layer) {
    if (layer->attention.output.bounds && !layer->mixer_post_norm.weight) return false;
    return !layer->down.bounds || layer->mlp_post_norm.weight;
}

/* True if a step's rows and the tokens that they see lie in existing blocks. */
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
    if (!places_fit(cache, batch) || !sights_fit(cache, batch)) return AP_BAD_ARGUMENT;
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_layer *layer = &model->layers[i];
        if (!mixer_supported(model, cache, batch, layer)) return AP_BAD_ARGUMENT;
        if (!experts_supported(model, layer) || !bounds_fit(layer)) return AP_BAD_ARGUMENT;
    }
    if (!join_fits(model, batch) || !records_fit(model, batch)) return AP_BAD_ARGUMENT;
    if (!ends_fit(model, batch) || !embeddings_fit(model, batch)) return AP_BAD_ARGUMENT;
    if (!token_inputs_supported(model) || !adapters_fit(model, batch)) return AP_BAD_ARGUMENT;
    if (batch->num_rows < 0 || batch->num_rows > batch->num_tokens) return AP_BAD_ARGUMENT;
    for (int32_t i = 0; batch->rows && i < batch->num_rows; i++)
        if (batch->rows[i] < 0 || batch->rows[i] >= batch->num_tokens) return AP_BAD_ARGUMENT;
    return AP_OK;
}

#endif
