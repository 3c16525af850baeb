"""The step budget on machines whose costs are known."""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import pytest

from appliance.engine.nouns.plan import StepLoad
from appliance.engine.scheduling.step_budget import StepBudget

MAX_ROWS = 512  # of one step


@dataclass
class Machine:
    """A step costs what these fields say, with noise, and now and then three times as much."""

    fixed: float
    answer: float
    context: float  # per 1024 tokens
    prompt: float
    row: float
    work: float  # per row and 1024 tokens before it
    chance: random.Random = field(default_factory=lambda: random.Random(1))

    def exactly(self, load: StepLoad) -> float:
        return (
            self.fixed
            + self.answer * load.num_answers
            + self.context * load.context / 1024
            + self.prompt * (load.prompt_rows > 0)
            + self.row * load.prompt_rows
            + self.work * load.prompt_work / 1024
        )

    def measured(self, load: StepLoad) -> float:
        disturbed = 3.0 if self.chance.random() < 0.02 else 1.0
        return self.exactly(load) * self.chance.lognormvariate(0, 0.1) * disturbed


MACHINES = {
    "small model": Machine(4e-3, 1e-3, 1e-4, 0, 5e-4, 1e-5),
    "large model": Machine(0.2, 0.01, 1e-3, 0, 1e-2, 1e-3),
    "long attention": Machine(5e-3, 5e-4, 5e-4, 0, 1e-4, 1e-4),
    "wide": Machine(1e-2, 1e-5, 1e-6, 1e-3, 5e-6, 1e-6),
}


def prompt(rows: int, start: int, answers: int = 0, context: int = 0) -> StepLoad:
    return StepLoad(answers, context, rows, rows * (start + rows / 2))


def warmed_up(machine: Machine) -> StepBudget:
    budget = StepBudget(slowdown=1.6, min_rows=8)
    for rows in (40, 512, 100, 512, 300):
        budget.observe(prompt(rows, 0), machine.measured(prompt(rows, 0)))
    for step in range(100):
        load = StepLoad(16, 16 * (100 + step))
        budget.observe(load, machine.measured(load))
    return budget


@pytest.mark.parametrize("name", MACHINES)
def test_answers_go_on_at_the_pace_that_was_promised_while_a_long_prompt_is_read(
    name: str,
) -> None:
    machine = MACHINES[name]
    budget = warmed_up(machine)
    slower, start, steps = [], 0, 0
    while start < 8192:
        context = 16 * (200 + steps)
        rows = min(MAX_ROWS, budget.prompt_rows(16, context, start))
        load = prompt(rows, start, 16, context)
        slower.append(machine.exactly(load) / machine.exactly(StepLoad(16, context)))
        budget.observe(load, machine.measured(load))
        start, steps = start + rows, steps + 1
    slower.sort()
    assert slower[int(0.99 * len(slower))] < 2.0
    # The prompt also gets its promised share, if the step is large enough for that.
    assert slower[len(slower) // 2] > 1.4 or steps <= 8192 // MAX_ROWS + 10


def test_a_prompt_never_stands_still() -> None:
    budget = warmed_up(Machine(1e-3, 1e-6, 0, 0, 1.0, 0))
    assert budget.prompt_rows(16, 1600, 0) == 8


def test_rows_become_fewer_as_what_they_read_becomes_longer() -> None:
    machine = MACHINES["long attention"]
    budget = warmed_up(machine)
    for start in range(0, 4096, 32):
        load = prompt(32, start, 16, 1600)
        budget.observe(load, machine.measured(load))
    rows = [budget.prompt_rows(16, 1600, start) for start in (0, 4096, 32_768)]
    assert rows == sorted(rows, reverse=True)
    assert rows[0] > 2 * rows[2]


def test_where_prompts_cost_much_however_few_rows_they_have_they_have_many() -> None:
    machine = Machine(4e-3, 2e-5, 0, 1.5e-2, 1e-5, 0)
    budget = warmed_up(machine)
    for _ in range(30):
        rows = min(MAX_ROWS, budget.prompt_rows(16, 1600, 0))
        load = prompt(rows, 0, 16, 1600)
        budget.observe(load, machine.measured(load))
    assert rows == MAX_ROWS


def test_nothing_known_is_no_limit() -> None:
    assert StepBudget().prompt_rows(16, 1600, 0) > 1_000_000


def test_it_does_not_leap_beyond_what_was_tried() -> None:
    budget = StepBudget(slowdown=1.6, min_rows=8)
    for _ in range(50):
        budget.observe(StepLoad(16, 1600), 0.02)
    assert budget.prompt_rows(16, 1600, 0) == 16
    budget.observe(prompt(16, 0, 16, 1600), 0.02)
    assert budget.prompt_rows(16, 1600, 0) == 32


def test_a_long_time_without_prompts_does_not_unlearn_their_cost() -> None:
    machine = MACHINES["small model"]
    budget = warmed_up(machine)
    before = budget.prompt_rows(16, 1600, 0)
    for _ in range(3000):
        load = StepLoad(16, 1600)
        budget.observe(load, machine.measured(load))
    assert budget.prompt_rows(16, 1600, 0) == pytest.approx(before, rel=0.3)


def test_a_machine_that_changes_is_followed() -> None:
    budget = warmed_up(MACHINES["small model"])
    slower = Machine(1.2e-2, 3e-3, 3e-4, 0, 1.5e-3, 3e-5)
    for step in range(500):
        rows = budget.prompt_rows(16, 1600, 0)
        load = prompt(rows, 0, 16, 1600) if step % 2 else StepLoad(16, 1600)
        budget.observe(load, slower.measured(load))
    rows = budget.prompt_rows(16, 1600, 0)
    base = slower.exactly(StepLoad(16, 1600))
    assert 1.3 < slower.exactly(prompt(rows, 0, 16, 1600)) / base < 2.0


@pytest.mark.parametrize("load", [StepLoad(), StepLoad(1, 10)])
def test_what_cannot_be_learned_from_is_left_out(load: StepLoad) -> None:
    budget = StepBudget()
    budget.observe(load, 0.0 if load.num_answers else 1.0)
    assert budget.seconds(StepLoad(1, 10)) == 0
