/* Columns of a state that maps keys to values, while the rows of a sequence update them.
 *
 * Columns are independent of each other. So a piece of work is some columns and all rows of a
 * sequence; its part of the state stays in the first-level cache.
 */
#ifndef AP_STATE_COLUMNS_H
#define AP_STATE_COLUMNS_H

#include "short_conv.h"

/* Columns of a state that are worked on at once: two vectors. */
#define STATE_VECTORS 2
#define STATE_COLUMNS (STATE_VECTORS * AP_LANES)
/* Partial sums of a vector times a state: an addition waits for the one before in its sum. */
#define STATE_SUMS 4
/* The most rows of a state whose columns are copied side by side for a sequence of several rows, or
 * from 16 bits. In the slot they lie a whole row apart and share few sets of the first-level
 * cache. */
#define MOST_NEAR 256

typedef struct {
    vfloat of[STATE_VECTORS];
} state_row;

INLINE state_row load_state(const float *p, int32_t vectors) {
    state_row row;
    for (int32_t v = 0; v < vectors; v++) row.of[v] = vf_load(p + v * AP_LANES);
    return row;
}

static int32_t state_parts(int32_t width) { return ceil_div(width, STATE_COLUMNS); }

/* Some columns of a head's state (rows, width). */
typedef struct {
    kept_numbers state; /* of the layer, in the slot */
    int64_t first;      /* where they begin in it */
    int32_t rows;
    int32_t width;
    int32_t columns;
    float *held;   /* where they are worked on, `pitch` from row to row */
    int64_t pitch;
    float near[MOST_NEAR * STATE_COLUMNS] __attribute__((aligned(64)));
} state_columns;

static void hold_columns(state_columns *c, const state_span *span) {
    bool in_slot = c->state.format == AP_F32 && (c->rows > MOST_NEAR || span->rows == 1);
    c->held = in_slot ? (float *)(void *)c->state.at + c->first : c->near;
    c->pitch = in_slot ? c->width : c->columns;
    if (in_slot && span->goes_on) return;
    for (int32_t i = 0; i < c->rows; i++)
        for (int32_t v = 0; v < c->columns; v += AP_LANES)
            vf_store(c->held + i * c->pitch + v,
                     span->goes_on ? read_kept(c->state, c->first + (int64_t)i * c->width + v)
                                   : vf_zero());
}

static void put_columns_back(const state_columns *c) {
    for (int32_t i = 0; c->held == c->near && i < c->rows; i++)
        for (int32_t v = 0; v < c->columns; v += AP_LANES)
            keep(c->state, c->first + (int64_t)i * c->width + v,
                 vf_load(c->held + i * c->pitch + v));
}

#endif
