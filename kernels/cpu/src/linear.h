/* Linear layers: rows of activations times a weight in tiles of 16 outputs.
 *
 * A row's result is the same, bit for bit, however many rows are multiplied and however rows and
 * tiles are shared out.
 */
#ifndef AP_LINEAR_H
#define AP_LINEAR_H

#include "linear_dense.h"
#include "linear_integer.h"
#include "linear_rows.h"

/* columns of tiles [first_tile, last_tile) for rows [first_row, last_row), into
 * out[row * out_stride + n]; adds the bias; with `add`, adds to what is there */
static void linear_tiles(const ap_linear *w, const rows_in *in, int32_t first_row,
                         int32_t last_row, int32_t first_tile, int32_t last_tile, float *out,
                         int32_t out_stride, bool add) {
    multiplication m = {
        .w = w,
        .in = in,
        .row = first_row,
        .rows = last_row - first_row,
        .tile = first_tile,
        .last_tile = last_tile,
        .out = out,
        .out_stride = out_stride,
        .add = add,
    };
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
            multiply_in_blocks(m, REGISTER_ROWS, multiply_bytes);
            break;
        case AP_INT4:
            multiply_in_blocks(m, REGISTER_ROWS, multiply_nibbles);
            break;
    }
}

/* ---- one linear alone ---- */

#define CHUNKS_PER_THREAD 4
#define ROWS_PER_CHUNK (20 * ROWS_SIDE_BY_SIDE)

typedef struct {
    const ap_linear *w;
    rows_in in;
    float *out;
    int32_t tiles_per_chunk;
    int32_t chunks_across; /* chunks of the same rows */
} forward_task;

static void forward_quantize(void *context, int32_t row, int32_t worker) {
    (void)worker;
    forward_task *task = context;
    quantize_row(&task->in, row, task->w->in_features);
}

static void forward_chunk(void *context, int32_t chunk, int32_t worker) {
    (void)worker;
    const forward_task *task = context;
    int32_t row = chunk / task->chunks_across * ROWS_PER_CHUNK;
    int32_t tile = chunk % task->chunks_across * task->tiles_per_chunk;
    linear_tiles(task->w, &task->in, row, smaller(row + ROWS_PER_CHUNK, task->in.rows), tile,
                 smaller(tile + task->tiles_per_chunk, num_tiles(task->w)), task->out,
                 task->w->out_features, false);
}

static ap_status linear_forward(ap_engine *engine, const ap_linear *linear, const float *x,
                                int32_t rows, float *out) {
    if (!linear_supported(linear) || rows < 0) return AP_BAD_ARGUMENT;
    if (!rows) return AP_OK;
    int32_t width = linear->in_features, group = has_groups(linear) ? linear->group : 0;
    int32_t threads = ap_pool_threads(engine->pool), tiles = num_tiles(linear);
    int32_t down = (rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK;
    int32_t across = threads == 1 ? 1 : smaller(CHUNKS_PER_THREAD * threads, tiles);
    forward_task task = {.w = linear, .out = out};
    task.in = (rows_in){.x = x, .stride = width, .rows = rows, .group = group};
    if (group) task.in.order = linear->input_order;
    task.tiles_per_chunk = (tiles + across - 1) / across;
    task.chunks_across = (tiles + task.tiles_per_chunk - 1) / task.tiles_per_chunk;
    int64_t bytes = quantized_bytes(rows, width, group);
    if (ap_reserve(engine, bytes)) return AP_NO_MEMORY;
    if (group) {
        quantized_place(&task.in, ap_claim(engine, bytes), width);
        ap_pool_run(engine->pool, forward_quantize, &task, rows);
    }
    ap_pool_run(engine->pool, forward_chunk, &task, task.chunks_across * down);
    return AP_OK;
}

#endif
