"""Ranks as threads of one process, each with its part of a model and its own cache."""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from support.models.native_models import LIBRARY
from support.models.teacher_forcing import logits_of

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.cpu.group import NativeGroup, group_bytes
from appliance.model.native_loader import load_native
from appliance.model.shard.shard import shard_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.model.native import NativeDecoder
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource


class Memory:
    """Zeroed memory that threads share."""

    def __init__(self, size: int, floats: int) -> None:
        self._bytes = ctypes.create_string_buffer(group_bytes(LIBRARY, size, floats) + 128)
        self.address = -(-ctypes.addressof(self._bytes) // 128) * 128


class RankThreads:
    """A model's parts, whose steps run concurrently."""

    def __init__(self, source: ModelSource, split: Split, max_rows: int) -> None:
        self.shards = shard_source(source, split)
        floats = max(max_rows * source.spec.hidden_size, self.shards[0].widest_tokens)
        self._memory = Memory(split.size, floats)
        self.decoders: list[NativeDecoder] = []
        self._groups = []
        for shard in self.shards:
            engine = NativeEngine(LIBRARY, 1)
            group = NativeGroup(
                LIBRARY, self._memory.address, rank=shard.rank, size=split.size, floats=floats
            )
            self.decoders.append(load_native(source, engine, torch.float32, part=shard))
            engine.join(group.handle)
            self._groups.append(group)

    def with_engine(self, rank: int, engine: NativeEngine) -> NativeDecoder:
        """Return a rank's decoder with another engine in its place."""
        engine.join(self._groups[rank].handle)
        return replace(self.decoders[rank], engine=engine)

    def run(self, function: Callable[[NativeDecoder], Any]) -> list[Any]:
        """Call a function with each rank's decoder at the same time; return what each returned."""
        with ThreadPoolExecutor(len(self.decoders)) as pool:
            return list(pool.map(function, self.decoders))

    def logits_of(self, token_ids: Sequence[int], **settings: Any) -> Tensor:
        """Return rank 0's logits after each token; see `teacher_forcing.logits_of`."""
        logits: Tensor = self.run(lambda rank: logits_of(rank, token_ids, **settings))[0]
        return logits
