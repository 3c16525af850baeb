from __future__ import annotations

import torch
from support.models.state_steps import padded_spans_of, spans_of

from appliance.kernels.recurrence.reference import gated_delta
from appliance.kernels.recurrence.variant import CHUNK, FEWEST_CHUNKED
from appliance.kernels.rows.host_spans import HostSpans, most_chunks
from appliance.kernels.short_conv.reference import short_conv


def test_pieces_of_a_sequence_are_one_span_and_sequences_without_rows_are_none() -> None:
    # Decode rows, with padding that shares a slot; a chunk cut at two blocks of 16; another; none.
    spans = HostSpans.of(
        [4, 9, 9, 7, 7, 7, 2, 9, 9],
        [1, 1, 1, 2, 16, 3, 5, 0, 0],
        [30, 1, 1, 16, 32, 35, 5, 0, 0],
    )
    assert spans.slots.tolist() == [4, 9, 9, 7, 2]
    assert spans.goes_on.tolist() == [True, False, False, True, False]
    assert spans.firsts.tolist() == [0, 1, 2, 3, 24]
    assert spans.lens.tolist() == [1, 1, 1, 21, 5]


def test_long_spans_alone_are_cut_into_chunks() -> None:
    lens = [FEWEST_CHUNKED, 1, 2 * CHUNK + 1, FEWEST_CHUNKED - 1]
    slots = [0, 1, 2, 3]
    of_chunks, starts = HostSpans.of(slots, lens, lens).chunks()
    assert of_chunks.tolist() == [0, 2, 2, 2]
    assert starts.tolist() == [0, 1, 1, 4]
    assert len(of_chunks) <= most_chunks(sum(lens), len(lens))
    found = spans_of(lens, lens, slots)
    assert found.chunks is not None
    assert not found.chunks.are_all
    assert spans_of([1, FEWEST_CHUNKED - 1], [1, 20], [0, 1]).chunks is None
    alone = spans_of([CHUNK], [CHUNK], [0])
    assert alone.chunks is not None
    assert alone.chunks.are_all


def test_a_padded_step_is_laid_out_without_a_number_of_the_host() -> None:
    step = [1, 1, CHUNK + 1], [9, 1, 80], [5, 8, 2]
    found = padded_spans_of(*step, num_rows=70, num_spans=5, num_chunks=4, spare=8)
    assert (found.longest, found.num_rows) == (68, 70)
    assert found.slots.tolist() == [5, 8, 2, 8, 8]
    assert found.goes_on.tolist() == [True, False, True, False, False]
    assert found.firsts.tolist() == [0, 1, 2, 0, 0]
    assert found.lens.tolist() == [1, 1, CHUNK + 1, 0, 0]
    assert found.chunks is not None
    assert found.chunks.spans.tolist() == [2, 2, 4, 4]
    assert found.chunks.starts.tolist() == [0, 0, 0, 2, 2]
    decode = padded_spans_of([1, 1], [9, 4], [5, 2], num_rows=2, num_spans=2, num_chunks=0, spare=8)
    assert decode.chunks is None
    assert decode.longest == 1


def test_padding_of_a_step_shares_a_slot_and_changes_nothing_else() -> None:
    random = torch.Generator().manual_seed(0)
    width, taps = 6, 3
    x = torch.randn(12, width, generator=random)
    filters = torch.randn(width, taps, generator=random)
    state = torch.randn(9, taps - 1, width, generator=random)
    alone = state.clone()
    step = [1, 1, 3, 4], [9, 1, 3, 30], [5, 8, 2, 0]
    expected = short_conv(x[:9], filters, None, alone, spans_of(*step))
    padded = padded_spans_of(*step, num_rows=12, num_spans=6, num_chunks=4, spare=8)
    found = short_conv(x, filters, None, state, padded)
    assert torch.equal(found[:9], expected)
    assert torch.equal(state[:8], alone[:8])


def test_rows_side_by_side_are_put_in_turn_again() -> None:
    spans = spans_of([3, 1, 4], [3, 9, 30], [0, 1, 2])
    x = torch.randn(8, 2, 5)
    assert torch.equal(spans.in_turn(spans.side_by_side(x)), x)
    assert spans.side_by_side(x)[1, 1:].eq(0).all()


def test_the_rule_takes_rows_in_steps_as_at_once() -> None:
    random = torch.Generator().manual_seed(0)

    def rows(*shape: int) -> torch.Tensor:
        return torch.randn(5, *shape, generator=random)

    query, key, value = rows(1, 4), rows(1, 4), rows(2, 3)
    bears, rest = (rows(2), rows(2)), (torch.tensor([0.5, 2.0]), torch.tensor([-1.0, 1.0]))
    whole, stepwise = torch.zeros(3, 2, 4, 3), torch.full((3, 2, 4, 3), torch.nan)
    expected = gated_delta(query, key, value, *bears, *rest, whole, spans_of([5], [5], [1]))
    found = []
    for i in range(5):
        row = slice(i, i + 1)
        spans = spans_of([1], [i + 1], [1])
        q, k, v, step, share = (part[row] for part in (query, key, value, *bears))
        found.append(gated_delta(q, k, v, step, share, *rest, stepwise, spans))
    torch.testing.assert_close(torch.cat(found), expected)
    torch.testing.assert_close(stepwise[1], whole[1])
