/* Multiplies rows by float weights: fused multiply-adds in the order of the inputs. */
#ifndef AP_LINEAR_DENSE_H
#define AP_LINEAR_DENSE_H

#include "linear_block.h"

/* Multiply by two tiles at once: independent sums, and half the loads of inputs. */
#define DENSE_TILES 2
#if VECTORS >= 32
#define DENSE_ROWS 12
#elif VECTORS >= 8
#define DENSE_ROWS 3
#else
#define DENSE_ROWS 1
#endif

INLINE vfloat load_elements(const void *codes, ptrdiff_t index, int format) {
    if (format == AP_F16) return vf_load_half((const uint16_t *)codes + index);
    if (format == AP_BF16) return vf_load_bfloat((const uint16_t *)codes + index);
    return vf_load((const float *)codes + index);
}

/* Multiply a row by a single tile; an adapter's shrinking factors often have only one. */
INLINE void multiply_last_tile(const multiplication *m, int format, const float *x, int32_t tile) {
    const uint8_t *codes = tile_codes(m->w, tile);
    const ptrdiff_t element = format == AP_F32 ? 4 : 2;
    vfloat acc = vf_zero();
    for (ptrdiff_t k = 0, i = 0; k < m->w->in_features; k++, i += AP_LANES) {
        acc = vf_fma(load_elements(codes, i, format), vf_set(x[k]), acc);
        prefetch(codes + i * element + PREFETCH_BYTES);
    }
    float sums[AP_LANES];
    vf_store(sums, acc);
    store_outputs(m, tile, sums);
}

/* m->rows is `rows`, a constant like `format`, so that the sums stay in registers. */
INLINE void multiply_dense(const multiplication *m, int format, int rows) {
    const ap_linear *w = m->w;
    const ptrdiff_t stride = m->in->stride, element = format == AP_F32 ? 4 : 2;
    const float *x[(DENSE_ROWS + 2) / 3]; /* of every third row: few enough for the registers */
    UNROLL for (int r = 0; r < rows; r += 3) x[r / 3] = m->in->x + (m->row + r) * stride;
    for (int32_t tile = m->tile; tile < m->last_tile; tile += DENSE_TILES) {
        const uint8_t *codes = tile_codes(w, tile);
        int32_t tiles = smaller(m->last_tile - tile, DENSE_TILES);
        if (rows == 1 && tiles == 1) {
            multiply_last_tile(m, format, x[0], tile);
            return;
        }
        ptrdiff_t other = tiles == 1 ? 0 : (ptrdiff_t)w->in_features * AP_LANES;
        vfloat acc[DENSE_TILES][DENSE_ROWS];
#define EACH UNROLL for (int r = 0; r < rows; r++) UNROLL for (int t = 0; t < DENSE_TILES; t++)
        EACH acc[t][r] = vf_zero();
        for (ptrdiff_t k = 0, i = 0; k < w->in_features; k++, i += AP_LANES) {
            vfloat weight[DENSE_TILES];
            UNROLL for (int t = 0; t < DENSE_TILES; t++) {
                weight[t] = load_elements(codes, i + t * other, format);
                prefetch(codes + (i + t * other) * element + PREFETCH_BYTES);
            }
            EACH acc[t][r] = vf_fma(weight[t], vf_set(x[r / 3][r % 3 * stride + k]), acc[t][r]);
        }
        float sums[DENSE_TILES][DENSE_ROWS * AP_LANES];
        EACH vf_store(sums[t] + r * AP_LANES, acc[t][r]);
#undef EACH
        for (int32_t t = 0; t < tiles; t++) store_outputs(m, tile + t, sums[t]);
    }
}

#define ROWS(format, rows)                                                                     \
    case rows:                                                                                 \
        multiply_dense(m, format, rows);                                                       \
        break;
#if DENSE_ROWS == 12
#define MORE_ROWS(format)                                                                      \
    ROWS(format, 2) ROWS(format, 3) ROWS(format, 4) ROWS(format, 5) ROWS(format, 6)            \
    ROWS(format, 7) ROWS(format, 8) ROWS(format, 9) ROWS(format, 10) ROWS(format, 11)          \
    ROWS(format, 12)
#elif DENSE_ROWS == 3
#define MORE_ROWS(format) ROWS(format, 2) ROWS(format, 3)
#else
#define MORE_ROWS(format)
#endif
#define KERNEL(name, format)                                                                   \
    static void multiply_##name(const multiplication *m) {                                     \
        switch (m->rows) { ROWS(format, 1) MORE_ROWS(format) }                                 \
    }
KERNEL(floats, AP_F32)
KERNEL(halves, AP_F16)
KERNEL(bfloats, AP_BF16)
#undef ROWS
#undef MORE_ROWS
#undef KERNEL

#endif
