from __future__ import annotations

import itertools
import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch
from attention_spans import span_table
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.errors import UnsupportedModelError
from appliance.kernels.kv_cache import KVFormat
from appliance.kernels.paged_attention import reference
from appliance.kernels.paged_attention.launch import (
    check_supported,
    decode_spans,
    paged_attention,
    plan_attention,
)
from appliance.kernels.ragged import RaggedBatch
from appliance.kernels.target import target_of

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case, MakeCase

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
# Largest error, as a share of the largest result, in reference arithmetic of float64. Weights are
# rounded to the dtype of the products, so it is about one unit in the last place of that.
BOUNDS = {BF16: 8e-3, FP16: 1e-3, FP32: 5e-6}
PAGED = [KVFormat.FP16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4]
# Decode rows of one and several spans, then chunks: whole, continued, of one row.
QUERY_LENS = (1, 1, 1, 20, 37, 1)
CONTEXT_LENS = (1, 17, 300, 20, 100, 33)


def attend(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> torch.Tensor:
    work = plan_attention(case.batch, case.cache.block_size)
    return paged_attention(
        case.query,
        case.cache,
        work,
        scale=scale or case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )


def assert_matches_reference(
    case: Case,
    window: int | None = None,
    softcap: float | None = None,
    bound: float | None = None,
    sinks: torch.Tensor | None = None,
    scale: float | None = None,
) -> None:
    found = attend(case, window, softcap, sinks, scale)
    assert found.dtype == case.query.dtype
    expected = reference.paged_attention(
        case.query.double(),
        case.cache,
        case.batch,
        scale=scale or case.query.shape[-1] ** -0.5,
        window=window,
        softcap=softcap,
        sinks=sinks,
    )
    error = (found.double() - expected).abs().max() / expected.abs().max()
    assert error < (bound or BOUNDS[case.query.dtype])  # NaN is not


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_format", "words"),
    [
        ((8, 2, 72, 32), BF16, KVFormat.BF16, r"layer 3: .*head_dim 72; supported: 16, 32, 64"),
        ((34, 2, 64, 32), BF16, KVFormat.BF16, r"34 query heads on 2 KV heads; .*1 to 16"),
        ((8, 2, 64, 16), BF16, KVFormat.INT8, r"block size 16; supported: 32"),
        ((8, 2, 64, 32), BF16, KVFormat.K8V4, r"k8v4; supported: .*int8"),
        ((8, 2, 64, 32), torch.float64, KVFormat.BF16, r"float64; supported: torch.bfloat16"),
        ((8, 2, 256, 32), FP32, KVFormat.INT8, r"int8 and head_dim 256; supported: bfloat16"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: tuple[int, int, int, int], dtype: torch.dtype, kv_format: KVFormat, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        check_supported(*shape, dtype, kv_format, layer=3)


def test_the_target_is_what_the_test_is_named_after(target: str) -> None:
    assert target_of(torch.device("cpu")).is_interpreted == (target == "interpreter")
    assert (os.environ.get("TRITON_INTERPRET") == "1") == (target == "interpreter")


@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [
        (KVFormat.BF16, BF16),
        (KVFormat.FP16, FP16),
        (KVFormat.FP32, FP32),
        (KVFormat.INT8, BF16),
        (KVFormat.INT8, FP16),
        (KVFormat.INT8, FP32),
        (KVFormat.FP8, BF16),
        (KVFormat.FP8, FP32),
        (KVFormat.INT4, BF16),
        (KVFormat.INT4, FP16),
        (KVFormat.INT4, FP32),
        (KVFormat.BF16, FP32),
    ],
)
def test_every_cache_format(make_case: MakeCase, kv_format: KVFormat, dtype: torch.dtype) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format, dtype=dtype)
    assert_matches_reference(case)


@pytest.mark.parametrize("kv_format", PAGED)
def test_windows_and_caps_of_every_kind_of_page(make_case: MakeCase, kv_format: KVFormat) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format)
    assert_matches_reference(case, window=40, softcap=5.0)


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_format"),
    [
        (*shape, kv_format)
        for shape, other in (
            ((2, 2, 96), KVFormat.FP16),
            ((9, 3, 64), KVFormat.INT8),
            ((8, 2, 128), KVFormat.FP16),
            ((8, 1, 80), KVFormat.INT8),
            ((4, 1, 256), KVFormat.FP16),
            ((16, 1, 16), KVFormat.INT8),
        )
        for kv_format in (other, KVFormat.INT4)
    ],
)
def test_every_shape_of_heads(
    make_case: MakeCase, num_heads: int, num_kv_heads: int, head_dim: int, kv_format: KVFormat
) -> None:
    case = make_case(
        (1, 1, 20),
        (150, 33, 70),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_format=kv_format,
    )
    assert_matches_reference(case, window=60)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT4])
