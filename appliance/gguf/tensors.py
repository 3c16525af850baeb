"""Tensor data of GGUF files: into torch tensors and the packed weight form."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.errors import CheckpointError, UnsupportedModelError
from appliance.files import FileIdentity, read_into
from appliance.kernels.packed import OffsetKind, PackedWeight

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from torch import Tensor

    from appliance.gguf.header import TensorInfo

GROUP_SIZE = 32  # of Q4_0, Q4_1, Q5_0, Q5_1 and Q8_0

_DENSE = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
}


def read_tensor(path: Path, identity: FileIdentity, info: TensorInfo) -> Tensor | PackedWeight:
    """Read one tensor of the file that `identity` describes."""
    raw = torch.empty(info.nbytes, dtype=torch.uint8)
    read_into(path, identity, info.offset, raw.numpy().data)
    type_name = info.type.name
    if type_name in _DENSE:
        return raw.view(_DENSE[type_name]).view(info.shape)
    if type_name in _PACKED and len(info.shape) == 2:
        packed = _PACKED[type_name](raw.view(info.shape[0], -1, info.type.block_bytes))
        if not (packed.scale.isfinite().all() and packed.offset.isfinite().all()):
            raise CheckpointError(
                f"tensor {info.name!r} of {path} has infinite or undefined scales; "
                "download the file again"
            )
        return packed
    return _dequantize(raw, info, path)


def _q4_0(blocks: Tensor) -> PackedWeight:
    """Blocks (out, groups, 18): a float16 scale d, then 32 codes; w = (q - 8) * d."""
    scale = _float16_at(blocks, 0)
    return _packed(_interleave(blocks[..., 2:]), scale, scale * -8, bits=4)


def _q4_1(blocks: Tensor) -> PackedWeight:
    """Blocks (out, groups, 20): float16 scale d and minimum m, then 32 codes; w = q * d + m."""
    return _packed(
        _interleave(blocks[..., 4:]), _float16_at(blocks, 0), _float16_at(blocks, 2), bits=4
    )


def _q5_0(blocks: Tensor) -> PackedWeight:
    """Blocks (out, groups, 22): float16 scale d, 32 fifth bits, 32 low nibbles; w = (q - 16) * d.

    There is no packed form of 5 bits; with 8, a code of 128 stands for zero, as in Q8_0.
    """
    scale = _float16_at(blocks, 0)
    return _packed(_five_bits(blocks, 2) + (128 - 16), scale, scale * -128, bits=8)


def _q5_1(blocks: Tensor) -> PackedWeight:
    """Blocks (out, groups, 24): like Q5_0, with a float16 minimum m after d; w = q * d + m."""
    return _packed(_five_bits(blocks, 4), _float16_at(blocks, 0), _float16_at(blocks, 2), bits=8)


def _five_bits(blocks: Tensor, start: int) -> Tensor:
    """Codes of 5 bits: fifth bits (out, groups, 4) at `start`, then nibbles (out, groups, 16).

    Element i has its fifth bit at bit i, and its nibble as in `_interleave`; the result is
    (out, in_features) uint8.
    """
    high = blocks[..., start : start + 4].unsqueeze(-1)  # (out, groups, 4, 1)
    bits = (high >> torch.arange(8, dtype=torch.uint8)) & 1  # (out, groups, 4, 8)
    low = blocks[..., start + 4 :]
    nibbles = torch.cat((low & 0xF, low >> 4), dim=-1)  # (out, groups, 32)
    return (nibbles | (bits.flatten(2) << 4)).flatten(1)


def _q8_0(blocks: Tensor) -> PackedWeight:
    """Blocks (out, groups, 34): a float16 scale d, then 32 signed codes; w = q * d."""
    scale = _float16_at(blocks, 0)
    return _packed((blocks[..., 2:] ^ 0x80).flatten(1), scale, scale * -128, bits=8)


_PACKED: dict[str, Callable[[Tensor], PackedWeight]] = {
    "Q4_0": _q4_0,
    "Q4_1": _q4_1,
    "Q5_0": _q5_0,
    "Q5_1": _q5_1,
    "Q8_0": _q8_0,
}


def _packed(codes: Tensor, scale: Tensor, offset: Tensor, *, bits: int) -> PackedWeight:
    return PackedWeight(
        codes=codes,
        scale=scale,
        offset=offset,
        offset_kind=OffsetKind.ADDITIVE,
        bits=bits,
        group_size=GROUP_SIZE,
    )


def _float16_at(blocks: Tensor, start: int) -> Tensor:
    """The float16 value at a byte offset of every block: (out, groups)."""
    return blocks[..., start : start + 2].contiguous().view(torch.float16).squeeze(-1)


def _interleave(halves: Tensor) -> Tensor:
    """Bring nibbles into our order: (out, groups, 16) uint8 -> (out, in_features / 2) uint8.

    GGUF puts element i of a group of 32 into the low nibble of byte i and element i + 16 into its
    high nibble; the packed form wants neighbours in one byte.
    """
    low, high = halves & 0xF, halves >> 4
    first = low[..., 0::2] | (low[..., 1::2] << 4)  # elements 0 to 15
    second = high[..., 0::2] | (high[..., 1::2] << 4)  # elements 16 to 31
    return torch.cat((first, second), dim=-1).flatten(1)


def _dequantize(raw: Tensor, info: TensorInfo, path: Path) -> Tensor:
    # Imported late: the types above do not need it, and it takes a quarter of a second.
    from gguf import GGMLQuantizationType
    from gguf.quants import dequantize

    try:
        values = dequantize(raw.numpy(), GGMLQuantizationType[info.type.name])
    except NotImplementedError as error:
        raise UnsupportedModelError(
            f"tensor {info.name!r} of {path} has type {info.type.name}, which cannot be "
            "dequantized here; use a file quantized as Q4_0, Q4_1, Q4_K, Q5_K, Q6_K or Q8_0"
        ) from error
    return torch.from_numpy(values).view(info.shape)
