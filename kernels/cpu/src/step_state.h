/* The state of a step, and its workspace. */
#ifndef AP_STEP_STATE_H
#define AP_STEP_STATE_H

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "section.h"

/* Pairs of a row and an expert of this rank that it chose, sorted by expert and then by row. */
typedef struct {
    int32_t num_used;      /* experts with at least one pair */
    int32_t *used;         /* (num_used,), their indices among this rank's, ascending */
    int32_t *first;        /* (num_used + 1,), the first pair of each */
    int32_t *row_of;       /* (pairs,) */
    int32_t *place_in;     /* (pairs,), index of the pair's expert in used */
    int32_t *pair_of;      /* (rows, top_k), pair of each choice; below 0: another rank's expert */
    int32_t *counts;       /* (num_experts,), scratch */
    int32_t *ids;          /* (rows, top_k), chosen experts */
    float *weights;        /* (rows, top_k) */
    float *logits;         /* (rows, num_experts) */
    const float *rows;     /* (rows, width), the experts' input */
    int32_t width;         /* of an expert's input and output */
    float *latent;         /* (rows, width), `rows` if the experts have latents */
    float *out;            /* (pairs, width), of down; before that, float input of gate and up */
    float *shared_gate;    /* (rows,) */
    input *inputs;         /* (num_used,), of each expert's next linears */
    int32_t *first_chunk;  /* (num_used + 1,) */
    char *codes;           /* quantized inputs of all experts */
} chosen_experts;

/* The rows of a sequence and the slot of its state. */
typedef struct {
    int32_t slot;
    int32_t first;
    int32_t rows;
    bool goes_on; /* from the state in the slot; otherwise it begins from zeros */
} state_span;

typedef struct {
    ap_engine *engine;
    const ap_model *model;
    const ap_cache *cache;
    const ap_batch *batch;
    int32_t rows;    /* that are still computed */
    float *stream;   /* (rows, hidden_size), the residual */
    float *normed;   /* (rows, hidden_size), input of the mixer, of gate and up, of the head */
    float *added;    /* (rows, hidden_size), input of a post norm, or a shared expert's output */
    float *kept;     /* (rows, hidden_size), the stream's rows after a selection */
    const int64_t *kept_rows; /* (rows,), their rows before it; NULL: no selection */
    float *inputs;   /* (rows, outputs of the mixer's linears), heads of q, k and v in attention */
    float *mixed;    /* (rows, input of the mixer's last linear), query heads in attention */
    float *selected; /* the same, after a selection */
    float *gate;     /* (rows or pairs, intermediate) */
    float *up;       /* the same */
    float *cosines;  /* (num_ropes, rows, rotary_dim / 2) */
    float *sines;
    int64_t rope_stride; /* between two ropes */
    float *token_inputs; /* (rows, num_layers, width), all rows of the step */
    float *token_rows;   /* the same, rows of the embedding */
    float *token_gate;   /* (rows, width) */
    float *joined;       /* (rows, 2 * hidden_size), both halves of a join; NULL once read */
    char *codes;         /* quantized inputs */
    char *attention;     /* workspace of attend */
    /* with sealed layers only */
    int64_t *open_slots;  /* (rows,), open block * block_size + offset */
    int32_t *full_open;   /* (num_full,), open blocks that this step fills */
    int32_t *full_blocks; /* (num_full,), blocks that they are sealed into */
    int32_t num_full;
    chosen_experts chosen; /* with experts only */
    /* with recurrent layers only */
    state_span *spans;
    int32_t num_spans;
    /* with adapters only */
    int32_t *adapter_of; /* (rows,), of all rows of the step, below 0: none; or NULL */
    adapted_rows adapted;
    /* of the current section */
    const ap_layer *layer;
    const ap_norm *post_norm;
    const ap_norm *norm;
    const float *bounds; /* of the linears that read what is normed, or NULL */
    input in;
    float *part;   /* (rows, hidden_size), this rank's part of a sum; NULL: no other ranks */
    float *summed; /* where the parts' sum goes */
    bool adds_sum; /* to the contents of `summed` */
} step_state;

