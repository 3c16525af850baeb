"""Time the CPU library's whole step: decode and prefill of several models.

    scripts/benchmark cpu_models  # SmolLM2-135M, Gemma-3-270M, Qwen2.5-0.5B's shape
    scripts/benchmark cpu_models --only qwen2.5-0.5b --threads 1

No HTTP and no sampling. `bandwidth_share` is what a step at batch 1 reads (every weight once, and
the keys and values) in bytes per second, over the copy bandwidth of the same run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from appliance.bench.bandwidth import probe
from appliance.bench.figures import spread
from appliance.config import cache_dir
from appliance.hub import resolve_model
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.library import load_library, select_isa
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.model.native_loader import load_native
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import QWEN_0_5B
from bench.lib.synthetic import Schemes, synthetic_model

if TYPE_CHECKING:
    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource

QWEN = "qwen2.5-0.5b"  # only its shape
MODELS = ("smollm2-135m", "gemma3-270m", QWEN)
BLOCK_SIZE = 16
CPU = torch.device("cpu")


def find(name: str) -> ModelSource:
    if name == QWEN:
        schemes = Schemes(WeightScheme(4, 64), embedding=WeightScheme(8, 32))
        return synthetic_model(Path(name), QWEN_0_5B, schemes, CPU)
    return open_model(Path(resolve_model(name, cache_dir=cache_dir()).path))


def decode_seconds(
    decoder: NativeDecoder, format: KVFormat, batch: int, context: int, steps: int
) -> list[float]:
    """Time steps of one token for each sequence, at a given context."""
    width = -(-context // BLOCK_SIZE)
    cache = decoder.allocate_cache(
        format, num_blocks=batch * width, block_size=BLOCK_SIZE, num_states=batch
    )
    tables = [range(i * width, (i + 1) * width) for i in range(batch)]
    ragged = RaggedBatch.of(
        [1] * batch,
        [context] * batch,
        tables,
        block_size=BLOCK_SIZE,
        device=CPU,
        state_slots=range(batch),
    )
    token_ids = torch.arange(100, 100 + batch)
    positions = torch.full((batch,), context - 1)
    rows = torch.arange(batch)

    def step() -> None:
        token_ids.add_(1)  # so that experts are chosen anew
        decoder.forward(token_ids, positions, ragged, cache, rows)

    return timed(step, steps)


def prefill_seconds(
    decoder: NativeDecoder, format: KVFormat, tokens: int, steps: int
) -> list[float]:
    """Time one prompt in one step."""
    table = range(-(-tokens // BLOCK_SIZE))
    cache = decoder.allocate_cache(
        format, num_blocks=len(table), block_size=BLOCK_SIZE, num_states=1
    )
    ragged = RaggedBatch.of(
        [tokens], [tokens], [table], block_size=BLOCK_SIZE, device=CPU, state_slots=[0]
    )
    token_ids = torch.arange(100, 100 + tokens)
    positions, rows = torch.arange(tokens), torch.tensor([tokens - 1])
    return timed(lambda: decoder.forward(token_ids, positions, ragged, cache, rows), steps)


def timed(run: Any, steps: int) -> list[float]:
    seconds = []
    for _ in range(steps + 2):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return seconds[2:]


def measure(name: str, options: argparse.Namespace) -> dict[str, Any]:
    library = load_library()
    isa = select_isa(library, options.isa)
    format = KVFormat(options.kv_cache_dtype)
    source = find(name)
    begin = time.perf_counter()
    decoder = load_native(source, NativeEngine(library, options.threads), torch.bfloat16)
    load_seconds = time.perf_counter() - begin
    kv_bytes = decoder.allocate_cache(format, num_blocks=1, block_size=BLOCK_SIZE).block_bytes
    step_bytes = decoder.weight_bytes + kv_bytes * options.context // BLOCK_SIZE
    (machine,) = probe([options.threads])
    bandwidth = machine["copy_gb_per_second"] * 1e9
    rows = []
    for batch in options.batch:
        seconds = decode_seconds(decoder, format, batch, options.context, options.steps)
        rows.append(
            {
                "batch": batch,
                "tokens_per_second": spread([batch / value for value in seconds]),
                "ms_per_step": spread([1000 * value for value in seconds], 3),
            }
        )
    single = rows[0]["tokens_per_second"]["median"] / options.batch[0]
    prefill = prefill_seconds(decoder, format, options.prefill_tokens, max(3, options.steps // 10))
    return {
        "model": name,
        "isa": isa.name.lower(),
        "weights": decoder.weight_format,
        "weight_bytes": decoder.weight_bytes,
        "load_seconds": round(load_seconds, 2),
        "decode": rows,
        "bytes_per_step_at_batch_1": step_bytes,
        "machine": machine,
        "bandwidth_share": round(single * step_bytes / bandwidth, 3),
        "prefill_tokens_per_second": spread([options.prefill_tokens / value for value in prefill]),
        "workspace_bytes": decoder.engine.workspace_bytes,
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--only", nargs="+", choices=MODELS, default=MODELS)
    parser.add_argument("--batch", type=int, nargs="+", default=[1, 4, 8, 16])
    parser.add_argument("--context", type=int, default=256)
    parser.add_argument("--prefill-tokens", type=int, default=512)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--isa", default="auto")
    parser.add_argument("--kv-cache-dtype", default="bf16")
    options = parser.parse_args()
    result = {
        "benchmark": "cpu_models",
        "conditions": conditions(),
        "threads": options.threads,
        "kv": options.kv_cache_dtype,
        "context": options.context,
        "prefill_tokens": options.prefill_tokens,
        "models": [measure(name, options) for name in options.only],
    }
    write_result(options.out, result)
