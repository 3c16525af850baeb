"""The executor of a model in several processes, of which this one is rank 0."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from appliance.engine.ranks.messages import MakeSlots
from appliance.engine.ranks.ranked_adapters import RankedAdapterSlots
from appliance.engine.ranks.shared_step import RankStep
from appliance.kernels.arrays import dtype_name
from appliance.kernels.cache.kv_format import precisions
from appliance.model.shard.stage import Stage
from appliance.stats import RankInfo, RankLink

if TYPE_CHECKING:
    from collections.abc import Mapping as Targets
    from collections.abc import Sequence

    import torch
    from torch import Tensor

    from appliance.engine.ranks.division import Division, RankWork
    from appliance.engine.ranks.link import LinkTrial
    from appliance.engine.ranks.native_ranks import NativeRanks
    from appliance.engine.ranks.ranked_cache import RankedCache
    from appliance.engine.ranks.started import StartedRanks
    from appliance.engine.ranks.torch_ranks import TorchRanks
    from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.adapters.targets import AdapterTarget
    from appliance.model.decoder import Decoder
    from appliance.model.native import NativeDecoder
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class RankedDecoder:
    """A model of several ranks; see `Executor`.

    Attributes:
        spec: of the whole model.
        division: the parts of all ranks.
        threads: of each rank.
        own: rank 0's part.
        work: rank 0's part of the steps.
        link: to the other ranks.
        started: measurements from before they loaded.
    """

    spec: DecoderSpec
    division: Division
    threads: tuple[int, ...]
    own: NativeDecoder | Decoder
    work: RankWork[Any]
    link: NativeRanks | TorchRanks
    started: StartedRanks

    @property
    def dtype(self) -> Any:
        return self.own.dtype

    @property
    def device(self) -> torch.device:
        return self.own.device

    @property
    def is_enqueued(self) -> bool:
        return self.own.is_enqueued

    @property
    def weight_bytes(self) -> int:
        return sum(self._held)

    @property
    def _held(self) -> tuple[int, ...]:
        """Bytes of each rank's weights."""
        others = (joined.weight_bytes for joined in self.link.group.joined)
        return (self.own.weight_bytes, *others)

    @property
    def weight_format(self) -> str:
        return self.own.weight_format

    def ranks(self) -> tuple[RankInfo, ...]:
        """Describe the processes, this one first; call it once the cache is allocated."""
        group, parts, started = self.link.group, self.division.parts, self.started
        pids, links = (os.getpid(), *group.pids), (None, *started.links)
        return tuple(
            RankInfo(
                pid=pids[rank],
                share=self.division.split.shares[rank],
                threads=self.threads[rank],
                weight_bytes=self._held[rank],
                layers=part.layers if isinstance(part, Stage) else None,
                kv_bytes=group.kv_bytes[rank],
                bytes_per_second=started.rates[rank],
                reason="" if rank else started.why_whole,
                link=None if (trial := links[rank]) is None else _link(trial, started.reason),
            )
            for rank, part in enumerate(parts)
        )

    def notes(self) -> tuple[str, ...]:
        """Name weights that take more memory than in the file."""
        others = sum(joined.num_dense for joined in self.link.group.joined)
        if not (count := self.own.num_dense + others):
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
    ) -> NativeCache | RankedCache:
        """Allocate all ranks' parts of a cache; see `Executor.allocate_cache`."""
        own: Any = self.own  # of the link's kind
        return self.link.allocate(
            own,
            self.division.parts,
            precisions(format, len(self.spec.cache_layers)),
            num_blocks=num_blocks,
            block_size=block_size,
            num_open=num_open,
            num_states=num_states,
        )

    def adapter_slots(
        self, targets: Targets[str, AdapterTarget], count: int, most_ranks: int
    ) -> RankedAdapterSlots:
        """Make room for adapters in all ranks; see `Executor.adapter_slots`."""
        self.link.call(MakeSlots(count, most_ranks))
        return RankedAdapterSlots(self.own.adapter_slots(targets, count, most_ranks), self.link)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache | RankedCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step in all ranks; see `Executor.forward`."""
        return self._run(RankStep(token_ids, positions, batch, rows, wants_logits=True), cache)

    def hidden(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache | RankedCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        """Run one step in all ranks up to the head; see `Executor.hidden`."""
        return self._run(RankStep(token_ids, positions, batch, rows, wants_logits=False), cache)

    def logits(self, hidden: Tensor) -> Tensor:
        """Run the head in all ranks; see `Executor.logits`."""
        with self.link.head(hidden):
            logits = self.work.head(hidden)
        assert logits is not None
        return logits

    def _run(self, step: RankStep, cache: NativeCache | RankedCache) -> Tensor:
        with self.link.step(step):
            answers = self.work.run(replace(step, batch=_with_own_adapters(step.batch)), cache)
        assert answers is not None
        return answers


def _link(trial: LinkTrial, reason: str) -> RankLink:
    assert trial.speed is not None
    return RankLink(trial.path.value, trial.speed.seconds, trial.speed.bytes_per_second, reason)


def _with_own_adapters(batch: RaggedBatch) -> RaggedBatch:
    """Return the batch with the table of this rank's slots."""
    if batch.adapters is None:
        return batch
    assert isinstance(batch.adapters.table, RankedAdapterSlots)
    return replace(batch, adapters=replace(batch.adapters, table=batch.adapters.table.own))
