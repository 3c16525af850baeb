from __future__ import annotations

from typing import TYPE_CHECKING, cast

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.execution import Precision, choose_execution
from appliance.errors import ConfigError
from appliance.kernels.kv_cache import KVFormat

if TYPE_CHECKING:
    from appliance.model.source import ModelSource


@pytest.mark.parametrize(
    ("kv_format", "device", "said"),
    [
        (KVFormat.FP8, "cpu", "fp8 KV blocks need a GPU's kernels; use --kv-cache-dtype int8"),
        (KVFormat.INT4_SEALED, "cuda", "does not serve them yet; use --kv-cache-dtype int8"),
        (KVFormat.INT4_SEALED, "cpu", "does not serve them yet"),
    ],
)
def test_a_format_that_cannot_be_served_is_refused_before_loading(
    kv_format: KVFormat, device: str, said: str
) -> None:
    config = EngineConfig(kv_cache_dtype=kv_format.value)
    precision = Precision(torch.device(device), torch.bfloat16, kv_format, 32)
    with pytest.raises(ConfigError, match=said):
        choose_execution(config, precision, cast("ModelSource", None), 1)
