"""What a quantized weight should be: type, bits, groups, symmetry. Knows no method or format."""

from __future__ import annotations

from dataclasses import dataclass, replace

from appliance.errors import ConfigError

BITS = (3, 4, 8)
GROUP_SIZES = (128, 64, 32)  # falling, so that the first that divides a width is the largest
CHANNEL = "channel"


@dataclass(frozen=True, slots=True)
class WeightScheme:
    """Integer codes in groups along the input dimension of a linear weight.

    Attributes:
        bits: 3, 4 or 8.
        group_size: inputs that share a scale, 32, 64 or 128; None means all of a row, "channel".
        symmetric: no zero point, so code 2 ** (bits - 1) is always the weight 0.

    Raises:
        ConfigError: bits or group size is not one of these.
    """

    bits: int = 4
    group_size: int | None = 64
    symmetric: bool = True

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise ConfigError(f"weights of {self.bits} bits are not supported; use 3, 4 or 8")
        if self.group_size is not None and self.group_size not in GROUP_SIZES:
            raise ConfigError(
                f"a group size of {self.group_size} is not supported; use 32, 64, 128 or channel"
            )

    @classmethod
    def parse(cls, *, bits: int, group_size: str, symmetric: bool) -> WeightScheme:
        """Build a scheme from what a person typed; `group_size` may be "channel"."""
        word = group_size.strip().lower()
        if word == CHANNEL:
            return cls(bits, None, symmetric)
        if not (word.isascii() and word.isdigit()):
            raise ConfigError(f"group size {group_size!r} is not 32, 64, 128 or channel")
        return cls(bits, int(word), symmetric)

    @property
    def code_bits(self) -> int:
        """Bits of a code in memory: kernels read 4 or 8, so that 3 lie in the form of 4."""
        return max(self.bits, 4)

    @property
    def max_code(self) -> int:
        """Largest unsigned code; the smallest is 0."""
        return (1 << self.bits) - 1

    @property
    def zero_code(self) -> int:
        """The code of weight 0 where the scheme is symmetric."""
        return 1 << (self.bits - 1)

    def fit(self, in_features: int) -> tuple[WeightScheme | None, str]:
        """Adapt the scheme to one width.

        Returns:
            The scheme for a weight with `in_features` inputs and, where it is not the one asked
            for, the reason. Without a scheme the weight stays in 16 bits: packed kernels work on
            groups of 32 inputs and more.
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
class Fp8Scheme:
    """Floating-point codes of 8 bits (e4m3).

    Attributes:
        blockwise: a scale for each 128x128 weights and activations in groups of 128, instead of
            one for each output and each token.
        quantized_inputs: made for activations that become FP8 too, as they come.
    """

    blockwise: bool = False
    quantized_inputs: bool = True

    @property
    def bits(self) -> int:
        """Of a code."""
        return 8

    def fit(self, in_features: int) -> tuple[Fp8Scheme | None, str]:
        """Every width fits; see `WeightScheme.fit`."""
        return self, ""

    def __str__(self) -> str:
        return f"FP8 {'in blocks of 128x128' if self.blockwise else 'by channel'}"


LinearScheme = WeightScheme | Fp8Scheme
