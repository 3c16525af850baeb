/* The experts of a layer: runs each row through those that it chooses.
 *
 * Pairs of a row and a chosen expert are sorted by expert, so that an expert's weights are read
 * once for all of its rows, and weights that no row chose are not touched. A pair's result does not
 * depend on its neighbours, and a row sums its pairs in its own order, so no bit of a row depends
 * on the others. */
#ifndef AP_EXPERTS_H
#define AP_EXPERTS_H

#include "route.h"
#include "step_state.h"

/* ---- choosing ---- */

static void route_row(void *context, int32_t row) {
    step_state *s = context;
    const ap_router *r = &s->layer->experts->router;
    int64_t at = (int64_t)row * r->top_k;
    route(r, s->chosen.logits + (int64_t)row * r->num_experts, s->chosen.ids + at,
          s->chosen.weights + at);
}

/* Returns the number of pairs. */
static int32_t sort_pairs(chosen_experts *c, const ap_experts *experts, int32_t rows) {
    const ap_router *r = &experts->router;
    int32_t choices = rows * r->top_k, next = 0, begin = experts->first_expert;
    memset(c->counts, 0, (size_t)r->num_experts * sizeof(int32_t));
    for (int32_t i = 0; i < choices; i++) c->counts[c->ids[i]]++;
    c->num_used = 0;
    for (int32_t e = begin; e < begin + experts->num_here; e++) {
        int32_t count = c->counts[e];
        if (!count) continue;
        for (int32_t i = 0; i < count; i++) c->place_in[next + i] = c->num_used;
        c->used[c->num_used] = e - begin;
        c->first[c->num_used++] = next;
        c->counts[e] = next; /* place of its next pair */
        next += count;
    }
    c->first[c->num_used] = next;
    for (int32_t i = 0; i < choices; i++) {
        bool is_here = c->ids[i] >= begin && c->ids[i] < begin + experts->num_here;
        int32_t pair = is_here ? c->counts[c->ids[i]]++ : -1;
        c->pair_of[i] = pair;
        if (is_here) c->row_of[pair] = i / r->top_k;
    }
    return next;
}

/* ---- a linear of each expert ---- */

typedef struct {
    step_state *state;
    const ap_linear *linears[2]; /* (num_experts,) each; the second may be NULL */
    float *out[2];
    int32_t out_stride;
    bool activates; /* out[0] becomes act(out[0]) * out[1] */
    int64_t work_per_chunk;
} expert_section;

static int32_t rows_of(const chosen_experts *c, int32_t place) {
    return c->first[place + 1] - c->first[place];
}

/* The chunks of one expert's tiles and rows. */
typedef struct {
    int32_t tiles, rows, row_chunks, chunks;
} expert_cut;

static expert_cut cut_of(const expert_section *section, int32_t place) {
    const ap_linear *linear = &section->linears[0][section->state->chosen.used[place]];
    int32_t num_tiles = ceil_div(linear->out_features, AP_LANES);
    expert_cut cut = {.rows = rows_of(&section->state->chosen, place)};
    cut.row_chunks = ceil_div(cut.rows, ROW_BLOCK);
    cut.rows = ceil_div(cut.rows, cut.row_chunks);
    int64_t tile_work = (int64_t)linear->in_features * AP_LANES * cut.rows;
    if (section->linears[1]) tile_work *= 2;
    int64_t tiles = (section->work_per_chunk + tile_work - 1) / tile_work;
    cut.tiles = tiles < num_tiles ? (int32_t)tiles : num_tiles;
    cut.chunks = ceil_div(num_tiles, cut.tiles) * cut.row_chunks;
    return cut;
}

