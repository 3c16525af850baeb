/* One whole step of a decoder: every row of a ragged batch through all layers.
 *
 * The order of the paper, as in appliance/model/layers.py. Between two linears everything that
 * belongs to a row is done in one go: norms, sums, rotation, and the quantized form that the next
 * linear wants. After the last layer's attention only the rows whose logits are wanted go on.
 */
#ifndef AP_STEP_H
#define AP_STEP_H

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "section.h"

typedef struct {
    ap_engine *engine;
    const ap_model *model;
    const ap_cache *cache;
    const ap_batch *batch;
    int32_t rows;    /* that are still computed */
    float *stream;   /* (rows, hidden_size), the residual */
    float *normed;   /* (rows, hidden_size), input of qkv, of gate and up, of the head */
    float *added;    /* (rows, hidden_size), what a post norm is taken of */
    float *kept;     /* (rows, hidden_size), the stream's rows after a selection */
    float *qkv;      /* (rows, heads of all three) */
    float *attended; /* (rows, query heads) */
    float *selected; /* (rows, query heads), attended rows after a selection */
    float *gate;     /* (rows, intermediate) */
    float *up;       /* the same */
    float *cosines;  /* (num_ropes, rows, rotary_dim / 2) */
    float *sines;
    int64_t rope_stride; /* between two ropes */
    char *codes;         /* quantized inputs */
    char *attention;     /* workspace of attend */
    /* with sealed layers only */
    int64_t *open_slots;  /* (rows,), open page * block_size + offset */
    int32_t *full_pages;  /* (num_full,), open pages that this step fills */
    int32_t *full_blocks; /* (num_full,), what will be made of them */
    int32_t num_full;
    /* what the present section works on */
    const ap_layer *layer;
    int32_t index; /* of the layer */
    const ap_norm *post_norm;
    const ap_norm *norm;
    input in;
} step_state;

static int32_t qkv_width(const ap_attention *a) {
    return (a->num_heads + 2 * a->num_kv_heads) * a->head_dim;
}

static void qkv_linears(const ap_attention *a, const ap_linear **linears) {
    for (int32_t i = 0; i < a->num_qkv; i++) linears[i] = &a->qkv[i];
}

/* ---- memory ---- */

typedef struct {
    int64_t qkv, heads, intermediate, rotary, codes, attention;
    bool post_norms, sealed;
} step_widths;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

static step_widths widest(const ap_engine *engine, const ap_model *model, const ap_cache *cache,
                          const ap_batch *batch) {
    step_widths w = {0};
    int32_t rows = batch->num_tokens;
    for (int32_t i = 0; i < model->num_ropes; i++)
        w.rotary = larger(w.rotary, model->ropes[i].rotary_dim / 2);
    const ap_linear *head[] = {&model->head};
    w.codes = input_bytes(head, 1, rows);
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_layer *layer = &model->layers[i];
        const ap_attention *a = &layer->attention;
        const ap_linear *linears[MOST_FORMS];
        w.qkv = larger(w.qkv, qkv_width(a));
        w.heads = larger(w.heads, (int64_t)a->num_heads * a->head_dim);
        w.intermediate = larger(w.intermediate, layer->gate.out_features);
        w.sealed |= is_sealed(cache->layers[i].format);
        w.post_norms |= layer->attention_post_norm.weight || layer->mlp_post_norm.weight;
        qkv_linears(a, linears);
        w.codes = larger(w.codes, input_bytes(linears, a->num_qkv, rows));
        linears[0] = &layer->gate, linears[1] = &layer->up;
        w.codes = larger(w.codes, input_bytes(linears, 2, rows));
        linears[0] = &a->output;
        w.codes = larger(w.codes, input_bytes(linears, 1, rows));
        linears[0] = &layer->down;
        w.codes = larger(w.codes, input_bytes(linears, 1, rows));
        w.attention = larger(w.attention, attend_bytes(engine, a, cache, i, batch));
    }
    return w;
}

