"""Builds a loaded model's runner: compiles kernels, measures steps, divides memory, allocates."""

from __future__ import annotations

import logging
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from appliance.engine.memory.plan import plan_memory
from appliance.engine.nouns.limits import SchedulerLimits
from appliance.engine.ranks.ranked_decoder import RankedDecoder
from appliance.engine.run.cuda_graphs import PROMPTS
from appliance.engine.run.geometry import Spare, fixed_bytes, largest_step
from appliance.engine.run.model_runner import ModelRunner
from appliance.engine.run.moves import (
    DeviceMoves,
    HostMoves,
    OwnCacheRows,
    StateRows,
    staging_bytes,
)
from appliance.engine.run.pinned_memory import PinnedMemory
from appliance.engine.run.prompt_reader import PromptReader
from appliance.engine.run.sampler import GrammarMasks, Sampler
from appliance.errors import MemoryPlanError

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from appliance.config import EngineConfig
    from appliance.engine.grammars.matchers import Matchers
    from appliance.engine.load.execution.execution import Execution
    from appliance.engine.load.memory_request import ModelMemory
    from appliance.engine.memory.plan import MemoryPlan, MemoryRequest
    from appliance.engine.nouns.moves import Rates
    from appliance.engine.ranks.ranked_adapters import RankedAdapterSlots
    from appliance.engine.run.adapters.loader import AdapterLoader
    from appliance.engine.run.device import Device
    from appliance.engine.run.encoded_pictures import EncodedPictures
    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.engine.run.measure import StepMemory
    from appliance.engine.run.moves import BlockMoves
    from appliance.engine.run.sampler import SampleTokens
    from appliance.kernels.cache.kv_format import LayerPrecision
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.executor import Executor
    from appliance.model.fallback.own_cache import OwnCaches


logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class RunnerParts:
    """A loaded model, its device and the limits of its steps."""

    execution: Execution
    executor: Executor[Any]
    device: Device
    limits: SchedulerLimits
    sample_tokens: SampleTokens
    num_open: int  # open blocks; 0 without sealed layers
    # Steps may be captured. Then the cache has one block, and one open block, more than planned,
    # for padding rows.
    with_graphs: bool
    ranked: RankedDecoder | None = None  # the executor, if it has several processes

    @classmethod
    def of(
        cls,
        config: EngineConfig,
        execution: Execution,
        executor: Executor[Any],
        device: Device,
        memory: ModelMemory,
        spare_rows: int = 0,
    ) -> RunnerParts:
        """Limit the steps of a model by settings and planned context.

        Args:
            device: this process's, which ranks of torch watch others by.
            spare_rows: see `SchedulerLimits`.
        """
        limits = SchedulerLimits(
            config.max_num_seqs,
            config.max_num_batched_tokens,
            memory.plan.context_length,
            verifies=config.speculate != "off",
            spare_rows=spare_rows,
        )
        most = max(limits.sample_rows, limits.max_num_seqs + PROMPTS)
        ranked = executor if isinstance(executor, RankedDecoder) else None
        if ranked is not None:
            device = ranked.link.watched(device)
        return cls(
            execution=execution,
            executor=executor,
            device=device,
            limits=limits,
            sample_tokens=execution.sample_tokens(executor.spec, most),
            num_open=memory.num_open,
            with_graphs=_may_capture(config, execution, device) and executor.is_enqueued,
            ranked=ranked,
        )

    @property
    def kv_layers(self) -> Sequence[LayerPrecision]:
        return self.execution.precision.kv_layers

    @property
    def moves_on_device(self) -> bool:
        """True if a kernel gathers blocks that move; several GPUs wait for each block instead."""
        return self.execution.uses_triton and self.ranked is None


def _may_capture(config: EngineConfig, execution: Execution, device: Device) -> bool:
    """Return True if steps can become graphs.

    On a GPU plain torch functions read numbers on the host, which a captured graph would freeze.
    """
    if config.cuda_graphs == "off" or not device.is_asynchronous:
        return False
    return execution.uses_triton or device.torch_device.type == "cpu"


@dataclass(frozen=True, slots=True)
class LoadedRunner:
    """A runner with its cache.

    Attributes:
        moves: moves blocks between the cache and host memory.
        states: moves rows of recurrent state; None if the model has none.
        plan: the memory plan by which the cache was allocated.
        moves_beside_steps: moves do not hold up steps.
    """

    runner: ModelRunner[Any]
    moves: BlockMoves
    states: StateRows | OwnCacheRows | None
    plan: MemoryPlan
    moves_beside_steps: bool


