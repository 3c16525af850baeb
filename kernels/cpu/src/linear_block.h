/* Shared by all kernels for linears: the loop over blocks, and the storing of results. */
#ifndef AP_LINEAR_BLOCK_H
#define AP_LINEAR_BLOCK_H

#include "linear_quantize.h"

/* Bytes of tiles that stay in the second-level cache while all rows are multiplied. */
#define TILE_BLOCK_BYTES 262144
/* Bytes that codes are prefetched ahead: with 1024 one thread read an eighth slower. */
#define PREFETCH_BYTES 4096

/* Addresses of pieces of memory that will be read soon; they are prefetched into the second-level
 * cache while an integer weight is multiplied. */
typedef struct {
    const char *const *next;
    const char *const *end;
} fetch_list;

#define FETCHED_BYTES 256 /* of a piece */

INLINE void fetch_next(fetch_list *fetches) {
    if (fetches->next == fetches->end) return;
    UNROLL for (int i = 0; i < FETCHED_BYTES; i += 64) prefetch_far(*fetches->next + i);
    fetches->next++;
}

/* Some rows, times some tiles of a weight. */
typedef struct {
    const ap_linear *w;
    const rows_in *in;
    int32_t row;
    int32_t rows;
    int32_t tile;
    int32_t last_tile;
    float *out; /* out[row * out_stride + n] is output n of a row */
    int32_t out_stride;
    bool add; /* accumulate */
    fetch_list fetches;
} multiplication;

typedef void (*block_kernel)(const multiplication *);

/* Multiply all rows and tiles of `m`, in blocks of at most `most_rows` rows. */
static void multiply_in_blocks(multiplication m, int32_t most_rows, block_kernel kernel) {
    int32_t last_row = m.row + m.rows, last_tile = m.last_tile, first_row = m.row;
    int32_t tiles = last_tile - m.tile;
    /* an even number, for kernels that take two at once */
    if (m.rows > most_rows) tiles = 2 + 2 * (int32_t)(TILE_BLOCK_BYTES / 2 / tile_bytes(m.w));
    for (; m.tile < last_tile; m.tile += tiles) {
        m.last_tile = smaller(m.tile + tiles, last_tile);
        for (m.row = first_row; m.row < last_row; m.row += m.rows) {
            int32_t beside = ROWS_SIDE_BY_SIDE - m.row % ROWS_SIDE_BY_SIDE;
            m.rows = smaller(smaller(last_row - m.row, beside), most_rows);
            kernel(&m);
        }
    }
}

/* Store the outputs of one tile, sums (m->rows, 16). */
static void store_outputs(const multiplication *m, int32_t tile, const float *sums) {
    int32_t n = tile * AP_LANES, count = outputs_of(m->w, tile);
    const float *bias = m->w->bias ? m->w->bias + n : NULL;
    float *out = m->out + (int64_t)m->row * m->out_stride + n;
    for (int32_t r = 0; r < m->rows; r++, out += m->out_stride, sums += AP_LANES) {
        vfloat sum = vf_load(sums);
        if (count == AP_LANES) {
            if (bias) sum = vf_add(sum, vf_load(bias));
            if (m->add) sum = vf_add(sum, vf_load(out));
            vf_store(out, sum);
        } else {
            if (bias) sum = vf_add(sum, vf_load_first(bias, count));
            if (m->add) sum = vf_add(sum, vf_load_first(out, count));
            vf_store_first(out, sum, count);
        }
    }
}

#endif
