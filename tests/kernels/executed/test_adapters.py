from __future__ import annotations

from typing import Any

import pytest
import torch
from support.engine.unread import Unread

from appliance.kernels.adapters import reference
from appliance.kernels.adapters.factors import OutputRun, StackedFactors, blocks_of, padded_rank
from appliance.kernels.adapters.launch import add_adapters, plan_adapters

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
RELATIVE = {BF16: 2e-2, FP16: 3e-3, FP32: 1e-5}
# Two parts: one whose outputs lie at two places, one between them; outputs that nobody changes.
PIECES = (OutputRun(0, 0, 70, 0), OutputRun(110, 70, 9, 0), OutputRun(70, 79, 33, 1))
OUTPUTS = 128
RANKS = [[5, 16], [0, 3], [12, 0]]  # of slots and parts


def random_factors(
    dtype: torch.dtype, in_features: int = 96, most_ranks: int = 16, ranks: Any = RANKS
) -> StackedFactors:
    """A table's view: what nobody should read is no number, and slots lie apart."""
    random = torch.Generator().manual_seed(in_features)
    rank, num_slots, num_parts = padded_rank(most_ranks), len(ranks), len(ranks[0])
    rows = sum(piece.num_rows for piece in PIECES)
    sizes = num_parts * rank * in_features, rows * rank
    table = torch.randn((num_slots, sum(sizes) + 16), generator=random).to(dtype)
    shrink = table[:, : sizes[0]].view(num_slots, num_parts, rank, in_features)
    expand = table[:, sizes[0] : sum(sizes)].view(num_slots, rows, rank)
    for slot, of_slot in enumerate(ranks):
        for part, own in enumerate(of_slot):
            shrink[slot, part, own:] = torch.nan
            for piece in PIECES:
                if piece.part == part:
                    at = slice(piece.first_row, piece.first_row + piece.num_rows)
                    expand[slot, at, own:] = 0
    scales = torch.rand((num_slots, num_parts), generator=random) + 0.5
    return StackedFactors(
        shrink,
        expand,
        scales,
        torch.tensor(ranks, dtype=torch.int32),
        PIECES,
        torch.tensor(blocks_of(PIECES), dtype=torch.int32),
    )


def random_step(
    slots: list[int], dtype: torch.dtype, in_features: int = 96
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Inputs, outputs so far, and slots of rows."""
    random = torch.Generator().manual_seed(len(slots))
    x = torch.randn((len(slots), in_features), generator=random).to(dtype)
    out = torch.randn((len(slots), OUTPUTS), generator=random).to(dtype)
    return x, out, torch.tensor(slots, dtype=torch.int32)


def added(
    x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, factors: StackedFactors
) -> torch.Tensor:
    found = out.clone()
    add_adapters(found, x, factors, plan_adapters(slots, len(factors.ranks)))
    return found


def expected_of(
    x: torch.Tensor, out: torch.Tensor, slots: torch.Tensor, factors: StackedFactors
) -> torch.Tensor:
    expected = out.float()
    work = reference.plan_adapters(slots, len(factors.ranks))
    reference.add_adapters(expected, x.float(), factors, work)
    return expected


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32])
@pytest.mark.parametrize("slots", [[0], [2, -1, 0, 1, 0], [1] * 20 + [-1] * 3 + [0, 2] * 9])
def test_rows_of_any_adapters_get_what_the_reference_adds(
    slots: list[int], dtype: torch.dtype
) -> None:
    factors, step = random_factors(dtype), random_step(slots, dtype)
    found, expected = added(*step, factors), expected_of(*step, factors)
    bound = RELATIVE[dtype] * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound)
    base = step[2] < 0
    assert torch.equal(found[base], step[1][base])
    changed = (found != step[1]).any(1)
    assert torch.equal(changed, ~base)
    assert torch.equal(found[:, 103:110], step[1][:, 103:110]), "outputs of no piece"


@pytest.mark.parametrize(
    ("in_features", "most_ranks", "ranks"),
    [(600, 16, RANKS), (2112, 40, [[40, 7]]), (64, 100, [[100, 65], [64, 0]])],
)
def test_inputs_are_split_and_ranks_go_beyond_a_tile(
    in_features: int, most_ranks: int, ranks: list[list[int]]
) -> None:
    factors = random_factors(FP32, in_features, most_ranks, ranks)
    step = random_step([len(ranks) - 1, -1, 0, 0], FP32, in_features)
    found, expected = added(*step, factors), expected_of(*step, factors)
    bound = RELATIVE[FP32] * float(expected.abs().max())
    torch.testing.assert_close(found, expected, rtol=0, atol=bound)


@pytest.mark.parametrize("count", [1, 30, 70, 200])
def test_many_rows_of_an_adapter_with_tiles_of_every_height(count: int) -> None:
    factors, step = random_factors(BF16), random_step([1, 0, -1] * count, BF16)
    found, expected = added(*step, factors), expected_of(*step, factors)
    bound = RELATIVE[BF16] * float(expected.abs().max())
    torch.testing.assert_close(found.float(), expected, rtol=0, atol=bound)


def test_a_row_is_the_same_to_the_bit_beside_any_others() -> None:
    factors = random_factors(BF16)
    x, out, slots = random_step([2, -1, 0, 1, 0, 0], BF16)
    whole = added(x, out, slots, factors)
    for rows in ([3], [5, 0], [2, 4, 5]):
        assert torch.equal(added(x[rows], out[rows], slots[rows], factors), whole[rows])


def test_inputs_that_lie_in_wider_rows_are_read_where_they_are() -> None:
    factors, (x, out, slots) = random_factors(FP32), random_step([0, 1], FP32)
    wide = torch.full((2, 160), torch.nan)
    wide[:, 32:128] = x
    outputs = torch.zeros(2, 200)
    outputs[:, :OUTPUTS] = out
    add_adapters(outputs[:, :OUTPUTS], wide[:, 32:128], factors, plan_adapters(slots, 3))
    assert torch.equal(outputs[:, :OUTPUTS], added(x, out, slots, factors))
    assert not outputs[:, OUTPUTS:].any()


def test_the_host_reads_nothing_back() -> None:
    factors, (x, out, slots) = random_factors(BF16), random_step([2, -1, 0], BF16)
    with Unread():  # type: ignore[no-untyped-call]
        add_adapters(out, x, factors, plan_adapters(slots, 3))
        with pytest.raises(AssertionError, match="local_scalar_dense"):
            int(slots.max())


def test_no_rows_are_none_to_add_to() -> None:
    factors, (x, out, slots) = random_factors(BF16), random_step([], BF16)
    add_adapters(out, x, factors, plan_adapters(slots, 3))
    assert out.shape == (0, OUTPUTS)
