"""Blocks leave a GPU's cache and come back through the kernel; the device is the host here."""

from __future__ import annotations

import random

import pytest
import torch

from appliance.engine.blocks.block_moves import DeviceMoves, HostMoves
from appliance.engine.device.device import HostDevice
from appliance.engine.plan import BlockMove, HeldBlock
from appliance.engine.rates import Rates
from appliance.kernels.block_copy.launch import BlockMover
from appliance.kernels.decoder_cache import KVCache, split_sealed
from appliance.kernels.kv_cache import KVFormat, KVPages
from appliance.kernels.sealed_pages import SealedPages

CPU = torch.device("cpu")
FORMATS = [KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4, KVFormat.INT4_SEALED]


def filled_cache(kv_format: KVFormat) -> KVCache:
    layers: list[KVPages | SealedPages] = []
    for heads, width in [(2, 64), (1, 128)]:
        shape = {"num_blocks": 6, "num_kv_heads": heads, "head_dim": width}
        if kv_format.is_sealed:
            layers.append(SealedPages.allocate(**shape, num_open=4, device=CPU, format=kv_format))
        else:
            layers.append(KVPages.allocate(kv_format, **shape, block_size=32, device=CPU))
    cache = KVCache(tuple(layers))
    for part in (*cache._parts, *cache._open_parts):
        noise = random.Random(part.numel()).randbytes(part.numel())
        part.copy_(torch.frombuffer(bytearray(noise), dtype=torch.uint8).view(part.shape))
    return cache


def moves_of(cache: KVCache, rates: Rates) -> DeviceMoves:
    closed, opened = split_sealed(cache.layers)
    open_mover = BlockMover(opened) if opened else None
    return DeviceMoves(BlockMover(closed), HostDevice(), rates, open_mover)


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.value)
def test_blocks_go_out_and_come_back_elsewhere(kv_format: KVFormat) -> None:
    cache, rates = filled_cache(kv_format), Rates()
    moves = moves_of(cache, rates)
    assert (moves.block_bytes, moves.open_bytes) == (cache.block_bytes, cache.open_bytes)
    page = 2 if kv_format.is_sealed else -1
    out = [BlockMove(4, HeldBlock()), BlockMove(1, HeldBlock()), BlockMove(5, HeldBlock(), page)]
    expected = [HeldBlock() for _ in out]
    HostMoves(cache, Rates()).save(
        [
            BlockMove(move.block, held, move.open_page)
            for move, held in zip(out, expected, strict=True)
        ]
    )
    moves.save(out)
    assert [bytes(m.held.read()) for m in out] == [bytes(held.read()) for held in expected]
    assert rates.moves > 0
    back = [
        BlockMove(0, out[0].held),
        BlockMove(2, HeldBlock(expected[1].content)),  # as a disk gives it
        BlockMove(3, out[2].held, 0 if kv_format.is_sealed else -1),
    ]
    moves.load(back)
    found = [BlockMove(move.block, HeldBlock(), move.open_page) for move in back]
    HostMoves(cache, Rates()).save(found)
    assert [bytes(m.held.read()) for m in found] == [bytes(held.read()) for held in expected]


def test_nothing_to_move() -> None:
    moves = moves_of(filled_cache(KVFormat.INT8), Rates())
    moves.save([])
    moves.load([])
