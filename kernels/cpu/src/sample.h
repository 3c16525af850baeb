/* From a row of logits to a token; kernels/sampling/reference.py is the definition.
 *
 * Weights are float32, their sums float64. The vocabulary is not sorted as a whole: a threshold is
 * found that only the wanted tokens and few others reach, and these are sorted. A row is one task.
 */
#ifndef AP_SAMPLE_H
#define AP_SAMPLE_H

#include "sample_order.h"

#define GREEDY_BELOW 1e-5 /* temperature */
#define EXP_UNDERFLOW -87.0 /* below it vf_exp is constant, so weights are 0 */

/* Room for one row at a time. */
typedef struct {
    float *maxima; /* of each block of the row */
    float *masses; /* the same */
    char *pairs;   /* vocab_size * 8 bytes */
    char *other;   /* the same */
} sample_room;

typedef struct {
    const float *logits;
    int32_t vocab_size;
    int32_t likeliest;  /* token */
    double temperature; /* this and the next four: as in ap_sampling */
    int64_t top_k;
    double top_p;
    double min_p;
    double uniform;
    float floor;        /* logit that min_p asks for */
    weight_curve curve;
    sample_room room;
} sampled_row;

/* ---- by id ---- */

static int32_t draw_by_id(sampled_row *r) {
    weight_curve curve = r->curve;
    curve.lowest = fmaxf(curve.lowest, r->floor);
    const float *masses = r->room.masses;
    double total = row_mass(r->logits, r->vocab_size, r->room.maxima, curve, r->room.masses);
    double target = r->uniform * total, mass = 0.0, mass_before = 0.0;
    int32_t block = -1;
    for (int32_t b = 0; b < scan_blocks(r->vocab_size) && mass <= target; b++) {
        if (masses[b] == 0.0f) continue;
        block = b;
        mass_before = mass;
        mass += masses[b];
    }
    if (block < 0) return r->likeliest; /* a min_p above 1 */
    float weights[SCAN_BLOCK];
    int32_t begin = block * SCAN_BLOCK, size = scan_block_size(r->vocab_size, block);
    int32_t chosen = r->likeliest;
    weigh(r->logits + begin, size, curve, weights);
    mass = mass_before;
    for (int32_t i = 0; i < size && mass <= target; i++) {
        if (weights[i] == 0.0f) continue;
        chosen = begin + i;
        mass += weights[i];
    }
    return chosen;
}

/* ---- by rank ---- */

/* Append those of values[begin .. end) that reach a threshold to `kept`; returns the new count.
 * Without tokens, a value's index is its token. */
INLINE int32_t append_at_least(const float *values, const int32_t *tokens, int32_t begin,
                               int32_t end, float threshold, float *kept, int32_t *kept_tokens,
                               int32_t count) {
    for (int32_t i = begin; i < end; i += AP_LANES) {
        uint32_t hits = vf_at_least(next_logits(values + i, end - i), vf_set(threshold));
        for (; hits; hits &= hits - 1) {
            int32_t place = i + __builtin_ctz(hits);
            kept[count] = values[place];
            kept_tokens[count++] = tokens ? tokens[place] : place;
        }
    }
    return count;
}

/* Tokens that may be chosen, by rising id, with their logits. */
typedef struct {
    float *logits;
    int32_t *tokens;
    int32_t count;
} candidates;

static candidates gather(const sampled_row *r, float threshold) {
    candidates c = {.logits = (float *)r->room.pairs};
    c.tokens = (int32_t *)(c.logits + r->vocab_size);
    for (int32_t b = 0; b < scan_blocks(r->vocab_size); b++) {
        int32_t begin = b * SCAN_BLOCK, end = begin + scan_block_size(r->vocab_size, b);
        if (r->room.maxima[b] >= threshold)
            c.count = append_at_least(r->logits, NULL, begin, end, threshold, c.logits, c.tokens,
                                      c.count);
    }
    return c;
}

