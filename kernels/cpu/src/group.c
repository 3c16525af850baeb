/* Ranks in shared memory; see group.h. */
#define _GNU_SOURCE /* syscall */

#include "group.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "pool_clock.h"

#define LINE 128 /* two cache lines, because prefetchers fetch them in pairs */

#ifdef __linux__
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Longer than a pool's thread spins: ranks meet a few times per layer, and their parts differ. */
#define SPIN_NANOSECONDS 50000
#define LOOK_NANOSECONDS 100000000 /* between checks for ended ranks */

/* Written by one rank. */
typedef struct {
    _Alignas(LINE) _Atomic uint32_t arrived; /* meetings that it has reached */
    _Atomic uint32_t sleepers;               /* ranks that sleep until it reaches the next */
    int32_t status[2];                       /* its status in even and odd exchanges */
} rank_line;

struct ap_group {
    rank_line *lines; /* (size,) */
    float *slots;     /* (2, size, floats) */
    int64_t floats;
    int32_t rank;
    int32_t size;
    uint32_t meetings;
    uint32_t turn;
    bool broken;
    struct pollfd *processes; /* of the other ranks; NULL: not watched */
};

static int64_t slot_floats(int64_t floats) {
    int64_t of_line = LINE / (int64_t)sizeof(float);
    return (floats + of_line - 1) / of_line * of_line;
}

int64_t ap_group_bytes(int32_t size, int64_t floats) {
    if (size < 1 || size > AP_MOST_RANKS || floats < 1) return -1;
    return size * ((int64_t)sizeof(rank_line) + 2 * slot_floats(floats) * (int64_t)sizeof(float));
}

ap_group *ap_group_create(void *memory, int32_t rank, int32_t size, int64_t floats,
                          const int32_t *processes) {
    if (ap_group_bytes(size, floats) < 0 || rank < 0 || rank >= size) return NULL;
    ap_group *group = calloc(1, sizeof *group);
    if (!group) return NULL;
    group->lines = memory;
    group->slots = (float *)((char *)memory + size * sizeof(rank_line));
    group->floats = slot_floats(floats);
    group->rank = rank;
    group->size = size;
    if (!processes) return group;
    group->processes = calloc((size_t)size, sizeof *group->processes);
    if (!group->processes) {
        free(group);
        return NULL;
    }
    for (int32_t i = 0; i < size; i++)
        group->processes[i] = (struct pollfd){.fd = processes[i], .events = POLLIN};
    return group;
}

void ap_group_destroy(ap_group *group) {
    if (!group) return;
    free(group->processes);
    free(group);
}

