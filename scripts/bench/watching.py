"""What it costs to be watched: the engine's bookkeeping per step, and the API process per tick.

Everything is run in this process on data of the size that is asked for; processor time of this
thread, the smallest of several repeats, since whatever else runs only makes it larger. The engine
does the same whether it is watched or not: the API process reads the words from shared memory.

    scripts/bench_watching                      # 65,536 blocks, 32 sequences, 250 changes a tick
    scripts/bench_watching --step-ms 2.5        # steps of a fast GPU
"""

from __future__ import annotations

import argparse
import time
import zlib
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np

from appliance.engine.blocks.block_metadata import BlockMetadata
from appliance.engine.engine import _view
from appliance.engine.messages import EngineInfo, StepReport, Table
from appliance.engine.plan import Plan, ScheduledSequence
from appliance.engine.process.framing import encode_frame
from appliance.engine.process.worker import SNAPSHOT_SECONDS
from appliance.engine.request import Request, SamplingParams
from appliance.engine.sequence import Sequence
from appliance.events import BlockState, Sequences, encode_event
from appliance.server.admin import TICK_SECONDS
from appliance.server.block_feed import BlockFeed
from appliance.stats import EngineStats, SequenceView, StepView

REPEATS = 7
BLOCK_SIZE = 16


def cost(work: Callable[[], object], times: int) -> float:
    """Processor seconds of one call."""
    best = float("inf")
    for _ in range(REPEATS):
        begin = time.thread_time()
        for _ in range(times):
            work()
        best = min(best, (time.thread_time() - begin) / times)
    return best


def views(count: int) -> tuple[SequenceView, ...]:
    """Live sequences as the engine reports them."""
    return tuple(
        SequenceView(
            request_id=f"chatcmpl-{number:024x}", index=0, slot=number + 1, owner="key",
            status="running", prompt_tokens=700, cached_tokens=64, output_tokens=200, blocks=57,
            age_seconds=12.5,
        )
        for number in range(count)
    )  # fmt: skip


def plan_of(count: int) -> Plan:
    """A step in which all sequences decode."""
    request = Request(request_id="r", prompt_token_ids=(1,) * 700, sampling=SamplingParams())
    return Plan(tuple(ScheduledSequence(Sequence(request), 800, 1, True) for _ in range(count)))


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--blocks", type=int, default=65_536)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--changes", type=int, default=250, help="changed blocks a tick")
    parser.add_argument("--step-ms", type=float, default=10.0, help="length of a step")
    options = parser.parse_args()
    step = options.step_ms / 1000

    plan = plan_of(options.sequences)
    kept: deque[StepView] = deque(maxlen=1024)
    keep = cost(lambda: kept.append(_view(1, plan, step)), 2000)
    metadata = BlockMetadata(num_blocks=options.blocks)
    write = cost(lambda: metadata.write(77, BlockState.ACTIVE, 3, 1), 20_000)
    # A sequence fills a block in BLOCK_SIZE steps: one write when it is taken, one when it is full.
    writes = 2 * write * options.sequences / BLOCK_SIZE
    steps = tuple(StepView(n, 0, 32, 32, step) for n in range(int(SNAPSHOT_SECONDS / step)))
    bare = StepReport()
    full = msgspec.structs.replace(
        bare, stats=EngineStats(), sequences=views(options.sequences), steps=steps
    )
    report = cost(lambda: encode_frame(full), 500) + cost(lambda: views(options.sequences), 500)
    table = Table(request_id="r", index=0, blocks=tuple(range(8192)), hashes=bytes(16) * 8192)
    answer = cost(lambda: encode_frame(StepReport(tables=(table,))), 50)

    print(f"engine, steps of {options.step_ms:g} ms with {options.sequences} sequences:")
    always = keep + writes + report * step / SNAPSHOT_SECONDS
    for name, seconds, share in (
        ("what a step held", keep, keep / step),
        ("words of its blocks", writes, writes / step),
        (f"report every {SNAPSHOT_SECONDS:g} s", report, report / SNAPSHOT_SECONDS),
        ("all of these, watched or not", always, always / step),
        ("one table of 8,192 blocks a second", answer, answer),
    ):
        print(f"  {name:36} {1e6 * seconds:8.1f} us  {100 * share:7.3f} % of the time")

    feed, generator = BlockFeed(), np.random.default_rng(0)
    words = metadata.words.view()
    info = EngineInfo(
        model="m", architecture="a", device="d", backend="b", weight_format="w", kv_format="bf16",
        context_length=1, vocab_size=1, eos_token_ids=(), block_size=BLOCK_SIZE,
        num_blocks=options.blocks, max_num_seqs=1, weight_bytes=0, kv_bytes=0, workspace_bytes=0,
        memory_bytes=0, load_seconds=0.0, fingerprint="",
    )  # fmt: skip
    sizes: list[int] = []
    packer = zlib.compressobj(level=1, wbits=zlib.MAX_WBITS | 16)  # as `server.stream` does

    def packed(frame: bytes) -> int:
        return len(packer.compress(frame) + packer.flush(zlib.Z_SYNC_FLUSH))

    def tick() -> None:
        event = feed.poll(words.data, info)
        if event is not None:
            sizes.append(packed(encode_event(event)))

    def change_and_tick() -> None:
        for first in generator.integers(0, options.blocks - 8, options.changes // 4).tolist():
            for block in range(first, first + 4):
                metadata.write(block, BlockState.ACTIVE, int(first) % 32 + 1, 1)
        tick()

    tick()
    snapshot = sizes.pop()
    changes = cost(change_and_tick, 20)
    only_writes = cost(
        lambda: [metadata.write(b, BlockState.ACTIVE, 1, 1) for b in range(options.changes)], 20
    )
    quiet = cost(tick, 50)
    living = Sequences(sequences=views(options.sequences))
    told = cost(lambda: packed(encode_event(living)), 50)
    print(f"API process, {options.blocks:,} blocks, a tick every {TICK_SECONDS:g} s and watcher:")
    for name, seconds in (
        (f"{options.changes} blocks changed", changes - only_writes),
        ("nothing changed", quiet),
        (f"{options.sequences} sequences told anew", told),
    ):
        share = seconds / TICK_SECONDS
        print(f"  {name:36} {1e6 * seconds:8.1f} us  {100 * share:7.3f} % of a core")
    print(
        f"  on the wire a delta has {int(np.mean(sizes)):,} bytes, the first snapshot {snapshot:,}"
    )


if __name__ == "__main__":
    main()
