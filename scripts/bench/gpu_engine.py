"""The engine on a GPU, end to end without HTTP: synthetic weights in the shape of Llama-3-8B.

    scripts/bench_gpu_engine --work-dir /tmp/synthetic     # writes 22 GB there, and leaves them
    scripts/bench_gpu_engine --tiny --work-dir /tmp/tiny   # a trial on whatever device there is
    scripts/bench_gpu_engine --minutes 9 --resume ...      # as much as that time allows

For each pair of weights and KV cache: load, decode at several batch sizes, prefill, and how long
the GPU waits between two decode steps. Then the throughput of 64 requests under one memory budget
for all pairs, with the cache that each leaves room for. No text comes out of random weights. Each
pair has a process of its own; the result is written as it comes. Needed are torch, triton and
numpy, as for scripts/bench_kernels, and msgspec, psutil and safetensors.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import random
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from conditions import ROOT, conditions, spread, write_result
from gpu_supervisor import START_AGAIN, Message, Supervisor, name_of, tell, told
from gpu_timing import Bench, device_facts
from synthetic_checkpoint import LLAMA_3_8B, TINY, write_checkpoint

from appliance import SamplingParams
from appliance.config import EngineConfig
from appliance.engine.engine import LLMEngine
from appliance.engine.request import Request
from appliance.quant.formats.scheme import WeightScheme

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


SIZES = tuple(Sizes.__dataclass_fields__)
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
    if not spans:  # nobody may look on here
        return None
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


def measure(
    folder: Path, weights: str, kv: str, sizes: Sizes, found: Callable[[dict[str, Any]], None]
) -> None:
    """One pair of precisions.

    Args:
        folder: of the checkpoint.
        weights: precision of the weights.
        kv: of the cache.
        sizes: how much is measured.
        found: gets each part of the result.
    """
    engine = load(folder, kv)
    found(
        {
            "weights": weights,
            "kv": kv,
            "backend": engine.info.backend,
            "weight_format": engine.info.weight_format,
            "weight_bytes": engine.info.weight_bytes,
            "workspace_bytes": engine.info.workspace_bytes,
            "kv_bytes": engine.info.kv_bytes,
            "load_seconds": round(engine.info.load_seconds, 2),
        }
    )
    decode_rate(engine, 1, sizes)
    decode = []
    for batch in sizes.batches:
        rates = [decode_rate(engine, batch, sizes) for _ in range(1 + sizes.repeats)][1:]
        decode.append({"batch": batch, "tokens_per_second": spread(rates)})
        found({"decode": decode})
    found(
        {
            "prefill_tokens_per_second": {
                tokens: spread([prefill_rate(engine, tokens) for _ in range(1 + sizes.repeats)][1:])
                for tokens in sizes.prefill_tokens
            }
        }
    )
    if torch.cuda.is_available():
        free, total = torch.cuda.mem_get_info()
        found(
            {
                "peak_bytes": torch.cuda.max_memory_reserved(),
                "device_bytes_in_use": total - free,
                "idle_share": {batch: idle_share(engine, batch, sizes) for batch in (1, 16)},
            }
        )


def measure_within_the_card(folder: Path, kv: str, kv_bytes: int | None, sizes: Sizes) -> Any:
    """Throughput of many requests with the cache that a card has room for."""
    engine = load(folder, kv, kv_bytes)
    throughput(engine, sizes)
    return {
        "kv_bytes": engine.info.kv_bytes,
        "tokens_per_second": round(throughput(engine, sizes), 1),
    }


def work(options: argparse.Namespace) -> None:
    """What the supervised process does: one pair, in a process that nothing else was done in."""
    done = told()
    tell(facts=device_facts(Bench.here(1)))
    sizes = SMALL if options.tiny else FULL
    left = [pair for pair in pairs_of(options) if name_of(key_of(*pair)) not in done]
    for weights, kv in left[:1]:
        tell(begin=key_of(weights, kv))
        folder, row = options.work_dir / weights, key_of(weights, kv)

        def found(part: dict[str, Any], row: dict[str, Any] = row) -> None:
            row.update(part)
            print(json.dumps(part), file=sys.stderr, flush=True)
            tell(partial=row)

        try:
            measure(folder, weights, kv, sizes, found)
            gc.collect()  # the first engine with its graphs
            budget = None if options.tiny else CARD_BYTES - row["weight_bytes"]
            found({"requests_within_the_card": measure_within_the_card(folder, kv, budget, sizes)})
        except Exception as error:  # the other pairs still count
            row["failed"] = f"{type(error).__name__}: {error}"[:1000]
        tell(row=row)
    sys.exit(START_AGAIN if left[1:] else 0)


def key_of(weights: str, kv: str) -> dict[str, Any]:
    return {"weights": weights, "kv": kv}


def pairs_of(options: argparse.Namespace) -> list[tuple[str, str]]:
    chosen = [pair.split("/") for pair in options.pairs]
    return [(weights, kv) for weights, kv in chosen] or list(PAIRS)


def prepare_checkpoints(options: argparse.Namespace) -> None:
    """Write those that are not there; one that was cut off does not count."""
    config = TINY if options.tiny else LLAMA_3_8B
    for weights in dict.fromkeys(weights for weights, _ in pairs_of(options)):
        folder, part = options.work_dir / weights, options.work_dir / f"{weights}.part"
        if options.fresh:
            shutil.rmtree(folder, ignore_errors=True)
        if not folder.exists():
            shutil.rmtree(part, ignore_errors=True)
            write_checkpoint(part, config, *WEIGHTS[weights])
            part.rename(folder)


def run(options: argparse.Namespace) -> None:
    """Supervise one process after another, and write down what they say."""
    deadline = time.monotonic() + 60 * options.minutes
    prepare_checkpoints(options)
    name = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "cpu"
    out = options.out or ROOT / "benchmarks" / "results" / name.split()[-1].lower() / "engine.json"
    rows: dict[str, dict[str, Any]] = {}
    if options.resume and out.exists():
        for row in json.loads(out.read_text())["rows"]:
            if "failed" not in row and "partial" not in row:
                rows[name_of(key_of(row["weights"], row["kv"]))] = row
    result: dict[str, Any] = {
        "benchmark": "gpu_engine",
        "conditions": conditions(),
        "gpu": {},
        "model": "synthetic weights in the shape of "
        + ("nothing" if options.tiny else "Llama-3-8B"),
        "sizes": {field: getattr(SMALL if options.tiny else FULL, field) for field in SIZES},
        "card_bytes": CARD_BYTES,
        "stopped": "",  # why it is not complete
        "rows": [],
    }
    done = set(rows)

    def take(message: Message) -> None:
        result["gpu"] = message.get("facts", result["gpu"])
        if "partial" in message:
            row = {**message["partial"], "partial": True}
        elif "row" in message:
            row = message["row"]
        else:
            return
        name = name_of(key_of(row["weights"], row["kv"]))
        if "failed" in row:  # of a process that died there is what it said before
            row = {**rows.get(name, {}), **row}
        if "partial" not in message:
            row.pop("partial", None)
        rows[name] = row
        result["rows"] = list(rows.values())
        write_result(out, result, quiet=True)

    command = [sys.executable, *sys.argv, "--worker"]
    result["stopped"] = Supervisor(
        command, os.environ, take, done, options.patience, deadline
    ).run()
    write_result(out, result)
    sys.exit(bool(result["stopped"] or any("failed" in row for row in rows.values())))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--work-dir", type=Path, required=True, help="for the checkpoints")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--pairs", nargs="+", default=[], metavar="WEIGHTS/KV")
    parser.add_argument("--fresh", action="store_true", help="write the checkpoints again")
    parser.add_argument("--out", type=Path, default=None)
    parser.add_argument("--minutes", type=float, default=24 * 60, help="for everything")
    parser.add_argument("--patience", type=float, default=300, help="seconds for one measurement")
    parser.add_argument("--resume", action="store_true", help="keep what the result has already")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker:
        work(options)
    else:
        run(options)


if __name__ == "__main__":
    main()