static void sleep_until_arrival(rank_line *line, uint32_t value) {
    struct timespec limit = {.tv_nsec = LOOK_NANOSECONDS};
    syscall(SYS_futex, (uint32_t *)&line->arrived, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void arrive(ap_group *group) {
    rank_line *own = &group->lines[group->rank];
    /* sequentially consistent with `sleepers`: a sleeper sees the new value, or is seen here */
    atomic_store(&own->arrived, group->meetings);
    if (atomic_load(&own->sleepers))
        syscall(SYS_futex, (uint32_t *)&own->arrived, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

static bool has_ended(const ap_group *group) {
    return group->processes && poll(group->processes, (nfds_t)group->size, 0) > 0;
}

static bool has_arrived(uint32_t value, uint32_t meeting) {
    return (int32_t)(value - meeting) >= 0;
}

/* Wait until a rank reaches a meeting; false: a rank has ended. */
static bool wait_for(ap_group *group, rank_line *line, uint32_t meeting) {
    spin s = {.length = SPIN_NANOSECONDS};
    while (!has_arrived(atomic_load_explicit(&line->arrived, memory_order_acquire), meeting)) {
        if (spins(&s)) continue;
        atomic_fetch_add(&line->sleepers, 1);
        uint32_t value = atomic_load(&line->arrived);
        if (!has_arrived(value, meeting)) sleep_until_arrival(line, value);
        atomic_fetch_sub(&line->sleepers, 1);
        value = atomic_load(&line->arrived);
        if (!has_arrived(value, meeting) && has_ended(group)) {
            group->broken = true;
            return false;
        }
    }
    return true;
}

static bool wait_for_others(ap_group *group, uint32_t meeting) {
    for (int32_t i = 0; i < group->size; i++)
        if (i != group->rank && !wait_for(group, &group->lines[i], meeting)) return false;
    return true;
}

bool group_meet(ap_group *group) {
    if (group->broken) return false;
    group->meetings++;
    arrive(group);
    return wait_for_others(group, group->meetings);
}

int32_t ap_group_meet(ap_group *group) { return group_meet(group) ? AP_OK : AP_RANK_LOST; }

int32_t ap_group_await(ap_group *group) {
    if (group->broken || has_ended(group)) return AP_RANK_LOST;
    return wait_for_others(group, group->meetings + 1) ? AP_OK : AP_RANK_LOST;
}

int32_t group_size(const ap_group *group) { return group->size; }
int32_t group_rank(const ap_group *group) { return group->rank; }
int64_t group_floats(const ap_group *group) { return group->floats; }
bool group_is_broken(const ap_group *group) { return group->broken; }
void group_turn(ap_group *group) { group->turn++; }

static float *slot_of(const ap_group *group, uint32_t turn, int32_t rank) {
    return group->slots + ((int64_t)(turn & 1) * group->size + rank) * group->floats;
}

float *group_slot(const ap_group *group, int32_t rank) {
    return slot_of(group, group->turn, rank);
}

float *ap_group_slot(const ap_group *group, int32_t rank, int32_t is_before) {
    return slot_of(group, group->turn - (is_before != 0), rank);
}

ap_status group_agree(ap_group *group, ap_status status) {
    int32_t place = group->turn & 1;
    group->lines[group->rank].status[place] = status;
    if (!group_meet(group)) return AP_RANK_LOST;
    for (int32_t i = 0; i < group->size; i++)
        if (group->lines[i].status[place] > (int32_t)status) status = group->lines[i].status[place];
    group_turn(group);
    return status;
}

int32_t ap_group_exchange(ap_group *group, int32_t status) {
    return group_agree(group, (ap_status)status);
}

int32_t ap_group_sum(ap_group *group, float *values, int64_t count) {
    for (int64_t first = 0; first < count; first += group->floats) {
        int64_t left = count - first, some = left < group->floats ? left : group->floats;
        memcpy(group_slot(group, group->rank), values + first, (size_t)some * sizeof(float));
        if (!group_meet(group)) return AP_RANK_LOST;
        memcpy(values + first, group_slot(group, 0), (size_t)some * sizeof(float));
        for (int32_t i = 1; i < group->size; i++) {
            const float *theirs = group_slot(group, i);
            for (int64_t k = 0; k < some; k++) values[first + k] += theirs[k];
        }
        group_turn(group);
    }
    return AP_OK;
}
#else
/* Groups need futexes between processes. */
int64_t ap_group_bytes(int32_t size, int64_t floats) { return (void)size, (void)floats, -1; }
ap_group *ap_group_create(void *memory, int32_t rank, int32_t size, int64_t floats,
                          const int32_t *processes) {
    return (void)memory, (void)rank, (void)size, (void)floats, (void)processes, NULL;
}
void ap_group_destroy(ap_group *group) { (void)group; }
int32_t ap_group_meet(ap_group *group) { return (void)group, AP_RANK_LOST; }
int32_t ap_group_await(ap_group *group) { return (void)group, AP_RANK_LOST; }
int32_t ap_group_sum(ap_group *group, float *values, int64_t count) {
    return (void)group, (void)values, (void)count, AP_RANK_LOST;
}
int32_t ap_group_exchange(ap_group *group, int32_t status) {
    return (void)group, (void)status, AP_RANK_LOST;
}
float *ap_group_slot(const ap_group *group, int32_t rank, int32_t is_before) {
    return (void)group, (void)rank, (void)is_before, NULL;
}
int32_t group_size(const ap_group *group) { return (void)group, 1; }
int32_t group_rank(const ap_group *group) { return (void)group, 0; }
int64_t group_floats(const ap_group *group) { return (void)group, 0; }
float *group_slot(const ap_group *group, int32_t rank) { return (void)group, (void)rank, NULL; }
bool group_meet(ap_group *group) { return (void)group, false; }
bool group_is_broken(const ap_group *group) { return (void)group, true; }
void group_turn(ap_group *group) { (void)group; }
ap_status group_agree(ap_group *group, ap_status status) {
    return (void)group, (void)status, AP_RANK_LOST;
}
#endif