static int32_t qkv_width(const ap_attention *a) {
    int32_t heads = a->num_heads + 2 * a->num_kv_heads;
    if (a->output_gate == AP_GATE_HEADS) return heads * a->head_dim + a->num_heads;
    return (heads + (a->output_gate ? a->num_heads : 0)) * a->head_dim;
}

/* ---- latent attention ---- */

/* Elements of a token in the cache. */
static int32_t latent_width(const ap_layer *layer) { return 2 * layer->attention.head_dim; }

/* Columns of a mixer's inputs in latent attention. */
typedef struct {
    int32_t token;   /* latent and rotating key */
    int32_t heads;   /* of queries */
    int32_t queries; /* the same in the latents' space, (num_heads, latent_width) */
    int32_t width;
} latent_places;

static latent_places latent_places_of(const ap_layer *layer) {
    const ap_attention *a = &layer->attention;
    const ap_linear *queries = &layer->latent->queries;
    latent_places at = {.token = a->qkv[0].out_features};
    int32_t end = at.token + latent_width(layer);
    at.heads = queries->codes ? end : 0;
    at.queries = end + (queries->codes ? queries->out_features : 0);
    at.width = at.queries + a->num_heads * latent_width(layer);
    return at;
}

static bool is_recurrent(const ap_layer *layer) {
    return layer->short_conv || layer->gated_delta || layer->mamba2;
}

static bool is_attention(const ap_layer *layer) {
    return layer->attention.num_qkv && !is_recurrent(layer);
}

static bool has_mixer(const ap_layer *layer) {
    return layer->attention.num_qkv || is_recurrent(layer);
}

/* The linears of a mixer's input; returns how many. */
static int32_t mixer_linears(const ap_layer *layer, const ap_linear **linears) {
    if (layer->short_conv || layer->mamba2) {
        linears[0] = layer->short_conv ? &layer->short_conv->input : &layer->mamba2->input;
        return 1;
    }
    const ap_gated_delta *d = layer->gated_delta;
    const ap_linear *inputs = d ? d->inputs : layer->attention.qkv;
    int32_t count = d ? d->num_inputs : layer->attention.num_qkv;
    for (int32_t i = 0; i < count; i++) linears[i] = &inputs[i];
    return count;
}

/* Number of outputs of these linears in a row. */
static int32_t inputs_width(const ap_layer *layer) {
    if (layer->short_conv) return 3 * layer->short_conv->filters.width;
    if (layer->mamba2) return layer->mamba2->input.out_features;
    if (layer->latent) return latent_places_of(layer).width;
    const ap_gated_delta *d = layer->gated_delta;
    if (!d) return qkv_width(&layer->attention);
    return d->filters.width + d->num_value_heads * (d->value_dim + 2);
}

/* The linear from a mixer to the stream. */
static const ap_linear *mixer_output(const ap_layer *layer) {
    if (layer->short_conv) return &layer->short_conv->output;
    if (layer->mamba2) return &layer->mamba2->output;
    return layer->gated_delta ? &layer->gated_delta->output : &layer->attention.output;
}

static bool has_join(const ap_model *model) { return model->join.token_norm.weight != NULL; }

static bool has_linear(const ap_linear *linear) { return linear->codes != NULL; }

static bool is_latent(const ap_experts *experts) { return has_linear(&experts->into_latent); }

/* The linears that read a layer's stream after the MLP's norm; returns how many. */
static int32_t mlp_linears(const ap_layer *layer, const ap_linear **linears) {
    int32_t count = 0;
    if (layer->experts) {
        linears[count++] = &layer->experts->logits;
        if (is_latent(layer->experts)) linears[count++] = &layer->experts->into_latent;
    }
    if (has_linear(&layer->gate)) {
        linears[count++] = &layer->gate;
        if (has_linear(&layer->up)) linears[count++] = &layer->up;
    }
    return count;
}

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* ---- memory ---- */

