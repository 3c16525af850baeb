/* Multiplies rows by weights whose codes are symbols of a trellis.
 *
 * The values of some inputs of a tile are looked up once for many rows; they are bytes as those of
 * AP_INT8, and are multiplied like them. */
#ifndef AP_LINEAR_TRELLIS_H
#define AP_LINEAR_TRELLIS_H

#include "linear_planes.h"
#include "trellis.h"

#define DECODED_INPUTS 256 /* at a time: 4 KiB */
#define DECODED_FOR_ROWS (8 * ROWS_SIDE_BY_SIDE)

/* Four inputs of 16 outputs, and of the 16 outputs before them. */
INLINE vbyte trellis_bytes(vbyte own, vbyte before, int bits) {
    const uint8_t(*tables)[16] = trellis_tables[bits - 2];
    vbyte place[TRELLIS_TABLES];
    vbyte one = vb_after(before, own, 1);
    if (bits == 2) {
        vbyte pairs = vb_or(own, vb_bits(one, 0, 2, 12));
        vbyte earlier = vb_or(before, vb_bits(vb_after(before, before, 1), 0, 2, 12));
        place[0] = pairs;
        place[1] = vb_xor(vb_after(earlier, pairs, 2), vb_after(earlier, pairs, 1));
        place[2] = vb_xor(vb_after(earlier, pairs, 4), pairs);
    } else if (bits == 5) {
        vbyte two = vb_after(before, own, 2);
        place[0] = vb_low(own);
        place[1] = vb_low(one);
        place[2] = vb_or(vb_bits(own, 4, 0, 1),
                         vb_or(vb_bits(one, 4, 1, 2), vb_bits(two, 0, 2, 12)));
    } else {
        place[0] = own;
        place[1] = one;
        place[2] = vb_after(before, own, 2);
        if (bits == 3) place[3] = vb_after(before, own, 3);
    }
    vbyte sum = vb_lookup(place[0], tables[0]);
    UNROLL for (int i = 1; i < (bits == 3 ? 4 : 3); i++)
        sum = vb_add(sum, vb_lookup(place[i], tables[i]));
    return sum;
}

/* Look up inputs [first, first + count) of a tile; out (count / 4, 16, 4). */
INLINE void decode_trellis(const ap_linear *w, int32_t tile, int32_t first, int32_t count,
                           int format, uint8_t *out) {
    const int bits = format_bits(format);
    const ptrdiff_t piece_bytes = bits * (PIECE * AP_LANES / 8);
    const int32_t tiles = TRELLIS_BLOCK / AP_LANES; /* of a block, whose last precedes its first */
    const uint8_t *own = tile_codes(w, tile) + first / PIECE * piece_bytes;
    const uint8_t *before = own + (tile % tiles ? -1 : tiles - 1) * tile_bytes(w);
    for (int32_t i = 0; i < count; i += PIECE, own += piece_bytes, before += piece_bytes)
        UNROLL for (int half = 0; half < 2; half++) {
            planes a = load_planes(own, half, format), b = load_planes(before, half, format);
            UNROLL for (int v = 0; v < 4; v++, out += 64)
                vb_store(out, trellis_bytes(plane_codes(&a, half, v, format),
                                            plane_codes(&b, half, v, format), bits));
        }
}

#define EACH_ROW UNROLL for (int r = 0; r < rows; r++)
/* Add the products of looked-up inputs to sums (rows, 16); `rows` is a constant. */
INLINE void add_decoded(const uint8_t *bytes, int32_t sixteens, const int8_t *x,
                        const row_scale *row, ptrdiff_t beside, float *sums, int rows) {
    vfloat acc[REGISTER_ROWS];
    EACH_ROW acc[r] = vf_load(sums + r * AP_LANES);
    for (int32_t i = 0; i < sixteens; i++) {
        vint dot[REGISTER_ROWS];
        EACH_ROW dot[r] = vi_set(row[r].start_centered_bytes);
        UNROLL for (int v = 0; v < 4; v++, bytes += 64) {
            vbyte values = vb_load(bytes);
            EACH_ROW dot[r] = vi_dot_bytes(dot[r], values, x + 4 * (v * beside + r));
            SUM_ROWS_NOW(dot);
        }
        EACH_ROW acc[r] = vf_add(acc[r], vf_unbias(dot[r], row[r].scale, row[r].lift));
        x += INPUTS_PER_SCALE * beside;
        row += beside;
    }
    EACH_ROW vf_store(sums + r * AP_LANES, acc[r]);
}
#undef EACH_ROW

