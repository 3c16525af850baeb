"""Divides each layer of a model among ranks, and runs a rank's share of a step."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeVar

from appliance.engine.ranks.messages import Room
from appliance.model.recurrent_spec import ShortConvSpec
from appliance.model.shard.shard import portion, shard_source, undivided

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from appliance.config import EngineConfig
    from appliance.engine.ranks.shared_step import RankStep, SharedStep
    from appliance.kernels.cpu.cache import NativeCache
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.shard import Part, Shard
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot


Held = TypeVar("Held", contravariant=True)  # the cache of what executes the part


class Division(Protocol):
    """The parts of one model.

    Attributes:
        split: the ranks' shares.
        bounds: (size + 1,) of runs of whole layers; empty if each layer is divided.
    """

    @property
    def split(self) -> Split: ...
    @property
    def bounds(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...

    def in_words(self) -> str:
        """Name the ranks, for a title."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Describe the division, and name the undivided parts."""
        ...

    def copies(self, slot: TensorSlot) -> float:
        """Return the number of copies of a tensor over all ranks."""
        ...

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        """Return the specs whose caches and states together are the model's."""
        ...

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """Return the sizes of the shared memory."""
        ...

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
        """Return a rank's part of the steps."""
        ...


@dataclass(frozen=True, slots=True)
class DividedLayers:
    """Each rank has a share of every layer; see `Division`."""

    split: Split
    parts: tuple[Shard, ...]

    @classmethod
    def of(cls, source: ModelSource, split: Split) -> DividedLayers:
        """Divide a model.

        Raises:
            ConfigError: its heads do not divide by the shares.
        """
        return cls(split, shard_source(source, split))

    @property
    def bounds(self) -> tuple[int, ...]:
        return ()

    def in_words(self) -> str:
        return f"{self.split.size} ranks {self.split}"

    def notes(self) -> tuple[str, ...]:
        words = f"{self.split.size} processes divide the model {self.split}"
        first = self.parts[0]
        headed = [
            index
            for index, share in enumerate(first.shares)
            if share.heads is not None
            and not isinstance(first.whole.layers[index].mixer, ShortConvSpec)
        ]
        by_number = [i for i, share in enumerate(first.shares) if share.experts is not None]
        if headed:
            heads = (part.shares[headed[0]].heads for part in self.parts)
            words += f", heads {':'.join(str(own.count) for own in heads if own is not None)}"
        if by_number:
            experts = (part.shares[by_number[0]].experts for part in self.parts)
            words += f", experts {':'.join(str(len(own)) for own in experts if own is not None)}"
        if whole := undivided(self.parts):
            words += f"; each has all of {' and '.join(whole)}"
        return (words,)

    def copies(self, slot: TensorSlot) -> float:
        return sum(portion(shard, slot) for shard in self.parts)

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return tuple(shard.spec for shard in self.parts)

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """An exchange holds all rows of the largest step, or one row of logits."""
        shard = self.parts[0]
        rows = config.max_num_batched_tokens * shard.whole.hidden_size
        return Room(max(rows, shard.widest_tokens), payload_bytes)

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
        return SharedLayers(own, group)


class RankWork(Protocol[Held]):
    """One rank's part of each step."""

    def run(self, step: RankStep, cache: Held) -> Tensor | None:
        """Run its part; rank 0 returns the step's logits or hidden states."""
        ...

    def head(self, hidden: Tensor) -> Tensor | None:
        """Run its part of the head; rank 0 returns the logits."""
        ...


class SharedLayers:
    """A share of every layer, whose results the ranks sum; see `RankWork`.

    Between two steps rank 0 may run models that only it has.
    """

    def __init__(self, decoder: NativeDecoder, group: NativeGroup) -> None:
        self._decoder = decoder
        self._group = group

    def run(self, step: RankStep, cache: NativeCache) -> Tensor | None:
        run = self._decoder.forward if step.wants_logits else self._decoder.hidden
        with self._joined():
            return run(step.token_ids, step.positions, step.batch, cache, step.rows)

    def head(self, hidden: Tensor) -> Tensor | None:
        with self._joined():
            return self._decoder.logits(hidden)

    @contextlib.contextmanager
    def _joined(self) -> Iterator[None]:
        engine = self._decoder.engine
        engine.join(self._group.handle)
        try:
            yield
        finally:
            engine.join(None)
