/* Linear layers: rows of activations times a weight in tiles of 16 outputs.
 *
 * A row's result is the same, bit for bit, for any number of rows and any division of rows and
 * tiles.
 */
#ifndef AP_LINEAR_H
#define AP_LINEAR_H

#include "linear_dense.h"
#include "linear_pairs.h"
#include "linear_rows.h"
#include "linear_split.h"
#include "linear_trellis.h"

static void multiply_tiles(multiplication m) {
    const ap_linear *w = m.w;
    if (is_trellis(w)) {
        multiply_trellis(m);
        return;
    }
    if (m.rows >= ROWS_FOR_PAIRS && multiplies_pairs(w)) m.tile = multiply_in_pairs(m);
    if (m.tile == m.last_tile) return;
    if (has_planes(w)) {
        multiply_in_planes(m);
        return;
    }
    if (m.in->parts && multiplies_parts(w)) {
        multiply_split(m);
        return;
    }
    switch (w->format) {
        case AP_F32:
            multiply_in_blocks(m, DENSE_ROWS, multiply_floats);
            break;
        case AP_F16:
            multiply_in_blocks(m, DENSE_ROWS, multiply_halves);
            break;
        case AP_BF16:
            multiply_in_blocks(m, DENSE_ROWS, multiply_bfloats);
            break;
        case AP_INT8:
            multiply_in_blocks(m, REGISTER_ROWS,
                               w->scale_format == AP_SCALES_NONE ? multiply_unscaled
                                                               : multiply_bytes);
            break;
        case AP_INT4:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_nibbles);
            break;
        case AP_E2M1:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_e2m1);
            break;
    }
}

/* Multiply rows [first_row, last_row) by tiles [first_tile, last_tile) into
 * out[row * out_stride + n] and add the bias; with `add`, accumulate. */
static void linear_tiles(const ap_linear *w, const rows_in *in, int32_t first_row,
                         int32_t last_row, int32_t first_tile, int32_t last_tile, float *out,
                         int32_t out_stride, bool add) {
    multiply_tiles((multiplication){
        .w = w,
        .in = in,
        .row = first_row,
        .rows = last_row - first_row,
        .tile = first_tile,
        .last_tile = last_tile,
        .out = out,
        .out_stride = out_stride,
        .add = add,
    });
}

#endif