typedef void (*decoded_kernel)(const uint8_t *, int32_t, const int8_t *, const row_scale *,
                               ptrdiff_t, float *);
#define KERNEL(rows)                                                                           \
    static void decoded_##rows(const uint8_t *bytes, int32_t sixteens, const int8_t *x,        \
                               const row_scale *row, ptrdiff_t beside, float *sums) {          \
        add_decoded(bytes, sixteens, x, row, beside, sums, rows);                              \
    }
KERNEL(1)
#if REGISTER_ROWS > 1
KERNEL(2)
KERNEL(3)
KERNEL(4)
#endif
#if REGISTER_ROWS > 4
KERNEL(5)
KERNEL(6)
KERNEL(7)
KERNEL(8)
KERNEL(9)
KERNEL(10)
KERNEL(11)
KERNEL(12)
#endif
#undef KERNEL
#define KERNELS_(name, rows) {TO_##rows(name)}
#define KERNELS(name, rows) KERNELS_(name, rows)
static const decoded_kernel decoded_kernels[REGISTER_ROWS] = KERNELS(decoded, REGISTER_ROWS);
#undef KERNELS
#undef KERNELS_

/* The outputs of one tile for rows of m, at most DECODED_FOR_ROWS. */
INLINE void multiply_trellis_tile(const multiplication *m, int32_t tile, int format) {
    const ap_linear *w = m->w;
    const int32_t last_row = m->row + m->rows;
    float sums[DECODED_FOR_ROWS * AP_LANES];
    _Alignas(64) uint8_t bytes[DECODED_INPUTS * AP_LANES];
    memset(sums, 0, (size_t)m->rows * AP_LANES * sizeof *sums);
    for (int32_t first = 0; first < w->in_features; first += DECODED_INPUTS) {
        int32_t count = smaller(w->in_features - first, DECODED_INPUTS), rows;
        decode_trellis(w, tile, first, count, format, bytes);
        for (int32_t row = m->row; row < last_row; row += rows) {
            const ptrdiff_t beside = block_rows(m->in, row);
            int32_t left = smaller(last_row - row, ROWS_SIDE_BY_SIDE - row % ROWS_SIDE_BY_SIDE);
            rows = smaller(left, REGISTER_ROWS);
            decoded_kernels[rows - 1](
                bytes, count / INPUTS_PER_SCALE,
                row_codes(m->in, row, w->in_features) + first * beside,
                row_scales(m->in, row, w->in_features) + first / INPUTS_PER_SCALE * beside, beside,
                sums + (row - m->row) * AP_LANES);
        }
    }
    vfloat scale = vf_load((const float *)w->scales + tile * AP_LANES);
    for (int32_t r = 0; r < m->rows; r++)
        vf_store(sums + r * AP_LANES, vf_mul(vf_load(sums + r * AP_LANES), scale));
    store_outputs(m, tile, sums);
}

#define KERNEL(name, format)                                                                   \
    static void multiply_trellis_##name(const multiplication *m, int32_t tile) {               \
        multiply_trellis_tile(m, tile, format);                                                \
    }
KERNEL(2, AP_INT2)
KERNEL(3, AP_INT3)
KERNEL(4, AP_INT4)
KERNEL(5, AP_INT5)
#undef KERNEL

static void multiply_trellis(multiplication m) {
    static void (*const kernels[])(const multiplication *, int32_t) = {
        multiply_trellis_2, multiply_trellis_3, multiply_trellis_4, multiply_trellis_5};
    const int32_t last_row = m.row + m.rows, first_row = m.row;
    for (int32_t tile = m.tile; tile < m.last_tile; tile++)
        for (m.row = first_row; m.row < last_row; m.row += m.rows) {
            m.rows = smaller(last_row - m.row, DECODED_FOR_ROWS - m.row % ROWS_SIDE_BY_SIDE);
            kernels[format_bits(m.w->format) - 2](&m, tile);
        }
}

#endif