def load_runner(
    parts: RunnerParts,
    memory: ModelMemory,
    eos_token_ids: tuple[int, ...],
    rates: Rates,
    matchers: Matchers,
    adapters: AdapterLoader | None,
    kept: HiddenRows | None,
    encoded: EncodedPictures | None,
    on_progress: Callable[[str, int, int], None],
) -> LoadedRunner:
    """Measure the largest steps if the plan waits for it, allocate the cache, capture graphs.

    Args:
        kept: keeps hidden states for a draft head.
        encoded: gives steps the rows of pictures.

    Raises:
        MemoryPlanError: the measured model does not fit.
    """
    slots = None if adapters is None else adapters.slots
    if slots is not None and parts.execution.uses_triton:
        from appliance.engine.run.kernels_ahead import compile_adapters

        own: Any = slots  # of this process
        if parts.ranked is not None:
            own = cast("RankedAdapterSlots", slots).own
        compile_adapters(own, on_progress)
    plan, graph_bytes = memory.plan, 0
    if memory.is_measured:
        plan, graph_bytes = plan_measured(parts, memory.request, on_progress)
    runner, moves, states = make_runner(
        parts, plan, graph_bytes, eos_token_ids, rates, matchers, slots, kept, encoded
    )
    runner.capture(on_progress)
    return LoadedRunner(runner, moves, states, plan, parts.moves_on_device)


def plan_measured(
    parts: RunnerParts, request: MemoryRequest, on_progress: Callable[[str, int, int], None]
) -> tuple[MemoryPlan, int]:
    """Run the largest steps on an asynchronous device, and divide the rest of memory.

    Returns:
        The plan, and the memory limit of graphs in bytes.

    Raises:
        MemoryPlanError: the measured model does not fit.
    """
    from appliance.engine.run.kernels_ahead import compile_kernels
    from appliance.engine.run.measure import graph_allowance, measure_workspace
    from appliance.model.decoder import Decoder

    executor, device, limits, ranked = parts.executor, parts.device, parts.limits, parts.ranked
    own = executor if ranked is None else ranked.own
    weight_bytes = max(own.weight_bytes, device.begin_peak())

    def first_steps(executor: Executor[Any], kv_layers: Sequence[LayerPrecision]) -> StepMemory:
        return measure_workspace(
            executor,
            parts.sample_tokens,
            parts.execution.penalize,
            parts.execution.mask_tokens,
            parts.execution.score_tokens,
            device,
            limits,
            kv_layers=kv_layers,
            block_size=request.block_size,
        )

    with _refusals(limits):
        if parts.execution.uses_triton and isinstance(executor, Decoder):
            compile_kernels(executor, parts.kv_layers, first_steps, on_progress)
        taken = first_steps(executor, parts.kv_layers)
    logger.info("the largest step takes %.0f MiB at its peak", taken.largest / 2**20)
    graph_bytes = graph_allowance(request.budget_bytes, taken.captured) if parts.with_graphs else 0
    state_bytes = request.state_bytes
    largest = largest_step(
        limits,
        request.block_size,
        is_sealed=parts.num_open > 0,
        is_recurrent=state_bytes > 0,
    )
    block_bytes = request.kv_bytes_per_token * request.block_size
    open_bytes = request.open_bytes // parts.num_open if parts.num_open else 0
    workspace = (
        taken.largest
        + device.overhead()
        + fixed_bytes(largest, executor.spec.vocab_size)
        + graph_bytes
        + (staging_bytes(block_bytes, open_bytes) if parts.moves_on_device else 0)
        + (block_bytes + open_bytes + state_bytes if parts.with_graphs else 0)
    )
    request = replace(
        request,
        weight_bytes=weight_bytes,
        workspace_bytes=workspace,
        max_model_len=limits.context_length,
    )
    if ranked is None or device.torch_device.type == "cpu":
        return plan_memory(request), graph_bytes
    requests = _of_ranks(parts, ranked, request)
    return min(map(plan_memory, requests), key=lambda plan: plan.num_blocks), graph_bytes


