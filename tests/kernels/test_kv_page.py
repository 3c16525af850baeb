from __future__ import annotations

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from ptx_machine.inline import evaluate
from ptx_machine.memory import SECTOR

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_page import ptx
from appliance.kernels.kv_page.layout import (
    DIM_STEP,
    IN_ROWS,
    KEYS,
    LOW_BITS,
    PAGE_TOKENS,
    ROW_TOKENS,
    VALUES,
    CodeOrder,
    page_bytes,
)
from appliance.kernels.kv_write.reference import write_kv

ORDERS = [*KEYS.values(), *VALUES.values(), IN_ROWS]
HEAD_DIMS = [32, 64, 96, 128, 256, 512]


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_every_code_has_a_place_and_every_byte_one_token(order: CodeOrder, head_dim: int) -> None:
    places = {
        order.address(token, dim): token for token in range(PAGE_TOKENS) for dim in range(head_dim)
    }
    assert len(places) == PAGE_TOKENS * head_dim
    by_byte: dict[int, set[int]] = {}
    for (byte, _), token in places.items():
        by_byte.setdefault(byte, set()).add(token)
    assert sorted(by_byte) == list(range(PAGE_TOKENS * head_dim * order.bits // 8))
    assert all(len(tokens) == 1 for tokens in by_byte.values())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
def test_the_readers_permutation_is_the_writers_address(order: CodeOrder, head_dim: int) -> None:
    """A page that holds the elements' numbers, unpacked as in the kernel, gives the tile."""
    words = torch.zeros(PAGE_TOKENS * head_dim * order.bits // 32, 32 // order.bits)
    for token, dim in itertools.product(range(PAGE_TOKENS), range(head_dim)):
        byte, nibble = order.address(token, dim)
        words[byte // 4, part_of(order, byte % 4, nibble)] = token * 1000 + dim
    # `join` appends an axis for each bit of the part, the least significant first.
    parts = range(len(order.part))
    joined = words.view(-1, *[2] * len(parts)).permute(0, *(1 + p for p in reversed(parts)))
    axes = joined.reshape(head_dim // DIM_STEP, *[2] * (len(order.word) + len(parts)))
    permuted = axes.permute(order.axes)
    is_keys = order.rows[0][0] == "d"
    tile = permuted.reshape((head_dim, -1) if is_keys else (PAGE_TOKENS, -1))
    rows = [row_of(order, index) for index in range(tile.shape[0])]
    expected = torch.tensor(
        [
            [column * 1000 + row if is_keys else row * 1000 + column for column in range(width)]
            for row, width in zip(rows, [tile.shape[1]] * len(rows), strict=True)
        ]
    )
    assert torch.equal(tile, expected.to(tile.dtype))


def test_a_token_has_its_codes_in_rows_of_a_sector_side_by_side() -> None:
    for token, dim in itertools.product(range(PAGE_TOKENS), range(288)):
        strip, place = divmod(dim, DIM_STEP)
        byte = (strip * PAGE_TOKENS + token) * SECTOR + place
        assert IN_ROWS.address(token, dim) == (byte, 0)


def part_of(order: CodeOrder, byte: int, nibble: int) -> int:
    """The index, among a word's codes in `ptx`, of a byte or nibble."""
    return byte if order.bits == 8 else byte >> 1 | nibble << 1 | (byte & 1) << 2


def row_of(order: CodeOrder, index: int) -> int:
    """The token or dimension in a row of the tile."""
    places = len(order.rows)
    low = sum((index >> places - 1 - i & 1) << int(name[1:]) for i, name in enumerate(order.rows))
    return low + (index >> LOW_BITS << LOW_BITS)


def test_the_rows_of_values_are_those_of_the_probabilities_registers() -> None:
    """A thread's result of a product has columns 2i, 2i + 1, its operand rows 4i .. 4i + 3."""
    for lane in range(4):
        rows = [16 * half + 4 * lane + i for half in (0, 1) for i in range(4)]
        tokens = {
            sum((row >> 4 - i & 1) << int(name[1:]) for i, name in enumerate(ROW_TOKENS))
            for row in rows
        }
        assert tokens == {8 * part + 2 * lane + i for part in range(4) for i in (0, 1)}


# Sealed pages are made from whole blocks: see test_kv_seal.
@pytest.mark.parametrize(
    ("kv_format", "in_rows"),
    [*((f, False) for f in KVFormat if not f.is_sealed), (KVFormat.INT8, True)],
)
@pytest.mark.parametrize("head_dim", [16, 80, 128])
def test_rows_come_back_from_their_slots(kv_format: KVFormat, in_rows: bool, head_dim: int) -> None:
    random = torch.Generator().manual_seed(0)
    cache = KVPages.allocate(
        kv_format,
        num_blocks=4,
        block_size=PAGE_TOKENS,
        num_kv_heads=3,
        head_dim=head_dim,
        device=torch.device("cpu"),
    )
    cache = replace(cache, in_rows=in_rows)
    assert cache.pages.shape[-1] == page_bytes(cache.layout, head_dim)
    key, value = torch.randn(2, 60, 3, head_dim, generator=random).bfloat16()
    slots = torch.randperm(4 * PAGE_TOKENS, generator=random)[:60]
    write_kv(key, value, cache, slots)
    steps = {"fp16": 2**-11, "fp8": 2**-4, "int8": 0.51 / 127, "int4": 0.52 / 7.5}
    for found, written in zip(
        cache.gather(range(4), 128, torch.float64), (key, value), strict=True
    ):
        size = written.double().abs().amax(-1, keepdim=True)
        error = (found[slots] - written.double()).abs() / size
        assert error.max() <= steps.get(kv_format.value, 0.0)
        rest = torch.ones(len(found), dtype=torch.bool)
        rest[slots] = False
        assert not found[rest].any()


def words_of_bytes() -> NDArray[np.uint32]:
    """Words in which every byte takes every value, a different one in each place."""
    codes = np.arange(256)[:, None] + 37 * np.arange(4)
    return (codes % 256).astype(np.uint8).view(np.uint32)[:, 0]


def halves_of(text: str, words: NDArray[np.uint32]) -> NDArray[np.float16]:
    """The results of a PTX text for each word: (words, results)."""
    count = len(set(re.findall(r"\$\d+", text))) - 1
    return np.stack(evaluate(text, [16] * count, words), axis=1).view(np.float16)


def test_ptx_of_every_int8_code() -> None:
    words = words_of_bytes()
    codes = words.view(np.uint8).reshape(-1, 4)
    expected = codes.astype(np.float16) - 128
    assert np.array_equal(halves_of(ptx.INT8, words), expected)
    pairs = np.stack(evaluate(ptx.INT8_ROWS, [32, 32], words), axis=1)
    assert np.array_equal(pairs.astype(np.uint32).view(np.float16), expected)


def test_ptx_of_every_nibble() -> None:
    words = words_of_bytes()
    found = halves_of(ptx.INT4, words)
    codes = words.view(np.uint8).reshape(-1, 4)
    for byte, nibble in itertools.product(range(4), range(2)):
        expected = (codes[:, byte] >> 4 * nibble & 0xF).astype(np.float16) - 8
        assert np.array_equal(found[:, part_of(KEYS[4], byte, nibble)], expected)


@pytest.mark.parametrize(("text", "factor"), [(ptx.FP8, 1), (ptx.FP8_BITS, 2**-8)])
def test_ptx_of_every_e4m3_code_but_nan(text: str, factor: float) -> None:
    """0x7F and 0xFF are NaN and never written; moving their bits would read them as 480."""
    words = words_of_bytes()
    codes = torch.from_numpy(words.view(np.uint8).reshape(-1, 4))
    found = torch.from_numpy(halves_of(text, words))
    expected = (codes.view(torch.float8_e4m3fn).double() * factor).half()
    is_number = codes & 0x7F != 0x7F
    # Compares bits, since zeros have signs.
    assert torch.equal(found.view(torch.int16)[is_number], expected.view(torch.int16)[is_number])
