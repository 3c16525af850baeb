"""The tensor types of GGUF: numbers, names and block sizes, as the format defines them.

The same table as in the `gguf` package, which takes a quarter of a second to import; a test
compares the two.
"""

from __future__ import annotations

from dataclasses import dataclass


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
FLOAT_BITS = {"MXFP4": 4}

# Bits of the codes that hold a quantized type; 8 for all others.
_HELD_BITS = {"Q4_0": 4, "Q4_1": 4, "Q4_K": 4}


def held_bits(type_name: str) -> int | None:
    """Return the bits of the codes of a packed matrix of this type; None if it is not packed."""
    if type_name in DENSE_TYPES or type_name in FLOAT_BITS:
        return None
    return _HELD_BITS.get(type_name, 8)


# Types whose packed form has an offset beside a group's scale; both are halves.
_WITH_OFFSET = {"Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K"}


def held_scale_bytes(type_name: str) -> float:
    """Return the bytes of scales and offsets that a packed weight of this type takes."""
    return (4 if type_name in _WITH_OFFSET else 2) / 32