static void find_open_slots(step_state *s) {
    const ap_batch *batch = s->batch;
    int32_t size = s->cache->block_size;
    for (int32_t i = 0; i < batch->num_seqs; i++)
        for (int32_t row = batch->query_start[i]; row < batch->query_start[i + 1]; row++) {
            int32_t offset = (int32_t)(batch->slot_mapping[row] % size);
            s->open_slots[row] = (int64_t)batch->open_pages[i] * size + offset;
            if (offset + 1 < size) continue;
            s->full_pages[s->num_full] = batch->open_pages[i];
            s->full_blocks[s->num_full++] = (int32_t)(batch->slot_mapping[row] / size);
        }
}

static ap_status claim_buffers(step_state *s) {
    const ap_model *model = s->model;
    step_widths w = widest(s->engine, model, s->cache, s->batch);
    int64_t rows = s->rows, hidden = rows * model->hidden_size;
    bool selects = s->batch->rows != NULL;
    struct { float **buffer; int64_t count; } floats[] = {
        {&s->stream, hidden},
        {&s->normed, hidden},
        {&s->added, w.post_norms ? hidden : 0},
        {&s->kept, selects ? hidden : 0},
        {&s->qkv, rows * w.qkv},
        {&s->attended, rows * w.heads},
        {&s->selected, selects ? rows * w.heads : 0},
        {&s->gate, rows * w.intermediate},
        {&s->up, rows * w.intermediate},
        {&s->cosines, model->num_ropes * rows * w.rotary},
        {&s->sines, model->num_ropes * rows * w.rotary},
    };
    const size_t count = sizeof floats / sizeof *floats;
    int64_t open_slots = w.sealed ? rows * (int64_t)sizeof(int64_t) : 0;
    int64_t full = w.sealed ? s->batch->num_seqs * (int64_t)sizeof(int32_t) : 0;
    int64_t bytes = ap_claim_bytes(w.codes) + ap_claim_bytes(w.attention) +
                    ap_claim_bytes(open_slots) + 2 * ap_claim_bytes(full);
    for (size_t i = 0; i < count; i++)
        bytes += ap_claim_bytes(floats[i].count * (int64_t)sizeof(float));
    if (ap_reserve(s->engine, bytes)) return AP_NO_MEMORY;
    for (size_t i = 0; i < count; i++)
        *floats[i].buffer = ap_claim(s->engine, floats[i].count * (int64_t)sizeof(float));
    s->codes = ap_claim(s->engine, w.codes);
    s->attention = ap_claim(s->engine, w.attention);
    s->open_slots = ap_claim(s->engine, open_slots);
    s->full_pages = ap_claim(s->engine, full);
    s->full_blocks = ap_claim(s->engine, full);
    if (w.sealed) find_open_slots(s);
    s->rope_stride = rows * w.rotary;
    return AP_OK;
}

/* Whether what rotates is pairs inside a head. */
static bool rope_fits(const ap_model *model, const ap_attention *a) {
    if (a->rope < 0 || a->rope >= model->num_ropes) return false;
    int32_t rotary_dim = model->ropes[a->rope].rotary_dim;
    return rotary_dim >= 0 && rotary_dim % 2 == 0 && rotary_dim <= a->head_dim;
}

static ap_status check_batch(const ap_model *model, const ap_cache *cache, const ap_batch *batch) {
    int64_t slots = (int64_t)cache->num_blocks * cache->block_size;
    for (int32_t i = 0; i < batch->num_tokens; i++) {
        if (batch->token_ids[i] < 0 || batch->token_ids[i] >= model->vocab_size)
            return AP_BAD_ARGUMENT;
        if (batch->slot_mapping[i] < 0 || batch->slot_mapping[i] >= slots) return AP_BAD_ARGUMENT;
    }
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t blocks = ceil_div(batch->context_lens[i], cache->block_size);
        if (blocks > batch->table_width) return AP_BAD_ARGUMENT;
        for (int32_t j = 0; j < blocks; j++) {
            int32_t block = batch->block_tables[(int64_t)i * batch->table_width + j];
            if (block < 0 || block >= cache->num_blocks) return AP_BAD_ARGUMENT;
        }
    }
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_attention *a = &model->layers[i].attention;
        if (!attention_supported(a, cache, i) || !rope_fits(model, a)) return AP_BAD_ARGUMENT;
        if (is_sealed(cache->layers[i].format) && !open_pages_fit(cache, batch))
            return AP_BAD_ARGUMENT;
    }
    for (int32_t i = 0; batch->rows && i < batch->num_rows; i++)
        if (batch->rows[i] < 0 || batch->rows[i] >= batch->num_tokens) return AP_BAD_ARGUMENT;
    return AP_OK;
}

