"""Sealing by definition: dequantize, requantize, pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_page.codes import quantize_int4
from appliance.kernels.kv_page.layout import (
    KEYS,
    PAGE_TOKENS,
    VALUES,
    channel_offset,
    key_dim,
    record_offset,
    stored_dims,
    value_offset,
)
from appliance.kernels.kv_page.reference import pack, read_pages

if TYPE_CHECKING:
    from torch import Tensor

    from appliance.kernels.cache.sealed_blocks import SealedBlocks


def seal_moves(cache: SealedBlocks, moves: Tensor) -> None:
    """Seal moves, (n, 2) int64: open block and block; a negative open block is padding."""
    opened, blocks = moves[moves[:, 0] >= 0].unbind(1)
    seal(cache, opened.tolist(), blocks.tolist())


def seal(cache: SealedBlocks, slots: list[int], blocks: list[int]) -> None:
    """Quantize full open blocks into blocks, in place; the open blocks keep their content.

    Args:
        slots: open blocks, all 32 tokens written.
        blocks: destination of each.
    """
    head_dim, form = cache.head_dim, cache.format.value
    keys, values = read_pages(cache.open.pages[slots], "int8", head_dim, None)
    shape = (len(slots), PAGE_TOKENS, cache.num_kv_heads, head_dim)
    keys, values = (x.view(shape).transpose(1, 2).float() for x in (keys, values))
    value_codes, value_scales, value_offsets = quantize_int4(values)
    pages = torch.zeros_like(cache.closed.pages[blocks])
    start = value_offset(form, head_dim)
    record = record_offset(form, head_dim)
    pages[..., start:record] = pack(value_codes, VALUES[4])
    by_token = torch.stack((value_scales, value_offsets), dim=-1).flatten(-2)
    keys_end = record + 2 * by_token.shape[-1]
    pages[..., record:keys_end] = by_token.view(torch.uint8)
    if cache.format is KVFormat.K8V4:
        opened = cache.open.pages[slots]
        pages[..., :start] = opened[..., :start]
        of_tokens = opened[..., record_offset("int8", head_dim) :].unflatten(-1, (PAGE_TOKENS, 4))
        pages[..., keys_end:] = of_tokens[..., :2].flatten(-2)
        cache.closed.pages[blocks] = pages
        return
    channels = channel_offset(head_dim)
    # By channel: the tokens of one dimension share a scale.
    key_codes, key_scales, key_offsets = quantize_int4(keys.transpose(2, 3))
    pages[..., :start] = pack(key_codes.transpose(2, 3), KEYS[4])
    stored = stored_dims(form, head_dim)
    by_row = torch.zeros((*pages.shape[:2], 2, stored), dtype=torch.float16, device=pages.device)
    for row in range(stored):
        if key_dim(row) < head_dim:
            by_row[:, :, 0, row] = key_scales[..., key_dim(row)]
            by_row[:, :, 1, row] = key_offsets[..., key_dim(row)]
    pages[..., channels:] = by_row.flatten(-2).view(torch.uint8)
    cache.closed.pages[blocks] = pages
