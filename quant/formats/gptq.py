"""The layout of GPTQ checkpoints, versions 1 and 2: 4 or 8 bits, codes along the inputs.

A weight (out, in) is stored as qweight int32 (in * bits / 32, out), qzeros int32 (in / group, out *
bits / 32), scales float16 (in / group, out) and g_idx int32 (in,), the group of each input; w = (q
- zero point) * scale, low field first. Version 1 stores each zero point minus one. The layout
belongs to the AutoGPTQ and GPTQModel projects.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.packed import OffsetKind, PackedWeight
from appliance.quant.formats.float16 import exact_enough
from appliance.quant.formats.grouping import integer_zero_points, scales_in_groups
from appliance.quant.formats.input_groups import even_groups, listed_groups
from appliance.quant.formats.pack import bytes_to_words, pack_codes, unpack_codes, words_to_bytes
from appliance.quant.formats.word_packed import G_IDX, QWEIGHT, QZEROS, SCALES, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

METHOD = "gptq"
V1, V2 = "gptq", "gptq_v2"
BITS = (4, 8)


@dataclass(frozen=True, slots=True)
class GptqLayout:
    """Bits, group size and version of a GPTQ checkpoint.

    Attributes:
        bits: 4 or 8.
        group_size: inputs that share a scale; None means all.
        version: V1 or V2.
        borrows: version 1's ones were subtracted from whole words, as GPTQModel does, so that a
            zero point of 0 borrows from its neighbour; other writers wrap each field.
    """

    bits: int
    group_size: int | None
    version: str = V2
    borrows: bool = False

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
        if groups.order is not None:
            codes = pack_codes(unpack_codes(codes, self.bits)[:, groups.order], self.bits)
        zero_points = self._zero_points(parts[QZEROS])[:, :out_features].T
        return PackedWeight(
            codes=codes,
            scale=scale[:, groups.source].contiguous(),
            offset=zero_points[:, groups.source].to(scale.dtype),
            offset_kind=OffsetKind.ZERO_POINT,
            bits=self.bits,
            group_size=groups.size,
            input_order=None if groups.order is None else arrays.like(codes, groups.order),
        )

    def _zero_points(self, words: Tensor) -> Tensor:
        """Unpack (groups, words) int32 zero points into (groups, out_features) uint8."""
        if self.version == V1 and self.borrows:
            ones = sum(1 << shift for shift in range(0, 32, self.bits))
            words = arrays.cast((words.long() + ones) & 0xFFFFFFFF, "uint32")
            words = arrays.viewed(words, "int32")
        fields = unpack_codes(words_to_bytes(words, words.shape[1] * 4), self.bits)
        if self.version == V1 and not self.borrows:
            return (fields + 1) & ((1 << self.bits) - 1)
        return fields


def declared_layout(config: Mapping[str, Any]) -> GptqLayout:
    """Read one layout for all modules from a config, or raise UnsupportedModelError."""
    bits, size = config.get("bits"), config.get("group_size")
    version = config.get("checkpoint_format", V1)
    dynamic = config.get("dynamic") or {}
    changed = [rule for rule in dynamic if not str(rule).startswith("-")]
    if bits not in BITS:
        what = f"{bits!r} bits"
    elif version not in (V1, V2):
        what = f"checkpoint_format {version!r}"
    elif not isinstance(size, int) or size == 0 or size < -1:
        what = f"a group size of {size!r}"
    elif changed:
        what = f"settings of its own for {changed[0]!r}"
    else:
        meta = config.get("meta")
        writers = meta.get("quantizer", ()) if isinstance(meta, dict) else ()
        return GptqLayout(
            bits, None if size == -1 else size, version, borrows="gptqmodel" in str(writers)
        )
    raise UnsupportedModelError(
        f"this GPTQ model has {what}; supported are checkpoint formats {V1} and {V2} with 4 or 8"
        " bits for all quantized layers"
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
