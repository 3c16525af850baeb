/* A pool of threads that runs one parallel section at a time and never spins for long.
 *
 * One thread at a time may run sections on a pool, and a task may not run one on its own pool.
 * Idle threads sleep. A process that forks loses the pool: a child must not use it, nor destroy it.
 */
#ifndef AP_POOL_H
#define AP_POOL_H

#include <stdint.h>

typedef struct ap_pool ap_pool;

/* `worker` is 0 .. threads - 1 and distinct among tasks that run at the same time. */
typedef void (*ap_task)(void *context, int32_t chunk, int32_t worker);

/* threads: 1 .. 1024, the caller's included; NULL if they cannot be started */
ap_pool *ap_pool_create(int32_t threads);
void ap_pool_destroy(ap_pool *pool); /* NULL: nothing */
int32_t ap_pool_threads(const ap_pool *pool);

/* Run task(context, 0 .. chunks - 1), in any order, and return when all have ended. One task must
 * not wait for another: while other processes keep the cores busy, fewer threads take part, down
 * to the caller alone. */
void ap_pool_run(ap_pool *pool, ap_task task, void *context, int32_t chunks);

#endif
