"""Embedding and head of one rank of the torch decoder, for its part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.operations import Linear
    from appliance.model.embedding import Embedding
    from appliance.model.shard.joint import JoinedShard


@dataclass(frozen=True, slots=True)
class PartialEmbedding:
    """Looks up a rank's rows, and gets the others from the other ranks."""

    own: Embedding
    part: JoinedShard

    def __call__(self, token_ids: Tensor) -> Tensor:
        """Look up token_ids (num_tokens,) of the whole vocabulary: (num_tokens, hidden_size)."""
        tokens = self.part.shard.own_tokens
        count = tokens.stop - tokens.start
        places = token_ids - tokens.start
        is_other = (places < 0) | (places >= count)
        rows = self.own(places.clamp(0, count - 1))
        return self.part.joint.sum(rows.masked_fill(is_other.unsqueeze(1), 0))


@dataclass(frozen=True, slots=True)
class PartialHead:
    """Computes the logits of a rank's tokens; rank 0 collects all ranks' logits."""

    own: Linear
    part: JoinedShard

    @property
    def in_features(self) -> int:
        return self.own.in_features

    @property
    def out_features(self) -> int:
        return self.part.shard.whole.vocab_size

    @property
    def nbytes(self) -> int:
        return self.own.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        """Map x (num_rows, in_features) to (num_rows, vocab_size); to (0, ...) beyond rank 0."""
        widths = [last - first for first, last in pairwise(self.part.shard.tokens)]
        logits = self.part.joint.gather(self.own(x), widths)
        return x.new_empty((0, self.out_features)) if logits is None else logits
