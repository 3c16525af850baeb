"""Why prefill widens quantized pages in its tiles: what once a step would save, computed."""

from __future__ import annotations

import pytest

from appliance.kernels.cache.kv_format import KVFormat
from appliance.kernels.gpu.rates import rates_of
from bench.docs.widened_pages import CARDS, FORMATS, cases, clocks_of_keys, gain

GEFORCE = (86, 89, 120)


@pytest.mark.parametrize("capability", GEFORCE)
def test_tensor_cores_leave_little_to_save_on_geforce(capability: int) -> None:
    for kv_format in (*FORMATS, KVFormat.BF16):
        rows, clocks = clocks_of_keys(kv_format, capability)
        products = 2 * rows * 32 * 128 / rates_of(capability).products
        assert clocks < 1.15 * products, "instructions hide behind products"
    for rows, context in cases():
        most = max(gain(form, capability, rows, context).share for form in FORMATS)
        assert most < (0.03 if context <= 16384 else 0.05)


def test_a_chunk_of_a_usual_step_gains_less_than_three_percent() -> None:
    for capability in GEFORCE:
        for context in (4096, 8192, 16384, 65536):
            for form in FORMATS:
                assert gain(form, capability, 512, context).share < 0.03


def test_an_h200_would_gain_more_the_longer_the_context() -> None:
    shares = [gain(KVFormat.INT8, 90, 2048, context).share for context in (4096, 16384, 65536)]
    assert shares == sorted(shares)
    assert shares[0] > 0.03


def test_a_page_is_read_by_each_tile_of_rows() -> None:
    # 512 rows of four heads, in tiles of 128; where warpgroups multiply, of 64.
    assert gain(KVFormat.INT8, 89, 512, 4096).widenings == 16
    assert gain(KVFormat.INT8, 90, 512, 4096).widenings == 32
    assert set(CARDS) == {86, 89, 90, 120}
