"""KV write by definition: cast or quantize each row, then store it in its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.kv_page.codes import hadamard
from appliance.kernels.kv_page.reference import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.operations import HeadNorms

INT8_MAX = 127
FLOAT16_MAX = 65504.0


def write_kv(key: Tensor, value: Tensor, cache: LayerCache, slot_mapping: Tensor) -> None:
    """Write every row's key and value into its slot, in place.

    Args:
        key: (num_tokens, num_kv_heads, head_dim), any float dtype; rotated as the format asks for.
        value: same shape and dtype.
        cache: the blocks of one layer.
        slot_mapping: (num_tokens,) int64, block * block_size + offset; no slot twice. In pages,
            a row with a negative slot is not written.
    """
    if isinstance(cache, KVPages):
        write_rows(cache.pages, cache.layout, key, value, cache.head_scales, slot_mapping)
        return
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

    Codes are computed from the float16 scale, so its rounding costs nothing. A row of zeros, or one
    too small for a float16 scale, gets scale 0 and codes 0.

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


def rotate_and_write_with(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor],
    write_kv: Callable[[Tensor, Tensor, LayerCache, Tensor], None],
) -> Callable[..., Tensor]:
    """Build `rotate_and_write` from a backend's single operations."""

    def rotate_and_write(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor,
        norms: HeadNorms | None = None,
    ) -> Tensor:
        """Bring a step's queries and keys into their final form, and write keys and values.

        Each query and key head is normed and rotated; the cache's mean is subtracted from the keys;
        and the Hadamard transform follows if the format asks for it. Each step rounds to the dtype
        of qkv.

        Args:
            qkv: (num_tokens, num_heads + 2 * num_kv_heads, head_dim): queries, keys, values.
            cos: (num_tokens, rotary_dim / 2) float32.
            sin: same shape.
            cache: the blocks of one layer.
            slot_mapping: (num_tokens,) int64, as `write_kv` takes it.
            norms: of queries and keys, or None.

        Returns:
            The queries, (num_tokens, num_heads, head_dim), dtype of qkv.
        """
        num_rotated = qkv.shape[1] - cache.num_kv_heads
        num_heads = num_rotated - cache.num_kv_heads
        rotated, value = qkv[:, :num_rotated], qkv[:, num_rotated:]
        if norms is not None:
            parts = rotated.split([num_heads, cache.num_kv_heads], dim=1)
            weights = norms.query, norms.key
            rotated = torch.cat(
                [
                    rms_norm(part.reshape(-1, part.shape[-1]), weight, norms.eps).view(part.shape)
                    for part, weight in zip(parts, weights, strict=True)
                ],
                dim=1,
            )
        rotated = rotary(rotated, cos, sin)
        if cache.key_mean is not None:
            keys = (rotated[:, num_heads:].float() - cache.key_mean).to(qkv.dtype)
            rotated = torch.cat((rotated[:, :num_heads], keys), dim=1)
        if cache.format.is_rotated:
            rotated = hadamard(rotated).to(qkv.dtype)
        write_kv(rotated[:, num_heads:], value, cache, slot_mapping)
        return rotated[:, :num_heads]

    return rotate_and_write
