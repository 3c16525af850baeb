"""Many eras of the simulated engine, from one seed; the script of one that fails is reduced.

The steps are distributed over engines ("eras") with different settings.
"""

from __future__ import annotations

import logging
import random
import traceback
from collections import Counter, deque
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, TypeVar

from support.simulation.engine_simulation import Simulation
from support.simulation.load_script import write_script

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from support.simulation.load_script import Event, Script

Result = TypeVar("Result")

STEPS_OF_AN_ERA = 600  # rather many settings than long lives
MAX_TRIALS = 300  # runs to find a smaller script


class SimulationError(Exception):
    """An era failed; the message says how to reproduce it."""


def script_of(seed: int, era: int, *, pictures: bool = False) -> Script:
    """The script of one engine."""
    return write_script(random.Random(f"{seed} {era}"), STEPS_OF_AN_ERA, pictures=pictures)


def failure_of(script: Script, check_every: int) -> str | None:
    """The error of a script; None if it passes."""
    try:
        Simulation(script, check_every=check_every).run()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {error} in {frame.name}, line {frame.lineno}"
    return None


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Leave out events, many at once and then fewer, while the rest still fails."""
    events: list[Event] = list(script.events)
    size, trials = len(events) // 2, 0
    while size and trials < MAX_TRIALS:
        at = 0
        while at < len(events) and trials < MAX_TRIALS:
            fewer = events[:at] + events[at + size :]
            trials += 1
            if fails(replace(script, events=tuple(fewer))):
                events = fewer
            else:
                at += size
        size //= 2
    return replace(script, events=tuple(events))


def explain(seed: int, era: int, *, pictures: bool = False) -> str | None:
    """Describe an era's failure, with the smallest script that fails; None if it passes."""
    script = script_of(seed, era, pictures=pictures)
    failure = failure_of(script, check_every=1)
    if failure is None:
        return None
    kind = failure.split(" in ")[0]

    def fails(candidate: Script) -> bool:
        found = failure_of(candidate, check_every=1)
        return found is not None and found.split(" in ")[0] == kind

    small = shrink(script, fails)
    lines = [
        f"era {era} of seed {seed} fails: {failure}",
        f"again: scripts/simulate --seed {seed} --era {era}{' --pictures' * pictures}",
        f"{small.setting}, noise {small.noise}",
        *(f"    {event}" for event in small.events),
        f"then: {failure_of(small, check_every=1)}",
    ]
    return "\n".join(lines)


def simulate(
    steps: int, seed: int, *, check_every: int = 500, jobs: int = 1, pictures: bool = False
) -> Counter[str]:
    """Run eras until they had so many steps together; count the notable cases.

    Args:
        steps: at least so many.
        seed: of all eras.
        check_every: steps between two checks of all invariants.
        jobs: processes that run eras concurrently; the result does not depend on it.
        pictures: prompts have some.

    Raises:
        SimulationError: one of them failed.
    """
    seen: Counter[str] = Counter()
    run = partial(_run_era, seed, check_every=check_every, pictures=pictures)
    for era, counts in enumerate(_in_order(run, jobs)):
        if counts is None:
            again = (
                explain(seed, era, pictures=pictures)
                or f"era {era} of seed {seed} fails with others before it"
            )
            raise SimulationError(again)
        seen += counts
        if seen["steps"] >= steps:
            seen["eras"] = era + 1
            return seen
    raise AssertionError("eras do not end")


def _run_era(seed: int, era: int, *, check_every: int, pictures: bool) -> Counter[str] | None:
    """Count an era's notable cases; None if it failed."""
    seen: Counter[str] = Counter()
    try:
        script = script_of(seed, era, pictures=pictures)
        Simulation(script, check_every=check_every, seen=seen).run()
        seen["conversations"] += sum(event.arrives is not None for event in script.events)
    except Exception:
        return None
    return seen


def _in_order(run: Callable[[int], Result], jobs: int) -> Iterator[Result]:
    """Yield a function's results of 0, 1, 2 and so on, some of them computed ahead."""
    if jobs == 1:
        yield from map(run, count())
        return
    with ProcessPoolExecutor(jobs, initializer=logging.disable, initargs=(logging.ERROR,)) as pool:
        ahead = deque(pool.submit(run, era) for era in range(2 * jobs))
        try:
            for era in count(2 * jobs):
                yield ahead.popleft().result()
                ahead.append(pool.submit(run, era))
        finally:
            for future in ahead:
                future.cancel()
