"""The layouts of AWQ checkpoints: 4 bits, versions GEMM, GEMV and GEMV_fast.

A weight (out, in) of GEMM is stored as qweight int32 (in, out / 8), qzeros int32 (in / group,
out / 8) and scales float16 (in / group, out), with w = (q - zero point) * scale. Nibble i of a word
belongs to output NIBBLES[i] of its eight. GEMV has the outputs first and plain words; GEMV_fast has
float16 zeros of -zero point * scale. The layouts belong to the AutoAWQ project.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from appliance.errors import UnsupportedModelError
from appliance.kernels import arrays
from appliance.kernels.weights.packed import OffsetKind, PackedWeight
from appliance.quant.formats.input_groups import even_groups
from appliance.quant.formats.pack import (
    exact_enough,
    integer_zero_points,
    pack_codes,
    scales_in_groups,
    unpack_codes,
    words_to_bytes,
)
from appliance.quant.formats.word_packed import QWEIGHT, QZEROS, SCALES, Layout

if TYPE_CHECKING:
    from collections.abc import Mapping

    from torch import Tensor

METHOD = "awq"
BITS = 4
PER_WORD = 8
NIBBLES = (0, 2, 4, 6, 1, 3, 5, 7)
FAST_ROWS = 4  # outputs whose codes GEMV_fast puts into one word of 16 bits


@dataclass(frozen=True, slots=True)
class AwqLayout:
    """Layout with one group size; None means one group per output."""

    group_size: int | None
    bits: int = BITS

    @property
    def code_bits(self) -> int:
        return self.bits

    def fitted(self, parts: Mapping[str, tuple[int, ...]]) -> AwqLayout:
        """Return this layout, which all modules have."""
        return self

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


@dataclass(frozen=True, slots=True)
class GemvLayout:
    """Layouts GEMV and, if `is_fast`, GEMV_fast, which only are read."""

    group_size: int | None
    is_fast: bool = False

    @property
    def bits(self) -> int:
        return BITS

    @property
    def code_bits(self) -> int:
        return BITS

    def fitted(self, parts: Mapping[str, tuple[int, ...]]) -> GemvLayout:
        """Return this layout, which all modules have."""
        return self

    def shape(self, words: tuple[int, ...]) -> tuple[int, int]:
        """Return (out_features, in_features) of a weight from the shape of its qweight."""
        return (words[0] * FAST_ROWS, words[1]) if self.is_fast else (words[0], words[1] * PER_WORD)

    def layout(self, shape: tuple[int, int]) -> Layout:
        """Return the type and shape of each part; groups are padded."""
        out_features, in_features = shape
        size = self.group_size or in_features
        # AutoAWQ's calculate_zeros_width: small groups are padded to more words than one.
        multiple = 1 if size >= 128 else 2 if size == 64 else 4
        words = math.ceil(in_features // size / PER_WORD / multiple) * multiple
        if self.is_fast:
            return {
                QWEIGHT: ("int16", (out_features // FAST_ROWS, in_features)),
                QZEROS: ("float16", (words * PER_WORD, out_features)),
                SCALES: ("float16", (words * PER_WORD, out_features)),
            }
        return {
            QWEIGHT: ("int32", (out_features, in_features // PER_WORD)),
            QZEROS: ("int32", (out_features, words)),
            SCALES: ("float16", (out_features, words * PER_WORD)),
        }

    def decode(self, name: str, parts: Mapping[str, Tensor]) -> PackedWeight:
        words, scale, zeros = parts[QWEIGHT], parts[SCALES], parts[QZEROS]
        _, in_features = self.shape(tuple(words.shape))
        if self.is_fast:
            scale, offset = scale.T, zeros.T.to(scale.dtype)
            codes = pack_codes(_from_fast_words(words), BITS)
        else:
            codes = words_to_bytes(words, in_features // 2)
            offset = unpack_codes(words_to_bytes(zeros, zeros.shape[1] * 4), BITS).to(scale.dtype)
        groups = even_groups(in_features, self.group_size or in_features)
        return PackedWeight(
            codes=codes,
            scale=scale[:, groups.source].contiguous(),
            offset=offset[:, groups.source].contiguous(),
            offset_kind=OffsetKind.ADDITIVE if self.is_fast else OffsetKind.ZERO_POINT,
            bits=BITS,
            group_size=groups.size,
        )


def declared_layout(config: Mapping[str, Any]) -> AwqLayout | GemvLayout:
    """Read the layout from a config, or raise UnsupportedModelError.

    GPTQModel calls the version `checkpoint_format` or `format`.
    """
    named = (config.get(key) for key in ("version", "checkpoint_format", "format"))
    version = str(next((name for name in named if name), "gemm")).lower()
    bits = config.get("bits", config.get("w_bit"))
    size = config.get("group_size", config.get("q_group_size"))
    if config.get("backend") == "llm-awq":
        what = "backend 'llm-awq'"
    elif version not in ("gemm", "gemv", "gemv_fast"):
        what = f"version {version!r}"
    elif bits != BITS:
        what = f"{bits!r} bits"
    elif not isinstance(size, int) or size == 0 or size < -1:
        what = f"a group size of {size!r}"
    else:
        group_size = None if size == -1 else size
        if version == "gemm":
            return AwqLayout(group_size)
        return GemvLayout(group_size, is_fast=version == "gemv_fast")
    raise UnsupportedModelError(
        f"this AWQ model has {what}; supported are versions gemm, gemv and gemv_fast with 4 bits"
        " and any group size; take the model's gemm form, or quantize the 16-bit model that it was"
        " made from with appliance quantize"
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


def _from_fast_words(words: Tensor) -> Tensor:
    """Unpack GEMV_fast's words (out / 4, in) int16 into codes (out, in) uint8.

    A word has a code of each of four outputs' neighbours: AutoAWQ interleaves 64 inputs of four
    outputs, after it has reordered each 32 inputs for two steps of unpacking.
    """
    blocks, width = words.shape
    nibbles = unpack_codes(arrays.viewed(words.flatten(), "uint8").view(blocks, -1), BITS)
    rows = nibbles.view(blocks, width // 64, FAST_ROWS, 64).numpy().swapaxes(1, 2)
    stored = rows.reshape(blocks * FAST_ROWS, width // 32, 4, 2, 4)
    pairs = stored.swapaxes(-1, -2).reshape(blocks * FAST_ROWS, width // 32, 4, 4, 2)
    plain = np.ascontiguousarray(pairs.swapaxes(2, 3)).reshape(blocks * FAST_ROWS, width)
    return arrays.like(words, plain)  # type: ignore[no-any-return]
