from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance.kernels.backend import REFERENCE, select_backend
from appliance.kernels.kv_cache import KVFormat
from appliance.model.loader import load_decoder
from appliance.model.source import open_model
from appliance.model.teacher import logits_of

TOKEN_IDS = torch.randint(3, 500, (40,), generator=torch.Generator().manual_seed(0)).tolist()


@pytest.mark.parametrize("kv_format", [KVFormat.FP32, KVFormat.INT8])
def test_a_model_on_the_kernels_says_what_it_says_on_the_reference(
    tiny_llama: Path, kv_format: KVFormat
) -> None:
    found, expected = (
        logits_of(
            load_decoder(open_model(tiny_llama), backend, torch.device("cpu"), torch.float32),
            TOKEN_IDS,
            chunks=[17, 1, 21, 1],
            format=kv_format,
        )
        for backend in (select_backend(torch.device("cuda")), REFERENCE)
    )
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=0)
