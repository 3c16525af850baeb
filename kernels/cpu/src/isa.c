/* All kernels, compiled once per instruction set: AP_ISA is its name, and vector.h follows its
 * target flags. */
#include "vector.h"

#include "pointwise.h"
#include "linear.h"
#include "attention.h"
#include "encode.h"
#include "sample.h"
#include "score.h"
#include "step.h"
#include "parts.h"

#define AP_JOIN_(a, b) a##b
#define AP_JOIN(a, b) AP_JOIN_(a, b)

const ap_kernels AP_JOIN(ap_kernels_, AP_ISA) = {
    .step = step,
    .make_room = make_room,
    .head = head,
    .quantized_at = quantized_at,
    .experts = run_routed,
    .attend = attend_layer,
    .multiply = multiply_rows,
    .find_rows = find_rows,
    .encode = encode,
    .sample = sample,
    .score = score,
};
