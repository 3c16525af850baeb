/* Parts of a step, for callers that compute the rest of a model themselves. */
#ifndef AP_PARTS_API_H
#define AP_PARTS_API_H

#include "appliance_cpu.h"

#pragma GCC visibility push(default)

/* Write one layer's keys and values to the cache and attend: qkv (num_tokens, num_heads + 2 *
 * num_kv_heads, head_dim), rotated; out (num_tokens, num_heads, head_dim). This reads no linear,
 * norm or rope of the attention, and of the batch only the places of its rows. */
int32_t ap_attend(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                  int32_t layer, const ap_batch *batch, const float *qkv, float *out);
/* out (rows, out_features) = x (rows, in_features) times a weight, plus its bias. */
int32_t ap_multiply(ap_engine *engine, const ap_linear *linear, const float *x, int32_t rows,
                    float *out);
/* out (count, in_features): rows of a weight, as of an embedding. */
int32_t ap_rows(ap_engine *engine, const ap_linear *linear, const int64_t *ids, int32_t count,
                float *out);

#pragma GCC visibility pop

#endif
