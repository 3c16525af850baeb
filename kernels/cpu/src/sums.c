/* Sums of memory, by which packed weights that were kept in a file are known to be whole. */
#include <string.h>

#include "appliance_cpu.h"

#define LANES 8 /* independent sums: one multiplication waits for the one before it */
#define FACTOR 0x9e3779b97f4a7c15ull

static uint64_t sum_of(const uint8_t *data, int64_t nbytes) {
    uint64_t sums[LANES], words[LANES];
    for (int lane = 0; lane < LANES; lane++) sums[lane] = (uint64_t)lane + 1;
    for (int64_t at = 0; at < nbytes; at += (int64_t)sizeof words) {
        memcpy(words, data + at, sizeof words);
        for (int lane = 0; lane < LANES; lane++) {
            sums[lane] = (sums[lane] ^ words[lane]) * FACTOR;
            sums[lane] ^= sums[lane] >> 32; /* or upper bits would never reach lower ones */
        }
    }
    uint64_t whole = (uint64_t)nbytes;
    for (int lane = 0; lane < LANES; lane++) whole = (whole ^ sums[lane]) * FACTOR;
    return whole;
}

int32_t ap_sums(const void *data, int64_t nbytes, uint64_t *sums) {
    if (nbytes < 0 || nbytes % AP_SUM_STEP) return AP_BAD_ARGUMENT;
    for (int64_t at = 0; at < nbytes; at += AP_SUMMED) {
        int64_t count = nbytes - at < AP_SUMMED ? nbytes - at : AP_SUMMED;
        *sums++ = sum_of((const uint8_t *)data + at, count);
    }
    return AP_OK;
}
