"""Partial results of attention come together: sums of values, each normalized, by their weights.

Merging is exact where all but one are empty. So a row's result does not depend on how many spans
its neighbours have beyond its own.
"""

import triton
import triton.language as tl

from appliance.kernels.attention_tile.kernel import LOWEST, SMALLEST

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def last_to_arrive(p_arrived, expected):
    """Return True if all others have arrived; leaves the counter as it was before the first did.

    All threads' stores come before the arrival, all arrivals before the last one's loads.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(p_arrived, 1, sem="acq_rel", scope="gpu") == expected - 1
    if is_last:
        tl.store(p_arrived, 0)
    tl.debug_barrier()
    return is_last


@triton.jit
def merge(
    partial_ptr,  # (rows, HEAD_DIM) float32, each divided by its sum of weights
    lse_ptr,  # (rows,) float32, logarithms of these sums, base 2
    i_zero,  # the first row that item 0 would have
    b_valid,  # (ROWS,) which of the rows from there on are any
    step,  # rows from one item to the next
    begin,  # items `stride` apart: the first is `begin * stride`, but `first` if that is later
    end,
    first,
    stride,
    ROWS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_DIM_PADDED: tl.constexpr,
    FAN_IN: tl.constexpr,
):
    """Weighted means of some rows over the items, FAN_IN at a time, and their logarithms.

    A thread has its part of all FAN_IN, if ROWS are enough for all threads, so that nothing is
    summed across them.
    """
    o_item = tl.arange(0, FAN_IN)
    o_row = tl.arange(0, ROWS)
    # Four side by side: else threads load as many as they store of a smaller type, and each load
    # takes half of every sector.
    o_dim = tl.arange(0, HEAD_DIM_PADDED // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    o_at = o_row[:, None, None] * HEAD_DIM + o_dim[None, :, :]
    b_mask = b_valid[:, None, None] & (o_dim < HEAD_DIM)[None, :, :]
    b_largest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, HEAD_DIM_PADDED // 4, 4], tl.float32)
    for at in tl.range(begin, end + 1, FAN_IN, num_stages=1):
        b_row = i_zero + tl.maximum((at + o_item) * stride, first) * step
        b_in = at + o_item <= end
        # At L2, where other programs have left them.
        b_lse = tl.load(
            lse_ptr + b_row[:, None] + o_row[None, :],
            mask=b_in[:, None] & b_valid[None, :],
            other=-float("inf"),
            cache_modifier=".cg",
        )
        b_part = tl.load(
            partial_ptr + (b_row * HEAD_DIM)[:, None, None, None] + o_at[None, :, :, :],
            mask=b_in[:, None, None, None] & b_mask[None, :, :, :],
            other=0.0,
            cache_modifier=".cg",
        )
        b_new = tl.maximum(b_largest, tl.max(b_lse, 0))
        b_decay = tl.exp2(b_largest - b_new)
        b_weight = tl.exp2(b_lse - b_new[None, :])
        b_total = b_total * b_decay + tl.sum(b_weight, 0)
        b_acc *= b_decay[:, None, None]
        b_acc += tl.sum(b_part * b_weight[:, :, None, None], 0)
        b_largest = b_new
    b_lse = b_largest + tl.log2(tl.maximum(b_total, SMALLEST))
    b_lse = tl.where(b_total == 1.0, b_largest, b_lse)
    b_lse = tl.where(b_total > 0.0, b_lse, -float("inf"))
    b_acc *= (1.0 / tl.where(b_total > 0.0, b_total, 1.0))[:, None, None]
    return tl.reshape(b_acc, (ROWS, HEAD_DIM_PADDED)), b_lse


@triton.jit
def beside_sink(lse, sink):
    """The share of the weight that is left beside a sink, a score to the base e without a value."""
    return 1.0 / (1.0 + tl.exp2(sink * LOG2_E - lse))
