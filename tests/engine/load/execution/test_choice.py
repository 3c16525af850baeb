from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from appliance.config import EngineConfig
from appliance.engine.devices import Precision
from appliance.engine.load.execution.choice import (
    SCALAR_NOTE,
    TORCH_NOTE,
    choose_execution,
    execution_for,
)
from appliance.engine.load.execution.native_execution import NativeExecution
from appliance.engine.load.execution.torch_execution import TorchExecution
from appliance.errors import ConfigError
from appliance.kernels.backend import triton_backend
from appliance.kernels.cache.kv_format import KVFormat, LayerPrecision
from appliance.kernels.cpu.library import load_library
from appliance.kernels.cpu.structs import Isa
from appliance.kernels.gpu import target
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
    config = EngineConfig(
        kv_cache_dtype=kv_format.value, kernels=kernels, device=device, block_size=16
    )
    with pytest.raises(ConfigError, match=said):
        choose_execution(config, open_model(tiny_llama), 1)


CPU_BF16 = Precision(
    torch.device("cpu"),
    torch.bfloat16,
    KVFormat.BF16,
    16,
    (LayerPrecision(KVFormat.BF16),) * 2,
)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [item.getMessage() for item in caplog.records if item.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("settings", "note", "warned"),
    [
        ({"kernels": "torch"}, TORCH_NOTE, 0),
        ({"kernels": "reference"}, TORCH_NOTE, 0),
        ({"block_size": 8}, f"{TORCH_NOTE}: its blocks hold a multiple of 16 tokens, not 8", 1),
    ],
)
def test_whoever_is_served_by_torch_is_told_what_that_means(
    tiny_llama: Path,
    caplog: pytest.LogCaptureFixture,
    settings: dict[str, Any],
    note: str,
    warned: int,
) -> None:
    _, notes = execution_for(EngineConfig(**settings), CPU_BF16, open_model(tiny_llama), 1)
    assert notes == (note,)
    assert warnings(caplog) == [note] * warned


@pytest.mark.parametrize(("choice", "told"), [("auto", 1), ("scalar", 0)])
def test_a_cpu_without_vector_instructions_is_told_once_that_it_is_slow(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    choice: str,
    told: int,
) -> None:
    library = load_library()
    before = library.ap_current_isa()
    monkeypatch.setattr(library, "ap_isa_supported", lambda isa: isa == Isa.SCALAR)
    try:
        execution, notes = execution_for(
            EngineConfig(cpu_isa=choice), CPU_BF16, open_model(tiny_llama), 1
        )
    finally:
        library.ap_use_isa(before)
    assert isinstance(execution, NativeExecution)
    assert execution.isa == "SCALAR"
    assert list(notes) == warnings(caplog) == [SCALAR_NOTE] * told


@pytest.mark.parametrize(
    ("settings", "capability", "reason"),
    [
        ({}, None, "it is for our kernels on a GPU"),
        ({"kernels": "reference"}, 86, "it is for our kernels on a GPU"),
        ({"tensor_parallel": 2}, 86, "it is for a model on one GPU"),
        ({}, 80, "it pays on GeForce RTX 30, 40 and 50 .*, not on 8.0"),
        ({}, 90, "it pays on .*, not on 9.0"),
    ],
)
def test_prompts_in_int8_are_refused_where_they_do_not_pay(
    tiny_llama: Path,
    monkeypatch: pytest.MonkeyPatch,
    settings: dict[str, Any],
    capability: int | None,
    reason: str,
) -> None:
    config = EngineConfig(prompt_int8=True, **settings)
    precision = CPU_BF16
    if capability is not None:
        monkeypatch.setattr(target, "target_of", lambda device: target.Target(capability))
        precision = replace(CPU_BF16, device=torch.device("cuda"))
    with pytest.raises(ConfigError, match=f"--prompt-int8 cannot be had: {reason}.*leave it out"):
        execution_for(config, precision, open_model(tiny_llama), 1)


def test_a_model_without_linears_of_4_bits_has_no_prompts_in_int8(tiny_llama: Path) -> None:
    execution = TorchExecution(CPU_BF16, triton_backend(), rounds_prompts=True)
    with pytest.raises(ConfigError, match=r"has no linears of 4 bits.*; leave it out"):
        execution.load(open_model(tiny_llama), lambda stage, done, total: None, 64)
