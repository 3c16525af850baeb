/* The sections of a step, each callable alone, for tests and benchmarks.
 *
 * tests/support/cpu_sections.py compiles the library anew with this file before isa.c, so the code
 * that they call is what `step` calls, compiled with the same flags. Each function ends in the name
 * of its instruction set. */
#ifdef AP_ISA

#include "vector.h"

#include "attention.h"
#include "linear.h"
#include "pointwise.h"
#include "section.h"

#define JOINED_(name, isa) section_##name##_##isa
#define JOINED(name, isa) JOINED_(name, isa)
#define SECTION(type, name) __attribute__((visibility("default"))) type JOINED(name, AP_ISA)

/* ---- over rows ---- */

typedef struct {
    const ap_attention *attention;
    const ap_cache *cache;
    const float *key;
    const float *value;
    const int64_t *slots;
    int32_t layer;
} written_rows;

static void write_row(void *context, int32_t row) {
    const written_rows *w = context;
    int64_t width = (int64_t)w->attention->num_kv_heads * w->attention->head_dim;
    kv_write_token(w->attention, w->cache, w->layer, w->key + row * width,
                   w->value + row * width, w->slots[row]);
}

/* key, value (rows, num_kv_heads, head_dim); slots of a sealed layer are those of open blocks */
SECTION(void, write)(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                     int32_t layer, const float *key, const float *value, int32_t rows,
                     const int64_t *slots) {
    written_rows w = {attention, cache, key, value, slots, layer};
    for_rows(engine, write_row, &w, rows);
}

static void quantize_input(void *in, int32_t row) { prepare_row(in, row); }

/* x (rows, in_features) -> out (rows, out_features), to which it adds with `add` */
SECTION(int32_t, linear)(ap_engine *engine, const ap_linear *linear, const float *x, int32_t rows,
                         int32_t add, float *out) {
    const ap_linear *linears[] = {linear};
    int64_t bytes = input_bytes(linears, 1, rows);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    input in = input_of(linears, 1, x, rows, ap_claim(engine, bytes));
    if (is_prepared(linear)) for_rows(engine, quantize_input, &in, rows);
    linear_section section = {
        .linears = {linear},
        .in = {form_of(&in, linear)},
        .out = {out},
        .out_stride = linear->out_features,
        .add = add,
    };
    run_linear(engine, &section);
    return AP_OK;
}

/* ---- over blocks ---- */

SECTION(void, seal)(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                    int32_t layer, int32_t count, const int32_t *open_blocks,
                    const int32_t *blocks) {
    kv_seal(engine, attention, cache, layer, count, open_blocks, blocks);
}

/* query -> out, both (num_tokens, num_heads, head_dim) */
SECTION(int32_t, attend)(ap_engine *engine, const ap_attention *attention, const ap_cache *cache,
                         int32_t layer, const ap_batch *batch, const float *query, float *out) {
    int64_t bytes = attend_bytes(engine, attention, cache, layer, batch);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    attend(engine, ap_claim(engine, bytes), attention, cache, layer, batch, query,
           attention->num_heads * attention->head_dim, out);
    return AP_OK;
}

/* ---- of one row ---- */

SECTION(void, embedding)(const ap_linear *linear, int64_t index, float *out) {
    linear_row(linear, index, out);
}

SECTION(void, norm)(const float *x, const ap_norm *norm, int32_t width, float *out) {
    if (norm->bias)
        layer_norm_row(x, norm, width, out);
    else
        rms_norm_row(x, norm, width, out);
}

SECTION(void, add)(float *stream, const float *added, int32_t width) {
    add_row(stream, added, width);
}

SECTION(void, scale)(float *x, float factor, int32_t width) { scale_row(x, factor, width); }

SECTION(void, softcap)(float *x, float cap, int32_t width) { softcap_row(x, cap, width); }

/* cosine, sine (rotary_dim / 2,) */
SECTION(void, angles)(const ap_rope *rope, const int64_t *positions, float *cosine, float *sine) {
    rope_angles(rope, positions, cosine, sine);
}

SECTION(void, rotate)(float *head, const float *cosine, const float *sine, int32_t rotary_dim) {
    rotate_head(head, cosine, sine, rotary_dim);
}

SECTION(void, gate)(const float *gate, const float *up, const ap_gating *gating, int32_t width,
                    float *out) {
    gated_row(gate, up, gating, width, out);
}

#endif
