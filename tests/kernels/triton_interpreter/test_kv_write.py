from __future__ import annotations

import pytest
import torch

from appliance.kernels.kv_cache import KVBlocks, KVFormat
from appliance.kernels.kv_write import reference
from appliance.kernels.kv_write.launch import write_kv

BLOCK_SIZE, NUM_BLOCKS = 16, 5
SLOTS = torch.tensor([79, 0, 17, 16, 15, 40])


def empty_cache(kv_format: KVFormat, num_kv_heads: int, head_dim: int) -> KVBlocks:
    return KVBlocks.allocate(
        kv_format,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        device=torch.device("cpu"),
    )


def assert_writes_what_the_reference_writes(
    key: torch.Tensor, value: torch.Tensor, kv_format: KVFormat
) -> None:
    found, expected = (empty_cache(kv_format, *key.shape[1:]) for _ in range(2))
    write_kv(key, value, found, SLOTS)
    reference.write_kv(key, value, expected, SLOTS)
    assert torch.equal(found.keys, expected.keys)
    assert torch.equal(found.values, expected.values)
    if kv_format.is_quantized:
        assert found.key_scales is not None
        assert found.value_scales is not None
        assert expected.key_scales is not None
        assert expected.value_scales is not None
        assert torch.equal(found.key_scales, expected.key_scales)
        assert torch.equal(found.value_scales, expected.value_scales)


@pytest.mark.parametrize("kv_format", [kind for kind in KVFormat if kind is not KVFormat.INT4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_format_bit_for_bit(kv_format: KVFormat, dtype: torch.dtype) -> None:
    random = torch.Generator().manual_seed(0)
    key, value = torch.randn(2, len(SLOTS), 3, 64, generator=random).to(dtype)
    assert_writes_what_the_reference_writes(key, value * 5, kv_format)


@pytest.mark.parametrize(("num_kv_heads", "head_dim"), [(1, 16), (8, 128), (5, 256), (32, 80)])
@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_every_shape_of_heads(num_kv_heads: int, head_dim: int, kv_format: KVFormat) -> None:
    random = torch.Generator().manual_seed(0)
    shape = (2, len(SLOTS), num_kv_heads, head_dim)
    key, value = torch.randn(shape, generator=random).half()
    assert_writes_what_the_reference_writes(key, value, kv_format)


@pytest.mark.parametrize("kv_format", [KVFormat.FP16, KVFormat.INT8])
def test_slices_of_a_fused_projection(kv_format: KVFormat) -> None:
    fused = torch.randn(len(SLOTS), 3 + 2 * 2, 32, generator=torch.Generator().manual_seed(0))
    _, key, value = fused.half().split([3, 2, 2], dim=1)
    assert not key.is_contiguous()
    assert_writes_what_the_reference_writes(key, value, kv_format)
    assert_writes_what_the_reference_writes(key.contiguous(), value, kv_format)


def test_extreme_rows_of_int8() -> None:
    rows = torch.randn(len(SLOTS), 1, 32, generator=torch.Generator().manual_seed(0))
    rows *= torch.tensor([0.0, 1e-9, 3e-6, 1.0, 1e4, 3e7]).view(-1, 1, 1)
    # Codes that lie halfway between two integers: the scale is exactly 1.
    rows[3, 0, :4] = torch.tensor([127.0, 0.5, 1.5, -2.5])
    rows[3, 0, 4:] = 100.5
    assert_writes_what_the_reference_writes(rows, -rows, KVFormat.INT8)


def test_no_rows() -> None:
    cache = empty_cache(KVFormat.INT8, 2, 32)
    write_kv(torch.empty(0, 2, 32), torch.empty(0, 2, 32), cache, torch.empty(0, dtype=torch.int64))
    assert not cache.keys.any()
