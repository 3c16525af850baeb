"""Attention over pages, against float64 attention over the dequantized cache."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray
from support.kernels.cpu_pages import (
    BLOCK,
    FORMATS,
    INTEGER,
    LAYER,
    SEALED,
    Array,
    Cache,
    Shape,
    address,
)

from appliance.kernels.cpu.step_structs import BatchStruct
from appliance.kernels.cpu.structs import Format, Status

SPLIT = 256  # tokens; it only shows which context lengths are worth trying


SHAPES = [
    Shape(2, 2, 16),
    Shape(9, 3, 64),
    Shape(4, 1, 80, block_size=32, window=70),
    Shape(7, 1, 96, block_size=32, softcap=2.0),
    Shape(8, 1, 128, window=300, softcap=30.0),
    Shape(4, 1, 256, block_size=32, window=33),
    Shape(14, 2, 64, block_size=32),
    Shape(25, 1, 16, window=1),
    Shape(8, 2, 64, block_size=32, window=128, sinks=True),
    Shape(4, 2, 512, block_size=32),
    Shape(6, 3, 32, softcap=30.0, sinks=True),
]
QUERY_LENS = [1, 1, 1, 1, 1, 1, 1, 1, 1, 5, 30, 1]
CONTEXT_LENS = [1, 15, 16, 17, 64, 65, SPLIT - 1, SPLIT, SPLIT + 1, 5, SPLIT + 20, 300]


@dataclass(frozen=True)
class Case:
    """Sequences in a cache, and the query rows at the end of each sequence."""

    cache: Cache
    tables: list[list[int]]
    context_lens: list[int]
    query_lens: list[int]
    query: NDArray[np.float32]  # (tokens, num_heads, head_dim)

    def attend(self, engine: int, chosen: Sequence[int] | None = None) -> NDArray[np.float32]:
        """The attention of the chosen sequences."""
        if self.cache.format in SEALED:
            return self.cut_at_blocks(chosen).attend_pieces(engine)
        return self.attend_pieces(engine, chosen)

    def cut_at_blocks(self, chosen: Sequence[int] | None) -> Case:
        """Sequences whose rows lie in one block each, as sealed layers require."""
        chosen = range(len(self.tables)) if chosen is None else chosen
        starts = np.cumsum([0, *self.query_lens])
        rows = np.concatenate([np.arange(starts[i], starts[i + 1]) for i in chosen])
        pieces = []
        for i in chosen:
            end, first = self.context_lens[i], self.context_lens[i] - self.query_lens[i]
            while first < end:
                last = min(end, (first // BLOCK + 1) * BLOCK)
                pieces.append((self.tables[i], last, last - first))
                first = last
        tables, contexts, lens = (list(part) for part in zip(*pieces, strict=True))
        return replace(
            self, tables=tables, context_lens=contexts, query_lens=lens, query=self.query[rows]
        )

    def attend_pieces(
        self, engine: int, chosen: Sequence[int] | None = None
    ) -> NDArray[np.float32]:
        """One call of the library."""
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
        size = self.cache.shape.block_size
        last_blocks = [self.tables[i][(self.context_lens[i] - 1) // size] for i in chosen]
        opened = np.array(last_blocks, np.int32)
        batch = BatchStruct(
            num_tokens=len(query),
            num_seqs=len(chosen),
            table_width=width,
            query_start=address(query_start),
            context_lens=address(contexts),
            block_tables=address(tables),
            open_blocks=address(opened),
        )
        out = np.full_like(query, np.nan)
        status = self.cache.library.section_attend(
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

    def expected(self, *, opened: bool = False) -> Array:
        """The result in float64; `opened` reads as if no block were sealed."""
        shape = self.cache.shape
        group = shape.num_heads // shape.num_kv_heads
        outs, start = [], 0
        for table, context, rows in zip(
            self.tables, self.context_lens, self.query_lens, strict=True
        ):
            keys, values = self.cache.read(table, context, opened=opened)
            query = self.query[start : start + rows].astype(np.float64)
            query = query.reshape(rows, shape.num_kv_heads, group, -1)
            # einsum, not matmul: a BLAS has threads of its own
            scores = np.einsum("rhgd,htd->hgrt", query, keys) * shape.scale
            position = np.arange(context - rows, context)[:, None]
            token = np.arange(context)
            own = np.zeros((rows, context), bool)
            open_values = values
            if self.cache.format in SEALED:
                own = position // BLOCK == token // BLOCK
                open_keys, open_values = self.cache.read(table, context, opened=True)
                open_scores = np.einsum("rhgd,htd->hgrt", query, open_keys) * shape.scale
                scores = np.where(own, open_scores, scores)
                values = np.nan_to_num(values)  # tokens of the last block, which is not full
            if shape.softcap:
                scores = shape.softcap * np.tanh(scores / shape.softcap)
            seen = token <= position
            if shape.window:
                seen &= token > position - shape.window
            scores = np.where(seen, scores, -np.inf)
            highest = scores.max(axis=-1, keepdims=True)
            sinks = self.cache.sinks.reshape(shape.num_kv_heads, group, 1, 1)
            sink = np.exp(sinks - highest) if shape.sinks else 0.0
            weights = np.exp(scores - highest)
            weights /= weights.sum(axis=-1, keepdims=True) + sink
            attended = np.einsum("hgrt,htd->rhgd", weights * ~own, values)
            attended += np.einsum("hgrt,htd->rhgd", weights * own, open_values)
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
    if format in SEALED:
        shape = replace(shape, block_size=BLOCK)
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


def relative_error(out: Array, expected: Array, *, sinks: bool = False) -> float:
    """Worst error of a row's head; with sinks, norms below a tenth of the largest become that."""
    norms = np.linalg.norm(expected, axis=-1)
    if sinks:
        norms = np.maximum(norms, 0.1 * norms.max())
    return float((np.linalg.norm(out - expected, axis=-1) / norms).max())


