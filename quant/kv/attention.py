"""Simulates attention over a quantized KV cache for one row of text.

It quantizes and dequantizes keys and values by each format's definition and stores nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.reference import visible
from appliance.kernels.kv_format import KVFormat
from appliance.kernels.kv_page.codes import (
    INT4_CENTRE,
    hadamard,
    quantize_fp8,
    quantize_int4,
    quantize_int8,
)
from appliance.kernels.kv_page.layout import PAGE_TOKENS

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.kv_format import LayerPrecision
    from appliance.model.spec import AttentionSpec

EVERY = 4  # every so many tokens, one is a query


def attend_with(
    spec: AttentionSpec, precision: LayerPrecision, query: Tensor, key: Tensor, value: Tensor
) -> Tensor:
    """Attend over one row of text with a KV cache of a given precision.

    Args:
        precision: of the cache; FP32 is exact.
        query: (rows, num_heads, head_dim) float32, after RoPE, of every `EVERY`th token.
        key: (tokens, num_kv_heads, head_dim) float32, after RoPE.
        value: same shape.

    Returns:
        (rows, num_heads * head_dim).
    """
    mean = 0.0 if precision.key_mean is None else precision.key_mean
    closed, opened = _stored(precision, key - mean, value)
    group = query.shape[1] // key.shape[1]
    own, seen = (mask[::EVERY] for mask in _visible(len(key), spec, query.device))

    def scores(keys: Tensor) -> Tensor:
        full = (keys + mean).repeat_interleave(group, dim=1)
        found = torch.einsum("qhd,khd->hqk", query, full) * spec.scale
        cap = spec.softcap
        return found if cap is None else cap * torch.tanh(found / cap)

    def weighed(weights: Tensor, values: Tensor) -> Tensor:
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, dim=1))

    if opened is None:
        weights = scores(closed[0]).masked_fill(~seen, -torch.inf).softmax(-1)
        return weighed(weights, closed[1]).flatten(1)
    mixed = torch.where(own, scores(opened[0]), scores(closed[0]))
    weights = mixed.masked_fill(~seen, -torch.inf).softmax(-1)
    return (weighed(weights * own, opened[1]) + weighed(weights * ~own, closed[1])).flatten(1)


def _visible(count: int, spec: AttentionSpec, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return (tokens, tokens) bool masks: keys in the query's own block, and visible keys."""
    place = torch.arange(count, device=device)
    blocks = place // PAGE_TOKENS
    seen = visible(0, count, count, spec.window, device=device)
    if spec.chunk is not None:
        chunks = place // spec.chunk
        seen = seen & (chunks.unsqueeze(1) == chunks)
    return blocks.unsqueeze(1) == blocks, seen


Pair = tuple["Tensor", "Tensor"]


def _stored(precision: LayerPrecision, key: Tensor, value: Tensor) -> tuple[Pair, Pair | None]:
    """Return keys and values as stored in closed blocks and, if sealed, in open blocks."""
    form = precision.format
    match form:
        case KVFormat.FP8:
            assert precision.head_scales is not None
            pair = zip((key, value), precision.head_scales.unsqueeze(-1), strict=True)
            keys, values = (
                quantize_fp8(x, scale).view(torch.float8_e4m3fn).float() * scale
                for x, scale in pair
            )
            return (keys, values), None
        case KVFormat.INT4:
            return (hadamard(_nibbles(hadamard(key))), _nibbles(value)), None
        case KVFormat.INT8 | KVFormat.K8V4 | KVFormat.INT4_SEALED:
            opened = _bytes(key), _bytes(value)
        case _:
            dtype = form.storage_dtype
            return (key.to(dtype).float(), value.to(dtype).float()), None
    if form is KVFormat.INT8:
        return opened, None
    keys = opened[0] if form is KVFormat.K8V4 else _by_channel(opened[0])
    return (keys, _nibbles(opened[1])), opened


def _bytes(x: Tensor) -> Tensor:
    codes, scales = quantize_int8(x)
    return (codes.float() - 128) * scales.float().unsqueeze(-1)


def _nibbles(x: Tensor) -> Tensor:
    codes, scales, offsets = quantize_int4(x)
    return (codes.float() - INT4_CENTRE) * scales.float().unsqueeze(-1) + offsets.unsqueeze(-1)


def _by_channel(keys: Tensor) -> Tensor:
    """Quantize keys by channel as sealed blocks do, padding the last block with the last key."""
    count = len(keys)
    fill = keys[-1:].expand(-count % PAGE_TOKENS, -1, -1)
    blocks = torch.cat((keys, fill)).unflatten(0, (-1, PAGE_TOKENS)).movedim(1, -1)
    return _nibbles(blocks).movedim(-1, 1).flatten(0, 1)[:count]
