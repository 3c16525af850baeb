"""Measure plan and commit by number of sequences, and the block manager by its size.

    scripts/benchmark scheduler  # about a minute
    scripts/benchmark scheduler --sequences 64 256 --blocks 1000 10000

No model runs. Times are CPU seconds of this process, medians over steps, the best repetition. The
goals are milliseconds at 256 sequences and two ratios: cost per sequence as sequences grow, cost of
an operation as blocks grow.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable
from itertools import count
from typing import Any

from appliance.bench.figures import percentile
from appliance.engine.blocks.block_manager import BlockManager
from appliance.engine.nouns.plan import Sampled
from appliance.engine.nouns.request import Request
from appliance.engine.nouns.sampling_params import SamplingParams
from appliance.engine.nouns.sequence import Sequence
from appliance.engine.scheduling.scheduler import Scheduler, SchedulerLimits
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

BLOCK_SIZE = 16
PROMPT = 64  # tokens of a sequence that runs
CHAIN = 64  # blocks of a sequence in the block manager's turns
GOAL_MS = 1.5  # of plan and commit, at 256 sequences

_names = count()


def request(tokens: int, owner: str = "", max_tokens: int | None = None) -> Request:
    """Return a request whose prompt shares nothing with any other."""
    number = next(_names)
    return Request(
        request_id=str(number),
        prompt_token_ids=tuple(range(number * 100_000, number * 100_000 + tokens)),
        sampling=SamplingParams(max_tokens=max_tokens),
        owner=owner,
    )


def seconds_of(work: Callable[[], object]) -> float:
    begin = time.process_time()
    work()
    return time.process_time() - begin


def decoding(
    sequences: int, blocks: int, *, owners: int = 1, waiting: int = 0
) -> tuple[Scheduler, Callable[[], None]]:
    """Return a scheduler with that many decoding sequences, and a function that makes one step."""
    limits = SchedulerLimits(sequences, sequences + 512, 4096)
    scheduler = Scheduler(BlockManager(blocks, BLOCK_SIZE), limits)

    def step() -> None:
        plan = scheduler.plan(0.0)
        assert plan is not None
        scheduler.commit(plan, [Sampled(5)] * sum([entry.samples for entry in plan.scheduled]))

    for number in range(sequences):
        scheduler.add(request(PROMPT, str(number % owners)), 0.0)
    while scheduler.stats().waiting:
        step()
    for number in range(waiting):
        scheduler.add(request(PROMPT, str(number % owners)), 0.0)
    for _ in range(4):
        step()
    assert scheduler.stats().step_decode_tokens == sequences
    return scheduler, step


def step_cost(
    options: argparse.Namespace, sequences: int, blocks: int, **more: int
) -> dict[str, Any]:
    """Measure milliseconds of plan and commit; `more` goes to `decoding`."""
    runs = []
    for _ in range(options.repeats):
        _, step = decoding(sequences, blocks, **more)
        runs.append([1000 * seconds_of(step) for _ in range(options.steps)])
    best = min(runs, key=statistics.median)
    median = statistics.median(best)
    return {
        "sequences": sequences,
        "blocks": blocks,
        **more,
        "ms": round(median, 3),
        "ms_p99": round(percentile(best, 0.99), 3),
        "us_per_sequence": round(1000 * median / sequences, 3),
    }


def block_cost(options: argparse.Namespace, num_blocks: int) -> dict[str, Any]:
    """Measure microseconds a block of chains that are allocated, found again, shared and freed.

    The cache is full of other content all the while, so that every block taken evicts one.
    """
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    chain = min(CHAIN, num_blocks // 4)

    def fill(sequence: Sequence) -> None:
        assert manager.allocate(sequence, len(sequence.token_ids)) is not None
        manager.commit(sequence, len(sequence.token_ids))

    for _ in range(num_blocks // chain + 1):
        sequence = Sequence(request(chain * BLOCK_SIZE))
        fill(sequence)
        manager.free(sequence)
    costs: dict[str, list[float]] = {"fill": [], "fork": [], "free": [], "find": []}
    for _ in range(options.steps):
        sequence = Sequence(request(chain * BLOCK_SIZE))
        child = Sequence(sequence.request, index=1)
        again = Sequence(sequence.request)
        manager.find_prefix(sequence)  # hashing is the same work for any number of blocks
        manager.find_prefix(again)

        def fork(parent: Sequence = sequence, child: Sequence = child) -> None:
            manager.fork(parent, child, parent.num_computed - 1)

        def free(one: Sequence = sequence, other: Sequence = child) -> None:
            manager.free(one)
            manager.free(other)

        def find(again: Sequence = again) -> None:
            manager.attach(again, manager.find_prefix(again))

        for name, work in (
            ("fill", lambda sequence=sequence: fill(sequence)),
            ("fork", fork),
            ("free", free),
            ("find", find),
        ):
            costs[name].append(1e6 * seconds_of(work) / chain)
        manager.free(again)
    return {
        "blocks": num_blocks,
        **{f"us_per_block_{name}": round(statistics.median(c), 3) for name, c in costs.items()},
    }


def measure(options: argparse.Namespace) -> dict[str, Any]:
    gc.disable()  # an engine between two requests collects hardly any garbage, too
    largest = max(options.blocks)
    by_sequences = [step_cost(options, n, largest) for n in options.sequences]
    enough = [blocks for blocks in options.blocks if blocks >= 4 * 64]
    by_blocks = [step_cost(options, min(64, options.sequences[0]), n) for n in enough]
    blocks = [block_cost(options, n) for n in options.blocks]
    crowd = [
        step_cost(options, 256, largest, owners=owners, waiting=waiting)
        for owners, waiting in ((1, 0), (8, 0), (8, 1000), (8, 10_000))
    ]
    at_256 = next((one["ms"] for one in by_sequences if one["sequences"] == 256), None)
    first, last = by_sequences[0], by_sequences[-1]
    operations = [name for name in blocks[0] if name != "blocks"]
    return {
        "plan_and_commit_by_sequences": by_sequences,
        "plan_and_commit_by_blocks": by_blocks,
        "plan_and_commit_of_256_by_owners_and_waiting": crowd,
        "block_manager": blocks,
        "ms_at_256_sequences": at_256,
        "goal_ms_at_256_sequences": GOAL_MS,
        "cost_by_sequence_last_to_first": round(
            last["us_per_sequence"] / first["us_per_sequence"], 2
        ),
        "cost_by_block_last_to_first": {
            name.removeprefix("us_per_block_"): round(blocks[-1][name] / blocks[0][name], 2)
            for name in operations
        },
        "step_with_most_blocks_to_fewest": round(by_blocks[-1]["ms"] / by_blocks[0]["ms"], 2),
        "step_with_most_waiting_to_none": round(crowd[-1]["ms"] / crowd[0]["ms"], 2),
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument(
        "--sequences", type=int, nargs="+", default=[64, 128, 256, 512, 1024], help="rising"
    )
    parser.add_argument(
        "--blocks", type=int, nargs="+", default=[1000, 10_000, 100_000], help="rising"
    )
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    result = {"benchmark": "scheduler", "conditions": conditions(), **measure(options)}
    write_result(options.out, result)
