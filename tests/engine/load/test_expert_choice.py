from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.models.expert_models import save_experts

from appliance.config import EngineConfig
from appliance.engine.devices import Precision
from appliance.engine.load.execution.choice import execution_for
from appliance.engine.load.execution.torch_execution import TorchExecution
from appliance.engine.load.memory_request import expert_choice
from appliance.errors import ConfigError
from appliance.kernels.backend import REFERENCE
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.cpu.library import LibraryMissingError
from appliance.model.source import ModelSource, open_model


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> ModelSource:
    """Three layers, of which the second has no experts."""
    folder = tmp_path_factory.mktemp("models") / "routed"
    save_experts("qwen3_moe", folder)
    return open_model(folder)


LAYERS = (LayerPrecision(KVFormat.BF16),) * 2


def precision(device: str) -> Precision:
    return Precision(torch.device(device), torch.bfloat16, KVFormat.BF16, 32, LAYERS)


def on(device: str) -> TorchExecution:
    return TorchExecution(precision(device), REFERENCE)


def test_a_gpu_may_give_up_every_layer_with_experts_from_the_last_on(source: ModelSource) -> None:
    choice = expert_choice(EngineConfig(), source, on("cuda"))
    assert choice is not None
    assert choice.asked is None
    assert [one.layer for one in choice.layers] == [2, 0]
    hidden, middle, count = source.spec.hidden_size, 40, 8
    assert {one.device_bytes for one in choice.layers} == {count * 3 * hidden * middle * 2}
    assert all(one.host_bytes >= one.device_bytes for one in choice.layers)
    asked = expert_choice(EngineConfig(experts_on_cpu=1), source, on("cuda"))
    assert asked is not None
    assert (asked.asked, len(asked.layers)) == (1, 2)


def test_nothing_leaves_where_nothing_has_to(source: ModelSource, tiny_llama: Path) -> None:
    assert expert_choice(EngineConfig(experts_on_cpu=0), source, on("cuda")) is None
    assert expert_choice(EngineConfig(), source, on("cpu")) is None
    assert expert_choice(EngineConfig(), open_model(tiny_llama), on("cuda")) is None


@pytest.mark.parametrize(
    ("number", "model", "device", "said"),
    [
        (3, "routed", "cuda", "routed has experts in 2 layers; ask for that or fewer"),
        (1, "llama", "cuda", "has no experts; leave it out"),
        (1, "routed", "cpu", "runs on the CPU, where all experts are already; leave it out"),
    ],
)
def test_what_cannot_be_had_is_refused_by_name(
    source: ModelSource, tiny_llama: Path, number: int, model: str, device: str, said: str
) -> None:
    opened = source if model == "routed" else open_model(tiny_llama)
    config = EngineConfig(experts_on_cpu=number)
    execution: Any = on(device)
    if device == "cpu":
        execution, _ = execution_for(config, precision(device), opened, 1)
    with pytest.raises(ConfigError, match=f"--experts-on-cpu {number} cannot be had: .*{said}"):
        expert_choice(config, opened, execution)


def test_without_the_library_nothing_leaves_and_a_number_is_refused(
    source: ModelSource, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise LibraryMissingError("the CPU library was not compiled")

    monkeypatch.setattr("appliance.engine.load.memory_request.load_library", missing)
    assert expert_choice(EngineConfig(), source, on("cuda")) is None
    with pytest.raises(ConfigError, match=r"--experts-on-cpu 1 .*was not compiled"):
        expert_choice(EngineConfig(experts_on_cpu=1), source, on("cuda"))
