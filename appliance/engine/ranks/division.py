"""Divides a model among ranks: shares of each layer, or runs of whole layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from appliance.engine.ranks.messages import Room
from appliance.engine.ranks.work import SharedLayers
from appliance.model.shard.shard import shard_source, undivided
from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from appliance.config import EngineConfig
    from appliance.engine.ranks.shared_step import SharedStep
    from appliance.engine.ranks.work import RankWork
    from appliance.kernels.cpu.cache import NativeCache
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

    def copies(self, slot: TensorSlot) -> float:
        """Return how often all ranks together hold a tensor."""
        ...

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        """Return what caches keys and values, each in all the model's cache layers."""
        ...

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """Return the memory of exchanges."""
        ...

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
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
        return f"{self.split.size} ranks {self.split}"

    def notes(self) -> tuple[str, ...]:
        heads = [shard.layers[at].heads for shard in self.parts for at in self._first_divided()]
        counts = ":".join(str(share.count) for share in heads if share is not None)
        words = f"{self.split.size} processes divide the model {self.split}"
        if counts:
            words += f", heads {counts}"
        if whole := undivided(self.parts):
            words += f"; each has all of {' and '.join(whole)}"
        return (words,)

    def copies(self, slot: TensorSlot) -> float:
        return sum(portion(shard, slot) for shard in self.parts)

    def cached(self, spec: DecoderSpec) -> tuple[DecoderSpec, ...]:
        return tuple(shard.spec for shard in self.parts)

    def room(self, config: EngineConfig, payload_bytes: int) -> Room:
        """A rank gives all rows of the largest step at once, or a row of its logits."""
        shard = self.parts[0]
        rows = config.max_num_batched_tokens * shard.whole.hidden_size
        return Room(max(rows, shard.widest_tokens), payload_bytes)

    def work(
        self, rank: int, own: NativeDecoder, group: NativeGroup, at: SharedStep
    ) -> RankWork[NativeCache]:
        return SharedLayers(own, group)

    def _first_divided(self) -> list[int]:
        layers = enumerate(self.parts[0].layers)
        return [at for at, share in layers if share.heads is not None][:1]


def portion(shard: Shard, slot: TensorSlot) -> float:
    """Return the part of a tensor that a rank holds, at most 1."""
    if slot.layer is None:
        own = shard.own_tokens
        is_cut = slot.role in (Role.EMBEDDING, Role.HEAD)
        return (own.stop - own.start) / shard.whole.vocab_size if is_cut else 1
    share, layer = shard.layers[slot.layer], shard.whole.layers[slot.layer]
    heads, mixer, mlp = share.heads, layer.mixer, layer.mlp
    if slot.role in (Role.DOWN, Role.GATE, Role.UP, Role.GATE_UP):
        if share.columns is None:
            return 1
        assert isinstance(mlp, MLPSpec | ExpertsSpec)
        return (share.columns[1] - share.columns[0]) / mlp.intermediate_size
    if heads is None or not isinstance(mixer, AttentionSpec):
        return 1
    if slot.role in (Role.QUERY, Role.QKV, Role.OUTPUT):
        return heads.count / mixer.num_heads
    return heads.num_kv / mixer.num_kv_heads if slot.role in (Role.KEY, Role.VALUE) else 1
