"""Runs decode steps as graphs, padded to captured sizes.

All memory that a graph reads and writes stays in place: tables at full width, logits, tokens.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from typing import TYPE_CHECKING, Generic

import torch

from appliance.engine.plan import Plan
from appliance.engine.run.batch import Geometry, Spare, stage
from appliance.engine.run.cuda_graphs import GraphCache, buckets
from appliance.engine.run.staging import StepShape
from appliance.model.executor import AnyCache

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.engine.run.device import Device
    from appliance.engine.run.sampler import Sampler
    from appliance.engine.run.staging import Staging, StepTensors
    from appliance.model.executor import Executor


class GraphedDecode(Generic[AnyCache]):
    """Runs decode steps on a device whose work can be captured.

    Args:
        cache: the KV cache, including the spare block.
        sampler: draws tokens inside the graph.
        staging: holds the inputs of a step.
        spare: where padding rows write.
        num_seqs: most rows of a decode step.
        table_width: blocks of the longest sequence.
        limit_bytes: bound on the memory of graphs; 0 turns them off.
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
        num_seqs: int,
        table_width: int,
        limit_bytes: int,
    ) -> None:
        self._executor = executor
        self._cache = cache
        self._sampler = sampler
        self._staging = staging
        self.spare = spare
        self.graphs = GraphCache(device, buckets(num_seqs), limit_bytes)
        where = device.torch_device
        self._tables = torch.full(
            (num_seqs, table_width), spare.block, dtype=torch.int32, device=where
        )
        self._logits = torch.empty(
            (num_seqs, executor.spec.vocab_size), dtype=torch.float32, device=where
        )
        self._drawn = torch.empty(num_seqs, dtype=torch.int64, device=where)
        self._geometry = Geometry((), (), (), cache.block_size)

    def padding(self, num_seqs: int) -> int:
        """Return the number of rows that pad a decode step to a captured size."""
        return self.graphs.bucket(num_seqs) - num_seqs

    def run(
        self, geometry: Geometry, shape: StepShape, tensors: StepTensors
    ) -> tuple[Tensor, Tensor]:
        """Return logits (num_seqs, vocab_size) float32 and drawn tokens (num_seqs,) int64."""
        self._geometry = geometry
        self._place_tables(shape, tensors)
        rows = shape.num_seqs
        self.graphs.run(rows, lambda: self._decode(rows))
        return self._logits[:rows], self._drawn[:rows]

    def capture(self, on_progress: Callable[[str, int, int], None]) -> None:
        """Capture the sizes from the smallest up, as long as graphs may take more memory."""
        sizes = self.graphs.sizes
        for done, num_seqs in enumerate(sizes):
            if not self.graphs.has_room:
                break
            on_progress("graphs", done, len(sizes))
            self._capture(num_seqs)
        on_progress("graphs", len(sizes), len(sizes))

    def _place_tables(self, shape: StepShape, tensors: StepTensors) -> None:
        self._tables[: shape.num_seqs, : shape.table_width].copy_(tensors.block_tables)

    def _decode(self, num_seqs: int) -> None:
        """Do what a graph captures: compute logits and tokens from inputs at fixed places."""
        is_sealed = self.spare.open_page is not None
        is_recurrent = self.spare.state_slot is not None
        shape = StepShape(num_seqs, num_seqs, num_seqs, 0, is_sealed, is_recurrent)
        tensors = self._staging.tensors(shape)
        token_ids = self._staging.token_ids(shape)
        batch = self._geometry.ragged(tensors, self._tables[:num_seqs])
        logits = self._executor.forward(token_ids, tensors.positions, batch, self._cache)
        # Out of the graphs' pool, so that they can all use the same memory in turn; and as the
        # model gave them, for reported log probabilities.
        self._logits[:num_seqs].copy_(logits)
        tokens = self._sampler.choose(logits, token_ids, tensors, self._staging.latest)
        self._drawn[:num_seqs].copy_(tokens)

    def _capture(self, num_seqs: int) -> None:
        """Capture a step of padding rows only: its eager run before the capture changes nothing."""
        geometry = Geometry.of(Plan(()), self._cache.block_size, self.spare, num_seqs)
        shape, _ = stage((), geometry, self._staging, self._sampler, {})
        self._place_tables(shape, self._staging.send(shape))
        # Launchers that size a grid by the host's numbers must leave room for any context.
        width = self._tables.shape[1]
        self._geometry = replace(
            geometry,
            context_lens=(width * self._cache.block_size,) * num_seqs,
            block_tables=[array("i", (self.spare.block,) * width)] * num_seqs,
        )
        self.graphs.capture(num_seqs, lambda: self._decode(num_seqs))
