/* Finds the symbols of a trellis for sequences of 64 values, by Viterbi's algorithm.
 *
 * A sequence is closed: its first values depend on its last symbols. A first pass over the sequence
 * from its middle on decides those; a second one begins and ends with them. */
#ifndef AP_ENCODE_H
#define AP_ENCODE_H

#include <float.h>

#include "engine.h"
#include "trellis.h"
#include "vector.h"

typedef struct {
    float cost[2][TRELLIS_STATES];
    uint8_t before[TRELLIS_BLOCK][TRELLIS_STATES / 4]; /* the symbol that leaves the state */
} trellis_search;

/* 16 >> bits numbers, each 1 << bits times */
INLINE vfloat vf_repeated(const float *numbers, int bits) {
    float all[AP_LANES];
    for (int i = 0; i < AP_LANES; i++) all[i] = numbers[i >> bits];
    return vf_load(all);
}

/* Extend all paths by one value, whose squared error counts `weight` times; `bits` is constant. */
INLINE void extend_paths(const float *cost, float *next, uint8_t *before, const float *values,
                         float x, float weight, int bits) {
    const int groups = TRELLIS_STATES >> bits, symbols = 1 << bits;
    const vfloat target = vf_set(x), counts = vf_set(weight);
    for (int i = 0; i < groups; i += AP_LANES) {
        vfloat best = vf_load(cost + i), symbol = vf_zero();
        for (int s = 1; s < symbols; s++) {
            vfloat other = vf_load(cost + s * groups + i);
            symbol = vf_choose(other, best, symbol, vf_set((float)s));
            best = vf_min(other, best);
        }
        vi_store_bytes(before + i, vi_round(symbol));
        float costs[AP_LANES];
        vf_store(costs, best);
        for (int k = 0; k < AP_LANES << bits; k += AP_LANES) {
            int64_t state = ((int64_t)i << bits) + k;
            vfloat error = vf_sub(target, vf_load(values + state));
            vfloat so_far = vf_set(costs[k >> bits]);
            if (bits < 4) so_far = vf_repeated(costs + (k >> bits), bits);
            vf_store(next + state, vf_fma(vf_mul(error, counts), error, so_far));
        }
    }
}

/* Find the best path from `start` (below 0: any state) through x (64,), from place `first` on and
 * around; write its states. */
INLINE void search_states(trellis_search *t, const float *x, const float *weights, int first,
                          int32_t start, bool closed, const float *values, int bits,
                          uint16_t *states) {
    const int groups = TRELLIS_STATES >> bits;
    for (int i = 0; i < TRELLIS_STATES; i++) t->cost[0][i] = start < 0 ? 0.0f : FLT_MAX;
    if (start >= 0) t->cost[0][start] = 0.0f;
    for (int i = 0; i < TRELLIS_BLOCK; i++) {
        int place = (first + i) % TRELLIS_BLOCK;
        extend_paths(t->cost[i % 2], t->cost[1 - i % 2], t->before[i], values, x[place],
                     weights[place], bits);
    }
    const float *cost = t->cost[TRELLIS_BLOCK % 2];
    int32_t state = closed ? start : 0;
    for (int i = 1; !closed && i < TRELLIS_STATES; i++)
        if (cost[i] < cost[state]) state = i;
    for (int i = TRELLIS_BLOCK - 1; i >= 0; i--) {
        states[(first + i) % TRELLIS_BLOCK] = (uint16_t)state;
        int32_t group = state >> bits;
        state = t->before[i][group] * groups + group;
    }
}

typedef struct {
    const float *x, *weights;
    uint8_t *symbols;
    float *found;
    const float *values; /* (TRELLIS_STATES,) */
    int32_t bits;
    trellis_search *searches; /* of each worker */
} encoding;

INLINE void encode_sequence(const encoding *e, int32_t index, trellis_search *t, int bits) {
    uint16_t states[TRELLIS_BLOCK];
    const float *x = e->x + (int64_t)index * TRELLIS_BLOCK;
    const float *weights = e->weights + (int64_t)index * TRELLIS_BLOCK;
    search_states(t, x, weights, TRELLIS_BLOCK / 2, -1, false, e->values, bits, states);
    search_states(t, x, weights, 0, states[TRELLIS_BLOCK - 1], true, e->values, bits, states);
    for (int i = 0; i < TRELLIS_BLOCK; i++) {
        e->symbols[(int64_t)index * TRELLIS_BLOCK + i] = (uint8_t)(states[i] & ((1 << bits) - 1));
        e->found[(int64_t)index * TRELLIS_BLOCK + i] = e->values[states[i]];
    }
}

#define KERNEL(bits)                                                                 \
    static void encode_##bits(const encoding *e, int32_t index, trellis_search *t) { \
        encode_sequence(e, index, t, bits);                                          \
    }
KERNEL(2)
KERNEL(3)
KERNEL(4)
KERNEL(5)
#undef KERNEL

static void encode_one(void *context, int32_t index, int32_t worker) {
    static void (*const kernels[])(const encoding *, int32_t, trellis_search *) = {
        encode_2, encode_3, encode_4, encode_5};
    const encoding *e = context;
    kernels[e->bits - 2](e, index, &e->searches[worker]);
}

static ap_status encode(ap_engine *engine, int32_t bits, const float *x, const float *weights,
                        int32_t count, uint8_t *symbols, float *found) {
    int64_t bytes = (int64_t)sizeof(trellis_search) * ap_pool_threads(engine->pool);
    int64_t table = TRELLIS_STATES * (int64_t)sizeof(float);
    ap_status status = ap_reserve(engine, ap_claim_bytes(bytes) + ap_claim_bytes(table));
    if (status) return status;
    float *values = ap_claim(engine, table);
    for (uint32_t i = 0; i < TRELLIS_STATES; i++) values[i] = (float)trellis_value(bits, i);
    encoding e = {x, weights, symbols, found, values, bits, ap_claim(engine, bytes)};
    ap_pool_run(engine->pool, encode_one, &e, count);
    return AP_OK;
}

#endif
