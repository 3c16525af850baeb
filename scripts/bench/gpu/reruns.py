"""Repeat kernels that merge partial results by arrival: the same operands must give the same bits.

Programs of one launch count in memory how many have finished, and the last one adds up. A race in
that changes the result only now and then, so the launch is repeated, and each result is compared
with the first on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from appliance.kernels.backend import triton_backend
from appliance.kernels.cache.kv_format import KVFormat
from bench.gpu.attention import BLOCK, LLAMA, TINY, Problem, filled_cache
from bench.gpu.kernel_checks import random_weight
from bench.gpu.plan import Amount

if TYPE_CHECKING:
    from torch import Tensor

    from bench.gpu.timing import Bench

TIMES = {Amount.TINY: 1, Amount.FIRST: 1000, Amount.FULL: 10000}
# rows, outputs, inputs: few outputs of many inputs, which are split the most
MATMULS = {Amount.TINY: ((1, 64, 512),), Amount.FIRST: ((1, 4096, 14336), (16, 4096, 4096))}
# batch, context
STEPS = {Amount.TINY: ((1, 140),), Amount.FIRST: ((1, 8192), (16, 2048))}
FORMATS = (KVFormat.BF16, KVFormat.INT8, KVFormat.INT4)


def all_reruns(bench: Bench, amount: Amount) -> Iterator[tuple[str, Callable[[], dict[str, Any]]]]:
    """Yield names, and functions that count unequal results."""
    size = Amount.TINY if amount is Amount.TINY else Amount.FIRST
    for rows, outputs, inputs in MATMULS[size]:
        name = f"rerun split-K {rows} x {outputs} x {inputs}"
        yield name, partial(_matmul, bench, TIMES[amount], rows, outputs, inputs)
    for batch, context in STEPS[size]:
        for form in FORMATS[:1] if amount is Amount.TINY else FORMATS:
            heads = TINY if amount is Amount.TINY else LLAMA
            problem = Problem(heads, form, batch, 1, context, bench.device, bench.dtype)
            name = f"rerun split-KV {form.value} {batch} x {context}"
            yield name, partial(_attention, bench, TIMES[amount], problem)


def unequal(call: Callable[[], Tensor], times: int) -> dict[str, Any]:
    """Count how many results differ from the first in any bit."""
    first = call()
    different = torch.zeros((), dtype=torch.int64, device=first.device)
    for _ in range(times):
        different += (call() != first).any()
    count = int(different)
    found: dict[str, Any] = {"reruns": times, "different": count}
    if count or not bool(first.isfinite().all()):
        found["failed"] = f"{count} of {times} results differ from the first, or it is not finite"
    return found


def _matmul(bench: Bench, times: int, rows: int, outputs: int, inputs: int) -> dict[str, Any]:
    weight = random_weight(bench.device, outputs, inputs, 4, 128)
    linear = triton_backend().prepare_linear(weight, None, bench.dtype)
    x = torch.randn((rows, inputs), device=bench.device).to(bench.dtype)
    return unequal(partial(linear, x), times)


def _attention(bench: Bench, times: int, problem: Problem) -> dict[str, Any]:
    backend, query = triton_backend(), problem.query()
    cache = filled_cache(backend, bench, problem, 1)
    work = backend.plan_attention(problem.ragged(0), BLOCK)
    scale = problem.heads.head_dim**-0.5
    return unequal(partial(backend.paged_attention, query, cache, work, scale=scale), times)
