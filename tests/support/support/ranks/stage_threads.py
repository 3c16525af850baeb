"""Stages as threads of one process, each with its layers of a model and its own cache."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of
from support.ranks.rank_threads import Memory

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.pipeline import PipelineWork
from appliance.engine.ranks.shared_step import RankStep, SharedStep
from appliance.kernels.cpu.arena import Mapping
from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.group import NativeGroup
from appliance.model.native_loader import load_native
from appliance.model.shard.stage import Stage

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.rows.ragged import RaggedBatch
    from appliance.model.native import NativeDecoder
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True)
class CountedGroup:
    """A group that counts exchanges."""

    native: NativeGroup
    exchanges: list[int]

    @property
    def slot(self) -> Any:
        return self.native.slot

    def exchange(self, status: int = 0) -> None:
        self.exchanges.append(status)
        self.native.exchange(status)


@dataclass
class StageThread:
    """An `Executor` of one stage.

    Attributes:
        runs: the exchanges before each micro-batch, and its rows.
    """

    decoder: NativeDecoder
    stage: Stage
    group: CountedGroup
    shared: SharedStep
    runs: list[tuple[int, int]]

    @property
    def spec(self) -> DecoderSpec:
        return self.stage.whole

    @property
    def dtype(self) -> Any:
        return self.decoder.dtype

    @property
    def device(self) -> torch.device:
        return self.decoder.device

    @property
    def allocate_cache(self) -> Callable[..., NativeCache]:
        return self.decoder.allocate_cache

    def step_into(self, token_ids: Tensor, *rest: Any, runs: bool, **places: Any) -> None:
        if runs:
            self.runs.append((len(self.group.exchanges), len(token_ids)))
        self.decoder.step_into(token_ids, *rest, runs=runs, **places)

    def forward(
        self,
        token_ids: Tensor,
        positions: Tensor,
        batch: RaggedBatch,
        cache: NativeCache,
        rows: Tensor | None = None,
    ) -> Tensor:
        return self.run(RankStep(token_ids, positions, batch, rows, wants_logits=True), cache)

    def logits_of(self, token_ids: Sequence[int], **settings: Any) -> Tensor:
        executor: Any = self
        return logits_of(executor, token_ids, **settings)

    def run(self, step: RankStep, cache: NativeCache) -> Tensor:
        """Run a step; results of stages after the first are meaningless."""
        group: Any = self.group
        work = PipelineWork(cast("NativeDecoder", self), self.stage, group, self.shared)
        answers = work.run(step, cache)
        return torch.zeros(0, self.spec.vocab_size) if answers is None else answers


class StageThreads:
    """A model's stages, whose steps run concurrently."""

    def __init__(self, source: ModelSource, bounds: tuple[int, ...], max_rows: int) -> None:
        size, spec = len(bounds) - 1, source.spec
        floats = max_rows * spec.hidden_size
        self._memory = Memory(size, floats)
        room = Room(floats, 4096, 4 * max_rows * max(spec.vocab_size, spec.hidden_size))
        self._mapping = Mapping.of(room.payload_bytes + room.answer_bytes)
        shared = SharedStep(self._mapping, 0, room)
        self.stages = []
        for rank in range(size):
            stage = Stage.of(spec, bounds, rank)
            engine = NativeEngine(LIBRARY, 1)
            group = NativeGroup(LIBRARY, self._memory.address, rank=rank, size=size, floats=floats)
            decoder = load_native(source, engine, torch.float32, part=stage)
            self.stages.append(StageThread(decoder, stage, CountedGroup(group, []), shared, []))

    def run(self, function: Callable[[StageThread], Any]) -> list[Any]:
        """Call a function with each stage at the same time; return what each returned."""
        with ThreadPoolExecutor(len(self.stages)) as pool:
            return list(pool.map(function, self.stages))

    def logits_of(self, token_ids: Sequence[int], **settings: Any) -> Tensor:
        """Return the first stage's logits; see `teacher_forcing.logits_of`."""
        logits: Tensor = self.run(lambda stage: stage.logits_of(token_ids, **settings))[0]
        return logits