static void expert_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const expert_section *section = context;
    step_state *s = section->state;
    const chosen_experts *c = &s->chosen;
    int32_t place = 0, above = c->num_used;
    while (above - place > 1) { /* the last expert whose first chunk is not above this one */
        int32_t middle = (place + above) / 2;
        if (c->first_chunk[middle] <= chunk) place = middle;
        else above = middle;
    }
    expert_cut cut = cut_of(section, place);
    chunk -= c->first_chunk[place];
    const ap_linear *linear = &section->linears[0][c->used[place]];
    int32_t first_tile = chunk / cut.row_chunks * cut.tiles;
    int32_t last_tile = smaller(first_tile + cut.tiles, num_tiles(linear));
    int32_t first_row = chunk % cut.row_chunks * cut.rows;
    int32_t last_row = smaller(first_row + cut.rows, rows_of(c, place));
    int64_t at = (int64_t)c->first[place] * section->out_stride;
    for (int32_t i = 0; i < 2 && section->linears[i]; i++) {
        linear = &section->linears[i][c->used[place]];
        linear_tiles(linear, form_of(&c->inputs[place], linear), first_row, last_row, first_tile,
                     last_tile, section->out[i] + at, section->out_stride, false);
    }
    if (!section->activates) return;
    int32_t first = first_tile * AP_LANES;
    int32_t last = smaller(last_tile * AP_LANES, linear->out_features);
    for (int32_t row = first_row; row < last_row; row++) {
        int64_t begin = at + (int64_t)row * section->out_stride + first;
        const float *up = section->linears[1] ? section->out[1] + begin : NULL;
        gated_row(section->out[0] + begin, up, &s->layer->expert_gating, last - first,
                  section->out[0] + begin);
    }
}

static void run_expert_linears(expert_section *section) {
    step_state *s = section->state;
    chosen_experts *c = &s->chosen;
    const ap_linear *linear = section->linears[0];
    int64_t work = (int64_t)c->first[c->num_used] * linear->in_features * linear->out_features;
    if (section->linears[1]) work *= 2;
    section->work_per_chunk = work / (PIECES_PER_THREAD * ap_pool_threads(s->engine->pool));
    if (section->work_per_chunk < LEAST_WORK) section->work_per_chunk = LEAST_WORK;
    c->first_chunk[0] = 0;
    for (int32_t i = 0; i < c->num_used; i++)
        c->first_chunk[i + 1] = c->first_chunk[i] + cut_of(section, i).chunks;
    ap_pool_run(s->engine->pool, expert_chunk, section, c->first_chunk[c->num_used]);
}

/* ---- the experts' inputs ---- */

/* Make room for each expert's rows in the forms of its linears. Row i of x belongs to pair i, or
 * `rows_of_x` says which. */
static void place_inputs(step_state *s, const ap_linear *first, const ap_linear *second,
                         const float *x, const int32_t *rows_of_x) {
    chosen_experts *c = &s->chosen;
    char *memory = c->codes;
    for (int32_t i = 0; i < c->num_used; i++) {
        const ap_linear *linears[2] = {&first[c->used[i]]};
        if (second) linears[1] = &second[c->used[i]];
        int32_t rows = rows_of(c, i), count = second ? 2 : 1;
        int64_t at = rows_of_x ? 0 : (int64_t)c->first[i] * first->in_features;
        input *in = &c->inputs[i];
        *in = forms_of(linears, count);
        for (int32_t f = 0; f < in->num_forms; f++)
            in->forms[f].is_split = false; /* an expert has few rows */
        place_forms(in, x + at, rows, memory);
        for (int32_t f = 0; f < in->num_forms; f++) {
            memory += form_bytes(&in->forms[f], rows, in->width);
            if (in->forms[f].group)
                in->forms[f].rows_of_x = rows_of_x ? rows_of_x + c->first[i] : NULL;
            else if (rows_of_x) /* floats are multiplied in place, so they must be contiguous */
                in->forms[f].x = c->out + (int64_t)c->first[i] * first->in_features;
        }
    }
}

static void prepare_pair(void *context, int32_t pair) {
    step_state *s = context;
    chosen_experts *c = &s->chosen;
    int32_t place = c->place_in[pair];
    prepare_row(&c->inputs[place], pair - c->first[place]);
}

/* Prepare a pair's input for its expert's first linears; float forms get a copy of the row. */
static void gather_pair(void *context, int32_t pair) {
    step_state *s = context;
    chosen_experts *c = &s->chosen;
    int32_t width = c->width;
    const input *in = &c->inputs[c->place_in[pair]];
    prepare_pair(context, pair);
    for (int32_t f = 0; f < in->num_forms; f++)
        if (!in->forms[f].group)
            memcpy(c->out + (int64_t)pair * width, c->rows + (int64_t)c->row_of[pair] * width,
                   (size_t)width * sizeof(float));
}

/* Multiply a row by the weight of each of its experts, and write these inputs to the buffer of
 * outputs. The weights become 1: the outputs are summed as they are. */
