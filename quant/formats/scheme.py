"""A weight's quantization scheme: type, bits, groups, symmetry. Knows no method or folder."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.errors import ConfigError
from appliance.kernels.weights import trellis
from appliance.quant.formats.ggml_forms import BlockScheme

BITS = (3, 4, 8)
GROUP_SIZES = (128, 64, 32)  # descending: the first that divides a width is the largest
CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Integer codes in groups along the input dimension of a linear weight.

    Attributes:
        bits: 3, 4 or 8.
        group_size: inputs that share a scale, 32, 64 or 128; None ("channel") means a whole row.
        symmetric: no zero points; code 2 ** (bits - 1) is weight 0.

    Raises:
        ConfigError: unsupported bits or group size.
    """

    bits: int = 4
    group_size: int | None = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(
                f"weights of {self.bits} bits are not supported; use 3, 4 or 8, or --format gguf"
                " with --type"
            )
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"a group size of {self.group_size} is not supported; use 32, 64, 128 or channel"
            )

    @classmethod
    def parse(cls, *, bits: int, group_size: str, symmetric: bool) -> WeightScheme:
        """Build a scheme from command-line words; `group_size` may be "channel"."""
        word = group_size.strip().lower()
        if word == CHANNEL:
            return cls(bits, None, symmetric)
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(f"group size {group_size!r} is not 32, 64, 128 or channel")
        return cls(bits, int(word), symmetric)

    @property
    def code_bits(self) -> int:
        """Bits of a code in a `PackedWeight`, 4 or 8: 3-bit codes take 4."""
        return 4 if self.bits <= 4 else 8

    @property
    def max_code(self) -> int:
        """Largest unsigned code."""
        return (1 << self.bits) - 1

    @property
    def zero_code(self) -> int:
        """Code of weight 0 in a symmetric scheme."""
        return 1 << (self.bits - 1)

    def fit(self, in_features: int) -> tuple[WeightScheme | None, str]:
        """Adapt the scheme to `in_features` inputs.

        Returns:
            The scheme and, if it differs from this one, the reason. The scheme is None if the
            weight stays in 16 bits: packed kernels need groups of at least 32 inputs.
        """
        if in_features % GROUP_SIZES[-1]:
            return None, f"kept in 16 bits: {in_features} inputs do not divide by 32"
        if self.group_size is None or in_features % self.group_size == 0:
            return self, ""
        size = next(
            size for size in GROUP_SIZES if size < self.group_size and in_features % size == 0
        )
        reason = (
            f"in groups of {size}, not {self.group_size}:"
            f" {in_features} inputs do not divide by {self.group_size}"
        )
        return replace(self, group_size=size), reason

    def __str__(self) -> str:
        group = CHANNEL if self.group_size is None else f"groups of {self.group_size}"
        return f"{self.bits} bits, {group}, {'symmetric' if self.symmetric else 'asymmetric'}"


@dataclass(frozen=True, slots=True)
class StoredScheme(WeightScheme):
    """A scheme that others' checkpoints have and none of our methods makes.

    Attributes:
        bits: 2 to 8.
        group_size: a multiple of 32, or None.

    Raises:
        ConfigError: unsupported bits or group size.
    """

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in range(2, 9):
            raise ConfigError(f"weights of {self.bits} bits")
        size = self.group_size
        if size is not None and (type(size) is not int or size < 1 or size % GROUP_SIZES[-1]):
            raise ConfigError(f"a group size of {size}")


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """8-bit floating-point codes (e4m3).

    Attributes:
        blockwise: one scale per 128x128 weights and per token's 128 activations, instead of one per
            output and per token.
        quantized_inputs: activations become FP8 at run time.
    """

    blockwise: bool = False
    quantized_inputs: bool = True

    @property
    def bits(self) -> int:
        return 8

    def fit(self, in_features: int) -> tuple[Fp8Scheme | None, str]:
        """Return this scheme: it fits every width."""
        return self, ""

    def __str__(self) -> str:
        return f"FP8 {'in blocks of 128x128' if self.blockwise else 'by channel'}"


@dataclass(frozen=True, slots=True)
class TrellisScheme:
    """Symbols of a trellis, a scale per output: see `TrellisWeight`.

    Attributes:
        bits: 2 to 5.

    Raises:
        ConfigError: unsupported bits.
    """

    bits: int = 4

    def __post_init__(self) -> None:
        if self.bits not in trellis.BITS:
            raise ConfigError(f"--method trellis has 2, 3, 4 or 5 bits, not {self.bits}")

    def fit(self, in_features: int) -> tuple[TrellisScheme | None, str]:
        """Return None, and the reason, for widths that no block of 64 divides."""
        if in_features % trellis.BLOCK == 0:
            return self, ""
        return None, f"kept in 16 bits: {in_features} inputs do not divide by {trellis.BLOCK}"

    def __str__(self) -> str:
        return f"{self.bits} bits of a trellis"


@dataclass(frozen=True, slots=True)
class Fp4Scheme:
    """4-bit floating-point codes (e2m1).

    Attributes:
        has_powers: MXFP4, whose scales are powers of two for 32 inputs; else NVFP4, whose scales
            are e4m3 for 16.
    """

    has_powers: bool = False

    @property
    def bits(self) -> int:
        return 4

    @property
    def group_size(self) -> int:
        return 32 if self.has_powers else 16

    def fit(self, in_features: int) -> tuple[Fp4Scheme | None, str]:
        """Return None, and the reason, for widths that 32 does not divide."""
        if in_features % GROUP_SIZES[-1] == 0:
            return self, ""
        return None, f"kept in 16 bits: {in_features} inputs do not divide by {GROUP_SIZES[-1]}"

    def __str__(self) -> str:
        return "MXFP4" if self.has_powers else "NVFP4"


GroupedScheme = WeightScheme | BlockScheme | Fp4Scheme
LinearScheme = GroupedScheme | Fp8Scheme | TrellisScheme
