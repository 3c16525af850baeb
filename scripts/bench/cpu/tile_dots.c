/* Times integer products of AMX tiles beside those of AVX-512 VNNI, with equal results.
 *
 *     gcc -O3 -march=native -ffp-contract=off -mprefer-vector-width=512 tile_dots.c && ./a.out
 *
 * As in linear_integer.h, 16 inputs have a scale: so a product of tiles has 16 inputs, and its sums
 * are stored and become floats before the next. Codes of 4 bits; one thread; in the caches.
 */
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
#include <x86intrin.h>

#define INPUTS 576
#define SIXTEENS (INPUTS / 16)
#define ROWS 240
#define TILES 36
#define BIAS 0x4b400000
#define BIAS_FLOAT 0x1.8p23f
#define RUNS 100

typedef struct {
    float scale, lift;
    int32_t start;
} row_scale;

static int8_t by_12[ROWS * INPUTS], by_16[ROWS * INPUTS];
static row_scale scales_12[ROWS * SIXTEENS], scales_16[ROWS * SIXTEENS];
static uint8_t weights[TILES * INPUTS * 8];
static float weight_scales[TILES * SIXTEENS * 16];
static float of_vnni[ROWS * TILES * 16], of_tiles[ROWS * TILES * 16];
static int8_t unpacked[INPUTS * 16] __attribute__((aligned(64)));
static int32_t sums[16][256] __attribute__((aligned(64)));

static __m512i nibbles(const uint8_t *codes, int high) {
    __m512i packed = _mm512_loadu_si512(codes);
    if (high) packed = _mm512_srli_epi16(packed, 4);
    return _mm512_and_si512(packed, _mm512_set1_epi8(15));
}

static __attribute__((noinline)) void with_vnni(int row, int tile) {
    const int8_t *x = by_12 + row * INPUTS;
    const row_scale *r = scales_12 + row * SIXTEENS;
    const uint8_t *codes = weights + tile * INPUTS * 8;
    __m512 acc[12];
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++) acc[i] = _mm512_setzero_ps();
    for (int s = 0; s < SIXTEENS; s++, r += 12) {
        __m512 scale = _mm512_loadu_ps(weight_scales + (tile * SIXTEENS + s) * 16);
        __m512i dot[12];
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) dot[i] = _mm512_set1_epi32(r[i].start);
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++, x += 48) {
            __m512i four = nibbles(codes + v / 2 * 64, v % 2);
#pragma GCC unroll 12
            for (int i = 0; i < 12; i++) {
                int32_t word;
                memcpy(&word, x + 4 * i, 4);
                dot[i] = _mm512_dpbusd_epi32(dot[i], four, _mm512_set1_epi32(word));
            }
        }
        codes += 128;
#pragma GCC unroll 12
        for (int i = 0; i < 12; i++) {
            __m512 sum = _mm512_fmadd_ps(_mm512_castsi512_ps(dot[i]), _mm512_set1_ps(r[i].scale),
                                         _mm512_set1_ps(r[i].lift));
            acc[i] = _mm512_fmadd_ps(sum, scale, acc[i]);
        }
    }
#pragma GCC unroll 12
    for (int i = 0; i < 12; i++)
        _mm512_storeu_ps(of_vnni + ((row + i) * TILES + tile) * 16, acc[i]);
}

