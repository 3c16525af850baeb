"""Runs plans on a device that works by itself: a step is enqueued, its tokens are read one later.

Decode steps are padded to a few sizes and replayed as graphs; all others run eagerly. A sampled
token stays on the device, and the next step reads it there. Changes no sequence.
"""

from __future__ import annotations

import time
from array import array
from collections import deque
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Generic

import torch

from appliance.engine.blocks.block_moves import BlockMoves, HostMoves
from appliance.engine.blocks.open_pages import num_open_pages
from appliance.engine.device.cuda_graphs import BUSY_STEPS, GraphCache, buckets
from appliance.engine.device.device_batch import Geometry, Spare, fill, is_decode, shape_of
from appliance.engine.device.staging import Staging, StepShape
from appliance.engine.plan import Plan
from appliance.engine.rates import Rates
from appliance.model.executor import AnyCache

if TYPE_CHECKING:
    from collections.abc import Sequence as Sequences

    from numpy.typing import NDArray
    from torch import Tensor

    from appliance.engine.device.device import Device, Event
    from appliance.engine.device.device_sampler import DeviceSampler, SampledRows
    from appliance.engine.device.staging import StepTensors
    from appliance.engine.plan import ScheduledSequence
    from appliance.engine.sampler import Sampled
    from appliance.engine.scheduling.scheduler import SchedulerLimits
    from appliance.engine.sequence import Sequence
    from appliance.model.executor import Executor


