from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from support.gguf.ggml_weights import random_ggml
from support.kernels.fp4_weights import random_fp4
from support.kernels.library_tiles import laid_out
from support.kernels.packed_weights import random_packed

from appliance.kernels.library_tiles.launch import widen
from appliance.kernels.library_tiles.reference import widen as by_torch
from appliance.kernels.weights.weight import Weight

ORDER = torch.randperm(288, generator=torch.Generator().manual_seed(0)).int()


# Codes of each number of bits and each plane; a tile and a block of inputs that are not whole.
@pytest.mark.parametrize(
    "weight",
    [
        random_packed(20, 288, 32),
        random_packed(20, 288, 32, bits=8, symmetric=True),
        replace(random_packed(20, 288, 32), input_order=ORDER),
        random_fp4(20, 304, torch.float8_e4m3fn),
        *(
            random_ggml(name, 20, 256)
            for name in ("Q2_K", "Q3_K", "Q5_K", "Q6_K", "IQ4_XS", "IQ3_S", "IQ2_XS")
        ),
        torch.randn(20, 30),
    ],
    ids=[
        "int4",
        "int8",
        "order",
        "e2m1",
        "q2_k",
        "q3_k",
        "q5_k",
        "q6_k",
        "iq4_xs",
        "iq3_s",
        "iq2_xs",
        "float32",
    ],
)
def test_each_weight_is_that_of_torch(weight: Weight) -> None:
    tiles, arena = laid_out(weight)
    found = widen(tiles, torch.bfloat16)
    assert torch.equal(found, by_torch(tiles, torch.bfloat16))
    assert arena.nbytes
