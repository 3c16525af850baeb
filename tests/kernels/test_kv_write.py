from __future__ import annotations

import pytest
import torch

from appliance.kernels.cache.kv_cache import KVBlocks
from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.kv_write import reference

KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 3, 64, 16, 6


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def blocks(format: KVFormat) -> KVBlocks:
    return KVBlocks.allocate(
        format,
        num_blocks=NUM_BLOCKS,
        block_size=BLOCK_SIZE,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        device=torch.device("cpu"),
    )


def rows(num_tokens: int, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    shape = (num_tokens, KV_HEADS, HEAD_DIM)
    return torch.randn(shape).to(dtype), torch.randn(shape).to(dtype) * 5


@pytest.mark.parametrize("format", [KVFormat.FP32, KVFormat.FP16, KVFormat.BF16])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_land_in_their_slots_and_nowhere_else(format: KVFormat, dtype: torch.dtype) -> None:
    cache = blocks(format)
    slots = torch.tensor([95, 0, 17, 16, 15, 40])
    key, value = rows(len(slots), dtype)
    reference.write_kv(key, value, cache, slots)
    for stored, written in ((cache.keys, key), (cache.values, value)):
        flat = stored.flatten(0, 1)
        assert torch.equal(flat[slots], written.to(format.storage_dtype))
        untouched = torch.ones(len(flat), dtype=torch.bool)
        untouched[slots] = False
        assert not flat[untouched].any()


def test_int8_is_within_half_a_step() -> None:
    cache = blocks(KVFormat.INT8)
    slots = torch.randperm(NUM_BLOCKS * BLOCK_SIZE)[:50]
    key, value = rows(50)
    reference.write_kv(key, value, cache, slots)
    for codes, scales, written in (
        (cache.keys, cache.key_scales, key),
        (cache.values, cache.value_scales, value),
    ):
        assert scales is not None
        scale = scales.flatten(0, 1)[slots].double().unsqueeze(-1)
        restored = codes.flatten(0, 1)[slots].double() * scale
        # Half a step; the largest element may be clamped where float16 rounded its scale down.
        slack = 127 * 2**-11
        assert ((restored - written.double()).abs() <= scale * (0.5 + slack)).all()
        absmax = written.double().abs().amax(-1, keepdim=True)
        assert (scale / (absmax / 127) - 1).abs().max() <= 2**-11 * 1.01


@pytest.mark.parametrize("value", [0.0, 1e-9, 1e-30])
def test_int8_of_a_row_too_small_for_its_scale_is_zero(value: float) -> None:
    codes, scales = reference.quantize_int8(torch.full((2, 8), value))
    assert not codes.any()
    assert not scales.any()


def test_int8_of_a_huge_row_is_finite() -> None:
    codes, scales = reference.quantize_int8(torch.tensor([[1e9, -1e9, 3.0]]))
    assert codes.tolist() == [[127, -127, 0]]
    assert scales.isfinite().all()


def test_int8_row_does_not_depend_on_others() -> None:
    x = torch.randn(20, KV_HEADS, HEAD_DIM)
    codes, scales = reference.quantize_int8(x)
    alone, scale = reference.quantize_int8(x[7:8])
    assert torch.equal(alone[0], codes[7])
    assert torch.equal(scale[0], scales[7])
    assert not torch.equal(reference.quantize_int8(x * 2)[1], scales)
