from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.kernels.penalties import cpu, reference
from appliance.kernels.penalties.rows import IN_PROMPT, Penalize, PenaltyRows

VOCAB = 40
each_way = pytest.mark.parametrize(
    "penalize", [reference.penalize, cpu.penalize], ids=["reference", "cpu"]
)
Asked = tuple[float, float, float]  # repetition, presence, frequency


def seen_of(prompt: list[int], answer: list[int]) -> torch.Tensor:
    line = torch.zeros(VOCAB, dtype=torch.int32)
    line[prompt] = IN_PROMPT
    return line + torch.tensor(answer, dtype=torch.int64).bincount(minlength=VOCAB).int()


def rows_of(places: list[int], counted: list[int], asked: list[Asked]) -> PenaltyRows:
    repetition, presence, frequency = zip(*asked, strict=True)
    return PenaltyRows(
        torch.tensor(places, dtype=torch.int32),
        torch.tensor(counted, dtype=torch.int32),
        torch.tensor(repetition, dtype=torch.float32),
        torch.tensor(presence, dtype=torch.float64),
        torch.tensor(frequency, dtype=torch.float64),
    )


def one_by_one(logits: list[float], prompt: list[int], answer: list[int], asked: Asked) -> None:
    """The penalties by definition, token after token, in place."""
    repetition, presence, frequency = asked
    for token in {*prompt, *answer}:
        value = logits[token]
        logits[token] = value / repetition if value > 0 else value * repetition
    for token, count in Counter(answer).items():
        logits[token] -= presence + frequency * count


tokens = st.lists(st.integers(0, VOCAB - 1), max_size=60)
asked = st.tuples(
    st.sampled_from([1.0, 0.5, 1.3]), st.sampled_from([0.0, -2.0, 0.7]), st.sampled_from([0.0, 0.3])
)


@each_way
@settings(max_examples=100, derandomize=True)
@given(rows=st.lists(st.tuples(tokens, tokens, asked, st.booleans()), min_size=1, max_size=5))
def test_each_row_is_lowered_by_what_it_has_seen(
    penalize: Penalize, rows: list[tuple[list[int], list[int], Asked, bool]]
) -> None:
    logits = torch.randn(len(rows), VOCAB, generator=torch.Generator().manual_seed(len(rows)))
    expected = logits.double().tolist()
    lines = []
    for row, (prompt, answer, penalties, counts) in zip(expected, rows, strict=True):
        one_by_one(row, prompt, answer, penalties)
        lines.append(seen_of(prompt, answer[:-1] if counts else answer))
    places = list(range(len(rows)))[::-1]
    seen = torch.stack(lines[::-1])
    counted = [int(counts and bool(answer)) for _, answer, _, counts in rows]
    read = torch.tensor([(answer or [3])[-1] for _, answer, _, _ in rows])
    asked_of_rows = rows_of(places, counted, [one[2] for one in rows])
    bits, seen_before = logits.clone(), seen.clone()
    penalize(logits, seen, asked_of_rows, read)
    reference.penalize(bits, seen_before, asked_of_rows, read)
    assert torch.equal(logits, bits)
    assert torch.allclose(logits.double(), torch.tensor(expected, dtype=torch.float64), atol=1e-5)
    assert torch.equal(seen, torch.stack([seen_of(*one[:2]) for one in rows])[places])


@each_way
def test_rows_without_penalties_and_places_of_others_stay_as_they_are(penalize: Penalize) -> None:
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(1))
    before, seen = logits.clone(), torch.full((2, VOCAB), 7, dtype=torch.int32)
    rows = rows_of([-1, 1, -1], [1, 1, 0], [(1.5, 0.5, 0.5)] * 3)
    penalize(logits, seen, rows, torch.tensor([3, 4, 5]))
    assert torch.equal(logits[[0, 2]], before[[0, 2]])
    assert not torch.isclose(logits[1], before[1]).any()
    assert (seen[0] == 7).all()
    assert (seen[1] == torch.tensor([8 if token == 4 else 7 for token in range(VOCAB)])).all()


@each_way
@pytest.mark.parametrize("is_counted", [False, True])
def test_rows_of_one_place_see_the_tokens_up_to_their_own(
    penalize: Penalize, is_counted: bool
) -> None:
    """Rows of drafts: a token read twice counts twice only in the row that reads it again."""
    read, asked = torch.tensor([5, 6, 5, 9]), [(1.0, 0.0, 1.0)] * 4
    rows, logits = rows_of([1, 1, 1, -1], [0, 1, 1, 1], asked), torch.zeros(4, VOCAB)
    seen = torch.zeros(2, VOCAB, dtype=torch.int32)
    seen[1, 5] = 1
    after = seen.clone()
    after[1, 5], after[1, 6] = 2, 1
    if is_counted:
        seen = after.clone()
    penalize(logits, seen, rows, read, is_counted=is_counted)
    assert torch.equal(seen, after)
    assert logits[:, [5, 6]].tolist() == [[-1, 0], [-1, -1], [-2, -1], [0, 0]]
    assert logits.sum() == -6
