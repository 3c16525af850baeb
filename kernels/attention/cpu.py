"""Paged attention on the CPU: gathers a call's keys and values, then calls torch's attention.

Reading contiguous blocks in place gained at most a sixth for one sequence and lost for several: the
gather takes about a tenth of the time. Only slots that the batch owns are read. A row's last bits
may differ with the rows beside it, as torch chooses the order of its sums by shape.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from appliance.kernels.attention import reference
from appliance.kernels.attention.cpu_plan import (
    CpuAttentionWork,
    DecodeGroup,
    PrefillChunk,
    plan_attention,
    single_rows,
)
from appliance.kernels.cache.kv_cache import KVBlocks

if TYPE_CHECKING:
    from appliance.kernels.cache.decoder_cache import AnyLayerCache


__all__ = ["paged_attention", "plan_attention"]


def paged_attention(
    query: Tensor,
    cache: AnyLayerCache,
    work: object,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    sees: Tensor | None = None,
) -> Tensor:
    """Attend from every row to its own sequence; see `reference.paged_attention`.

    Quantized pages go through the reference. INT8 keys and values are dequantized to float32 and
    computed in float32, which the CPU does faster than bfloat16; otherwise the wider of the two
    dtypes is used.

    Args:
        query: (num_tokens, num_heads, head_dim).
        cache: blocks of this layer, with this step's keys and values written.
        scale: multiplies q . k.
        window: a row sees this many latest positions, its own included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (num_heads,), a score for each head that has no value.
        sees: (num_tokens,) int32, the leading tokens that each row sees; None is those up to its
            own.

    Returns:
        (num_tokens, num_heads, head_dim), dtype of query.
    """
    assert isinstance(work, CpuAttentionWork)
    if not isinstance(cache, KVBlocks):  # only GPUs have kernels for pages
        return reference.paged_attention(
            query,
            cache,
            work.batch,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks=sinks,
            sees=sees,
        )
    out = query.new_empty(query.shape)
    if cache.format.is_quantized:
        query = query.float()
    else:
        query = query.to(torch.promote_types(query.dtype, cache.keys.dtype))
    decodes = single_rows(work.batch)
    layout = work.layout(window, sees)
    for group in layout.groups:
        if group.rows is None:
            out[:decodes] = _decode(query[:decodes], cache, group, scale, softcap, sinks)
        else:
            rows = query.index_select(0, group.rows)
            rows = _decode(rows, cache, group, scale, softcap, sinks)
            out.index_copy_(0, group.rows, rows.to(out.dtype))
    for chunk in layout.chunks:
        rows = query[chunk.start : chunk.stop]
        out[chunk.start : chunk.stop] = _prefill(rows, cache, chunk, scale, softcap, sinks)
    return out


def _gather(cache: KVBlocks, slots: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Gather and dequantize keys and values, (len(slots), num_kv_heads, head_dim) each."""
    return (
        _gather_one(cache.keys, cache.key_scales, slots, dtype),
        _gather_one(cache.values, cache.value_scales, slots, dtype),
    )


def _gather_one(blocks: Tensor, scales: Tensor | None, slots: Tensor, dtype: torch.dtype) -> Tensor:
    gathered = blocks.flatten(0, 1).index_select(0, slots).to(dtype)
    if scales is None:
        return gathered
    scales = scales.flatten(0, 1).index_select(0, slots).to(dtype)
    return gathered.mul_(scales.unsqueeze(-1))


def _decode(
    query: Tensor,
    cache: KVBlocks,
    group: DecodeGroup,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from one row of each sequence: (group, num_heads, head_dim), as is the result.

    The query heads of a KV head are the rows of its matrix products.
    """
    size, num_heads, head_dim = query.shape
    num_kv_heads = cache.keys.shape[2]
    heads = num_heads // num_kv_heads
    keys, values = _gather(cache, group.slots, query.dtype)
    shape = (size, -1, num_kv_heads, head_dim)
    out = _attend(
        query.view(size, num_kv_heads, heads, head_dim),
        keys.view(shape).transpose(1, 2),
        values.view(shape).transpose(1, 2),
        group.mask,
        scale,
        softcap,
        None if sinks is None else sinks.view(num_kv_heads, heads, 1),
    )
    return out.reshape(size, num_heads, head_dim)


def _prefill(
    query: Tensor,
    cache: KVBlocks,
    chunk: PrefillChunk,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from the rows of a chunk, (rows, num_heads, head_dim), and return the same shape.

    KV heads are the batch and their query heads the heads, so keys are not repeated.
    """
    rows, num_heads, head_dim = query.shape
    keys, values = _gather(cache, chunk.slots, query.dtype)
    num_keys, num_kv_heads, _ = keys.shape
    heads = num_heads // num_kv_heads
    shape = (num_kv_heads, heads, num_keys, head_dim)
    out = _attend(
        query.view(rows, num_kv_heads, heads, head_dim).permute(1, 2, 0, 3),
        keys.transpose(0, 1).unsqueeze(1).expand(shape),
        values.transpose(0, 1).unsqueeze(1).expand(shape),
        chunk.mask,
        scale,
        softcap,
        None if sinks is None else sinks.view(num_kv_heads, heads, 1, 1),
    )
    return out.permute(2, 0, 1, 3).reshape(rows, num_heads, head_dim)


def _attend(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    scale: float,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """Attend from (batch, heads, rows, head_dim) to (batch, heads, keys, head_dim).

    `sinks` broadcast to (batch, heads, rows, 1).
    """
    if softcap is None and sinks is None:
        return functional.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, scale=scale
        )
    # torch's attention takes nothing between scores and softmax.
    scores = torch.matmul(query.float(), key.float().transpose(-1, -2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    scores.add_(mask)
    if sinks is not None:
        scores = torch.cat((scores, sinks.float().expand(*scores.shape[:-1], 1)), dim=-1)
    weights = scores.softmax(dim=-1)[..., : key.shape[-2]]
    return torch.matmul(weights, value.float()).to(query.dtype)
