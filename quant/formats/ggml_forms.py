"""The weights that a group of each written GGML type can hold, and the scheme that names a type.

Layouts: `ggml_blocks`. Knows no method.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from appliance.errors import ConfigError
from appliance.kernels.weights.ggml_types import IQ4_VALUES, SUPERBLOCK

GROUP = 32  # weights of a block without super-blocks


class Minimum(Enum):
    """The number that a group adds to its multiples of the scale."""

    NONE = 0
    OWN = 1  # in float16, of any sign
    MULTIPLE = 2  # a whole multiple of the super-block's, subtracted


@dataclass(frozen=True, slots=True)
class GroupForm:
    """The weights of a group: value * scale + minimum.

    Attributes:
        values: of the codes, ascending, evenly spaced but for the table of `IQ4_NL`.
        group_size: weights that share a scale.
        multiples: least and greatest multiple of the super-block's scale; None: each group has a
            scale in float16 of its own.
        most_minimum: greatest multiple of the super-block's minimum; the least is 0.
        smaller: the type for rows that no super-block divides; "" for types of groups alone.
    """

    values: tuple[int, ...]
    group_size: int = GROUP
    multiples: tuple[int, int] | None = None
    minimum: Minimum = Minimum.NONE
    most_minimum: int = 0
    smaller: str = ""

    @property
    def block_size(self) -> int:
        """Inputs of a block; they divide a row."""
        return GROUP if self.multiples is None else SUPERBLOCK

    @property
    def is_even(self) -> bool:
        """True if neighbouring values are 1 apart."""
        return self.values[-1] - self.values[0] == len(self.values) - 1


def _around_0(bits: int) -> tuple[int, ...]:
    return tuple(range(-(1 << (bits - 1)), 1 << (bits - 1)))


def _from_0(bits: int) -> tuple[int, ...]:
    return tuple(range(1 << bits))


_FOUR_BITS, _SIX_BITS = 15, 63  # greatest multiples
_AROUND_32 = -32, 31

FORMS: dict[str, GroupForm] = {
    "Q4_0": GroupForm(_around_0(4)),
    "Q4_1": GroupForm(_from_0(4), minimum=Minimum.OWN),
    "Q5_0": GroupForm(_around_0(5)),
    "Q5_1": GroupForm(_from_0(5), minimum=Minimum.OWN),
    "Q8_0": GroupForm(_around_0(8)),
    "IQ4_NL": GroupForm(IQ4_VALUES),
    "Q2_K": GroupForm(
        _from_0(2), 16, (0, _FOUR_BITS), Minimum.MULTIPLE, _FOUR_BITS, smaller="IQ4_NL"
    ),
    "Q3_K": GroupForm(_around_0(3), 16, _AROUND_32, smaller="IQ4_NL"),
    "Q4_K": GroupForm(
        _from_0(4), GROUP, (0, _SIX_BITS), Minimum.MULTIPLE, _SIX_BITS, smaller="Q5_0"
    ),
    "Q5_K": GroupForm(
        _from_0(5), GROUP, (0, _SIX_BITS), Minimum.MULTIPLE, _SIX_BITS, smaller="Q5_1"
    ),
    "Q6_K": GroupForm(_around_0(6), 16, (-128, 127), smaller="Q8_0"),
    "IQ4_XS": GroupForm(IQ4_VALUES, GROUP, _AROUND_32, smaller="IQ4_NL"),
}


@dataclass(frozen=True, slots=True)
class BlockScheme:
    """Codes in the blocks of a GGML type.

    Attributes:
        type_name: a key of `FORMS`.

    Raises:
        ConfigError: no such type is written.
    """

    type_name: str

    def __post_init__(self) -> None:
        if self.type_name not in FORMS:
            raise ConfigError(
                f"GGML type {self.type_name!r} is not written here; use {', '.join(FORMS)}"
            )

    @property
    def form(self) -> GroupForm:
        return FORMS[self.type_name]

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return (len(self.form.values) - 1).bit_length()

    @property
    def group_size(self) -> int:
        """Inputs that share a scale."""
        return self.form.group_size

    @property
    def symmetric(self) -> bool:
        """True without minima."""
        return self.form.minimum is Minimum.NONE

    def fit(self, in_features: int) -> tuple[BlockScheme | None, str]:
        """Adapt the scheme to `in_features` inputs.

        Returns:
            The scheme and, if it differs from this one, the reason. The scheme is None if the
            weight stays in 16 bits.
        """
        if in_features % self.form.block_size == 0:
            return self, ""
        if in_features % GROUP:
            return None, f"kept in 16 bits: {in_features} inputs do not divide by {GROUP}"
        smaller = self.form.smaller
        return BlockScheme(smaller), (
            f"as {smaller}, not {self.type_name}: {in_features} inputs do not divide by"
            f" {SUPERBLOCK}"
        )

    def __str__(self) -> str:
        return self.type_name
