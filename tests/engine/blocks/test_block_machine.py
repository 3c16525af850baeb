"""The block manager through random histories: no block is lost, no content is mistaken."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from block_machine import START, BlockMachine, seen

pytestmark = pytest.mark.no_cover  # millions of steps through what other tests cover


def run_operations(number: int, seed: int) -> None:
    """Random operations without a search for the shortest failure, so many more of them."""
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
        )

    def operate() -> None:
        pick, few = chosen.randrange(6), chosen.randint(1, 6)
        kind = chosen.random()
        if kind < 0.15 and machine.has_room():
            machine.add(tokens(), chosen.choice(["", "", "a"]), fails=few == 6)
        elif kind < 0.2 and machine.preempted:
            machine.readmit()
        elif kind < 0.5 or not machine.holders:
            machine.step_all(few, chosen.choices([0, 1], k=6), fails=chosen.random() < 0.05)
        elif kind < 0.6:
            machine.append(pick, tokens())
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
            machine.evict(chosen.choice([few, 100]))  # all that are free, wherever they lie

    for step in range(number):
        if step % 1000 == 0:
            start()
        operate()
        machine.books_agree()
        if step % 20 == 0:
            machine.tables_lead_to_what_was_computed()
            machine.cached_blocks_are_whole_and_can_be_found()


@patch("appliance.engine.blocks.prefix_cache.MAX_COMPARED", 100)
def test_a_hundred_thousand_operations_lose_no_block_and_any_free_block_serves() -> None:
    run_operations(100_000, seed=1)
    assert min(seen.values()) >= 20, f"the histories hardly touch something: {seen}"


def test_random_histories_keep_the_books_and_the_content() -> None:
    script = Path(__file__).parents[2] / "support" / "random_histories.py"
    subprocess.run([sys.executable, str(script)], check=True)
