/* Multiplies rows by one weight, the head of a model that has nothing else: see instructions.py. */
#include <stdlib.h>
#include <string.h>

#include "appliance_cpu.h"

enum { IN = 576, GROUP = 32, MOST = 256 }; /* inputs, inputs of a scale, most outputs */

static void *room(size_t bytes) { return memset(aligned_alloc(64, bytes), 1, bytes); }

int main(int count, char **words) { /* instruction set, format, kind of offsets, rows, outputs */
    if (count != 6 || ap_use_isa(atoi(words[1]))) return 1;
    int format = atoi(words[2]), kind = atoi(words[3]), rows = atoi(words[4]), out = atoi(words[5]);
    size_t scales = (size_t)MOST * (IN / GROUP) * 2;
    ap_linear linear = {.format = format, .offset_kind = kind, .scale_format = AP_F16,
                        .group = GROUP, .in_features = IN, .out_features = out,
                        .codes = room((size_t)MOST * IN), .scales = room(scales)};
    if (kind != AP_CENTERED) linear.offsets = room(scales);
    float *hidden = room((size_t)rows * IN * sizeof(float));
    for (int i = 0; i < rows * IN; i++) hidden[i] = (float)(i % 7) - 3;
    ap_model model = {.hidden_size = IN, .vocab_size = out, .embedding = linear, .head = linear,
                      .embedding_scale = 1, .logit_scale = 1};
    ap_engine *engine = ap_engine_create(1, 0);
    return ap_head(engine, &model, hidden, rows, room((size_t)rows * MOST * sizeof(float)));
}
