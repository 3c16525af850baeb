"""The executor of a model whose parts lie in several processes; this one is rank 0."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from appliance.engine.messages import RankInfo
from appliance.engine.ranks.ranked_adapters import RankedAdapterSlots
from appliance.engine.ranks.shared_step import RankStep
from appliance.kernels.arrays import dtype_name
from appliance.kernels.cpu.cache import layer_offsets
from appliance.kernels.kv_format import precisions
from appliance.model.executor import heads_of
from appliance.model.shard.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Mapping as Targets
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from appliance.engine.ranks.division import Division
    from appliance.engine.ranks.rank_group import RankGroup
    from appliance.engine.ranks.work import RankWork
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.ragged import RaggedBatch
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.native import NativeDecoder
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class RankedDecoder:
    """A model of several ranks; see `Executor`.

    Attributes:
        spec: of the whole model.
        division: the parts of all ranks.
        threads: of each rank.
        own: rank 0's part, and
        work: what it does with steps.
        group: the other ranks.
    """

    spec: DecoderSpec
    division: Division
    threads: tuple[int, ...]
    own: NativeDecoder
    work: RankWork
    group: RankGroup

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def is_enqueued(self) -> bool:
        return False

    @property
    def weight_bytes(self) -> int:
        return self.own.weight_bytes + sum(self.group.weight_bytes)

    @property
    def weight_format(self) -> str:
        return self.own.weight_format

    def ranks(self) -> tuple[RankInfo, ...]:
        """Describe the processes, this one first."""
        pids = (os.getpid(), *self.group.pids)
        held = (self.own.weight_bytes, *self.group.weight_bytes)
        layers = [part.layers if isinstance(part, Stage) else None for part in self.division.parts]
        each = zip(pids, self.division.split.shares, self.threads, held, layers, strict=True)
        return tuple(RankInfo(*facts) for facts in each)

    def notes(self) -> tuple[str, ...]:
        """Say which weights take more memory than in the file."""
        if not (count := self.own.num_dense + self.group.num_dense):
            return ()
        kind = dtype_name(self.dtype)
        return (
            f"{count} weights are {kind} in memory: the split cuts through groups of inputs that"
            " share scales, or through an order of their own",
        )

    def allocate_cache(
        self,
        format: KVFormat | Sequence[LayerPrecision],
        *,
        num_blocks: int,
        block_size: int,
        num_open: int = 0,
        num_states: int = 0,
    ) -> NativeCache:
        """Allocate a cache of all ranks' parts, a block's one after another.

        So rank 0 alone saves, loads and copies blocks and states, between steps.
        """
        layers = precisions(format, len(self.spec.cache_layers))
        library = self.own.engine.library
        sizes = [
            (
                *layer_offsets(library, layers[part.cache_layers], heads_of(part.spec), block_size)[
                    -1
                ],
                part.spec.state_bytes,
            )
            for part in self.division.parts
        ]
        *offsets, strides = accumulate(sizes, _add, initial=(0, 0, 0))
        counts = (num_blocks, num_open, num_states)
        places = self.group.allocate(layers, strides, offsets, counts, block_size)
        return self.own.allocate_cache(
            layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
            places=places,
        )

    def adapter_slots(
        self, targets: Targets[str, AdapterTarget], count: int, most_ranks: int | None = None
    ) -> RankedAdapterSlots:
        """Make room for adapters in all ranks."""
        self.group.make_slots(count)
        return RankedAdapterSlots(self.own.adapter_slots(targets, count), self.group)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step in all ranks; see `Executor.forward`."""
        return self._run(RankStep(token_ids, positions, batch, rows, wants_logits=True), cache)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step in all ranks up to the head; see `Executor.hidden`."""
        return self._run(RankStep(token_ids, positions, batch, rows, wants_logits=False), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head in all ranks; see `Executor.logits`."""
        with self.group.head(hidden):
            logits = self.work.head(hidden)
        assert logits is not None
        return logits

    def _run(self, step: RankStep, cache: NativeCache) -> Tensor:
        with self.group.step(step):
            answers = self.work.run(replace(step, batch=_with_own_adapters(step.batch)), cache)
        assert answers is not None
        return answers


def _add(one: tuple[int, int, int], two: tuple[int, int, int]) -> tuple[int, int, int]:
    return one[0] + two[0], one[1] + two[1], one[2] + two[2]


def _with_own_adapters(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with the table of this rank's slots."""
    if batch.adapters is None:
        return batch
    assert isinstance(batch.adapters.table, RankedAdapterSlots)
    return replace(batch, adapters=replace(batch.adapters, table=batch.adapters.table.own))
