/* Exercises kernels/cpu/src/pool.c alone; test_pool.py compiles it with ThreadSanitizer too.
 *
 * pool_check NAME: runs one of the checks below; prints what failed, and exits with 1.
 */
#define _GNU_SOURCE /* usleep, sched_setaffinity */

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>
#include <unistd.h>

#include "pool.h"

#define MOST_THREADS 8
#define MOST_CHUNKS 100

#define CHECK(condition)                                                   \
    do {                                                                   \
        if (!(condition)) {                                                \
            printf("%s:%d: %s is false\n", __FILE__, __LINE__, #condition); \
            exit(1);                                                       \
        }                                                                  \
    } while (0)

static uint32_t random_below(uint32_t *state, uint32_t limit) {
    *state = *state * 1664525 + 1013904223;
    return (*state >> 8) % limit;
}

static int64_t milliseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000 + time.tv_nsec / 1000000;
}

/* ---- sections: each chunk once, each worker in one place, results visible to the caller ---- */

/* Plain memory throughout: ThreadSanitizer checks that the pool orders the accesses. */
typedef struct {
    int64_t section;
    int32_t nap;    /* microseconds that chunk 0 sleeps */
    int32_t rounds; /* of work in a chunk */
    int64_t out[MOST_CHUNKS];
    int64_t of_worker[MOST_THREADS];
} sums;

static void sum_chunk(void *context, int32_t chunk, int32_t worker) {
    sums *s = context;
    s->out[chunk] += s->section + chunk;
    s->of_worker[worker] += 1;
    for (volatile int32_t round = 0; round < s->rounds; round++) continue;
    if (s->nap && chunk == 0) usleep((useconds_t)s->nap);
}

/* Sections of random sizes; every now and then a pause lets the workers fall asleep, in or between
 * sections. */
static void many_sections(int32_t threads, int32_t sections, uint32_t seed) {
    ap_pool *pool = ap_pool_create(threads);
    CHECK(pool);
    CHECK(ap_pool_threads(pool) == threads);
    for (int32_t section = 0; section < sections; section++) {
        sums s = {.section = section, .rounds = (int32_t)random_below(&seed, 300)};
        int32_t chunks = (int32_t)random_below(&seed, MOST_CHUNKS);
        uint32_t event = random_below(&seed, 64);
        if (event == 0) usleep(random_below(&seed, 100));
        if (event == 1) s.nap = (int32_t)random_below(&seed, 100);
        ap_pool_run(pool, sum_chunk, &s, chunks);
        int64_t runs = 0;
        for (int32_t i = 0; i < chunks; i++) CHECK(s.out[i] == section + i);
        for (int32_t i = chunks; i < MOST_CHUNKS; i++) CHECK(s.out[i] == 0);
        for (int32_t i = 0; i < threads; i++) runs += s.of_worker[i];
        CHECK(runs == chunks);
    }
    ap_pool_destroy(pool);
}

static void check_sections(void) {
    for (int32_t threads = 1; threads <= MOST_THREADS; threads++)
        many_sections(threads, 3000, (uint32_t)threads);
}

static void *one_caller(void *argument) {
    many_sections(3, 3000, *(uint32_t *)argument);
    return NULL;
}

/* Several pools, each with a caller of its own. */
static void check_callers(void) {
    pthread_t callers[4];
    uint32_t seeds[4];
    for (uint32_t i = 0; i < 4; i++) {
        seeds[i] = 100 + i;
        CHECK(!pthread_create(&callers[i], NULL, one_caller, &seeds[i]));
    }
    for (uint32_t i = 0; i < 4; i++) pthread_join(callers[i], NULL);
}

/* Pools that end while their threads still start, spin or sleep. */
static void check_lifetimes(void) {
    for (int32_t round = 0; round < 300; round++) {
        ap_pool *pool = ap_pool_create(1 + round % MOST_THREADS);
        CHECK(pool);
        sums s = {0};
        for (int32_t i = 0; i < round % 4; i++) ap_pool_run(pool, sum_chunk, &s, MOST_CHUNKS);
        if (round % 3 == 0) usleep((useconds_t)round);
        ap_pool_destroy(pool);
    }
    CHECK(!ap_pool_create(0));
    CHECK(!ap_pool_create(-1));
    ap_pool_destroy(NULL);
}

/* All threads on one core. */
static void check_one_core(void) {
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(sched_getcpu(), &one);
    CHECK(!sched_setaffinity(0, sizeof one, &one));
    many_sections(4, 1000, 1);
}

