/* Multi-head latent attention (arXiv 2405.04434): all heads read one latent of each token.
 *
 * A token's cache is its latent followed by a rotated key; the first half takes the place of a
 * head's keys in a page, the second that of its values. Queries are mapped into the latents' space
 * and results out of it, head by head, so heads' keys and values are never computed. A row's
 * tokens are summed page by page from the first, so that no bit depends on how a prompt is cut or
 * on other sequences.
 */
#ifndef AP_LATENT_H
#define AP_LATENT_H

#include "mlp.h"

/* Pairs of a row and a head that read a page together. */
#define LATENT_PAIRS 8

static int32_t rotary_of(const ap_layer *layer) {
    return latent_width(layer) - layer->latent->latent;
}

/* Multiply columns of the rows of a mixer's inputs by a linear. */
static void run_columns(step_state *s, const ap_linear *linear, int32_t first, float *out,
                        int32_t out_stride) {
    const ap_linear *linears[] = {linear};
    s->in = input_of(linears, 1, s->inputs + first, s->rows, s->codes);
    for (int32_t i = 0; i < s->in.num_forms; i++) s->in.forms[i].stride = inputs_width(s->layer);
    if (is_prepared(linear)) for_rows(s->engine, prepare_input_row, s, s->rows);
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&s->in, linear)},
        .out = {out},
        .out_stride = out_stride,
    };
    run_linear(s->engine, &section);
}

static void write_latent_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    const ap_latent *l = s->layer->latent;
    const ap_rope *rope = &s->model->ropes[a->rope];
    int64_t place = a->rope * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
    latent_places at = latent_places_of(s->layer);
    float *in = s->inputs + row * (int64_t)at.width, *token = in + at.token;
    if (l->query_norm.weight) rms_norm_row(in, &l->query_norm, a->qkv[0].out_features, in);
    rms_norm_row(token, &l->norm, l->latent, token);
    rotate_head(token + l->latent, s->cosines + place, s->sines + place, rope->rotary_dim);
    kv_write_token(a, s->cache, s->layer->cache_layer, token, token + a->head_dim,
                   s->batch->slot_mapping[row]);
}

/* Rotate each query head's rotary part, and move it to its place in the latents' space. */
static void place_queries_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    const ap_latent *l = s->layer->latent;
    const ap_rope *rope = &s->model->ropes[a->rope];
    int64_t place = a->rope * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
    latent_places at = latent_places_of(s->layer);
    int32_t rotary = rotary_of(s->layer), head_width = l->plain_dim + rotary;
    float *in = s->inputs + row * (int64_t)at.width, *heads = in + at.heads;
    if (rope->query_beta != 0.0f)
        scale_row(heads, query_scale(rope, s->batch->positions[row]), a->num_heads * head_width);
    for (int32_t i = 0; i < a->num_heads; i++) {
        float *turning = heads + i * head_width + l->plain_dim;
        rotate_head(turning, s->cosines + place, s->sines + place, rope->rotary_dim);
        memcpy(in + at.queries + i * latent_width(s->layer) + l->latent, turning,
               (size_t)rotary * sizeof(float));
    }
}

static float float_at(int format, const uint8_t *elements, int32_t index) {
    uint16_t half;
    float whole;
    if (format == AP_F32) {
        memcpy(&whole, elements + 4 * index, 4);
        return whole;
    }
    memcpy(&half, elements + 2 * index, 2);
    return format == AP_F16 ? half_to_float(half) : bfloat_to_float(half);
}

static float scale_at(const uint8_t *scales, int32_t token) {
    uint16_t half;
    memcpy(&half, scales + 2 * token, 2);
    return half_to_float(half);
}

