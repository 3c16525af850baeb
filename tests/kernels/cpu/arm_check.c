/* Compares ARM's instruction sets with plain C, bit by bit: linears of all formats, and the KV
 * cache's writing, sealing and attention. Linked with the library and its sections; runs on ARM or
 * under an emulator. Prints a line for each case that differs, and the instruction sets it ran. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "engine.h"

#define SETS(name, type, ...)                   \
    type section_##name##_scalar(__VA_ARGS__);  \
    type section_##name##_neon(__VA_ARGS__);    \
    type section_##name##_i8mm(__VA_ARGS__);    \
    static type (*const name##_of[])(__VA_ARGS__) = {section_##name##_scalar, \
                                                     section_##name##_neon, section_##name##_i8mm};
SETS(linear, int32_t, ap_engine *, const ap_linear *, const float *, int32_t, int32_t, float *)
SETS(write, void, ap_engine *, const ap_attention *, const ap_cache *, int32_t, const float *,
     const float *, int32_t, const int64_t *)
SETS(seal, void, ap_engine *, const ap_attention *, const ap_cache *, int32_t, int32_t,
     const int32_t *, const int32_t *)
SETS(attend, int32_t, ap_engine *, const ap_attention *, const ap_cache *, int32_t,
     const ap_batch *, const float *, float *)

static const int32_t isas[] = {AP_SCALAR, AP_NEON, AP_I8MM};
static int failures;
static uint32_t state = 1;

static uint32_t draw(void) { return state = state * 1664525u + 1013904223u, state >> 8; }
static float number(void) { return (float)(int32_t)(draw() % 2001u - 1000u) / 500.0f; }

static void *aligned(size_t bytes) {
    void *p = aligned_alloc(64, (bytes + 127) / 64 * 64);
    memset(p, 0, (bytes + 127) / 64 * 64);
    return p;
}

static void compare(const char *what, int format, int which, const float *a, const float *b,
                    size_t count) {
    if (!memcmp(a, b, count * sizeof *a)) return;
    printf("differs: %s of format %d, instruction set %d\n", what, format, isas[which]);
    failures++;
}

enum { IN = 192, OUT = 40, TILES = 3, GROUP = 32, ROWS = 5 };

static void check_linear(ap_engine *engine, int which, int format, int offset_kind) {
    size_t bytes = (size_t)TILES * 16 * IN * (format == AP_F32 ? 4 : format <= AP_BF16 ? 2 : 1);
    size_t scales = (size_t)TILES * 16 * (IN / GROUP);
    uint8_t *codes = aligned(bytes);
    float *scale = aligned(scales * 4), *offset = aligned(scales * 4);
    float x[ROWS * IN], plain[ROWS * OUT], fast[ROWS * OUT];
    state = 7u;
    for (size_t i = 0; i < bytes; i++) codes[i] = (uint8_t)draw();
    if (format == AP_F32) for (size_t i = 0; i < bytes / 4; i++) ((float *)codes)[i] = number();
    if (format == AP_BF16 || format == AP_F16) /* no NaN: its bits may differ */
        for (size_t i = 0; i < bytes / 2; i++) ((uint16_t *)codes)[i] &= 0xbbff;
    for (size_t i = 0; i < scales; i++) scale[i] = number() / 64, offset[i] = number();
    for (int i = 0; i < ROWS * IN; i++) x[i] = number();
    ap_linear linear = {.format = format, .offset_kind = offset_kind, .scale_format = AP_F32,
                        .group = GROUP, .in_features = IN, .out_features = OUT, .codes = codes};
    if (format >= AP_INT8) linear.scales = scale;
    if (format >= AP_INT8 && offset_kind != AP_CENTERED) linear.offsets = offset;
    for (int rows = 1; rows <= ROWS; rows += ROWS - 1) {
        linear_of[0](engine, &linear, x, rows, 0, plain);
        linear_of[which](engine, &linear, x, rows, 0, fast);
        compare("linear", format, which, plain, fast, (size_t)rows * OUT);
        if (plain[0] == plain[1]) puts("nothing was multiplied"), failures++;
    }
    free(codes), free(scale), free(offset);
}

