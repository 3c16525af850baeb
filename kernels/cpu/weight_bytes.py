"""Counts the bytes of a weight's tiles."""

from __future__ import annotations

from appliance.kernels.cpu.structs import LANES, Format, LinearStruct, ScaleFormat
from appliance.kernels.weights.ggml_types import SUPERBLOCK
from appliance.kernels.weights.trellis import BLOCK

_BITS = {
    Format.F32: 32,
    Format.F16: 16,
    Format.BF16: 16,
    Format.INT8: 8,
    Format.INT4: 4,
    Format.E2M1: 4,
    Format.INT2: 2,
    Format.INT3: 3,
    Format.INT5: 5,
    Format.INT6: 6,
    Format.IQ4: 4,
    Format.IQ3_S: 4,
    Format.IQ3_XXS: 4,
    Format.IQ2: 3,
    Format.IQ1: 3,
}
# Bytes of integers and halves of an output, beside 256 codes; see record_bytes in linear_layout.h.
_RECORD_BYTES = {
    ScaleFormat.Q2_K: 20,
    ScaleFormat.Q3_K: 14,
    ScaleFormat.Q4_K: 16,
    ScaleFormat.Q6_K: 18,
    ScaleFormat.IQ4_XS: 8,
    ScaleFormat.ODD_32: 6,
    ScaleFormat.ODD_16: 10,
}


def linear_bytes(struct: LinearStruct) -> int:
    """Return the bytes of a weight's tiles, without its bias."""
    scales = sum(scales_bytes(struct) for values in (struct.scales, struct.offsets) if values)
    return codes_bytes(struct) + scales


def memory_of(struct: LinearStruct) -> dict[str, tuple[int, int]]:
    """Return address and bytes of each part of a weight, by the struct's fields."""
    sizes = {
        "codes": codes_bytes(struct),
        "scales": scales_bytes(struct) if struct.scales else 0,
        "offsets": scales_bytes(struct) if struct.offsets else 0,
        "bias": 4 * int(struct.out_features),
        "input_order": 4 * int(struct.in_features),
    }
    pointers = {name: getattr(struct, name) for name in sizes}
    return {name: (address, sizes[name]) for name, address in pointers.items() if address}


def _tiles(struct: LinearStruct) -> int:
    return -(-int(struct.out_features) // LANES)


def codes_bytes(struct: LinearStruct) -> int:
    tiles = _tiles(struct)
    if struct.scale_format == ScaleFormat.TRELLIS:  # whole sequences, over four tiles
        tiles = -(-tiles * LANES // BLOCK) * (BLOCK // LANES)
    return tiles * LANES * int(struct.in_features) * _BITS[Format(struct.format)] // 8


def scales_bytes(struct: LinearStruct) -> int:
    lanes, width = _tiles(struct) * LANES, int(struct.in_features)
    if struct.scale_format in _RECORD_BYTES:
        return lanes * (width // SUPERBLOCK) * _RECORD_BYTES[ScaleFormat(struct.scale_format)]
    if struct.scale_format == ScaleFormat.TRELLIS:
        return 4 * lanes
    one = 8 if struct.scale_format == ScaleFormat.E8M0 else _BITS[Format(struct.scale_format)]
    return lanes * (width // int(struct.group)) * one // 8
