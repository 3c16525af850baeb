/* Token masks: a pass over the words of a mask. The same for every instruction set. */
#include "appliance_cpu.h"

#include <string.h>

#define MINUS_INFINITY 0xff800000u /* as bits of a float */

static void mask_row(float *logits, int32_t vocab_size, const uint32_t *words) {
    for (int32_t first = 0; first < vocab_size; first += 32) {
        uint32_t word = words[first / 32];
        if (word == UINT32_MAX) continue; /* most words are all ones or all zeros */
        int32_t count = vocab_size - first < 32 ? vocab_size - first : 32;
        float *part = logits + first;
        for (int32_t i = 0; i < count; i++) { /* without branches, which would be unpredictable */
            uint32_t bits, banned = (word >> i & 1) - 1;
            memcpy(&bits, part + i, sizeof bits);
            bits = (bits & ~banned) | (MINUS_INFINITY & banned);
            memcpy(part + i, &bits, sizeof bits);
        }
    }
}

void ap_mask_logits(float *logits, int32_t vocab_size, int32_t num_masks, const int64_t *rows,
                    const uint32_t *words, int32_t words_stride) {
    for (int32_t i = 0; i < num_masks; i++)
        mask_row(logits + rows[i] * vocab_size, vocab_size, words + (int64_t)i * words_stride);
}