/* ---- what is done with one row ---- */

static void embed_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_model *model = s->model;
    float *stream = s->stream + (int64_t)row * model->hidden_size;
    linear_row(&model->embedding, s->batch->token_ids[row], stream);
    if (model->embedding_scale != 1.0f)
        scale_row(stream, model->embedding_scale, model->hidden_size);
    for (int32_t i = 0; i < model->num_ropes; i++) {
        const ap_rope *rope = &model->ropes[i];
        int64_t place = i * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
        rope_angles(rope, s->batch->positions[row], s->cosines + place, s->sines + place);
    }
}

/* Take what the last linear added into the stream, if it waits for a norm; norm the stream. */
static void norm_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    float *stream = s->stream + (int64_t)row * width;
    if (s->post_norm->weight) {
        float *added = s->added + (int64_t)row * width;
        rms_norm_row(added, s->post_norm, width, added);
        add_row(stream, added, width);
    }
    rms_norm_row(stream, s->norm, width, s->normed + (int64_t)row * width);
    prepare_row(&s->in, row);
}

static void rotate_and_write_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_attention *a = &s->layer->attention;
    const ap_rope *rope = &s->model->ropes[a->rope];
    int64_t place = a->rope * s->rope_stride + (int64_t)row * (rope->rotary_dim / 2);
    float *heads = s->qkv + (int64_t)row * qkv_width(a);
    float *key = heads + (int64_t)a->num_heads * a->head_dim;
    for (int32_t i = 0; i < a->num_heads + a->num_kv_heads; i++) {
        float *head = heads + (int64_t)i * a->head_dim;
        const ap_norm *norm = i < a->num_heads ? &a->query_norm : &a->key_norm;
        if (norm->weight) rms_norm_row(head, norm, a->head_dim, head);
        rotate_head(head, s->cosines + place, s->sines + place, rope->rotary_dim);
    }
    bool sealed = is_sealed(s->cache->layers[s->index].format);
    kv_write_token(a, s->cache, s->index, key, key + (int64_t)a->num_kv_heads * a->head_dim,
                   (sealed ? s->open_slots : s->batch->slot_mapping)[row]);
}

static void prepare_input_row(void *context, int32_t row) {
    step_state *s = context;
    prepare_row(&s->in, row);
}

/* ---- linears ---- */

static void activate(void *context, int32_t row, int32_t first, int32_t last) {
    step_state *s = context;
    int64_t place = (int64_t)row * s->layer->gate.out_features + first;
    gated_row(s->gate + place, s->up + place, s->layer->activation, last - first, s->gate + place);
}

typedef struct {
    float *logits;
    int64_t stride;
    float cap;
} logit_cap;

static void cap_logits(void *context, int32_t row, int32_t first, int32_t last) {
    const logit_cap *c = context;
    softcap_row(c->logits + row * c->stride + first, c->cap, last - first);
}

/* The linear that leads back into the stream: at once, or after a post norm. */
static void run_into_stream(step_state *s, const ap_linear *linear, const float *x,
                            const ap_norm *post_norm) {
    const ap_linear *linears[] = {linear};
    s->in = input_of(linears, 1, x, s->rows, s->codes);
    if (is_quantized(linear)) for_rows(s->engine, prepare_input_row, s, s->rows);
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&s->in, linear)},
        .out = {post_norm->weight ? s->added : s->stream},
        .out_stride = s->model->hidden_size,
        .add = !post_norm->weight,
    };
    run_linear(s->engine, &section);
}

/* Norm the stream and bring it into the forms that some linears want. */
static void run_norm(step_state *s, const ap_norm *post_norm, const ap_norm *norm,
                     const ap_linear *const *linears, int32_t count) {
    s->post_norm = post_norm;
    s->norm = norm;
    s->in = input_of(linears, count, s->normed, s->rows, s->codes);
    for_rows(s->engine, norm_row, s, s->rows);
}