def test_decode_lengths_around_pages_and_spans(make_case: MakeCase, kv_format: KVFormat) -> None:
    lengths = (1, 2, 31, 32, 33, 63, 64, 65, 127, 128, 129, 257, 1024, 1025)
    case = make_case([1] * len(lengths), lengths, kv_format=kv_format)
    assert_matches_reference(case)


def test_chunk_lengths_around_tiles(make_case: MakeCase) -> None:
    chunks = [(2, 2), (15, 16), (16, 17), (31, 64), (32, 33), (127, 127), (128, 130), (129, 129)]
    query_lens, context_lens = zip(*chunks, strict=True)
    case = make_case(query_lens, context_lens, dtype=FP32, kv_format=KVFormat.FP32)
    assert_matches_reference(case)


@pytest.mark.parametrize(
    ("window", "kv_format"),
    [
        *((1, KVFormat.FP16), (15, KVFormat.INT4), (32, KVFormat.FP16)),
        *((32, KVFormat.INT4), (129, KVFormat.INT4), (1000, KVFormat.FP16)),
    ],
)
def test_windows(make_case: MakeCase, window: int, kv_format: KVFormat) -> None:
    # A window shorter than the context leaves whole spans without a visible key.
    case = make_case((1, 1, 70), (700, 20, 90), kv_format=kv_format)
    assert_matches_reference(case, window)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
@pytest.mark.parametrize("strength", [-3.0, 8.0])
def test_sinks(make_case: MakeCase, kv_format: KVFormat, strength: float) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format)
    sinks = torch.linspace(-1, 1, case.query.shape[1]) + strength
    assert_matches_reference(case, window=64, sinks=sinks)
    assert not torch.allclose(attend(case), attend(case, sinks=sinks), rtol=1e-3)


def test_large_scores_do_not_overflow(make_case: MakeCase) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS, dtype=FP32, kv_format=KVFormat.FP32)
    case.query.mul_(200)  # and so are the errors in the exponents
    assert_matches_reference(case, bound=200 * BOUNDS[FP32])
    assert_matches_reference(case, softcap=30.0, bound=200 * BOUNDS[FP32])


@pytest.mark.parametrize("size", [1e-30, 1e-6, 1e4, 1e9])
@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.INT4])
def test_queries_of_any_size_survive_their_way_to_float16(
    make_case: MakeCase, size: float, kv_format: KVFormat
) -> None:
    case = make_case((1, 9), (60, 40), dtype=BF16, kv_format=kv_format)
    case.query.mul_(size)
    # A scale that takes the size away again, so that the weights are not all alike.
    assert_matches_reference(case, scale=0.1 / size)


@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.INT4])
def test_small_and_large_values_side_by_side(make_case: MakeCase, kv_format: KVFormat) -> None:
    """Weights are multiplied by the values' scales, and still fit into float16."""
    spread = torch.logspace(-6, 4, 1100).view(-1, 1, 1)
    rows = torch.randperm(1100, generator=torch.Generator().manual_seed(0))
    case = make_case(
        (1, 30), (1100, 1000), dtype=BF16, kv_format=kv_format, value_sizes=spread[rows]
    )
    assert_matches_reference(case)


@pytest.mark.parametrize("kv_format", [KVFormat.FP8, KVFormat.INT4])
def test_where_the_blocks_lie_changes_no_bit(make_case: MakeCase, kv_format: KVFormat) -> None:
    first, second = (
        make_case(QUERY_LENS, CONTEXT_LENS, kv_format=kv_format, blocks_seed=seed)
        for seed in (0, 1)
    )
    assert not torch.equal(first.batch.block_tables, second.batch.block_tables)
    assert torch.equal(attend(first, window=50), attend(second, window=50))