/* Drop most of the candidates below the likeliest ones that have the `wanted` mass. */
static void thin_out(const sampled_row *r, candidates *c, const float *weights, float low,
                     double wanted) {
    float threshold =
        raised_threshold(c->logits, weights, c->count, low, r->curve.highest, wanted);
    c->count = append_at_least(c->logits, c->tokens, 0, c->count, threshold, c->logits, c->tokens,
                               0);
}

/* The top_k likeliest tokens among few others. */
static candidates top_candidates(const sampled_row *r, int32_t top_k) {
    /* top_k blocks have a maximum that reaches the threshold, hence at least top_k tokens do */
    int32_t blocks = scan_blocks(r->vocab_size);
    bool by_block = top_k <= blocks;
    float threshold = raised_threshold(by_block ? r->room.maxima : r->logits, NULL,
                                       by_block ? blocks : r->vocab_size, r->curve.lowest,
                                       r->curve.highest, top_k);
    candidates c = gather(r, threshold);
    if (c.count > top_k + top_k / 8 + SPARE) thin_out(r, &c, NULL, threshold, top_k);
    return c;
}

/* The tokens of the top_p mass among few others; total is the mass of all. */
static candidates nucleus_candidates(const sampled_row *r, double total) {
    float low = fmaxf(r->curve.lowest, r->floor);
    if (!(r->top_p < 1.0)) return gather(r, low);
    /* all tokens of at most this weight together are less than what top_p leaves out */
    double least = 0.5 * (1.0 - r->top_p) * total / r->vocab_size;
    low = fmaxf(low, float_at_least(r->curve.highest + r->temperature * log(least)));
    candidates c = gather(r, low);
    if (c.count <= SPARE) return c;
    float *weights = (float *)r->room.other;
    weigh(c.logits, c.count, r->curve, weights);
    thin_out(r, &c, weights, low, (r->top_p + 1e-5) * total); /* covers rounding */
    return c;
}

/* Order the candidates, cut them and draw. Without top_k, total is the mass of all tokens. */
static int32_t draw_from(const sampled_row *r, candidates c, int32_t top_k, double total) {
    uint64_t *entries = (uint64_t *)r->room.other;
    for (int32_t i = 0; i < c.count; i++) entries[i] = rank_entry(c.logits[i], c.tokens[i]);
    entries = sort_entries(entries, (uint64_t *)r->room.pairs, c.count);
    bool in_other = (char *)entries == r->room.other;
    float *weights = (float *)(in_other ? r->room.pairs : r->room.other);
    int32_t ranks = top_k && top_k < c.count ? top_k : c.count;
    int32_t likely = 0; /* ranks that min_p keeps */
    for (int32_t i = 0; i < ranks; i++) {
        weights[i] = entry_logit(entries[i]);
        likely += weights[i] >= r->floor;
    }
    weigh(weights, ranks, r->curve, weights);
    if (top_k) {
        total = 0.0;
        for (int32_t i = 0; i < ranks; i++) total += weights[i];
    }
    double kept_mass = 0.0;
    int32_t kept = 0;
    while (kept < likely && (!kept || kept_mass < r->top_p * total)) kept_mass += weights[kept++];
    double target = r->uniform * kept_mass, mass = 0.0;
    int32_t chosen = r->likeliest;
    for (int32_t i = 0; i < kept && mass <= target; i++) {
        if (weights[i] == 0.0f) break;
        chosen = entry_token(entries[i]);
        mass += weights[i];
    }
    return chosen;
}

static int32_t draw_by_rank(sampled_row *r) {
    if (r->top_k > 0 && r->top_k < r->vocab_size) {
        int32_t top_k = (int32_t)r->top_k;
        return draw_from(r, top_candidates(r, top_k), top_k, 0.0);
    }
    double total =
        row_mass(r->logits, r->vocab_size, r->room.maxima, r->curve, r->room.masses);
    return draw_from(r, nucleus_candidates(r, total), 0, total);
}

