/* Multiplies rows by weights of 16 bits as products of tiles of bfloat16 (tiles.h).
 *
 * A float16 weight is the sum of two bfloat16 parts, exactly. An input becomes two, the second
 * rounded from what the first leaves, with an error of at most 2^-17 of it. Rows are split once,
 * for all linears that read them; a weight is split, and its inputs paired, for some rows at a
 * time.
 */
#ifndef AP_LINEAR_SPLIT_H
#define AP_LINEAR_SPLIT_H

#include "linear_dense.h"
#include "tiles.h"

#define INPUT_PARTS 2
#define STEP_INPUTS 32 /* of one product of tiles */
#define STEP_BFLOATS (TILE_BYTES / 2)

#define SPLIT_ROWS 256 /* the most whose sums are kept while some inputs are multiplied */
#define SPLIT_BYTES 1048576 /* of rows in parts that stay in the second-level cache */
#define SPLIT_STEPS 16 /* steps of inputs whose weights are kept split and paired */

/* true if rows are split before they are multiplied by this weight */
static inline bool multiplies_parts(const ap_linear *w) {
    return AP_TILES && (w->format == AP_F16 || w->format == AP_BF16);
}

INLINE int32_t steps_of(int32_t width) { return (width + STEP_INPUTS - 1) / STEP_INPUTS; }

/* bytes of workspace for `rows` rows in parts */
static int64_t split_bytes(int32_t rows, int32_t width) {
    int64_t blocks = (rows + TILE_ROWS - 1) / TILE_ROWS;
    return ap_claim_bytes(blocks * steps_of(width) * INPUT_PARTS * TILE_BYTES);
}

/* Split 16 numbers into parts, `apart` elements from each other. */
INLINE void split_floats(vfloat x, int parts, uint16_t *out, ptrdiff_t apart) {
    for (int p = 0; p < parts; p++, out += apart) {
        vf_store_bfloat(out, x);
        x = vf_sub(x, vf_load_bfloat(out));
    }
}

/* Split one row; inputs beyond the last are zero. */
static void split_row(rows_in *in, int32_t row, int32_t width) {
    const float *x = in->x + (int64_t)row * in->stride;
    uint16_t *out = in->parts + row % TILE_ROWS * STEP_INPUTS +
                    (int64_t)(row / TILE_ROWS) * steps_of(width) * INPUT_PARTS * STEP_BFLOATS;
    int32_t padded = steps_of(width) * STEP_INPUTS;
    for (int32_t k = 0; k < padded; k += AP_LANES) {
        int32_t left = width - k;
        vfloat inputs = left >= AP_LANES ? vf_load(x + k)
                        : left > 0       ? vf_load_first(x + k, left)
                                         : vf_zero();
        split_floats(inputs, INPUT_PARTS, out, STEP_BFLOATS);
        out += k % STEP_INPUTS ? INPUT_PARTS * STEP_BFLOATS - AP_LANES : AP_LANES;
    }
}

#if AP_TILES
/* the bits of 16 outputs' weights, or a pair of bfloat16 of each */
typedef uint32_t lane_bits __attribute__((vector_size(64)));

INLINE lane_bits bits_of(vfloat x) {
    lane_bits bits;
    vf_store((float *)&bits, x);
    return bits;
}

INLINE vfloat floats_of(lane_bits bits) { return vf_load((const float *)&bits); }

/* Pair two inputs of 16 outputs, given as floats whose last 16 bits do not count: out (16, 2). */
INLINE void pair_inputs(lane_bits even, lane_bits odd, uint16_t *out) {
    even = even >> 16 | (odd & 0xffff0000u);
    memcpy(out, &even, sizeof even);
}

/* Split two inputs of 16 outputs, and pair them; parts of a float16 are cut, not rounded. */
INLINE void split_pair(const uint16_t *even, const uint16_t *odd, int parts, uint16_t *out) {
    if (parts == 1) {
        pair_inputs(bits_of(vf_load_bfloat(even)), bits_of(vf_load_bfloat(odd)), out);
        return;
    }
    vfloat a = vf_load_half(even), b = vf_load_half(odd);
    lane_bits high_a = bits_of(a) & 0xffff0000u, high_b = bits_of(b) & 0xffff0000u;
    pair_inputs(high_a, high_b, out);
    pair_inputs(bits_of(vf_sub(a, floats_of(high_a))), bits_of(vf_sub(b, floats_of(high_b))),
                out + DENSE_TILES * STEP_BFLOATS);
}

/* Split the weights of a tile of outputs, inputs [first, first + 32 * steps), and pair them: out
 * (steps, DENSE_TILES * parts, 16, 16, 2), of which it writes one in DENSE_TILES. */
