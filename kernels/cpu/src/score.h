/* Log probabilities of the token that really follows each row, and of the likeliest ones;
 * kernels/token_scores/reference.py is the definition. A row is one task. */
#ifndef AP_SCORE_H
#define AP_SCORE_H

#include "sample.h"

typedef struct {
    const float *logits;
    int32_t vocab_size;
    const int64_t *targets;
    int32_t top;
    float *chosen;
    float *top_logprobs;
    int64_t *top_ids;
    char *rooms; /* of each worker */
    int64_t room_bytes;
} score_job;

static void put_top(const sampled_row *r, const score_job *job, int32_t row, double log_mass) {
    float *logprobs = job->top_logprobs + (int64_t)row * job->top;
    int64_t *ids = job->top_ids + (int64_t)row * job->top;
    candidates c = top_candidates(r, job->top);
    uint64_t *entries = (uint64_t *)r->room.other;
    for (int32_t i = 0; i < c.count; i++) entries[i] = rank_entry(c.logits[i], c.tokens[i]);
    entries = sort_entries(entries, (uint64_t *)r->room.pairs, c.count);
    for (int32_t i = 0; i < job->top; i++) {
        bool there = i < c.count; /* banned tokens are no candidates */
        float distance = there ? entry_logit(entries[i]) - r->curve.highest : -INFINITY;
        logprobs[i] = (float)(distance - log_mass);
        ids[i] = there ? entry_token(entries[i]) : 0;
    }
}

static void score_task(void *context, int32_t row, int32_t worker) {
    const score_job *job = context;
    char *room = job->rooms + worker * job->room_bytes;
    sampled_row r = {
        .logits = job->logits + (int64_t)row * job->vocab_size,
        .vocab_size = job->vocab_size,
    };
    r.room.maxima = (float *)room;
    r.room.masses = (float *)(room += block_bytes(job->vocab_size));
    r.room.pairs = room += block_bytes(job->vocab_size);
    r.room.other = room + pair_bytes(job->vocab_size);
    int32_t likeliest = likeliest_token(r.logits, r.vocab_size, r.room.maxima);
    if (likeliest < 0) {
        job->chosen[row] = NAN;
        for (int32_t i = 0; i < job->top; i++) {
            job->top_logprobs[(int64_t)row * job->top + i] = NAN;
            job->top_ids[(int64_t)row * job->top + i] = 0;
        }
        return;
    }
    float highest = r.logits[likeliest];
    r.curve = (weight_curve){.highest = highest, .inverse_temperature = 1.0f};
    r.curve.lowest = float_at_least(highest + EXP_UNDERFLOW);
    double log_mass = log(row_mass(r.logits, r.vocab_size, r.room.maxima, r.curve, r.room.masses));
    job->chosen[row] = (float)(r.logits[job->targets[row]] - highest - log_mass);
    r.curve.lowest = -FLT_MAX;
    if (job->top == 1) {
        job->top_logprobs[row] = (float)-log_mass;
        job->top_ids[row] = likeliest;
    } else if (job->top) {
        put_top(&r, job, row, log_mass);
    }
}

static ap_status score(ap_engine *engine, const float *logits, int32_t num_rows,
                       int32_t vocab_size, const int64_t *targets, int32_t top, float *chosen,
                       float *top_logprobs, int64_t *top_ids) {
    if (num_rows < 0 || vocab_size <= 0 || top < 0 || top > vocab_size) return AP_BAD_ARGUMENT;
    for (int32_t i = 0; i < num_rows; i++)
        if (targets[i] < 0 || targets[i] >= vocab_size) return AP_BAD_ARGUMENT;
    score_job job = {
        .logits = logits,
        .vocab_size = vocab_size,
        .targets = targets,
        .top = top,
        .chosen = chosen,
        .top_logprobs = top_logprobs,
        .top_ids = top_ids,
        .room_bytes = 2 * block_bytes(vocab_size) + (top > 1 ? 2 * pair_bytes(vocab_size) : 0),
    };
    int64_t bytes = job.room_bytes * ap_pool_threads(engine->pool);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    job.rooms = ap_claim(engine, bytes);
    if (num_rows) ap_pool_run(engine->pool, score_task, &job, num_rows);
    return AP_OK;
}

#endif
