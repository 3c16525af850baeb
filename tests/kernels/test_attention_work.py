from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.kernels.attention_spans import begin_of, span_table

from appliance.errors import UnsupportedModelError
from appliance.kernels.attention.work import (
    SPAN_BOUNDS,
    SPAN_LENGTHS,
    TILE_ROWS,
    most_spans,
    prefill_tiles,
    span_of,
)
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.rows.ragged import RaggedBatch


def batch_of(decodes: list[int], chunks: list[int]) -> RaggedBatch:
    query_lens = (*[1] * len(decodes), *chunks)
    context_lens = (*decodes, *[rows + 5 for rows in chunks])
    nothing = torch.zeros(0, dtype=torch.int32)
    return RaggedBatch(
        query_start=nothing,
        context_lens=nothing,
        block_tables=nothing,
        slot_mapping=nothing,
        num_decodes=len(decodes),
        host_query_lens=query_lens,
        host_context_lens=context_lens,
    )


contexts = st.lists(st.integers(0, 200_000), min_size=1, max_size=6)
windows = st.none() | st.integers(1, 5000)


@settings(max_examples=200, derandomize=True)
@given(contexts, windows, st.integers(1, 16))
def test_every_key_that_a_decode_row_sees_is_in_one_span(
    decodes: list[int], window: int | None, rows: int
) -> None:
    spans = span_table(decodes, [rows] * len(decodes), window).tolist()
    for sequence, context in enumerate(decodes):
        own = [span for span in spans if span[0] == sequence]
        lowest = 0 if window is None else max(context - rows - window + 1, 0)
        assert own[0][1] == lowest // 32 * 32
        assert own[-1][2] == context
        assert all(begin < end for _, begin, end, *_ in own) or context == 0
        begins = [begin for _, begin, *_ in own[1:]]
        assert [end for _, _, end, *_ in own[:-1]] == begins
        assert all(begin % min(SPAN_LENGTHS) == 0 for begin in begins)
        assert len(own) <= most_spans(context, rows, window)
        numbers = [number for *_, number, _, _ in own]
        assert numbers == list(range(own[0][4], own[0][5] + 1))
    assert [i for i, *_ in spans] == sorted(i for i, *_ in spans)


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 2_000_000))
def test_a_span_begins_where_the_one_before_ends(position: int) -> None:
    span = span_of(position)
    assert begin_of(span) <= position < begin_of(span + 1)
    assert span_of(begin_of(span)) == span


def test_bounds_are_ends_of_spans() -> None:
    for begin, end, length in zip(SPAN_BOUNDS, SPAN_BOUNDS[1:], SPAN_LENGTHS, strict=False):
        assert (end - begin) % length == 0


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 100_000), st.integers(0, 100_000), windows)
def test_a_table_for_longer_contexts_has_room_for_shorter_ones(
    a: int, b: int, window: int | None
) -> None:
    assert len(span_table([min(a, b)], None, window)) <= most_spans(max(a, b), 1, window)


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 1000), max_size=4))
def test_every_row_of_every_chunk_is_in_one_tile(chunks: list[int]) -> None:
    covered = [
        (sequence, row)
        for sequence, first in prefill_tiles([1, 1, *chunks], 2).tolist()
        for row in range(first, min(first + TILE_ROWS, chunks[sequence - 2]))
    ]
    assert covered == [(2 + i, row) for i, rows in enumerate(chunks) for row in range(rows)]


def test_keys_are_cut_where_they_stand() -> None:
    """The context and the other sequences make no difference."""
    alone = span_table([5000])
    among = span_table([70, 5000, 100_000])
    assert among[among[:, 0] == 1][:, 1:].tolist() == alone[:, 1:].tolist()
    longer = among[among[:, 0] == 2]
    assert longer[: len(alone) - 1, 1:4].tolist() == alone[:-1, 1:4].tolist()


def test_one_long_sequence_makes_work_for_a_whole_gpu() -> None:
    # With 8 KV heads that is 800 programs.
    assert len(span_table([32_768])) == 100


def test_a_window_makes_no_work_beyond_it() -> None:
    assert len(span_table([32_768], None, 128)) == 1
    assert most_spans(32_768, 1, 128) == 2


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "said"),
    [
        ((4, 2), 112, 32, torch.bfloat16, "head_dim 112; supported: 16, 32, 64, 80, 96, 128, 256"),
        ((34, 2), 64, 32, torch.bfloat16, "34 query heads on 2 KV heads; supported: 1 to 16"),
        ((5, 2), 64, 32, torch.bfloat16, "5 query heads on 2 KV heads"),
        ((256, 256), 64, 32, torch.bfloat16, "256 KV heads; supported: up to 128"),
        ((4, 2), 64, 16, torch.bfloat16, "block size 16; supported: 32"),
        ((4, 2), 64, 32, torch.float64, "float64; supported: torch.bfloat16, torch.float16"),
    ],
)
def test_what_no_kernel_covers_is_named_with_what_is(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, said: str
) -> None:
    from appliance.kernels.attention.launch import check_supported

    with pytest.raises(UnsupportedModelError, match=f"layer 7: .*{said}"):
        check_supported(*heads, head_dim, block_size, dtype, KVFormat.INT4, layer=7)


def test_keys_and_values_of_unlike_dtypes_are_refused() -> None:
    from appliance.kernels.kv_write.launch import write_kv

    cache = KVPages.allocate(
        KVFormat.INT8,
        num_blocks=1,
        block_size=32,
        num_kv_heads=2,
        head_dim=32,
        device=torch.device("cpu"),
    )
    key = torch.zeros(1, 2, 32)
    with pytest.raises(UnsupportedModelError, match=r"supported: torch\.bfloat16"):
        write_kv(key, key.double(), cache, torch.zeros(1, dtype=torch.int64))


def test_tiles_variants_and_references_load_no_triton() -> None:
    names = [
        f"appliance.kernels.{name}"
        for name in (
            "attention.variant",
            "attention.work",
            "attention.reference",
            "packed_matmul.tiles",
            "packed_matmul.variant",
            "kv_write.reference",
            "kv_page.reference",
        )
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
