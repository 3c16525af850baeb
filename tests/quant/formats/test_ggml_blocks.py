"""Packed weights in GGML blocks, read back by the `gguf` package."""

from __future__ import annotations

import gguf
import pytest
import torch
from gguf.quants import dequantize

from appliance.errors import QuantizeError
from appliance.quant.formats.ggml_blocks import block_type, encode
from appliance.quant.formats.scheme import WeightScheme
from appliance.quant.methods import rtn


@pytest.mark.parametrize(
    ("scheme", "expected"),
    [
        (WeightScheme(4, 32), "Q4_0"),
        (WeightScheme(3, 64), "Q4_1"),  # its middle differs from that of four bits
        (WeightScheme(4, 128, symmetric=False), "Q4_1"),
        (WeightScheme(8, None), "Q8_0"),
    ],
    ids=str,
)
def test_blocks_hold_the_codes(scheme: WeightScheme, expected: str) -> None:
    values = torch.randn((6, 256), generator=torch.Generator().manual_seed(0))
    weight = rtn.quantize(values, scheme)
    assert block_type("w", weight) == expected
    blocks = encode("w", weight, expected).numpy()
    found = torch.from_numpy(dequantize(blocks, gguf.GGMLQuantizationType[expected]))
    if expected == "Q4_1":
        torch.testing.assert_close(found, weight.dequantize(), atol=2e-3, rtol=0)
    else:
        assert torch.equal(found, weight.dequantize())


def test_what_no_block_holds_is_refused_by_name() -> None:
    values = torch.randn((4, 64), generator=torch.Generator().manual_seed(0))
    with pytest.raises(QuantizeError, match=r"^layers.0.w has 8 bits with zero points.*--bits 4"):
        block_type("layers.0.w", rtn.quantize(values, WeightScheme(8, 32, symmetric=False)))
