from __future__ import annotations

import pytest
import torch

from appliance.kernels.penalties import reference
from appliance.kernels.penalties.launch import penalize
from appliance.kernels.penalties.rows import IN_PROMPT, PenaltyRows

VOCAB = 5000  # two chunks
PLACES = [2, 2, 2, -1, 0, 4, -1, -1, 3, 3]


def rows_of(generator: torch.Generator) -> PenaltyRows:
    count = len(PLACES)
    return PenaltyRows(
        torch.tensor(PLACES, dtype=torch.int32),
        torch.tensor([1, 1, 1, 1, 0, 1, 0, 1, 0, 1], dtype=torch.int32),
        0.5 + torch.rand(count, generator=generator),
        torch.rand(count, generator=generator, dtype=torch.float64) * 4 - 2,
        torch.rand(count, generator=generator, dtype=torch.float64) * 4 - 2,
    )


@pytest.mark.parametrize("counts", [True, False])
def test_logits_and_counts_are_those_of_the_reference_to_the_bit(counts: bool) -> None:
    for seed in range(3):
        generator = torch.Generator().manual_seed(seed)
        rows = rows_of(generator)
        wide = torch.randn(len(PLACES), VOCAB + 24, generator=generator) * 5
        seen = torch.randint(-3, 4, (5, VOCAB), generator=generator).clamp(min=0).int()
        seen += IN_PROMPT * torch.randint(2, (5, VOCAB), generator=generator).int()
        read = torch.randint(VOCAB, (len(PLACES),), generator=generator)
        if not counts:
            asked = rows.places >= 0
            places = rows.places[asked].long(), read[asked]
            seen.index_put_(places, rows.counted[asked], accumulate=True)
        logits = wide[:, :VOCAB]  # rows of a larger tensor
        expected, expected_seen = logits.clone(), seen.clone()
        reference.penalize(expected, expected_seen, rows, read, is_counted=not counts)
        rest = wide[:, VOCAB:].clone()
        penalize(logits, seen, rows, read, is_counted=not counts)
        assert torch.equal(logits, expected)
        assert torch.equal(seen, expected_seen)
        assert torch.equal(wide[:, VOCAB:], rest)


def test_what_the_next_step_counts_lies_on_what_this_one_did() -> None:
    generator = torch.Generator().manual_seed(9)
    rows, seen = rows_of(generator), torch.zeros(5, VOCAB, dtype=torch.int32)
    for _ in range(3):
        penalize(torch.zeros(len(PLACES), VOCAB), seen, rows, torch.full((len(PLACES),), 4999))
    assert seen[:, 4999].tolist() == [0, 0, 9, 3, 3]
    assert seen.sum() == 15