INLINE void split_weights(const ap_linear *w, int32_t tile, int32_t first, int32_t steps, int parts,
                          uint16_t *out) {
    const uint16_t *codes = (const uint16_t *)tile_codes(w, tile) + (int64_t)first * AP_LANES;
    const ptrdiff_t step = (ptrdiff_t)DENSE_TILES * parts * STEP_BFLOATS;
    int32_t left = w->in_features - first, whole = smaller(left / STEP_INPUTS, steps);
    for (int32_t s = 0; s < whole; s++, out += step)
        for (int32_t k = 0; k < STEP_INPUTS; k += 2, codes += 2 * AP_LANES) {
            prefetch(codes + PREFETCH_BYTES / 2);
            split_pair(codes, codes + AP_LANES, parts, out + k * AP_LANES);
        }
    if (whole == steps) return;
    uint16_t rest[STEP_INPUTS * AP_LANES] = {0};
    memcpy(rest, codes, (size_t)(left % STEP_INPUTS) * AP_LANES * sizeof *codes);
    for (int32_t k = 0; k < STEP_INPUTS; k += 2)
        split_pair(rest + k * AP_LANES, rest + (k + 1) * AP_LANES, parts, out + k * AP_LANES);
}

/* Tiles: 0 to 3 are sums, of a block of rows by the tiles of outputs, then of the next block; 4 and
 * 5 a part of their rows, 6 and 7 of the weights. */
#define MULTIPLY_ROWS(t, rows, block, two)                \
    tile_load(t, 4, rows, 64);                            \
    if (two) tile_load(t, 5, (rows) + (block), 64);       \
    tile_dot_bfloats(t, 0, 4, 6);                         \
    tile_dot_bfloats(t, 1, 4, 7);                         \
    if (two) {                                            \
        tile_dot_bfloats(t, 2, 5, 6);                     \
        tile_dot_bfloats(t, 3, 5, 7);                     \
    }

/* Begin with sums (blocks, 2, 16, 16) of one or two blocks of rows, or with zeros. */
INLINE void load_sums(tile_file *t, const float *sums, bool two, bool begins) {
    if (begins) {
        tile_zero(t, 0);
        tile_zero(t, 1);
        tile_zero(t, 2);
        tile_zero(t, 3);
        return;
    }
    tile_load(t, 0, sums, 64);
    tile_load(t, 1, sums + 256, 64);
    if (two) tile_load(t, 2, sums + 512, 64);
    if (two) tile_load(t, 3, sums + 768, 64);
}

INLINE void store_sums(tile_file *t, float *sums, bool two) {
    tile_store(t, 0, sums, 64);
    tile_store(t, 1, sums + 256, 64);
    if (two) tile_store(t, 2, sums + 512, 64);
    if (two) tile_store(t, 3, sums + 768, 64);
}

/* Add the products of some steps. `block`: bfloats from a block of rows to the next. */
INLINE void multiply_steps(tile_file *t, const uint16_t *rows, ptrdiff_t block,
                           const uint16_t *weights, int32_t steps, int parts, bool two) {
    for (int32_t s = 0; s < steps; s++, rows += INPUT_PARTS * STEP_BFLOATS) {
        for (int p = 0; p < parts; p++, weights += DENSE_TILES * STEP_BFLOATS) {
            tile_load(t, 6, weights, 64);
            tile_load(t, 7, weights + STEP_BFLOATS, 64);
            MULTIPLY_ROWS(t, rows, block, two)
            MULTIPLY_ROWS(t, rows + STEP_BFLOATS, block, two)
        }
    }
}
#undef MULTIPLY_ROWS

/* Multiply one or two blocks of rows, whose sums stay in tiles. */
INLINE void multiply_few(const ap_linear *w, const int32_t tile[DENSE_TILES], const uint16_t *rows,
                         ptrdiff_t block, int parts, bool two, uint16_t *weights, float *sums,
                         tile_file *t) {
    const int32_t steps = steps_of(w->in_features);
    load_sums(t, sums, two, true);
    for (int32_t s = 0; s < steps; s++, rows += INPUT_PARTS * STEP_BFLOATS) {
        /* two places in turns: one is read while the other is written */
        uint16_t *of_step = weights + s % 2 * DENSE_TILES * parts * STEP_BFLOATS;
        for (int i = 0; i < DENSE_TILES; i++)
            split_weights(w, tile[i], s * STEP_INPUTS, 1, parts, of_step + i * STEP_BFLOATS);
        multiply_steps(t, rows, block, of_step, 1, parts, two);
    }
    store_sums(t, sums, two);
}