typedef struct {
    int64_t inputs, mixed, rotary, codes, attention, token_inputs;
    int64_t middle;                                /* floats of gate, of all rows */
    int64_t pairs, experts, logits, used, expert_codes; /* counts; expert_codes: bytes */
    int64_t said, latent;                          /* floats of all pairs, of all rows */
    int64_t ranks;                                 /* floats of a row's shrunk form */
    bool added, sealed, recurrent, adapted;
} step_widths;

static void widen_for_experts(step_widths *w, const ap_experts *experts, int32_t rows) {
    const ap_linear *gate = &experts->gate[0], *down = &experts->down[0];
    int64_t pairs = (int64_t)rows * experts->router.top_k;
    int32_t used = (int32_t)(pairs < experts->router.num_experts ? pairs
                                                                 : experts->router.num_experts);
    w->pairs = larger(w->pairs, pairs);
    w->experts = larger(w->experts, experts->router.num_experts);
    w->used = larger(w->used, used);
    w->logits = larger(w->logits, (int64_t)rows * experts->router.num_experts);
    w->middle = larger(w->middle, pairs * gate->out_features);
    w->said = larger(w->said, pairs * gate->in_features);
    if (is_latent(experts)) {
        const ap_linear *out_of[] = {&experts->out_of_latent};
        w->latent = larger(w->latent, (int64_t)rows * gate->in_features);
        w->codes = larger(w->codes, input_bytes(out_of, 1, rows));
        w->added = true;
    }
    /* gate and up may need two forms; each expert's forms begin at a multiple of 64 bytes */
    int64_t hidden = 2 * quantized_bytes((int32_t)pairs, gate->in_features, AP_LANES);
    int64_t middle = quantized_bytes((int32_t)pairs, down->in_features, AP_LANES);
    int64_t edges = 4 * used * ap_claim_bytes(1);
    w->expert_codes = larger(w->expert_codes, larger(hidden, middle) + edges);
}

static void widen_for_token_input(step_widths *w, const ap_token_input *in, int32_t rows) {
    if (!has_linear(&in->gate)) return;
    const ap_linear *gate[] = {&in->gate}, *up[] = {&in->up};
    w->added = true;
    w->codes = larger(w->codes, input_bytes(gate, 1, rows));
    w->codes = larger(w->codes, input_bytes(up, 1, rows));
}

static void widen_for_adapters(step_widths *w, const ap_batch *batch) {
    for (int32_t i = 0; batch->adapter_slots && i < batch->num_seqs; i++) {
        if (batch->adapter_slots[i] < 0) continue;
        w->adapted = true;
        w->ranks = larger(w->ranks, batch->adapters[batch->adapter_slots[i]].most_ranks);
    }
    w->ranks = (w->ranks + AP_LANES - 1) / AP_LANES * AP_LANES;
}

