"""Sampling by the CPU library against the definition in kernels/sampling/reference.py."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Iterator

import pytest
import torch
from support.kernels.cpu_sections import use_isa
from torch import Tensor

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import supported_isas
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.sampling import reference
from appliance.kernels.sampling.cpu import NativeSampling
from appliance.kernels.sampling.rows import SamplingRows

# float32 exponentials move a boundary between two tokens, and the edge of a nucleus, by this much.
UNIFORM_STEP = 2e-6
TOP_P_STEP = 1e-6
LAST = 1 - 2**-53  # the largest uniform number


Sample = Callable[[Tensor, SamplingRows], list[int]]


def listed(sampling: NativeSampling) -> Sample:
    return lambda logits, rows: sampling(logits, rows).tolist()


@pytest.fixture
def sample(library: ctypes.CDLL) -> Iterator[Sample]:
    engine = NativeEngine(library, 3)
    yield listed(NativeSampling(engine))
    engine.close()


def random_logits(seed: int, vocab_size: int) -> Tensor:
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed))


def with_bans(logits: Tensor) -> Tensor:
    logits = logits * 4
    logits[
        torch.randperm(len(logits), generator=torch.Generator().manual_seed(1))[1::2]
    ] = -math.inf
    return logits


def outlier(logits: Tensor) -> Tensor:
    """One token far above the others, which are too close together for a bisection to separate."""
    logits = logits * 1e-6
    logits[len(logits) // 2] = 3.0
    return logits


DISTRIBUTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "normal": lambda x: x * 4,
    "narrow": lambda x: x * 0.01,
    "wide": lambda x: x * 60,
    "ties": lambda x: (x * 4).round() / 2,
    "equal": torch.zeros_like,
    "signed-zeros": lambda x: torch.where(x > 0, 0.0, -0.0),
    "falling": lambda x: (x * 3).sort(descending=True).values,
    "rising": lambda x: (x * 3).sort().values,
    "bans": with_bans,
    "outlier": outlier,
    "huge": lambda x: x * 1e37,
}
TEMPERATURES = (0.0, 9e-6, 2e-5, 0.3, 1.0, 2.0)
MIN_PS = (0.0, 0.0, 0.05, 1.0)
TOP_PS = (0.0, 0.1, 0.9, 0.9999, 1.0)


def settings(seed: int, vocab_size: int, count: int) -> SamplingRows:
    """Random settings; top_k below, at and above the limit of each method that finds it."""
    random = torch.Generator().manual_seed(seed)

    def pick(values: tuple[float, ...]) -> list[float]:
        return [values[i] for i in torch.randint(len(values), (count,), generator=random).tolist()]

    blocks = -(-vocab_size // 256)
    top_ks = (
        0,
        0,
        1,
        2,
        40,
        blocks,
        blocks + 1,
        vocab_size // 2,
        vocab_size - 1,
        vocab_size,
        10**9,
    )
    return SamplingRows.of(
        pick(TEMPERATURES),
        [max(0, int(k)) for k in pick(top_ks)],
        pick(TOP_PS),
        pick(MIN_PS),
        torch.rand(count, generator=random, dtype=torch.float64).tolist(),
    )


def moved(rows: SamplingRows, uniform: float, top_p: float) -> SamplingRows:
    return SamplingRows(
        temperature=rows.temperature,
        top_k=rows.top_k,
        # 1 means no nucleus, and remains 1
        top_p=torch.where(rows.top_p < 1, (rows.top_p + top_p).clamp(0, 1 - 2**-24), rows.top_p),
        min_p=rows.min_p,
        uniform=(rows.uniform + uniform).clamp(0, LAST),
    )


def assert_as_defined(logits: Tensor, rows: SamplingRows, tokens: list[int]) -> None:
    """Assert the reference's token, or one that it draws when its inputs change by a rounding."""
    expected = reference.sample(logits, rows).tolist()
    for i, (token, by_definition) in enumerate(zip(tokens, expected, strict=True)):
        if token == by_definition:
            continue
        one = rows.select(torch.tensor([i]))
        accepted = {
            int(reference.sample(logits[i : i + 1], moved(one, du, dp)))
            for du in (-UNIFORM_STEP, 0.0, UNIFORM_STEP)
            for dp in (-TOP_P_STEP, 0.0, TOP_P_STEP)
        }
        assert token in accepted, f"row {i}: {token} is not {by_definition}: {one}"


