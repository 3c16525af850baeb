from __future__ import annotations

import pytest

from appliance.engine.memory.experts.prediction import gpu_named
from appliance.errors import ConfigError


@pytest.mark.parametrize("name", ["RTX 3090", "NVIDIA GeForce RTX 3090", "rtx3090"])
def test_a_name_may_be_written_in_any_way(name: str) -> None:
    assert gpu_named(name).bandwidth == 936


def test_an_unknown_gpu_has_a_nearest() -> None:
    with pytest.raises(ConfigError, match="did you mean 'RTX 4090'"):
        gpu_named("RTX 4091")
