"""Experts in host memory in the whole engine: prompts stream them, answers run between graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.engine.late_device import LateDevice
from support.models.expert_models import EXPERTS
from support.models.greedy_answers import by_transformers, run
from support.models.sure_models import TWO_LAYERS, write_sure_model

from appliance.config import EngineConfig
from appliance.engine.load.load_engine import load_llm_engine
from appliance.engine.memory.experts import streaming
from appliance.model import expert_stream

TOKENS = 20


@pytest.mark.usefixtures("exact_products")
def test_prompts_stream_experts_and_small_decode_steps_are_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first of two layers has experts; by the plan's model the host is slower than any bus."""
    model_type, settings = EXPERTS["qwen3_moe"]
    made = write_sure_model(model_type, tmp_path, **TWO_LAYERS | settings)
    random = torch.Generator().manual_seed(5)
    prompts = [torch.randint(3, 97, (40 + 7 * i,), generator=random).tolist() for i in range(4)]
    expected = [by_transformers(made, prompt, TOKENS) for prompt in prompts]
    monkeypatch.setattr(streaming, "THREAD_OPERATIONS", 1.0)
    crossed: list[int] = []
    original = expert_stream.host_bytes

    def noted(one: Any) -> torch.Tensor:
        crossed.append(one.nbytes)
        return original(one)

    monkeypatch.setattr(expert_stream, "host_bytes", noted)
    config = EngineConfig(
        model=str(tmp_path),
        threads=1,
        max_num_seqs=16,
        max_num_batched_tokens=48,
        dtype="float32",
        kv_cache_dtype="fp32",
        kernels="torch",
        experts_on_cpu=1,
    )
    device = LateDevice()
    engine = load_llm_engine(config, (), None, lambda stage, done, total: None, device)
    (note,) = (note for note in engine.info.notes if "stay in host memory" in note)
    assert "steps of 32 rows or more stream them to the GPU instead" in note
    assert device.captures == 4  # steps of 1, 2, 4 and 8 rows
    assert crossed
    crossed.clear()
    assert run(engine, prompts, TOKENS) == expected
    assert not crossed, "the only piece is there since the measured steps"
    assert run(engine, prompts[:1], TOKENS) == expected[:1]
