from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod

import pytest
import torch
from support.models.state_steps import padded_spans_of, spans_of

from appliance.kernels.recurrence.launch import gated_delta, selective_scan
from appliance.kernels.recurrence.reference import gated_delta as gated_delta_by_torch
from appliance.kernels.recurrence.reference import selective_scan as selective_scan_by_torch
from appliance.kernels.recurrence.variant import CHUNK, FEWEST_CHUNKED

Parts = tuple[torch.Tensor, ...]


@dataclass(frozen=True)
class Shape:
    key_heads: int
    heads: int
    key_dim: int
    value_dim: int

    def keys_and_values(self, num_tokens: int) -> Parts:
        """Queries, keys and values as parts of wider rows, as a layer has them."""
        random = torch.Generator().manual_seed(num_tokens)
        keys, values = self.key_heads * self.key_dim, self.heads * self.value_dim
        mixed = torch.randn(num_tokens, 2 * keys + values, generator=random)
        query, key, value = mixed.split([keys, keys, values], dim=-1)
        return (
            query.unflatten(-1, (-1, self.key_dim)),
            key.unflatten(-1, (-1, self.key_dim)),
            value.unflatten(-1, (-1, self.value_dim)),
        )

    def states(self, num_slots: int) -> torch.Tensor:
        """States as parts of wider slots, as several layers have them."""
        random = torch.Generator().manual_seed(1)
        shape = (self.heads, self.key_dim, self.value_dim)
        slots = torch.randn(num_slots, prod(shape) + 32, generator=random)
        found: torch.Tensor = slots[:, 16:-16].unflatten(1, shape)
        return found


@dataclass(frozen=True)
class Rule:
    """A rule and its inputs in the order of its arguments; the first `by_row` are of rows."""

    run: Callable[..., torch.Tensor]
    by_torch: Callable[..., torch.Tensor]
    parts_of: Callable[[int, Shape], Parts]
    by_row: int


def delta_parts(num_tokens: int, shape: Shape) -> Parts:
    random = torch.Generator().manual_seed(num_tokens)
    # Steps and shares as parts of wider rows, as a layer has them.
    mixed = torch.randn(num_tokens, 16 + 2 * shape.heads, generator=random)
    step, share = mixed[:, 16:].split(shape.heads, dim=-1)
    return *shape.keys_and_values(num_tokens), step, share, *rates_and_bias(shape)


def scan_parts(num_tokens: int, shape: Shape) -> Parts:
    random = torch.Generator().manual_seed(num_tokens)
    query, key, value = shape.keys_and_values(num_tokens)
    step = torch.randn(num_tokens, shape.heads, generator=random)
    return value, key, query, step, *rates_and_bias(shape)


def rates_and_bias(shape: Shape) -> Parts:
    random = torch.Generator().manual_seed(shape.heads)
    rates, bias = torch.rand(2, shape.heads, generator=random)
    return rates + 0.2, bias * 4 - 3


DELTA = Rule(gated_delta, gated_delta_by_torch, delta_parts, by_row=5)
SCAN = Rule(selective_scan, selective_scan_by_torch, scan_parts, by_row=4)
RULES = pytest.mark.parametrize("rule", [DELTA, SCAN], ids=["gated_delta", "selective_scan"])


def check_beside_torch(
    rule: Rule, query_lens: list[int], context_lens: list[int], shape: Shape
) -> None:
    slots = [3, 0, 5, 1][: len(query_lens)]
    spans = spans_of(query_lens, context_lens, slots)
    parts, state = rule.parts_of(sum(query_lens), shape), shape.states(7)
    # What begins from nothing reads nothing of its slot.
    for slot, rows, context in zip(slots, query_lens, context_lens, strict=True):
        if rows == context:
            state[slot] = torch.nan
    untouched, expected_state = state.clone(), state.clone()
    expected = rule.by_torch(*parts, expected_state, spans)
    torch.testing.assert_close(rule.run(*parts, state, spans), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[slots], expected_state[slots], rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(state[others], untouched[others]), "slots of others stay as they are"


# Dimensions that are no power of two, and no whole block; a few rows beside decode rows.
@RULES
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "shape"),
    [
        ([1, 1, 1], [7, 1, 30], Shape(2, 6, 32, 48)),
        ([1, 5, 3], [9, 5, 20], Shape(1, 1, 24, 16)),
        ([4], [4], Shape(2, 4, 64, 64)),
    ],
)
def test_few_rows_pass_one_by_one(
    rule: Rule, query_lens: list[int], context_lens: list[int], shape: Shape
) -> None:
    check_beside_torch(rule, query_lens, context_lens, shape)


# Chunks that are whole, that a row follows, that a row lacks; beside rows that pass one by one.
@RULES
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "shape"),
    [
        ([FEWEST_CHUNKED, CHUNK + 1], [40, CHUNK + 1], Shape(1, 2, 16, 16)),
        ([2, CHUNK - 1, 1, 2 * CHUNK + 6], [2, 90, 8, 2 * CHUNK + 6], Shape(1, 2, 24, 48)),
        ([CHUNK], [CHUNK + 3], Shape(1, 1, 64, 16)),
    ],
)
def test_many_rows_pass_in_chunks(
    rule: Rule, query_lens: list[int], context_lens: list[int], shape: Shape
) -> None:
    check_beside_torch(rule, query_lens, context_lens, shape)


