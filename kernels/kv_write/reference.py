"""KV write as it is defined: cast or quantize each row, then put it into its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.kv_cache import KVBlocks

INT8_MAX = 127
FLOAT16_MAX = 65504.0


def write_kv(key: Tensor, value: Tensor, cache: KVBlocks, slot_mapping: Tensor) -> None:
    """Write every row's key and value into its slot, in place.

    Args:
        key: (num_tokens, num_kv_heads, head_dim), any float dtype.
        value: same shape and dtype.
        cache: the blocks of one layer.
        slot_mapping: (num_tokens,) int64, block * block_size + offset; no slot twice.
    """
    if cache.format.is_quantized:
        assert cache.key_scales is not None
        assert cache.value_scales is not None
        codes, scales = quantize_int8(torch.stack((key, value)))
        key, value = codes.unbind()
        _scatter(cache.key_scales, scales[0], slot_mapping)
        _scatter(cache.value_scales, scales[1], slot_mapping)
    _scatter(cache.keys, key, slot_mapping)
    _scatter(cache.values, value, slot_mapping)


def quantize_int8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize symmetrically, one scale per row: x is about codes * scale.

    The codes are made with the scale as float16 stores it, so that its rounding costs nothing.
    A row that is zero, or too small for a float16 scale, becomes scale 0 and codes 0.

    Args:
        x: (..., head_dim), any float dtype.

    Returns:
        Codes (..., head_dim) int8 in -127..127 and scales (...,) float16.
    """
    x = x.float()
    scales = (x.abs().amax(dim=-1) / INT8_MAX).clamp(max=FLOAT16_MAX).half()
    divisor = scales.float().unsqueeze(-1)
    codes = (x / divisor).round().clamp(-INT8_MAX, INT8_MAX)
    return torch.where(divisor == 0, 0.0, codes).to(torch.int8), scales


def _scatter(blocks: Tensor, rows: Tensor, slot_mapping: Tensor) -> None:
    """Copy rows (num_tokens, ...) into blocks (num_blocks, block_size, ...)."""
    blocks.flatten(0, 1).index_copy_(0, slot_mapping, rows.to(blocks.dtype))
