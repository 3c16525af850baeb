"""The soft cap of logits on the GPU: one program caps a stretch of them."""

import triton
import triton.language as tl

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def soft_cap_kernel(
    output_ptr,  # (num_elements,) float32
    logits_ptr,  # (num_elements,)
    num_elements,
    cap,
    BLOCK: tl.constexpr,
):
    o_element = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    b_mask = o_element < num_elements
    b_ratio = tl.load(logits_ptr + o_element, mask=b_mask, other=0.0).to(tl.float32) / cap
    # tanh of the absolute value, so that the exponential never grows.
    b_decay = tl.exp2(tl.abs(b_ratio) * (-2.0 * LOG2_E))
    b_capped = cap * (1.0 - b_decay) / (1.0 + b_decay)
    tl.store(output_ptr + o_element, tl.where(b_ratio < 0.0, -b_capped, b_capped), mask=b_mask)
