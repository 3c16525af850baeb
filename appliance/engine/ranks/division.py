"""Divides a model among ranks: shares of each layer, or runs of whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.work import SharedLayers
from appliance.model.shard.shard import shard_source, undivided
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.ranks.shared_step import SharedStep
    from appliance.engine.ranks.work import RankWork
    from appliance.kernels.cpu.group import NativeGroup
    from appliance.model.native import NativeDecoder
    from appliance.model.shard.shard import Part, Shard
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource
    from appliance.model.spec import DecoderSpec
    from appliance.model.tensors import TensorSlot


class Division(Protocol):
    """The parts of one model.

    Attributes:
        split: the ranks' shares.
        bounds: (size + 1,) of runs of whole layers; none where each layer is divided.
        state_copies: ranks that hold a recurrent state.
    """

    @property
    def split(self) -> Split: ...
    @property
    def bounds(self) -> tuple[int, ...]: ...
    @property
    def parts(self) -> tuple[Part, ...]: ...
    @property
    def state_copies(self) -> int: ...

    def in_words(self) -> str:
        """Name the ranks, for a title."""
        ...

    def notes(self) -> tuple[str, ...]:
        """Say how the model is divided, and what is not."""
        ...

    def copies(self, slot: TensorSlot) -> int:
        """Return how many ranks hold a tensor."""
        ...

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        """Return what caches keys and values, each in all the model's cache layers."""
        ...

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """Return the memory of exchanges."""
        ...

    def work(self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep) -> RankWork:
        """Return what a rank does with steps."""
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

    @property
    def state_copies(self) -> int:
        return self.split.size

    def in_words(self) -> str:
        return f"{self.split.size} ranks"

    def notes(self) -> tuple[str, ...]:
        heads = [shard.layers[at].heads for shard in self.parts for at in self._first_divided()]
        counts = ":".join(str(share.count) for share in heads if share is not None)
        words = f"{self.split.size} processes divide the model {self.split}"
        if counts:
            words += f", heads {counts}"
        if whole := undivided(self.parts):
            words += f"; each has all of {' and '.join(whole)}"
        return (words,)

    def copies(self, slot: TensorSlot) -> int:
        if slot.layer is None:
            return 1 if slot.role in (Role.EMBEDDING, Role.HEAD) else self.split.size
        share = self.parts[0].layers[slot.layer]
        if slot.role in (Role.DOWN, Role.GATE, Role.UP, Role.GATE_UP):
            return 1 if share.columns is not None else self.split.size
        if slot.role in (Role.QUERY, Role.QKV, Role.OUTPUT) and share.heads is not None:
            return 1
        if slot.role in (Role.KEY, Role.VALUE) and share.heads is not None:
            kept = {shard.layers[slot.layer].heads for shard in self.parts}
            groups = {heads.first_kv for heads in kept if heads is not None}
            return -(-self.split.size // len(groups))
        return self.split.size

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return tuple(shard.spec for shard in self.parts)

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """A rank gives all rows of the largest step at once, or a row of its logits."""
        shard = self.parts[0]
        rows = config.max_num_batched_tokens * shard.whole.hidden_size
        return Room(max(rows, shard.widest_tokens), payload_bytes)

    def work(self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep) -> RankWork:
        return SharedLayers(own, group)

    def _first_divided(self) -> list[int]:
        layers = enumerate(self.parts[0].layers)
        return [at for at, share in layers if share.heads is not None][:1]
