/* Samples where a process spends its processor time, and measures the rate of dot products. */
#define _GNU_SOURCE
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/time.h>
#include <time.h>
#include <ucontext.h>

#define MOST 1000000

uintptr_t samples[MOST];
static _Atomic int32_t taken;

static void take(int number, siginfo_t *info, void *context) {
    (void)number, (void)info;
    int32_t at = atomic_fetch_add(&taken, 1);
    if (at < MOST) samples[at] = (uintptr_t)((ucontext_t *)context)->uc_mcontext.gregs[REG_RIP];
}

/* Sample all threads, one each `microseconds` of processor time; 0 stops. Returns the samples. */
int32_t sample_each(int32_t microseconds) {
    struct sigaction action = {.sa_sigaction = take, .sa_flags = SA_SIGINFO | SA_RESTART};
    struct itimerval timer = {{0, microseconds}, {0, microseconds}};
    sigaction(SIGPROF, &action, NULL);
    setitimer(ITIMER_PROF, &timer, NULL);
    int32_t count = atomic_exchange(&taken, 0);
    return count < MOST ? count : MOST;
}

#ifdef __AVX512VNNI__
typedef int32_t lanes __attribute__((vector_size(64)));
#define PRODUCTS 64 /* of bytes, of an instruction */
#define DOT(sum, x) __asm__ volatile("vpdpbusd %1, %1, %0" : "+v"(sum) : "v"(x))
#else
typedef int16_t lanes __attribute__((vector_size(32)));
#define PRODUCTS 32
#define DOT(sum, x) __asm__ volatile("vpmaddubsw %1, %1, %0" : "=x"(sum) : "x"(x))
#endif

/* Products of bytes a second, of one thread and from registers. */
double dot_rate(void) {
    lanes sum[10] = {{0}}, x = {1};
    struct timespec begin, end;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &begin);
    for (int i = 0; i < 2000000; i++) {
#pragma GCC unroll 10
        for (int j = 0; j < 10; j++) DOT(sum[j], x);
    }
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &end);
    double seconds = (double)(end.tv_sec - begin.tv_sec);
    seconds += 1e-9 * (double)(end.tv_nsec - begin.tv_nsec);
    return 2e7 * PRODUCTS / seconds;
}