static step_widths widest(const ap_engine *engine, const ap_model *model, const ap_cache *cache,
                          const ap_batch *batch) {
    step_widths w = {0};
    int32_t rows = batch->num_tokens;
    for (int32_t i = 0; i < model->num_ropes; i++)
        w.rotary = larger(w.rotary, model->ropes[i].rotary_dim / 2);
    const ap_linear *head[] = {&model->head};
    w.codes = input_bytes(head, 1, rows);
    const ap_linear *join[] = {&model->join.linear};
    if (has_linear(join[0])) w.codes = larger(w.codes, input_bytes(join, 1, rows));
    widen_for_adapters(&w, batch);
    const ap_token_inputs *inputs = &model->token_inputs;
    if (inputs->width) {
        const ap_linear *projection[] = {&inputs->projection};
        w.token_inputs = (int64_t)rows * model->num_layers * inputs->width;
        w.codes = larger(w.codes, input_bytes(projection, 1, rows));
    }
    for (int32_t i = 0; i < model->num_layers; i++) {
        const ap_layer *layer = &model->layers[i];
        const ap_linear *linears[MOST_FORMS];
        w.added |= layer->mixer_post_norm.weight || layer->mlp_post_norm.weight;
        if (has_mixer(layer)) {
            w.inputs = larger(w.inputs, inputs_width(layer));
            w.mixed = larger(w.mixed, mixer_output(layer)->in_features);
            w.codes = larger(w.codes, input_bytes(linears, mixer_linears(layer, linears), rows));
            linears[0] = mixer_output(layer);
            w.codes = larger(w.codes, input_bytes(linears, 1, rows));
        }
        int32_t of_mlp = mlp_linears(layer, linears);
        if (of_mlp) w.codes = larger(w.codes, input_bytes(linears, of_mlp, rows));
        if (has_linear(&layer->gate)) {
            linears[0] = &layer->down;
            w.codes = larger(w.codes, input_bytes(linears, 1, rows));
            w.middle = larger(w.middle, (int64_t)rows * layer->gate.out_features);
            w.added |= layer->experts != NULL;
        }
        if (layer->experts) widen_for_experts(&w, layer->experts, rows);
        widen_for_token_input(&w, &layer->token_input, rows);
        w.recurrent |= is_recurrent(layer);
        if (layer->latent && has_linear(&layer->latent->queries)) {
            linears[0] = &layer->latent->queries;
            w.codes = larger(w.codes, input_bytes(linears, 1, rows));
        }
        if (!is_attention(layer) || layer->latent) continue;
        int32_t of = layer->cache_layer;
        w.sealed |= is_sealed(cache->layers[of].format);
        w.attention =
            larger(w.attention, attend_bytes(engine, &layer->attention, cache, of, batch));
    }
    return w;
}

static void find_open_slots(step_state *s) {
    const ap_batch *batch = s->batch;
    int32_t size = s->cache->block_size;
    for (int32_t i = 0; i < batch->num_seqs; i++)
        for (int32_t row = batch->query_start[i]; row < batch->query_start[i + 1]; row++) {
            int32_t offset = (int32_t)(batch->slot_mapping[row] % size);
            s->open_slots[row] = (int64_t)batch->open_blocks[i] * size + offset;
            if (offset + 1 < size) continue;
            s->full_open[s->num_full] = batch->open_blocks[i];
            s->full_blocks[s->num_full++] = (int32_t)(batch->slot_mapping[row] / size);
        }
}

/* Join consecutive sequences of the same slot, which are pieces of one. */
static void find_spans(step_state *s) {
    const ap_batch *batch = s->batch;
    for (int32_t i = 0; i < batch->num_seqs; i++) {
        int32_t first = batch->query_start[i], rows = batch->query_start[i + 1] - first;
        if (i && batch->state_slots[i] == batch->state_slots[i - 1]) {
            s->spans[s->num_spans - 1].rows += rows;
            continue;
        }
        s->spans[s->num_spans++] = (state_span){
            .slot = batch->state_slots[i],
            .first = first,
            .rows = rows,
            .goes_on = batch->context_lens[i] > rows,
        };
    }
}

/* A buffer of the workspace. */
typedef struct {
    void *buffer; /* address of the pointer to it */
    int64_t bytes;
} claim;

#define EXPERT_CLAIMS 16