/* Dequantize the tokens of a page, (AP_LANES, 2 * dim). */
static void read_latents(int format, const uint8_t *page, const ap_page *at, int32_t dim,
                         float *out) {
    for (int32_t j = 0; j < AP_LANES; j++, out += 2 * dim) {
        if (format != AP_INT8) {
            for (int32_t d = 0; d < dim; d++) {
                out[d] = float_at(format, page, AP_LANES * d + j);
                out[dim + d] = float_at(format, page + at->values, dim * j + d);
            }
            continue;
        }
        float first = scale_at(page + at->scales, j), second = scale_at(page + at->value_scales, j);
        const uint8_t *keys = page + 4 * j, *values = page + at->values + j / 4 * 4 * dim + j % 4;
        for (int32_t d = 0; d < dim; d++) {
            out[d] = (float)(keys[d / 4 * 4 * AP_LANES + d % 4] - 128) * first;
            out[dim + d] = (float)(int8_t)values[4 * d] * second;
        }
    }
}

static float dot(const float *a, const float *b, int32_t width) {
    vfloat sums[2] = {vf_zero(), vf_zero()};
    for (int32_t i = 0; i < width; i += 2 * AP_LANES)
        for (int32_t j = 0; j < 2; j++)
            sums[j] = vf_fma(vf_load(a + i + j * AP_LANES), vf_load(b + i + j * AP_LANES), sums[j]);
    return vf_sum(vf_add(sums[0], sums[1]));
}

/* A pair's result so far: sum / total, with weights of e^(score - most). */
typedef struct {
    float most;
    float total;
    float *sum; /* (latent,) */
} latent_sum;

/* Add the first `count` tokens of a page. */
static void add_page(latent_sum *to, const float *query, const float *tokens, int32_t count,
                     int32_t width, int32_t latent, float scale) {
    float weights[AP_LANES], most = to->most;
    for (int32_t j = 0; j < count; j++) {
        weights[j] = dot(query, tokens + j * width, width) * scale;
        if (!(weights[j] <= most)) most = weights[j]; /* NaN stays */
    }
    float kept = expf(to->most - most), total = to->total * kept;
    for (int32_t j = 0; j < count; j++) {
        weights[j] = expf(weights[j] - most);
        total += weights[j];
    }
    to->most = most;
    to->total = total;
    for (int32_t i = 0; i < latent; i += AP_LANES) {
        int32_t left = latent - i;
        vfloat sum = vf_mul(load_next(to->sum + i, left), vf_set(kept));
        for (int32_t j = 0; j < count; j++)
            sum = vf_fma(vf_set(weights[j]), load_next(tokens + j * width + i, left), sum);
        store_next(to->sum + i, sum, left);
    }
}

static int32_t latent_units(const step_state *s, int32_t seq) {
    const ap_batch *batch = s->batch;
    int32_t rows = batch->query_start[seq + 1] - batch->query_start[seq];
    return ceil_div((int64_t)rows * s->layer->attention.num_heads, LATENT_PAIRS);
}