def bound(format: Format) -> float:
    return 1e-3 if format in INTEGER else 1e-5


by_format = pytest.mark.parametrize("format", FORMATS, ids=lambda format: format.name)


# 16-bit floats share all code with 32-bit ones but the load of a vector.
EVERY = {Format.F16: SHAPES[::2], Format.BF16: SHAPES[1::2]}
CASES = [(format, shape) for format in FORMATS for shape in EVERY.get(format, SHAPES)]


@pytest.mark.parametrize(("format", "shape"), CASES, ids=lambda of: getattr(of, "name", str(of)))
def test_attention_is_that_over_the_dequantized_cache(
    library: ctypes.CDLL, single: int, format: Format, shape: Shape
) -> None:
    case = make_case(library, single, shape, format)
    out, expected = case.attend(single), case.expected()
    if format is not Format.SEALED:
        assert relative_error(out, expected, sinks=shape.sinks) < bound(format)
        return
    # The query has 8 bits there, which must cost next to nothing compared with sealing.
    sealing = np.square(case.expected(opened=True) - expected).sum()
    limit = 0.1 * sealing + np.square(1e-3 * expected).sum()
    assert np.square(out - expected).sum() < limit


@by_format
def test_a_flat_softmax_loses_no_small_weights(
    library: ctypes.CDLL, single: int, format: Format
) -> None:
    """Each weight is below a thousandth of the sum, and values have a common direction."""
    case = make_case(library, single, Shape(3, 1, 64), format, [1], [3000], peak=0.05)
    assert relative_error(case.attend(single), case.expected()) < bound(format)


@by_format
@pytest.mark.parametrize(("engine", "window"), [(1, 100), (3, 0)], indirect=["engine"])
def test_a_row_is_the_same_bits_however_it_is_computed(
    library: ctypes.CDLL, engine: int, format: Format, window: int
) -> None:
    """One prefill, chunks of any size or decode rows, with any number of threads and blocks."""
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
    """One long sequence is divided into splits, together with short ones that are not."""
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
    size = case.cache.shape.block_size
    slot = case.tables[0][position // size] * size + position % size
    row = position - (context - 40)
    for key, value in ((broken, token), (token, broken)):
        case.cache.write(single, key, value, [slot])
        out = case.attend(single)
        np.testing.assert_array_equal(out[:row], before[:row])
        assert np.isfinite(out[:, :2]).all()
        finite = np.isfinite(out[row:, 2:]).all(axis=-1)
        if np.isnan(bad) or value is broken or format in INTEGER:
            assert not finite.any()
    query = case.query.copy()
    query[3, 1, 9] = bad
    out = replace(case, query=query).attend(single)
    assert np.isnan(out[3, 1]).any()
    np.testing.assert_array_equal(np.delete(out[:row], 3, axis=0), np.delete(before[:row], 3, 0))


def test_a_workspace_limit_is_kept(library: ctypes.CDLL) -> None:
    engine = library.ap_engine_create(1, 4096)
    case = make_case(library, engine, Shape(2, 1, 64), Format.INT8, [1], [20])
    with pytest.raises(MemoryError):
        case.attend(engine)
    library.ap_engine_destroy(engine)
