/* Tiles of 16 rows of 64 bytes, and their products: AMX, or with AP_EMULATED_TILES the same in
 * plain C, for tests on other processors.
 *
 * A thread has eight tiles, numbered by constants, from `tiles_begin` to `tiles_end`. Compilers do
 * not know what a tile holds, so each operation is an instruction in the order of the source.
 */
#ifndef AP_TILES_H
#define AP_TILES_H

#include "vector.h"

#if defined(__AMX_TILE__) || defined(AP_EMULATED_TILES)
#define AP_TILES 1
#else
#define AP_TILES 0
#endif

#define TILE_ROWS 16
#define TILE_BYTES 1024

#if AP_TILES && !defined(AP_EMULATED_TILES)

typedef struct {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16]; /* of each tile */
    uint8_t rows[16];
} tile_config;

/* what an emulation needs */
typedef struct {
    char nothing;
} tile_file;

INLINE void tiles_begin(tile_file *t) {
    tile_config config = {.palette = 1};
    (void)t;
    for (int i = 0; i < 8; i++) config.row_bytes[i] = 64, config.rows[i] = TILE_ROWS;
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
}
INLINE void tiles_end(tile_file *t) {
    (void)t;
    __asm__ volatile("tilerelease");
}
#define WITH_TILES(t, instruction, ...)                \
    do {                                               \
        (void)(t);                                     \
        __asm__ volatile(instruction ::__VA_ARGS__);   \
    } while (0)
#define AT(address, stride) "r"(address), "r"((ptrdiff_t)(stride)) : "memory"
#define tile_zero(t, n) WITH_TILES(t, "tilezero %%tmm" #n, )
#define tile_load(t, n, from, stride) \
    WITH_TILES(t, "tileloadd (%0,%1,1), %%tmm" #n, AT(from, stride))
#define tile_store(t, n, to, stride) \
    WITH_TILES(t, "tilestored %%tmm" #n ", (%0,%1,1)", AT(to, stride))
/* c[i][j] += sum over k and t of a[i][2k + t] * b[k][2j + t], bfloat16 */
#define tile_dot_bfloats(t, c, a, b) \
    WITH_TILES(t, "tdpbf16ps %%tmm" #b ", %%tmm" #a ", %%tmm" #c, )

#elif AP_TILES

typedef struct {
    uint8_t tile[8][TILE_ROWS][64];
} tile_file;

INLINE void tiles_begin(tile_file *t) { memset(t, 0, sizeof *t); }
INLINE void tiles_end(tile_file *t) { (void)t; }
INLINE void tile_zero(tile_file *t, int n) { memset(t->tile[n], 0, TILE_BYTES); }
INLINE void tile_load(tile_file *t, int n, const void *from, ptrdiff_t stride) {
    for (int i = 0; i < TILE_ROWS; i++) memcpy(t->tile[n][i], (const char *)from + i * stride, 64);
}
INLINE void tile_store(const tile_file *t, int n, void *to, ptrdiff_t stride) {
    for (int i = 0; i < TILE_ROWS; i++) memcpy((char *)to + i * stride, t->tile[n][i], 64);
}
INLINE float tile_bfloat(const uint8_t *row, int i) {
    uint32_t bits = (uint32_t)row[2 * i] << 16 | (uint32_t)row[2 * i + 1] << 24;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}
/* Two sums, of the even and of the odd inputs (Intel's manual, TDPBF16PS). */
static __attribute__((unused)) void tile_dot_bfloats(tile_file *t, int c, int a, int b) {
    for (int i = 0; i < TILE_ROWS; i++)
        for (int j = 0; j < 16; j++) {
            float even = 0.0f, odd = 0.0f, sum;
            for (int k = 0; k < 16; k++) {
                even = fmaf(tile_bfloat(t->tile[a][i], 2 * k), tile_bfloat(t->tile[b][k], 2 * j),
                            even);
                odd = fmaf(tile_bfloat(t->tile[a][i], 2 * k + 1),
                           tile_bfloat(t->tile[b][k], 2 * j + 1), odd);
            }
            memcpy(&sum, t->tile[c][i] + 4 * j, 4);
            sum += even + odd;
            memcpy(t->tile[c][i] + 4 * j, &sum, 4);
        }
}

#endif
#endif
