"""KV write by definition: cast or quantize each row, then store it in its slot."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.head_norms import HeadNormKind
from appliance.kernels.kv_page.codes import hadamard
from appliance.kernels.kv_page.reference import write_rows

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.head_norms import HeadNorms

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

    def norm_of(heads: Tensor, weight: Tensor, norms: HeadNorms) -> Tensor:
        """Norm the heads of queries or of keys."""
        width = weight.shape[0]
        return rms_norm(heads.reshape(-1, width), weight, norms.eps).view(heads.shape)

    def rotate_and_write(
        qkv: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: LayerCache,
        slot_mapping: Tensor | None,
        norms: HeadNorms | None = None,
        query_scale: Tensor | None = None,
        *,
        keys_are_values: bool = False,
    ) -> Tensor:
        """Bring a step's queries and keys into their final form, and write keys and values.

        Queries and keys are normed and rotated; the cache's mean is subtracted from the keys; the
        Hadamard transform follows if the format asks for it; queries are scaled. Each step rounds
        to the dtype of qkv.

        Args:
            qkv: (num_tokens, heads, head_dim): queries, keys, values.
            cos: (num_tokens, rotary_dim / 2) float32.
            sin: same shape.
            cache: the blocks of one layer.
            slot_mapping: (num_tokens,) int64, as `write_kv` takes it. None: qkv are the queries
                alone of a layer that reads the blocks of another.
            norms: of queries and keys, or None.
            query_scale: (num_tokens,) float32, or None.
            keys_are_values: values are the keys before norm and RoPE, and qkv has them once.

        Returns:
            The queries, (num_tokens, num_heads, head_dim), dtype of qkv.
        """
        query, key, value = parts_of(qkv, cache, slot_mapping, keys_are_values=keys_are_values)

        def final(heads: Tensor, weight: Tensor | None, mean: Tensor | None) -> Tensor:
            is_last = norms is not None and norms.kind is HeadNormKind.ROTATED
            if norms is not None and weight is not None and not is_last:
                heads = norm_of(heads, weight, norms)
            heads = rotary(heads, cos, sin)
            if norms is not None and weight is not None and is_last:
                heads = norm_of(heads, weight, norms)
            if mean is not None:
                heads = (heads.float() - mean).to(qkv.dtype)
            return hadamard(heads).to(qkv.dtype) if cache.format.is_rotated else heads

        query = final(query, None if norms is None else norms.query, None)
        if query_scale is not None:
            query = query * query_scale.view(-1, 1, 1).to(query.dtype)
        if key is not None and value is not None and slot_mapping is not None:
            key = final(key, None if norms is None else norms.key, cache.key_mean)
            if norms is not None and norms.value_eps is not None:
                ones = torch.ones(value.shape[-1], device=value.device)
                value = rms_norm(value, ones, norms.value_eps)
            write_kv(key, value, cache, slot_mapping)
        return query

    return rotate_and_write


def parts_of(
    qkv: Tensor, cache: LayerCache, slot_mapping: Tensor | None, *, keys_are_values: bool
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Split qkv (num_tokens, heads, head_dim) of `rotate_and_write` into its three parts."""
    if slot_mapping is None:
        return qkv, None, None
    num_kv_heads = cache.num_kv_heads
    num_heads = qkv.shape[1] - (1 if keys_are_values else 2) * num_kv_heads
    key = qkv[:, num_heads : num_heads + num_kv_heads]
    return qkv[:, :num_heads], key, qkv[:, -num_kv_heads:]
