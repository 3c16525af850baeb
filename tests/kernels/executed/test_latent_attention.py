"""Latent attention on the kernels, against the reference in float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from appliance.errors import UnsupportedModelError
from appliance.kernels.attention import work as attention_work
from appliance.kernels.attention.launch import decode_spans, plan_attention
from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_write.launch import write_kv
from appliance.kernels.kv_write.reference import write_kv as write_rows_of
from appliance.kernels.latent_attention import reference
from appliance.kernels.latent_attention.launch import (
    check_latents,
    latent_attention,
    write_latents,
)
from appliance.kernels.norm_rope.reference import rms_norm
from appliance.kernels.norm_rope.reference import rotary as rotary_of
from appliance.kernels.norm_rope.weights import NormWeights
from tests.kernels.executed.attending import BF16, BOUNDS, FP16, FP32
from tests.kernels.executed.conftest import Case, build_batch, fill_with_nan, slots_of

# A decode row in one span, three in two, then chunks: whole, continued, of one row.
QUERY_LENS, CONTEXT_LENS = (1, 3, 20, 37, 4), (17, 150, 20, 90, 33)
DEEPSEEK, MISTRAL = (512, 64), (256, 64)


def build(
    query_lens: tuple[int, ...] = QUERY_LENS,
    context_lens: tuple[int, ...] = CONTEXT_LENS,
    *,
    latent: int = 24,
    rotary: int = 8,
    num_heads: int = 3,
    kv_format: KVFormat = KVFormat.FP16,
    dtype: torch.dtype = FP16,
    decode_rows: int = 3,
    seed: int = 0,
    token_size: float = 1.0,
    query_size: float = 1.0,
) -> Case:
    """Random queries, and random tokens written by the kernel into pages of NaN.

    Of neighbouring tokens every other one is `token_size` as large.
    """
    lengths = [-(-context // 32) for context in context_lens]
    order = torch.randperm(sum(lengths) + 2, generator=torch.Generator().manual_seed(seed))
    tables = [tuple(table.tolist()) for table in order[: sum(lengths)].split(lengths)]
    half = (latent + rotary) // 2
    cache = KVPages.allocate(
        kv_format,
        num_blocks=len(order),
        block_size=32,
        num_kv_heads=1,
        head_dim=half,
        device=torch.device("cpu"),
    )
    cache = replace(cache, in_rows=True)
    fill_with_nan(cache)
    queries = []
    for i, (rows, context, table) in enumerate(zip(query_lens, context_lens, tables, strict=True)):
        random = torch.Generator().manual_seed(i)
        tokens = torch.randn(context, 1, 2 * half, generator=random)
        tokens[::2] *= token_size
        tokens = tokens.to(dtype)
        first, second = (part.contiguous() for part in tokens.chunk(2, dim=-1))
        write_kv(first, second, cache, slots_of(table, 0, context, 32))
        query = query_size * torch.randn(context, num_heads, 2 * half, generator=random)
        query = query.to(dtype)
        queries.append(query[context - rows :])
    batch = build_batch(query_lens, context_lens, tables, 32, decode_rows)
    return Case(torch.cat(queries), cache, batch)


def attend(case: Case, latent: int = 24, scale: float = 0.2) -> torch.Tensor:
    """Attend from queries that are in the space of latents already."""
    num_tokens, num_heads, width = case.query.shape
    none = torch.zeros(num_tokens, (width - latent) // 2)
    same = torch.eye(latent, dtype=case.query.dtype).expand(num_heads, latent, latent).contiguous()
    return latent_attention(
        case.query,
        none.cos(),
        none,
        case.cache,
        plan_attention(case.batch, 32),
        keys=same,
        values=same,
        scale=scale,
    )


def assert_matches_reference(case: Case, latent: int = 24, scale: float = 0.2) -> None:
    found = attend(case, latent, scale)
    assert found.dtype == case.query.dtype
    expected = reference.attend_latents(
        case.query.double(), case.cache, case.batch, scale=scale, latent=latent
    )
    error = (found.double() - expected).abs().amax() / expected.abs().max()
    assert error < BOUNDS[case.query.dtype]  # NaN is not


@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [
        (KVFormat.BF16, BF16),
        (KVFormat.FP16, FP16),
        (KVFormat.FP32, FP32),
        (KVFormat.BF16, FP32),
        (KVFormat.INT8, BF16),
        (KVFormat.INT8, FP16),
        (KVFormat.INT8, FP32),
    ],
)
def test_every_cache_format(kv_format: KVFormat, dtype: torch.dtype) -> None:
    assert_matches_reference(build(kv_format=kv_format, dtype=dtype))


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8])
@pytest.mark.parametrize(
    ("latent", "rotary", "num_heads"),
    [(*DEEPSEEK, 16), (*DEEPSEEK, 20), (*MISTRAL, 5), (*MISTRAL, 32), (48, 16, 1), (128, 10, 40)],
)
def test_every_shape(latent: int, rotary: int, num_heads: int, kv_format: KVFormat) -> None:
    case = build(
        (1, 2, 9),
        (150, 33, 40),
        latent=latent,
        rotary=rotary,
        num_heads=num_heads,
        kv_format=kv_format,
        dtype=BF16,
        decode_rows=2,
    )
    assert_matches_reference(case, latent)


@pytest.mark.parametrize("query_size", [0.0, 1e-30, 1e4, 1e9])
def test_queries_of_any_size_survive_their_way_to_float16(query_size: float) -> None:
    case = build(kv_format=KVFormat.INT8, dtype=BF16, query_size=query_size)
    assert_matches_reference(case, scale=0.2 / max(query_size, 1.0))


@pytest.mark.parametrize("token_size", [1e-6, 1e-3, 1e3])
def test_small_and_large_codes_side_by_side(token_size: float) -> None:
    case = build(kv_format=KVFormat.INT8, dtype=FP32, token_size=token_size)
    scale = 0.2 / max(token_size, 1.0)
    assert_matches_reference(case, scale=scale)
    rounded = replace(case, query=case.query.bfloat16())
    assert_matches_reference(rounded, scale=scale)


SIZES = {"deepseek": (512, 64, 128, 128), "minicpm3": (256, 32, 64, 64), "odd": (40, 12, 20, 24)}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [(KVFormat.BF16, BF16), (KVFormat.INT8, BF16), (KVFormat.FP16, FP16)],
)
@pytest.mark.parametrize("query_lens", [(1, 3, 2), (1, 3, 40)])
def test_heads_are_mapped_rotated_and_scaled(
    query_lens: tuple[int, ...], kv_format: KVFormat, dtype: torch.dtype, name: str
) -> None:
    latent, rotary, plain, value = SIZES[name]
    case = build(
        query_lens,
        (33, 150, 64),
        latent=latent,
        rotary=rotary,
        num_heads=3,
        kv_format=kv_format,
        dtype=dtype,
    )
    random = torch.Generator().manual_seed(7)
    num_tokens = sum(query_lens)
    wide = torch.randn(num_tokens, 3 * (plain + rotary) + latent, generator=random).to(dtype)
    query = wide[:, : 3 * (plain + rotary)].view(num_tokens, 3, -1)  # beside its token
    keys = (torch.randn(3, plain, latent, generator=random) * plain**-0.5).to(dtype)
    values = (torch.randn(3, value, latent, generator=random) * latent**-0.5).to(dtype)
    angles = torch.randn(num_tokens, rotary // 2, generator=random)
    factor = torch.rand(num_tokens, generator=random) + 1
    arguments = query, angles.cos(), angles.sin(), case.cache
    settings = {"keys": keys, "values": values, "scale": 0.1, "query_scale": factor}
    found = latent_attention(*arguments, plan_attention(case.batch, 32), **settings)
    attend_exactly = reference.latent_attention_with(
        rotary_of, lambda query, *rest, **more: reference.attend_latents(
            query.double(), *rest, **more
        ).to(dtype)
    )  # fmt: skip
    expected = attend_exactly(*arguments, case.batch, **settings)
    assert found.shape == (num_tokens, 3, value)
    error = (found.double() - expected.double()).abs().amax() / expected.double().abs().max()
    assert error < 3 * BOUNDS[dtype]  # queries and sums of latents are rounded on the way


@pytest.mark.parametrize(
    ("kv_format", "dtype"),
    [
        (KVFormat.BF16, BF16),
        (KVFormat.INT8, BF16),
        (KVFormat.FP16, FP16),
        (KVFormat.FP32, FP32),
    ],
)
@pytest.mark.parametrize(("latent", "rotary", "rank"), [(512, 64, 1536), (48, 16, 40), (40, 12, 0)])
def test_tokens_are_normed_rotated_and_written(
    latent: int, rotary: int, rank: int, kv_format: KVFormat, dtype: torch.dtype
) -> None:
    random = torch.Generator().manual_seed(8)
    slots = torch.tensor([40, 0, -1, 31, 33])
    width = latent + rotary
    found = torch.randn(5, (rank or 24) + width, generator=random).to(dtype) * 3
    angles = torch.randn(5, rotary // 2, generator=random)
    norm = NormWeights(torch.rand(latent, generator=random) + 0.5, 1e-6)
    of_queries = NormWeights(torch.rand(rank, generator=random) + 0.5, 1e-5) if rank else None
    caches = [
        replace(
            KVPages.allocate(
                kv_format,
                num_blocks=2,
                block_size=32,
                num_kv_heads=1,
                head_dim=width // 2,
                device=torch.device("cpu"),
            ),
            in_rows=True,
        )
        for _ in range(2)
    ]
    arguments = found, angles.cos(), angles.sin()
    queries = write_latents(*arguments, caches[0], slots, norm, of_queries)
    exactly = reference.write_latents_with(rms_norm, rotary_of, write_rows_of)
    expected = exactly(*arguments, caches[1], slots, norm, of_queries)
    assert (queries is None) == (expected is None) == (of_queries is None)
    step = torch.finfo(dtype).eps
    if queries is not None and expected is not None:
        torch.testing.assert_close(queries, expected, rtol=step, atol=1e-7)
    halves = [torch.cat(cache.gather([0, 1], 64, torch.float64), dim=-1) for cache in caches]
    size = halves[1].abs().max()
    assert size > 1
    # Sums of squares differ in their last bits, so a rounding or a code may fall the other way.
    assert (halves[0] - halves[1]).abs().max() < size * (
        0.01 if kv_format.is_quantized else 2 * step
    )
    assert not halves[0][[1, 30, 32, 34, 63]].any()


def test_lengths_around_pages_and_spans() -> None:
    lengths = (1, 2, 31, 32, 33, 127, 128, 129, 257, 1024, 1025, 1300)
    assert_matches_reference(build((1,) * len(lengths), lengths))


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_rows_without_room_for_all_their_spans_have_longer_ones(
    monkeypatch: pytest.MonkeyPatch, kv_format: KVFormat
) -> None:
    """4 rows have room for 4 spans each, and 1,300 tokens are 10, or 3 of 512."""
    monkeypatch.setattr(attention_work, "MOST_PARTIALS", 16)
    case = build((1, 2, 1), (1300, 150, 700), kv_format=kv_format, decode_rows=2)
    work = plan_attention(case.batch, 32)
    assert decode_spans(work, None).ends[0].tolist() == [0, 2]
    assert_matches_reference(case)


def test_chunk_lengths_around_tiles() -> None:
    chunks = [(4, 4), (15, 16), (33, 64), (127, 127), (128, 130), (129, 129)]
    query_lens, context_lens = zip(*chunks, strict=True)
    assert_matches_reference(build(query_lens, context_lens))


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_neighbours_places_and_drafts_change_no_bit(kv_format: KVFormat) -> None:
    """A row's result is the same alone, beside others, in other blocks, and after rows."""
    case = build((1, 3, 40), (300, 64, 60), kv_format=kv_format)
    together = attend(case)
    elsewhere = build((1, 3, 40), (300, 64, 60), kv_format=kv_format, seed=1)
    assert torch.equal(attend(elsewhere), together)
    alone = build((1,), (300,), kv_format=kv_format)
    assert torch.equal(attend(alone), together[:1])
    with_drafts = build((3,), (300,), kv_format=kv_format)
    assert torch.equal(attend(with_drafts)[2:], together[:1])


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_how_a_prompt_is_cut_changes_no_bit(kv_format: KVFormat) -> None:
    whole = attend(build((150,), (150,), kv_format=kv_format))
    # The same tokens, whose first 67 were read in an earlier step.
    assert torch.equal(attend(build((83,), (150,), kv_format=kv_format)), whole[67:])


