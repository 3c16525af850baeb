"""Runs plans on a device: enqueues a step and reads its tokens when the device has them.

On an asynchronous device a sampled token stays there for the next step and reaches the host one
step later; decode steps, and small ones with prompts, are padded to a few sizes and replayed as
graphs. Changes no sequence.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic

import numpy as np

from appliance.engine.nouns.plan import sampling_rows
from appliance.engine.run.batch import stage
from appliance.engine.run.geometry import Geometry, Spare, largest_step
from appliance.engine.run.prompt_reader import PromptReading
from appliance.engine.run.staging import Staging
from appliance.model.executor import AnyCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.engine.nouns.limits import SchedulerLimits
    from appliance.engine.nouns.moves import SavedBlock
    from appliance.engine.nouns.plan import Plan, Sampled
    from appliance.engine.nouns.sequence import Sequence
    from appliance.engine.run.cuda_graphs import GraphCache
    from appliance.engine.run.device import Device, Event
    from appliance.engine.run.encoded_pictures import EncodedPictures
    from appliance.engine.run.graphed_steps import GraphedSteps
    from appliance.engine.run.hidden_rows import HiddenRows
    from appliance.engine.run.moves import BlockMoves, OwnCacheRows, StateRows
    from appliance.engine.run.prompt_reader import PromptReader, ReadRows
    from appliance.engine.run.sampled_rows import SampledRows
    from appliance.engine.run.sampler import Sampler
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.executor import Executor


@dataclass(frozen=True, slots=True)
class _Launched:
    rows: SampledRows | None
    read: ReadRows | None
    over: Event
    begin: float


class ModelRunner(Generic[AnyCache]):
    """Owns the KV cache and runs steps on one device.

    Args:
        reader: scores and pools prompts.
        spare: receives the writes of rows that pad a step to a graph's size; None pads and captures
            none.
        states: the rows of recurrent state; None without recurrent layers.
        adapters: requests' adapters, if they may have any.
        kept: keeps the hidden states that a draft head reads; None without one.
        pictures: embeddings of pictures' rows; None if requests may have none.
        graph_bytes: memory limit of graphs.

    Attributes:
        depth: steps that may be in flight when the next one is launched.
        seconds: duration of the last step on the device, as seen by the host.
    """

    def __init__(
        self,
        executor: Executor[AnyCache],
        cache: AnyCache,
        sampler: Sampler,
        device: Device,
        limits: SchedulerLimits,
        moves: BlockMoves,
        reader: PromptReader,
        *,
        spare: Spare | None = None,
        is_sealed: bool = False,
        states: StateRows | OwnCacheRows | None = None,
        adapters: AdapterSlots | None = None,
        kept: HiddenRows | None = None,
        pictures: EncodedPictures | None = None,
        graph_bytes: int = 0,
    ) -> None:
        self.executor = executor
        self.cache = cache
        self._sampler = sampler
        self._device = device
        self._moves = moves
        self.reader = reader
        self._states = states
        self._adapters = adapters
        self._kept = kept
        self._pictures = pictures
        self._has_axes = executor.spec.has_axes
        largest = largest_step(
            limits,
            cache.block_size,
            is_sealed=is_sealed,
            is_recurrent=states is not None,
            is_padded=device.is_asynchronous,
            is_adapted=adapters is not None,
            has_axes=self._has_axes,
        )
        self._staging = Staging(device, largest)
        self.graphed: GraphedSteps[AnyCache] | None = None
        if spare is not None:
            from appliance.engine.run.graphed_steps import GraphedSteps

            self.graphed = GraphedSteps(
                executor,
                cache,
                sampler,
                device,
                self._staging,
                spare=spare,
                limits=limits,
                # The last token of a sequence never needs a slot.
                table_width=min(largest.table_width, spare.block),
                limit_bytes=graph_bytes,
                adapters=adapters,
            )
        self._places: dict[Sequence, int] = {}  # index of the last step's tokens in `latest`
        self._launched: deque[_Launched] = deque()
        self._last_end = 0.0
        self.depth = int(device.is_asynchronous)
        self.seconds = 0.0

    @property
    def graphs(self) -> GraphCache | None:
        return None if self.graphed is None else self.graphed.graphs

    def launch(self, plan: Plan) -> tuple[SavedBlock, ...]:
        """Enqueue one step after those in flight.

        Returns:
            The plan's saves, in its order.

        Raises:
            MemoryError: the device has too little memory; steps in flight are unharmed.
        """
        begin = time.perf_counter()
        with self._device.running():
            saved = self._moves.save(plan.saves)
            self._moves.copy(plan.copies)
            self._moves.load(plan.loads, saved)
            if self._states is not None and plan.states is not None:
                saved += self._states.save(plan.states.saves)
                self._states.load(plan.states.loads, saved)
                self._states.copy(plan.states.copies)
                self._states.forget(plan.states.ended)
            rows, read = self.enqueue(plan)
            if self._states is not None and plan.states is not None:
                self._states.copy(plan.states.checkpoints)
        self._launched.append(_Launched(rows, read, self._device.record(), begin))
        return saved

    def collect(self) -> list[Sampled]:
        """Wait for the oldest step in flight.

        Returns:
            One result per sequence that yields one, in plan order.
        """
        launched = self._launched.popleft()
        launched.over.wait()
        now = time.perf_counter()
        self.seconds = now - max(launched.begin, self._last_end)
        self._last_end = now
        sampled = [] if launched.rows is None else launched.rows.read()
        return sampled if launched.read is None else launched.read.join(sampled)

    def discard(self) -> None:
        """Forget all steps in flight, once the device has finished them."""
        self._device.synchronize()
        self._launched.clear()
        self._places = {}

    def capture(self, on_progress: Callable[[str, int, int], None]) -> None:
        """Capture the graphs of steps, before the first request."""
        if self.graphed is not None:
            with self._device.running():
                self.graphed.capture(on_progress)

    def enqueue(self, plan: Plan) -> tuple[SampledRows | None, ReadRows | None]:
        """Put a step's work into the device's queue; wait for none of it."""
        reading = PromptReading.of(plan)
        may_adapt = self._adapters is not None
        given = None if self._pictures is None else self._pictures.given(plan.scheduled)
        sees = None if self._pictures is None else self._pictures.sees(plan.scheduled)
        graphed = self.graphed if reading is None and given is None else None
        size = None if graphed is None else graphed.size_of(plan)
        spare = None if graphed is None else graphed.spare
        geometry = Geometry.of(
            plan,
            self.cache.block_size,
            spare,
            size,
            may_adapt=may_adapt,
            has_axes=self._has_axes,
            sees_pictures=sees is not None,
        )
        shape, settings = stage(
            plan.scheduled, geometry, self._staging, self._sampler, self._places
        )
        tensors = self._staging.send(shape)
        read = drawn = reads = None
        if graphed is None or size is None:
            token_ids = self._staging.token_ids(shape)
            rows = tensors.sample_rows
            batch = geometry.ragged(tensors, tensors.block_tables, self._adapters, given, sees)
            step = (token_ids, tensors.positions, batch, self.cache)
            if reading is None and self._kept is None:
                logits = self.executor.forward(*step, rows)
            else:
                wanted = rows
                if reading is not None:
                    wanted = self._device.send(np.array(reading.rows))
                if self._kept is None:
                    hidden = self.executor.hidden(*step, wanted)
                else:
                    hidden = self._kept.run(plan.scheduled, step, wanted)
                if reading is not None:
                    # First, so that the prompts' logits and the samples' never exist together.
                    reads = self.reader.launch(hidden, reading)
                logits = self.executor.logits(hidden[: len(rows)])
        else:
            logits, drawn = graphed.run(size, geometry, shape, tensors)
        if settings.has_penalties and (drawn is None or settings.adjusted or settings.obeying):
            read = self._staging.token_ids(shape).index_select(0, tensors.sample_rows)
        sampling = sampling_rows(plan.scheduled)
        self._places = {entry.sequence: place for place, entry in enumerate(sampling)}
        if not sampling:
            return None, reads
        latest = self._staging.latest
        sampled = self._sampler.launch(
            logits, sampling, settings, tensors, latest, read=read, drawn=drawn
        )
        return sampled, reads