/* ---- rows ---- */

static int32_t choose_token(sampled_row *r) {
    bool greedy = !(r->temperature >= GREEDY_BELOW);
    r->likeliest = likeliest_token(r->logits, r->vocab_size, greedy ? NULL : r->room.maxima);
    if (greedy || r->likeliest < 0) return r->likeliest;
    float highest = r->logits[r->likeliest];
    r->curve = (weight_curve){
        .highest = highest,
        .inverse_temperature = 1.0f / (float)r->temperature,
        .lowest = float_at_least(highest + r->temperature * EXP_UNDERFLOW),
    };
    /* compared as logits, min_p is exact */
    r->floor = r->min_p > 0.0 ? float_at_least(highest + r->temperature * log(r->min_p)) : -FLT_MAX;
    return r->top_k == 0 && r->top_p >= 1.0 ? draw_by_id(r) : draw_by_rank(r);
}

typedef struct {
    const float *logits;
    int32_t vocab_size;
    const ap_sampling *sampling;
    int64_t *tokens;
    char *rooms;
    int64_t room_bytes;
    bool room_of_row; /* each row has a room; else each worker */
} sample_job;

static int64_t block_bytes(int32_t vocab_size) {
    return ap_claim_bytes(scan_blocks(vocab_size) * (int64_t)sizeof(float));
}

static int64_t pair_bytes(int32_t vocab_size) { return ap_claim_bytes((int64_t)vocab_size * 8); }

static void sample_task(void *context, int32_t row, int32_t worker) {
    const sample_job *job = context;
    const ap_sampling *sampling = job->sampling;
    char *room = job->rooms + (job->room_of_row ? row : worker) * job->room_bytes;
    sampled_row r = {
        .logits = job->logits + (int64_t)row * job->vocab_size,
        .vocab_size = job->vocab_size,
        .temperature = sampling->temperature[row],
        .top_k = sampling->top_k[row],
        .top_p = sampling->top_p[row],
        .min_p = sampling->min_p[row],
        .uniform = sampling->uniform[row],
    };
    r.room.maxima = (float *)room;
    r.room.masses = (float *)(room += block_bytes(job->vocab_size));
    r.room.pairs = room += block_bytes(job->vocab_size);
    r.room.other = room + pair_bytes(job->vocab_size);
    job->tokens[row] = choose_token(&r);
}

/* Bytes of a row's room; 0 if all rows are greedy. */
static int64_t room_bytes(const ap_sampling *sampling, int32_t num_rows, int32_t vocab_size) {
    int64_t most = 0;
    for (int32_t i = 0; i < num_rows; i++) {
        if (!(sampling->temperature[i] >= GREEDY_BELOW)) continue;
        bool by_id = sampling->top_k[i] == 0 && sampling->top_p[i] >= 1.0f;
        int64_t bytes = 2 * block_bytes(vocab_size) + (by_id ? 0 : 2 * pair_bytes(vocab_size));
        if (bytes > most) most = bytes;
    }
    return most;
}

static ap_status sample(ap_engine *engine, const float *logits, int32_t num_rows,
                        int32_t vocab_size, const ap_sampling *sampling, int64_t *tokens) {
    if (num_rows < 0 || vocab_size <= 0) return AP_BAD_ARGUMENT;
    int32_t threads = ap_pool_threads(engine->pool);
    sample_job job = {
        .logits = logits,
        .vocab_size = vocab_size,
        .sampling = sampling,
        .tokens = tokens,
        .room_bytes = room_bytes(sampling, num_rows, vocab_size),
        .room_of_row = num_rows <= threads,
    };
    int64_t bytes = job.room_bytes * (num_rows < threads ? num_rows : threads);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    job.rooms = ap_claim(engine, bytes);
    if (num_rows) ap_pool_run(engine->pool, sample_task, &job, num_rows);
    return AP_OK;
}

#endif
