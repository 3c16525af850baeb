from __future__ import annotations

import pytest
import torch
from state_steps import spans_of

from appliance.kernels.selective_scan.launch import selective_scan
from appliance.kernels.selective_scan.reference import selective_scan as by_torch

Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def parts_of(num_tokens: int, heads: int, groups: int, head_dim: int, state_dim: int) -> Parts:
    """Values, keys and queries as parts of wider rows, as a layer has them; sizes of steps."""
    random = torch.Generator().manual_seed(num_tokens)
    sizes = [heads * head_dim, groups * state_dim, groups * state_dim]
    value, key, query = torch.randn(num_tokens, sum(sizes), generator=random).split(sizes, dim=-1)
    return (
        value.unflatten(-1, (heads, head_dim)),
        key.unflatten(-1, (groups, state_dim)),
        query.unflatten(-1, (groups, state_dim)),
        torch.rand(num_tokens, heads, generator=random) + 0.1,
    )


# Dimensions that are no power of two, and no whole block; chunks beside decode rows.
@pytest.mark.parametrize(
    ("query_lens", "context_lens", "heads", "dims"),
    [
        ([1, 1, 1], [7, 1, 30], (6, 2), (48, 32)),
        ([1, 5, 3], [9, 5, 20], (2, 1), (16, 24)),
        ([4], [4], (4, 4), (64, 64)),
    ],
)
def test_it_reads_and_decays_the_state_as_torch_does(
    query_lens: list[int],
    context_lens: list[int],
    heads: tuple[int, int],
    dims: tuple[int, int],
) -> None:
    slots = [3, 0, 5][: len(query_lens)]
    spans = spans_of(query_lens, context_lens, slots)
    parts = parts_of(sum(query_lens), *heads, *dims)
    rates = torch.rand(heads[0], generator=torch.Generator().manual_seed(2)) + 0.2
    random = torch.Generator().manual_seed(1)
    state = torch.randn(7, heads[0], dims[1], dims[0], generator=random)
    # What begins from nothing reads nothing of its slot.
    for slot, rows, context in zip(slots, query_lens, context_lens, strict=True):
        if rows == context:
            state[slot] = torch.nan
    untouched, expected_state = state.clone(), state.clone()
    expected = by_torch(*parts, rates, expected_state, spans)
    found = selective_scan(*parts, rates, state, spans)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state[slots], expected_state[slots], rtol=1e-4, atol=1e-4)
    others = [slot for slot in range(7) if slot not in slots]
    assert torch.equal(state[others], untouched[others]), "slots of others stay as they are"


def test_no_bit_depends_on_the_cut() -> None:
    parts, rates = parts_of(6, 2, 1, 32, 32), torch.tensor([0.5, 1.5])
    whole, cut = torch.zeros(3, 2, 32, 32), torch.full((3, 2, 32, 32), torch.nan)
    expected = selective_scan(*parts, rates, whole, spans_of([6], [6], [1]))
    found = []
    for begin, end in ((0, 2), (2, 3), (3, 6)):
        value, key, query, size = (part[begin:end] for part in parts)
        spans = spans_of([end - begin], [end], [1])
        found.append(selective_scan(value, key, query, size, rates, cut, spans))
    assert torch.equal(torch.cat(found), expected)
    assert torch.equal(cut[1], whole[1])
