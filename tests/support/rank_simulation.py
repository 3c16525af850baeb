"""Ranks under a virtual clock: each reads its part's matrices, and sends messages over its link.

What a rank has is read off its own `DecoderSpec`, matrix by matrix; what the planner adds up in
closed form, this plays: launches, uneven reads, messages that wait for each other, a cache that
grows, a state that is read and written.
"""

from __future__ import annotations

import random
from math import prod
from typing import TYPE_CHECKING, NamedTuple

from appliance.model.recurrent_spec import Mamba2Spec
from appliance.model.spec import AttentionSpec, ExpertsSpec, MLPSpec

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.engine.links.link import LinkSpeed
    from appliance.engine.rank_split.pipeline import RankFacts
    from appliance.model.shard.shard import Shard
    from appliance.model.spec import DecoderSpec

LAUNCH_SECONDS = 5e-7  # of a kernel in a graph
UNEVEN = 0.04  # most by which a read takes more or less
STEP_BYTES = 200  # of a step's description


class Piece(NamedTuple):
    """A rank's reads of a layer up to an exchange, and the bytes that it then gives."""

    reads: tuple[float, ...]
    gives: float


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
        self.exchanges: list[float] = []  # bytes that each rank gave, in the last step

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
        self.exchanges = []
        row = spec.hidden_size * self.given
        self.exchange(row)  # of the embedding
        for index in range(len(spec.layers)):
            share = self.shards[0].layers[index]
            of_ranks = [self.mixer(shard, index, length) for shard in self.shards]
            self.play(of_ranks, gives=share.heads is not None)
            of_ranks = [self.mlp(shard, index) for shard in self.shards]
            self.play(of_ranks, gives=share.has_part_of_mlp)
        for rank, shard in enumerate(self.shards):
            rows = shard.own_tokens.stop - shard.own_tokens.start
            self.read(rank, rows * spec.hidden_size * self.weight_bytes)
        arrived = [self.send(rank, 4 * self.shards[0].widest_tokens) for rank in others]
        self.now[0] = max([self.now[0], *arrived])

    def play(self, of_ranks: Sequence[Sequence[Piece]], *, gives: bool) -> None:
        """Let all ranks read what each piece takes, and exchange its end if they have parts."""
        for pieces in zip(*of_ranks, strict=True):
            for rank, piece in enumerate(pieces):
                for num_bytes in piece.reads:
                    self.read(rank, num_bytes)
            if gives:
                self.exchange(pieces[0].gives)

    def mixer(self, shard: Shard, index: int, length: int) -> list[Piece]:
        spec, row = shard.spec, shard.whole.hidden_size * self.given
        mixer = spec.layers[index].mixer
        if isinstance(mixer, Mamba2Spec):
            state = 2 * 4 * sum(map(prod, mixer.state))  # read and written in float32
            first = (mixer.inputs * spec.hidden_size * self.weight_bytes, state)
            last = Piece((mixer.values * spec.hidden_size * self.weight_bytes,), row)
            if mixer.split is None:
                return [Piece((*first, *last.reads), row)]
            return [Piece(first, 4 * mixer.split.count), last]
        assert isinstance(mixer, AttentionSpec)
        heads = (mixer.num_heads, mixer.num_kv_heads, mixer.num_kv_heads, mixer.num_heads)
        weights = [count * mixer.head_dim * spec.hidden_size * self.weight_bytes for count in heads]
        cached = 2 * mixer.num_kv_heads * mixer.head_dim * length * self.kv_bytes
        return [Piece((*weights, cached), row)]

    def mlp(self, shard: Shard, index: int) -> list[Piece]:
        spec, row = shard.spec, shard.whole.hidden_size * self.given
        mlp = spec.layers[index].mlp
        if isinstance(mlp, MLPSpec):
            return [Piece(self._gated(mlp.intermediate_size, spec), row)]
        assert isinstance(mlp, ExpertsSpec)
        router = mlp.router.num_experts * spec.hidden_size * self.weight_bytes
        # The chosen experts are multiplied together.
        chosen = self._gated(mlp.router.top_k * mlp.intermediate_size, spec)
        shared = () if mlp.shared is None else self._gated(mlp.shared.intermediate_size, spec)
        if mlp.own_norms:
            return [Piece((router, *shared), row), Piece(chosen, row)]
        return [Piece((router, *chosen, *shared), row)]

    def _gated(self, width: int, spec: DecoderSpec) -> tuple[float, ...]:
        """Return the bytes of gate and up, which are one matrix, and of down."""
        return tuple(count * width * spec.hidden_size * self.weight_bytes for count in (2, 1))

    def read(self, rank: int, num_bytes: float) -> None:
        factor = 1 + UNEVEN * self.noise.uniform(-1, 1)
        seconds = factor * num_bytes / self.ranks[rank].bytes_per_second
        self.now[rank] += LAUNCH_SECONDS + seconds

    def exchange(self, num_bytes: float) -> None:
        """Let all ranks send to all others; each goes on once it has sent and got everything."""
        self.exchanges.append(num_bytes)
        size = len(self.ranks)
        arrived = list(self.now)
        for step in range(1, size):
            for rank in range(size):
                to = (rank + step) % size
                arrived[to] = max(arrived[to], self.send(rank, num_bytes))
        self.now = [
            LAUNCH_SECONDS + max(when, left)
            for when, left in zip(arrived, self.way_out, strict=True)
        ]

    def send(self, rank: int, num_bytes: float) -> float:
        """Put a message on a rank's way out; return when it arrives."""
        self.messages += 1
        leaves = max(self.now[rank], self.way_out[rank])
        self.way_out[rank] = leaves + num_bytes / self.link.bytes_per_second
        return self.way_out[rank] + self.link.seconds
