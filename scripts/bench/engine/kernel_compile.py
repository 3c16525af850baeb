"""Time the compilation of all kernels that a Llama-3-8B needs at its first start.

No GPU is needed: the first steps run as for a device of each compute capability, and the kernels
that they would launch are compiled, ptxas included. The model has two of its 32 equal layers;
weights have 4 bits in groups of 128, the head 8 bits.

    one_by_one  on one core: seconds, by kernel and by stage; CPU of this process and of ptxas
    threads     wall seconds on all cores of this machine
    on_disk     wall seconds when the disk holds all of them: the cost of every later start

`threads` and `on_disk` include the steps that find the kernels. `expected_s` is computed, not
measured: each core takes the next kernel as soon as it is free, for as long as that took alone.
The stage "ast" holds the interpreter's lock, so its seconds are a lower bound.
"""

from __future__ import annotations

import heapq
import os
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget

from appliance.engine.execution.execution import Precision
from appliance.engine.execution.torch_execution import TorchExecution
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.kernels_ahead import compile_kernels
from appliance.engine.run.measure import measure_workspace
from appliance.engine.scheduling.scheduler import SchedulerLimits
from appliance.kernels.backend import triton_backend
from appliance.kernels.compile_ahead import NoDevice
from appliance.kernels.kv_format import KVFormat, LayerPrecision
from appliance.kernels.kv_page.layout import PAGE_TOKENS
from appliance.model.decoder import Decoder
from appliance.model.source import open_model
from appliance.quant.formats.scheme import WeightScheme
from bench.lib.command import parser_of, write_result
from bench.lib.conditions import conditions
from bench.lib.model_shapes import LLAMA_3_8B, TINY_LLAMA
from bench.lib.synthetic import Schemes
from bench.lib.synthetic_checkpoint import write_checkpoint

LIMITS = SchedulerLimits(32, 512, 8192)  # the default, but for the length
CORES = (2, 4, 8, 16)
CPU = torch.device("cpu")


@contextmanager
def on_cores(cores: set[int]) -> Iterator[None]:
    """Run on these cores, with a thread for each."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    torch.set_num_threads(len(cores))
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def expected_seconds(kernels: Sequence[float], cores: int) -> float:
    """Compute when the last kernel is done if each free core takes the next."""
    free = [0.0] * cores
    for seconds in kernels:
        heapq.heappush(free, heapq.heappop(free) + seconds)
    return max(free)


class Stages:
    """Sums up compile times; a listener of `triton.knobs.compilation`."""

    def __init__(self) -> None:
        self.kernels: list[tuple[str, float]] = []  # name, seconds
        self.seconds: dict[str, float] = defaultdict(float)  # by stage

    def __call__(self, *, src: Any, times: Any, cache_hit: bool, **_: object) -> None:
        if cache_hit:
            return
        stages = [("ast", times.ir_initialization), *times.lowering_stages]
        for name, microseconds in stages:
            self.seconds[name] += microseconds / 1e6
        self.kernels.append((src.name, sum(taken for _, taken in stages) / 1e6))


def load(folder: Path) -> tuple[TorchExecution, Decoder]:
    execution = TorchExecution(Precision(CPU, torch.bfloat16, KVFormat.INT8, 32), triton_backend())
    source = open_model(folder)
    decoder = execution.load(source, lambda *progress: None, LIMITS.context_length)
    assert isinstance(decoder, Decoder)
    return execution, decoder


def measure(folder: Path, capability: int, kv_format: KVFormat) -> dict[str, Any]:
    """Measure one row of the result, in a process of its own."""
    triton.runtime.driver.set_active(NoDevice(GPUTarget("cuda", capability, 32)))
    execution, decoder = load(folder)
    sample_tokens = execution.sample_tokens(decoder.spec, LIMITS.sample_rows)

    def first_steps(few: Decoder, kv_layers: Sequence[LayerPrecision]) -> None:
        measure_workspace(
            few,
            sample_tokens,
            execution.penalize,
            execution.mask_tokens,
            execution.score_tokens,
            HostDevice(),
            LIMITS,
            kv_layers=kv_layers,
            block_size=PAGE_TOKENS,
        )

    kv_layers = [LayerPrecision(kv_format)] * len(decoder.layers)
    nothing: Any = lambda *progress: None  # noqa: E731
    run = partial(compile_kernels, decoder, kv_layers, first_steps, nothing)
    stages, others = Stages(), Stages()
    with tempfile.TemporaryDirectory() as alone, tempfile.TemporaryDirectory() as together:
        triton.knobs.cache.dir, triton.knobs.compilation.listener = alone, stages
        before = os.times()
        with on_cores({min(os.sched_getaffinity(0))}):
            run()
        after = os.times()
        triton.knobs.cache.dir, triton.knobs.compilation.listener = together, others
        cores = os.sched_getaffinity(0)
        wall = []
        for _ in range(2):
            begin = time.perf_counter()
            with on_cores(cores):
                run()
            wall.append(time.perf_counter() - begin)
    assert len(others.kernels) == len(stages.kernels)
    seconds = [taken for _, taken in stages.kernels]
    by_name: dict[str, float] = defaultdict(float)
    for name, taken in stages.kernels:
        by_name[name] += taken
    return {
        "capability": capability,
        "kv_format": kv_format.value,
        "kernels": len(seconds),
        "one_by_one": {
            "s": round(sum(seconds), 2),
            "longest_s": round(max(seconds), 2),
            "process_cpu_s": round(after.user + after.system - before.user - before.system, 2),
            "ptxas_cpu_s": round(
                after.children_user
                + after.children_system
                - before.children_user
                - before.children_system,
                2,
            ),
            "s_by_stage": {name: round(taken, 2) for name, taken in stages.seconds.items()},
            "by_name": {
                name: [count, round(by_name[name], 2)]
                for name, count in Counter(name for name, _ in stages.kernels).items()
            },
        },
        "threads": {"cores": len(cores), "s": round(wall[0], 2)},
        "on_disk": {"s": round(wall[1], 2)},
        "expected_s": {str(n): round(expected_seconds(seconds, n), 2) for n in CORES},
    }


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--capability", type=int, nargs="+", default=[86, 90])
    parser.add_argument("--kv", nargs="+", default=["int8", "bf16"])
    parser.add_argument("--tiny", action="store_true", help="a small model, to try this script")
    options = parser.parse_args()
    state = conditions()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary) / "model"
        config = {**(TINY_LLAMA if options.tiny else LLAMA_3_8B), "num_hidden_layers": 2}
        write_checkpoint(folder, config, Schemes(WeightScheme(4, 128), WeightScheme(8, 128)))
        for capability in options.capability:
            for name in options.kv:
                with ProcessPoolExecutor(1, get_context("spawn")) as process:
                    case = (folder, capability, KVFormat(name))
                    rows.append(process.submit(measure, *case).result())
    result = {
        "benchmark": "kernel_compile",
        "conditions": state,
        "limits": {"max_num_seqs": LIMITS.max_num_seqs, "rows": LIMITS.max_num_batched_tokens},
        "rows": rows,
    }
    write_result(options.out, result)