/* List the buffers of experts; returns the number of claims. */
static int32_t expert_claims(step_state *s, const step_widths *w, claim *claims) {
    const int64_t real = sizeof(float), whole = sizeof(int32_t);
    chosen_experts *c = &s->chosen;
    const claim all[EXPERT_CLAIMS] = {
        {&s->gate, w->middle * real},
        {&s->up, w->middle * real},
        {&c->used, w->used * whole},
        {&c->first, (w->used + 1) * whole},
        {&c->first_chunk, (w->used + 1) * whole},
        {&c->inputs, w->used * (int64_t)sizeof(input)},
        {&c->row_of, w->pairs * whole},
        {&c->place_in, w->pairs * whole},
        {&c->pair_of, w->pairs * whole},
        {&c->ids, w->pairs * whole},
        {&c->counts, w->experts * whole},
        {&c->weights, w->pairs * real},
        {&c->logits, w->logits * real},
        {&c->out, w->said * real},
        {&c->latent, w->latent * real},
        {&c->codes, w->expert_codes},
    };
    memcpy(claims, all, sizeof all);
    return EXPERT_CLAIMS;
}

static ap_status claim_all(ap_engine *engine, const claim *claims, int32_t count) {
    int64_t bytes = 0;
    for (int32_t i = 0; i < count; i++) bytes += ap_claim_bytes(claims[i].bytes);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    for (int32_t i = 0; i < count; i++) {
        void *claimed = ap_claim(engine, claims[i].bytes);
        memcpy(claims[i].buffer, &claimed, sizeof claimed);
    }
    return AP_OK;
}

static ap_status claim_buffers(step_state *s) {
    const ap_model *model = s->model;
    step_widths w = widest(s->engine, model, s->cache, s->batch);
    int64_t rows = s->rows, hidden = rows * model->hidden_size;
    bool selects = s->batch->rows != NULL;
    const int64_t real = sizeof(float), whole = sizeof(int32_t);
    int64_t full = w.sealed ? s->batch->num_seqs * whole : 0;
    bool joins = has_join(model);
    int64_t angles = model->num_ropes * rows * w.rotary * real;
    const claim own[] = {
        {&s->stream, hidden * real},
        {&s->normed, hidden * real},
        {&s->added, w.added ? hidden * real : 0},
        {&s->kept, selects ? hidden * real : 0},
        {&s->inputs, rows * w.inputs * real},
        {&s->mixed, rows * w.mixed * real},
        {&s->selected, selects ? rows * w.mixed * real : 0},
        {&s->cosines, angles},
        {&s->sines, angles},
        {&s->token_inputs, w.token_inputs * real},
        {&s->token_rows, w.token_inputs * real},
        {&s->token_gate, rows * model->token_inputs.width * real},
        {&s->joined, joins ? 2 * hidden * real : 0},
        {&s->codes, w.codes},
        {&s->attention, w.attention},
        {&s->open_slots, w.sealed ? rows * (int64_t)sizeof(int64_t) : 0},
        {&s->full_open, full},
        {&s->full_blocks, full},
        {&s->spans, w.recurrent ? s->batch->num_seqs * (int64_t)sizeof(state_span) : 0},
        {&s->adapter_of, w.adapted ? rows * whole : 0},
        {&s->adapted.spans, w.adapted ? rows * (int64_t)sizeof(adapter_span) : 0},
        {&s->adapted.shrunk, rows * w.ranks * real},
        {&s->adapted.codes, rows * w.ranks},
        {&s->adapted.scales, rows * w.ranks / AP_LANES * (int64_t)sizeof(row_scale)},
        {&s->chosen.shared_gate, w.pairs ? rows * real : 0},
    };
    const int32_t count = sizeof own / sizeof *own;
    claim claims[sizeof own / sizeof *own + EXPERT_CLAIMS];
    memcpy(claims, own, sizeof own);
    if (claim_all(s->engine, claims, count + expert_claims(s, &w, claims + count)))
        return AP_NO_MEMORY;
    if (w.sealed) find_open_slots(s);
    if (w.recurrent) find_spans(s);
    s->adapted.stride = (int32_t)w.ranks;
    if (!w.adapted) s->adapter_of = NULL;
    if (!joins) s->joined = NULL;
    s->rope_stride = rows * w.rotary;
    return AP_OK;
}

#endif
