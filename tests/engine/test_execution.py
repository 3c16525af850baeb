from __future__ import annotations

from pathlib import Path

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.execution import Precision, choose_execution
from appliance.errors import ConfigError
from appliance.kernels.kv_cache import KVFormat
from appliance.model.source import open_model


@pytest.mark.parametrize(
    ("kv_format", "device", "kernels", "said"),
    [
        (KVFormat.INT4_SEALED, "cpu", "auto", "--block-size 16 cannot be; leave it out"),
        (KVFormat.FP8, "cpu", "torch", "hold 32 tokens where torch executes the model, not 16"),
    ],
)
def test_a_format_that_cannot_be_served_is_refused_before_loading(
    tiny_llama: Path, kv_format: KVFormat, device: str, kernels: str, said: str
) -> None:
    config = EngineConfig(kv_cache_dtype=kv_format.value, kernels=kernels)
    precision = Precision(torch.device(device), torch.bfloat16, kv_format, 16)
    with pytest.raises(ConfigError, match=said):
        choose_execution(config, precision, open_model(tiny_llama), 1)