@RULES
@pytest.mark.parametrize("kept", [torch.float16, torch.bfloat16])
def test_states_kept_in_16_bits_are_read_exactly_and_rounded_behind_the_rows(
    rule: Rule, kept: torch.dtype
) -> None:
    shape, step = Shape(1, 2, 24, 48), ([1, 3, CHUNK], [7, 3, CHUNK + 9], [3, 0, 5])
    spans, parts = spans_of(*step), rule.parts_of(sum(step[0]), shape)
    state = shape.states(7).to(kept)
    exact, untouched = state.float(), state.clone()
    expected = rule.by_torch(*parts, exact, spans)
    torch.testing.assert_close(rule.run(*parts, state, spans), expected, rtol=1e-4, atol=1e-4)
    step_of = torch.finfo(kept).eps
    torch.testing.assert_close(state.float(), exact.to(kept).float(), rtol=step_of, atol=1e-4)
    assert torch.equal(state[[1, 2, 4, 6]], untouched[[1, 2, 4, 6]])


@RULES
def test_what_exceeds_float16_becomes_its_largest_number(rule: Rule) -> None:
    shape, spans = Shape(1, 1, 16, 16), spans_of([1, 20], [5, 30], [0, 2])
    parts = rule.parts_of(21, shape)
    value = 2 if rule is DELTA else 0  # their place among the arguments
    parts = *parts[:value], parts[value] * 1e6, *parts[value + 1 :]
    state = shape.states(3).half()
    rule.run(*parts, state, spans)
    assert state.isfinite().all()
    assert (state[[0, 2]].abs() == 65504).any()


@RULES
def test_padding_changes_no_bit(rule: Rule) -> None:
    """As a graph of larger steps runs them: rows behind the last sequence's, sequences without."""
    shape = Shape(1, 2, 16, 16)
    step = [1, CHUNK + 1, 20, 3], [9, CHUNK + 1, 50, 7], [3, 0, 5, 1]
    rows = sum(step[0])
    parts = rule.parts_of(rows, shape)
    of_rows, rest = parts[: rule.by_row], parts[rule.by_row :]
    filled = [torch.cat((part, part[:12])) for part in of_rows]
    state, padded = shape.states(7), shape.states(7)
    expected = rule.run(*of_rows, *rest, state, spans_of(*step))
    spans = padded_spans_of(*step, num_rows=rows + 12, num_spans=7, num_chunks=9, spare=6)
    found = rule.run(*filled, *rest, padded, spans)
    assert torch.equal(found[:rows], expected)
    assert torch.equal(padded[:6], state[:6])


def in_pieces(rule: Rule, parts: Parts, state: torch.Tensor, cuts: list[int]) -> torch.Tensor:
    found = []
    for begin, end in zip([0, *cuts[:-1]], cuts, strict=True):
        rows = [part[begin:end] for part in parts[: rule.by_row]]
        spans = spans_of([end - begin], [end], [1])
        found.append(rule.run(*rows, *parts[rule.by_row :], state, spans))
    return torch.cat(found)


@RULES
def test_no_bit_depends_on_the_cut_of_a_few_rows(rule: Rule) -> None:
    shape = Shape(1, 2, 32, 32)
    parts, whole, cut = rule.parts_of(6, shape), shape.states(3), shape.states(3)
    expected = in_pieces(rule, parts, whole, [6])
    assert torch.equal(in_pieces(rule, parts, cut, [2, 3, 6]), expected)
    assert torch.equal(cut[1], whole[1])


@RULES
def test_chunks_wherever_they_end_give_what_rows_give(rule: Rule) -> None:
    shape, last = Shape(1, 1, 16, 16), CHUNK + 40
    parts, by_rows = rule.parts_of(last, shape), shape.states(3)
    expected = in_pieces(rule, parts, by_rows, [*range(4, last, 10), last])
    for cuts in ([last], [CHUNK, last], [30, 31, last], [CHUNK + 20, last]):
        state = shape.states(3)
        found = in_pieces(rule, parts, state, cuts)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        torch.testing.assert_close(state[1], by_rows[1], rtol=1e-4, atol=1e-4)


# Powers of the triangle reach 1e17 where all keys are one, and sums of decays 6000.
@pytest.mark.parametrize("decay", [0.0, -1e-3, -100.0])
def test_keys_that_repeat_and_decays_of_any_size_stay_exact(decay: float) -> None:
    shape = Shape(1, 1, 16, 16)
    rows = CHUNK + 20
    query, key, value, step, share, *_ = delta_parts(rows, shape)
    key = key[:1].expand(rows, -1, -1).contiguous()
    share = torch.full_like(share, 0.95).logit()
    sizes = torch.where(torch.arange(rows)[:, None] % 7 == 3, -decay, step.abs() * 1e-3)
    step = sizes.double().expm1().log().clamp(-100, 100).float()  # softplus gives the size
    state, spans = shape.states(3), spans_of([rows], [200], [1])
    left = state.double()
    parts = query, key, value, step, share, torch.ones(1), torch.zeros(1)
    expected = DELTA.by_torch(*(part.double() for part in parts), left, spans)
    found = gated_delta(*parts, state, spans)
    torch.testing.assert_close(found.double(), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state.double(), left, rtol=1e-4, atol=1e-4)


@RULES
def test_sizes_of_steps_are_exact_where_they_are_small(rule: Rule) -> None:
    """A state of ones decays, and nothing is added: what is left tells the size."""
    shape, steps = Shape(1, 1, 16, 16), torch.linspace(-14, 30, 45)
    for step in steps.tolist():
        rate = 1 / torch.nn.functional.softplus(torch.tensor(step).double()).float()
        *of_row, _ = (part[:1] * 0 for part in delta_parts(1, shape)[:4])
        raw = torch.full((1, 1), step)
        more = (raw * 0,) if rule is DELTA else ()
        state = torch.ones(2, 1, 16, 16)
        rule.run(*of_row, raw, *more, rate.view(1), torch.zeros(1), state, spans_of([1], [9], [1]))
        torch.testing.assert_close(state[1], torch.full((1, 16, 16), 0.36787944), rtol=2e-5, atol=0)