/* Multiply more blocks, some steps of all at a time. */
INLINE void multiply_many(const ap_linear *w, const int32_t tile[DENSE_TILES], const uint16_t *rows,
                          ptrdiff_t block, int32_t blocks, int parts, uint16_t *weights,
                          float *sums, tile_file *t) {
    const int32_t steps = steps_of(w->in_features);
    for (int32_t s = 0; s < steps; s += SPLIT_STEPS) {
        int32_t some = smaller(steps - s, SPLIT_STEPS);
        for (int i = 0; i < DENSE_TILES; i++)
            split_weights(w, tile[i], s * STEP_INPUTS, some, parts, weights + i * STEP_BFLOATS);
        float *to = sums;
        for (int32_t b = 0; b < blocks; b += 2, to += 2 * DENSE_TILES * TILE_ROWS * AP_LANES) {
            bool two = b + 1 < blocks;
            load_sums(t, to, two, !s);
            if (two)
                multiply_steps(t, rows + b * block, block, weights, some, parts, true);
            else
                multiply_steps(t, rows + b * block, 0, weights, some, parts, false);
            store_sums(t, to, two);
        }
        rows += SPLIT_STEPS * INPUT_PARTS * STEP_BFLOATS;
    }
}

/* Multiply at most SPLIT_ROWS rows by one or two tiles; `parts` is constant. */
INLINE void multiply_two_tiles(const multiplication *m, tile_file *t, int parts) {
    _Alignas(64) float sums[SPLIT_ROWS / TILE_ROWS][DENSE_TILES][TILE_ROWS * AP_LANES];
    _Alignas(64) uint16_t weights[SPLIT_STEPS * 2 * DENSE_TILES * STEP_BFLOATS];
    const int32_t first = m->row / TILE_ROWS, tiles = m->last_tile - m->tile;
    const int32_t blocks = (m->row + m->rows - 1) / TILE_ROWS - first + 1;
    const int32_t tile[DENSE_TILES] = {m->tile, m->last_tile - 1}; /* a single one twice */
    const ptrdiff_t block = (ptrdiff_t)steps_of(m->w->in_features) * INPUT_PARTS * STEP_BFLOATS;
    const uint16_t *rows = m->in->parts + first * block;
    if (blocks == 1)
        multiply_few(m->w, tile, rows, 0, parts, false, weights, sums[0][0], t);
    else if (blocks == 2)
        multiply_few(m->w, tile, rows, block, parts, true, weights, sums[0][0], t);
    else
        multiply_many(m->w, tile, rows, block, blocks, parts, weights, sums[0][0], t);
    multiplication one = *m;
    for (int32_t b = 0; b < blocks; b++, one.row += one.rows) {
        int32_t before = one.row % TILE_ROWS;
        one.rows = smaller(TILE_ROWS - before, m->row + m->rows - one.row);
        for (int32_t i = 0; i < tiles; i++)
            store_outputs(&one, m->tile + i, sums[b][i] + before * AP_LANES);
    }
}

static void two_tiles_of_halves(const multiplication *m, tile_file *t) {
    multiply_two_tiles(m, t, 2);
}
static void two_tiles_of_bfloats(const multiplication *m, tile_file *t) {
    multiply_two_tiles(m, t, 1);
}

#if VECTORS >= 32
/* A product of tiles takes as long for one row as for 16. So few rows are multiplied with vectors:
 * the same sums, in the order of TDPBF16PS (Intel's manual), which takes denormal numbers for zero
 * and makes none. */
#define FEW_ROWS(parts) ((parts) == 2 ? 2 : 3) /* whose sums fit the registers */

#ifdef AP_EMULATED_TILES
INLINE uint32_t flush_denormals(void) { return 0; }
INLINE void restore_denormals(uint32_t before) { (void)before; }
#else
INLINE uint32_t flush_denormals(void) {
    uint32_t before = _mm_getcsr();
    _mm_setcsr(before | 0x8040);
    return before;
}
INLINE void restore_denormals(uint32_t before) { _mm_setcsr(before); }
#endif

/* Sums of the even and of the odd inputs of a step, by parts of the weight and of the inputs. */
typedef struct {
    vfloat of[2][INPUT_PARTS][2];
} step_sums;

/* Add the products of input k of a step; x (rows, INPUT_PARTS, 32). */
INLINE void add_input(step_sums *sums, const uint16_t *codes, const float *x, int parts, int rows,
                      int32_t k, int odd) {
    vfloat weight[2];
    if (!odd) prefetch(codes + PREFETCH_BYTES / 2);
    if (parts == 1) {
        weight[0] = vf_load_bfloat(codes);
    } else {
        vfloat whole = vf_load_half(codes);
        weight[0] = floats_of(bits_of(whole) & 0xffff0000u);
        weight[1] = vf_sub(whole, weight[0]);
    }
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int q = 0; q < INPUT_PARTS; q++) {
        vfloat input = vf_set(x[(r * INPUT_PARTS + q) * STEP_INPUTS + k]);
        UNROLL for (int p = 0; p < parts; p++)
            sums[r].of[p][q][odd] = vf_fma(input, weight[p], sums[r].of[p][q][odd]);
    }
}