@pytest.mark.parametrize(
    ("window", "kv_format"), [(None, KVFormat.FP16), (50, KVFormat.INT8), (None, KVFormat.INT4)]
)
def test_neighbours_change_no_bit(
    make_case: MakeCase, window: int | None, kv_format: KVFormat
) -> None:
    case = make_case((1, 1, 40), (300, 64, 60), kv_format=kv_format)
    together = attend(case, window).split([1, 1, 40])
    alone = make_case((1,), (300,), kv_format=kv_format)
    assert torch.equal(attend(alone, window), together[0])


@pytest.mark.parametrize(
    ("window", "kv_format"), [(None, KVFormat.FP8), (50, KVFormat.FP16), (None, KVFormat.INT4)]
)
def test_how_a_prompt_is_cut_changes_no_bit(
    make_case: MakeCase, window: int | None, kv_format: KVFormat
) -> None:
    whole = attend(make_case((150,), (150,), kv_format=kv_format), window)
    first = attend(make_case((67,), (67,), kv_format=kv_format), window)
    # The same sequence, whose first 67 tokens were computed in an earlier step.
    second = make_case((83,), (150,), kv_format=kv_format)
    assert torch.equal(whole[:67], first)
    assert torch.equal(whole[67:], attend(second, window))


def test_rows_that_only_fill_up_a_batch_are_zero_and_change_no_bit(make_case: MakeCase) -> None:
    case = make_case((1, 1, 1, 1), (300, 20, 1, 1))
    expected = attend(case)
    context_lens = torch.tensor([300, 20, 0, 0], dtype=torch.int32)
    filled = replace(case, batch=replace(case.batch, context_lens=context_lens))
    found = attend(filled)
    assert torch.equal(found[:2], expected[:2])
    assert not found[2:].any()


def test_the_same_work_serves_every_layer(make_case: MakeCase) -> None:
    case = make_case((1, 1), (700, 3500))
    work = plan_attention(case.batch, case.cache.block_size)
    first, second = (paged_attention(case.query, case.cache, work, scale=0.1) for _ in range(2))
    assert torch.equal(first, second)
    counters = [counter for spans in work.spans.values() for counter in spans.arrived.values()]
    assert counters
    assert not any(counter.any() for counter in counters)


def test_rows_of_a_fused_projection(make_case: MakeCase) -> None:
    case = make_case(QUERY_LENS, CONTEXT_LENS)
    num_tokens, num_heads, head_dim = case.query.shape
    fused = torch.full((num_tokens, num_heads + 2, head_dim), torch.nan, dtype=FP16)
    fused[:, :num_heads] = case.query
    view = replace(case, query=fused[:, :num_heads])
    assert view.query.stride(0) != case.query.stride(0)
    assert torch.equal(attend(case), attend(view))


FEW_ROWS, FEW_CONTEXTS = (4, 1, 7, 3, 16), (300, 33, 1030, 3, 90)


@pytest.mark.parametrize(
    ("kv_format", "num_heads", "window", "softcap"),
    [
        (KVFormat.FP16, 3, None, None),
        (KVFormat.INT8, 3, None, None),
        (KVFormat.INT4, 4, None, None),
        (KVFormat.FP8, 4, 50, None),
        (KVFormat.FP16, 1, 1, None),
        (KVFormat.INT4, 9, 200, 5.0),
    ],
)
def test_some_rows_of_a_sequence_decode_together(
    make_case: MakeCase,
    kv_format: KVFormat,
    num_heads: int,
    window: int | None,
    softcap: float | None,
) -> None:
    """In one tile of 16 rows, or in several: 9 heads leave room for one token."""
    case = make_case(
        FEW_ROWS, FEW_CONTEXTS, num_heads=num_heads, kv_format=kv_format, decode_rows=16
    )
    assert case.batch.num_decodes == len(FEW_ROWS)
    assert_matches_reference(case, window, softcap, sinks=torch.linspace(-1, 1, num_heads))


