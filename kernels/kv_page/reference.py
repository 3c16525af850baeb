"""Pages by definition, in torch: slow, obviously right, and exact to the bit."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from appliance.kernels.kv_page.codes import INT4_CENTRE, quantize_fp8, quantize_int4, quantize_int8
from appliance.kernels.kv_page.layout import (
    DIM_STEP,
    INT8_ROWS,
    PAGE_TOKENS,
    CodeOrder,
    code_orders,
    key_dim,
    record_offset,
    value_offset,
)

_FLOATS = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def read_pages(
    pages: Tensor, kv_format: str, head_dim: int, head_scales: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Dequantize pages.

    Args:
        pages: (num_blocks, num_kv_heads, page bytes) uint8.
        kv_format: the value of a `KVFormat`, or `INT8_ROWS`.
        head_scales: (2, num_kv_heads) float32 of keys and values; FP8 only.

    Returns:
        Keys and values, (num_blocks * 32, num_kv_heads, head_dim) float64, exact.
    """
    num_kv_heads = pages.shape[1]
    first_value = value_offset(kv_format, head_dim)
    first_record = record_offset(kv_format, head_dim)
    parts = pages[..., :first_value], pages[..., first_value:first_record]
    if kv_format in _FLOATS:
        shape = (-1, num_kv_heads, PAGE_TOKENS, head_dim)
        found = [part.contiguous().view(_FLOATS[kv_format]).view(shape).double() for part in parts]
    else:
        each = zip(parts, code_orders(kv_format), strict=True)
        found = [unpack(part, order, head_dim) for part, order in each]
        found = _dequantize(found, pages[..., first_record:], kv_format, head_scales)
    keys, values = (x.transpose(1, 2).reshape(-1, num_kv_heads, head_dim) for x in found)
    return keys, values


def _dequantize(
    codes: list[Tensor], record: Tensor, kv_format: str, head_scales: Tensor | None
) -> list[Tensor]:
    """Dequantize codes of keys and values, (num_blocks, num_kv_heads, 32, head_dim) uint8."""
    if kv_format == "fp8":
        assert head_scales is not None
        return [
            code.view(torch.float8_e4m3fn).double() * scale.double().view(-1, 1, 1)
            for code, scale in zip(codes, head_scales, strict=True)
        ]
    halves = record.contiguous().view(torch.float16).double()
    if kv_format in ("int8", INT8_ROWS):
        scales = halves.unflatten(-1, (PAGE_TOKENS, 2))
        return [(code.double() - 128) * scales[..., i, None] for i, code in enumerate(codes)]
    if kv_format == "int4-sealed":
        return _dequantize_sealed(codes, halves)
    if kv_format == "k8v4":
        by_token = halves[..., : 2 * PAGE_TOKENS].unflatten(-1, (PAGE_TOKENS, 2))
        keys = (codes[0].double() - 128) * halves[..., 2 * PAGE_TOKENS :].unsqueeze(-1)
        values = (codes[1].double() - INT4_CENTRE) * by_token[..., 0, None]
        return [keys, values + by_token[..., 1, None]]
    assert kv_format == "int4", kv_format
    scales = halves.unflatten(-1, (2, PAGE_TOKENS, 2))
    return [
        (code.double() - INT4_CENTRE) * scales[..., i, :, 0, None] + scales[..., i, :, 1, None]
        for i, code in enumerate(codes)
    ]


def _dequantize_sealed(codes: list[Tensor], halves: Tensor) -> list[Tensor]:
    """Do the same; halves (num_blocks, num_kv_heads, n) float64 are the record and the channels."""
    head_dim = codes[0].shape[-1]
    by_token = halves[..., : 2 * PAGE_TOKENS].unflatten(-1, (PAGE_TOKENS, 2))
    by_row = halves[..., 2 * PAGE_TOKENS :].unflatten(-1, (2, -1))
    rows = {key_dim(row): row for row in range(by_row.shape[-1])}
    by_channel = by_row[..., [rows[dim] for dim in range(head_dim)]].unsqueeze(3)
    centred = [code.double() - INT4_CENTRE for code in codes]
    return [
        centred[0] * by_channel[:, :, 0] + by_channel[:, :, 1],
        centred[1] * by_token[..., 0, None] + by_token[..., 1, None],
    ]


