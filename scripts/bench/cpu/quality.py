"""Measure the divergence of the CPU kernels' predictions from exact float32 ones.

    scripts/benchmark cpu_quality                    # the packaged default model
    scripts/benchmark cpu_quality --text prose.txt --kv-cache-dtype bf16 int8 int4
    scripts/benchmark cpu_quality --rows-per-step 1  # the kernels of decode, not of prefill

Both sides read the same packed weights. The base dequantizes them and computes in float32 with
torch and an FP32 KV cache; the candidate is what `--kernels auto` executes on this CPU. Both read
the same windows of a text that calibration leaves out, and are compared at every place.
"""

from __future__ import annotations

import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from support.models.teacher_forcing import BLOCK_SIZE, logits_of

from appliance.config import EngineConfig, cache_dir
from appliance.engine.devices import Precision
from appliance.engine.load.execution.choice import execution_for
from appliance.errors import ModelError
from appliance.hub import resolve_model
from appliance.kernels.backend import select_backend
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.quant.quality.measures import Divergence, Gap, Places, Prediction
from appliance.quant.text.held_out import HeldOutText
from appliance.tokenizer import Tokenizer
from bench.lib.closeness import figures_of
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.load.execution.execution import Execution
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource
    from appliance.quant.text.held_out import Windows

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU = torch.device("cpu")
FORMATS = [format.value for format in KVFormat]
ROWS_AT_ONCE = 64  # of logits: with a large vocabulary more would take gigabytes


@dataclass
class Measured:
    """A candidate beside the base over the windows so far, and seconds of its forward passes."""

    divergence: Divergence = field(default_factory=Divergence)
    seconds: float = 0.0

    def add(self, base: Tensor, candidate: Tensor, window: Tensor) -> None:
        """Compare logits (len(window), vocab_size) of one window (tokens,).

        Raises:
            ModelError: a logit is NaN or infinite.
        """
        if not torch.isfinite(candidate).all():
            raise ModelError("a candidate's logits hold NaN or infinity")
        parts = (x.split(ROWS_AT_ONCE) for x in (base[:-1], candidate[:-1], window[1:]))
        places: tuple[list[Places], list[Places]] = ([], [])
        klds = []
        for exact, ours, targets in zip(*parts, strict=True):
            expected, found = Prediction(targets), Prediction(targets)
            gap = Gap(expected, found)
            expected.add(exact.float(), 0)
            found.add(ours.float(), 0)
            gap.add()
            klds.append(gap.klds())
            places[0].append(expected.places())
            places[1].append(found.places())
        self.divergence.add(_joined(places[0]), _joined(places[1]), torch.cat(klds))


def _joined(parts: list[Places]) -> Places:
    probs = torch.cat([part.true_log_probs for part in parts])
    return Places(probs, torch.cat([part.top for part in parts]))


def run(decoder: Executor[Any], window: list[int], format: KVFormat, rows: int) -> Tensor:
    """Return logits (len(window), vocab_size) float32."""
    chunks = [min(rows, len(window) - start) for start in range(0, len(window), rows)]
    return logits_of(decoder, window, chunks=chunks, format=format)


def choose(
    source: ModelSource, dtype: torch.dtype, formats: list[str], threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """Return what `--kernels auto` executes on this CPU, and its notes for people."""
    format = KVFormat.INT4 if "int4" in formats else KVFormat(formats[0])  # INT4 may be refused
    layers = (LayerPrecision(format),) * len(source.spec.cache_layers)
    precision = Precision(CPU, dtype, format, BLOCK_SIZE, layers)
    return execution_for(EngineConfig(kernels="auto"), precision, source, threads)


def compare(
    base: Executor[Any],
    candidate: Executor[Any],
    windows: Windows,
    formats: list[str],
    rows: int,
) -> dict[str, Measured]:
    """Run all windows through both, the candidate with each of the KV formats."""
    found = {name: Measured() for name in formats}
    for done, window in enumerate(windows.tokens):
        print(f"window {done + 1} of {len(windows.tokens)}", file=sys.stderr)
        ids = window.tolist()
        exact = run(base, ids, KVFormat.FP32, len(ids))
        for name, measured in found.items():
            begin = time.perf_counter()
            logits = run(candidate, ids, KVFormat(name), rows)
            measured.seconds += time.perf_counter() - begin
            measured.add(exact, logits, window)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--text", type=Path, help="default: help topics, held out")
    parser.add_argument(
        "--kv-cache-dtype", nargs="+", choices=FORMATS, default=["bf16", "int8"], metavar="DTYPE"
    )
    parser.add_argument(
        "--dtype", choices=DTYPES, default="bfloat16", help="of what is not packed or fixed"
    )
    parser.add_argument("--tokens", type=int, default=4000)
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--rows-per-step", type=int, help="of the candidate; default: a window")
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads is not None:
        torch.set_num_threads(options.threads)
    threads = torch.get_num_threads()
    model = resolve_model(options.model, cache_dir=cache_dir())
    held_out = HeldOutText(options.text, options.tokens, options.window)
    windows = held_out.windows_of(Tokenizer.from_path(model.path))
    source = open_model(model.path)
    formats = options.kv_cache_dtype
    execution, notes = choose(source, DTYPES[options.dtype], formats, threads)
    base = load_decoder(source, select_backend(CPU, "reference"), CPU, torch.float32)
    candidate = execution.load(source, lambda *_: None, source.spec.context_length)
    rows = options.rows_per_step or options.window
    found = compare(base, candidate, windows, formats, rows)
    result: dict[str, Any] = {
        "benchmark": "cpu_quality",
        "conditions": conditions(),
        "model": model.path.stem,
        "weights": candidate.weight_format,
        "backend": execution.name,
        "notes": notes,
        "dtype": options.dtype,
        "threads": threads,
        "text": windows.source,
        "fingerprint": windows.fingerprint,
        "windows": len(windows.tokens),
        "window": options.window,
        "rows_per_step": rows,
        "kv": {
            name: {**figures_of(one.divergence), "seconds": round(one.seconds, 1)}
            for name, one in found.items()
        },
    }
    write_result(options.out, result)
