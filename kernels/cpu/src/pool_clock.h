/* The clocks that waiting threads read, in nanoseconds, and how a thread spins. */
#ifndef AP_POOL_CLOCK_H
#define AP_POOL_CLOCK_H

#include <stdbool.h>
#include <stdint.h>
#include <time.h>

static inline int64_t read_clock(clockid_t clock) {
    struct timespec time;
    clock_gettime(clock, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline int64_t now(void) { return read_clock(CLOCK_MONOTONIC); }

/* time that this thread has run */
static inline int64_t own_cpu_time(void) { return read_clock(CLOCK_THREAD_CPUTIME_ID); }

static inline void pause_thread(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

#define PAUSES_PER_CLOCK 16

/* A spin: `for (spin s = {.length = ...}; spins(&s);) look();` */
typedef struct {
    int64_t length; /* nanoseconds */
    int32_t pauses;
    int64_t end; /* 0: clock not read yet */
} spin;

static inline bool spins(spin *s) {
    pause_thread();
    if (++s->pauses % PAUSES_PER_CLOCK) return true;
    int64_t time = now();
    if (!s->end) s->end = time + s->length;
    return time < s->end;
}

#endif
