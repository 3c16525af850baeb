from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention import reference
from appliance.kernels.paged_attention.launch import paged_attention, plan_attention

if TYPE_CHECKING:
    from tests.kernels.triton_interpreter.conftest import Case, MakeCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest error, as a share of the largest result, in reference arithmetic of float64. Weights are
# rounded to the dtype of the products, so it is about one unit in the last place of that.
BOUNDS = {BF16: 8e-3, FP16: 1e-3, FP32: 5e-6}
# Decode rows of one and several spans, then chunks: whole, continued, of one row.
QUERY_LENS = (1, 1, 1, 20, 37, 1)
CONTEXT_LENS = (1, 17, 300, 20, 100, 33)


def attend(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    span_capacity: int | None = None,
) -> torch.Tensor:
    work = plan_attention(case.batch, case.cache.block_size, span_capacity=span_capacity)
    scale = case.query.shape[-1] ** -0.5
    return paged_attention(
        case.query, case.cache, work, scale=scale, window=window, softcap=softcap
    )


def assert_matches_reference(
    case: Case, window: int | None = None, softcap: float | None = None, bound: float | None = None
) -> None:
    found = attend(case, window, softcap)
    assert found.dtype == case.query.dtype
    expected = reference.paged_attention(
        case.query.double(),
        case.cache,
        case.batch,
        scale=case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
    )
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (bound or BOUNDS[case.query.dtype])  # NaN is not


def test_this_process_interprets() -> None:
    assert os.environ["TRITON_INTERPRET"] == "1"


@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [
        (KVFormat.BF16, BF16),
        (KVFormat.FP16, FP16),
        (KVFormat.FP32, FP32),
        (KVFormat.INT8, BF16),
        (KVFormat.INT8, FP16),
        (KVFormat.INT8, FP32),
        (KVFormat.BF16, FP32),
    ],
)
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (40, 5.0)])
def test_every_cache_format(
    make_case: MakeCase,
    kv_format: KVFormat,
    dtype: torch.dtype,
    window: int | None,
    softcap: float | None,
) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format, dtype=dtype)
    assert_matches_reference(case, window, softcap)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "block_size"),
    [
        (2, 2, 96, 16),
        (9, 3, 64, 16),
        (8, 2, 128, 32),
        (8, 1, 80, 32),
        (4, 1, 256, 16),
        (16, 1, 16, 32),
    ],
)
@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_every_shape_of_heads(
    make_case: MakeCase,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    kv_format: KVFormat,
) -> None:
    case = make_case(
        QUERY_LENS,
        CONTEXT_LENS,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        kv_format=kv_format,
    )
    assert_matches_reference(case, window=90)


def test_decode_lengths_around_blocks_tiles_and_spans(make_case: MakeCase) -> None:
    lengths = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 513, 770)
    case = make_case([1] * len(lengths), lengths, dtype=FP32, kv_format=KVFormat.FP32)
    assert_matches_reference(case)


def test_chunk_lengths_around_tiles(make_case: MakeCase) -> None:
    chunks = [(2, 2), (15, 16), (16, 17), (31, 64), (32, 33), (127, 127), (128, 130), (129, 129)]
    query_lens, context_lens = zip(*chunks, strict=True)
    case = make_case(query_lens, context_lens, dtype=FP32, kv_format=KVFormat.FP32)
    assert_matches_reference(case)


@pytest.mark.parametrize("window", [1, 15, 16, 64, 128, 129, 1000])
def test_windows(make_case: MakeCase, window: int) -> None:
    # A window shorter than the context leaves whole spans without a visible key.
    case = make_case((1, 1, 70), (700, 20, 90), dtype=FP32, kv_format=KVFormat.FP32)
    assert_matches_reference(case, window)


def test_large_scores_do_not_overflow(make_case: MakeCase) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, dtype=FP32, kv_format=KVFormat.FP32)
    case.query.mul_(200)  # and so are the errors in the exponents
    assert_matches_reference(case, bound=200 * BOUNDS[FP32])
    assert_matches_reference(case, softcap=30.0, bound=200 * BOUNDS[FP32])


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_where_the_blocks_lie_changes_no_bit(make_case: MakeCase, kv_format: KVFormat) -> None:
    first, second = (
        make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format, blocks_seed=seed)
        for seed in (0, 1)
    )
    assert first.batch.host_block_tables != second.batch.host_block_tables
    assert torch.equal(attend(first, window=50), attend(second, window=50))


@pytest.mark.parametrize("window", [None, 50])
def test_neighbours_change_no_bit(make_case: MakeCase, window: int | None) -> None:
    together = attend(make_case((1, 1, 40), (300, 64, 60)), window).split([1, 1, 40])
    alone = make_case((1,), (300,))
    assert torch.equal(attend(alone, window), together[0])


@pytest.mark.parametrize("window", [None, 50])
def test_how_a_prompt_is_cut_changes_no_bit(make_case: MakeCase, window: int | None) -> None:
    whole = attend(make_case((150,), (150,)), window)
    first = attend(make_case((67,), (67,)), window)
    # The same sequence, whose first 67 tokens were computed in an earlier step.
    second = make_case((83,), (150,))
    assert torch.equal(whole[:67], first)
    assert torch.equal(whole[67:], attend(second, window))


def test_empty_rows_of_a_fixed_table_change_no_bit(make_case: MakeCase) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS)
    assert torch.equal(attend(case), attend(case, span_capacity=9))


def test_rows_of_a_fused_projection(make_case: MakeCase) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS)
    num_tokens, num_heads, head_dim = case.query.shape
    fused = torch.full((num_tokens, num_heads + 2, head_dim), torch.nan, dtype=FP16)
    fused[:, :num_heads] = case.query
    view = replace(case, query=fused[:, :num_heads])
    assert view.query.stride(0) != case.query.stride(0)
    assert torch.equal(attend(case), attend(view))
