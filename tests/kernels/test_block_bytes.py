"""A cache block is read as bytes and written back, in every format, without touching another."""

from __future__ import annotations

import random

import pytest
import torch

from appliance.kernels.cache.decoder_cache import KVCache, allocate_blocks, allocate_layer
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.cpu.cache import NativeCache
from appliance.kernels.cpu.library import load_library

HEADS = [(2, 32), (1, 64)]
BLOCKS, PAGES = 6, 4
MIXED = [LayerPrecision(KVFormat.INT4_SEALED), LayerPrecision(KVFormat.INT8)]


def noise(size: int) -> bytes:
    return random.Random(size).randbytes(size)


def native_cache(precision: KVFormat | list[LayerPrecision]) -> NativeCache:
    cache = NativeCache(
        load_library(), precision, HEADS, num_blocks=BLOCKS, block_size=32, num_open=PAGES
    )
    for mapping in (cache.mapping, cache.open_mapping):
        if mapping is not None:
            mapping.memory[:] = noise(len(mapping.memory))
    return cache


def native_memory(cache: NativeCache) -> tuple[list[bytes], list[bytes]]:
    def cut(memory: bytes, count: int) -> list[bytes]:
        size = len(memory) // count
        return [memory[i * size : (i + 1) * size] for i in range(count)]

    opened = b"" if cache.open_mapping is None else cache.open_mapping.memory[:]
    return cut(cache.mapping.memory[:], BLOCKS), cut(opened, PAGES)


@pytest.mark.parametrize("precision", [*KVFormat, MIXED], ids=[*(f.value for f in KVFormat), "mix"])
def test_blocks_of_the_library(precision: KVFormat | list[LayerPrecision]) -> None:
    cache = native_cache(precision)
    before, pages_before = native_memory(cache)
    assert len(before[0]) == cache.block_bytes
    assert len(pages_before[0]) == cache.open_bytes
    content = cache.read_block(4)
    assert content == before[4]
    cache.write_block(1, memoryview(content))
    after, pages_after = native_memory(cache)
    assert after == [before[0], before[4], *before[2:]]
    assert pages_after == pages_before
    if cache.open_bytes:
        cache.write_block(0, cache.read_block(5, 3), 2)
        after, pages_after = native_memory(cache)
        assert after == [before[5], before[4], *before[2:]]
        assert pages_after == [*pages_before[:2], pages_before[3], pages_before[3]]


def torch_cache(precision: LayerPrecision) -> KVCache:
    layers = tuple(
        allocate_layer(
            allocate_blocks,
            precision,
            num_blocks=BLOCKS,
            block_size=32,
            num_open=PAGES,
            num_kv_heads=heads,
            head_dim=width,
            device=torch.device("cpu"),
        )
        for heads, width in HEADS
    )
    cache = KVCache(layers)
    for part in (*cache.parts, *cache.open_parts):
        raw = part.view(torch.uint8)
        raw.copy_(
            torch.frombuffer(bytearray(noise(raw.numel())), dtype=torch.uint8).view(raw.shape)
        )
    return cache


def rows(cache: KVCache, index: int) -> list[bytes]:
    """The bytes of a block in each tensor, then those of an open block, if there is one."""
    found = [part[index] for part in cache.parts]
    found += [part[index] for part in cache.open_parts if index < len(part)]
    return [row.contiguous().flatten().view(torch.uint8).numpy().tobytes() for row in found]


@pytest.mark.parametrize("kv_format", list(KVFormat), ids=lambda kv_format: kv_format.value)
def test_blocks_of_torch(kv_format: KVFormat) -> None:
    cache = torch_cache(LayerPrecision(kv_format))
    before = [rows(cache, index) for index in range(BLOCKS)]
    num_closed = len(cache.parts)
    content = cache.read_block(4)
    assert content == b"".join(before[4][:num_closed])
    assert len(content) == cache.block_bytes
    cache.write_block(1, content)
    assert rows(cache, 1) == before[4][:num_closed] + before[1][num_closed:]
    for index in (0, 2, 3, 4, 5):
        assert rows(cache, index) == before[index]
    assert bool(cache.open_bytes) == kv_format.is_sealed
    if cache.open_bytes:
        content = cache.read_block(5, 3)
        assert len(content) == cache.block_bytes + cache.open_bytes
        cache.write_block(0, content, 2)
        assert rows(cache, 0)[:num_closed] == before[5]
        assert rows(cache, 2)[num_closed:] == before[3][num_closed:]
