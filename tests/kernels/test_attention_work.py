from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import UnsupportedModelError
from appliance.kernels.kv_cache import KVBlocks, KVFormat
from appliance.kernels.paged_attention.work import (
    EMPTY,
    MAX_SPANS,
    SPAN_STEP,
    TILE_ROWS,
    plan_attention,
)
from appliance.kernels.ragged import RaggedBatch

BLOCK_SIZE = 16


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
        host_block_tables=(),
    )


contexts = st.lists(st.integers(1, 200_000), max_size=6)
chunks = st.lists(st.integers(1, 1000), max_size=4)


@settings(max_examples=200, deadline=None, derandomize=True)
@given(contexts, chunks)
def test_every_key_of_every_decode_row_is_in_one_span(
    decodes: list[int], chunks: list[int]
) -> None:
    work = plan_attention(batch_of(decodes, chunks), BLOCK_SIZE)
    spans = work.spans.tolist()
    for sequence, context in enumerate(decodes):
        own = [(begin, end) for i, begin, end, _ in spans if i == sequence]
        assert own[0][0] == 0
        assert own[-1][1] == context
        assert all(begin < end and begin % SPAN_STEP == 0 for begin, end in own)
        assert [end for _, end in own[:-1]] == [begin for begin, _ in own[1:]]
        assert len(own) <= MAX_SPANS
    assert len(spans) == sum(1 for i, *_ in spans if i < len(decodes))


@settings(max_examples=200, deadline=None, derandomize=True)
@given(contexts)
def test_every_partial_result_is_merged_once(decodes: list[int]) -> None:
    work = plan_attention(batch_of(decodes, []), BLOCK_SIZE)
    written = [(sequence, partial) for sequence, _, _, partial in work.spans.tolist()]
    merged = [
        (sequence, partial)
        for sequence, first, count, _ in work.merges.tolist()
        for partial in range(first, first + count)
    ]
    assert [pair for pair in written if pair[1] != EMPTY] == merged
    assert [partial for _, partial in merged] == list(range(work.num_partials))
    single = [sequence for sequence, partial in written if partial == EMPTY]
    assert sorted({*single, *work.merges[:, 0].tolist()}) == list(range(len(decodes)))


@settings(max_examples=100, deadline=None, derandomize=True)
@given(contexts, chunks)
def test_every_row_of_every_chunk_is_in_one_tile(decodes: list[int], chunks: list[int]) -> None:
    work = plan_attention(batch_of(decodes, chunks), BLOCK_SIZE)
    covered = [
        (sequence, row)
        for sequence, first, _, _ in work.tiles.tolist()
        for row in range(first, min(first + TILE_ROWS, chunks[sequence - len(decodes)]))
    ]
    expected = [(len(decodes) + i, row) for i, rows in enumerate(chunks) for row in range(rows)]
    assert covered == expected


def test_a_row_is_cut_by_its_own_length_alone() -> None:
    alone = plan_attention(batch_of([5000], []), BLOCK_SIZE).spans[:, 1:3]
    among = plan_attention(batch_of([70, 5000, 100_000], [300]), BLOCK_SIZE).spans
    assert torch.equal(among[among[:, 0] == 1][:, 1:3], alone)


def test_one_long_sequence_makes_work_for_a_whole_gpu() -> None:
    # With 8 KV heads that is 512 programs.
    assert len(plan_attention(batch_of([32_768], []), BLOCK_SIZE).spans) == MAX_SPANS


def test_the_sizes_of_a_fixed_table_depend_on_its_capacity_alone() -> None:
    short, long = (
        plan_attention(batch_of(decodes, []), BLOCK_SIZE, span_capacity=80)
        for decodes in ([1, 20], [300, 9000])
    )
    for name in ("spans", "merges"):
        assert getattr(short, name).shape == getattr(long, name).shape
    assert short.num_partials == long.num_partials == 80
    assert (short.spans[2:] == EMPTY).all()
    assert (short.merges == EMPTY).all()


def test_the_tables_are_aligned_parts_of_one_tensor() -> None:
    work = plan_attention(batch_of([1, 300, 20], [7]), BLOCK_SIZE)
    addresses = [part.data_ptr() for part in (work.spans, work.merges, work.tiles)]
    assert all(address % 16 == addresses[0] % 16 for address in addresses)
    assert len({part.untyped_storage().data_ptr() for part in (work.spans, work.tiles)}) == 1


@pytest.mark.parametrize(
    ("heads", "head_dim", "block_size", "dtype", "said"),
    [
        ((4, 2), 264, 16, torch.bfloat16, "head_dim 264; supported: multiples of 16 up to 256"),
        ((4, 2), 40, 16, torch.bfloat16, "head_dim 40"),
        ((34, 2), 64, 16, torch.bfloat16, "34 query heads on 2 KV heads; supported: 1 to 16"),
        ((5, 2), 64, 16, torch.bfloat16, "5 query heads on 2 KV heads"),
        ((4, 2), 64, 64, torch.bfloat16, "block size 64; supported: 16, 32"),
        ((4, 2), 64, 16, torch.float64, "float64; supported: torch.bfloat16, torch.float16"),
    ],
)
def test_what_no_kernel_covers_is_named_with_what_is(
    heads: tuple[int, int], head_dim: int, block_size: int, dtype: torch.dtype, said: str
) -> None:
    from appliance.kernels.paged_attention.launch import paged_attention

    cache = KVBlocks.allocate(
        KVFormat.BF16,
        num_blocks=1,
        block_size=block_size,
        num_kv_heads=heads[1],
        head_dim=head_dim,
        device=torch.device("cpu"),
    )
    work = plan_attention(batch_of([1], []), BLOCK_SIZE)
    with pytest.raises(UnsupportedModelError, match=said):
        paged_attention(torch.zeros(1, heads[0], head_dim, dtype=dtype), cache, work, scale=1.0)


def test_keys_and_values_of_unlike_dtypes_are_refused() -> None:
    from appliance.kernels.kv_write.launch import write_kv

    cache = KVBlocks.allocate(
        KVFormat.INT8,
        num_blocks=1,
        block_size=16,
        num_kv_heads=2,
        head_dim=32,
        device=torch.device("cpu"),
    )
    key = torch.zeros(1, 2, 32)
    with pytest.raises(UnsupportedModelError, match=r"supported: torch\.bfloat16"):
        write_kv(key, key.double(), cache, torch.zeros(1, dtype=torch.int64))


def test_specs_and_references_load_no_triton() -> None:
    names = [
        f"appliance.kernels.{name}"
        for name in (
            "paged_attention.spec",
            "paged_attention.work",
            "paged_attention.reference",
            "kv_write.spec",
            "kv_write.reference",
        )
    ]
    code = f"import sys, {', '.join(names)}; sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
