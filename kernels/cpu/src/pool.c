/* Threads that take the chunks of one parallel section at a time.
 *
 * A section is one 64-bit word: a count of chunks and the next one to take. A thread takes a chunk
 * by an atomic increment of that word, whose result alone tells if a chunk was left. So a late
 * thread cannot mistake one section for another: the word is not replaced while a chunk of its
 * section is taken and not done.
 *
 * No thread spins for long. The caller takes chunks like all threads, so a worker that sleeps, or
 * has lost its core to another process, takes fewer or none, and the caller waits only for chunks
 * that have been taken. If waiting still costs the caller more than a worker contributes, the pool
 * drops a worker for a while (see pool_watch.h).
 */
#define _GNU_SOURCE /* syscall, sched_getcpu */

#include "pool.h"

#include <stdlib.h>

#include "pool_clock.h"
#include "pool_core.h"
#include "pool_gate.h"
#include "pool_watch.h"

/* About the cost of sleeping and waking; longer spins take a core from threads with work. */
#define SPIN_NANOSECONDS 20000
#define LINE 128 /* two cache lines, because prefetchers fetch them in pairs */

/* The section word, from the lowest bit: next chunk, count, flags. A thread increments it at most
 * once when no chunk is left, so `next` cannot run into the count. */
#define NEXT_BITS 20
#define MAX_THREADS 1024
#define MAX_CHUNKS ((1 << NEXT_BITS) - 2 * MAX_THREADS)
#define CHUNK_MASK ((UINT64_C(1) << NEXT_BITS) - 1)
#define ASLEEP (UINT64_C(1) << 62) /* a worker sleeps, or is about to */
#define STOP (UINT64_C(1) << 63)

#define CALLER_SLEEPS (UINT32_C(1) << 31) /* in `done` */

typedef struct {
    ap_pool *pool;
    pthread_t thread;
    int32_t number;
} worker;

/* Words that different threads write during a section have lines of their own. */
struct ap_pool {
    _Alignas(LINE) _Atomic uint64_t section;
    ap_task task; /* this and the next two: written before a section is published */
    void *context;
    int32_t first; /* task number of the section's chunk 0 */

    _Alignas(LINE) gate done; /* chunks of the section that workers have reported */

    _Alignas(LINE) gate sections; /* changes to wake workers for a section */
    gate places;                  /* changes with `active` */
    _Atomic int32_t active;       /* workers from this number on are parked */
    _Atomic int32_t core;         /* on which the caller last woke workers; -1: unknown */
    int32_t threads;

    _Alignas(LINE) watch watch; /* the caller's */
    worker workers[];
};

static inline uint32_t next_of(uint64_t section) { return section & CHUNK_MASK; }
static inline uint32_t count_of(uint64_t section) { return section >> NEXT_BITS & CHUNK_MASK; }
static inline bool has_chunk(uint64_t section) { return next_of(section) < count_of(section); }

/* Take chunks until none is left; return how many. *count: the section's, if any was taken. */
static uint32_t take_chunks(ap_pool *pool, int32_t number, uint32_t *count) {
    for (uint32_t taken = 0;;) {
        /* acquire: the task was written before the section was published */
        uint64_t ticket = atomic_fetch_add_explicit(&pool->section, 1, memory_order_acquire);
        if (!has_chunk(ticket)) return taken;
        pool->task(pool->context, pool->first + (int32_t)next_of(ticket), number);
        *count = count_of(ticket);
        taken++;
        if (next_of(ticket) + 1 == *count) return taken;
    }
}

/* The section cannot end before a worker reports its chunks, so one report for all is enough. */
static void report_done(ap_pool *pool, uint32_t chunks, uint32_t count) {
    /* release: the caller then reads what the chunks wrote */
    uint32_t before = atomic_fetch_add_explicit(&pool->done.value, chunks, memory_order_release);
    if (before + chunks == (count | CALLER_SLEEPS)) gate_wake(&pool->done);
}

/* Wait until the workers have reported all chunks that are not the caller's own. */
static void wait_for_others(ap_pool *pool, uint32_t own, uint32_t count) {
    gate *done = &pool->done;
    spin s = {.length = SPIN_NANOSECONDS};
    do {
        if (atomic_load_explicit(&done->value, memory_order_acquire) + own == count) return;
    } while (spins(&s));
    /* The caller reports its own chunks, too: the last worker must see that it is the last. */
    uint32_t report = own | CALLER_SLEEPS;
    uint32_t value =
        report + atomic_fetch_add_explicit(&done->value, report, memory_order_acquire);
    while (value != (count | CALLER_SLEEPS)) {
        gate_sleep(done, value);
        value = atomic_load_explicit(&done->value, memory_order_acquire);
    }
}

/* Sleep until woken. If no core is idle, the system may wake a worker on the caller's core, where
 * the two would take turns. */
static void sleep_as_worker(ap_pool *pool, gate *g, uint32_t value) {
    gate_sleep(g, value);
    leave_core(atomic_load_explicit(&pool->core, memory_order_relaxed));
}

/* Sleep until a section is published. */
static void sleep_between_sections(ap_pool *pool) {
    /* Whoever publishes after this flag is set sees it, and changes the value read before. */
    uint32_t value = atomic_load_explicit(&pool->sections.value, memory_order_relaxed);
    uint64_t section = atomic_fetch_or_explicit(&pool->section, ASLEEP, memory_order_acq_rel);
    if (!has_chunk(section) && !(section & STOP)) sleep_as_worker(pool, &pool->sections, value);
}