@pytest.mark.parametrize(
    ("kv_format", "num_heads", "context", "window"),
    [
        (KVFormat.FP16, 4, 1027, None),  # across the end of a span
        (KVFormat.INT4, 4, 1027, None),
        (KVFormat.INT8, 3, 130, None),
        (KVFormat.FP8, 3, 130, 50),
        (KVFormat.INT4, 9, 3074, 40),
    ],
)
def test_tokens_that_are_verified_together_get_the_bits_of_one_at_a_time(
    make_case: MakeCase, kv_format: KVFormat, num_heads: int, context: int, window: int | None
) -> None:
    """The rows of a draft may cross the ends of blocks and spans, and have company."""
    sinks = torch.linspace(-1, 1, num_heads)
    rows, others = 5, (4, 30)
    case = make_case(
        (rows, *others[:1]), (context, *others[1:]),
        num_heads=num_heads, kv_format=kv_format, decode_rows=rows,
    )  # fmt: skip
    case.query[1] *= 1e4  # what one row needs to become float16 is no business of the next
    together = attend(case, window, sinks=sinks)
    for row in range(rows):
        position = context - rows + row
        batch = replace(
            case.batch,
            query_start=torch.tensor([0, 1], dtype=torch.int32),
            context_lens=torch.tensor([position + 1], dtype=torch.int32),
            num_decodes=1,
            decode_rows=1,
            host_query_lens=(1,),
            host_context_lens=(position + 1,),
        )
        alone = replace(case, query=case.query[row : row + 1], batch=batch)
        assert torch.equal(attend(alone, window, sinks=sinks), together[row : row + 1]), row


def test_lengths_that_change_on_the_device_alone_are_obeyed(make_case: MakeCase) -> None:
    """As a captured graph is replayed: the host still has the lengths of the capture."""
    lengths = (2, 4, 1), (300, 40, 1)
    expected = attend(make_case(*lengths, num_heads=4, decode_rows=4))
    case = make_case((4, 4, 4), (300, 40, 4), num_heads=4, decode_rows=4)
    wanted = make_case(*lengths, num_heads=4, decode_rows=4)
    batch = replace(
        case.batch,
        query_start=wanted.batch.query_start,
        context_lens=wanted.batch.context_lens,
        block_tables=wanted.batch.block_tables,
    )
    query = torch.cat((wanted.query, torch.full_like(case.query[:5], torch.nan)))
    found = attend(replace(case, query=query, cache=wanted.cache, batch=batch))
    assert torch.equal(found[:7], expected)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT4])
def test_partial_results_of_many_spans_are_merged_in_groups(
    make_case: MakeCase, kv_format: KVFormat
) -> None:
    """A context of three groups, and one of so many that these are merged in two turns."""
    case = make_case((1, 2, 1), (9000, 3400, 3100), num_heads=2, kv_format=kv_format, decode_rows=2)
    assert_matches_reference(case)
    assert_matches_reference(case, window=3000)


def test_a_window_leaves_few_spans(make_case: MakeCase) -> None:
    case = make_case((1, 1), (5000, 100))
    work = plan_attention(case.batch, case.cache.block_size)
    paged_attention(case.query, case.cache, work, scale=0.1, window=128)
    spans = work.spans[128]
    assert spans.count.item() <= 3
    assert len(spans.table) <= 2 * 2
    assert spans.table[0, :3].tolist() == [0, 4864, 5000]


@settings(max_examples=8, derandomize=True)
@given(
    st.lists(st.tuples(st.integers(0, 200_000), st.integers(1, 16)), min_size=1, max_size=9),
    st.sampled_from([None, 1, 128, 4096]),
)
def test_the_device_cuts_contexts_as_the_model_does(
    sequences: list[tuple[int, int]], window: int | None
) -> None:
    rows = [min(count, max(context, 1)) for context, count in sequences]
    contexts = [context for context, _ in sequences]
    batch = RaggedBatch(
        query_start=torch.tensor([0, *itertools.accumulate(rows)], dtype=torch.int32),
        context_lens=torch.tensor(contexts, dtype=torch.int32),
        block_tables=torch.zeros(len(contexts), -(-max(*contexts, 1) // 32), dtype=torch.int32),
        slot_mapping=torch.zeros(0, dtype=torch.int64),
        num_decodes=len(contexts),
        host_query_lens=(),
        host_context_lens=(),
        decode_rows=16,
    )
    spans = decode_spans(plan_attention(batch, 32), window)
    expected = torch.from_numpy(span_table(contexts, rows, window))
    assert spans.count.item() == len(expected) <= len(spans.table)
    assert torch.equal(spans.table[: len(expected)], expected)
