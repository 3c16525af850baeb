from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from support.models.state_steps import padded_spans_of, spans_of

from appliance.kernels.short_conv.launch import short_conv
from appliance.kernels.short_conv.reference import short_conv as by_torch


def states(num_slots: int, kept: int, width: int) -> torch.Tensor:
    """Kept inputs as parts of wider slots, as several layers have them."""
    random = torch.Generator().manual_seed(1)
    slots = torch.randn(num_slots, kept * width + 32, generator=random)
    found: torch.Tensor = slots[:, 16:-16].unflatten(1, (kept, width))
    return found


def parts(rows: int, width: int, taps: int, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows as a part of wider ones, filters and a bias."""
    random = torch.Generator().manual_seed(rows)
    x = torch.randn(rows, 3 * width, generator=random).to(dtype)[:, width : 2 * width]
    return x, torch.randn(width, taps, generator=random), torch.randn(width, generator=random)


# Decode rows, of which one begins; prompts around a block of 16 rows, shorter than the filter.
@pytest.mark.parametrize(
    ("query_lens", "context_lens"),
    [
        ([1, 1, 1], [7, 1, 30]),
        ([1, 2, 3], [9, 2, 20]),
        ([16, 17, 1], [16, 40, 5]),
        ([35], [35]),
    ],
)
@pytest.mark.parametrize(
    ("width", "taps", "dtype", "has_bias"),
    [(48, 3, torch.float32, False), (144, 4, torch.bfloat16, True)],
)
def test_outputs_and_kept_inputs_are_those_of_torch(
    query_lens: list[int],
    context_lens: list[int],
    width: int,
    taps: int,
    dtype: torch.dtype,
    has_bias: bool,
) -> None:
    slots = [3, 0, 5][: len(query_lens)]
    spans = spans_of(query_lens, context_lens, slots)
    x, filters, bias = parts(sum(query_lens), width, taps, dtype)
    state = states(7, taps - 1, width)
    for slot, rows, context in zip(slots, query_lens, context_lens, strict=True):
        if rows == context:  # what begins reads nothing of its slot
            state[slot] = torch.nan
    untouched, expected_state = state.clone(), state.clone()
    given = x, filters, bias if has_bias else None
    expected = by_torch(*given, expected_state, spans)
    torch.testing.assert_close(short_conv(*given, state, spans), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state[slots], expected_state[slots])
    others = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(state[others], untouched[others]), "slots of others stay as they are"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("gated", [False, True])
def test_sums_are_activated_and_gated_as_by_torch(gated: bool, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    before, after, x = torch.randn(22, 3 * 48, generator=random).to(dtype).chunk(3, dim=-1)
    filters = torch.randn(48, 3, generator=random)
    state = states(7, 2, 48)
    expected_state, spans = state.clone(), spans_of([1, 2, 19], [9, 20, 19], [3, 0, 5])
    more = {"gates": (before, after)} if gated else {"activates": True}
    expected = by_torch(x, filters, None, expected_state, spans, **more)
    found = short_conv(x, filters, None, state, spans, **more)
    rounding = 2**-7 if gated and dtype == torch.bfloat16 else 1e-5
    torch.testing.assert_close(found, expected, rtol=rounding, atol=1e-5)
    assert torch.equal(state[[3, 0, 5]], expected_state[[3, 0, 5]])


@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_inputs_kept_in_16_bits_are_rounded_once(kept: torch.dtype) -> None:
    x, filters, bias = parts(22, 144, 4, torch.float32)
    x[21, :3] = torch.tensor([1e5, -1e6, 3e-6])  # beyond float16, and below its normal numbers
    state = states(7, 3, 144).to(kept)
    expected_state, spans = state.clone(), spans_of([1, 2, 19], [9, 20, 19], [3, 0, 5])
    expected = by_torch(x, filters, bias, expected_state, spans)
    found = short_conv(x, filters, bias, state, spans)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(state, expected_state)
    assert state.isfinite().all()


def test_padding_changes_no_bit() -> None:
    width, taps = 32, 4
    step = [1, 20, 3], [9, 20, 7], [3, 0, 5]
    x, filters, bias = parts(31, width, taps, torch.float32)
    state, padded = states(7, taps - 1, width), states(7, taps - 1, width)
    expected = short_conv(x[:24], filters, bias, state, spans_of(*step))
    spans = padded_spans_of(*step, num_rows=31, num_spans=5, num_chunks=6, spare=6)
    assert torch.equal(short_conv(x, filters, bias, padded, spans)[:24], expected)
    assert torch.equal(padded[:6], state[:6])


def test_no_bit_depends_on_where_a_prompt_is_cut() -> None:
    width, taps, last = 32, 4, 23
    x, filters, bias = parts(last, width, taps, torch.float32)
    whole, kept = states(3, taps - 1, width), states(3, taps - 1, width)
    expected = short_conv(x, filters, bias, whole, spans_of([last], [last], [1]))
    found = []
    cuts = [0, 1, 2, 18, 22, last]
    for begin, end in pairwise(cuts):
        spans = spans_of([end - begin], [end], [1])
        found.append(short_conv(x[begin:end], filters, bias, kept, spans))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(kept[1], whole[1])
