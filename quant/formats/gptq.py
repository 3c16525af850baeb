"""The layout of GPTQ and AutoRound checkpoints, versions 1 and 2: 2 to 8 bits, along the inputs.

A weight (out, in) is stored as qweight int32 (in * bits / 32, out), qzeros int32 (in / group, out *
bits / 32), scales float16 (in / group, out) and g_idx int32 (in,), the group of each input; w = (q
- zero point) * scale. Codes lie end to end, low bits first. Version 1 stores each zero point minus
one. The layout belongs to the AutoGPTQ, GPTQModel and AutoRound projects.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.input_groups import even_groups, listed_groups
from appliance.quant.formats.pack import (
    bytes_to_words,
    exact_enough,
    integer_zero_points,
    pack_codes,
    scales_in_groups,
    unpack_stream,
    words_to_bytes,
)
from appliance.quant.formats.scheme import GROUP_SIZES
from appliance.quant.formats.word_packed import G_IDX, QWEIGHT, QZEROS, SCALES, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray
    from torch import Tensor

METHOD, AUTO_ROUND = "gptq", "auto-round"
V1, V2 = "gptq", "gptq_v2"
BITS = (4, 8)  # that are written
READ_BITS = range(2, 9)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """Bits, group size and version of a GPTQ checkpoint.

    Attributes:
        bits: 2 to 8 as stored.
        group_size: inputs that share a scale; None means all.
        version: V1 or V2.
        borrows: version 1's ones were subtracted from whole words, as GPTQModel does, so that a
            zero point of 0 borrows from its neighbour; other writers wrap each field.
    """

    bits: int
    group_size: int | None
    version: str = V2
    borrows: bool = False
    varies: bool = False

    @property
    def code_bits(self) -> int:
        """Bits of a code in a `PackedWeight`, 4 or 8."""
        return 4 if self.bits <= 4 else 8

    def fitted(self, parts: Mapping[str, tuple[int, ...]]) -> GptqLayout:
        """Return the layout of one module by the shapes of its parts; this one if none fits."""
        shapes = [parts.get(part, ()) for part in (QWEIGHT, QZEROS, SCALES)]
        if not self.varies or [len(shape) for shape in shapes] != [2, 2, 2]:
            return self
        (words, rows), (groups, zero_words), (scale_groups, _) = shapes
        if groups != scale_groups:
            return self
        for bits in (self.bits, *READ_BITS):
            width, rest = divmod(words * 32, bits)
            if rest or math.ceil(rows * bits / 32) != zero_words:
                continue
            for size in (self.group_size or width, width // groups if groups else 0, *GROUP_SIZES):
                if size and math.ceil(width / size) == groups:
                    return replace(self, bits=bits, group_size=size)
        return self

    def shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return (out_features, in_features) of a weight from the shape of its qweight."""
        return words[1], words[0] * 32 // self.bits

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return the type and shape of each part, g_idx excluded."""
        out_features, in_features = shape
        groups = -(-in_features // (self.group_size or in_features))
        return {
            QWEIGHT: ("int32", (in_features * self.bits // 32, out_features)),
            QZEROS: ("int32", (groups, -(-out_features * self.bits // 32))),
            SCALES: ("float16", (groups, out_features)),
        }

    def encode(self, name: str, weight: PackedWeight) -> dict[str, Tensor]:
        """Convert a weight into its stored parts; `group_size` must divide the weight's.

        Raises:
            QuantizeError: float16 cannot hold a scale.
        """
        in_features = weight.shape[1]
        group_size = self.group_size or in_features
        scale = scales_in_groups(weight.scale, weight.group_size, group_size)
        zero_points = scales_in_groups(integer_zero_points(weight), weight.group_size, group_size)
        if self.version == V1:
            zero_points = (zero_points - 1) & ((1 << self.bits) - 1)
        assert self.bits in BITS, self.bits
        return {
            QWEIGHT: bytes_to_words(weight.codes.contiguous()).T.contiguous(),
            QZEROS: bytes_to_words(pack_codes(zero_points.T.contiguous(), self.bits)),
            SCALES: exact_enough(name, scale).T.contiguous(),
            G_IDX: arrays.like(scale, (np.arange(in_features) // group_size).astype(np.int32)),
        }

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        """Reverse `encode`; a weight with unsorted g_idx gets an `input_order`."""
        words, scale = parts[QWEIGHT], parts[SCALES].T
        out_features, in_features = self.shape(tuple(words.shape))
        size = self.group_size or in_features
        if G_IDX in parts:
            groups = listed_groups(name + G_IDX, parts[G_IDX], size, scale.shape[1])
        else:
            groups = even_groups(in_features, size)
        codes = words_to_bytes(words.T.contiguous(), in_features * self.bits // 8)
        if groups.order is not None or self.bits != self.code_bits:
            plain = unpack_stream(codes, self.bits)
            plain = plain if groups.order is None else plain[:, groups.order]
            codes = pack_codes(plain, self.code_bits)
        zero_points = self._zero_points(parts[QZEROS])[:, :out_features].T
        return PackedWeight(
            codes=codes,
            scale=scale[:, groups.source].contiguous(),
            offset=zero_points[:, groups.source].to(scale.dtype),
            offset_kind=OffsetKind.ZERO_POINT,
            bits=self.code_bits,
            group_size=groups.size,
            input_order=None if groups.order is None else arrays.like(codes, groups.order),
        )

    def _zero_points(self, words: Tensor) -> Tensor:
        """Unpack (groups, words) int32 zero points into (groups, out_features) uint8."""
        if self.version == V1 and self.borrows:
            ones = arrays.like(words, np.resize(_ones(self.bits), words.shape[1]))
            words = arrays.cast((words.long() + ones) & 0xFFFFFFFF, "uint32")
            words = arrays.viewed(words, "int32")
        fields = unpack_stream(words_to_bytes(words, words.shape[1] * 4), self.bits)
        if self.version == V1 and not self.borrows:
            return (fields + 1) & ((1 << self.bits) - 1)
        return fields


def _ones(bits: int) -> NDArray[np.int64]:
    """Return the words that hold 32 fields of one, (bits,) int64."""
    stream = sum(1 << start for start in range(0, 32 * bits, bits))
    return np.array([stream >> 32 * word & 0xFFFFFFFF for word in range(bits)], dtype=np.int64)


def declared_layout(config: Mapping[str, Any]) -> GptqLayout:
    """Read the layout from a GPTQ config, or raise UnsupportedModelError.

    Neither the order of calibration nor anything else of how the codes were found matters.
    """
    version = config.get("checkpoint_format") or config.get("format") or V1
    packing = config.get("pack_dtype") or "int32"
    dynamic = config.get("dynamic") or {}
    meta = config.get("meta")
    if config.get("is_marlin_format"):
        version = "marlin"
    if version not in (V1, V2):
        raise _unsupported(f"checkpoint_format {version!r}", config)
    if packing != "int32":
        raise _unsupported(f"pack_dtype {packing!r}", config)
    if not isinstance(dynamic, dict):
        raise _unsupported(f"dynamic rules of {dynamic!r}", config)
    writers = meta.get("quantizer", ()) if isinstance(meta, dict) else ()
    return _layout(
        config,
        str(version),
        borrows="gptqmodel" in str(writers),
        varies=any(not str(rule).startswith("-") for rule in dynamic),
    )


def auto_round_layout(config: Mapping[str, Any], packing: str) -> GptqLayout:
    """Read the layout of AutoRound's integers, or raise UnsupportedModelError.

    Args:
        packing: such as "auto_round:auto_gptq", which stores zero points as version 1 does, or
            "auto_round" and "auto_round:gptqmodel", which store them as they are.
    """
    is_first = "gptq" in packing and "gptqmodel" not in packing
    return _layout(config, V1 if is_first else V2, varies=bool(config.get("extra_config")))


def _layout(
    config: Mapping[str, Any], version: str, *, borrows: bool = False, varies: bool = False
) -> GptqLayout:
    bits, size = config.get("bits"), config.get("group_size")
    if type(bits) is not int or bits not in READ_BITS:
        raise _unsupported(f"bits of {bits!r}", config)
    if not isinstance(size, int) or size == 0 or size < -1:
        raise _unsupported(f"a group_size of {size!r}", config)
    return GptqLayout(bits, None if size == -1 else size, version, borrows, varies)


def _unsupported(what: str, config: Mapping[str, Any]) -> UnsupportedModelError:
    method = config.get("quant_method", METHOD)
    return UnsupportedModelError(
        f"this model's quantization settings ({method}) have {what}; supported are 2 to 8 bits in"
        f" int32 words, as checkpoint_format {V1} or {V2}; convert the model to one of these with"
        " GPTQModel, or quantize the 16-bit model that it was made from with appliance quantize"
    )


def quantization_config(layout: GptqLayout, kept: list[str]) -> dict[str, Any]:
    """Build config.json's `quantization_config`; modules in `kept` stay dense."""
    return {
        "quant_method": METHOD,
        "bits": layout.bits,
        "group_size": layout.group_size or -1,
        "desc_act": False,
        "sym": layout.version == V1,
        "lm_head": False,
        "checkpoint_format": layout.version,
        "pack_dtype": "int32",
        "dynamic": {f"-:^{module.replace('.', '[.]')}$": {} for module in kept} or None,
    }