static void run_qkv(step_state *s, const ap_norm *post_norm) {
    const ap_attention *a = &s->layer->attention;
    const ap_linear *linears[MOST_FORMS];
    qkv_linears(a, linears);
    run_norm(s, post_norm, &s->layer->attention_norm, linears, a->num_qkv);
    float *out = s->qkv;
    for (int32_t i = 0; i < a->num_qkv; i++) {
        linear_section section = {
            .linears = {linears[i]},
            .in = {form_of(&s->in, linears[i])},
            .out = {out},
            .out_stride = qkv_width(a),
        };
        run_linear(s->engine, &section);
        out += linears[i]->out_features;
    }
}

static void run_mlp(step_state *s) {
    const ap_layer *layer = s->layer;
    const ap_linear *linears[] = {&layer->gate, &layer->up};
    run_norm(s, &layer->attention_post_norm, &layer->mlp_norm, linears, 2);
    linear_section section = {
        .linears = {&layer->gate, &layer->up},
        .in = {form_of(&s->in, &layer->gate), form_of(&s->in, &layer->up)},
        .out = {s->gate, s->up},
        .out_stride = layer->gate.out_features,
        .finish = activate,
        .context = s,
    };
    run_linear(s->engine, &section);
    run_into_stream(s, &layer->down, s->gate, &layer->mlp_post_norm);
}

/* Go on with the rows whose logits are wanted only. */
static void select_rows(step_state *s) {
    const ap_batch *batch = s->batch;
    int32_t hidden = s->model->hidden_size;
    int32_t heads = s->layer->attention.num_heads * s->layer->attention.head_dim;
    for (int32_t i = 0; i < batch->num_rows; i++) {
        memcpy(s->kept + (int64_t)i * hidden, s->stream + batch->rows[i] * hidden,
               (size_t)hidden * sizeof(float));
        memcpy(s->selected + (int64_t)i * heads, s->attended + batch->rows[i] * heads,
               (size_t)heads * sizeof(float));
    }
    s->stream = s->kept;
    s->attended = s->selected;
    s->rows = batch->num_rows;
}

static void run_head(step_state *s, const ap_norm *post_norm, float *logits) {
    const ap_model *model = s->model;
    const ap_linear *linears[] = {&model->head};
    run_norm(s, post_norm, &model->final_norm, linears, 1);
    logit_cap cap = {logits, model->vocab_size, model->logit_softcap};
    linear_section section = {
        .linears = {&model->head},
        .in = {form_of(&s->in, &model->head)},
        .out = {logits},
        .out_stride = model->vocab_size,
        .finish = model->logit_softcap != 0.0f ? cap_logits : NULL,
        .context = &cap,
    };
    run_linear(s->engine, &section);
}

static ap_status step(ap_engine *engine, const ap_model *model, const ap_cache *cache,
                      const ap_batch *batch, float *logits) {
    static const ap_norm no_norm = {0};
    step_state s = {.engine = engine, .model = model, .cache = cache, .batch = batch,
                    .rows = batch->num_tokens};
    if (check_batch(model, cache, batch)) return AP_BAD_ARGUMENT;
    if (claim_buffers(&s)) return AP_NO_MEMORY;
    for_rows(engine, embed_row, &s, s.rows);
    const ap_norm *post_norm = &no_norm;
    for (s.index = 0; s.index < model->num_layers; s.index++) {
        s.layer = &model->layers[s.index];
        const ap_attention *a = &s.layer->attention;
        bool is_last = s.index == model->num_layers - 1;
        run_qkv(&s, post_norm);
        ap_advance(engine);
        for_rows(engine, rotate_and_write_row, &s, s.rows);
        if (s.num_full && is_sealed(cache->layers[s.index].format))
            kv_seal(engine, a, cache, s.index, s.num_full, s.full_pages, s.full_blocks);
        if (is_last && batch->rows && !batch->num_rows) return AP_OK;
        attend(engine, s.attention, a, cache, s.index, batch, s.qkv, qkv_width(a), s.attended);
        ap_advance(engine);
        if (is_last && batch->rows) select_rows(&s);
        run_into_stream(&s, &a->output, s.attended, &s.layer->attention_post_norm);
        ap_advance(engine);
        run_mlp(&s);
        ap_advance(engine);
        post_norm = &s.layer->mlp_post_norm;
    }
    run_head(&s, post_norm, logits);
    return AP_OK;
}

#endif