def largest_step(limits: SchedulerLimits, block_size: int, *, is_sealed: bool) -> StepShape:
    """Sizes of the largest step; of its tables too, which hold all blocks of a context."""
    rows, num_seqs = limits.max_num_batched_tokens, limits.max_num_seqs
    width = -(-limits.context_length // block_size)
    # Entries are cut at blocks then, and each piece has an open page of its own.
    pieces = num_open_pages(num_seqs, rows, block_size) if is_sealed else num_seqs
    return StepShape(rows, pieces, num_seqs, width, is_sealed)


def fixed_bytes(largest: StepShape, vocab_size: int) -> int:
    """Bytes kept on the device beside the cache: inputs, tables, logits, counts of tokens."""
    tables = 4 * largest.num_samples * largest.table_width
    return largest.num_bytes + tables + largest.num_samples * (16 + 8 * vocab_size)


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step that was enqueued."""

    rows: SampledRows | None
    over: Event
    begin: float


class DeviceRunner(Generic[AnyCache]):
    """Owns the KV cache and enqueues steps on one device.

    Args:
        executor: the model.
        cache: the blocks that it reads and writes, and one behind them that rows which fill up a
            batch may write to.
        sampler: chooses tokens.
        device: does the work.
        limits: how large a step can be.
        num_blocks: blocks of the cache, that spare one not included.
        num_open: open pages, a spare one behind them not included; 0 if nothing is sealed.
        graph_bytes: bound on the memory of graphs; 0 turns them off.
        moves: takes blocks out of the cache and puts them back; None copies them at once.

    Attributes:
        depth: steps that may be in flight when the next one is launched.
        seconds: of the device for the last step, as far as the host can tell.
    """

    depth = 1

    def __init__(
        self,
        executor: Executor[AnyCache],
        cache: AnyCache,
        sampler: DeviceSampler,
        device: Device,
        limits: SchedulerLimits,
        *,
        num_blocks: int,
        graph_bytes: int,
        num_open: int = 0,
        moves: BlockMoves | None = None,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._sampler = sampler
        self._device = device
        self._spare = Spare(num_blocks, num_open or None)
        self._moves = moves or HostMoves(cache, Rates())
        self.graphs = GraphCache(device, buckets(limits.max_num_seqs), graph_bytes)
        largest = largest_step(limits, cache.block_size, is_sealed=num_open > 0)
        # The last token of a sequence never needs a slot.
        width = min(largest.table_width, num_blocks)
        num_seqs = limits.max_num_seqs
        self._staging = Staging(device, largest)
        self._num_latest = len(self._staging.latest)
        # What a graph reads and writes stays where it is: tables at full width, logits, tokens.
        self._tables = torch.full(
            (num_seqs, width), num_blocks, dtype=torch.int32, device=device.torch_device
        )
        self._logits = torch.empty(
            (num_seqs, executor.spec.vocab_size), dtype=torch.float32, device=device.torch_device
        )
        self._drawn = torch.empty(num_seqs, dtype=torch.int64, device=device.torch_device)
        self._geometry = Geometry((), (), (), cache.block_size)
        self._places: dict[Sequence, int] = {}  # of the last step's tokens in `latest`
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0
        self.seconds = 0.0

    @torch.inference_mode()
    def launch(self, plan: Plan) -> None:
        """Enqueue one step behind those in flight.

        Raises:
            MemoryError: the device has no memory for it; what is in flight is not harmed.
        """
        begin = time.perf_counter()
        busy = self.graphs.wanted(at_least=BUSY_STEPS)
        if busy is not None:
            self._capture(busy)
        try:
            rows = self._enqueue(plan)
        except torch.OutOfMemoryError as error:
            raise MemoryError(f"the device has no memory for this step: {error}") from error
        self._launched.append(_Launched(rows, self._device.record(), begin))

    def collect(self) -> list[Sampled]:
        """Wait for the oldest step in flight.

        Returns:
            One result per sampling sequence, in the plan's order.
        """
        launched = self._launched.popleft()
        launched.over.wait()
        now = time.perf_counter()
        self.seconds = now - max(launched.begin, self._last_end)
        self._last_end = now
        return [] if launched.rows is None else launched.rows.read()

    def discard(self) -> None:
        """Forget all steps in flight, once the device has done with them."""
        self._device.synchronize()
        self._launched.clear()
        self._places = {}

    @property
    def has_idle_work(self) -> bool:
        """Whether decode steps ran without a graph that there could be."""
        return self.graphs.wanted() is not None

    @torch.inference_mode()
    def idle(self) -> None:
        """Capture one graph that was missing."""
        wanted = self.graphs.wanted()
        if wanted is not None:
            self._capture(wanted)

    def _enqueue(self, plan: Plan) -> SampledRows | None:
        self._moves.save(plan.saves)
        self._moves.copy(plan.copies)
        self._moves.load(plan.loads)
        sampling = tuple([entry for entry in plan.scheduled if entry.samples])
        decode = is_decode(plan)
        num_seqs = self.graphs.bucket(len(sampling)) if decode else len(plan.scheduled)
        shape, settings = self._stage(plan, sampling, num_seqs - len(plan.scheduled))
        tensors = self._staging.send(shape)
        latest = self._staging.latest
        if decode:
            self._tables[:num_seqs, : shape.table_width].copy_(tensors.block_tables)
            self.graphs.run(num_seqs, lambda: self._decode(num_seqs))
            logits, read, drawn = self._logits[:num_seqs], None, self._drawn[:num_seqs]
        else:
            logits, read, drawn = *self._run_eagerly(shape, tensors), None
        self._places = {entry.sequence: place for place, entry in enumerate(sampling)}
        if not sampling:
            return None
        return self._sampler.launch(
            logits, sampling, settings, tensors, latest, read=read, drawn=drawn
        )

    def _stage(
        self, plan: Plan, sampling: Sequences[ScheduledSequence], padding: int
    ) -> tuple[StepShape, NDArray[Any]]:
        """Fill the inputs; returns their sizes, and how each row that samples does it."""
        self._geometry = Geometry.of(plan, self._cache.block_size, padding, self._spare)
        shape = shape_of(plan.scheduled, self._geometry)
        arrays = self._staging.arrays(shape)
        fill(arrays, plan.scheduled, self._geometry, self._places, self._num_latest)
        return shape, self._sampler.stage(sampling, arrays)

    def _run_eagerly(self, shape: StepShape, tensors: StepTensors) -> tuple[Tensor, Tensor]:
        """Logits, and the token that each of their rows has read."""
        token_ids = self._staging.tokens(shape).index_select(0, tensors.sources)
        batch = self._geometry.ragged(tensors, tensors.block_tables)
        logits = self._executor.forward(
            token_ids, tensors.positions, batch, self._cache, tensors.sample_rows
        )
        return logits, token_ids.index_select(0, tensors.sample_rows)

    def _decode(self, num_seqs: int) -> None:
        """What a graph is made of: from inputs where they always are to logits and tokens."""
        is_sealed = self._spare.open_page is not None
        shape = StepShape(num_seqs, num_seqs, num_seqs, 0, is_sealed)
        tensors = self._staging.tensors(shape)
        token_ids = self._staging.tokens(shape).index_select(0, tensors.sources)
        batch = self._geometry.ragged(tensors, self._tables[:num_seqs])
        logits = self._executor.forward(token_ids, tensors.positions, batch, self._cache)
        # Out of the graphs' pool, so that they can all use the same memory one after another; and
        # as the model gave them, for what is reported.
        self._logits[:num_seqs].copy_(logits)
        tokens = self._sampler.choose(logits, token_ids, tensors, self._staging.latest)
        self._drawn[:num_seqs].copy_(tokens)

    def _capture(self, num_seqs: int) -> None:
        """Capture with rows that only fill up: what runs before the capture harms nothing."""
        shape, _ = self._stage(Plan(()), (), num_seqs)
        tensors = self._staging.send(shape)
        self._tables[:num_seqs, : shape.table_width].copy_(tensors.block_tables)
        # Launchers that size a grid by the host's numbers must leave room for any context.
        width = self._tables.shape[1]
        self._geometry = replace(
            self._geometry,
            context_lens=(width * self._cache.block_size,) * num_seqs,
            block_tables=[array("i", (self._spare.block,) * width)] * num_seqs,
        )
        latest = self._staging.latest.clone()  # the next step may still have to read it
        self.graphs.capture(num_seqs, lambda: self._decode(num_seqs))
        self._staging.latest.copy_(latest)