def pack(codes: Tensor, order: CodeOrder) -> Tensor:
    """Pack codes, the reverse of `unpack`; padding dimensions are 0."""
    head_dim = codes.shape[-1]
    address, nibble = (x.to(codes.device) for x in addresses(order, head_dim))
    size = PAGE_TOKENS * -(-head_dim // DIM_STEP) * DIM_STEP * order.bits // 8
    part = codes.new_zeros((*codes.shape[:-2], size))
    for half in (0, 1):
        chosen = nibble == half
        part[..., address[chosen]] |= codes[..., chosen] << (4 * half)
    return part


def unpack(part: Tensor, order: CodeOrder, head_dim: int) -> Tensor:
    """Unpack codes of keys or values: (..., bytes) uint8 -> (..., 32, head_dim) uint8."""
    address, nibble = (x.to(part.device) for x in addresses(order, head_dim))
    found = part[..., address]
    return found if order.bits == 8 else found >> (nibble * 4) & 0xF


@lru_cache
def addresses(order: CodeOrder, head_dim: int) -> tuple[Tensor, Tensor]:
    """Return the place of each code: byte (32, head_dim) int64, and nibble, uint8."""
    places = [[order.address(t, d) for d in range(head_dim)] for t in range(PAGE_TOKENS)]
    table = torch.tensor(places)
    return table[..., 0], table[..., 1].to(torch.uint8)


def write_rows(
    pages: Tensor,
    kv_format: str,
    key: Tensor,
    value: Tensor,
    head_scales: Tensor | None,
    slot_mapping: Tensor,
) -> None:
    """Quantize rows into their slots, in place.

    Args:
        pages: (num_blocks, num_kv_heads, page bytes) uint8.
        kv_format: the value of a `KVFormat`, or `INT8_ROWS`.
        key: (num_tokens, num_kv_heads, head_dim), rotated already if the format asks for it.
        value: same shape.
        head_scales: (2, num_kv_heads) float32; FP8 only.
        slot_mapping: (num_tokens,) int64; a row with a negative slot is not written.
    """
    assert kv_format not in ("int4-sealed", "k8v4"), "rows go to open blocks"
    written = slot_mapping >= 0
    slot_mapping = slot_mapping[written]
    head_dim = key.shape[-1]
    block, token = slot_mapping // PAGE_TOKENS, slot_mapping % PAGE_TOKENS
    starts = 0, value_offset(kv_format, head_dim)
    record = record_offset(kv_format, head_dim)
    for i, x in enumerate((key[written], value[written])):
        if kv_format in _FLOATS:
            row = x.to(_FLOATS[kv_format]).contiguous().view(torch.uint8)
            place = (
                starts[i]
                + token.unsqueeze(1) * row.shape[-1]
                + torch.arange(row.shape[-1], device=x.device)
            )
            _put(pages, block, place, row)
            continue
        if kv_format == "fp8":
            assert head_scales is not None
            codes = quantize_fp8(x, head_scales[i].view(-1, 1))
        elif kv_format in ("int8", INT8_ROWS):
            codes, scales = quantize_int8(x)
            _put_halves(pages, block, record + token * 4 + 2 * i, scales)
        else:
            codes, scales, offsets = quantize_int4(x)
            place = record + i * 4 * PAGE_TOKENS + token * 4
            _put_halves(pages, block, place, scales)
            _put_halves(pages, block, place + 2, offsets)
        _put_codes(pages, code_orders(kv_format)[i], block, token, starts[i], codes)


def _put(pages: Tensor, block: Tensor, place: Tensor, row: Tensor) -> None:
    """Write rows (num_tokens, num_kv_heads, n) uint8 to bytes `place` (num_tokens, n) of pages."""
    heads = torch.arange(row.shape[1], device=row.device)
    pages[block.view(-1, 1, 1), heads.view(1, -1, 1), place.unsqueeze(1)] = row


def _put_halves(pages: Tensor, block: Tensor, place: Tensor, halves: Tensor) -> None:
    row = halves.unsqueeze(-1).contiguous().view(torch.uint8)
    _put(pages, block, place.unsqueeze(1) + torch.arange(2, device=place.device), row)


def _put_codes(
    pages: Tensor, order: CodeOrder, block: Tensor, token: Tensor, start: int, codes: Tensor
) -> None:
    head_dim = codes.shape[-1]
    address, nibble = (x.to(codes.device) for x in addresses(order, head_dim))
    place = start + address[token]  # (num_tokens, head_dim)
    if order.bits == 8:
        _put(pages, block, place, codes)
        return
    # Both nibbles of a byte belong to one token, so a byte is written whole.
    for half in (0, 1):
        chosen = nibble[0] == half
        heads = torch.arange(codes.shape[1], device=codes.device).view(1, -1, 1)
        at = block.view(-1, 1, 1), heads, place[:, chosen].unsqueeze(1)
        others = pages[at] & (0xF0 if half == 0 else 0x0F)
        pages[at] = others | codes[..., chosen] << (4 * half)
