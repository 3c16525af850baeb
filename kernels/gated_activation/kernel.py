"""Activations on the GPU: one program computes a stretch of one row."""

import triton
import triton.language as tl

from appliance.kernels.device.dependent_launch import wait_for_previous

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)
# Keeps exp2 finite; a sigmoid this small is below the rounding of any result.
EXPONENT_LIMIT: tl.constexpr = tl.constexpr(126.0)
SQRT_HALF: tl.constexpr = tl.constexpr(0.7071067811865476)


@triton.jit
def times_sigmoid(b_x, b_inner):
    """Return x * sigmoid(inner)."""
    return b_x / (1.0 + tl.exp2(tl.minimum(-b_inner * LOG2_E, EXPONENT_LIMIT)))


@triton.jit
def bounded(b_x, LIMIT: tl.constexpr):
    """Return x clamped to -LIMIT..LIMIT."""
    b_x = tl.minimum(b_x, LIMIT, propagate_nan=tl.PropagateNan.ALL)
    return tl.maximum(b_x, -LIMIT, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def activated(b_x, ACTIVATION: tl.constexpr):
    """Return act(x) of an Activation."""
    if ACTIVATION == "silu":
        return times_sigmoid(b_x, b_x)
    elif ACTIVATION == "gelu_tanh":
        # 0.5 * (1 + tanh(z)) is the sigmoid of 2 z; the first number is 2 * sqrt(2 / pi).
        return times_sigmoid(b_x, 1.5957691216057308 * (b_x + 0.044715 * b_x * b_x * b_x))
    elif ACTIVATION == "gelu":
        return 0.5 * b_x * (1.0 + tl.erf(b_x * SQRT_HALF))
    else:
        b_relu = tl.maximum(b_x, 0.0, propagate_nan=tl.PropagateNan.ALL)
        return b_relu * b_relu if ACTIVATION == "relu_squared" else b_relu


@triton.jit
def gated(b_gate, b_up, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return act(gate) * up, or the activation's own formula."""
    if ACTIVATION == "clamped_swiglu":
        b_gate = tl.minimum(b_gate, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return times_sigmoid(b_gate, ALPHA * b_gate) * (bounded(b_up, LIMIT) + 1.0)
    elif ACTIVATION == "bounded_swiglu":
        b_silu = times_sigmoid(b_gate, b_gate)
        b_silu = tl.minimum(b_silu, LIMIT, propagate_nan=tl.PropagateNan.ALL)
        return b_silu * bounded(b_up, LIMIT)
    else:
        return activated(b_gate, ACTIVATION) * b_up


@triton.jit
def gated_rows(b_rows, ACTIVATION: tl.constexpr, LIMIT: tl.constexpr, ALPHA: tl.constexpr):
    """Return half as many rows of those of gate and up, which alternate in runs of 8.

    A thread has both.
    """
    ROWS: tl.constexpr = b_rows.shape[0]
    COLUMNS: tl.constexpr = b_rows.shape[1]
    b_pairs = tl.reshape(b_rows, (ROWS // 16, 2, 8, COLUMNS))
    b_gate, b_up = tl.split(tl.permute(b_pairs, (0, 2, 3, 1)))
    b_gate = tl.reshape(b_gate, (ROWS // 2, COLUMNS))
    b_up = tl.reshape(b_up, (ROWS // 2, COLUMNS))
    return gated(b_gate, b_up, ACTIVATION, LIMIT, ALPHA)


@triton.jit
def gated_activation_kernel(
    output_ptr,  # (num_tokens, intermediate)
    gate_ptr,  # (num_tokens, 2 * intermediate), rows stride apart; see RUN
    up_ptr,  # (num_tokens, intermediate), rows up_stride apart; None: beside the gate
    intermediate,
    stride,
    up_stride,
    ACTIVATION: tl.constexpr,  # the value of an Activation, "clamped_swiglu" or "bounded_swiglu"
    LIMIT: tl.constexpr,  # of the last two
    ALPHA: tl.constexpr,  # of "clamped_swiglu"
    GATED: tl.constexpr,  # else there is no up, and an Activation is all
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
    p_row = gate_ptr + i_token * stride
    b_gate = tl.load(p_row + o_gate, mask=b_mask, other=0.0).to(tl.float32)
    if GATED:
        p_up = p_row + o_up
        if up_ptr is not None:
            p_up = up_ptr + i_token * up_stride + o_column
        b_up = tl.load(p_up, mask=b_mask, other=0.0).to(tl.float32)
        b_result = gated(b_gate, b_up, ACTIVATION, LIMIT, ALPHA)
    else:
        b_result = activated(b_gate, ACTIVATION)
    b_result = b_result.to(output_ptr.dtype.element_ty)
    tl.store(output_ptr + i_token * intermediate + o_column, b_result, mask=b_mask)


@triton.jit
def gate_heads_kernel(
    output_ptr,  # (num_tokens, num_heads, head_dim)
    heads_ptr,  # the same
    gate_ptr,  # (num_tokens, num_heads, head_dim), or 1 instead of it, rows gate_stride apart
    width,  # of all heads
    head_dim,
    gate_stride,
    OF_HEADS: tl.constexpr,  # a gate for each head, not for each element
    BLOCK: tl.constexpr,
):
    """Multiply heads by the sigmoid of their gates, which is rounded to the heads' dtype first."""
    DTYPE: tl.constexpr = output_ptr.dtype.element_ty
    i_token = tl.program_id(0).to(tl.int64)
    o_at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_at < width
    o_gate = o_at // head_dim if OF_HEADS else o_at
    b_gate = tl.load(gate_ptr + i_token * gate_stride + o_gate, mask=b_mask, other=0.0)
    b_share = times_sigmoid(1.0, b_gate.to(tl.float32)).to(DTYPE).to(tl.float32)
    b_x = tl.load(heads_ptr + i_token * width + o_at, mask=b_mask, other=0.0).to(tl.float32)
    tl.store(output_ptr + i_token * width + o_at, (b_x * b_share).to(DTYPE), mask=b_mask)