static void weigh_row(void *context, int32_t row) {
    step_state *s = context;
    chosen_experts *c = &s->chosen;
    int32_t width = c->width, top_k = s->layer->experts->router.top_k;
    for (int64_t choice = (int64_t)row * top_k; choice < (int64_t)(row + 1) * top_k; choice++) {
        if (c->pair_of[choice] < 0) continue;
        float *weighed = c->out + (int64_t)c->pair_of[choice] * width;
        memcpy(weighed, c->rows + (int64_t)row * width, (size_t)width * sizeof(float));
        scale_row(weighed, c->weights[choice], width);
        c->weights[choice] = 1.0f;
    }
}

/* Put the rows of each pair into the forms of its expert's first linears. */
static void gather_inputs(step_state *s, int32_t pairs) {
    const ap_experts *experts = s->layer->experts;
    chosen_experts *c = &s->chosen;
    if (!experts->weighs_inputs) {
        place_inputs(s, experts->gate, experts->up, c->rows, c->row_of);
        for_rows(s->engine, gather_pair, s, pairs);
        return;
    }
    for_rows(s->engine, weigh_row, s, s->rows);
    place_inputs(s, experts->gate, experts->up, c->out, NULL);
    for_rows(s->engine, prepare_pair, s, pairs);
}

/* ---- adding up ---- */

/* Norm the output of a row's chosen experts, and add it to the output of the layer's MLP. */
static void norm_chosen_row(void *context, int32_t row) {
    step_state *s = context;
    int32_t width = s->model->hidden_size;
    float *normed = s->normed + (int64_t)row * width;
    rms_norm_row(normed, &s->layer->experts->output_norm, width, normed);
    add_row(s->added + (int64_t)row * width, normed, width);
}

/* The weighted sum of a row's chosen experts' outputs, in 16 elements from i on. */
static vfloat said_by_chosen(const chosen_experts *c, int32_t row, int32_t top_k, int32_t i) {
    vfloat sum = vf_zero();
    for (int32_t k = 0; k < top_k; k++) {
        int64_t choice = (int64_t)row * top_k + k;
        if (c->pair_of[choice] < 0) continue;
        const float *said = c->out + (int64_t)c->pair_of[choice] * c->width + i;
        sum = vf_fma(load_next(said, c->width - i), vf_set(c->weights[choice]), sum);
    }
    return sum;
}

/* Write this sum for a whole row of latents, over the experts' inputs. */
static void combine_latent_row(void *context, int32_t row) {
    step_state *s = context;
    const chosen_experts *c = &s->chosen;
    float *out = c->latent + (int64_t)row * c->width;
    for (int32_t i = 0; i < c->width; i += AP_LANES)
        store_next(out + i, said_by_chosen(c, row, s->layer->experts->router.top_k, i),
                   c->width - i);
}

/* Add a row's chosen experts and the shared one, to the stream or for a post norm. */
static void combine_row(void *context, int32_t row) {
    step_state *s = context;
    const chosen_experts *c = &s->chosen;
    const ap_experts *experts = s->layer->experts;
    int32_t width = s->model->hidden_size, top_k = experts->router.top_k;
    bool has_shared = has_linear(&s->layer->gate);
    bool waits = s->part || s->layer->mlp_post_norm.weight;
    float shared = 1.0f;
    if (has_linear(&experts->shared_gate)) shared = 1.0f / (1.0f + expf(-c->shared_gate[row]));
    float *stream = s->stream + (int64_t)row * width, *added = s->added + (int64_t)row * width;
    float *out = s->part ? s->part + (int64_t)row * width : added;
    float *normed = s->normed + (int64_t)row * width; /* reuses the experts' input */
    for (int32_t i = 0; i < width; i += AP_LANES) {
        int32_t left = width - i;
        vfloat sum = said_by_chosen(c, row, top_k, i);
        if (experts->output_norm.weight) {
            store_next((s->part ? out : normed) + i, sum, left);
            continue;
        }
        if (has_shared) sum = vf_fma(load_next(added + i, left), vf_set(shared), sum);
        if (waits)
            store_next(out + i, sum, left);
        else
            store_next(stream + i, vf_add(load_next(stream + i, left), sum), left);
    }
    if (experts->output_norm.weight && !s->part) norm_chosen_row(s, row);
}

