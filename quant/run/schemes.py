"""Turns words of the command line into the schemes of weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from appliance.errors import ConfigError
from appliance.quant.formats.scheme import CHANNEL, Fp8Scheme, SuperBlockScheme, WeightScheme
from appliance.quant.run.options import Method, WeightFormat

if TYPE_CHECKING:
    from appliance.quant.formats.scheme import GroupedScheme, LinearScheme

BLOCK = "block"  # a group size of FP8
GGUF_BITS = (4, 6, 8)


@dataclass(frozen=True, slots=True)
class Asked:
    """Method and scheme that a command asks for.

    Attributes:
        open: parts of the scheme that are chosen with an open method; see `QuantizeOptions`.
    """

    method: Method
    scheme: LinearScheme
    open: frozenset[str] = frozenset()


def read_asked(
    method: Method | None,
    bits: int | None,
    group_size: str | None,
    *,
    symmetric: bool | None,
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS,
) -> Asked:
    """Read a command's words; None takes the default, which a method of its own decides.

    Without a method 8 bits are INT8, whose loss is small without text. Other bits leave the method
    open, and have zero points until the model is known.

    Raises:
        ConfigError: the options contradict each other.
    """
    if method is None and bits == 8:
        method = Method.INT8
    if method is not None:
        usual = symmetric is not False
        return Asked(
            method, choose_scheme(method, bits, group_size, symmetric=usual, format=format)
        )
    method = Method.OPEN
    given = {"symmetric": symmetric, "group_size": group_size}
    if symmetric is None:
        symmetric = format is WeightFormat.GGUF and bits == 6
    scheme = choose_scheme(method, bits, group_size, symmetric=symmetric, format=format)
    return Asked(method, scheme, frozenset(name for name, value in given.items() if value is None))


def choose_scheme(
    method: Method,
    bits: int | None,
    group_size: str | None,
    *,
    symmetric: bool,
    format: WeightFormat = WeightFormat.COMPRESSED_TENSORS,
) -> LinearScheme:
    """Choose a scheme; None takes the method's default.

    Args:
        method: FP8 and INT8 have 8 bits, and one scale per output unless a group size is given.
        bits: 3, 4 or 8; 4 by default. For GGUF 4, 6 or 8.
        group_size: 32, 64, 128 or channel; for FP8, channel or block; 64 by default. A type of
            GGUF has its own.
        symmetric: no zero points; in GGUF, 4 bits with minima are Q4_K.

    Raises:
        ConfigError: the options contradict each other.
    """
    if method in (Method.FP8, Method.INT8) and bits not in (None, 8):
        raise ConfigError(f"--method {method.value} has 8 bits; leave --bits {bits} out")
    if format is WeightFormat.GGUF:
        return _gguf_scheme(method, bits, group_size, symmetric=symmetric)
    if method is Method.FP8:
        word = (group_size or CHANNEL).strip().lower()
        if word not in (CHANNEL, BLOCK):
            raise ConfigError(
                f"group size {word!r} is not one of FP8: {CHANNEL}, or {BLOCK} for 128x128 weights"
            )
        if not symmetric:
            raise ConfigError("FP8 has no zero points; leave --no-symmetric out")
        return Fp8Scheme(blockwise=word == BLOCK)
    if method is Method.INT8:
        return WeightScheme.parse(bits=8, group_size=group_size or CHANNEL, symmetric=symmetric)
    return WeightScheme.parse(
        bits=4 if bits is None else bits, group_size=group_size or "64", symmetric=symmetric
    )


def _gguf_scheme(
    method: Method, bits: int | None, group_size: str | None, *, symmetric: bool
) -> GroupedScheme:
    if method is Method.FP8:
        raise ConfigError("--method fp8 makes no codes of a GGUF type; use --method int8")
    if group_size is not None:
        raise ConfigError(
            f"--format gguf has groups of its own; leave --group-size {group_size} out"
        )
    chosen = 8 if method is Method.INT8 else 4 if bits is None else bits
    if chosen not in GGUF_BITS:
        raise ConfigError(f"--format gguf has 4, 6 or 8 bits; --bits {chosen} is none of them")
    if chosen != 4 and not symmetric:
        raise ConfigError("only 4 bits have minima in --format gguf; leave --no-symmetric out")
    return gguf_scheme(chosen, symmetric=symmetric)


def gguf_scheme(bits: int, *, symmetric: bool) -> GroupedScheme:
    """Return the scheme of a GGUF type: Q4_0, or Q4_K with minima, Q6_K or Q8_0.

    Args:
        bits: one of `GGUF_BITS`.
        symmetric: of 4 bits, without minima.
    """
    if bits == 8:
        return WeightScheme(8, 32)
    if bits == 6:
        return SuperBlockScheme("Q6_K")
    return WeightScheme(4, 32) if symmetric else SuperBlockScheme("Q4_K")


def end_scheme(bits: int, layers: LinearScheme, format: WeightFormat) -> GroupedScheme | None:
    """Return the scheme of an embedding or head of 4 or 8 bits, or 6 in GGUF; None for 16.

    Group size and symmetry are those of the layers, if they have any.

    Raises:
        ConfigError: the bits are not supported.
    """
    if bits == 16:
        return None
    if format is WeightFormat.GGUF and bits in GGUF_BITS:
        assert not isinstance(layers, Fp8Scheme), "no type of GGUF"
        return gguf_scheme(bits, symmetric=bits != 4 or layers.symmetric)
    if bits not in (4, 8):
        raise ConfigError(
            f"a head of {bits} bits is not supported; use 4, 8 or 16, or 6 with --format gguf"
        )
    if isinstance(layers, WeightScheme):
        return replace(layers, bits=bits)
    return WeightScheme(bits)