static bool is_parked(ap_pool *pool, int32_t number) {
    return number >= atomic_load_explicit(&pool->active, memory_order_relaxed);
}

/* Sleep until `active` changes. */
static void park(ap_pool *pool, int32_t number) {
    /* acquire: with the value it sees the `active` stored before it */
    uint32_t value = atomic_load_explicit(&pool->places.value, memory_order_acquire);
    if (is_parked(pool, number)) sleep_as_worker(pool, &pool->places, value);
}

static void *work(void *argument) {
    worker *self = argument;
    ap_pool *pool = self->pool;
    for (spin s = {.length = SPIN_NANOSECONDS};;) {
        uint64_t section = atomic_load_explicit(&pool->section, memory_order_relaxed);
        if (section & STOP) return NULL;
        if (is_parked(pool, self->number)) {
            park(pool, self->number);
        } else if (has_chunk(section)) {
            uint32_t count, taken = take_chunks(pool, self->number, &count);
            if (taken) report_done(pool, taken, count);
        } else if (!spins(&s)) {
            sleep_between_sections(pool);
        } else {
            continue;
        }
        s = (spin){.length = SPIN_NANOSECONDS};
    }
}

static void wake_workers(ap_pool *pool, gate *sleeping) {
    atomic_store_explicit(&pool->core, this_core(), memory_order_relaxed);
    /* release: with the value they see all stores before it */
    atomic_fetch_add_explicit(&sleeping->value, 1, memory_order_release);
    gate_wake(sleeping);
}

/* Replace the last section, all of whose chunks are done, by the next one. */
static void publish(ap_pool *pool, uint64_t count, uint64_t flags) {
    /* release: a thread that takes a chunk reads the task */
    uint64_t before = atomic_exchange_explicit(&pool->section, count << NEXT_BITS | flags,
                                               memory_order_acq_rel);
    if (before & ASLEEP) wake_workers(pool, &pool->sections);
}

static void set_active(ap_pool *pool, int32_t active) {
    atomic_store_explicit(&pool->active, active, memory_order_relaxed);
    wake_workers(pool, &pool->places);
}

static void run_section(ap_pool *pool, ap_task task, void *context, int32_t first,
                        uint32_t count) {
    pool->task = task;
    pool->context = context;
    pool->first = first;
    atomic_store_explicit(&pool->done.value, 0, memory_order_relaxed);
    publish(pool, count, 0);
    uint32_t own = take_chunks(pool, 0, &count);
    if (own < count) wait_for_others(pool, own, count);
    pool->watch.own += own;
    pool->watch.others += count - own;
}

void ap_pool_run(ap_pool *pool, ap_task task, void *context, int32_t chunks) {
    int32_t active = 1;
    int64_t begin = 0;
    if (chunks > 1 && pool->threads > 1) {
        begin = now();
        active = atomic_load_explicit(&pool->active, memory_order_relaxed);
        if (active < pool->threads && watch_retries(&pool->watch, begin))
            set_active(pool, ++active);
    }
    if (active == 1) {
        for (int32_t chunk = 0; chunk < chunks; chunk++) task(context, chunk, 0);
        return;
    }
    watch_begin(&pool->watch, begin);
    for (int32_t left = chunks; left > 0; left -= MAX_CHUNKS) {
        uint32_t count = (uint32_t)(left < MAX_CHUNKS ? left : MAX_CHUNKS);
        run_section(pool, task, context, chunks - left, count);
    }
    if (watch_end(&pool->watch, begin, now(), active)) set_active(pool, active - 1);
}

int32_t ap_pool_threads(const ap_pool *pool) { return pool->threads; }

void ap_pool_destroy(ap_pool *pool) {
    if (!pool) return;
    publish(pool, 0, STOP);
    set_active(pool, pool->threads);
    for (int32_t i = 1; i < pool->threads; i++) pthread_join(pool->workers[i].thread, NULL);
    gate_destroy(&pool->places);
    gate_destroy(&pool->sections);
    gate_destroy(&pool->done);
    free(pool);
}

static bool init_gates(ap_pool *pool) {
    if (!gate_init(&pool->done)) return false;
    if (gate_init(&pool->sections)) {
        if (gate_init(&pool->places)) return true;
        gate_destroy(&pool->sections);
    }
    gate_destroy(&pool->done);
    return false;
}

ap_pool *ap_pool_create(int32_t threads) {
    if (threads < 1 || threads > MAX_THREADS) return NULL;
    size_t bytes = sizeof(ap_pool) + (size_t)threads * sizeof(worker);
    ap_pool *pool = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE);
    if (!pool) return NULL;
    if (!init_gates(pool)) {
        free(pool);
        return NULL;
    }
    atomic_init(&pool->section, 0);
    atomic_init(&pool->active, threads);
    atomic_init(&pool->core, -1);
    pool->watch = (watch){.penalty = WATCH_MIN_PENALTY};
    for (pool->threads = 1; pool->threads < threads; pool->threads++) {
        worker *added = &pool->workers[pool->threads];
        *added = (worker){.pool = pool, .number = pool->threads};
        if (pthread_create(&added->thread, NULL, work, added)) {
            ap_pool_destroy(pool);
            return NULL;
        }
    }
    return pool;
}
