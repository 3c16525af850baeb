"""Divides a model among ranks, and starts the processes that hold the parts."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from appliance.engine.adapters.loader import wants_adapters
from appliance.engine.ranks.rank_group import RankGroup
from appliance.engine.ranks.ranked_decoder import RankedDecoder
from appliance.engine.ranks.shared_step import payload_bytes
from appliance.errors import ConfigError
from appliance.model.native_loader import load_native
from appliance.model.shard.shard import shard_source, undivided
from appliance.model.shard.split import Split
from appliance.model.tensors import Role

if TYPE_CHECKING:
    from collections.abc import Callable

    from appliance.config import EngineConfig
    from appliance.kernels.cpu.engine import NativeEngine
    from appliance.model.shard.shard import Shard
    from appliance.model.source import ModelSource
    from appliance.model.tensors import TensorSlot

# Resident memory of a process with Python and NumPy and no model, beside what it shares.
MEMBER_BYTES = 60 << 20
TORCH_BYTES = 200 << 20  # which a rank loads to read adapters
SMALLEST_BLOCK = 16  # token slots


@dataclass(frozen=True, slots=True)
class Ranks:
    """The ranks of one model; none but this process has been started.

    Attributes:
        config: the settings, which every rank reads.
        threads: of each rank.
        shards: what each rank has.
    """

    config: EngineConfig
    split: Split
    threads: tuple[int, ...]
    shards: tuple[Shard, ...]

    @classmethod
    def of(cls, config: EngineConfig, source: ModelSource, threads: int) -> Ranks | None:
        """Divide a model as the settings say; None if one process has all of it.

        Args:
            threads: of all ranks together, at least one each.

        Raises:
            ConfigError: these are no shares, or the model's heads do not divide by them.
        """
        if not config.is_divided:
            return None
        if config.tensor_parallel == 1:
            raise ConfigError(
                f"--gpu-split {config.gpu_split} divides the model among several processes;"
                " say how many with --tensor-parallel"
            )
        split = Split.parse(config.tensor_parallel, config.gpu_split)
        bounds = split.cut(max(threads, split.size))
        assert bounds is not None
        counts = tuple(last - first for first, last in pairwise(bounds))
        return cls(config, split, counts, shard_source(source, split))

    def copies(self, slot: TensorSlot) -> int:
        """Return how many ranks hold a tensor."""
        if slot.layer is None:
            return 1 if slot.role in (Role.EMBEDDING, Role.HEAD) else self.split.size
        share = self.shards[0].layers[slot.layer]
        if slot.role in (Role.DOWN, Role.GATE, Role.UP, Role.GATE_UP):
            return 1 if share.columns is not None else self.split.size
        if slot.role in (Role.QUERY, Role.QKV, Role.OUTPUT) and share.heads is not None:
            return 1
        if slot.role in (Role.KEY, Role.VALUE) and share.heads is not None:
            kept = {shard.layers[slot.layer].heads for shard in self.shards}
            groups = {heads.first_kv for heads in kept if heads is not None}
            return -(-self.split.size // len(groups))
        return self.split.size

    def process_bytes(self, source: ModelSource) -> int:
        """Return the memory of the other processes beside their parts, and of exchanges."""
        rows = self.config.max_num_batched_tokens
        exchange = 2 * self.split.size * 4 * self._floats(source)
        each = MEMBER_BYTES + (TORCH_BYTES if wants_adapters(self.config) else 0)
        return (self.split.size - 1) * each + exchange + 64 * rows

    def notes(self) -> tuple[str, ...]:
        """Say how the model is divided, and what is not."""
        heads = [shard.layers[at].heads for shard in self.shards for at in self._first_divided()]
        counts = ":".join(str(share.count) for share in heads if share is not None)
        words = f"{self.split.size} processes divide the model {self.split}"
        if counts:
            words += f", heads {counts}"
        if whole := undivided(self.shards):
            words += f"; each has all of {' and '.join(whole)}"
        return (words,)

    def load(
        self,
        source: ModelSource,
        engine: NativeEngine,
        dtype: Any,
        on_progress: Callable[[str, int, int], None],
        context_length: int,
    ) -> RankedDecoder:
        """Start the other ranks, and load all parts at the same time.

        Raises:
            EngineError: a rank could not be started, or could not load its part.
        """
        rows, width = self.config.max_num_batched_tokens, source.spec.hidden_size
        room = payload_bytes(rows, -(-context_length // SMALLEST_BLOCK), width)
        group = RankGroup(engine, self.split.size, self._floats(source), room)
        try:
            group.load(self.config, dtype, self.threads, context_length)
            own = load_native(
                source,
                engine,
                dtype,
                on_progress,
                context_length=context_length,
                shard=self.shards[0],
            )
            group.join()
        except BaseException:
            group.close()
            raise
        return RankedDecoder(source.spec, self.split, self.threads, own, group, self.shards)

    def _first_divided(self) -> list[int]:
        layers = enumerate(self.shards[0].layers)
        return [at for at, share in layers if share.heads is not None][:1]

    def _floats(self, source: ModelSource) -> int:
        """Return the numbers that a rank gives at once: all rows of the largest step."""
        widest = self.shards[0].widest_tokens
        return max(self.config.max_num_batched_tokens * source.spec.hidden_size, widest)
