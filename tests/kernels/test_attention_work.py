from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from attention_spans import cut, span_table
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import UnsupportedModelError
from appliance.kernels.kv_cache import KVFormat, KVPages
from appliance.kernels.paged_attention.work import (
    MAX_SPANS,
    MIN_SPAN,
    TILE_ROWS,
    most_spans,
    prefill_tiles,
)
from appliance.kernels.ragged import RaggedBatch


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


@settings(max_examples=200, derandomize=True)
@given(contexts)
def test_every_key_of_every_decode_row_is_in_one_span(decodes: list[int]) -> None:
    spans = span_table(np.array(decodes)).tolist()
    assert [row for *_, row in spans] == list(range(len(spans)))
    for sequence, context in enumerate(decodes):
        own = [(begin, end) for i, begin, end, _ in spans if i == sequence]
        assert own[0][0] == 0
        assert own[-1][1] == context
        assert all(begin < end and begin % MIN_SPAN == 0 for begin, end in own) or context == 0
        assert [end for _, end in own[:-1]] == [begin for begin, _ in own[1:]]
        assert len(own) <= most_spans(context) <= MAX_SPANS
    assert [i for i, *_ in spans] == sorted(i for i, *_ in spans)


@settings(max_examples=200, derandomize=True)
@given(st.integers(0, 100_000), st.integers(0, 100_000))
def test_a_table_for_longer_contexts_has_room_for_shorter_ones(a: int, b: int) -> None:
    assert cut(np.array([min(a, b)]))[0][0] <= most_spans(max(a, b))


@settings(max_examples=100, derandomize=True)
@given(st.lists(st.integers(1, 1000), max_size=4))
def test_every_row_of_every_chunk_is_in_one_tile(chunks: list[int]) -> None:
    covered = [
        (sequence, row)
        for sequence, first in prefill_tiles(batch_of([9, 9], chunks)).tolist()
        for row in range(first, min(first + TILE_ROWS, chunks[sequence - 2]))
    ]
    assert covered == [(2 + i, row) for i, rows in enumerate(chunks) for row in range(rows)]


def test_a_row_is_cut_by_its_own_length_alone() -> None:
    alone = span_table(np.array([5000]))
    among = span_table(np.array([70, 5000, 100_000]))
    assert among[among[:, 0] == 1][:, 1:3].tolist() == alone[:, 1:3].tolist()


def test_one_long_sequence_makes_work_for_a_whole_gpu() -> None:
    # With 8 KV heads that is 512 programs.
    assert len(span_table(np.array([32_768]))) == MAX_SPANS


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
    from appliance.kernels.paged_attention.launch import check_supported

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
            "paged_attention.variant",
            "paged_attention.work",
            "paged_attention.reference",
            "packed_matmul.tiles",
            "packed_matmul.variant",
            "fp8_matmul.tiles",
            "kv_write.reference",
            "kv_page.reference",
        )
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
