/* Sections of busy work, for tests of the pool; included after sections.c. */
#ifdef AP_ISA

#include <stdatomic.h>

#include "pool_clock.h"

#define ROUNDS 20000 /* of a calibration: some tens of microseconds */
#define CALIBRATIONS 50

typedef struct {
    int64_t rounds;
    int64_t *runs;
} exercise;

static void burn(int64_t rounds) {
    for (volatile int64_t round = 0; round < rounds; round++) continue;
}

/* Nanoseconds that ROUNDS take, at best. */
static int64_t calibrated(void) {
    static _Atomic int64_t known;
    int64_t best = atomic_load_explicit(&known, memory_order_relaxed);
    if (best) return best;
    for (int i = 0; i < CALIBRATIONS; i++) {
        int64_t begin = now();
        burn(ROUNDS);
        int64_t taken = now() - begin;
        if (!best || taken < best) best = taken;
    }
    if (best < 1) best = 1;
    atomic_store_explicit(&known, best, memory_order_relaxed);
    return best;
}

static void exercise_chunk(void *context, int32_t chunk, int32_t worker) {
    const exercise *e = context;
    (void)worker;
    burn(e->rounds);
    /* atomic, so that a chunk that two threads run at the same time is counted twice */
    __atomic_fetch_add(&e->runs[chunk], 1, __ATOMIC_RELAXED);
}

/* count tasks of `nanoseconds` busy work each, as one parallel section. The work is a number of
 * rounds, not a time to wait for: a thread that loses its core has the rest of it still to do.
 * runs (count,): how often each task ran is added to it. */
SECTION(void, exercise)(ap_engine *engine, int32_t count, int64_t nanoseconds, int64_t *runs) {
    exercise e = {.runs = runs};
    if (nanoseconds) e.rounds = nanoseconds * ROUNDS / calibrated();
    ap_pool_run(engine->pool, exercise_chunk, &e, count);
}

#endif
