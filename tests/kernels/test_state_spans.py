from __future__ import annotations

from dataclasses import fields, replace

import torch

from appliance.kernels.gated_delta.reference import gated_delta
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.recurrence.variant import CHUNK, FEWEST_CHUNKED
from appliance.kernels.short_conv.reference import short_conv
from appliance.kernels.state_spans import StateChunks, StateSpans

CPU = torch.device("cpu")


def batch_of(
    query_lens: list[int], context_lens: list[int], slots: list[int], *, is_decode: bool = False
) -> RaggedBatch:
    tables = [[0]] * len(slots)
    batch = RaggedBatch.of(
        query_lens, context_lens, tables, block_size=64, device=CPU, state_slots=slots
    )
    return replace(batch, is_decode=is_decode)


def test_a_decode_step_is_laid_out_without_a_number_of_the_host() -> None:
    batch = batch_of([1, 1, 1], [9, 1, 4], [5, 2, 7])
    expected = StateSpans.of(batch)
    unknown = replace(
        batch,
        host_query_lens=(),
        host_context_lens=(),
        host_state_slots=None,
        is_decode=True,
    )
    found = StateSpans.of(unknown)
    assert found.chunks is expected.chunks is None
    for name in {field.name for field in fields(StateSpans)} - {"chunks"}:
        assert torch.equal(getattr(found, name), getattr(expected, name)), name


def test_padding_of_a_decode_step_shares_a_slot_and_changes_nothing_else() -> None:
    random = torch.Generator().manual_seed(0)
    width, taps = 6, 3
    x = torch.randn(4, width, generator=random)
    filters = torch.randn(width, taps, generator=random)
    state = torch.randn(9, taps - 1, width, generator=random)
    alone = state.clone()
    expected = short_conv(
        x[:2], filters, None, alone, StateSpans.of(batch_of([1, 1], [9, 4], [5, 2]))
    )
    padded = StateSpans.of(batch_of([1] * 4, [9, 4, 1, 1], [5, 2, 8, 8], is_decode=True))
    found = short_conv(x, filters, None, state, padded)
    assert torch.equal(found[:2], expected)
    assert torch.equal(state[:8], alone[:8])


def test_rows_side_by_side_are_put_in_turn_again() -> None:
    spans = StateSpans.of(batch_of([3, 1, 4], [3, 9, 30], [0, 1, 2]))
    x = torch.randn(8, 2, 5)
    assert torch.equal(spans.in_turn(spans.side_by_side(x)), x)
    assert spans.side_by_side(x)[1, 1:].eq(0).all()


def test_long_spans_alone_are_cut_into_chunks() -> None:
    lens = [FEWEST_CHUNKED, 1, 2 * CHUNK + 1, FEWEST_CHUNKED - 1]
    chunks = StateChunks.of(lens, CPU)
    assert chunks is not None
    assert chunks.spans.tolist() == [0, 2, 2, 2]
    assert chunks.starts.tolist() == [0, 1, 1, 4]
    assert not chunks.are_all
    assert StateChunks.of([1, FEWEST_CHUNKED - 1], CPU) is None
    alone = StateChunks.of([CHUNK], CPU)
    assert alone is not None
    assert alone.are_all


def test_the_rule_takes_rows_in_steps_as_at_once() -> None:
    random = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(5, *shape, generator=random)

    query, key, value = rows(1, 4), rows(1, 4), rows(2, 3)
    decay, share = -rows(2).abs(), rows(2).sigmoid()
    whole, stepwise = torch.zeros(3, 2, 4, 3), torch.full((3, 2, 4, 3), torch.nan)
    at_once = StateSpans.of(batch_of([5], [5], [1]))
    expected = gated_delta(query, key, value, decay, share, whole, at_once)
    found = []
    for i in range(5):
        row = slice(i, i + 1)
        spans = StateSpans.of(batch_of([1], [i + 1], [1], is_decode=True))
        found.append(
            gated_delta(query[row], key[row], value[row], decay[row], share[row], stepwise, spans)
        )
    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(stepwise[1], whole[1])