/* Expects each row's experts, their weights and their input in `chosen`. */
static void run_chosen(step_state *s) {
    const ap_experts *experts = s->layer->experts;
    chosen_experts *c = &s->chosen;
    int32_t pairs = sort_pairs(c, experts, s->rows);
    c->width = experts->gate->in_features;
    gather_inputs(s, pairs);
    expert_section inward = {
        .state = s,
        .linears = {experts->gate, experts->up},
        .out = {s->gate, s->up},
        .out_stride = experts->gate->out_features,
        .activates = true,
    };
    run_expert_linears(&inward);
    ap_advance(s->engine);
    place_inputs(s, experts->down, NULL, s->gate, NULL);
    for_rows(s->engine, prepare_pair, s, pairs);
    expert_section outward = {
        .state = s,
        .linears = {experts->down},
        .out = {c->out},
        .out_stride = c->width,
    };
    run_expert_linears(&outward);
    for_rows(s->engine, is_latent(experts) ? combine_latent_row : combine_row, s, s->rows);
}

/* Expects the router's logits, the shared expert's output in `added`, and latents if any. */
static void run_experts(step_state *s) {
    s->chosen.rows = is_latent(s->layer->experts) ? s->chosen.latent : s->normed;
    for_rows(s->engine, route_row, s, s->rows);
    run_chosen(s);
}

/* ---- for a caller who has the rest of the model ---- */

static bool here_fits(const ap_experts *experts) {
    int64_t first = experts->first_expert, count = experts->num_here;
    return first >= 0 && count > 0 && first + count <= experts->router.num_experts;
}

static bool routed_fits(const ap_experts *experts, const ap_routed *routed) {
    int32_t top_k = experts->router.top_k, count = experts->router.num_experts;
    if (!here_fits(experts)) return false;
    if (routed->rows < 0 || top_k < 1 || top_k > count || count > AP_MOST_EXPERTS) return false;
    if ((int64_t)routed->rows * top_k > INT32_MAX) return false;
    for (int64_t i = 0; i < (int64_t)routed->rows * top_k; i++)
        if (routed->ids[i] < 0 || routed->ids[i] >= count) return false;
    return experts->gate->in_features == experts->down->out_features &&
           experts->gate->out_features == experts->down->in_features;
}

static ap_status run_routed(ap_engine *engine, const ap_experts *experts, const ap_gating *gating,
                            const ap_routed *routed) {
    if (!routed_fits(experts, routed)) return AP_BAD_ARGUMENT;
    if (!routed->rows) return AP_OK;
    ap_model model = {.hidden_size = experts->gate->in_features};
    ap_layer layer = {.experts = experts, .expert_gating = *gating};
    step_state s = {.engine = engine, .model = &model, .rows = routed->rows, .layer = &layer};
    step_widths w = {0};
    widen_for_experts(&w, experts, s.rows);
    claim claims[EXPERT_CLAIMS];
    int32_t count = expert_claims(&s, &w, claims);
    if (claim_all(engine, claims, count)) return AP_NO_MEMORY;
    /* only read: only a norm of the experts' output would write here */
    s.normed = (float *)routed->hidden;
    s.chosen.rows = routed->hidden;
    s.stream = s.added = s.part = routed->out;
    int64_t pairs = (int64_t)s.rows * experts->router.top_k;
    for (int64_t i = 0; i < pairs; i++) s.chosen.ids[i] = (int32_t)routed->ids[i];
    memcpy(s.chosen.weights, routed->weights, (size_t)pairs * sizeof(float));
    run_chosen(&s);
    ap_advance(engine);
    return AP_OK;
}

/* True if all experts have the shapes that the buffers are made for. */
static bool experts_supported(const ap_model *model, const ap_layer *layer) {
    const ap_experts *e = layer->experts;
    if (!e) return true;
    if (!router_supported(&e->router) || is_quantized(&e->logits)) return false;
    if (e->logits.out_features != e->router.num_experts || !here_fits(e)) return false;
    if (has_linear(&e->shared_gate) &&
        (is_quantized(&e->shared_gate) || e->shared_gate.out_features != 1))
        return false;
    bool own = e->input_norm.weight, waits = layer->mlp_post_norm.weight;
    if (own != (e->router_norm.weight != NULL) || own != (e->shared_norm.weight != NULL) ||
        own != (e->output_norm.weight != NULL) || (own && !(waits && has_linear(&layer->gate))))
        return false;
    int32_t width = model->hidden_size;
    if (is_latent(e)) {
        const ap_linear *into = &e->into_latent, *out_of = &e->out_of_latent;
        if (own || has_linear(&e->shared_gate) || into->in_features != width) return false;
        if (out_of->in_features != into->out_features || out_of->out_features != width)
            return false;
        width = into->out_features;
    }
    return e->gate->in_features == width && e->down->out_features == width &&
           e->gate->out_features == e->down->in_features;
}

#endif
