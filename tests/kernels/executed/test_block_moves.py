"""Blocks leave a GPU's cache and come back through the kernel; the device is the host here."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch

from appliance.engine.nouns.moves import BlockCopy, BlockLoad, BlockSave, Rates, SavedBlock
from appliance.engine.run.device import Copy
from appliance.engine.run.host_device import HostDevice
from appliance.engine.run.moves import DeviceMoves, HostMoves, staging_bytes
from appliance.engine.run.pinned_memory import PinnedMemory
from appliance.kernels.block_copy.launch import BlockMover
from appliance.kernels.cache.decoder_cache import KVCache, split_sealed
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.cache.sealed_blocks import SealedBlocks

CPU = torch.device("cpu")
FORMATS = [KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4, KVFormat.INT4_SEALED]


def filled_cache(kv_format: KVFormat) -> KVCache:
    layers: list[KVPages | SealedBlocks] = []
    for heads, width in [(2, 64), (1, 128)]:
        shape = {"num_blocks": 6, "num_kv_heads": heads, "head_dim": width}
        if kv_format.is_sealed:
            layers.append(SealedBlocks.allocate(**shape, num_open=4, device=CPU, format=kv_format))
        else:
            layers.append(KVPages.allocate(kv_format, **shape, block_size=32, device=CPU))
    cache = KVCache(tuple(layers))
    for part in (*cache.parts, *cache.open_parts):
        noise = random.Random(part.numel()).randbytes(part.numel())
        part.copy_(torch.frombuffer(bytearray(noise), dtype=torch.uint8).view(part.shape))
    return cache


def moves_of(cache: KVCache, rates: Rates) -> DeviceMoves:
    closed, opened = split_sealed(cache.layers)
    open_mover = BlockMover(opened) if opened else None
    device = HostDevice()
    return DeviceMoves(BlockMover(closed), device, rates, pinned_for(cache, device), open_mover)


def pinned_for(cache: KVCache, device: HostDevice) -> PinnedMemory:
    row_bytes = cache.block_bytes + cache.open_bytes
    memory = PinnedMemory(device, 16 * row_bytes, row_bytes)
    memory.finish()
    return memory


def contents(saved: Sequence[SavedBlock]) -> list[bytes]:
    return [bytes(block.read()) for block in saved]


@pytest.mark.parametrize("kv_format", FORMATS, ids=lambda kv_format: kv_format.value)
def test_blocks_go_out_and_come_back_elsewhere(kv_format: KVFormat) -> None:
    cache, rates = filled_cache(kv_format), Rates()
    moves = moves_of(cache, rates)
    assert (moves.block_bytes, moves.open_bytes) == (cache.block_bytes, cache.open_bytes)
    page = 2 if kv_format.is_sealed else -1
    out = [BlockSave(4), BlockSave(5, page), BlockSave(1)]
    expected = contents(HostMoves(cache, Rates()).save(out))
    saved = moves.save(out)
    assert contents(saved) == expected
    assert rates.moves > 0
    back = [
        BlockLoad(0, 0),  # what the same plan has saved
        BlockLoad(3, saved[1], 0 if kv_format.is_sealed else -1),
        BlockLoad(2, SavedBlock(expected[2])),  # as a disk gives it
    ]
    moves.load(back, saved)
    found = [BlockSave(load.block, load.open_block) for load in back]
    assert contents(HostMoves(cache, Rates()).save(found)) == expected


def test_nothing_to_move() -> None:
    moves = moves_of(filled_cache(KVFormat.INT8), Rates())
    moves.copy([])
    moves.save([])
    moves.load([])


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT4_SEALED])
def test_blocks_are_copied_inside_the_cache(kv_format: KVFormat) -> None:
    cache = filled_cache(kv_format)
    page = 1 if kv_format.is_sealed else -1
    copies = [BlockCopy(0, 3), BlockCopy(1, 4, page, 3 if kv_format.is_sealed else -1)]
    expected = [cache.read_block(0), cache.read_block(1, page)]
    moves_of(cache, Rates()).copy(copies)
    found = [cache.read_block(3), cache.read_block(4, 3 if kv_format.is_sealed else -1)]
    assert found == expected


class Ordered(HostDevice):
    """Copies go nowhere before somebody waits for them, by `follow` or on the host."""

    def __init__(self) -> None:
        self.waiting: list[Late] = []

    def fetch_aside(self, tensor: torch.Tensor, rows: Sequence[torch.Tensor]) -> Late:
        self.waiting.append(Late(self, lambda: super(Ordered, self).fetch_aside(tensor, rows)))
        return self.waiting[-1]

    def send_aside(self, rows: Sequence[torch.Tensor], tensor: torch.Tensor) -> Copy:
        for copy in list(self.waiting):
            copy.wait()
        return super().send_aside(rows, tensor)

    def follow(self, copy: Copy) -> None:
        copy.wait()


class Late:
    def __init__(self, device: Ordered, start: Callable[[], Copy]) -> None:
        self.device, self.start = device, start

    @property
    def is_over(self) -> bool:
        return self not in self.device.waiting

    def wait(self) -> float:
        if not self.is_over:
            self.device.waiting.remove(self)
            self.start()
        return 1.0


def test_any_number_of_blocks_is_moved_through_two_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A buffer is gathered into again only when what it held is on the host."""
    cache, rates, device = filled_cache(KVFormat.INT8), Rates(), Ordered()
    monkeypatch.setattr("appliance.engine.run.moves.BUFFER_BYTES", 2 * cache.block_bytes)
    expected = [cache.read_block(block) for block in range(6)]
    mover = BlockMover(split_sealed(cache.layers)[0])
    moves = DeviceMoves(mover, device, rates, pinned_for(cache, device))
    buffers = sum(len(buffer.memory) for buffer in moves.buffers)
    assert buffers == staging_bytes(cache.block_bytes) == 4 * cache.block_bytes
    saved = moves.save([BlockSave(block) for block in range(6)])
    assert len(device.waiting) == 2, "the third group has waited for the first"
    assert rates.moves == 0, "nobody knows yet how long any took"
    moves.load([BlockLoad(5 - block, content) for block, content in enumerate(saved)])
    assert [cache.read_block(block) for block in range(6)] == expected[::-1]
    assert contents(saved) == expected
    assert rates.moves > 0
