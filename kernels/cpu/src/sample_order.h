/* Tokens in the order of sampling: by falling logit, equal ones by rising id. */
#ifndef AP_SAMPLE_ORDER_H
#define AP_SAMPLE_ORDER_H

#include "sample_scan.h"

/* An integer key: the earlier a token comes, the smaller. */
static uint64_t rank_entry(float logit, int32_t token) {
    return (uint64_t)~order_key(logit) << 32 | (uint32_t)token;
}

static float entry_logit(uint64_t entry) { return order_value(~(uint32_t)(entry >> 32)); }

static int32_t entry_token(uint64_t entry) { return (int32_t)(uint32_t)entry; }

static void insertion_sort(uint64_t *entries, int32_t count) {
    for (int32_t i = 1; i < count; i++) {
        uint64_t entry = entries[i];
        int32_t j = i;
        for (; j && entries[j - 1] > entry; j--) entries[j] = entries[j - 1];
        entries[j] = entry;
    }
}

#define DIGITS 4 /* bytes of a logit's key */
#define INSERTION_SORT_BELOW 48

static int digit_of(uint64_t entry, int digit) { return entry >> (32 + 8 * digit) & 255; }

/* Sort entries whose tokens rise: byte by byte of the logit's key, the lowest first, each pass
 * stable. Returns whichever of the two arrays holds the result. */
static uint64_t *sort_entries(uint64_t *entries, uint64_t *other, int32_t count) {
    int32_t places[DIGITS][256] = {{0}};
    if (count < INSERTION_SORT_BELOW) {
        insertion_sort(entries, count);
        return entries;
    }
    for (int32_t i = 0; i < count; i++)
        for (int d = 0; d < DIGITS; d++) places[d][digit_of(entries[i], d)]++;
    for (int d = 0; d < DIGITS; d++) {
        if (places[d][digit_of(entries[0], d)] == count) continue; /* the same in all */
        int32_t place = 0;
        for (int v = 0; v < 256; v++) {
            int32_t size = places[d][v];
            places[d][v] = place;
            place += size;
        }
        for (int32_t i = 0; i < count; i++)
            other[places[d][digit_of(entries[i], d)]++] = entries[i];
        uint64_t *sorted = other;
        other = entries;
        entries = sorted;
    }
    return entries;
}

#endif
