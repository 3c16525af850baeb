/* A word that threads sleep on until it changes: a futex, or without them a condition variable. */
#ifndef AP_POOL_GATE_H
#define AP_POOL_GATE_H

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#if defined(__linux__) && !defined(AP_NO_FUTEX)
#define AP_FUTEX
#include <limits.h>
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

typedef struct {
    _Atomic uint32_t value;
#ifndef AP_FUTEX
    pthread_mutex_t mutex;
    pthread_cond_t changed;
#endif
} gate;

#ifdef AP_FUTEX
static bool gate_init(gate *g) {
    atomic_init(&g->value, 0);
    return true;
}

static void gate_destroy(gate *g) { (void)g; }

/* Sleep if the value is still this one; may return before it changes. */
static void gate_sleep(gate *g, uint32_t value) {
    syscall(SYS_futex, (uint32_t *)&g->value, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

/* Wake all, after a change of the value. */
static void gate_wake(gate *g) {
    syscall(SYS_futex, (uint32_t *)&g->value, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}
#else
static bool gate_init(gate *g) {
    atomic_init(&g->value, 0);
    if (pthread_mutex_init(&g->mutex, NULL)) return false;
    if (!pthread_cond_init(&g->changed, NULL)) return true;
    pthread_mutex_destroy(&g->mutex);
    return false;
}

static void gate_destroy(gate *g) {
    pthread_cond_destroy(&g->changed);
    pthread_mutex_destroy(&g->mutex);
}

static void gate_sleep(gate *g, uint32_t value) {
    pthread_mutex_lock(&g->mutex);
    while (atomic_load_explicit(&g->value, memory_order_acquire) == value)
        pthread_cond_wait(&g->changed, &g->mutex);
    pthread_mutex_unlock(&g->mutex);
}

/* Under the mutex a sleeper has seen the new value, or gets this signal. */
static void gate_wake(gate *g) {
    pthread_mutex_lock(&g->mutex);
    pthread_cond_broadcast(&g->changed);
    pthread_mutex_unlock(&g->mutex);
}
#endif

#endif