@pytest.mark.parametrize("vocab_size", [1, 2, 15, 255, 256, 257, 3000])
@pytest.mark.parametrize("kind", DISTRIBUTIONS)
def test_tokens_are_those_of_the_definition(sample: Sample, kind: str, vocab_size: int) -> None:
    count = 24
    rows = settings(len(kind) + vocab_size, vocab_size, count)
    logits = torch.stack([DISTRIBUTIONS[kind](random_logits(i, vocab_size)) for i in range(count)])
    before = logits.clone()
    tokens = sample(logits, rows)
    assert torch.equal(logits, before)
    assert_as_defined(logits, rows, tokens)


@pytest.mark.parametrize("kind", ["normal", "narrow", "ties"])
def test_a_whole_vocabulary(sample: Sample, kind: str) -> None:
    logits = DISTRIBUTIONS[kind](random_logits(5, 49_157)).expand(7, -1).contiguous()
    rows = SamplingRows.of(
        [1.0] * 7,
        [0, 0, 40, 0, 49_156, 1000, 0],
        [1.0, 0.9, 0.9, 0.9999, 1.0, 0.95, 1.0],
        [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.1],
        [0.3, 0.8, 0.6, 0.9, 0.7, 0.4, 0.5],
    )
    assert_as_defined(logits, rows, sample(logits, rows))


@pytest.mark.parametrize(
    ("top_k", "top_p", "min_p"),
    [(0, 1.0, 0.0), (0, 1.0, 0.1), (4, 1.0, 0.0), (0, 0.8, 0.0), (5, 0.8, 0.2)],
)
def test_frequencies_follow_the_probabilities(
    sample: Sample, top_k: int, top_p: float, min_p: float
) -> None:
    logits = torch.tensor([2.0, 1.0, 0.5, -math.inf, 0.0, -1.0, -3.0])
    draws = 1000
    uniform = ((torch.arange(draws, dtype=torch.float64) + 0.5) / draws).tolist()
    rows = SamplingRows.of(
        [1.0] * draws, [top_k] * draws, [top_p] * draws, [min_p] * draws, uniform
    )
    tokens = torch.tensor(sample(logits.expand(draws, -1).contiguous(), rows))
    kept = torch.softmax(logits.double(), 0)
    ordered = kept.sort(descending=True).values
    if top_k:
        kept[kept < ordered[top_k - 1]] = 0
    mass_before = torch.stack([kept[kept > p].sum() for p in kept])
    kept[mass_before >= top_p * kept.sum()] = 0
    kept[kept < min_p * kept.max()] = 0
    counts = tokens.bincount(minlength=len(logits)) / draws
    assert torch.allclose(counts.double(), kept / kept.sum(), atol=1.01 / draws)


def test_equal_logits_are_taken_by_rising_id(sample: Sample) -> None:
    logits = torch.full((3, 3000), -1.0)
    logits[:, 100:200] = 0.0
    logits[:, 100:200:2] = -0.0
    rows = SamplingRows.of(
        [1.0] * 3, [3, 0, 0], [1.0, 1e-9, 1.0], [0.0, 0.0, 1.0], [0.5, LAST, 0.5]
    )
    assert sample(logits, rows) == [101, 100, 150]
    greedy = SamplingRows.of([0.0] * 3, [0] * 3, [1.0] * 3, [0.0] * 3, [LAST] * 3)
    assert sample(logits, greedy) == [100] * 3


def test_a_nucleus_ends_where_its_mass_is_reached(sample: Sample) -> None:
    logits = torch.zeros(3, 64)
    rows = SamplingRows.of([1.0] * 3, [0, 16, 2], [0.5] * 3, [0.0] * 3, [LAST] * 3)
    assert sample(logits, rows) == [31, 7, 0]


def test_temperatures_far_above_any_logit_ban_what_is_banned(sample: Sample) -> None:
    logits = torch.full((3, 300), -math.inf)
    logits[:, [7, 8, 290]] = torch.tensor([-5.0, 3.0, 2.0])
    rows = SamplingRows.of([1e38] * 3, [0, 0, 200], [1.0, 0.9, 1.0], [0.0] * 3, [LAST] * 3)
    assert sample(logits, rows) == [290, 7, 7]


