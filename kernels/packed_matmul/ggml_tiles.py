"""Repacks GGML's blocks for the GPU kernels, once, at load: the same bits in another order.

Codes become tiles as those of other weights; the integers and halves that their scales are made of
become the records that `scale_records` reads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from appliance.kernels.packed_matmul.tiled import (
    REPACKED_AT_ONCE,
    ROW_MULTIPLE,
    Codes,
    Params,
    TiledWeight,
    padded,
    tile_codes,
    usual_block_k,
)
from appliance.kernels.weight_codes.order import TILE_N, TileOrder, to_int32
from appliance.kernels.weights.ggml_types import (
    bytes_of_q2_k,
    half_at,
    integers_of_iq4_xs,
    integers_of_q3_k,
    integers_of_q4_k,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

    from appliance.kernels.weights.ggml import GgmlWeight


@dataclass(frozen=True, slots=True)
class GgmlTiles:
    """The form of a GGML type on the GPU.

    Attributes:
        kind: of its codes.
        params_kind: of its records.
        group_size: inputs that share a scale.
        words: from blocks (rows, blocks, block_bytes) and the inputs of a kernel's block to the
            words of a record, (rows, records, words) int32.
        d_at: where a block's d lies, if the words do not hold it.
    """

    kind: Codes
    params_kind: Params
    group_size: int
    words: Callable[[Tensor, int], Tensor]
    d_at: int | None = None


def tile_ggml(weight: GgmlWeight) -> TiledWeight:
    """Repack a weight of any GGML type, some rows at a time."""
    form = GGML_TILES[weight.type_name]
    out_features, in_features = weight.shape
    block_k = usual_block_k(in_features)
    return TiledWeight(
        codes=tile_codes(
            lambda rows: weight.type.codes(weight.blocks[rows]),
            weight.shape,
            TileOrder(form.kind.bits),
            block_k,
        ),
        params=_records(weight, form, block_k),
        channel_scale=None,
        kind=form.kind,
        params_kind=form.params_kind,
        group_size=form.group_size,
        block_k=block_k,
        in_features=in_features,
        out_features=out_features,
    )


def _records(weight: GgmlWeight, form: GgmlTiles, block_k: int) -> Tensor:
    """Return (tiles in n, records, words of a record) int32."""
    step = max(TILE_N, REPACKED_AT_ONCE // weight.shape[1] // TILE_N * TILE_N)
    parts = [
        _records_of(weight.blocks[start : start + step], form, block_k)
        for start in range(0, weight.shape[0], step)
    ]
    tiles = padded(weight.shape[0], ROW_MULTIPLE) // TILE_N
    records = torch.cat(parts)
    return functional.pad(records, (0, 0, 0, 0, 0, tiles - len(records)))


def _records_of(blocks: Tensor, form: GgmlTiles, block_k: int) -> Tensor:
    rows = _by_feature(form.words(blocks, block_k)).flatten(2)
    if form.d_at is None:
        return rows
    d = _by_feature(half_at(blocks, form.d_at).view(torch.int16).unsqueeze(2)).to(torch.int64)
    low, high = d.squeeze(2).unflatten(2, (2, TILE_N // 2)).unbind(2)
    return torch.cat((rows, to_int32(low & 0xFFFF | high << 16)), dim=2)


def _by_feature(words: Tensor) -> Tensor:
    """Tile (rows, records, words) to (tiles, records, words, TILE_N)."""
    rows = padded(len(words), TILE_N) - len(words)
    whole: Tensor = functional.pad(words, (0, 0, 0, 0, 0, rows))
    return whole.view(-1, TILE_N, *words.shape[1:]).permute(0, 2, 3, 1).contiguous()


def _words_of_q2_k(blocks: Tensor, block_k: int) -> Tensor:
    return torch.cat((_words_at(blocks, 80), _words(bytes_of_q2_k(blocks))), dim=2)


def _words_of_q3_k(blocks: Tensor, block_k: int) -> Tensor:
    return _sixes(integers_of_q3_k(blocks))


def _words_of_q4_k(blocks: Tensor, block_k: int) -> Tensor:
    both = torch.stack([part.unflatten(2, (2, 4)) for part in integers_of_q4_k(blocks)], dim=3)
    return torch.cat((_words_at(blocks, 0), _sixes(both.flatten(2))), dim=2)


def _words_of_q6_k(blocks: Tensor, block_k: int) -> Tensor:
    return _words(blocks[..., 192:208] ^ 0x80)


def _words_of_iq4_xs(blocks: Tensor, block_k: int) -> Tensor:
    integers = integers_of_iq4_xs(blocks).unflatten(2, (2, 4)).to(torch.int64)
    words = (integers << 6 * torch.arange(4, device=blocks.device)).sum(3)
    return to_int32(words | blocks[..., :2].to(torch.int64) << 24)


def _words_of_odd_32(blocks: Tensor, block_k: int) -> Tensor:
    return _words_at(blocks, 2)


def _words_of_odd_16(blocks: Tensor, block_k: int) -> Tensor:
    return _words(blocks[..., 2:10])


def _halves_of_groups(blocks: Tensor, block_k: int) -> Tensor:
    """Return two groups' halves in each word."""
    return _by_block(half_at(blocks, 0).view(torch.int16), block_k).view(torch.int32)


