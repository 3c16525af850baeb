"""Random histories of the block machine, in a process of their own.

Hypothesis also draws from the constants of all modules of ours that are loaded, so only a process
that loads nothing else sees the same histories every time.
"""

from __future__ import annotations

from unittest.mock import patch

from block_machine import BlockMachine, seen
from hypothesis import HealthCheck, settings
from hypothesis.stateful import run_state_machine_as_test


@patch("appliance.engine.blocks.prefix_cache.MAX_COMPARED", 100)
def main() -> None:
    run_state_machine_as_test(
        BlockMachine,
        settings=settings(
            max_examples=120,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
    assert seen["steps"] >= 2000


if __name__ == "__main__":
    main()
