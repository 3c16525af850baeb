/* Notices that a thread of the pool costs the caller more time than it saves.
 *
 * With another process on the cores a worker can lose its core in the middle of a chunk, and the
 * caller waits for it; or the system puts both on one core, and they take turns. Either way the
 * caller loses its core inside sections, which its CPU clock shows. That loss is compared with the
 * contribution of one other thread: the chunks that it took, at the cost of the caller's own.
 *
 * A surplus thread is parked for a while, twice as long after each failed attempt to use it again.
 * So another process that keeps running costs little. When it ends, the pool uses the thread again
 * after at most about as long as that process ran.
 */
#ifndef AP_POOL_WATCH_H
#define AP_POOL_WATCH_H

#include <stdbool.h>

#include "pool_clock.h"

/* nanoseconds */
#define WATCH_WINDOW 200000          /* in sections, between two readings of the CPU clock */
#define WATCH_GAP 50000              /* between sections, in which the caller may have slept */
#define WATCH_CREDIT 1000000         /* net loss that parks a thread, and the most credit */
#define WATCH_MIN_PENALTY 4000000    /* of a parked thread */
#define WATCH_MAX_PENALTY 1024000000 /* the same */

typedef struct {
    /* the window */
    int64_t wall; /* inside sections */
    int64_t cpu_begin;
    int64_t own; /* chunks taken by the caller */
    int64_t others;
    /* the judgement */
    int64_t end;    /* of the latest section */
    double credit;  /* recent gain less loss */
    double gain;    /* since the number of threads changed */
    double loss;
    int64_t penalty; /* of the next parked thread */
    int64_t retry;   /* time to try one more */
} watch;

static void watch_open_window(watch *w) {
    w->wall = w->own = w->others = 0;
    w->cpu_begin = own_cpu_time();
}

/* Restart the judgement for a new number of threads, and try one more after the penalty. */
static void watch_change(watch *w, int64_t time) {
    w->credit = w->gain = w->loss = 0;
    w->retry = time + w->penalty;
}

/* True if it is time to try one more thread. */
static bool watch_retries(watch *w, int64_t time) {
    if (time < w->retry) return false;
    watch_change(w, time);
    return true;
}

static void watch_begin(watch *w, int64_t time) {
    if (time - w->end > WATCH_GAP) watch_open_window(w);
}

/* After a section: true if one of the `active` threads should be parked. */
static bool watch_end(watch *w, int64_t begin, int64_t end, int32_t active) {
    w->end = end;
    w->wall += end - begin;
    if (w->wall < WATCH_WINDOW) return false;
    int64_t cpu = own_cpu_time() - w->cpu_begin;
    if (cpu < 0 || cpu > w->wall) cpu = w->wall; /* also when another thread is the caller now */
    double per_chunk = (double)cpu / (double)(w->own ? w->own : 1);
    double gain = per_chunk * (double)w->others / (active - 1);
    double loss = (double)(w->wall - cpu);
    w->gain += gain;
    w->loss += loss;
    w->credit += gain - loss;
    if (w->credit > WATCH_CREDIT) w->credit = WATCH_CREDIT;
    watch_open_window(w);
    if (w->credit >= -WATCH_CREDIT) return false;
    /* an accident after a long gain, or no gain at all? */
    if (w->gain > 2 * w->loss)
        w->penalty = WATCH_MIN_PENALTY;
    else if (w->penalty < WATCH_MAX_PENALTY)
        w->penalty *= 2;
    watch_change(w, end);
    return true;
}

#endif