def test_rows_that_only_fill_up_a_batch_are_zero_and_change_no_bit() -> None:
    case = build((1, 1, 1, 1), (300, 20, 1, 1))
    expected = attend(case)
    context_lens = torch.tensor([300, 20, 0, 0], dtype=torch.int32)
    found = attend(replace(case, batch=replace(case.batch, context_lens=context_lens)))
    assert torch.equal(found[:2], expected[:2])
    assert not found[2:].any()


@pytest.mark.parametrize(
    ("shape", "dtype", "kv_format", "words"),
    [
        ((576, 64, 32), BF16, KVFormat.BF16, r"layer 3: .*of 576 .* 64 that .*: up to 512 beside"),
        ((512, 96, 32), BF16, KVFormat.BF16, r"of 512 elements beside 96 that rotate"),
        ((512, 64, 16), BF16, KVFormat.BF16, r"block size 16; supported: 32"),
        ((512, 64, 32), BF16, KVFormat.FP8, r"KV blocks of fp8; supported: fp32, fp16, bf16, int8"),
        ((512, 64, 32), torch.float64, KVFormat.BF16, r"float64; supported: torch.bfloat16"),
        ((256, 64, 32), FP32, KVFormat.BF16, r"float32.* latents of 256; supported: bfloat16"),
        ((256, 64, 32), BF16, KVFormat.FP32, r"fp32 and latents of 256; supported: bfloat16"),
    ],
)
def test_what_no_kernel_covers_is_refused(
    shape: tuple[int, int, int], dtype: torch.dtype, kv_format: KVFormat, words: str
) -> None:
    with pytest.raises(UnsupportedModelError, match=words):
        check_latents(*shape, dtype, kv_format, layer=3)
