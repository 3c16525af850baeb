from __future__ import annotations

import pytest
import torch
from state_steps import spans_of

from appliance.kernels.gated_delta.launch import gated_delta
from appliance.kernels.gated_delta.reference import gated_delta as by_torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def parts_of(
    num_tokens: int, key_heads: int, value_heads: int, key_dim: int, value_dim: int
) -> Parts:
    """Queries, keys and values as parts of wider rows, as a layer has them."""
    random = torch.Generator().manual_seed(num_tokens)
    keys = key_heads * key_dim
    width = 2 * keys + value_heads * value_dim
    mixed = torch.randn(num_tokens, width, generator=random)
    query, key, value = mixed.split([keys, keys, value_heads * value_dim], dim=-1)
    share = torch.randn(2, num_tokens, value_heads, generator=random)
    return (
        query.unflatten(-1, (-1, key_dim)),
        key.unflatten(-1, (-1, key_dim)),
        value.unflatten(-1, (-1, value_dim)),
        -share[0].abs(),
        share[1].sigmoid(),
    )


# Dimensions that are no power of two, and no whole block; chunks beside decode rows.
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "heads", "dims"),
    [
        ([1, 1, 1], [7, 1, 30], (2, 6), (32, 48)),
        ([1, 5, 3], [9, 5, 20], (1, 1), (24, 16)),
        ([4], [4], (2, 4), (64, 64)),
    ],
)
def test_it_reads_and_corrects_the_state_as_torch_does(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> None:
    slots = [3, 0, 5][: len(query_lens)]
    spans = spans_of(query_lens, context_lens, slots)
    parts = parts_of(sum(query_lens), *heads, *dims)
    state = torch.randn(7, heads[1], *dims, generator=torch.Generator().manual_seed(1))
    # What begins from nothing reads nothing of its slot.
    for slot, rows, context in zip(slots, query_lens, context_lens, strict=True):
        if rows == context:
            state[slot] = torch.nan
    untouched, expected_state = state.clone(), state.clone()
    expected = by_torch(*parts, expected_state, spans)
    torch.testing.assert_close(gated_delta(*parts, state, spans), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[slots], expected_state[slots], rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(state[others], untouched[others]), "slots of others stay as they are"


def test_no_bit_depends_on_the_cut_or_the_neighbours() -> None:
    parts = parts_of(6, 1, 2, 32, 32)
    whole, cut = torch.zeros(3, 2, 32, 32), torch.full((3, 2, 32, 32), torch.nan)
    expected = gated_delta(*parts, whole, spans_of([6], [6], [1]))
    found = []
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        query, key, value, decay, beta = (part[begin:end] for part in parts)
        spans = spans_of([end - begin], [end], [1])
        found.append(gated_delta(query, key, value, decay, beta, cut, spans))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(cut[1], whole[1])
