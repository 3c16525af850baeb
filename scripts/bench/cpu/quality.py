"""What the CPU kernels cost in quality: their answers beside exact float32 ones, token by token.

    scripts/benchmark cpu_quality                    # the packaged default model
    scripts/benchmark cpu_quality --text prose.txt --kv-cache-dtype bf16 int8 int4
    scripts/benchmark cpu_quality --rows-per-step 1  # the kernels of decode, not of prefill

Both sides read the same packed weights. The base dequantizes them and computes in float32 with
torch and an FP32 KV cache; the candidate is what `--kernels auto` executes on this CPU. Both are
given the last part of a text in windows, each a sequence of its own, and compared at every place.
"""

from __future__ import annotations

import hashlib
import math
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.config import EngineConfig, cache_dir
from appliance.engine.execution import Precision, choose_execution
from appliance.hub import resolve_model
from appliance.kernels.backend import select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.teacher import BLOCK_SIZE, logits_of
from appliance.tokenizer import Tokenizer
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions, percentile

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.engine.execution import Execution
    from appliance.model.executor import Executor
    from appliance.model.source import ModelSource

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}
CPU = torch.device("cpu")
FORMATS = [format.value for format in KVFormat]
ROWS_AT_ONCE = 64  # of logits in float64: with a large vocabulary more would take gigabytes


@dataclass
class Comparison:
    """One candidate beside the base, over all windows so far."""

    klds: list[float] = field(default_factory=list)  # KL(base || candidate), nats, each place
    same_top: int = 0
    base_losses: list[float] = field(default_factory=list)  # -log p of the token that follows
    losses: list[float] = field(default_factory=list)
    seconds: float = 0.0  # in the candidate's forward passes

    def add(self, base: Tensor, candidate: Tensor, window: list[int]) -> None:
        """Compare logits (len(window), vocab_size) of one window."""
        targets = torch.tensor(window[1:])
        for start in range(0, len(window), ROWS_AT_ONCE):
            rows = slice(start, start + ROWS_AT_ONCE)
            exact = base[rows].double().log_softmax(dim=-1)
            ours = candidate[rows].double().log_softmax(dim=-1)
            self.klds += (exact.exp() * (exact - ours)).sum(dim=-1).tolist()
            self.same_top += int((exact.argmax(dim=-1) == ours.argmax(dim=-1)).sum())
            following = targets[rows].unsqueeze(1)  # the window's last row has none
            self.base_losses += (-exact[: len(following)].gather(1, following)).flatten().tolist()
            self.losses += (-ours[: len(following)].gather(1, following)).flatten().tolist()

    def summary(self) -> dict[str, float | int]:
        """Numbers over all places; KLD in nats."""
        if not all(map(math.isfinite, self.klds)):
            raise SystemExit("a candidate's logits hold NaN or infinity")
        return {
            "tokens": len(self.klds),
            "kld_mean": round(_mean(self.klds), 6),
            "kld_p99": round(percentile(self.klds, 0.99), 6),
            "kld_max": round(max(self.klds), 6),
            "same_top_1_percent": round(100 * self.same_top / len(self.klds), 2),
            "perplexity": round(math.exp(_mean(self.losses)), 4),
            "base_perplexity": round(math.exp(_mean(self.base_losses)), 4),
            "seconds": round(self.seconds, 1),
        }


def _mean(values: list[float]) -> float:
    return math.fsum(values) / len(values)


def read_text(path: Path | None) -> str:
    """A text, or the language reference that every Python carries."""
    if path is not None:
        return path.read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())


def cut_windows(tokenizer: Tokenizer, text: str, tokens: int, window: int) -> list[list[int]]:
    """The last `tokens` tokens of a text in whole windows, each with BOS if the model wants it."""
    prefix = tokenizer.encode("", add_special_tokens=True)
    ids = tokenizer.encode(text, add_special_tokens=False, allow_special=False)
    body = window - len(prefix)
    count = min(tokens // window, len(ids) // body)
    if count == 0:
        raise SystemExit(f"no whole window: {len(ids)} tokens of text, --tokens {tokens}")
    first = len(ids) - count * body
    return [prefix + ids[at : at + body] for at in range(first, len(ids), body)]


def run(decoder: Executor[Any], window: list[int], format: KVFormat, rows: int) -> Tensor:
    """Logits (len(window), vocab_size) float32; all that this file knows of executors."""
    chunks = [min(rows, len(window) - start) for start in range(0, len(window), rows)]
    return logits_of(decoder, window, chunks=chunks, format=format)


def choose(
    source: ModelSource, dtype: torch.dtype, formats: list[str], threads: int
) -> tuple[Execution, tuple[str, ...]]:
    """What `--kernels auto` executes on this CPU, and what a person should know about it."""
    format = KVFormat.INT4 if "int4" in formats else KVFormat(formats[0])  # INT4 may be refused
    return choose_execution(
        EngineConfig(kernels="auto"), Precision(CPU, dtype, format, BLOCK_SIZE), source, threads
    )


def compare(
    base: Executor[Any],
    candidate: Executor[Any],
    windows: list[list[int]],
    formats: list[str],
    rows: int,
) -> dict[str, Comparison]:
    """Run all windows through both, the candidate with each of the KV formats."""
    comparisons = {name: Comparison() for name in formats}
    for done, window in enumerate(windows):
        print(f"window {done + 1} of {len(windows)}", file=sys.stderr)
        exact = run(base, window, KVFormat.FP32, len(window))
        for name, comparison in comparisons.items():
            begin = time.perf_counter()
            logits = run(candidate, window, KVFormat(name), rows)
            comparison.seconds += time.perf_counter() - begin
            comparison.add(exact, logits, window)
    return comparisons


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--model", default="", help="default: the packaged model")
    parser.add_argument("--text", type=Path, help="held-out prose; default: Python's own topics")
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
    text = read_text(options.text)
    windows = cut_windows(Tokenizer.from_path(model.path), text, options.tokens, options.window)
    source = open_model(model.path)
    formats = options.kv_cache_dtype
    execution, notes = choose(source, DTYPES[options.dtype], formats, threads)
    base = load_decoder(source, select_backend(CPU, "reference"), CPU, torch.float32)
    candidate = execution.load(source, lambda *_: None, source.spec.context_length)
    rows = options.rows_per_step or options.window
    comparisons = compare(base, candidate, windows, formats, rows)
    result: dict[str, Any] = {
        "benchmark": "cpu_quality",
        "conditions": conditions(),
        "model": model.path.stem,
        "weights": candidate.weight_format,
        "backend": execution.name,
        "notes": notes,
        "dtype": options.dtype,
        "threads": threads,
        "text": "pydoc_data.topics" if options.text is None else options.text.name,
        "text_sha256": hashlib.sha256(text.encode()).hexdigest(),
        "windows": len(windows),
        "window": options.window,
        "rows_per_step": rows,
        "kv": {name: comparison.summary() for name, comparison in comparisons.items()},
    }
    write_result(options.out, result)