@pytest.mark.parametrize(("top_k", "top_p"), [(0, 1.0), (3, 1.0), (0, 0.9999), (999, 1.0)])
@pytest.mark.parametrize("uniform", [0.0, 0.5, LAST])
def test_a_banned_token_is_never_chosen(
    sample: Sample, top_k: int, top_p: float, uniform: float
) -> None:
    logits = torch.full((2, 1000), -math.inf)
    logits[0, [400, 700]] = torch.tensor([1.0, -400.0])
    logits[1, 999] = -3e38
    rows = SamplingRows.of([1.0] * 2, [top_k] * 2, [top_p] * 2, [0.0] * 2, [uniform] * 2)
    assert sample(logits, rows) == [400, 999]


def test_min_p_above_one_leaves_the_likeliest(sample: Sample) -> None:
    logits = random_logits(0, 700)[None].repeat(3, 1)
    rows = SamplingRows.of([1.0] * 3, [0, 20, 0], [1.0, 1.0, 0.9], [1.5] * 3, [LAST] * 3)
    assert sample(logits, rows) == [int(logits[0].argmax())] * 3


@pytest.mark.parametrize("vocab_size", [5, 16, 300, 1030])
@pytest.mark.parametrize("place", [0, -1])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("top_p", [0.9, 1.0])
def test_broken_rows_say_so_and_leave_the_others_alone(
    sample: Sample, vocab_size: int, place: int, temperature: float, top_p: float
) -> None:
    logits = torch.stack([random_logits(7, vocab_size)] * 6)
    logits[1, place] = math.nan
    logits[2] = -math.inf
    logits[3, place] = math.inf
    logits[4, place], logits[4, vocab_size // 2] = math.nan, math.inf
    rows = SamplingRows.of([temperature] * 6, [0] * 6, [top_p] * 6, [0.0] * 6, [0.4] * 6)
    tokens = sample(logits, rows)
    assert tokens[1:5] == [-1, -1, -2, -1]
    assert tokens[0] == tokens[5] == int(reference.sample(logits[:1], rows)[0])


def many_rows(vocab_size: int, count: int) -> tuple[Tensor, SamplingRows]:
    kinds = list(DISTRIBUTIONS.values())
    logits = [kinds[i % len(kinds)](random_logits(i, vocab_size)) for i in range(count)]
    return torch.stack(logits), settings(11, vocab_size, count)


def test_a_row_depends_on_neither_neighbours_nor_threads(
    library: ctypes.CDLL, sample: Sample
) -> None:
    logits, rows = many_rows(1500, 44)
    together = sample(logits, rows)
    by_one_thread = listed(NativeSampling(NativeEngine(library, 1)))
    alone = [by_one_thread(logits[i : i + 1], rows.select(torch.tensor([i])))[0] for i in range(44)]
    assert together == alone


def test_vector_instruction_sets_choose_the_same(loaded: ctypes.CDLL) -> None:
    """The scalar path differs, without fused multiply-add."""
    logits, rows = many_rows(2000, 220)
    sample = listed(NativeSampling(NativeEngine(loaded, 3)))
    found = []
    for isa in supported_isas(loaded):
        if isa is not Isa.SCALAR:
            use_isa(loaded, isa)
            found.append(tuple(sample(logits, rows)))
    assert len(set(found)) <= 1


def test_no_rows(sample: Sample) -> None:
    assert sample(torch.empty(0, 30), SamplingRows.of([], [], [], [], [])) == []


def test_a_workspace_that_may_not_grow_is_an_error(library: ctypes.CDLL) -> None:
    sample = listed(NativeSampling(NativeEngine(library, 1, 4096)))
    logits = random_logits(0, 1000)[None]
    with pytest.raises(MemoryError):
        sample(logits, SamplingRows.of([1.0], [0], [0.9], [0.0], [0.5]))
    by_id = SamplingRows.of([1.0], [0], [1.0], [0.0], [0.5])
    assert sample(logits, by_id) == reference.sample(logits, by_id).tolist()


def test_other_element_types_are_refused(sample: Sample) -> None:
    rows = SamplingRows.of([1.0], [0], [0.9], [0.0], [0.5])
    for logits in (torch.zeros(1, 8, dtype=torch.bfloat16), torch.zeros(8, 2).T[:1]):
        with pytest.raises(AssertionError):
            sample(logits, rows)
