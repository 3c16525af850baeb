"""Mixers with a recurrent state as plain frozen data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from appliance.model.spec import NormSpec


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Gated short convolution of one layer (LFM2): out(c * conv(b * x)), with linear b, c and x.

    Attributes:
        width: channels, each with its own filter.
        taps: positions that a filter reads, its own included.
    """

    width: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of a sequence's state: the filters' latest inputs."""
        return ((self.taps - 1, self.width),)

    @property
    def row_floats(self) -> int:
        """A row's floats in a step: outputs of its linears and of its operation."""
        return 5 * self.width


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet of one layer (arXiv 2412.06464).

    Attributes:
        num_value_heads: a multiple of `num_key_heads`; consecutive value heads share a key head.
        key_dim: elements of a key or query head.
        taps: positions that the convolution of queries, keys and values reads.
        norm: of each value head's output.
    """

    num_key_heads: int
    num_value_heads: int
    key_dim: int
    value_dim: int
    taps: int
    norm: NormSpec

    @property
    def keys(self) -> int:
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.keys + self.values

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the filters' latest inputs, and of the maps from keys to values."""
        maps = (self.num_value_heads, self.key_dim, self.value_dim)
        return ((self.taps - 1, self.channels), maps)

    @property
    def row_floats(self) -> int:
        """A row's floats in a step: outputs of its linears and of its operation."""
        return 3 * (self.channels + self.values)


@dataclass(frozen=True, slots=True)
class SplitGroup:
    """A group of heads of which ranks have parts, and whose norm is of all of them.

    Attributes:
        index: among the model's groups.
        count: of the model's groups, all of which are split.
        width: values of the whole group.
    """

    index: int
    count: int
    width: int


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba-2 of one layer (arXiv 2405.21060): a state per head; groups of heads share keys.

    Attributes:
        num_heads: a multiple of `num_groups`; consecutive heads share a group's keys and queries,
            the paper's B and C.
        head_dim: values per head.
        state_dim: elements of a key or query.
        taps: positions that the convolution of values, keys and queries reads.
        norm: of each group's gated output.
        split: of which group these heads are a part, if other ranks have others of it.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    taps: int
    norm: NormSpec
    bias: bool = False
    filter_bias: bool = True
    split: SplitGroup | None = None

    @property
    def values(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.values + 2 * self.keys

    @property
    def inputs(self) -> int:
        """Outputs of the first linear: gates, the convolution's inputs, and a step per head."""
        return self.values + self.channels + self.num_heads

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the filters' latest inputs, and of the maps from keys to values."""
        maps = (self.num_heads, self.state_dim, self.head_dim)
        return ((self.taps - 1, self.channels), maps)

    @property
    def row_floats(self) -> int:
        """A row's floats in a step: outputs of its linears and of its operation."""
        return 3 * self.inputs


# Memory that one pass of a class with caches of its own may take, if a single row does not more.
PASS_BYTES = 256 << 20


class OwnCacheSizes(NamedTuple):
    """Bytes of a sequence's cache: whatever its length, and what each token adds at most."""

    fixed_bytes: int
    token_bytes: int


@dataclass(frozen=True, slots=True)
class OwnCacheSpec:
    """Caches of a class of transformers' own, one for each sequence, measured without weights.

    Attributes:
        wide: sizes where modules compute in float32.
        narrow: sizes where they compute in 16 bits.
        pass_bytes: that a pass takes in float32, and in 16 bits at most: always, for each row, for
            each token before it, and for each pair of them.
        reason: why the engine's own cache cannot take its place.
        has_limit: the settings name the longest context.
    """

    wide: OwnCacheSizes
    narrow: OwnCacheSizes
    pass_bytes: tuple[float, float, float, float]
    reason: str
    has_limit: bool = True

    def sizes(self, activation_bytes: int) -> OwnCacheSizes:
        """Return the sizes where an element that modules compute takes so many bytes."""
        return self.narrow if activation_bytes <= 2 else self.wide

    def taken(self, rows: int, context: int) -> int:
        """Return the bytes that a pass of `rows` takes beside weights and cache, at its peak.

        Args:
            context: tokens of the sequence, these rows included.
        """
        always, row, token, pair = self.pass_bytes
        return int(always + row * rows + token * context + pair * rows * context)

    def rows_at(self, context: int) -> int:
        """Return the rows of a sequence that one pass may hold: at least one."""
        base = self.taken(0, context)
        each = max(self.taken(1, context) - base, 1)
        return max(1, (PASS_BYTES - base) // each)

    def most_taken(self, context: int) -> int:
        """Return the bytes that no pass up to a context exceeds."""
        return max(PASS_BYTES, self.taken(1, context))


RecurrentSpec: TypeAlias = ShortConvSpec | GatedDeltaSpec | Mamba2Spec
