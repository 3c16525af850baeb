from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.engine.run.slot_settings import uniform_numbers
from appliance.errors import UnsupportedModelError
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library
from appliance.kernels.sampling import launch, reference
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.kernels.sampling.launch import DeviceSampling
from appliance.kernels.sampling.rows import SamplingRows

VOCAB = 5000  # two chunks, and more than all candidates
CPU = torch.device("cpu")
DEVICE_SAMPLING = DeviceSampling(8, VOCAB, CPU)
Settings = tuple[float, int, float, float, float]  # temperature, top-k, top-p, min-p, uniform


def logits_of(seed: int, num_rows: int, spread: float, *, coarse: bool = False) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(num_rows, VOCAB, generator=generator) * spread
    return logits.bfloat16().float() if coarse else logits  # a model's own logits have many ties


def rows_of(rows: list[Settings]) -> SamplingRows:
    temperature, top_k, top_p, min_p, uniform = map(list, zip(*rows, strict=True))
    return SamplingRows.of(temperature, top_k, top_p, min_p, uniform)


def assert_right(
    logits: torch.Tensor, rows: list[Settings], sampling: DeviceSampling = DEVICE_SAMPLING
) -> None:
    """A uniform number within rounding of a boundary may fall on either side of it."""
    tokens = sampling(logits, rows_of(rows))
    accepted = torch.stack(
        [
            reference.sample(
                logits,
                rows_of([(*row[:4], max(0.0, min(row[4] + shift, 1 - 1e-12))) for row in rows]),
            )
            for shift in (0.0, -1e-5, 1e-5)
        ]
    )
    assert (tokens == accepted).any(dim=0).all(), (tokens, accepted)


settings_of_a_row = st.tuples(
    st.sampled_from([0.0, 0.3, 1.0, 2.0]),
    st.sampled_from([0, 1, 2, 40, 2048, 2049, VOCAB, 10 * VOCAB]),
    st.sampled_from([0.0, 0.1, 0.9, 0.9999, 1.0]),
    st.sampled_from([0.0, 0.05, 1.0]),
    st.floats(0.0, 1.0, exclude_max=True),
)


@settings(max_examples=4, derandomize=True, database=None)
@given(st.lists(settings_of_a_row, min_size=1, max_size=4), st.integers(0, 1000), st.booleans())
def test_tokens_equal_the_reference_up_to_rounding_of_the_boundary(
    rows: list[Settings], seed: int, coarse: bool
) -> None:
    assert_right(logits_of(seed, len(rows), 1.0 + seed % 4, coarse=coarse), rows)


def test_what_no_candidates_suffice_for_is_looked_for_in_the_whole_row() -> None:
    flat = torch.zeros(4, VOCAB)  # one bin holds every token
    flat[:, ::2] -= 1e-3
    deep = logits_of(3, 1, 0.01)
    rows: list[Settings] = [
        (1.0, 7, 1.0, 0.0, 0.99),
        (1.0, 0, 0.7, 0.0, 0.6),
        (2.0, 4000, 0.9, 0.0, 0.5),
        (0.5, 0, 0.99, 0.5, 0.01),
    ]
    assert_right(flat, rows)
    assert_right(deep.expand(4, -1), rows)


def test_the_same_seeds_draw_what_the_cpu_library_draws() -> None:
    """Of the same logits; those of a GPU's model may round differently."""
    kinds = [(1.0, 0, 1.0, 0.0), (0.8, 50, 0.9, 0.0), (1.2, 0, 1.0, 0.02), (0.7, 0, 0.95, 0.0)]
    seeds = np.array([7, 2**63 - 1, 0, 12345], dtype=np.uint64)
    logits = logits_of(6, 4, 3.0)
    engine = NativeEngine(load_library(), 1)
    for position in (1, 500):
        uniform = uniform_numbers(seeds, np.full(4, position)).tolist()
        rows = rows_of([(*kind, number) for kind, number in zip(kinds, uniform, strict=True)])
        assert torch.equal(DEVICE_SAMPLING(logits, rows), NativeSampling(engine)(logits, rows))
    engine.close()


