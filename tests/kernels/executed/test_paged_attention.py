from __future__ import annotations

import os
from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.attention.launch import (
    check_supported,
    paged_attention,
    plan_attention,
)
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.target import target_of
from tests.kernels.executed.attending import (
    BF16,
    BOUNDS,
    FP16,
    FP32,
    assert_matches_reference,
    attend,
)

if TYPE_CHECKING:
    from tests.kernels.executed.conftest import Case, MakeCase

PAGED = [KVFormat.FP16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4]
# Decode rows of one and several spans, then chunks: whole, continued, of one row.
QUERY_LENS = (1, 1, 1, 20, 37, 1)
CONTEXT_LENS = (1, 17, 300, 20, 100, 33)
WIDE = (1, 2, 21), (150, 33, 70)  # fewer, for heads of 512


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_format", "words"),
    [
        ((8, 2, 72, 32), BF16, KVFormat.BF16, r"layer 3: .*head_dim 72; supported: 16, 32, 64"),
        ((34, 2, 64, 32), BF16, KVFormat.BF16, r"34 query heads on 2 KV heads; .*1 to 16"),
        ((8, 2, 64, 16), BF16, KVFormat.INT8, r"block size 16; supported: 32"),
        ((8, 2, 64, 32), BF16, KVFormat.K8V4, r"k8v4; supported: .*int8"),
        ((8, 2, 64, 32), torch.float64, KVFormat.BF16, r"float64; supported: torch.bfloat16"),
        ((8, 2, 256, 32), FP32, KVFormat.INT8, r"int8 and head_dim 256; supported: bfloat16"),
        ((8, 1, 512, 32), FP32, KVFormat.BF16, r"bf16 and head_dim 512; .*KV blocks of up to 16"),
        ((8, 1, 512, 32), BF16, KVFormat.FP32, r"fp32 and head_dim 512; .*KV blocks of up to 16"),
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


@pytest.mark.parametrize("kv_format", [KVFormat.INT4, KVFormat.INT8, KVFormat.FP8])
def test_codes_of_heads_that_warps_share_out(make_case: MakeCase, kv_format: KVFormat) -> None:
    assert_matches_reference(
        make_case(*WIDE, num_heads=8, head_dim=512, kv_format=kv_format, decode_rows=2)
    )


@pytest.mark.parametrize(("kv_format", "dtype"), [(KVFormat.FP16, FP16), (KVFormat.BF16, BF16)])
def test_elements_of_heads_that_warps_share_out(
    make_case: MakeCase, kv_format: KVFormat, dtype: torch.dtype
) -> None:
    case = make_case(*WIDE, num_heads=3, head_dim=512, kv_format=kv_format, dtype=dtype)
    sinks = torch.linspace(-1, 1, 3)
    assert_matches_reference(case, window=60, softcap=5.0, sinks=sinks)


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
        (1, KVFormat.FP16),
        (15, KVFormat.INT4),
        (32, KVFormat.FP16),
        (32, KVFormat.INT4),
        (129, KVFormat.INT4),
        (1000, KVFormat.FP16),
    ],
)
def test_windows(make_case: MakeCase, window: int, kv_format: KVFormat) -> None:
    # A window shorter than the context leaves whole spans without a visible key.
    case = make_case((1, 1, 70), (700, 20, 90), kv_format=kv_format)
    assert_matches_reference(case, window)


def seeing(case: Case, pictures: dict[int, list[range]]) -> torch.Tensor:
    """Leading tokens that rows see, where sequences have pictures at these positions."""
    batch, seen = case.batch, []
    for i, (rows, context) in enumerate(
        zip(batch.host_query_lens, batch.host_context_lens, strict=True)
    ):
        own = torch.arange(context - rows, context, dtype=torch.int32) + 1
        for picture in pictures.get(i, ()):
            inside = (own > picture.start) & (own <= picture.stop)
            own[inside] = picture.stop
        seen.append(own)
    return torch.cat(seen)


# Pictures at both ends of a prompt, across tiles of rows and pages, side by side, of one row, and
# with a beginning in an earlier step.
PICTURES = {
    3: [range(20)],
    4: [range(60, 70), range(70, 96), range(97, 98)],
    5: [range(30, 33)],
    6: [range(5, 140), range(150, 155)],
}
SEEN_QUERY_LENS, SEEN_CONTEXT_LENS = (*QUERY_LENS[:5], 2, 155), (*CONTEXT_LENS[:5], 33, 155)


@pytest.mark.parametrize("window", [None, 40])
@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [
        (KVFormat.BF16, BF16),
        (KVFormat.FP16, FP16),
        (KVFormat.FP32, FP32),
        (KVFormat.INT8, BF16),
        (KVFormat.FP8, BF16),
        (KVFormat.INT4, FP16),
    ],
)
def test_rows_of_a_picture_see_all_of_it(
    make_case: MakeCase, kv_format: KVFormat, dtype: torch.dtype, window: int | None
) -> None:
    case = make_case(SEEN_QUERY_LENS, SEEN_CONTEXT_LENS, kv_format=kv_format, dtype=dtype)
    sees = seeing(case, PICTURES)
    assert_matches_reference(case, window=window, sees=sees)
    others = sees == seeing(case, {})
    assert 0 < others.sum() < len(sees)
    causal, found = attend(case, window), attend(case, window, sees=sees)
    assert (causal[~others] - found[~others]).abs().amax((1, 2)).median() > 0.05
    if window is None or kv_format is KVFormat.FP32:  # all keys are folded in the same order
        assert (causal[others] - found[others]).abs().max() < 0.02


@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "kv_format", "window"),
    [
        (8, 4, 256, KVFormat.BF16, 60),
        (8, 4, 256, KVFormat.FP8, 60),
        (4, 2, 128, KVFormat.INT8, None),
        (4, 1, 256, KVFormat.INT4, None),
        (5, 1, 80, KVFormat.FP8, None),
        (3, 1, 512, KVFormat.BF16, 60),
        (3, 1, 512, KVFormat.INT8, None),
    ],
)
def test_heads_of_any_shape_see_a_picture(
    make_case: MakeCase,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    kv_format: KVFormat,
    window: int | None,
) -> None:
    case = make_case(
        (1, 40, 70),
        (150, 100, 70),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        kv_format=kv_format,
        dtype=BF16,
    )
    sees = seeing(case, {1: [range(64, 91)], 2: [range(3, 44), range(44, 70)]})
    assert_matches_reference(case, window=window, softcap=20.0, sees=sees)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_how_the_text_before_a_picture_is_cut_changes_no_bit(
    make_case: MakeCase, kv_format: KVFormat
) -> None:
    pictures = {0: [range(67, 130)]}
    whole = make_case((150,), (150,), kv_format=kv_format)
    found = attend(whole, sees=seeing(whole, pictures))
    for start in (67, 80):  # also where a step begins inside of it
        rest = make_case((150 - start,), (150,), kv_format=kv_format)
        assert torch.equal(found[start:], attend(rest, sees=seeing(rest, pictures)))


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