#define LOAD(n, from, stride) \
    __asm__ volatile("tileloadd (%0,%1,1), %%tmm" #n ::"r"(from), "r"((long)(stride)) : "memory")
#define STORE(n, to) \
    __asm__ volatile("tilestored %%tmm" #n ", (%0,%1,1)" ::"r"(to), "r"(64L) : "memory")
#define DOT(c, a, b) \
    __asm__ volatile("tilezero %%tmm" #c "\n\ttdpbssd %%tmm" #b ", %%tmm" #a ", %%tmm" #c :::)

/* The sums of sixteens s to s + 3, of 16 rows and a tile of outputs. */
static inline __attribute__((always_inline)) void four_dots(const int8_t *x, int s) {
    const int8_t *w = unpacked + s * 256;
    x += s * 256;
    LOAD(4, x, 16);
    LOAD(5, x + 256, 16);
    LOAD(6, w, 64);
    LOAD(7, w + 256, 64);
    DOT(0, 4, 6);
    DOT(1, 5, 7);
    LOAD(4, x + 512, 16);
    LOAD(5, x + 768, 16);
    LOAD(6, w + 512, 64);
    LOAD(7, w + 768, 64);
    DOT(2, 4, 6);
    DOT(3, 5, 7);
    STORE(0, sums[s % 16]);
    STORE(1, sums[(s + 1) % 16]);
    STORE(2, sums[(s + 2) % 16]);
    STORE(3, sums[(s + 3) % 16]);
}

static void unpack(int tile) {
    const uint8_t *codes = weights + tile * INPUTS * 8;
    for (int i = 0; i < INPUTS / 4; i++)
        _mm512_store_si512(unpacked + i * 64,
                           _mm512_sub_epi8(nibbles(codes + i / 2 * 64, i % 2),
                                           _mm512_set1_epi8(8)));
}

static __attribute__((noinline)) void with_tiles(int row, int tile) {
    const int8_t *x = by_16 + row * INPUTS;
    const row_scale *r = scales_16 + row * SIXTEENS;
    __m512 acc[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) acc[i] = _mm512_setzero_ps();
    four_dots(x, 0);
    for (int s = 0; s < SIXTEENS; s++, r += 16) {
        if (s % 4 == 0 && s + 4 < SIXTEENS) four_dots(x, s + 4);
        __m512 scale = _mm512_loadu_ps(weight_scales + (tile * SIXTEENS + s) * 16);
#pragma GCC unroll 16
        for (int i = 0; i < 16; i++) {
            __m512 sum = _mm512_cvtepi32_ps(_mm512_load_si512(sums[s % 16] + 16 * i));
            sum = _mm512_mul_ps(sum, _mm512_set1_ps(r[i].scale));
            acc[i] = _mm512_fmadd_ps(sum, scale, acc[i]);
        }
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++)
        _mm512_storeu_ps(of_tiles + ((row + i) * TILES + tile) * 16, acc[i]);
}

static void fill(void) {
    for (size_t i = 0; i < sizeof weights; i++) weights[i] = (uint8_t)rand();
    for (int i = 0; i < TILES * SIXTEENS * 16; i++)
        weight_scales[i] = (float)(rand() % 1000) / 1e5f;
    for (int row = 0; row < ROWS; row++)
        for (int s = 0; s < SIXTEENS; s++) {
            int first_12 = row / 12 * 12, first_16 = row / 16 * 16, sum = 0;
            for (int k = 0; k < 16; k++) {
                int8_t code = (int8_t)(rand() % 255 - 127);
                sum += code;
                int in_12 = (s * 4 + k / 4) * 48 + (row - first_12) * 4 + k % 4;
                by_12[first_12 * INPUTS + in_12] = code;
                by_16[first_16 * INPUTS + s * 256 + (row - first_16) * 16 + k] = code;
            }
            float scale = (float)(4 * (rand() % 1000 + 1)) / 1024;
            row_scale one = {scale, -BIAS_FLOAT * scale, BIAS - 8 * sum};
            scales_12[first_12 * SIXTEENS + s * 12 + row - first_12] = one;
            scales_16[first_16 * SIXTEENS + s * 16 + row - first_16] = one;
        }
}

int main(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t row_bytes[16];
        uint8_t rows[16];
    } config = {.palette = 1};
    if (syscall(SYS_arch_prctl, 0x1023, 18)) return puts("tiles are not permitted"), 1;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = i == 4 || i == 5 ? 16 : 64;
        config.rows[i] = i < 6 ? 16 : 4;
    }
    fill();
    __asm__ volatile("ldtilecfg %0" ::"m"(config));
    uint64_t best_vnni = UINT64_MAX, best_tiles = UINT64_MAX;
    for (int run = 0; run < RUNS; run++) {
        uint64_t begin = __rdtsc();
        for (int row = 0; row < ROWS; row += 12)
            for (int tile = 0; tile < TILES; tile++) with_vnni(row, tile);
        uint64_t between = __rdtsc();
        for (int tile = 0; tile < TILES; tile++) {
            unpack(tile);
            for (int row = 0; row < ROWS; row += 16) with_tiles(row, tile);
        }
        uint64_t end = __rdtsc();
        if (between - begin < best_vnni) best_vnni = between - begin;
        if (end - between < best_tiles) best_tiles = end - between;
    }
    __asm__ volatile("tilerelease");
    printf("tiles have %.2f of the rate of VNNI; results are %s\n",
           (double)best_vnni / (double)best_tiles,
           memcmp(of_vnni, of_tiles, sizeof of_vnni) ? "different" : "equal");
    return 0;
}