def test_greedy_rows_are_the_argmax_to_the_bit_and_ties_go_to_the_lowest_id() -> None:
    logits = logits_of(1, 4, 0.5, coarse=True)
    logits[3, [77, 4900]] = 9.0
    rows = rows_of([(0.0, 5, 0.5, 0.1, 0.7)] * 4)
    assert torch.equal(DEVICE_SAMPLING(logits, rows), logits.argmax(dim=-1))
    assert DEVICE_SAMPLING(logits, rows)[3] == 77


@pytest.mark.parametrize(("uniform", "token"), [(0.0, 100), (0.5, 101), (1 - 2**-53, 102)])
def test_equal_logits_are_taken_by_rising_id(uniform: float, token: int) -> None:
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, 100:4300] = 0.0  # over both chunks
    logits[0, 101] = -0.0
    assert DEVICE_SAMPLING(logits, rows_of([(1.0, 3, 1.0, 0.0, uniform)])).item() == token


def test_the_last_uniform_number_never_picks_a_token_that_was_cut() -> None:
    logits = torch.full((3, VOCAB), -torch.inf)
    logits[:, 0], logits[:, 1] = 0.0, 5.0
    last = 1 - 2**-53
    rows: list[Settings] = [
        (1.0, 0, 1.0, 0.0, last), (1.0, 0, 0.0, 0.0, last), (1.0, 1, 1.0, 0.0, last)
    ]  # fmt: skip
    tokens = DEVICE_SAMPLING(logits, rows_of(rows)).tolist()
    assert tokens[0] in (0, 1)
    assert tokens[1:] == [1, 1]


def test_a_broken_row_gets_a_code_and_its_neighbours_get_their_tokens() -> None:
    logits = logits_of(2, 6, 3.0)
    logits[1, 4999] = torch.nan
    logits[2] = -torch.inf
    logits[3, 7] = torch.inf
    logits[4, [7, 9]] = torch.tensor([torch.inf, torch.nan])
    for temperature, top_k in ((0.0, 0), (1.0, 0), (1.0, 40)):
        rows: list[Settings] = [(temperature, top_k, 1.0, 0.0, 0.3)] * 6
        tokens = DEVICE_SAMPLING(logits, rows_of(rows))
        assert tokens[1:5].tolist() == [-1, -1, -2, -1]
        good = torch.tensor([0, 5])
        assert torch.equal(tokens[good], reference.sample(logits[good], rows_of(rows[:2])))


def test_a_row_does_not_depend_on_its_neighbours_or_on_where_its_tokens_lie() -> None:
    logits = logits_of(4, 4, 4.0)
    rows: list[Settings] = [
        (0.0, 0, 1.0, 0.0, 0.1),
        (1.0, 0, 1.0, 0.1, 0.2),
        (0.7, 40, 0.9, 0.0, 0.3),
        (1.5, 0, 0.95, 0.0, 0.4),
    ]
    together = DEVICE_SAMPLING(logits, rows_of(rows)).tolist()
    alone = [int(DEVICE_SAMPLING(logits[i : i + 1], rows_of(rows[i : i + 1]))) for i in range(4)]
    assert together == alone
    wide = torch.full((4, VOCAB + 24), torch.nan)  # rows of a larger tensor
    wide[:, :VOCAB] = logits
    assert DEVICE_SAMPLING(wide[:, :VOCAB], rows_of(rows)).tolist() == together


def test_a_vocabulary_that_no_kernel_covers_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="up to 524288"):
        DeviceSampling(1, 2**19 + 1, CPU)


def test_a_row_of_many_chunks_is_cut_into_longer_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "MAX_CHUNKS", 1)
    sampling = DeviceSampling(4, VOCAB, CPU)
    logits = logits_of(5, 4, 4.0)
    logits[0, -1] = 99.0
    rows: list[Settings] = [
        (0.0, 0, 1.0, 0.0, 0.1),
        (1.0, 0, 1.0, 0.0, 0.7),
        (0.8, 9, 0.9, 0.0, 0.6),
        (1.5, 0, 0.999, 0.0, 0.4),
    ]
    assert_right(logits, rows, sampling)
    assert sampling(logits, rows_of(rows))[0] == VOCAB - 1
