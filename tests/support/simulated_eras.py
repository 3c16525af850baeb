"""Many eras of the simulated engine, from one seed; one that fails is cut down to what matters.

The steps are spread over engines ("eras") with different settings.
"""

from __future__ import annotations

import random
import traceback
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING

from engine_simulation import Simulation
from load_script import write_script

if TYPE_CHECKING:
    from collections.abc import Callable

    from load_script import Event, Script

STEPS_OF_AN_ERA = 2000
MAX_TRIALS = 300  # runs to find a smaller script


class SimulationError(Exception):
    """An era failed; the message says how to see it again."""


def script_of(seed: int, era: int) -> Script:
    """What happens to an engine of the simulation."""
    return write_script(random.Random(f"{seed} {era}"), STEPS_OF_AN_ERA)


def failure_of(script: Script, check_every: int) -> str | None:
    """Where a script fails; None if it does not."""
    try:
        Simulation(script, check_every=check_every).run()
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__} {error} in {frame.name}, line {frame.lineno}"
    return None


def shrink(script: Script, fails: Callable[[Script], bool]) -> Script:
    """Leave out events, many at once and then fewer, as long as what is left still fails."""
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


def explain(seed: int, era: int) -> str | None:
    """How an era fails, and the least that leads there; None if it does not."""
    script = script_of(seed, era)
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
        f"again: scripts/simulate --seed {seed} --era {era}",
        f"{small.setting}, noise {small.noise}",
        *(f"    {event}" for event in small.events),
        f"then: {failure_of(small, check_every=1)}",
    ]
    return "\n".join(lines)


def simulate(steps: int, seed: int, *, check_every: int = 500) -> Counter[str]:
    """Run eras until they had so many steps together; what came up.

    Raises:
        SimulationError: one of them failed.
    """
    seen: Counter[str] = Counter()
    era = 0
    while seen["steps"] < steps:
        script = script_of(seed, era)
        try:
            Simulation(script, check_every=check_every, seen=seen).run()
        except Exception:
            again = explain(seed, era) or f"era {era} of seed {seed} fails with others before it"
            raise SimulationError(again) from None
        era += 1
    seen["eras"] = era
    return seen
