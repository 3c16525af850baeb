"""Gated activation on the GPU: one program computes a stretch of one row."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Keeps exp2 finite; a sigmoid this small is below the rounding of any result.
EXPONENT_LIMIT: tl.constexpr = tl.constexpr(126.0)


@triton.jit
def gated_activation_kernel(
    output_ptr,  # (num_tokens, intermediate)
    gate_up_ptr,  # (num_tokens, 2 * intermediate), rows stride apart; see RUN
    intermediate,
    stride,
    ACTIVATION: tl.constexpr,  # the value of an Activation, "clamped_swiglu" or "bounded_swiglu"
    LIMIT: tl.constexpr,  # of the last two
    ALPHA: tl.constexpr,  # of "clamped_swiglu"
    RUN: tl.constexpr,  # columns of gate, then of up, in turns; 0: half a row each
    BLOCK: tl.constexpr,
    EARLY: tl.constexpr,  # see `dependent_launch`
):
    if EARLY:
        wait_for_previous()
    i_token = tl.program_id(0).to(tl.int64)
    o_column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_column < intermediate
    if RUN:
        o_gate = o_column // RUN * (2 * RUN) + o_column % RUN
        o_up = o_gate + RUN
    else:
        o_gate = o_column
        o_up = o_column + intermediate
    p_row = gate_up_ptr + i_token * stride
    b_gate = tl.load(p_row + o_gate, mask=b_mask, other=0.0).to(tl.float32)
    b_up = tl.load(p_row + o_up, mask=b_mask, other=0.0).to(tl.float32)
    if ACTIVATION == "clamped_swiglu":
        b_gate = tl.minimum(b_gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.minimum(b_up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.maximum(b_up, -LIMIT, propagate_nan=tl.PropagateNan.ALL) + 1.0
        b_inner = ALPHA * b_gate
    elif ACTIVATION == "silu" or ACTIVATION == "bounded_swiglu":
        b_inner = b_gate
    else:
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z; the first number is 2 * sqrt(2 / pi).
        b_inner = 1.5957691216057308 * (b_gate + 0.044715 * b_gate * b_gate * b_gate)
    b_exponent = tl.minimum(-b_inner * LOG2_E, EXPONENT_LIMIT)
    b_activated = b_gate / (1.0 + tl.exp2(b_exponent))
    if ACTIVATION == "bounded_swiglu":
        b_activated = tl.minimum(b_activated, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.minimum(b_up, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        b_up = tl.maximum(b_up, -LIMIT, propagate_nan=tl.PropagateNan.ALL)
    b_result = (b_activated * b_up).to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + i_token * intermediate + o_column, b_result, mask=b_mask)