/* Attend with some pairs of a row and a head; the result replaces the query. */
static void latent_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    const ap_batch *batch = s->batch;
    int32_t seq = 0;
    for (; chunk >= latent_units(s, seq); seq++) chunk -= latent_units(s, seq);
    int32_t rows = batch->query_start[seq + 1] - batch->query_start[seq];
    int32_t first = chunk * LATENT_PAIRS, last = first + LATENT_PAIRS;
    if (last > rows * a->num_heads) last = rows * a->num_heads;
    int32_t width = latent_width(s->layer), latent = s->layer->latent->latent;
    int32_t before = batch->context_lens[seq] - rows; /* tokens of earlier steps */
    latent_places at = latent_places_of(s->layer);
    page_store store = blocks_of(s->cache, s->layer->cache_layer, a->head_dim);
    float tokens[AP_LANES * AP_MOST_LATENT] __attribute__((aligned(64)));
    float attended[LATENT_PAIRS * AP_MOST_LATENT] __attribute__((aligned(64)));
    latent_sum sums[LATENT_PAIRS];
    memset(attended, 0, (size_t)(last - first) * (size_t)latent * sizeof(float));
    for (int32_t i = 0; i < last - first; i++)
        sums[i] = (latent_sum){-INFINITY, 0.0f, attended + i * latent};
    int32_t seen = before + (last - 1) / a->num_heads + 1; /* by the last pair */
    for (int32_t begin = 0; begin < seen; begin += AP_LANES) {
        const int32_t *table = batch->block_tables + (int64_t)seq * batch->table_width;
        int32_t block = table[begin / s->cache->block_size];
        const uint8_t *page =
            page_in(&store, block, 0, begin % s->cache->block_size / AP_LANES);
        read_latents(store.format, page, &store.at, a->head_dim, tokens);
        for (int32_t pair = first; pair < last; pair++) {
            int32_t row = pair / a->num_heads, head = pair % a->num_heads;
            int32_t count = before + row + 1 - begin;
            if (count <= 0) continue;
            const float *query = s->inputs +
                                 (batch->query_start[seq] + row) * (int64_t)at.width + at.queries +
                                 head * width;
            add_page(&sums[pair - first], query, tokens, count < AP_LANES ? count : AP_LANES, width,
                     latent, a->scale);
        }
    }
    for (int32_t pair = first; pair < last; pair++) {
        int32_t row = pair / a->num_heads, head = pair % a->num_heads;
        float *out = s->inputs + (batch->query_start[seq] + row) * (int64_t)at.width + at.queries +
                     head * width;
        const latent_sum *sum = &sums[pair - first];
        memcpy(out, sum->sum, (size_t)latent * sizeof(float));
        scale_row(out, 1.0f / sum->total, latent);
    }
}

/* Attend with every row, or with `only_write` only write latents to the cache. */
static void run_latent(step_state *s, const ap_norm *post_norm, bool only_write) {
    const ap_attention *a = &s->layer->attention;
    const ap_latent *l = s->layer->latent;
    latent_places at = latent_places_of(s->layer);
    int32_t width = latent_width(s->layer), head_width = l->plain_dim + rotary_of(s->layer);
    run_mixer_inputs(s, post_norm);
    for_rows(s->engine, write_latent_row, s, s->rows);
    if (only_write) return;
    if (has_linear(&l->queries))
        run_columns(s, &l->queries, 0, s->inputs + at.heads, at.width);
    for_rows(s->engine, place_queries_row, s, s->rows);
    for (int32_t i = 0; i < a->num_heads; i++)
        run_columns(s, &l->keys[i], at.heads + i * head_width, s->inputs + at.queries + i * width,
                    at.width);
    int32_t units = 0;
    for (int32_t seq = 0; seq < s->batch->num_seqs; seq++) units += latent_units(s, seq);
    ap_pool_run(s->engine->pool, latent_chunk, s, units);
    for (int32_t i = 0; i < a->num_heads; i++)
        run_columns(s, &l->values[i], at.queries + i * width, s->mixed + i * l->value_dim,
                    a->num_heads * l->value_dim);
}

static bool latent_fits(const ap_model *model, const ap_cache *cache, const ap_layer *layer) {
    const ap_attention *a = &layer->attention;
    const ap_latent *l = layer->latent;
    int32_t width = latent_width(layer), format = cache->layers[layer->cache_layer].format;
    int32_t rotary = width - l->latent, heads = a->num_heads * (l->plain_dim + rotary);
    const ap_linear *queries = has_linear(&l->queries) ? &l->queries : &a->qkv[0];
    if (is_sealed(format) || format == AP_INT4 || format == AP_FP8) return false;
    if (a->num_kv_heads != 1 || a->num_qkv != 2 || a->head_dim % AP_LANES) return false;
    if (width > AP_MOST_LATENT || l->latent < 1 || rotary < 2 || l->plain_dim < 1) return false;
    if (a->rope < 0 || a->rope >= model->num_ropes) return false;
    if (model->ropes[a->rope].rotary_dim != rotary || cache->layers[layer->cache_layer].key_mean)
        return false;
    return queries->out_features == heads && a->qkv[1].out_features == width &&
           a->output.in_features == a->num_heads * l->value_dim;
}

#endif
