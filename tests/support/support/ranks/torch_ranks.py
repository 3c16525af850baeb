"""Ranks of the torch decoder as threads of one process, which meet through gloo."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import torch
from support.models.teacher_forcing import logits_of
from torch._C._distributed_c10d import HashStore

from appliance.kernels.backend import REFERENCE
from appliance.model.loader import load_decoder
from appliance.model.shard.joint import JoinedShard, Joint
from appliance.model.shard.shard import shard_source

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch import Tensor

    from appliance.model.decoder import Decoder
    from appliance.model.shard.split import Split
    from appliance.model.source import ModelSource

CPU = torch.device("cpu")


class TorchRankThreads:
    """A model's parts, whose steps run concurrently in float32."""

    def __init__(self, source: ModelSource, split: Split) -> None:
        self.shards = shard_source(source, split)
        store = HashStore()
        self.joints = [Joint(store, shard.rank, split.size, CPU) for shard in self.shards]
        with ThreadPoolExecutor(split.size) as pool:
            list(pool.map(Joint.connect, self.joints))
        parts = map(JoinedShard, self.shards, self.joints)
        self.decoders = [
            load_decoder(source, REFERENCE, CPU, torch.float32, part=part) for part in parts
        ]

    def run(self, function: Callable[[Decoder], Any]) -> list[Any]:
        """Call a function with each rank's decoder at the same time; return what each returned."""
        with ThreadPoolExecutor(len(self.decoders)) as pool:
            return list(pool.map(function, self.decoders))

    def logits_of(self, token_ids: Sequence[int], **settings: Any) -> Tensor:
        """Return rank 0's logits after each token; see `teacher_forcing.logits_of`."""
        logits: Tensor = self.run(lambda rank: logits_of(rank, token_ids, **settings))[0]
        return logits
