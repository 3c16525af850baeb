from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from appliance.kernels.cache.kv_cache import KVPages
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.head_norms import HeadNormKind, HeadNorms
from appliance.kernels.kv_write import reference
from appliance.kernels.kv_write.launch import rotate_and_write, write_kv
from appliance.kernels.norm_rope.reference import rms_norm, rotary

NUM_BLOCKS = 4
SLOTS = torch.tensor([127, 0, 33, 32, 31, -1, 70])
PAGED = [KVFormat.BF16, KVFormat.FP8, KVFormat.INT8, KVFormat.INT4]
compose = reference.rotate_and_write_with(rms_norm, rotary, reference.write_kv)


def empty_cache(
    kv_format: KVFormat, num_kv_heads: int, head_dim: int, in_rows: bool = False
) -> KVPages:
    cache = KVPages.allocate(
        kv_format,
        num_blocks=NUM_BLOCKS,
        block_size=32,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=torch.device("cpu"),
    )
    if cache.head_scales is not None:
        cache.head_scales.copy_(torch.linspace(0.01, 2, cache.head_scales.numel()).view(2, -1))
    return replace(cache, in_rows=in_rows)


def assert_writes_what_the_reference_writes(
    key: torch.Tensor, value: torch.Tensor, kv_format: KVFormat, in_rows: bool = False
) -> None:
    found, expected = (
        empty_cache(kv_format, key.shape[1], key.shape[2], in_rows) for _ in range(2)
    )
    write_kv(key, value, found, SLOTS)
    reference.write_kv(key, value, expected, SLOTS)
    assert expected.pages.any()
    assert torch.equal(found.pages, expected.pages)


@pytest.mark.parametrize("kv_format", [KVFormat.FP32, KVFormat.FP16, *PAGED])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_format_bit_for_bit(kv_format: KVFormat, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(SLOTS), 3, 64, generator=random).to(dtype)
    assert_writes_what_the_reference_writes(key, value * 5, kv_format)


