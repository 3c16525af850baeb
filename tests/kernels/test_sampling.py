from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.sampling import batched, reference
from appliance.kernels.sampling.rows import SamplingRows

VOCAB = 3000


def logits_of(seed: int, num_rows: int, spread: float = 4.0) -> torch.Tensor:
    return torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * spread


settings_of_a_row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 40, 1024, 1025, VOCAB, 10 * VOCAB]),
    st.sampled_from([0.0, 0.1, 0.9, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.floats(0.0, 1.0, exclude_max=True),
)


@settings(max_examples=60, derandomize=True)
@given(st.lists(settings_of_a_row, min_size=1, max_size=6), st.integers(0, 1000))
def test_batched_equals_reference_up_to_rounding_of_the_boundary(
    rows: list[tuple[float, int, float, float, float]], seed: int
) -> None:
    logits = logits_of(seed, len(rows), spread=1.0 + seed % 4)
    temperature, top_k, top_p, min_p, uniform = map(list, zip(*rows, strict=True))
    asked = SamplingRows.of(temperature, top_k, top_p, min_p, uniform)
    tokens = batched.sample(logits, asked)
    # If a uniform number is within rounding of a boundary between two tokens, either is right.
    low, high = ([max(0.0, min(u + e, 1 - 1e-12)) for u in uniform] for e in (-1e-5, 1e-5))
    accepted = torch.stack(
        [
            reference.sample(logits, SamplingRows.of(temperature, top_k, top_p, min_p, numbers))
            for numbers in (uniform, low, high)
        ]
    )
    assert (tokens == accepted).any(dim=0).all()


def test_a_row_does_not_depend_on_its_neighbours() -> None:
    logits = logits_of(1, 8)
    rows = SamplingRows.of(
        [0.0, 1.0, 0.7, 1.0, 1.5, 0.9, 1.0, 2.0],
        [0, 0, 40, 0, 5, 0, 0, 0],
        [1.0, 1.0, 0.9, 0.95, 1.0, 0.5, 1.0, 0.999999],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.1, 0.1, 0.0],
        [0.11, 0.22, 0.33, 0.44, 0.55, 0.66, 0.77, 0.88],
    )
    together = batched.sample(logits, rows)
    alone = [batched.sample(logits[i : i + 1], rows.select(torch.tensor([i]))) for i in range(8)]
    assert together.tolist() == [int(token) for token in alone]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (4, 1.0), (0, 0.8)])
def test_frequencies_follow_the_probabilities(top_k: int, top_p: float) -> None:
    logits = torch.tensor([[2.0, 1.0, 0.5, 0.0, -1.0, -3.0]])
    draws = 4000
    uniform = ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws).tolist()
    rows = SamplingRows.of([1.0] * draws, [top_k] * draws, [top_p] * draws, [0.0] * draws, uniform)
    tokens = batched.sample(logits.expand(draws, -1), rows)
    counts = tokens.bincount(minlength=6) / draws
    kept = torch.softmax(logits[0], 0)
    if top_k:
        kept[top_k:] = 0
    if top_p < 1:
        kept[(kept.cumsum(0) - kept) >= top_p] = 0
    assert torch.allclose(counts, kept / kept.sum(), atol=2 / draws)


def test_the_last_uniform_number_never_picks_a_token_that_was_cut() -> None:
    logits = torch.tensor([[0.0, 5.0, -torch.inf, -torch.inf]])
    rows = SamplingRows.of([1.0], [0], [1.0], [0.0], [1 - 2**-53])
    assert batched.sample(logits, rows).item() in (0, 1)
    rows = SamplingRows.of([1.0], [0], [0.0], [0.0], [1 - 2**-53])
    assert batched.sample(logits, rows).item() == 1


def test_equal_logits_are_taken_by_rising_id() -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 100:200] = 0.0
    rows = SamplingRows.of([1.0], [3], [1.0], [0.0], [0.5])
    assert batched.sample(logits, rows).item() == 101