def _of_ranks(
    parts: RunnerParts, ranked: RankedDecoder, request: MemoryRequest
) -> list[MemoryRequest]:
    """Return each GPU's request; all take the workspace that rank 0's has been seen to take."""
    from appliance.engine.load.execution.torch_execution import TorchExecution

    execution = parts.execution
    assert isinstance(execution, TorchExecution)
    specs = [part.spec for part in ranked.division.parts]
    held = [(request.weight_bytes, request.budget_bytes)]
    joined = zip(ranked.link.group.joined, ranked.started.facts[1:], strict=True)
    held += [(one.weight_bytes, facts.memory_bytes or 0) for one, facts in joined]
    return [
        replace(
            request,
            weight_bytes=weight_bytes,
            budget_bytes=budget_bytes,
            kv_bytes_per_token=execution.kv_bytes_of(spec),
            open_bytes=parts.num_open * execution.open_bytes_of(spec),
            state_bytes=spec.state_bytes,
        )
        for spec, (weight_bytes, budget_bytes) in zip(specs, held, strict=True)
    ]


def make_runner(
    parts: RunnerParts,
    plan: MemoryPlan,
    graph_bytes: int,
    eos_token_ids: tuple[int, ...],
    rates: Rates,
    matchers: Matchers,
    adapters: AdapterSlots | None = None,
    kept: HiddenRows | None = None,
    encoded: EncodedPictures | None = None,
) -> tuple[ModelRunner[Any], BlockMoves, StateRows | OwnCacheRows | None]:
    """Allocate the cache; build the runner and the movers of blocks and states."""
    num_open, memory = parts.num_open, plan.states
    num_states = memory.num_slots + memory.num_checkpoints
    cache = parts.executor.allocate_cache(
        parts.kv_layers,
        num_blocks=plan.num_blocks + parts.with_graphs,
        block_size=plan.block_size,
        num_open=num_open + 1 if num_open and parts.with_graphs else num_open,
        num_states=num_states + 1 if num_states and parts.with_graphs else num_states,
    )
    pinned: PinnedMemory | None = None
    if parts.device.is_asynchronous and parts.ranked is None:  # ranks give bytes to each other
        row_bytes = max(cache.block_bytes + cache.open_bytes, memory.row_bytes)
        pinned = PinnedMemory(parts.device, plan.kv_host_bytes, row_bytes)
    states: StateRows | OwnCacheRows | None = None
    if parts.executor.spec.own_cache is not None:
        states = OwnCacheRows(cast("OwnCaches", cache), memory.row_bytes)
    elif num_states and parts.ranked is not None:
        states = parts.ranked.link.state_rows(cache, parts.device, rates)
    elif num_states:
        states = StateRows(cache.states, parts.device, rates, pinned)
    moves: BlockMoves = HostMoves(cache, rates)
    if parts.moves_on_device:
        assert pinned is not None
        moves = _device_moves(cache, parts.device, rates, pinned)
    sampler = Sampler(
        eos_token_ids,
        parts.sample_tokens,
        parts.execution.penalize,
        parts.device,
        num_slots=parts.limits.max_num_seqs,
        vocab_size=parts.executor.spec.vocab_size,
        grammars=GrammarMasks(matchers, parts.execution.mask_tokens, parts.device),
    )
    runner = ModelRunner(
        parts.executor,
        cache,
        sampler,
        parts.device,
        parts.limits,
        moves,
        PromptReader(parts.executor, parts.execution.score_tokens, parts.device),
        spare=Spare(plan.num_blocks, num_open or None, num_states or None)
        if parts.with_graphs
        else None,
        is_sealed=num_open > 0,
        states=states,
        adapters=adapters,
        kept=kept,
        pictures=encoded,
        graph_bytes=graph_bytes,
    )
    return runner, moves, states


def _device_moves(cache: Any, device: Device, rates: Rates, pinned: PinnedMemory) -> BlockMoves:
    from appliance.kernels.block_copy.launch import BlockMover
    from appliance.kernels.cache.decoder_cache import split_sealed

    layers, opened = split_sealed(cache.layers)
    open_mover = BlockMover(opened) if opened else None
    return DeviceMoves(BlockMover(layers), device, rates, pinned, open_mover)


@contextmanager
def _refusals(limits: SchedulerLimits) -> Iterator[None]:
    import torch

    try:
        yield
    except torch.OutOfMemoryError as error:
        raise MemoryPlanError(
            f"this does not fit: beside the weights there is no memory for a step of"
            f" {limits.max_num_batched_tokens:,} rows and {limits.max_num_seqs} sequences; ask for"
            f" less with --max-num-batched-tokens, --max-num-seqs or --max-model-len ({error})"
        ) from error