enum { HEADS = 4, KV_HEADS = 2, DIM = 64, SLOTS = 32, BLOCKS = 2, TOKENS = 37 };

/* 37 tokens in two blocks; the first one is sealed if the format is AP_SEALED. */
static void check_attention(ap_engine *engine, int which, int format) {
    static float key[TOKENS * KV_HEADS * DIM], value[TOKENS * KV_HEADS * DIM];
    static float query[HEADS * DIM], out[2][HEADS * DIM];
    int sealed = format == AP_SEALED;
    ap_attention attention = {.num_heads = HEADS, .num_kv_heads = KV_HEADS, .head_dim = DIM,
                              .scale = 0.125f};
    int64_t parts = KV_HEADS * SLOTS / 16, page = ap_page_bytes(format, DIM) * parts;
    int64_t open_block = ap_page_bytes(AP_INT8, DIM) * parts, slots[TOKENS];
    int32_t starts[] = {0, 1}, lengths[] = {TOKENS}, table[] = {0, 1}, open[] = {1}, first[] = {0};
    state = 11u;
    for (int i = 0; i < TOKENS * KV_HEADS * DIM; i++) key[i] = number(), value[i] = number();
    for (int i = 0; i < HEADS * DIM; i++) query[i] = number();
    for (int i = 0; i < TOKENS; i++) slots[i] = i;
    ap_batch batch = {.num_tokens = 1, .num_seqs = 1, .table_width = BLOCKS, .num_rows = 1,
                      .query_start = starts, .context_lens = lengths, .block_tables = table,
                      .open_blocks = open};
    void *kept[2];
    for (int turn = 0; turn < 2; turn++) {
        int set = turn ? which : 0;
        uint8_t *pages = aligned((size_t)(page * BLOCKS));
        uint8_t *opened = aligned((size_t)(open_block * 2));
        ap_cache_layer layer = {.format = format};
        ap_cache cache = {.base = pages, .block_bytes = page, .num_blocks = BLOCKS,
                          .block_size = SLOTS, .layers = &layer};
        if (sealed) cache.open_base = opened, cache.open_bytes = open_block, cache.num_open = 2;
        write_of[set](engine, &attention, &cache, 0, key, value, TOKENS, slots);
        if (sealed) seal_of[set](engine, &attention, &cache, 0, 1, first, first);
        attend_of[set](engine, &attention, &cache, 0, &batch, query, out[turn]);
        kept[turn] = pages, free(opened);
    }
    compare("attention", format, which, out[0], out[1], HEADS * DIM);
    compare("cache", format, which, kept[0], kept[1], (size_t)page * BLOCKS / sizeof(float));
    if (out[0][0] == 0.0f || out[0][HEADS * DIM - 1] == 0.0f)
        puts("nothing was attended"), failures++;
    free(kept[0]), free(kept[1]);
}

int main(void) {
    ap_engine *engine = ap_engine_create(1, 0);
    for (int which = 1; which < 3; which++) {
        if (!ap_isa_supported(isas[which])) continue;
        check_linear(engine, which, AP_F32, AP_CENTERED);
        check_linear(engine, which, AP_BF16, AP_CENTERED);
        check_linear(engine, which, AP_F16, AP_CENTERED);
        check_linear(engine, which, AP_E2M1, AP_CENTERED);
        for (int kind = AP_CENTERED; kind <= AP_ZERO_POINT; kind++) {
            check_linear(engine, which, AP_INT4, kind);
            check_linear(engine, which, AP_INT8, kind);
        }
        check_attention(engine, which, AP_BF16);
        check_attention(engine, which, AP_INT8);
        check_attention(engine, which, AP_SEALED);
        printf("ran %d\n", isas[which]);
    }
    printf("best %d\n", ap_current_isa());
    ap_engine_destroy(engine);
    return failures != 0;
}
