from __future__ import annotations

from collections import Counter

import numpy as np
import pytest

from appliance.engine.nouns.plan import ScheduledSequence
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.sampler import SeenTokens
from appliance.kernels.penalties.rows import IN_PROMPT

VOCAB = 10
PROMPT = (1, 2, 2)


def sequence(answer: tuple[int, ...] = ()) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams())
    return Sequence(request, token_ids=[*PROMPT, *answer])


def prepare(seen: SeenTokens, *steps: tuple[int, Sequence, int]) -> list[int]:
    """Prepare a step that samples after `end` tokens of each sequence; return what it counts."""
    entries = [
        ScheduledSequence(one, end - 1, 1, samples=True, follows=end > len(one.token_ids))
        for _, one, end in steps
    ]
    counted = np.zeros(len(steps) + 1, dtype=np.int32)
    places = np.array([*(place for place, _, _ in steps), -1], dtype=np.int32)
    seen.prepare(entries, places, counted)
    return counted.tolist()


def line(seen: SeenTokens, place: int) -> dict[int, int]:
    return {token: count for token, count in enumerate(seen.table[place].tolist()) if count}


def test_a_sequence_that_is_new_is_counted_from_what_the_host_knows() -> None:
    seen = SeenTokens(HostDevice(), 3, VOCAB)
    assert prepare(seen, (2, sequence(), 3), (0, sequence((5, 5, 1)), 6)) == [0, 0, 0]
    assert line(seen, 2) == {1: IN_PROMPT, 2: IN_PROMPT}
    assert line(seen, 0) == {1: IN_PROMPT + 1, 2: IN_PROMPT, 5: 2}
    assert line(seen, 1) == {}


def test_from_then_on_the_device_counts_what_it_reads_even_if_nobody_knows_it_yet() -> None:
    seen, one = SeenTokens(HostDevice(), 2, VOCAB), sequence()
    prepare(seen, (1, one, 3))
    seen.table[1] = 0  # this would be overwritten if the row was written again
    for end in (4, 5, 6):
        assert prepare(seen, (1, one, end)) == [1, 0]
        one.token_ids.append(7)
    assert line(seen, 1) == {}


def test_another_sequence_in_the_slot_begins_anew_and_so_does_the_first_one_after_it() -> None:
    seen, first, second = SeenTokens(HostDevice(), 1, VOCAB), sequence((4,)), sequence((6,))
    prepare(seen, (0, first, 4))
    assert prepare(seen, (0, second, 4)) == [0, 0]
    assert line(seen, 0) == {1: IN_PROMPT, 2: IN_PROMPT, 6: 1}
    first.token_ids.append(3)
    assert prepare(seen, (0, first, 5)) == [0, 0]
    assert line(seen, 0) == {1: IN_PROMPT, 2: IN_PROMPT, 4: 1, 3: 1}


def test_a_sequence_that_comes_back_after_a_preemption_goes_on_or_begins_anew() -> None:
    seen, one = SeenTokens(HostDevice(), 2, VOCAB), sequence((4,))
    prepare(seen, (0, one, 4))
    one.token_ids.append(8)
    assert prepare(seen, (0, one, 5)) == [1, 0], "the same slot, and all but the last are counted"
    one.token_ids.append(9)
    assert prepare(seen, (1, one, 6)) == [0, 0], "another slot"
    assert line(seen, 1) == {1: IN_PROMPT, 2: IN_PROMPT, 4: 1, 8: 1, 9: 1}


@pytest.mark.parametrize("num_lost", [1, 2])
def test_steps_that_failed_are_counted_afresh(num_lost: int) -> None:
    seen, one = SeenTokens(HostDevice(), 1, VOCAB), sequence((4, 4))
    prepare(seen, (0, one, 4))
    for end in range(5, 5 + num_lost):
        assert prepare(seen, (0, one, end)) == [1, 0]
        seen.table[0, 9] += 1  # tokens that were sampled but never reported
    assert prepare(seen, (0, one, 5)) == [0, 0]
    assert line(seen, 0) == {1: IN_PROMPT, 2: IN_PROMPT, 4: 2}


def test_a_window_moves_with_every_token() -> None:
    """The window covers the last tokens, including the prompt's, as llama.cpp's penalties do."""
    request = Request(
        request_id="r", prompt_token_ids=PROMPT, sampling=SamplingParams(penalty_window=3)
    )
    seen, one = SeenTokens(HostDevice(), 1, VOCAB), Sequence(request, token_ids=[*PROMPT])
    for token in (5, 5, 2, 7, 7):
        assert prepare(seen, (0, one, len(one.token_ids))) == [0, 0], "all are counted already"
        assert line(seen, 0) == Counter(one.token_ids[-3:])
        one.token_ids.append(token)
