"""From a loaded model to a runner on a device: measure, plan what is left, allocate."""

from __future__ import annotations

import logging
import subprocess
from contextlib import contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from appliance.engine.blocks.block_moves import DeviceMoves, HostMoves, staging_bytes
from appliance.engine.device.device_runner import DeviceRunner, fixed_bytes, largest_step
from appliance.engine.device.device_sampler import DeviceSampler
from appliance.engine.device.kernels_ahead import compile_kernels
from appliance.engine.device.measure import graph_allowance, measure_workspace
from appliance.engine.memory_plan import plan_memory
from appliance.errors import ConfigError, MemoryPlanError
from appliance.kernels.decoder_cache import split_sealed
from appliance.model.decoder import Decoder

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from appliance.engine.blocks.block_moves import BlockMoves
    from appliance.engine.device.device import Device
    from appliance.engine.device.measure import StepMemory
    from appliance.engine.execution import TorchExecution
    from appliance.engine.memory_plan import MemoryPlan, MemoryRequest
    from appliance.engine.rates import Rates
    from appliance.engine.scheduling.scheduler import SchedulerLimits
    from appliance.kernels.decoder_cache import KVCache
    from appliance.kernels.kv_cache import LayerPrecision
    from appliance.model.executor import Executor

logger = logging.getLogger(__name__)


def load_device_runner(
    execution: TorchExecution,
    executor: Executor[Any],
    device: Device,
    limits: SchedulerLimits,
    request: MemoryRequest,
    eos_token_ids: tuple[int, ...],
    rates: Rates,
    on_progress: Callable[[str, int, int], None],
    *,
    graphs: bool,
    num_open: int = 0,
) -> tuple[DeviceRunner[Any], MemoryPlan, BlockMoves]:
    """Measure the largest step, divide what the weights leave, and set the runner up.

    Args:
        execution: how the model is executed.
        executor: the model, loaded.
        device: where.
        limits: how large a step can be.
        request: what was planned with before anything was loaded.
        eos_token_ids: tokens that end an answer.
        rates: where the time of moved blocks is noted.
        on_progress: called with stage, done, total while kernels are compiled.
        graphs: whether decode steps may be captured.
        num_open: open pages; 0 if nothing is sealed.

    Raises:
        ConfigError: the kernels cannot be built on this machine.
        MemoryPlanError: it does not fit after all.
    """
    precision = execution.precision
    kv_layers = precision.kv_of(len(executor.spec.layers))
    sample_tokens = execution.sample_tokens(executor.spec, limits.max_num_seqs)
    weight_bytes = max(executor.weight_bytes, device.begin_peak())

    def first_steps(executor: Executor[Any], kv_layers: Sequence[LayerPrecision]) -> StepMemory:
        return measure_workspace(
            executor,
            sample_tokens,
            execution.penalize,
            device,
            limits,
            kv_layers=kv_layers,
            block_size=precision.block_size,
        )

    on_pages = execution.backend.name == "triton"
    with _refusals(limits):
        if on_pages:
            assert isinstance(executor, Decoder)
            compile_kernels(executor, kv_layers, first_steps, on_progress)
        steps = first_steps(executor, kv_layers)
    logger.info("the largest step takes %.0f MiB at its peak", steps.largest / 2**20)
    graph_bytes = graph_allowance(request.budget_bytes, steps.decode) if graphs else 0
    largest = largest_step(limits, request.block_size, is_sealed=num_open > 0)
    block_bytes = request.kv_bytes_per_token * request.block_size
    open_bytes = request.open_bytes // num_open if num_open else 0
    plan = plan_memory(
        replace(
            request,
            weight_bytes=weight_bytes,
            workspace_bytes=steps.largest
            + device.overhead()
            + fixed_bytes(largest, executor.spec.vocab_size)
            + graph_bytes
            + (staging_bytes(block_bytes, open_bytes) if on_pages else 0)
            + block_bytes
            + open_bytes,
            max_model_len=limits.context_length,
        )
    )
    # One block more than is planned with, and one open page: rows that only fill up a batch write
    # there.
    cache = executor.allocate_cache(
        kv_layers,
        num_blocks=plan.num_blocks + 1,
        block_size=plan.block_size,
        num_open=num_open + 1 if num_open else 0,
    )
    moves = _device_moves(cache, device, rates) if on_pages else HostMoves(cache, rates)
    sampler = DeviceSampler(
        eos_token_ids,
        sample_tokens,
        execution.penalize,
        device,
        num_slots=limits.max_num_seqs,
        vocab_size=executor.spec.vocab_size,
    )
    runner = DeviceRunner(
        executor,
        cache,
        sampler,
        device,
        limits,
        num_blocks=plan.num_blocks,
        graph_bytes=graph_bytes,
        num_open=num_open,
        moves=moves,
    )
    return runner, plan, moves


def _device_moves(cache: KVCache, device: Device, rates: Rates) -> BlockMoves:
    from appliance.kernels.block_copy.launch import BlockMover

    layers, opened = split_sealed(cache.layers)
    open_mover = BlockMover(opened) if opened else None
    return DeviceMoves(BlockMover(layers), device, rates, open_mover)


@contextmanager
def _refusals(limits: SchedulerLimits) -> Iterator[None]:
    """What the first steps on a device may run into, in words that say what to do."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"this does not fit: beside the weights there is no memory for a step of"
            f" {limits.max_num_batched_tokens:,} rows and {limits.max_num_seqs} sequences; ask for"
            f" less with --max-num-batched-tokens, --max-num-seqs or --max-model-len ({error})"
        ) from error
    except (RuntimeError, subprocess.CalledProcessError) as error:
        is_compiler = isinstance(error, subprocess.CalledProcessError) or "C compiler" in str(error)
        if not is_compiler:
            raise
        raise ConfigError(
            f"Triton cannot build what launches kernels on the GPU: {error}; install a C compiler"
            " and Python's header files (on Debian and Ubuntu gcc and python3-dev)"
        ) from error
