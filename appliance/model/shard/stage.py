"""One rank's run of whole layers; the first also has the embedding, the last the head.

No layer is divided, so a stage takes every kind of mixer and MLP.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, ClassVar

from appliance.errors import ConfigError
from appliance.model.shard.split import WHOLE_LAYER

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.model.shard.split import LayerShare
    from appliance.model.spec import DecoderSpec


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's part of a model whose layers are run in turn.

    Attributes:
        whole: the model.
        bounds: (size + 1,) first layer of each rank, then the number of layers.
        spec: the part as a model of its own.
    """

    rank: int
    whole: DecoderSpec
    bounds: tuple[int, ...]
    spec: DecoderSpec
    # Who has the embedding or the head has all of its rows; see `Shard`.
    tokens: ClassVar[tuple[int, ...]] = ()
    own_tokens: ClassVar[slice] = slice(0, None)
    widest_tokens: ClassVar[int] = 0

    @classmethod
    def of(cls, spec: DecoderSpec, bounds: tuple[int, ...], rank: int) -> Stage:
        own = replace(spec, layers=spec.layers[bounds[rank] : bounds[rank + 1]])
        return cls(rank, spec, bounds, own)

    @classmethod
    def whole_of(cls, spec: DecoderSpec) -> Stage:
        """Return all of a model, as the part of its only rank."""
        return cls.of(spec, (0, len(spec.layers)), 0)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.bounds) - 1

    @property
    def layers(self) -> tuple[int, int]:
        """Its first layer in the model, and one after its last."""
        return self.bounds[self.rank], self.bounds[self.rank + 1]

    @property
    def shares(self) -> tuple[LayerShare, ...]:
        """Of its layers: the whole of each."""
        return (WHOLE_LAYER,) * len(self.spec.layers)

    @property
    def is_first(self) -> bool:
        """True if it reads tokens."""
        return self.rank == 0

    @property
    def is_last(self) -> bool:
        """True if it computes logits."""
        return self.rank == self.size - 1

    @property
    def cache_layers(self) -> slice:
        """The places of its layers among the model's `cache_layers`."""
        first, last = self.layers
        indices = list(self.whole.cache_layers)
        return slice(sum(i < first for i in indices), sum(i < last for i in indices))


def check_stages(spec: DecoderSpec, size: int) -> None:
    """Refuse a model that cannot be cut between layers into this many parts.

    Raises:
        ConfigError: it cannot; the message names an alternative.
    """
    asked = f"--pipeline-parallel {size}"
    for index, mixer in spec.attention_layers.items():
        if mixer.kv_layer is not None:
            raise ConfigError(
                f"{asked} cuts a model between layers, and layer {index} of this one reads the keys"
                f" and values of layer {mixer.kv_layer}; use --tensor-parallel {size}, which"
                " divides each layer"
            )
    if spec.token_input is not None:
        raise ConfigError(
            f"{asked} cuts a model between layers, and each layer of this one has an input from the"
            f" tokens themselves; use --tensor-parallel {size}, which divides each layer"
        )
    if size > len(spec.layers):
        raise ConfigError(
            f"{asked} needs a layer for each process, and this model has {len(spec.layers)}; use"
            f" --pipeline-parallel {len(spec.layers)} or less"
        )


def cut_layers(
    sizes: Sequence[float], shares: Sequence[float], first: float = 0, last: float = 0
) -> tuple[int, ...]:
    """Divide layers into runs so that the largest, relative to its share, is as small as possible.

    Args:
        sizes: bytes of each layer.
        shares: of each rank, or its speed; at most as many as layers.
        first: extra bytes of the first rank.
        last: extra bytes of the last rank.

    Returns:
        (len(shares) + 1,) bounds; no run is empty.
    """
    begins = list(accumulate(sizes, initial=0.0))
    count, final = len(sizes), len(shares) - 1
    # Of the first runs, by the layer after them: the largest so far, and their bounds.
    found: dict[int, tuple[float, tuple[int, ...]]] = {0: (0.0, (0,))}
    for rank, share in enumerate(shares):
        beside = first * (rank == 0) + last * (rank == final)
        ends = [count] if rank == final else range(rank + 1, count - final + rank + 1)
        found = {
            end: min(
                (max(most, (begins[end] - begins[begin] + beside) / share), (*bounds, end))
                for begin, (most, bounds) in found.items()
                if begin < end
            )
            for end in ends
        }
    return found[count][1]


def run_bytes(
    sizes: Sequence[float], bounds: Sequence[int], first: float = 0, last: float = 0
) -> tuple[float, ...]:
    """Return the bytes of each run of layers, extra bytes included."""
    runs = [sum(sizes[begin:end]) for begin, end in pairwise(bounds)]
    runs[0] += first
    runs[-1] += last
    return tuple(runs)
