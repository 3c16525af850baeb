"""Merges partial attention results: normalized sums of values, weighted by their sums of weights.

The merge is exact where all but one are empty, so a row's result does not depend on how many spans
its neighbours have.
"""

import triton
import triton.language as tl

from appliance.kernels.attention.tile_kernel import LOWEST, SMALLEST

LOG2_E: tl.constexpr = tl.constexpr(1.4426950408889634)


@triton.jit
def last_to_arrive(p_arrived, expected):
    """Return True for the last program to arrive, which resets the counter.

    The stores of all threads come before the arrival, and all arrivals before the loads of the last
    program.
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
    b_valid,  # (ROWS,) True for the rows from there on that exist
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
    """Return the weighted means of some rows over the items, and the base-2 logarithms of their
    sums.

    Takes FAN_IN items at a time. Where ROWS suffice for all threads, a thread holds its part of all
    FAN_IN, and nothing is summed across threads.
    """
    o_item = tl.arange(0, FAN_IN)
    o_row = tl.arange(0, ROWS)
    # Four elements a thread: by default a thread loads as many as it stores of a smaller type, and
    # each load uses half of every sector.
    o_dim = tl.arange(0, HEAD_DIM_PADDED // 4)[:, None] * 4 + tl.arange(0, 4)[None, :]
    o_at = o_row[:, None, None] * HEAD_DIM + o_dim[None, :, :]
    b_mask = b_valid[:, None, None] & (o_dim < HEAD_DIM)[None, :, :]
    b_largest = tl.full([ROWS], LOWEST, tl.float32)
    b_total = tl.zeros([ROWS], tl.float32)
    b_acc = tl.zeros([ROWS, HEAD_DIM_PADDED // 4, 4], tl.float32)
    for at in tl.range(begin, end + 1, FAN_IN, num_stages=1):
        b_row = i_zero + tl.maximum((at + o_item) * stride, first) * step
        b_in = at + o_item <= end
        # From L2, where other programs have left them.
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
    """Return the share of the weight that a sink, a base-e score without a value, leaves."""
    return 1.0 / (1.0 + tl.exp2(sink * LOG2_E - lse))
