"""The engine on a GPU, end to end without HTTP: synthetic weights in the shape of Llama-3-8B.

    scripts/bench_gpu_engine --work-dir /tmp/synthetic     # writes 22 GB there, and leaves them
    scripts/bench_gpu_engine --tiny --work-dir /tmp/tiny   # a trial on whatever device there is

For each pair of weights and KV cache: load, decode at several batch sizes, prefill, and how long
the GPU waits between two decode steps. Then the throughput of 64 requests under one memory budget
for all pairs, with the cache that each leaves room for. No text comes out of random weights.
"""

from __future__ import annotations

import argparse
import gc
import random
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conditions import ROOT, conditions, spread, write_result
from gpu_timing import Bench, device_facts
from synthetic_checkpoint import LLAMA_3_8B, TINY, write_checkpoint

from appliance import SamplingParams
from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.quant.scheme import WeightScheme

INT4 = WeightScheme(4, 128, symmetric=False)
INT8 = WeightScheme(8, 128)
WEIGHTS = {"int4": (INT4, INT8), "bf16": (None, None)}  # of layers and of the head
PAIRS = (
    ("int4", "bf16"),
    ("int4", "int8"),
    ("int4", "fp8"),
    ("int4", "int4-sealed"),
    ("int4", "int4-rotated"),
    ("bf16", "bf16"),
)
BATCHES = (1, 4, 16, 32, 64)
CARD_BYTES = int(0.9 * 24 * 2**30)  # what a server may take on a 24 GiB card


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much is measured."""

    batches: tuple[int, ...]
    prompt_tokens: int
    max_tokens: int
    prefill_tokens: tuple[int, ...]
    requests: int
    repeats: int


FULL = Sizes(BATCHES, 256, 128, (512, 2048, 8192), 64, 3)
SMALL = Sizes((1, 3), 20, 6, (40,), 4, 1)


def load(folder: Path, kv: str, kv_bytes: int | None = None) -> LLMEngine:
    config = EngineConfig(
        model=str(folder),
        kv_cache_dtype=kv,
        kv_cache_memory=kv_bytes,
        max_num_seqs=64,
        max_num_batched_tokens=2048,
        prefix_caching=False,
        kernels="torch" if not torch.cuda.is_available() else "auto",
    )
    return LLMEngine.load(
        config, eos_token_ids=(), metadata=None, on_progress=lambda stage, done, total: None
    )


def submit(engine: LLMEngine, count: int, prompt_tokens: int, max_tokens: int) -> None:
    sampling = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    for _ in range(count):
        ids = tuple(random.randrange(10, engine.info.vocab_size) for _ in range(prompt_tokens))
        name = f"{random.random()}"
        engine.submit(Request(request_id=name, prompt_token_ids=ids, sampling=sampling))


def drain(engine: LLMEngine) -> list[tuple[float, str]]:
    """Run until nothing is left; when each token came, and of which request.

    Raises:
        RuntimeError: a request ended with an error.
    """
    tokens = []
    while engine.has_work:
        report = engine.step()
        now = time.perf_counter()
        for delta in report.deltas:
            if delta.error is not None:
                raise RuntimeError(delta.error)
            tokens += [(now, delta.request_id)] * len(delta.token_ids)
    return tokens


def decode_rate(engine: LLMEngine, batch: int, sizes: Sizes) -> float:
    """Tokens per second of all, from when each has its first token."""
    submit(engine, batch, sizes.prompt_tokens, sizes.max_tokens)
    tokens = drain(engine)
    assert len(tokens) == batch * sizes.max_tokens, len(tokens)
    begun: dict[str, float] = {}
    for moment, name in tokens:
        begun.setdefault(name, moment)
    begin = max(begun.values())
    after = [moment for moment, _ in tokens if moment > begin]
    return len(after) / (after[-1] - begin)


def prefill_rate(engine: LLMEngine, prompt_tokens: int) -> float:
    """Prompt tokens per second until the first token is there."""
    submit(engine, 1, prompt_tokens, 1)
    begin = time.perf_counter()
    drain(engine)
    return prompt_tokens / (time.perf_counter() - begin)


def idle_share(engine: LLMEngine, batch: int, sizes: Sizes) -> float | None:
    """Share of time in which no kernel runs, over the middle of a decode run."""
    if not torch.cuda.is_available():
        return None
    submit(engine, batch, sizes.prompt_tokens, sizes.max_tokens)
    for _ in range(20):
        engine.step()
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        for _ in range(30):
            engine.step()
        torch.cuda.synchronize()
    drain(engine)
    spans = sorted(
        (event.time_range.start, event.time_range.end)
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
    )
    busy, end = 0.0, spans[0][0]
    for start, stop in spans:
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return round(1 - busy / (end - spans[0][0]), 4)


def throughput(engine: LLMEngine, sizes: Sizes) -> float:
    """Output tokens per second of many requests at once, prompts included in the time."""
    submit(engine, sizes.requests, 2 * sizes.prompt_tokens, 2 * sizes.max_tokens)
    begin = time.perf_counter()
    tokens = drain(engine)
    return len(tokens) / (time.perf_counter() - begin)


def measure(folder: Path, weights: str, kv: str, sizes: Sizes) -> dict[str, Any]:
    """One pair of precisions."""
    engine = load(folder, kv)
    row: dict[str, Any] = {
        "weights": weights,
        "kv": kv,
        "backend": engine.info.backend,
        "weight_format": engine.info.weight_format,
        "weight_bytes": engine.info.weight_bytes,
        "load_seconds": round(engine.info.load_seconds, 2),
    }
    decode_rate(engine, 1, sizes)
    row["decode"] = [
        {
            "batch": batch,
            "tokens_per_second": spread(
                [decode_rate(engine, batch, sizes) for _ in range(1 + sizes.repeats)][1:]
            ),
        }
        for batch in sizes.batches
    ]
    row["idle_share"] = {batch: idle_share(engine, batch, sizes) for batch in (1, 16)}
    row["prefill_tokens_per_second"] = {
        tokens: spread([prefill_rate(engine, tokens) for _ in range(1 + sizes.repeats)][1:])
        for tokens in sizes.prefill_tokens
    }
    if torch.cuda.is_available():
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
    return row


def release() -> None:
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="WEIGHTS/KV")
    parser.add_argument("--fresh", action="store_true", help="write the checkpoints again")
    parser.add_argument("--out", type=Path, default=None)
    options = parser.parse_args()
    config, sizes = (TINY, SMALL) if options.tiny else (LLAMA_3_8B, FULL)
    pairs = [tuple(pair.split("/")) for pair in options.pairs] or list(PAIRS)
    for weights in {weights for weights, _ in pairs}:
        folder = options.work_dir / weights
        if options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            write_checkpoint(folder, config, *WEIGHTS[weights])
    facts = device_facts(Bench.here(1))
    result: dict[str, Any] = {
        "benchmark": "gpu_engine",
        "conditions": conditions(),
        "gpu": facts,
        "model": "synthetic weights in the shape of "
        + ("nothing" if options.tiny else "Llama-3-8B"),
        "sizes": {name: getattr(sizes, name) for name in Sizes.__slots__},
        "card_bytes": CARD_BYTES,
        "rows": [],
    }
    device = str(facts.get("name", "cpu")).split()[-1].lower()
    out = options.out or ROOT / "benchmarks" / "results" / device / "engine.json"
    for weights, kv in pairs:
        row: dict[str, Any] = {"weights": weights, "kv": kv}
        try:
            row = measure(options.work_dir / weights, weights, kv, sizes)
            release()
            budget = None if options.tiny else CARD_BYTES - row["weight_bytes"]
            engine = load(options.work_dir / weights, kv, budget)
            throughput(engine, sizes)
            row["requests_within_the_card"] = {
                "kv_bytes": engine.info.kv_bytes,
                "tokens_per_second": round(throughput(engine, sizes), 1),
            }
            del engine
        except Exception as error:  # the other pairs still count
            row["failed"] = f"{type(error).__name__}: {error}"
        release()
        result["rows"].append(row)
        write_result(out, result, quiet=True)
    write_result(out, result)


if __name__ == "__main__":
    main()
