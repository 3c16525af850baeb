"""The tensor types of GGUF: numbers, names and block sizes, as the format defines them.

The same table as in the `gguf` package, which takes a quarter of a second to import; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from appliance.errors import UnsupportedModelError

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.gguf.header import TensorInfo


@dataclass(frozen=True, slots=True)
class TensorType:
    """Storage of a tensor's elements."""

    name: str
    block_size: int  # elements stored together, along the fastest dimension
    block_bytes: int


TENSOR_TYPES: dict[int, TensorType] = {
    0: TensorType("F32", 1, 4),
    1: TensorType("F16", 1, 2),
    2: TensorType("Q4_0", 32, 18),
    3: TensorType("Q4_1", 32, 20),
    6: TensorType("Q5_0", 32, 22),
    7: TensorType("Q5_1", 32, 24),
    8: TensorType("Q8_0", 32, 34),
    9: TensorType("Q8_1", 32, 40),
    10: TensorType("Q2_K", 256, 84),
    11: TensorType("Q3_K", 256, 110),
    12: TensorType("Q4_K", 256, 144),
    13: TensorType("Q5_K", 256, 176),
    14: TensorType("Q6_K", 256, 210),
    15: TensorType("Q8_K", 256, 292),
    16: TensorType("IQ2_XXS", 256, 66),
    17: TensorType("IQ2_XS", 256, 74),
    18: TensorType("IQ3_XXS", 256, 98),
    19: TensorType("IQ1_S", 256, 50),
    20: TensorType("IQ4_NL", 32, 18),
    21: TensorType("IQ3_S", 256, 110),
    22: TensorType("IQ2_S", 256, 82),
    23: TensorType("IQ4_XS", 256, 136),
    24: TensorType("I8", 1, 1),
    25: TensorType("I16", 1, 2),
    26: TensorType("I32", 1, 4),
    27: TensorType("I64", 1, 8),
    28: TensorType("F64", 1, 8),
    29: TensorType("IQ1_M", 256, 56),
    30: TensorType("BF16", 1, 2),
    34: TensorType("TQ1_0", 256, 54),
    35: TensorType("TQ2_0", 256, 66),
    39: TensorType("MXFP4", 32, 17),
    40: TensorType("NVFP4", 64, 36),
}

# Unquantized types, and torch's names for them.
DENSE_TYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
}

# Types of floating-point codes that are held as they are, and their bits.
FLOAT_BITS = {"MXFP4": 4, "NVFP4": 4}

# Types whose blocks are held and multiplied as they are; a test compares them, and those below,
# with `appliance.kernels.weights.ggml_types`, which loads torch.
HELD_TYPES = frozenset({"Q5_0", "Q5_1", "Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_NL", "IQ4_XS"})

# Types that become packed weights without loss, and bytes of scales and offsets beside a code.
_PACKED_BITS = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}
_PACKED_SCALE_BYTES = {"Q4_0": 2 / 32, "Q4_1": 4 / 32, "Q8_0": 2 / 32}

# Types that are held in codes of 2, 3 or 4 bits, without loss, and the bytes of 256 weights then:
# IQ1 to IQ3 with a code for each weight, ternary weights as Q2_K. See `appliance.gguf.grids`.
UNPACKED_TYPES = {
    "IQ1_S": 102,
    "IQ1_M": 106,
    "IQ2_XXS": 102,
    "IQ2_XS": 106,
    "IQ2_S": 106,
    "IQ3_XXS": 134,
    "IQ3_S": 134,
    "TQ1_0": 84,
    "TQ2_0": 84,
}

READABLE = (
    "Q2_K to Q6_K, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, IQ1_S to IQ4_XS, TQ1_0, TQ2_0, MXFP4 or NVFP4"
)

SUPERBLOCK = 256  # weights

# Numbers that llama.cpp or ik_llama.cpp once gave to forms that are read nowhere here.
_FORMS = {
    **dict.fromkeys((31, 32, 33), "Q4_0 in an order of one processor's kernels"),
    **dict.fromkeys((36, 37, 38), "IQ4_NL in an order of one processor's kernels"),
    41: "Q1_0",
    42: "Q2_0",
}
_FIRST_OF_IK = 97  # types of ik_llama.cpp alone


def unknown_type(path: Path, tensor: str, number: int) -> UnsupportedModelError:
    """Build the error for a tensor of a type that is not in the table."""
    what = _FORMS.get(number, "ik_llama.cpp's alone" if number >= _FIRST_OF_IK else "unknown")
    return UnsupportedModelError(
        f"tensor {tensor!r} of {path} has type {number} ({what}), which cannot be read here; use a "
        f"file quantized as {READABLE}"
    )


def check_readable(path: Path, info: TensorInfo) -> None:
    """Check that a tensor's type is one that is read here.

    Raises:
        UnsupportedModelError: it is not.
    """
    name = info.type.name
    if name not in {*DENSE_TYPES, *FLOAT_BITS, *HELD_TYPES, *_PACKED_BITS, *UNPACKED_TYPES}:
        raise UnsupportedModelError(
            f"tensor {info.name!r} of {path} has type {name}, which cannot be read here; use a "
            f"file quantized as {READABLE}"
        )


def code_bits(type_name: str) -> int | None:
    """Return the bits of a code as kernels hold it; None of types without integer codes."""
    if type_name in DENSE_TYPES or type_name in FLOAT_BITS:
        return None
    if type_name in UNPACKED_TYPES:
        return UNPACKED_TYPES[type_name] * 8 // SUPERBLOCK
    return int(type_name.lstrip("IQ")[0])


def held_bytes(kind: TensorType) -> float:
    """Return the bytes of a matrix's weight as kernels hold it, its scales included."""
    name = kind.name
    if name in _PACKED_BITS:
        return _PACKED_BITS[name] / 8 + _PACKED_SCALE_BYTES[name]
    if name in UNPACKED_TYPES:
        return UNPACKED_TYPES[name] / SUPERBLOCK
    return kind.block_bytes / kind.block_size