@pytest.mark.parametrize(
    ("num_kv_heads", "head_dim"), [(1, 16), (8, 128), (5, 256), (9, 80), (2, 512)]
)
@pytest.mark.parametrize("kv_format", PAGED)
def test_every_shape_of_heads(num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> None:
    random = torch.Generator().manual_seed(0)
    shape = (2, len(SLOTS), num_kv_heads, head_dim)
    key, value = torch.randn(shape, generator=random).half()
    assert_writes_what_the_reference_writes(key, value, kv_format)


# Halves of latents: of whole strips, as models have them, and of parts of one.
@pytest.mark.parametrize("half", [288, 160, 16, 69])
def test_codes_in_rows(half: int) -> None:
    key, value = torch.randn(2, len(SLOTS), 1, half, generator=torch.Generator().manual_seed(0))
    assert_writes_what_the_reference_writes(key, value * 5, KVFormat.INT8, in_rows=True)


@pytest.mark.parametrize("kv_format", [KVFormat.INT8, KVFormat.INT4, KVFormat.FP8])
def test_extreme_rows(kv_format: KVFormat) -> None:
    rows = torch.randn(len(SLOTS), 1, 32, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([0.0, 1e-9, 3e-6, 1.0, 1e4, 1.0, 3e7]).view(-1, 1, 1)
    # Codes that lie halfway between two integers: the scale is exactly 1.
    rows[3, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    rows[3, 0, 4:] = 100.5
    assert_writes_what_the_reference_writes(rows, -rows, kv_format)


def test_every_e4m3_code_and_what_lies_between() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    codes = codes[codes.isfinite()].sort().values
    between = (codes[1:] + codes[:-1]) / 2  # exact halves
    rows = torch.cat((codes, between, between * (1 + 2**-20), between * (1 - 2**-20)))
    rows = torch.cat((rows, torch.zeros(7 * 256 - len(rows)))).view(7, 1, 256)
    found, expected = (empty_cache(KVFormat.FP8, 1, 256) for _ in range(2))
    for cache in (found, expected):
        assert cache.head_scales is not None
        cache.head_scales.fill_(1.0)
    slots = torch.arange(7)
    write_kv(rows, rows, found, slots)
    reference.write_kv(rows, rows, expected, slots)
    assert torch.equal(found.pages, expected.pages)
    keys, _ = found.gather([0], 7, torch.float64)
    assert torch.equal(keys.flatten()[: len(codes)], codes.double())


@pytest.mark.parametrize("kv_format", PAGED)
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim"), [((6, 2), 64, 64), ((4, 4), 80, 32), ((3, 1), 96, 96)]
)
def test_rotation_and_write_in_one_launch(
    kv_format: KVFormat, heads: tuple[int, int], head_dim: int, rotary_dim: int
) -> None:
    random = torch.Generator().manual_seed(1)
    fused = torch.randn(len(SLOTS), heads[0] + 2 * heads[1], head_dim, generator=random).bfloat16()
    angles = torch.randn(len(SLOTS), rotary_dim // 2, generator=random)
    found, expected = (empty_cache(kv_format, heads[1], head_dim) for _ in range(2))
    arguments = angles.cos(), angles.sin()
    query = rotate_and_write(fused, *arguments, found, SLOTS)
    assert torch.equal(query, compose(fused, *arguments, expected, SLOTS))
    assert torch.equal(found.pages, expected.pages)


# Norms of a token's queries and of its keys; of more elements than are read at a time.
@pytest.mark.parametrize("kind", HeadNormKind)
@pytest.mark.parametrize(("heads", "half"), [((4, 2), 32), ((20, 1), 16), ((3, 3), 0)])
def test_norms_of_heads(kind: HeadNormKind, heads: tuple[int, int], half: int) -> None:
    random = torch.Generator().manual_seed(2)
    fused = torch.randn(len(SLOTS), heads[0] + 2 * heads[1], 64, generator=random).bfloat16()
    angles = torch.randn(len(SLOTS), half, generator=random)
    weights = [
        torch.rand(count * 64 if kind is HeadNormKind.ALL else 64, generator=random) + 0.5
        for count in heads
    ]
    norms = HeadNorms(weights[0], weights[1], 1e-6, kind)
    found, expected = (empty_cache(KVFormat.FP32, heads[1], 64) for _ in range(2))
    arguments = angles.cos(), angles.sin()
    query = rotate_and_write(fused, *arguments, found, SLOTS, norms)
    # The sums of squares differ in their last bits, so a rounding may fall the other way.
    same = compose(fused, *arguments, expected, SLOTS, norms)
    torch.testing.assert_close(query, same, atol=2**-9, rtol=2**-7)
    torch.testing.assert_close(found.elements, expected.elements, atol=2**-9, rtol=2**-7)
    plain = rotate_and_write(fused, *arguments, found, SLOTS)
    assert not torch.allclose(query, plain, rtol=0.05)


@pytest.mark.parametrize("keys_are_values", [False, True])
def test_values_are_normed_and_may_be_the_keys(keys_are_values: bool) -> None:
    random = torch.Generator().manual_seed(4)
    heads = 4 + 2 * (1 if keys_are_values else 2)
    fused = torch.randn(len(SLOTS), heads, 64, generator=random).bfloat16() * 3
    angles = torch.randn(len(SLOTS), 16, generator=random)
    weights = torch.rand(2, 64, generator=random) + 0.5
    norms = HeadNorms(weights[0], weights[1], 1e-6, value_eps=1e-5)
    found, expected = (empty_cache(KVFormat.FP32, 2, 64) for _ in range(2))
    arguments = angles.cos(), angles.sin()
    for write, cache in ((rotate_and_write, found), (compose, expected)):
        write(fused, *arguments, cache, SLOTS, norms, keys_are_values=keys_are_values)
    torch.testing.assert_close(found.elements, expected.elements, atol=0.0, rtol=2**-7)
    lengths = found.elements.view(NUM_BLOCKS, 2, 2, 32, 64)[:, :, 1].square().mean(-1)
    assert lengths[lengths > 0].numel() == 2 * (len(SLOTS) - 1)
    torch.testing.assert_close(
        lengths[lengths > 0], torch.ones(2 * (len(SLOTS) - 1)), rtol=0.01, atol=0
    )


# Queries that read what another layer has written are in the form of its keys.
@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT4])
def test_queries_alone_are_those_beside_keys_and_scaled(kv_format: KVFormat) -> None:
    random = torch.Generator().manual_seed(5)
    wide = torch.randn(len(SLOTS), 8 * 64 + 24, generator=random).bfloat16()  # gates follow
    fused = wide[:, : 8 * 64].view(len(SLOTS), 8, 64)
    angles = torch.randn(len(SLOTS), 0 if kv_format is KVFormat.BF16 else 32, generator=random)
    norms = HeadNorms(torch.rand(64, generator=random) + 0.5, None, 1e-6, HeadNormKind.ROTATED)
    scale = torch.rand(len(SLOTS), generator=random) + 1
    found, expected, other = (empty_cache(kv_format, 2, 64) for _ in range(3))
    arguments = angles.cos(), angles.sin()
    query = rotate_and_write(fused, *arguments, found, None, norms, scale)
    same = compose(fused, *arguments, expected, None, norms, scale)
    torch.testing.assert_close(query, same, atol=2**-5, rtol=2**-7)
    assert not found.pages.any()
    both = replace(norms, key=norms.query)
    beside = rotate_and_write(fused[:, :], *arguments, other, SLOTS, both, scale)
    assert torch.equal(beside, query[:, :4])


def test_keys_without_rotation_are_transformed_too() -> None:
    fused = torch.randn(len(SLOTS), 6, 64, generator=torch.Generator().manual_seed(6)).bfloat16()
    found, expected = (empty_cache(KVFormat.INT4, 2, 64) for _ in range(2))
    none = torch.empty(len(SLOTS), 0)
    query = rotate_and_write(fused, none, none, found, SLOTS)
    assert torch.equal(query, compose(fused, none, none, expected, SLOTS))
    assert torch.equal(found.pages, expected.pages)
    assert not torch.equal(query, fused[:, :2])


@pytest.mark.parametrize("kv_format", [KVFormat.BF16, KVFormat.INT8, KVFormat.INT4])
def test_a_mean_is_taken_off_the_keys(kv_format: KVFormat) -> None:
    random = torch.Generator().manual_seed(3)
    fused = torch.randn(len(SLOTS), 10, 64, generator=random).bfloat16()
    angles = torch.randn(len(SLOTS), 32, generator=random)
    mean = 4 * torch.randn(3, 64, generator=random)
    plain, found, expected = (empty_cache(kv_format, 3, 64) for _ in range(3))
    arguments = angles.cos(), angles.sin()
    rotate_and_write(fused, *arguments, plain, SLOTS)
    query = rotate_and_write(fused, *arguments, replace(found, key_mean=mean), SLOTS)
    same = compose(fused, *arguments, replace(expected, key_mean=mean), SLOTS)
    assert torch.equal(query, same)
    assert torch.equal(found.pages, expected.pages)
    assert not torch.equal(found.pages, plain.pages)


def test_no_rows() -> None:
    cache = empty_cache(KVFormat.INT8, 2, 32)
    write_kv(torch.empty(0, 2, 32), torch.empty(0, 2, 32), cache, torch.empty(0, dtype=torch.int64))
    assert not cache.pages.any()
