"""8-bit factors give the same product, to the precision of their codes."""

from __future__ import annotations

import torch

from appliance.model.adapters.factors import coded
from appliance.model.adapters.targets import Expansion, PlacedFactors

INPUTS = 48


def random_place() -> PlacedFactors:
    """Parts of 20, 3 and 16 ranks, of very different sizes; the second one is not expanded."""
    random = torch.Generator().manual_seed(5)
    sizes = 10 ** (4 * torch.rand(39, generator=random) - 2)
    wide = torch.randn(40, 20, generator=random) / sizes[:20]
    narrow = torch.randn(24, 16, generator=random)
    narrow[:, 7] = 0.0
    return PlacedFactors(
        sizes[:, None] * torch.randn(39, INPUTS, generator=random),
        torch.linspace(0.5, 2.0, 39),
        (Expansion(wide[:32], 0, 0), Expansion(narrow, 64, 23), Expansion(wide[32:], 32, 0)),
    )


def product(factors: PlacedFactors) -> torch.Tensor:
    """Return what the factors add to a place with 88 outputs, (outputs, inputs)."""
    shrink = factors.scales[:, None] * floats(factors.shrink)
    added = torch.zeros(88, INPUTS)
    for part in factors.expansions:
        outputs, ranks = part.matrix.shape
        own = shrink[part.first_rank : part.first_rank + ranks]
        added[part.first_output : part.first_output + outputs] += floats(part.matrix) @ own
    return added


def floats(matrix: torch.Tensor) -> torch.Tensor:
    return matrix if matrix.is_floating_point() else matrix.float() - 128


def test_codes_stand_for_the_same_product() -> None:
    exact, found = random_place(), coded(random_place())
    expected = product(exact)
    assert float((product(found) - expected).norm() / expected.norm()) < 0.01
    assert torch.equal(product(found)[64:].any(dim=1), expected[64:].any(dim=1))


def test_expansions_have_16_ranks_and_unused_ones_are_left_out() -> None:
    found = coded(random_place())
    assert found.shrink.dtype == torch.uint8
    assert (found.shrink.shape, found.scales.shape) == ((48, INPUTS), (48,))
    assert [(part.first_output, part.first_rank) for part in found.expansions] == [
        (0, 0),
        (0, 16),
        (32, 0),
        (32, 16),
        (64, 32),
    ]
    assert {part.matrix.shape[1] for part in found.expansions} == {16}
    padding = found.shrink[20:32]
    assert bool((padding == 128).all())
    assert not found.scales[20:32].any()


def test_bfloat16_factors_are_coded_as_their_floats() -> None:
    exact = random_place()
    halves = PlacedFactors(
        exact.shrink.bfloat16(),
        exact.scales,
        tuple(
            Expansion(one.matrix.bfloat16(), one.first_output, one.first_rank)
            for one in exact.expansions
        ),
    )
    whole = PlacedFactors(
        halves.shrink.float(),
        exact.scales,
        tuple(
            Expansion(one.matrix.float(), one.first_output, one.first_rank)
            for one in halves.expansions
        ),
    )
    found, expected = coded(halves), coded(whole)
    assert torch.equal(found.shrink, expected.shrink)
    assert torch.equal(found.scales, expected.scales)
    for one, other in zip(found.expansions, expected.expansions, strict=True):
        assert torch.equal(one.matrix, other.matrix)
