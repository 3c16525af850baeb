"""The layout of AWQ checkpoints, version GEMM: 4 bits, words along the outputs.

A weight (out, in) is stored as qweight int32 (in, out / 8), qzeros int32 (in / group, out / 8) and
scales float16 (in / group, out), with w = (q - zero point) * scale. Nibble i of a word belongs to
output NIBBLES[i] of its eight. The layout belongs to the AutoAWQ project.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from appliance.errors import UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.quant.formats.float16 import exact_enough
from appliance.quant.formats.grouping import integer_zero_points, scales_in_groups
from appliance.quant.formats.input_groups import even_groups
from appliance.quant.formats.pack import pack_codes
from appliance.quant.formats.word_packed import QWEIGHT, QZEROS, SCALES, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

METHOD = "awq"
BITS = 4
PER_WORD = 8
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """Layout with one group size; None means one group per output."""

    group_size: int | None
    bits: int = BITS

    def shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return (out_features, in_features) of a weight from the shape of its qweight."""
        return words[1] * PER_WORD, words[0]

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return the type and shape of each part."""
        out_features, in_features = shape
        groups = -(-in_features // (self.group_size or in_features))
        return {
            QWEIGHT: ("int32", (in_features, out_features // PER_WORD)),
            QZEROS: ("int32", (groups, out_features // PER_WORD)),
            SCALES: ("float16", (groups, out_features)),
        }

    def encode(self, name: str, weight: PackedWeight) -> dict[str, Tensor]:
        """Convert a weight into its stored parts; `group_size` must divide the weight's.

        Raises:
            QuantizeError: float16 cannot hold a scale.
        """
        group_size = self.group_size or weight.shape[1]
        scale = scales_in_groups(weight.scale, weight.group_size, group_size)
        zero_points = scales_in_groups(integer_zero_points(weight), weight.group_size, group_size)
        return {
            QWEIGHT: _to_words(weight.unpack().T),
            QZEROS: _to_words(zero_points.T),
            SCALES: exact_enough(name, scale).T.contiguous(),
        }

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        scale = parts[SCALES].T
        in_features = parts[QWEIGHT].shape[0]
        groups = even_groups(in_features, self.group_size or in_features)
        return PackedWeight(
            codes=pack_codes(_from_words(parts[QWEIGHT]).T, BITS),
            scale=scale[:, groups.source].contiguous(),
            offset=_from_words(parts[QZEROS]).T[:, groups.source].to(scale.dtype),
            offset_kind=OffsetKind.ZERO_POINT,
            bits=BITS,
            group_size=groups.size,
        )


def declared_layout(config: Mapping[str, Any]) -> AwqLayout:
    """Read the layout, GEMM with 4 bits, or raise UnsupportedModelError for others."""
    version = str(config.get("version", "gemm")).lower()
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    if version != "gemm":
        what = f"version {version!r}"
    elif bits != BITS:
        what = f"{bits!r} bits"
    elif not isinstance(size, int) or size == 0 or size < -1:
        what = f"a group size of {size!r}"
    else:
        return AwqLayout(None if size == -1 else size)
    raise UnsupportedModelError(
        f"this AWQ model has {what}; supported is version gemm with 4 bits and any group size"
    )


def quantization_config(layout: AwqLayout, kept: list[str]) -> dict[str, Any]:
    """Build config.json's `quantization_config`; modules in `kept` stay dense."""
    return {
        "quant_method": METHOD,
        "version": "gemm",
        "bits": BITS,
        "group_size": layout.group_size or -1,
        "zero_point": True,
        "modules_to_not_convert": kept,
    }


def _to_words(codes: Tensor) -> Tensor:
    """Pack (rows, out) uint8 below 16 into (rows, out / 8) int32."""
    nibbles = codes.reshape(codes.shape[0], -1, PER_WORD)[..., NIBBLES]
    pairs = nibbles[..., 0::2] | nibbles[..., 1::2] << 4  # the bytes of a word, lowest first
    words: Tensor = arrays.viewed(pairs.flatten(), "int32").view(pairs.shape[:-1])
    return words


def _from_words(words: Tensor) -> Tensor:
    pairs = arrays.viewed(words.flatten(), "uint8").view(*words.shape, 4)
    codes: Tensor = arrays.empty((*words.shape, PER_WORD), "uint8", words)
    codes[..., NIBBLES[0::2]] = pairs & 0xF
    codes[..., NIBBLES[1::2]] = pairs >> 4
    return codes.flatten(1)
