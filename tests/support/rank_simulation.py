"""Ranks under a virtual clock: each reads its part's matrices, and sends messages over its link.

What a rank has is read off its own `DecoderSpec`, matrix by matrix; what the planner adds up in
closed form, this plays: launches, uneven reads, messages that wait for each other, a cache that
grows.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from appliance.engine.links.link import LinkSpeed
    from appliance.engine.rank_split.pipeline import RankFacts
    from appliance.model.shard.shard import Shard
    from appliance.model.spec import DecoderSpec, LayerSpec

LAUNCH_SECONDS = 5e-7  # of a kernel in a graph
UNEVEN = 0.04  # most by which a read takes more or less
STEP_BYTES = 200  # of a step's description


class RankSimulation:
    """One stream on several ranks.

    Args:
        weight_bytes: of a weight.
        kv_bytes: of a number in the cache.
        given: bytes of a number in an exchange.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        ranks: Sequence[RankFacts],
        link: LinkSpeed,
        *,
        weight_bytes: float,
        kv_bytes: float,
        given: int,
    ) -> None:
        self.shards, self.ranks, self.link = shards, ranks, link
        self.weight_bytes, self.kv_bytes, self.given = weight_bytes, kv_bytes, given
        self.noise = random.Random(7)
        self.now = [0.0] * len(ranks)  # of each rank's clock
        self.way_out = [0.0] * len(ranks)  # when what a rank sends is free again
        self.messages = 0

    def seconds_of_token(self, first: int, count: int) -> float:
        """Run so many tokens, the first one behind so many others; return the mean of a token."""
        begin = self.now[0]
        for length in range(first, first + count):
            self.step(length)
        return (self.now[0] - begin) / count

    def step(self, length: int) -> None:
        spec = self.shards[0].whole
        others = range(1, len(self.ranks))
        arrivals = {rank: self.send(0, STEP_BYTES) for rank in others}
        for rank in others:
            self.now[rank] = max(self.now[rank], arrivals[rank])
        row = spec.hidden_size * self.given
        self.exchange(row)  # of the embedding
        for index in range(len(spec.layers)):
            for mixes in (True, False):
                for rank, shard in enumerate(self.shards):
                    for num_bytes in self.reads(shard, index, length, mixes=mixes):
                        self.read(rank, num_bytes)
                share = self.shards[0].layers[index]
                if share.heads is not None if mixes else share.has_part_of_mlp:
                    self.exchange(row)
        for rank, shard in enumerate(self.shards):
            rows = shard.own_tokens.stop - shard.own_tokens.start
            self.read(rank, rows * spec.hidden_size * self.weight_bytes)
        arrived = [self.send(rank, 4 * self.shards[0].widest_tokens) for rank in others]
        self.now[0] = max([self.now[0], *arrived])

    def reads(self, shard: Shard, index: int, length: int, *, mixes: bool) -> Iterator[float]:
        spec, layer = shard.spec, shard.spec.layers[index]
        matrices = _mixer(spec, layer) if mixes else _mlp(spec, layer)
        for count in matrices:
            yield count * self.weight_bytes
        if mixes and isinstance(layer.mixer, AttentionSpec):
            yield 2 * layer.mixer.num_kv_heads * layer.mixer.head_dim * length * self.kv_bytes

    def read(self, rank: int, num_bytes: float) -> None:
        factor = 1 + UNEVEN * self.noise.uniform(-1, 1)
        seconds = factor * num_bytes / self.ranks[rank].bytes_per_second
        self.now[rank] += LAUNCH_SECONDS + seconds

    def exchange(self, num_bytes: float) -> None:
        """Let all ranks send to all others, and wait for what they send."""
        size = len(self.ranks)
        arrived = list(self.now)
        for step in range(1, size):
            for rank in range(size):
                to = (rank + step) % size
                arrived[to] = max(arrived[to], self.send(rank, num_bytes))
        self.now = arrived

    def send(self, rank: int, num_bytes: float) -> float:
        """Put a message on a rank's way out; return when it arrives."""
        self.messages += 1
        leaves = max(self.now[rank], self.way_out[rank])
        self.way_out[rank] = leaves + num_bytes / self.link.bytes_per_second
        return self.way_out[rank] + self.link.seconds


def _mixer(spec: DecoderSpec, layer: LayerSpec) -> Iterator[int]:
    mixer = layer.mixer
    assert isinstance(mixer, AttentionSpec)
    for heads in (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads, mixer.num_heads):
        yield heads * mixer.head_dim * spec.hidden_size


def _mlp(spec: DecoderSpec, layer: LayerSpec) -> Iterator[int]:
    mlp = layer.mlp
    assert isinstance(mlp, MLPSpec | ExpertsSpec)
    chosen = 1
    if isinstance(mlp, ExpertsSpec):
        chosen = mlp.router.top_k
        yield mlp.router.num_experts * spec.hidden_size
    for matrices in (2, 1):  # gate and up are one, and chosen experts are multiplied together
        yield matrices * chosen * mlp.intermediate_size * spec.hidden_size
