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
/* The most rows of a state whose columns are copied side by side for a sequence of several rows. In
 * the slot they lie a whole row apart and share few sets of the first-level cache. */
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
    float *state; /* where they lie in the slot */
    int32_t rows;
    int32_t width;
    int32_t columns;
    float *held;   /* where they are worked on, `pitch` from row to row */
    int64_t pitch;
    float near[MOST_NEAR * STATE_COLUMNS] __attribute__((aligned(64)));
} state_columns;

static void hold_columns(state_columns *c, const state_span *span) {
    bool is_near = c->rows <= MOST_NEAR && span->rows > 1;
    size_t bytes = (size_t)c->columns * sizeof(float);
    c->held = is_near ? c->near : c->state;
    c->pitch = is_near ? c->columns : c->width;
    for (int32_t i = 0; i < c->rows; i++)
        if (!span->goes_on)
            memset(c->held + i * c->pitch, 0, bytes);
        else if (is_near)
            memcpy(c->held + i * c->pitch, c->state + (int64_t)i * c->width, bytes);
}

static void put_columns_back(const state_columns *c) {
    for (int32_t i = 0; c->held != c->state && i < c->rows; i++)
        memcpy(c->state + (int64_t)i * c->width, c->held + i * c->pitch,
               (size_t)c->columns * sizeof(float));
}

#endif
