"""Pages, their writing, and attention over them, against float64 over the dequantized cache."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from appliance.kernels.cpu.structs import (
    AttentionStruct,
    BatchStruct,
    CacheLayerStruct,
    CacheStruct,
    Format,
    Status,
)
from appliance.kernels.kv_write.reference import quantize_int8

Array = NDArray[Any]

PAGE = 16
SPLIT = 256  # tokens; only tells which context lengths are worth trying
LAYER = 1  # of two, the other one stays poisoned


@dataclass(frozen=True)
class Shape:
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int = 16
    window: int = 0
    softcap: float = 0.0

    @property
    def scale(self) -> float:
        return 1 / math.sqrt(self.head_dim)


SHAPES = [
    Shape(2, 2, 16),
    Shape(9, 3, 64),
    Shape(4, 1, 80, block_size=32, window=70),
    Shape(7, 1, 96, block_size=32, softcap=2.0),
    Shape(8, 1, 128, window=300, softcap=30.0),
    Shape(4, 1, 256, block_size=32, window=33),
    Shape(14, 2, 64, block_size=32),
    Shape(25, 1, 16, window=1),
]
QUERY_LENS = [1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 30, 1]
CONTEXT_LENS = [1, 15, 16, 17, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 5, SPLIT + 20, 300]
FORMATS = list(Format)


def aligned(count: int) -> NDArray[np.uint8]:
    memory = np.empty(count + 64, np.uint8)
    start = -memory.ctypes.data % 64
    return memory[start : start + count]


def address(array: NDArray[np.generic]) -> int:
    assert array.flags.c_contiguous
    return array.ctypes.data


class Cache:
    """An arena of two layers, filled with 0xff at first: NaN, or the code 255."""

    def __init__(
        self,
        library: ctypes.CDLL,
        shape: Shape,
        format: Format,
        num_blocks: int,
        fill: int = 0xFF,
    ) -> None:
        self.library, self.shape, self.format = library, shape, format
        self.page_bytes = library.ap_page_bytes(format, shape.head_dim)
        assert self.page_bytes > 0
        assert self.page_bytes % 64 == 0
        pages = shape.num_kv_heads * (shape.block_size // PAGE)
        self.offset = library.ap_page_bytes(Format.F32, shape.head_dim) * pages
        self.block_bytes = self.offset + self.page_bytes * pages
        self.arena = aligned(num_blocks * self.block_bytes)
        self.arena.fill(fill)
        self.layers = (CacheLayerStruct * 2)(
            CacheLayerStruct(0, Format.F32, 0), CacheLayerStruct(self.offset, format, 0)
        )
        self.struct = CacheStruct(
            address(self.arena), self.block_bytes, num_blocks, shape.block_size, self.layers
        )
        self.attention = AttentionStruct(
            num_heads=shape.num_heads,
            num_kv_heads=shape.num_kv_heads,
            head_dim=shape.head_dim,
            window=shape.window,
            scale=shape.scale,
            softcap=shape.softcap,
        )

    def write(self, engine: int, key: Array, value: Array, slots: Sequence[int]) -> None:
        slot_mapping = np.array(slots, np.int64)
        key, value = np.ascontiguousarray(key), np.ascontiguousarray(value)
        status = self.library.ap_kv_write(
            engine,
            self.attention,
            self.struct,
            LAYER,
            address(key),
            address(value),
            len(slots),
            address(slot_mapping),
        )
        assert status == Status.OK

    def pages(self, block: int) -> NDArray[np.uint8]:
        """(num_kv_heads, pages in a block, page_bytes)."""
        start = block * self.block_bytes + self.offset
        end = (block + 1) * self.block_bytes
        return self.arena[start:end].reshape(self.shape.num_kv_heads, -1, self.page_bytes)

    def read(self, table: Sequence[int], context: int) -> tuple[Array, Array]:
        """Keys and values of a sequence, (num_kv_heads, context, head_dim) float64."""
        used = -(-context // self.shape.block_size)
        pages = np.concatenate([self.pages(block) for block in table[:used]], axis=1)
        dim = self.shape.head_dim
        both = decode(self.format, dim, pages.reshape(-1, self.page_bytes))
        keys, values = (x.reshape(self.shape.num_kv_heads, -1, dim)[:, :context] for x in both)
        return keys, values


def rotate(x: Array) -> Array:
    """The normalized Hadamard transform of parts of (..., head_dim); its own inverse."""
    size = x.shape[-1] & -x.shape[-1]
    turned: Array = x.reshape(-1, size)
    step = 1
    while step < size:
        a, b = np.moveaxis(turned.reshape(-1, size // (2 * step), 2, step), 2, 0)
        turned = np.stack([a + b, a - b], axis=2).reshape(-1, size)
        step *= 2
    result: Array = turned.reshape(x.shape) / np.sqrt(size)
    return result


def float_elements(format: Format, raw: NDArray[np.uint8]) -> Array:
    if format is Format.BF16:
        return (raw.view(np.uint16).astype(np.uint32) << 16).view(np.float32).astype(np.float64)
    return raw.view(np.float32 if format is Format.F32 else np.float16).astype(np.float64)


def codes_of(format: Format, dim: int, pages: NDArray[np.uint8]) -> tuple[Array, Array, Array]:
    """Key and value codes (pages, 16, head_dim), and the float16 vectors at each page's end."""
    n = len(pages)
    if format is Format.INT8:
        key_bytes = pages[:, : 16 * dim].reshape(n, dim // 4, 16, 4).transpose(0, 2, 1, 3)
        value_bytes = pages[:, 16 * dim : 32 * dim].reshape(n, 4, dim, 4).transpose(0, 1, 3, 2)
        scales = pages[:, 32 * dim :].copy().view(np.float16).reshape(n, 2, 16)
        keys = key_bytes.reshape(n, 16, dim).astype(int) - 128
        return keys, value_bytes.reshape(n, 16, dim).view(np.int8).astype(int), scales
    pairs = -(-dim // 32)
    end = 8 * dim + 256 * pairs
    key_bytes = pages[:, : 8 * dim].reshape(n, dim // 8, 1, 16, 4)
    key_codes = np.concatenate([key_bytes & 15, key_bytes >> 4], axis=2)
    keys = key_codes.transpose(0, 3, 1, 2, 4).reshape(n, 16, dim).astype(int)
    value_bytes = pages[:, 8 * dim : end].reshape(n, 4, pairs, 1, 16, 4)
    value_codes = np.concatenate([value_bytes & 15, value_bytes >> 4], axis=3)
    values = value_codes.reshape(n, 4, 32 * pairs, 4).transpose(0, 1, 3, 2).reshape(n, 16, -1)
    scales = pages[:, end:].copy().view(np.float16).reshape(n, 4, 16)
    return keys, values[..., :dim].astype(int), scales


def decode(format: Format, dim: int, pages: NDArray[np.uint8]) -> tuple[Array, Array]:
    """Keys and values of pages as float64, (pages, 16, head_dim) each."""
    n = len(pages)
    if format in (Format.F32, Format.F16, Format.BF16):
        elements = float_elements(format, pages.copy()).reshape(n, 2, 16 * dim)
        keys = elements[:, 0].reshape(n, dim, 16).transpose(0, 2, 1)
        return keys, elements[:, 1].reshape(n, 16, dim)
    key_codes, value_codes, halves = codes_of(format, dim, pages)
    scales = halves.astype(np.float64)[..., None]
    with np.errstate(invalid="ignore"):  # unused slots hold NaN
        if format is Format.INT8:
            return key_codes * scales[:, 0], value_codes * scales[:, 1]
        keys = (key_codes + scales[:, 1]) * scales[:, 0]
        return rotate(keys), (value_codes + scales[:, 3]) * scales[:, 2]


@dataclass(frozen=True)
class Case:
    """Sequences in a cache, and the query rows at the end of each."""

    cache: Cache
    tables: list[list[int]]
    context_lens: list[int]
    query_lens: list[int]
    query: NDArray[np.float32]  # (tokens, num_heads, head_dim)

    def attend(self, engine: int, chosen: Sequence[int] | None = None) -> NDArray[np.float32]:
        """Attention of the chosen sequences."""
        chosen = range(len(self.tables)) if chosen is None else chosen
        starts = np.cumsum([0, *self.query_lens])
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        query = np.ascontiguousarray(self.query[rows])
        width = max(len(self.tables[i]) for i in chosen)
        tables = np.full((len(chosen), width), 10**8, np.int32)  # a read of it would crash
        for row, i in zip(tables, chosen, strict=True):
            used = -(-self.context_lens[i] // self.cache.shape.block_size)
            row[:used] = self.tables[i][:used]
        query_start = np.cumsum([0] + [self.query_lens[i] for i in chosen], dtype=np.int32)
        contexts = np.array([self.context_lens[i] for i in chosen], np.int32)
        batch = BatchStruct(
            num_tokens=len(query),
            num_seqs=len(chosen),
            table_width=width,
            query_start=address(query_start),
            context_lens=address(contexts),
            block_tables=address(tables),
        )
        out = np.full_like(query, np.nan)
        status = self.cache.library.ap_paged_attention(
            engine,
            self.cache.attention,
            self.cache.struct,
            LAYER,
            batch,
            address(query),
            address(out),
        )
        if status == Status.NO_MEMORY:
            raise MemoryError
        assert status == Status.OK
        return out

    def expected(self) -> Array:
        shape = self.cache.shape
        group = shape.num_heads // shape.num_kv_heads
        outs, start = [], 0
        for table, context, rows in zip(
            self.tables, self.context_lens, self.query_lens, strict=True
        ):
            keys, values = self.cache.read(table, context)
            query = self.query[start : start + rows].astype(np.float64)
            query = query.reshape(rows, shape.num_kv_heads, group, -1)
            # einsum, not matmul: a BLAS has threads of its own
            scores = np.einsum("rhgd,htd->hgrt", query, keys) * shape.scale
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            position = np.arange(context - rows, context)[:, None]
            token = np.arange(context)
            seen = token <= position
            if shape.window:
                seen &= token > position - shape.window
            scores = np.where(seen, scores, -np.inf)
            weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
            weights /= weights.sum(axis=-1, keepdims=True)
            attended = np.einsum("hgrt,htd->rhgd", weights, values)
            outs.append(attended.reshape(rows, shape.num_heads, -1))
            start += rows
        return np.concatenate(outs)


def make_case(
    library: ctypes.CDLL,
    engine: int,
    shape: Shape,
    format: Format,
    query_lens: Sequence[int] = tuple(QUERY_LENS),
    context_lens: Sequence[int] = tuple(CONTEXT_LENS),
    *,
    permutation: int = 0,
    peak: float = 2.0,
    fill: int = 0xFF,
) -> Case:
    """Random sequences whose blocks are spread over the cache; `peak` sharpens the softmax."""
    random = np.random.default_rng(5)
    counts = [-(-context // shape.block_size) for context in context_lens]
    num_blocks = sum(counts) + 3
    order = np.random.default_rng(permutation).permutation(num_blocks).tolist()
    cache = Cache(library, shape, format, num_blocks, fill)
    tables = []
    for context, count in zip(context_lens, counts, strict=True):
        table, order = order[:count], order[count:]
        tables.append(table)
        size = (context, shape.num_kv_heads, shape.head_dim)
        key, value = random.standard_normal((2, *size), np.float32)
        key[..., 3] *= 8  # a channel of outliers
        value += 0.3
        slots = [
            table[i // shape.block_size] * shape.block_size + i % shape.block_size
            for i in range(context)
        ]
        cache.write(engine, key, value, slots)
    size = (sum(query_lens), shape.num_heads, shape.head_dim)
    query = peak * random.standard_normal(size, np.float32)
    return Case(cache, tables, list(context_lens), list(query_lens), query)


def relative_error(out: Array, expected: Array) -> float:
    """The worst of all heads of all rows."""
    norms = np.linalg.norm(expected, axis=-1)
    return float((np.linalg.norm(out - expected, axis=-1) / norms).max())


@pytest.fixture
def single(library: ctypes.CDLL) -> Iterator[int]:
    """An engine of one thread."""
    handle = library.ap_engine_create(1, 0)
    yield handle
    library.ap_engine_destroy(handle)


by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@by_format
def test_attention_is_that_over_the_dequantized_cache(
    library: ctypes.CDLL, single: int, format: Format, shape: Shape
) -> None:
    case = make_case(library, single, shape, format)
    bound = 1e-3 if format in (Format.INT8, Format.INT4) else 1e-5
    assert relative_error(case.attend(single), case.expected()) < bound


@by_format
def test_a_flat_softmax_loses_no_small_weights(
    library: ctypes.CDLL, single: int, format: Format
) -> None:
    """Every weight is below a thousandth of the sum, and values have a common direction."""
    case = make_case(library, single, Shape(3, 1, 64), format, [1], [3000], peak=0.05)
    bound = 1e-3 if format in (Format.INT8, Format.INT4) else 1e-5
    assert relative_error(case.attend(single), case.expected()) < bound


@by_format
@pytest.mark.parametrize("window", [0, 100])
def test_a_row_is_the_same_bits_however_it_is_computed(
    library: ctypes.CDLL, engine: int, format: Format, window: int
) -> None:
    """In one prefill, in chunks of any size, as a decode row; with any threads and blocks."""
    shape = Shape(6, 2, 80, block_size=32, window=window, softcap=5.0 if window else 0.0)
    context = SPLIT + 70
    whole = make_case(library, engine, shape, format, [context], [context])
    expected = whole.attend(engine)
    for sizes in ([1, 1, 1, 2, 5, 16, 17, 60, 150, 73], [context - 1, 1]):
        assert sum(sizes) == context
        ends = np.cumsum(sizes).tolist()
        chunks = replace(
            whole, tables=whole.tables * len(sizes), context_lens=ends, query_lens=list(sizes)
        )
        np.testing.assert_array_equal(chunks.attend(engine), expected)
        last = len(sizes) - 1
        np.testing.assert_array_equal(chunks.attend(engine, [last]), expected[ends[-2] :])
    rows = range(context - 45, context)
    decode_rows = replace(
        whole,
        tables=whole.tables * len(rows),
        context_lens=[row + 1 for row in rows],
        query_lens=[1] * len(rows),
        query=whole.query[rows.start :],
    )
    np.testing.assert_array_equal(decode_rows.attend(engine), expected[rows.start :])


@by_format
def test_threads_and_split_work_do_not_change_bits(library: ctypes.CDLL, format: Format) -> None:
    """One long sequence is shared out by splits, together with short ones that are not."""
    outs = []
    for threads in (1, 2, 3):
        engine = library.ap_engine_create(threads, 0)
        case = make_case(library, engine, Shape(4, 2, 64), format, [1, 2, 1], [9 * SPLIT, 40, 300])
        outs += [case.attend(engine), case.attend(engine)]
        outs.append(np.concatenate([case.attend(engine, [i]) for i in range(3)]))
        library.ap_engine_destroy(engine)
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])


@by_format
def test_where_blocks_lie_and_what_is_beside_does_not_matter(
    library: ctypes.CDLL, single: int, format: Format
) -> None:
    shape = Shape(7, 1, 64, block_size=32)
    cases = [make_case(library, single, shape, format, permutation=i) for i in range(3)]
    assert cases[0].tables != cases[1].tables
    first, *others = (case.attend(single) for case in cases)
    for out in others:
        np.testing.assert_array_equal(out, first)
    for fill in (0, 0x5A):
        beside = make_case(library, single, shape, format, fill=fill)
        np.testing.assert_array_equal(beside.attend(single), first)


@by_format
@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_reaches_the_rows_that_see_it_and_no_others(
    library: ctypes.CDLL, single: int, format: Format, bad: float
) -> None:
    shape, context, position = Shape(4, 2, 64), SPLIT + 30, SPLIT + 5
    case = make_case(library, single, shape, format, [40], [context])
    before = case.attend(single)
    token = np.ones((1, 2, 64), np.float32)
    broken = token.copy()
    broken[0, 1, 7] = bad  # of the second KV head
    slot = case.tables[0][position // PAGE] * PAGE + position % PAGE
    row = position - (context - 40)
    for key, value in ((broken, token), (token, broken)):
        case.cache.write(single, key, value, [slot])
        out = case.attend(single)
        np.testing.assert_array_equal(out[:row], before[:row])
        assert np.isfinite(out[:, :2]).all()
        finite = np.isfinite(out[row:, 2:]).all(axis=-1)
        if np.isnan(bad) or value is broken or format in (Format.INT8, Format.INT4):
            assert not finite.any()
    query = case.query.copy()
    query[3, 1, 9] = bad
    out = replace(case, query=query).attend(single)
    assert np.isnan(out[3, 1]).any()
    np.testing.assert_array_equal(np.delete(out[:row], 3, axis=0), np.delete(before[:row], 3, 0))


# ---- writing ----


def edge_rows(dim: int) -> NDArray[np.float32]:
    """Tokens (n, 1, dim) with what rounding and scales stumble over."""
    random = np.random.default_rng(3)
    rows = random.standard_normal((40, dim), np.float32)
    rows[0] = 0
    rows[1] = 1.5
    rows[2] = -2e-7  # its scale is a subnormal float16
    rows[3] *= 1e-12  # too small for any scale
    rows[4] = 3e4 * np.sign(rows[4])
    rows[5] = np.arange(dim) - dim / 2 + 0.5  # ties
    rows[6, 0] = 1000
    rows[7] = np.abs(rows[7]) + 100
    # magnitudes whose 127th part lies halfway between two float16, to the last bit
    middle = np.float32(127 * (1 + (2 * np.arange(300) + 1) * 2.0**-11))
    halfway = random.uniform(-100, 100, (3, 300, dim)).astype(np.float32)
    halfway[:, :, 5] = np.nextafter(middle, [[0], [128], [1000]], dtype=np.float32)
    halfway[1, :, 5] = middle
    return np.concatenate([rows, halfway.reshape(-1, dim)])[:, None]


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_int8_codes_and_scales_are_those_of_the_torch_kernel(
    library: ctypes.CDLL, engine: int, dim: int
) -> None:
    key = edge_rows(dim)
    value = key[::-1] * 0.37
    num_blocks = len(key) // 32 + 2
    cache = Cache(library, Shape(1, 1, dim, block_size=32), Format.INT8, num_blocks)
    slots = np.random.default_rng(1).permutation(32 * num_blocks)[: len(key)]
    cache.write(engine, key, value, slots.tolist())
    pages = np.concatenate([cache.pages(block)[0] for block in range(num_blocks)])
    *codes, scales = codes_of(Format.INT8, dim, pages)
    for number, written in enumerate((key, value)):
        expected, scale = quantize_int8(torch.from_numpy(np.ascontiguousarray(written[:, 0])))
        got = codes[number].reshape(-1, dim)[slots]
        np.testing.assert_array_equal(got, expected.numpy())
        np.testing.assert_array_equal(scales[:, number].ravel()[slots], scale.numpy())


@pytest.mark.parametrize(
    ("format", "dtype"), [(Format.F32, torch.float32), (Format.F16, torch.float16),
                          (Format.BF16, torch.bfloat16)]
)  # fmt: skip
def test_float_elements_are_rounded_as_torch_does(
    library: ctypes.CDLL, engine: int, format: Format, dtype: torch.dtype
) -> None:
    key = edge_rows(48)[:48]
    cache = Cache(library, Shape(1, 1, 48), format, 3)
    slots = list(range(len(key)))
    cache.write(engine, key, -key, slots)
    keys, values = cache.read([0, 1, 2], len(key))
    expected = torch.from_numpy(key[:, 0]).to(dtype).double().numpy()
    np.testing.assert_array_equal(keys[0], expected)
    np.testing.assert_array_equal(values[0], -expected)


@pytest.mark.parametrize("dim", [16, 80, 96, 256])
def test_int4_is_within_half_a_step(library: ctypes.CDLL, engine: int, dim: int) -> None:
    cache = Cache(library, Shape(1, 1, dim), Format.INT4, 3)
    rows = edge_rows(dim)[:48]
    cache.write(engine, rows, rows, list(range(len(rows))))
    pages = np.concatenate([cache.pages(block)[0] for block in range(3)])
    read = [x.reshape(48, dim)[: len(rows)] for x in decode(Format.INT4, dim, pages)]
    *codes, scales = codes_of(Format.INT4, dim, pages)
    for number, (x, got) in enumerate(zip((rotate(rows[:, 0]), rows[:, 0]), read, strict=True)):
        got = rotate(got) if number == 0 else got
        span = x.max(axis=-1) - x.min(axis=-1)
        highest = np.abs(x).max(axis=-1)
        step = np.maximum(span / 15, highest / 2048)
        # float16 rounds the scale, times up to 15, and the offset, of which half a code at most
        limit = step * (0.5 + 15 * 2.0**-11 + 0.5) + 1e-6
        assert (np.abs(got - x).max(axis=-1) <= limit).all()
        stored = scales[:, 2 * number].ravel()[: len(rows)]
        np.testing.assert_allclose(stored, step, rtol=1e-3, atol=6e-8)
        spread = codes[number].reshape(48, dim)[8 : len(rows)]
        assert (spread.min(axis=-1) == 0).all()
        assert (spread.max(axis=-1) == 15).all()


def test_a_write_leaves_all_other_slots_alone(library: ctypes.CDLL, engine: int) -> None:
    for format in FORMATS:
        cache = Cache(library, Shape(2, 2, 80, block_size=32), format, 3)
        before = cache.arena.copy()
        key = np.ones((1, 2, 80), np.float32)
        slot = 32 + 21  # block 1, page 1, token 5
        cache.write(engine, key, 2 * key, [slot])
        changed = cache.pages(1).copy()
        keys, values = decode(format, 80, changed[:, 1])
        np.testing.assert_allclose(values[:, 5], 2, rtol=1e-2)
        np.testing.assert_allclose(keys[:, 5], 1, rtol=1e-2)
        kept = np.delete(np.stack([keys, values]), 5, axis=2)
        assert np.isnan(kept).all()
        cache.pages(1)[:, 1] = before[0]
        np.testing.assert_array_equal(cache.arena, before)


# ---- what is refused ----


@pytest.mark.parametrize("format", FORMATS)
def test_page_bytes(library: ctypes.CDLL, format: Format) -> None:
    element = {Format.F32: 4, Format.F16: 2, Format.BF16: 2, Format.INT8: 1, Format.INT4: 0.5}
    scales = {Format.INT8: 64, Format.INT4: 128}
    for dim in (32, 64, 96, 128, 256):
        expected = 2 * 16 * dim * element[format] + scales.get(format, 0)
        assert library.ap_page_bytes(format, dim) == expected
    for dim in (0, -16, 8, 24, 272):
        assert library.ap_page_bytes(format, dim) == -1
    assert library.ap_page_bytes(5, 64) == -1
    assert library.ap_page_bytes(-1, 64) == -1


def test_slots_outside_of_the_cache_are_refused(library: ctypes.CDLL, single: int) -> None:
    cache = Cache(library, Shape(1, 1, 64), Format.INT8, 2)
    before = cache.arena.copy()
    key = np.ones((2, 1, 64), np.float32)
    for slot in (-1, 32):
        slots = np.array([0, slot], np.int64)
        status = library.ap_kv_write(
            *(single, cache.attention, cache.struct, LAYER),
            *(address(key), address(key), 2, address(slots)),
        )
        assert status == Status.BAD_ARGUMENT
    np.testing.assert_array_equal(cache.arena, before)


def test_a_workspace_limit_is_kept(library: ctypes.CDLL) -> None:
    engine = library.ap_engine_create(1, 4096)
    case = make_case(library, engine, Shape(2, 1, 64), Format.INT8, [1], [20])
    with pytest.raises(MemoryError):
        case.attend(engine)
    library.ap_engine_destroy(engine)
