"""Mixers with a state as plain frozen data. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from appliance.model.spec import NormSpec


@dataclass(frozen=True, slots=True)
class ShortConvSpec:
    """Gated short convolution of one layer (LFM2): out(c * conv(b * x)), b, c and x being linear.

    Attributes:
        width: channels, each with a filter of its own.
        taps: positions that a filter sees, its own included.
        bias: linears and filters have biases.
    """

    width: int
    taps: int
    bias: bool = False

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of what a sequence carries from row to row: the latest inputs of the filters."""
        return ((self.taps - 1, self.width),)


@dataclass(frozen=True, slots=True)
class GatedDeltaSpec:
    """Gated DeltaNet of one layer (arXiv 2412.06464).

    Attributes:
        num_value_heads: a multiple of `num_key_heads`; value heads in turn share a key head.
        key_dim: elements of a key head, and of a query head.
        taps: positions that the convolution of queries, keys and values sees.
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
        """Elements of all key heads."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """Elements of all value heads."""
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


@dataclass(frozen=True, slots=True)
class Mamba2Spec:
    """Mamba-2 of one layer (arXiv 2405.21060): a state of each head, read and written by groups.

    Attributes:
        num_heads: a multiple of `num_groups`; heads in turn share a group's keys and queries, which
            the paper calls B and C.
        head_dim: values of a head.
        state_dim: elements of a key, and of a query.
        taps: positions that the convolution of values, keys and queries sees.
        norm: of each group's gated output.
        bias: the linears have biases.
        filter_bias: the filters have biases.
    """

    num_heads: int
    num_groups: int
    head_dim: int
    state_dim: int
    taps: int
    norm: NormSpec
    bias: bool = False
    filter_bias: bool = True

    @property
    def values(self) -> int:
        """Elements of all heads."""
        return self.num_heads * self.head_dim

    @property
    def keys(self) -> int:
        """Elements of the keys of all groups."""
        return self.num_groups * self.state_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: values, keys and queries."""
        return self.values + 2 * self.keys

    @property
    def inputs(self) -> int:
        """Outputs of the first linear: gates, what the convolution sees, and a step per head."""
        return self.values + self.channels + self.num_heads

    @property
    def state(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the filters' latest inputs, and of the maps from keys to values."""
        maps = (self.num_heads, self.state_dim, self.head_dim)
        return ((self.taps - 1, self.channels), maps)


RecurrentSpec: TypeAlias = ShortConvSpec | GatedDeltaSpec | Mamba2Spec
