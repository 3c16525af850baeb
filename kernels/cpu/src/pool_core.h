/* The core that a thread runs on, if the system tells. */
#ifndef AP_POOL_CORE_H
#define AP_POOL_CORE_H

#include <stdint.h>

#ifdef __linux__
#include <sched.h>

static int32_t this_core(void) { return sched_getcpu(); }

/* Move this thread off a core if it runs there and may run elsewhere. */
static void leave_core(int32_t core) {
    cpu_set_t allowed, others;
    if (core < 0 || this_core() != core) return;
    if (sched_getaffinity(0, sizeof allowed, &allowed)) return;
    others = allowed;
    CPU_CLR(core, &others);
    if (!CPU_COUNT(&others) || sched_setaffinity(0, sizeof others, &others)) return;
    sched_setaffinity(0, sizeof allowed, &allowed);
}
#else
static int32_t this_core(void) { return -1; }
static void leave_core(int32_t core) { (void)core; }
#endif

#endif
