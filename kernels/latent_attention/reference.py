"""Latent attention (arXiv 2405.04434) by definition, with queries in the space of the latents."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.paged_attention.reference import visible
from appliance.kernels.sealed_blocks import SealedBlocks

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.decoder_cache import AnyLayerCache
    from appliance.kernels.ragged import RaggedBatch


def latent_attention(
    query: Tensor, cache: AnyLayerCache, batch: RaggedBatch, *, scale: float, latent: int
) -> Tensor:
    """Attend from every row to its own sequence, causally; all arithmetic is float32.

    A token's latent is stored in two halves, in place of a KV head's key and value.

    Args:
        query: (num_tokens, num_heads, width), as wide as a cached token.
        cache: blocks of this layer, with this step's tokens written.
        scale: multiplies q . k.
        latent: elements of a token that are summed; the others only score.

    Returns:
        (num_tokens, num_heads, latent), dtype of query.
    """
    assert not isinstance(cache, SealedBlocks), "a sealed block holds keys by channel"
    out = torch.empty_like(query[..., :latent])
    row = 0
    parts = zip(batch.host_query_lens, batch.host_context_lens, batch.block_tables, strict=True)
    for rows, context, blocks in parts:
        halves = cache.gather(blocks.tolist(), context, torch.float32)
        tokens = torch.cat(halves, dim=-1).squeeze(1)  # (context, width)
        own = query[row : row + rows].float()
        scores = torch.einsum("qhw,kw->hqk", own, tokens) * scale
        seen = visible(context - rows, rows, context, None, device=query.device)
        weights = scores.masked_fill(~seen, -torch.inf).softmax(dim=-1)
        attended = torch.einsum("hqk,kl->qhl", weights, tokens[:, :latent])
        out[row : row + rows] = attended.to(query.dtype)
        row += rows
    return out
