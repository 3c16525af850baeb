"""Paged attention by definition: one sequence at a time, gather, dequantize, softmax, sum."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.sealed_blocks import SealedBlocks
from appliance.kernels.rows.ragged import RaggedBatch

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.decoder_cache import AnyLayerCache


def plan_attention(batch: RaggedBatch, block_size: int) -> RaggedBatch:
    """Prepare a step: the reference reads the batch itself."""
    assert block_size > 0
    return batch


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
    """Attend from every row to its own sequence, causally unless `sees` says more.

    Query head h reads KV head h // (num_heads / num_kv_heads). All arithmetic is float32, or
    float64 if the query is float64.

    Args:
        query: (num_tokens, num_heads, head_dim).
        cache: blocks of this layer, with this step's keys and values written.
        work: the RaggedBatch from `plan_attention`.
        scale: multiplies q . k.
        window: a row sees this many latest positions, its own included; None is all.
        softcap: scores become softcap * tanh(scores / softcap).
        sinks: (num_heads,), for each head a score that counts in the softmax but has no value.
        sees: (num_tokens,) int32, the leading tokens that each row sees; see `RaggedBatch`. A
            window counts back from the row itself. None is those up to its own.

    Returns:
        (num_tokens, num_heads, head_dim), dtype of query.
    """
    assert isinstance(work, RaggedBatch)
    dtype = torch.float64 if query.dtype == torch.float64 else torch.float32
    out = torch.empty_like(query)
    row = 0
    parts = zip(work.host_query_lens, work.host_context_lens, work.block_tables, strict=True)
    for i, (rows, context, blocks) in enumerate(parts):
        if not rows:  # padding
            continue
        table = blocks.tolist()
        q = query[row : row + rows].to(dtype)  # (rows, num_heads, head_dim)
        # The last row sees most, perhaps tokens that the next sequences have rows of.
        end = context if sees is None else int(sees[row + rows - 1])
        if isinstance(cache, SealedBlocks):
            assert work.sealed is not None
            size, closed_len = cache.block_size, work.sealed.host_lens[i]
            pieces = 1 + (end - 1) // size - (context - 1) // size
            opened = sum(work.sealed.host_open_tables[i : i + pieces], ())
            k, v = cache.gather(table, opened, closed_len, end, dtype)
        else:
            k, v = cache.gather(table, end, dtype)
        group = q.shape[1] // k.shape[1]
        k = k.repeat_interleave(group, dim=1)  # (end, num_heads, head_dim)
        v = v.repeat_interleave(group, dim=1)
        scores = torch.einsum("qhd,khd->hqk", q, k) * scale
        if softcap is not None:
            scores = softcap * torch.tanh(scores / softcap)
        last = None if sees is None else sees[row : row + rows] - 1
        seen = visible(context - rows, rows, end, window, last, device=query.device)
        scores = scores.masked_fill(~seen, -torch.inf)
        if sinks is not None:
            sink = sinks.to(dtype).view(-1, 1, 1).expand(-1, rows, 1)
            scores = torch.cat((scores, sink), dim=-1)
        weights = scores.softmax(dim=-1)[..., :end]
        out[row : row + rows] = torch.einsum("hqk,khd->qhd", weights, v).to(query.dtype)
        row += rows
    return out


def visible(
    first: int,
    rows: int,
    context: int,
    window: int | None,
    last: Tensor | None = None,
    *,
    device: torch.device,
) -> Tensor:
    """Return the keys, of `context`, that rows first .. first + rows - 1 see: (rows, context) bool.

    Args:
        last: (rows,), the last key that each sees; None is its own.
    """
    position = torch.arange(first, first + rows, device=device).unsqueeze(1)
    key = torch.arange(context, device=device)
    seen = key <= (position if last is None else last.unsqueeze(1))
    return seen if window is None else seen & (key > position - window)
