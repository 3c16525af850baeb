/* Causal convolution of each channel over a few positions, and the mixer that consists of one. */
#ifndef AP_SHORT_CONV_H
#define AP_SHORT_CONV_H

#include "mlp.h"
#include "recurrent.h"

/* Channels of a part: a few cache lines of each row. */
#define CONV_CHANNELS (4 * AP_LANES)

typedef struct {
    step_state *s;
    const ap_filters *filters;
    const float *in;    /* (rows, width) */
    const float *times; /* multiplies the input, or NULL */
    const float *gate;  /* multiplies the output; NULL: SiLU instead */
    int64_t stride;     /* of these three */
    float *out;         /* (rows, width), may be `in` */
    int64_t out_stride;
} conv_run;

static void conv_column(const conv_run *r, const state_span *span, int32_t channel) {
    const ap_filters *f = r->filters;
    int32_t left = f->width - channel, taps = f->taps;
    kept_numbers state = state_of(r->s, span, f->state);
    const float *filters = f->filters + channel;
    vfloat bias = f->bias ? load_next(f->bias + channel, left) : vf_zero();
    vfloat past[AP_MOST_TAPS];
    for (int32_t k = 0; k < taps - 1; k++)
        past[k] = span->goes_on ? read_next(state, (int64_t)k * f->width + channel, left)
                                : vf_zero();
    for (int32_t row = span->first; row < span->first + span->rows; row++) {
        int64_t place = row * r->stride + channel;
        vfloat x = load_next(r->in + place, left), total = bias;
        if (r->times) x = vf_mul(x, load_next(r->times + place, left));
        past[taps - 1] = x;
        for (int32_t k = 0; k < taps; k++) {
            total = vf_fma(past[k], load_next(filters + (int64_t)k * f->width, left), total);
            if (k) past[k - 1] = past[k];
        }
        total = r->gate ? vf_mul(total, load_next(r->gate + place, left))
                        : activated(total, AP_SILU);
        store_next(r->out + row * r->out_stride + channel, total, left);
    }
    for (int32_t k = 0; k < taps - 1; k++)
        keep_next(state, (int64_t)k * f->width + channel, past[k], left);
}

static void conv_part(void *context, const state_span *span, int32_t part) {
    const conv_run *r = context;
    int32_t first = part * CONV_CHANNELS, last = first + CONV_CHANNELS;
    if (last > r->filters->width) last = r->filters->width;
    for (int32_t channel = first; channel < last; channel += AP_LANES)
        conv_column(r, span, channel);
}

static void run_filters(conv_run *r) {
    const ap_filters *f = r->filters;
    for_states(r->s, conv_part, r, ceil_div(f->width, CONV_CHANNELS), CONV_CHANNELS * f->taps);
}

/* One linear yields b, c and x; out(c * conv(b * x)). */
static void run_short_conv(step_state *s, const ap_norm *post_norm) {
    const ap_filters *f = &s->layer->short_conv->filters;
    run_mixer_inputs(s, post_norm);
    conv_run run = {
        .s = s,
        .filters = f,
        .in = s->inputs + 2 * f->width,
        .times = s->inputs,
        .gate = s->inputs + f->width,
        .stride = 3 * f->width,
        .out = s->mixed,
        .out_stride = f->width,
    };
    run_filters(&run);
}

#endif
