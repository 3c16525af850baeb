"""Launches the recurrent kernels: all rows of a step pass through their sequences' states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from appliance.kernels.gpu.direct_launch import Launcher, device_of
from appliance.kernels.gpu.target import target_of
from appliance.kernels.recurrence.kernel import pass_kernel, relate_kernel, row_kernel
from appliance.kernels.recurrence.variant import (
    CHUNK,
    MOST_REGISTERS,
    PASS_BLOCK_V,
    RELATE_WARPS,
    ROW_BLOCK_V,
    ROW_WARPS,
    pass_constexprs,
    pass_warps,
    relate_constexprs,
    row_constexprs,
)

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.rows.state_spans import StateSpans

_launch_relate = Launcher(relate_kernel)
_launch_pass = Launcher(pass_kernel)
_launch_row = Launcher(row_kernel)


def run_rows(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    share: Tensor | None,
    rates: Tensor,
    bias: Tensor,
    state: Tensor,
    spans: StateSpans,
    *,
    corrects: bool,
) -> Tensor:
    """Run all rows of a step without waiting for the device.

    Rows of a sequence that has few in this step pass one by one, others in chunks. Grids follow
    from shapes; a step of decode rows is one launch, which a graph can capture.

    Args:
        query: (num_tokens, num_key_heads, key_dim) float32.
        key: the same.
        value: (num_tokens, num_heads, value_dim) float32.
        step: (num_tokens, num_heads), any float dtype; states decay by exp(-rate * size), where
            size = softplus(step + bias).
        share: the same, rows as those of `step`: sigmoid(share) of the error is taken up with
            `corrects`; otherwise None, and values times sizes are.
        rates: (num_heads,) float32.
        bias: (num_heads,) float32.
        state: (num_slots, num_heads, key_dim, value_dim), updated; slots may be part of wider ones.
        spans: the rows of each sequence.
        corrects: True for the gated delta rule, False for the selective scan.

    Returns:
        (num_tokens, num_heads, value_dim) float32.
    """
    num_tokens, num_heads, value_dim = value.shape
    out = value.new_empty(num_tokens, num_heads, value_dim)
    if not num_tokens:
        return out
    assert state[0].is_contiguous(), state.stride()
    query, key, value = (x if x[0].is_contiguous() else x.contiguous() for x in (query, key, value))
    if step.stride(1) != 1 or (share is not None and share.stride() != step.stride()):
        step, share = step.contiguous(), None if share is None else share.contiguous()
    bears = step, share, rates, bias
    first_stride, step_stride = spans.firsts.stride(0), step.stride(0)
    keys = query.stride(0), key.stride(0)
    scale = key.shape[2] ** -0.5 if corrects else 1.0
    shape = corrects, num_heads // key.shape[1], key.shape[2]
    chunks, num_spans = spans.chunks, len(spans.slots)
    with device_of(value):
        if chunks is None or not chunks.are_all:
            _launch_row(
                (num_spans, num_heads, -(-value_dim // ROW_BLOCK_V)),
                (
                    out,
                    query,
                    key,
                    value,
                    *bears,
                    state,
                    spans.firsts,
                    spans.lens,
                    spans.slots,
                    spans.goes_on,
                    first_stride,
                    step_stride,
                    *keys,
                    value.stride(0),
                    state.stride(0),
                    num_heads,
                    scale,
                ),
                {
                    **row_constexprs(*shape, value_dim),
                    "num_warps": ROW_WARPS,
                    "maxnreg": None if corrects else MOST_REGISTERS,
                },
            )
        if chunks is None:
            return out
        pairs = (len(chunks.spans), num_heads, CHUNK, CHUNK)
        reads = value.new_empty(pairs)
        solves = value.new_empty(pairs) if corrects else None
        logs = value.new_empty(num_tokens, num_heads)
        _launch_relate(
            (len(chunks.spans), num_heads),
            (
                reads,
                solves,
                logs,
                query,
                key,
                *bears,
                spans.firsts,
                spans.lens,
                chunks.spans,
                chunks.starts,
                first_stride,
                step_stride,
                *keys,
                num_heads,
                scale,
            ),
            {**relate_constexprs(*shape), "num_warps": RELATE_WARPS},
        )
        held = state.index_select(0, spans.slots).float()  # those of few rows have passed already
        _launch_pass(
            (num_spans, num_heads, -(-value_dim // PASS_BLOCK_V)),
            (
                out,
                query,
                key,
                value,
                rates,
                held,
                spans.firsts,
                spans.lens,
                spans.goes_on,
                first_stride,
                *keys,
                value.stride(0),
                num_heads,
                scale,
                reads,
                solves,
                logs,
                chunks.starts,
            ),
            {
                **pass_constexprs(*shape, value_dim),
                "num_warps": pass_warps(target_of(value.device).capability),
            },
        )
        spans.write(state, held)
    return out


def gated_delta(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    step: Tensor,
    share: Tensor,
    rates: Tensor,
    bias: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.gated_delta`."""
    return run_rows(query, key, value, step, share, rates, bias, state, spans, corrects=True)


def selective_scan(
    value: Tensor,
    key: Tensor,
    query: Tensor,
    step: Tensor,
    rates: Tensor,
    bias: Tensor,
    state: Tensor,
    spans: StateSpans,
) -> Tensor:
    """See `reference.selective_scan`."""
    return run_rows(query, key, value, step, None, rates, bias, state, spans, corrects=False)
