"""Sealing as it is defined: dequantize, quantize anew, pack."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

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
from appliance.kernels.kv_page.reference import pack, quantize_int4, read_pages

if TYPE_CHECKING:
    from appliance.kernels.sealed_pages import SealedPages

SEALED = "int4-sealed"


def seal(cache: SealedPages, slots: list[int], blocks: list[int]) -> None:
    """Quantize full open pages into blocks, in place; the open ones are left as they are.

    Args:
        cache: of one layer.
        slots: open pages, all 32 tokens written.
        blocks: where each goes.
    """
    head_dim = cache.head_dim
    keys, values = read_pages(cache.open.pages[slots], "int8", head_dim, None)
    shape = (len(slots), PAGE_TOKENS, cache.num_kv_heads, head_dim)
    keys, values = (x.view(shape).transpose(1, 2).float() for x in (keys, values))
    # By channel: the rows that share a scale are the tokens of one dimension.
    key_codes, key_scales, key_offsets = quantize_int4(keys.transpose(2, 3))
    value_codes, value_scales, value_offsets = quantize_int4(values)
    pages = torch.zeros_like(cache.closed.pages[blocks])
    start = value_offset(SEALED, head_dim)
    record = record_offset(SEALED, head_dim)
    channels = channel_offset(head_dim)
    pages[..., :start] = pack(key_codes.transpose(2, 3), KEYS[4])
    pages[..., start:record] = pack(value_codes, VALUES[4])
    by_token = torch.stack((value_scales, value_offsets), dim=-1).flatten(-2)
    pages[..., record:channels] = by_token.view(torch.uint8)
    stored = stored_dims(SEALED, head_dim)
    by_row = torch.zeros((*pages.shape[:2], 2, stored), dtype=torch.float16, device=pages.device)
    for row in range(stored):
        if key_dim(row) < head_dim:
            by_row[:, :, 0, row] = key_scales[..., key_dim(row)]
            by_row[:, :, 1, row] = key_offsets[..., key_dim(row)]
    pages[..., channels:] = by_row.flatten(-2).view(torch.uint8)
    cache.closed.pages[blocks] = pages