def _words_of_groups(blocks: Tensor, block_k: int) -> Tensor:
    """Return a group's two halves in each word."""
    return _by_block(_words_at(blocks, 0).squeeze(2), block_k)


def _by_block(groups: Tensor, block_k: int) -> Tensor:
    """Arrange (rows, groups of 32) as (rows, blocks, groups of a block)."""
    each = block_k // 32
    more = padded(groups.shape[1], each) - groups.shape[1]
    whole: Tensor = functional.pad(groups, (0, more))
    return whole.view(len(groups), -1, each)


def _sixes(integers: Tensor) -> Tensor:
    """Pack (rows, blocks, 16) of 6 bits: see the rows of sixes in `scale_records`."""
    eight = integers.unflatten(2, (2, 8)).to(torch.int64)
    shifts = 6 * torch.arange(5, device=integers.device)
    last = eight[..., 7]
    words = (eight[..., :5] << shifts).sum(3) | (last & 3) << 30
    left = (eight[..., 5:7] << shifts[:2]).sum(3) | last >> 2 << 12
    left = left[..., :1] | left[..., 1:] << 16
    return to_int32(torch.cat((words, left), dim=2))


def _words_at(blocks: Tensor, start: int) -> Tensor:
    return _words(blocks[..., start : start + 4])


def _words(octets: Tensor) -> Tensor:
    """View four bytes at a time as a word, the first lowest."""
    return octets.contiguous().view(torch.int32)


GGML_TILES = {
    "Q5_0": GgmlTiles(Codes.INT5, Params.Q5_0, 32, _halves_of_groups),
    "Q5_1": GgmlTiles(Codes.INT5, Params.Q5_1, 32, _words_of_groups),
    "Q2_K": GgmlTiles(Codes.INT2, Params.Q2_K, 16, _words_of_q2_k),
    "Q3_K": GgmlTiles(Codes.INT3, Params.Q3_K, 16, _words_of_q3_k, d_at=108),
    "Q4_K": GgmlTiles(Codes.INT4, Params.Q4_K, 32, _words_of_q4_k),
    "Q5_K": GgmlTiles(Codes.INT5, Params.Q4_K, 32, _words_of_q4_k),
    "Q6_K": GgmlTiles(Codes.INT6, Params.Q6_K, 16, _words_of_q6_k, d_at=208),
    "IQ4_NL": GgmlTiles(Codes.IQ4, Params.Q5_0, 32, _halves_of_groups),
    "IQ4_XS": GgmlTiles(Codes.IQ4, Params.IQ4_XS, 32, _words_of_iq4_xs),
    "IQ3_S": GgmlTiles(Codes.IQ3_S, Params.ODD_32, 32, _words_of_odd_32, d_at=0),
    "IQ3_XXS": GgmlTiles(Codes.IQ3_XXS, Params.ODD_32, 32, _words_of_odd_32, d_at=0),
    "IQ2_XXS": GgmlTiles(Codes.IQ2, Params.ODD_32, 32, _words_of_odd_32, d_at=0),
    "IQ2_XS": GgmlTiles(Codes.IQ2, Params.ODD_16, 16, _words_of_odd_16, d_at=0),
    "IQ2_S": GgmlTiles(Codes.IQ2, Params.ODD_16, 16, _words_of_odd_16, d_at=0),
    "IQ1_S": GgmlTiles(Codes.IQ1, Params.ODD_32, 32, _words_of_odd_32, d_at=0),
    "IQ1_M": GgmlTiles(Codes.IQ1, Params.ODD_16, 16, _words_of_odd_16, d_at=0),
}
