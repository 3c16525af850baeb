/* Selects the k best scores; among equal ones, those that torch.topk takes on a CPU.
 *
 * Which of the equal scores it takes depends on how the algorithms of libstdc++ move elements: a
 * partial sort by a heap where k is small, else a quickselect around the median of three. Both are
 * written here after their descriptions; tests compare them with torch. */
#ifndef AP_ROUTE_SELECT_H
#define AP_ROUTE_SELECT_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

typedef struct {
    float score;
    int32_t id;
} candidate;

/* torch sorts partially by a heap if this many times k is at most n */
#define HEAP_SHARE 64
#define INSERTION_SIZE 3 /* a quickselect ends with an insertion sort of this many */

/* NaN counts as the highest. */
static bool is_better(candidate a, candidate b) {
    return (isnan(a.score) && !isnan(b.score)) || a.score > b.score;
}

static void swap_candidates(candidate *a, candidate *b) {
    candidate kept = *a;
    *a = *b;
    *b = kept;
}

/* Put `value` into a heap (worst on top) whose place `hole` is free: sift down, then up. */
static void sift(candidate *heap, int32_t hole, int32_t size, candidate value) {
    int32_t top = hole;
    while (2 * hole + 2 < size) {
        int32_t child = 2 * hole + 2;
        if (is_better(heap[child], heap[child - 1])) child--;
        heap[hole] = heap[child];
        hole = child;
    }
    if (2 * hole + 2 == size) {
        heap[hole] = heap[size - 1];
        hole = size - 1;
    }
    for (; hole > top && is_better(heap[(hole - 1) / 2], value); hole = (hole - 1) / 2)
        heap[hole] = heap[(hole - 1) / 2];
    heap[hole] = value;
}

/* Move the k best of n to the front, through a heap of k. */
static void select_by_heap(candidate *c, int32_t k, int32_t n) {
    for (int32_t parent = k / 2 - 1; parent >= 0; parent--) sift(c, parent, k, c[parent]);
    for (int32_t i = k; i < n; i++) {
        if (!is_better(c[i], c[0])) continue;
        candidate value = c[i];
        c[i] = c[0];
        sift(c, 0, k, value);
    }
}

/* Move the median of the second, middle and last of n to the front. */
static void median_to_front(candidate *c, int32_t n) {
    candidate *a = c + 1, *b = c + n / 2, *last = c + n - 1;
    bool a_first = is_better(*a, *b);
    candidate *high = a_first ? a : b, *low = a_first ? b : a;
    if (is_better(*low, *last))
        swap_candidates(c, low);
    else if (is_better(*high, *last))
        swap_candidates(c, last);
    else
        swap_candidates(c, high);
}

/* Divide c[1 .. n) by c[0]; returns where the worse ones begin. */
static int32_t divide(candidate *c, int32_t n) {
    int32_t first = 1, last = n;
    for (;; first++) {
        while (is_better(c[first], c[0])) first++;
        last--;
        while (is_better(c[0], c[last])) last--;
        if (first >= last) return first;
        swap_candidates(&c[first], &c[last]);
    }
}

static void sort_candidates(candidate *c, int32_t n) {
    for (int32_t i = 1; i < n; i++) {
        candidate value = c[i];
        int32_t j = i;
        for (; j > 0 && is_better(value, c[j - 1]); j--) c[j] = c[j - 1];
        c[j] = value;
    }
}

/* Move the k best of n candidates to the front, in any order. */
static void select_best(candidate *c, int32_t k, int32_t n) {
    if ((int64_t)k * HEAP_SHARE <= n) {
        select_by_heap(c, k, n);
        return;
    }
    int32_t depth = 0;
    for (int32_t left = n; left > 1; left /= 2) depth += 2;
    int32_t nth = k - 1; /* an index into the current c */
    while (n > INSERTION_SIZE) {
        if (depth-- == 0) {
            select_by_heap(c, nth + 1, n);
            swap_candidates(c, c + nth);
            return;
        }
        median_to_front(c, n);
        int32_t cut = divide(c, n);
        if (cut <= nth) {
            c += cut;
            n -= cut;
            nth -= cut;
        } else {
            n = cut;
        }
    }
    sort_candidates(c, n);
}

#endif
