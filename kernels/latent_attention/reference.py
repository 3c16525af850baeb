"""Latent attention (arXiv 2405.04434) by definition, and what surrounds it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.reference import visible
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.rows.ragged import RaggedBatch

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache
    from appliance.kernels.cache.kv_cache import LayerCache
    from appliance.kernels.norm_rope.weights import NormWeights
    from appliance.kernels.operations import AttentionOverLatents, WriteLatents


def write_latents_with(
    rms_norm: Callable[[Tensor, Tensor, float], Tensor],
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor],
    write_kv: Callable[[Tensor, Tensor, LayerCache, Tensor], None],
) -> WriteLatents:
    """Build `write_latents` from a backend's single operations."""

    def write_latents(
        found: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: AnyLayerCache,
        slot_mapping: Tensor,
        norm: NormWeights,
        query_norm: NormWeights | None = None,
    ) -> Tensor | None:
        """Norm latents, rotate what is beside them, and write both as a token's two halves.

        Each step rounds to the dtype of `found`.

        Args:
            found: (num_tokens, rank + width): latents of queries, or queries; then the token.
            cos: (num_tokens, rotary / 2) float32.
            sin: same shape.
            cache: blocks of the layer, of one head with half of a token.
            slot_mapping: (num_tokens,) int64, as `write_kv` takes it.
            norm: RMS norm of the token's latent.
            query_norm: RMS norm of the latents of queries; None if there are none.

        Returns:
            The normed latents of queries (num_tokens, rank), or None.
        """
        assert not isinstance(cache, SealedBlocks), "a sealed block holds keys by channel"
        latent, rotary_dim = norm.weight.shape[0], 2 * cos.shape[1]
        queries, tokens = found[:, : -(latent + rotary_dim)], found[:, -(latent + rotary_dim) :]
        rotated = rotary(tokens[:, latent:].unsqueeze(1), cos, sin).squeeze(1)
        normed = rms_norm(tokens[:, :latent].contiguous(), norm.weight, norm.eps)
        first, second = torch.cat((normed, rotated), dim=-1).unsqueeze(1).chunk(2, dim=-1)
        write_kv(first.contiguous(), second.contiguous(), cache, slot_mapping)
        if query_norm is None:
            return None
        return rms_norm(queries.contiguous(), query_norm.weight, query_norm.eps)

    return write_latents


def latent_attention_with(
    rotary: Callable[[Tensor, Tensor, Tensor], Tensor], attend: Callable[..., Tensor]
) -> AttentionOverLatents:
    """Build `latent_attention` from a rotation and from `attend_latents`."""

    def latent_attention(
        query: Tensor,
        cos: Tensor,
        sin: Tensor,
        cache: AnyLayerCache,
        work: object,
        *,
        keys: Tensor,
        values: Tensor,
        scale: float,
        query_scale: Tensor | None = None,
    ) -> Tensor:
        """Attend from every row's heads to its own sequence's latents.

        Each step rounds to the dtype of the queries.

        Args:
            query: (num_tokens, num_heads, plain + rotary); the last elements are rotated here.
            cos: (num_tokens, rotary / 2) float32.
            sin: same shape.
            cache: blocks of this layer, with this step's tokens written.
            work: from the backend's plan_attention.
            keys: (num_heads, plain, latent), map queries into the space of latents.
            values: (num_heads, value, latent), map sums of latents to values.
            scale: multiplies q . k.
            query_scale: (num_tokens,) float32, multiplies queries; or None.

        Returns:
            (num_tokens, num_heads, value), dtype of query.
        """
        plain, latent = keys.shape[1:]
        mapped = torch.einsum("nhd,hdl->nhl", query[..., :plain], keys.to(query.dtype))
        rotated = rotary(query[..., plain:].contiguous(), cos, sin)
        query = torch.cat((mapped, rotated), dim=-1)
        if query_scale is not None:
            query = query * query_scale.view(-1, 1, 1).to(query.dtype)
        attended = attend(query, cache, work, scale=scale, latent=latent)
        return torch.einsum("nhl,hvl->nhv", attended, values.to(attended.dtype))

    return latent_attention


def attend_latents(
    query: Tensor, cache: AnyLayerCache, work: object, *, scale: float, latent: int
) -> Tensor:
    """Attend from every row to its own sequence, causally, in the space of the latents.

    A token's latent is stored in two halves, in place of a KV head's key and value. All arithmetic
    is float32, or float64 if the query is float64.

    Args:
        query: (num_tokens, num_heads, width), as wide as a cached token.
        cache: blocks of this layer, with this step's tokens written.
        work: the RaggedBatch from `attention.reference.plan_attention`.
        scale: multiplies q . k.
        latent: elements of a token that are summed; the others only score.

    Returns:
        (num_tokens, num_heads, latent), dtype of query.
    """
    assert isinstance(work, RaggedBatch)
    assert not isinstance(cache, SealedBlocks), "a sealed block holds keys by channel"
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty_like(query[..., :latent])
    row = 0
    parts = zip(work.host_query_lens, work.host_context_lens, work.block_tables, strict=True)
    for rows, context, blocks in parts:
        if not rows:  # padding
            continue
        halves = cache.gather(blocks.tolist(), context, dtype)
        tokens = torch.cat(halves, dim=-1).squeeze(1)  # (context, width)
        own = query[row : row + rows].to(dtype)
        scores = torch.einsum("qhw,kw->hqk", own, tokens) * scale
        seen = visible(context - rows, rows, context, None, device=query.device)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("hqk,kl->qhl", weights, tokens[:, :latent])
        out[row : row + rows] = attended.to(query.dtype)
        row += rows
    return out
