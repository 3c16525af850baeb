"""Random histories of the block manager: it loses no block and mistakes no content."""

from __future__ import annotations

import random
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test
from support.simulation.block_history import seen
from support.simulation.block_machine import START, BlockMachine

pytestmark = pytest.mark.no_cover  # millions of steps of code that other tests cover


def run_operations(number: int, seed: int) -> None:
    """Random operations without shrinking of failures, and therefore many more of them."""
    chosen = random.Random(seed)
    machine = BlockMachine()

    def tokens() -> list[int]:
        shared = START[: chosen.choice([0, 3, 6, 7, 8])]
        return [*shared, *chosen.choices([0, 1], k=chosen.randint(1, 4))]

    def start() -> None:
        machine.start(
            num_blocks=chosen.randint(4, 24),
            block_size=chosen.choice([1, 2, 4, 4]),
            tokens=tokens(),
            salt="",
            sealed=chosen.random() < 0.3,
            rows=chosen.randint(4, 12),
            shuffle=chosen,
            checkpoints=chosen.choice([None, None, 0, 2, 6, 40]),
        )

    def operate() -> None:
        pick, few = chosen.randrange(6), chosen.randint(1, 6)
        kind = chosen.random()
        if kind < 0.15 and machine.has_room():
            machine.add(tokens(), chosen.choice(["", "", "a"]), fails=few == 6)
        elif kind < 0.2 and machine.preempted:
            machine.readmit()
        elif kind < 0.5 or not machine.holders:
            machine.step_all(few, chosen.choices([0, 1], k=6), fails=chosen.random() < 0.15)
        elif kind < 0.55:
            machine.append(pick, tokens())
        elif kind < 0.6 and machine.blocks.states is None:
            machine.verify(pick, chosen.choices([0, 1], k=few), chosen.randrange(7), few % 2)
        elif kind < 0.7:
            machine.compute_one(pick, few)
        elif kind < 0.78 and machine.has_room():
            machine.fork(pick, chosen.randrange(4), tokens(), few == 1, few)
        elif kind < 0.84:
            machine.preempt(pick, few % 2 == 0)
        elif kind < 0.87:
            machine.grow_beams(pick, few % 2, 1 + few % 3)
        elif kind < 0.9:
            machine.free(pick)
        elif kind < 0.94:
            machine.abort_within_a_step(pick, few)
        else:
            machine.evict(chosen.choice([few, 100]))  # all that are free, wherever they are

    for step in range(number):
        if step % 200 == 0:
            start()
        operate()
        machine.books_agree()
        if step % 20 == 0:
            machine.tables_and_hashes_lead_to_what_was_computed()
            machine.cached_blocks_are_whole_and_can_be_found()


@patch("appliance.engine.blocks.prefix_cache.MAX_COMPARED", 100)
def test_forty_thousand_operations_lose_no_block_and_any_free_block_serves() -> None:
    run_operations(40_000, seed=1)
    assert min(seen.values()) >= 10, f"the histories hardly touch something: {seen}"


def test_a_chain_stays_whole_when_an_equal_of_an_active_block_is_evicted() -> None:
    machine = BlockMachine()
    machine.start(4, 3, [0], "", sealed=False, rows=4, shuffle=random.Random(0))
    machine.free(0)
    machine.add([*START[:6], 0, 0], "", fails=False)
    machine.fork(0, back=3, tail=[0, 1, 1, 0], parent_ends=True, num_tokens=0)
    machine.fork(0, back=1, tail=[0], parent_ends=True, num_tokens=1)
    machine.books_agree()
    machine.cached_blocks_are_whole_and_can_be_found()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_step_that_copied_an_open_block_may_fail(sealed: bool) -> None:
    machine = BlockMachine()
    machine.start(8, 3, [0, 1, 1, 0], "", sealed, rows=6, shuffle=random.Random(0))
    machine.fork(0, back=0, tail=[1, 1], parent_ends=False, num_tokens=0)
    before = seen["copies of failed steps"]
    machine.step_all(2, [0] * 6, fails=True)
    assert seen["copies of failed steps"] > before
    machine.books_agree()


@patch("appliance.engine.blocks.prefix_cache.MAX_COMPARED", 100)
def test_random_histories_keep_the_books_and_the_content() -> None:
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            max_examples=40,
            stateful_step_count=60,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["steps"] >= 2000
