"""The whole engine under random loads and faults; `scripts/simulate` runs it for longer."""

from __future__ import annotations

import logging

import pytest
from engine_simulation import Simulation
from load_script import Script
from simulated_eras import failure_of, script_of, shrink, simulate
from virtual_runner import VirtualRunner

pytestmark = pytest.mark.no_cover  # millions of steps through what other tests cover

STEPS = 60_000


def test_every_request_gets_the_right_answer_whatever_happens(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.CRITICAL)
    seen = simulate(STEPS, seed=20261122)
    assert seen["steps"] >= STEPS
    for name in (
        *("preempted", "swapped", "failed steps", "deaths", "evictions", "refused"),
        *("tokens from the cache", "tokens from the host", "tokens from the disk"),
        *("damaged files", "beams", "beams cut off", "best of several", "preempted beams"),
        *("copies", "copies of open pages", "shared blocks", "mixed steps"),
        *("rows ahead", "rows for nothing", "blocks back from the host"),
        *("beams without an answer",),
    ):
        assert seen[name] >= 10, f"the loads hardly touch {name}: {seen}"
    for reason in ("stop", "length", "abort", "error", "timeout"):
        assert seen[f"ended: {reason}"] >= 50


def test_a_script_runs_the_same_each_time(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    runs = [Simulation(script_of(seed=3, era=5)) for _ in range(2)]
    assert runs[0].run() == runs[1].run()
    assert runs[0].seen == runs[1].seen
    assert runs[0].clock == runs[1].clock


def test_a_failure_is_found_again_and_cut_down_to_a_few_events(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.CRITICAL)
    monkeypatch.setattr(VirtualRunner, "_copy", lambda self, plan: None)

    def fails(script: Script) -> bool:
        return failure_of(script, check_every=1) is not None

    failing = next(script for era in range(30) if fails(script := script_of(seed=1, era=era)))
    small = shrink(failing, fails)
    assert len(small.events) <= 4
    assert fails(small)
