"""Measure the host's time for steps that no graph holds, launch by launch.

    scripts/benchmark eager_step  # about a minute
    scripts/benchmark eager_step --rows 1024 --profile

Kernels are compiled for a GPU and launched by Triton's own CUDA driver over a libcuda that does
nothing. Torch's operators run on the CPU over a model so small that they take little. That leaves
the host's work for a step of the decoder, in CPU microseconds of one thread; it leaves out the CUDA
driver's time for each launch.
"""

from __future__ import annotations

import cProfile
import ctypes
import gc
import pstats
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from support.kernels.stub_cuda import stub_gpu

from appliance.engine.devices import Precision
from appliance.engine.load.execution.torch_execution import TorchExecution
from appliance.kernels.backend import triton_backend
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.rows.ragged import RaggedBatch
from appliance.quant.formats.scheme import WeightScheme
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import TINY_LLAMA
from bench.lib.synthetic import Schemes, synthetic_model

LAYERS = 32
M_MMAP_THRESHOLD, M_TRIM_THRESHOLD = -3, -1  # of malloc.h
BLOCK = 32
CONFIG: dict[str, Any] = {
    **TINY_LLAMA,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 4096,
    "num_hidden_layers": LAYERS,
    "vocab_size": 64,
}
WEIGHTS = {
    "int4": Schemes(*(WeightScheme(4, 128, symmetric=True),) * 2),
    "int4 with offsets": Schemes(*(WeightScheme(4, 128, symmetric=False),) * 2),
}


def step_of(rows: int, weights: str) -> Callable[[], object]:
    """Return a step of a small decoder: one row for each of `rows` sequences, or one prompt."""
    cpu = torch.device("cpu")
    source = synthetic_model(Path(tempfile.gettempdir()), CONFIG, WEIGHTS[weights], cpu)
    layers = (LayerPrecision(KVFormat.BF16),) * LAYERS
    precision = Precision(cpu, torch.bfloat16, KVFormat.BF16, BLOCK, layers)
    decoder = TorchExecution(precision, triton_backend()).load(source, lambda *_: None, 4096)
    cache = decoder.allocate_cache(
        KVFormat.BF16, num_blocks=-(-rows // BLOCK) + 1, block_size=BLOCK
    )
    tokens = torch.zeros(rows, dtype=torch.int64)
    positions = torch.arange(rows)
    blocks = range(-(-rows // BLOCK))
    batch = RaggedBatch.of([rows], [rows], [tuple(blocks)], block_size=BLOCK, device=cpu)
    last = torch.tensor([rows - 1])
    return lambda: decoder.forward(tokens, positions, batch, cache, last)


def measure(rows: int, weights: str, capability: int, steps: int) -> dict[str, Any]:
    """Measure one row of the result."""
    with stub_gpu(capability) as launched:
        step = step_of(rows, weights)
        for _ in range(3):
            step()
        before = launched.count
        step()
        count = launched.count - before
        seconds = []
        for _ in range(steps):
            begin = time.thread_time()
            step()
            seconds.append(time.thread_time() - begin)
    median = statistics.median(seconds)
    return {
        "rows": rows,
        "weights": weights,
        "capability": capability,
        "launches": count,
        "ms": round(1000 * median, 3),
        "us_a_launch": round(1e6 * median / count, 2),
        "us_a_launch_least": round(1e6 * min(seconds) / count, 2),
    }


def profile(rows: int, weights: str, capability: int, steps: int) -> None:
    """Print where the time goes, function by function."""
    with stub_gpu(capability):
        step = step_of(rows, weights)
        for _ in range(3):
            step()
        profiler = cProfile.Profile()
        profiler.enable()
        for _ in range(steps):
            step()
        profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(45)


def keep_freed_memory() -> None:
    """Let the C library's allocator reuse memory, as torch's does on a GPU; it would return it."""
    for parameter in (M_MMAP_THRESHOLD, M_TRIM_THRESHOLD):
        assert ctypes.CDLL(None).mallopt(parameter, 1 << 30)


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 128, 512])
    parser.add_argument("--weights", nargs="+", choices=WEIGHTS, default=list(WEIGHTS))
    parser.add_argument("--capabilities", type=int, nargs="+", default=[89])
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--profile", action="store_true", help="print where the time goes instead")
    options = parser.parse_args()
    torch.set_num_threads(1)
    gc.disable()
    keep_freed_memory()
    cases = [
        (rows, weights, capability, options.steps)
        for weights in options.weights
        for capability in options.capabilities
        for rows in options.rows
    ]
    if options.profile:
        for case in cases:
            profile(*case)
        return
    result = {
        "benchmark": "eager_step",
        "conditions": conditions(),
        "steps": options.steps,
        "rows": [measure(*case) for case in cases],
    }
    write_result(options.out, result)
