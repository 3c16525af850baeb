"""Latent attention (arXiv 2405.04434) by definition, with queries in the space of the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.attention.reference import visible
from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.rows.ragged import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache


def latent_attention(
    query: Tensor, cache: AnyLayerCache, work: object, *, scale: float, latent: int
) -> Tensor:
    """Attend from every row to its own sequence, causally.

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
