"""Runs steps as graphs, padded to captured sizes: decode steps, and small ones with prompts.

All memory that a graph reads and writes stays in place: full-width tables, logits, tokens.
"""

from __future__ import annotations

from array import array
from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

import torch

from appliance.engine.nouns.plan import Plan
from appliance.engine.run.batch import is_decode, shape_of, stage
from appliance.engine.run.cuda_graphs import PROMPTS, GraphCache, StepSize, step_sizes
from appliance.engine.run.geometry import Geometry, Spare, has_adapters
from appliance.model.decoder import Decoder
from appliance.model.executor import AnyCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.engine.nouns.limits import SchedulerLimits
    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import Sampler
    from appliance.engine.run.staging import Staging, StepShape, StepTensors
    from appliance.model.adapters.adapter import AdapterSlots
    from appliance.model.executor import Executor


class GraphedSteps(Generic[AnyCache]):
    """Runs steps on a device that can capture work.

    Args:
        spare: receives padding rows' writes.
        table_width: blocks of the longest sequence.
        limit_bytes: memory limit of graphs; 0 turns them off.
        adapters: the sequences' adapters, if they may have any.
    """

    def __init__(
        self,
        executor: Executor[AnyCache],
        cache: AnyCache,
        sampler: Sampler,
        device: Device,
        staging: Staging,
        *,
        spare: Spare,
        limits: SchedulerLimits,
        table_width: int,
        limit_bytes: int,
        adapters: AdapterSlots | None = None,
    ) -> None:
        self.executor = executor
        self._cache = cache
        self._device = device
        self._sampler = sampler
        self._staging = staging
        self.spare = spare
        self._adapters = adapters
        self._calls = executor.host_calls if isinstance(executor, Decoder) else None
        sizes = step_sizes(
            limits,
            is_adapted=adapters is not None,
            calls_host=self._calls is not None,
            is_recurrent=spare.state_slot is not None,
        )
        self.graphs = GraphCache(device, sizes, limit_bytes)
        where = device.torch_device
        num_seqs = max(size.num_singles + size.num_prompts(self._cut) for size in sizes)
        self._tables = torch.full(
            (num_seqs, table_width), spare.block, dtype=torch.int32, device=where
        )
        num_samples = max(size.num_samples for size in sizes)
        self._logits = torch.empty(
            (num_samples, executor.spec.vocab_size), dtype=torch.float32, device=where
        )
        self._drawn = torch.empty(num_samples, dtype=torch.int64, device=where)
        self._has_axes = executor.spec.has_axes
        self._geometry = self._of_padding(sizes[0])

    def _of_padding(self, size: StepSize) -> Geometry:
        block_size, has_axes = self._cache.block_size, self._has_axes
        return Geometry.of(Plan(()), block_size, self.spare, size, has_axes=has_axes)

    def size_of(self, plan: Plan) -> StepSize | None:
        """Return the captured size to which a plan is padded; None leaves it unpadded."""
        step = StepSize(plan.num_single_rows, is_adapted=has_adapters(plan))
        others = plan.scheduled[step.num_singles :]
        if others and others[-1].drafts:
            return self._verifying(plan, step)
        if not is_decode(plan):
            if len(others) > PROMPTS:
                return None
            # Without others, some single row does not sample, as if it were a prompt's.
            step = step._replace(prompt_rows=max(1, sum(entry.num_tokens for entry in others)))
        return self.graphs.size_of(step)

    def _verifying(self, plan: Plan, step: StepSize) -> StepSize | None:
        """Return the captured size for a step with drafts, if all its sequences decode.

        With a sealed cache each must stay in one block, of which it writes the open one.
        """
        size, entries = self._cache.block_size, plan.scheduled
        if not all(entry.samples for entry in entries):
            return None
        if self._cut and any(one.start // size < (one.end - 1) // size for one in entries):
            return None
        step = step._replace(
            num_singles=len(entries),
            draft_rows=sum([entry.num_tokens - 1 for entry in entries]),
            rows_each=max(entry.num_tokens for entry in entries),
        )
        return self.graphs.size_of(step)

    def run(
        self, size: StepSize, geometry: Geometry, shape: StepShape, tensors: StepTensors
    ) -> tuple[Tensor, Tensor]:
        """Return logits (num_samples, vocab_size) float32 and drawn tokens (num_samples,) int64."""
        self._geometry = geometry
        self._place_tables(shape, tensors)
        self.graphs.run(size, lambda: self._step(shape))
        return self._logits[: shape.num_samples], self._drawn[: shape.num_samples]

    def capture(self, on_progress: Callable[[str, int, int], None]) -> None:
        """Capture the sizes in order, while memory allows."""
        sizes = self.graphs.sizes
        for done, size in enumerate(sizes):
            if not self.graphs.has_room:
                break
            on_progress("graphs", done, len(sizes))
            self._capture(size)
        on_progress("graphs", len(sizes), len(sizes))

    @property
    def _cut(self) -> int | None:
        return None if self.spare.open_block is None else self._cache.block_size

    def _place_tables(self, shape: StepShape, tensors: StepTensors) -> None:
        self._tables[: shape.num_seqs, : shape.table_width].copy_(tensors.block_tables)

    def _step(self, shape: StepShape) -> None:
        """Compute logits and tokens from inputs at fixed places: the work that a graph captures."""
        tensors = self._staging.tensors(shape)
        token_ids = self._staging.token_ids(shape)
        batch = self._geometry.ragged(tensors, self._tables[: shape.num_seqs], self._adapters)
        rows = None if self._geometry.is_decode else tensors.sample_rows
        logits = self.executor.forward(token_ids, tensors.positions, batch, self._cache, rows)
        count = shape.num_samples
        # Out of the graphs' pool, so that all graphs can use the same memory in turn; and
        # unchanged, for reported log probabilities.
        self._logits[:count].copy_(logits)
        read = token_ids if rows is None else token_ids.index_select(0, rows)
        tokens = self._sampler.choose(logits, read, tensors, self._staging.latest)
        self._drawn[:count].copy_(tokens)

    def _capture(self, size: StepSize) -> None:
        """Capture a step of padding rows only: the eager run before the capture changes nothing."""
        geometry = self._of_padding(size)
        shape = shape_of((), geometry)
        stage((), geometry, self._staging, self._sampler, {})
        self._place_tables(shape, self._staging.send(shape))
        # Launchers that size a grid by host numbers must leave room for any context.
        width = self._tables.shape[1]
        self._geometry = replace(
            geometry,
            context_lens=(width * self._cache.block_size,) * shape.num_seqs,
            block_tables=[array("i", (self.spare.block,) * width)] * shape.num_seqs,
        )
        cut = nullcontext() if self._calls is None else self._calls.cut_by(self._device.cut)
        with cut:
            self.graphs.capture(size, lambda: self._step(shape))
