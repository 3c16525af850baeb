from __future__ import annotations

from typing import cast

from appliance.engine.process.generation import Generation
from appliance.engine.process.quarantine import Trials


class Asked:
    def __init__(self, *, is_suspect: bool) -> None:
        self.is_suspect = is_suspect


def generation(*, is_suspect: bool = True) -> Generation:
    return cast("Generation", Asked(is_suspect=is_suspect))


def always(_: object) -> bool:
    return True


def test_suspects_run_one_at_a_time_and_others_beside_them() -> None:
    trials = Trials()
    first, second = generation(), generation()
    assert trials.admits(first)
    assert not trials.admits(second)
    assert second in trials
    assert first not in trials
    assert trials.admits(generation(is_suspect=False))


def test_the_end_of_a_trial_names_the_next_suspect_that_is_still_open() -> None:
    trials = Trials()
    running, gone, following = generation(), generation(), generation()
    for one in (running, gone, following):
        trials.admits(one)
    assert trials.end(following, always) is None, "it is not on trial"
    named = trials.end(running, lambda one: one is not gone)
    assert named == following
    assert trials.admits(following)
    assert trials.end(following, always) is None, "nobody else waits"


def test_the_end_of_a_process_ends_all_trials() -> None:
    trials = Trials()
    running, held = generation(), generation()
    trials.admits(running)
    trials.admits(held)
    assert trials.abandon() == (held,)
    assert held not in trials
    assert trials.admits(held)