/* The system refuses some threads: those that have started end, and nothing is left behind. */
static void check_limits(void) {
    struct rlimit before;
    CHECK(!getrlimit(RLIMIT_AS, &before));
    struct rlimit small = {.rlim_cur = 1 << 30, .rlim_max = before.rlim_max};
    CHECK(!setrlimit(RLIMIT_AS, &small)); /* stacks of 1000 threads need more than 1 GiB */
    for (int32_t round = 0; round < 5; round++) CHECK(!ap_pool_create(1000));
    many_sections(4, 100, 1);
    CHECK(!setrlimit(RLIMIT_AS, &before));
}

/* ---- parallel: chunks do run at the same time ---- */

typedef struct {
    _Atomic int32_t present;
    _Atomic int32_t workers; /* a bit each */
    int32_t expected;
} meeting;

static void meet(void *context, int32_t chunk, int32_t worker) {
    meeting *m = context;
    (void)chunk;
    atomic_fetch_or(&m->workers, 1 << worker);
    atomic_fetch_add(&m->present, 1);
    for (int64_t end = milliseconds() + 20000; atomic_load(&m->present) < m->expected;) {
        CHECK(milliseconds() < end);
        usleep(50);
    }
}

static void check_parallel(void) {
    for (int32_t threads = 2; threads <= MOST_THREADS; threads++) {
        ap_pool *pool = ap_pool_create(threads);
        CHECK(pool);
        meeting m = {.expected = threads};
        ap_pool_run(pool, meet, &m, threads);
        CHECK(m.workers == (1 << threads) - 1);
        ap_pool_destroy(pool);
    }
}

/* ---- watch: a worker that costs more than it saves is left out, and tried again later ---- */

typedef struct {
    int32_t nap; /* microseconds */
    _Atomic int32_t of_others;
} naps;

static int64_t cpu_microseconds(void) {
    struct timespec time;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return (int64_t)time.tv_sec * 1000000 + time.tv_nsec / 1000;
}

/* The caller works for 50 microseconds, and so do others unless they nap, as if they had lost
 * their core. */
static void work_or_nap(void *context, int32_t chunk, int32_t worker) {
    naps *n = context;
    (void)chunk;
    if (worker) atomic_fetch_add(&n->of_others, 1);
    if (worker && n->nap) usleep((useconds_t)n->nap);
    else
        for (int64_t end = cpu_microseconds() + 50; cpu_microseconds() < end;) continue;
}

/* Run sections for `duration` milliseconds, or until `enough` of them had a worker beside the
 * caller; return how many had. */
static int32_t helped_sections(ap_pool *pool, naps *n, int64_t duration, int32_t enough,
                               int32_t *sections) {
    int32_t helped = 0;
    *sections = 0;
    for (int64_t end = milliseconds() + duration; milliseconds() < end && helped < enough;) {
        n->of_others = 0;
        ap_pool_run(pool, work_or_nap, n, 2 * ap_pool_threads(pool));
        helped += n->of_others > 0;
        *sections += 1;
    }
    return helped;
}

static void check_watch(void) {
    for (int32_t threads = 2; threads <= 3; threads++) {
        ap_pool *pool = ap_pool_create(threads);
        CHECK(pool);
        naps slow = {.nap = 10000}, quick = {.nap = 0};
        int32_t sections;
        CHECK(helped_sections(pool, &slow, 5000, 1, &sections) == 1);
        helped_sections(pool, &slow, 500, 1000, &sections); /* until it has been noticed */
        /* with help each would take 10 ms */
        CHECK(helped_sections(pool, &slow, 500, 1000, &sections) < 15);
        CHECK(sections > 150);
        CHECK(helped_sections(pool, &quick, 20000, 1, &sections) == 1);
        ap_pool_destroy(pool);
    }
}

static const struct {
    const char *name;
    void (*run)(void);
} checks[] = {
    {"sections", check_sections}, {"callers", check_callers},   {"lifetimes", check_lifetimes},
    {"limits", check_limits},     {"one_core", check_one_core}, {"parallel", check_parallel},
    {"watch", check_watch},
};

int main(int count, char **arguments) {
    for (size_t i = 0; i < sizeof checks / sizeof *checks && count == 2; i++) {
        if (strcmp(arguments[1], checks[i].name)) continue;
        checks[i].run();
        return 0;
    }
    printf("which check?\n");
    return 2;
}
