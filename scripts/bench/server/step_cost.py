"""Measure what writing behind to the disk costs decode steps, in one engine.

Windows with and without writing alternate (off, on, on, off) in one engine on the same answers,
while blocks always wait to be written; so drift of the machine affects both. Each pair of
neighbours gives one ratio. The result is the median and quartiles of the ratios, which a window
that another process disturbed hardly changes.
"""

from __future__ import annotations

import gc
import random
import statistics
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from appliance import SamplingParams
from appliance.bench.figures import percentile
from appliance.config import EngineConfig, cache_dir
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.hub import resolve_model
from appliance.progress import ProgressLine
from bench.lib.prompts import random_tokens

if TYPE_CHECKING:
    import argparse

TURNS = (False, True, True, False)  # whether a window writes
SHORT = 16  # tokens of the prompts of the steps that are timed


class Window(NamedTuple):
    """Consecutive decode steps."""

    steps: list[float]  # seconds of each
    cpu_seconds: float  # of all threads
    writer_seconds: float  # of a processor, of the disk's thread
    written: int  # blocks

    @property
    def seconds(self) -> float:
        """Seconds of all steps."""
        return sum(self.steps)


def prompt_of(length: int, seed: int) -> list[int]:
    return random_tokens(length, random.Random(seed))


def load_engine(options: argparse.Namespace, folder: str) -> LLMEngine:
    with ProgressLine() as progress:
        model = resolve_model(options.model, cache_dir=cache_dir(), progress=progress)
    config = EngineConfig(model=str(model.path), kv_disk=folder, threads=options.threads)
    return LLMEngine.load(config, eos_token_ids=(), metadata=None, on_progress=lambda *_: None)


def submit(engine: LLMEngine, name: str, tokens: list[int], max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    request = Request(request_id=name, prompt_token_ids=tuple(tokens), sampling=sampling)
    engine.submit(request)


def offer_blocks(engine: LLMEngine, options: argparse.Namespace, seed: int) -> None:
    """Send a long prompt twice, so that its blocks wait to be written."""
    for time_of_asking in range(2):
        submit(engine, f"long{time_of_asking}", prompt_of(options.prompt_tokens, seed), 1)
        while engine.stats().running or engine.stats().waiting:
            engine.step()


def run_window(engine: LLMEngine, options: argparse.Namespace, *, writes: bool) -> Window:
    """Run some steps, in which blocks may be written or may not."""
    tiers = engine._tiers
    disk, held = tiers.disk, tiers.writes
    assert disk is not None
    disk.wait_for_room(60.0, for_all=True)
    written, writer = engine.stats().kv_disk_written_total, disk.cpu_seconds
    tiers.writes = held if writes else None
    steps, cpu_begin = [], time.process_time()
    for _ in range(options.window):
        begin = time.perf_counter()
        engine.step()
        steps.append(time.perf_counter() - begin)
    cpu = time.process_time() - cpu_begin
    tiers.writes = held
    written = engine.stats().kv_disk_written_total - written
    return Window(steps, cpu, disk.cpu_seconds - writer, written)


def pairs_of(
    engine: LLMEngine, options: argparse.Namespace, batch: int, seed: int
) -> list[tuple[Window, Window]]:
    """Measure pairs of neighbouring windows of one batch, without and with writing."""
    offer_blocks(engine, options, seed)
    for number in range(batch):
        tokens = prompt_of(SHORT, seed + number + 1)
        submit(engine, f"short{number}", tokens, (len(TURNS) + 1) * options.window)
    while engine.stats().step_decode_tokens < batch or engine.stats().step_prefill_tokens:
        engine.step()
    windows = [run_window(engine, options, writes=writes) for writes in TURNS]
    for number in range(batch):
        engine.abort(f"short{number}")
    while engine.stats().running:
        engine.step()
    return [(windows[0], windows[1]), (windows[3], windows[2])]


def time_steps(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    """Measure a row for each batch."""
    engine = load_engine(options, folder)
    gc.collect()
    gc.freeze()
    rows = []
    for batch in options.batch:
        pairs_of(engine, options, batch, seed=0)  # warm-up
        pairs = []
        for seed in range(1, 1 + (options.pairs + 1) // 2):
            pairs += pairs_of(engine, options, batch, seed=1000 * batch * seed)
        without, writing = zip(*pairs, strict=True)
        seconds = sum(window.seconds for window in writing)
        rows.append(
            {
                "batch": batch,
                "pairs": len(pairs),
                "step_ms_without": quartiles([1000 * statistics.mean(w.steps) for w in without]),
                "step_ms_writing": quartiles([1000 * statistics.mean(w.steps) for w in writing]),
                "ratio_of_means": quartiles([on.seconds / off.seconds for off, on in pairs]),
                "ratio_of_cpu_seconds": quartiles(
                    [on.cpu_seconds / off.cpu_seconds for off, on in pairs]
                ),
                "step_ms_p99": [
                    round(1000 * percentile([s for w in windows for s in w.steps], 0.99), 3)
                    for windows in (without, writing)
                ],
                "writer_share_of_time": round(sum(w.writer_seconds for w in writing) / seconds, 4),
                "blocks_written": sum(window.written for window in writing),
                "writer_cpu_us_per_block": round(
                    1e6 * sum(w.writer_seconds for w in writing) / sum(w.written for w in writing)
                ),
            }
        )
    engine.close()
    return rows


def quartiles(values: list[float]) -> dict[str, float | list[float]]:
    low, middle, high = statistics.quantiles(values, n=4)
    return {"median": round(middle, 3), "quartiles": [round(low, 3), round(high, 3)]}