INLINE void multiply_few_rows(const multiplication *m, int parts, int rows) {
    const ap_linear *w = m->w;
    const int32_t width = w->in_features;
    const ptrdiff_t block = (ptrdiff_t)steps_of(width) * INPUT_PARTS * STEP_BFLOATS;
    for (int32_t tile = m->tile; tile < m->last_tile; tile++) {
        const uint16_t *codes = (const uint16_t *)tile_codes(w, tile);
        vfloat acc[FEW_ROWS(1)];
        UNROLL for (int r = 0; r < rows; r++) acc[r] = vf_zero();
        for (int32_t first = 0; first < width; first += STEP_INPUTS) {
            float x[FEW_ROWS(1) * INPUT_PARTS * STEP_INPUTS];
            step_sums sums[FEW_ROWS(1)];
            for (int i = 0; i < rows * INPUT_PARTS * 2; i++) {
                int32_t row = m->row + i / 4;
                const uint16_t *from = m->in->parts + row / TILE_ROWS * block +
                                       first * INPUT_PARTS * TILE_ROWS +
                                       row % TILE_ROWS * STEP_INPUTS;
                vf_store(x + i * AP_LANES,
                         vf_load_bfloat(from + i / 2 % 2 * STEP_BFLOATS + i % 2 * AP_LANES));
            }
#define EACH UNROLL for (int r = 0; r < rows; r++) UNROLL for (int p = 0; p < parts; p++) \
        UNROLL for (int q = 0; q < INPUT_PARTS; q++)
            EACH sums[r].of[p][q][0] = sums[r].of[p][q][1] = vf_zero();
            int32_t inputs = smaller(width - first, STEP_INPUTS), k = 0;
            for (; k + 1 < inputs; k += 2, codes += 2 * AP_LANES) {
                add_input(sums, codes, x, parts, rows, k, 0);
                add_input(sums, codes + AP_LANES, x, parts, rows, k + 1, 1);
            }
            if (k < inputs) add_input(sums, codes, x, parts, rows, k, 0);
            EACH acc[r] = vf_add(acc[r], vf_add(sums[r].of[p][q][0], sums[r].of[p][q][1]));
#undef EACH
        }
        float out[FEW_ROWS(1) * AP_LANES];
        UNROLL for (int r = 0; r < rows; r++) vf_store(out + r * AP_LANES, acc[r]);
        store_outputs(m, tile, out);
    }
}

#define ROWS(parts, rows)                                                                      \
    case rows:                                                                                 \
        multiply_few_rows(m, parts, rows);                                                     \
        break;
static __attribute__((noinline)) void few_rows_of_halves(const multiplication *m) {
    switch (m->rows) { ROWS(2, 1) ROWS(2, 2) }
}
static __attribute__((noinline)) void few_rows_of_bfloats(const multiplication *m) {
    switch (m->rows) { ROWS(1, 1) ROWS(1, 2) ROWS(1, 3) }
}
#undef ROWS

/* Multiply few rows without tiles; return false if there are more. */
static bool multiplied_few(const multiplication *m) {
    bool halves = m->w->format == AP_F16;
    if (m->rows > FEW_ROWS(halves ? 2 : 1)) return false;
    uint32_t before = flush_denormals();
    (halves ? few_rows_of_halves : few_rows_of_bfloats)(m);
    restore_denormals(before);
    return true;
}
#else
static bool multiplied_few(const multiplication *m) { return (void)m, false; }
#endif

/* Multiply rows in parts. */
static void multiply_split(multiplication m) {
    tile_file t;
    if (multiplied_few(&m)) return;
    int32_t last_row = m.row + m.rows, first_tile = m.tile, last_tile = m.last_tile;
    int32_t fit = SPLIT_BYTES / (steps_of(m.w->in_features) * INPUT_PARTS * TILE_BYTES) & ~1;
    int32_t most = fit < 4 ? 4 * TILE_ROWS : smaller(fit * TILE_ROWS, SPLIT_ROWS);
    tiles_begin(&t);
    for (; m.row < last_row; m.row += m.rows) {
        m.rows = smaller(most - m.row % TILE_ROWS, last_row - m.row);
        for (m.tile = first_tile; m.tile < last_tile; m.tile += DENSE_TILES) {
            m.last_tile = smaller(m.tile + DENSE_TILES, last_tile);
            if (m.w->format == AP_F16)
                two_tiles_of_halves(&m, &t);
            else
                two_tiles_of_bfloats(&m, &t);
        }
    }
    tiles_end(&t);
}
#else
static void multiply_split(multiplication m) { (void)m; }
#endif

#endif
