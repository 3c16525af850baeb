"""Weights that are read without torch give torch's logits, to the last bit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import torch
from support.gguf.ggml_models import write_llama
from support.models.checkpoint_forms import FORMS, write_both
from support.models.expert_models import EXPERTS
from support.models.model_families import FAMILIES, write_family
from support.models.native_models import LIBRARY
from support.models.recurrent_models import RECURRENT
from support.models.teacher_forcing import logits_of

from appliance.kernels.cpu.engine import NativeEngine
from appliance.kernels.weights.ggml_types import GGML_TYPES
from appliance.model.native_loader import load_native
from appliance.model.source import open_model

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

SIZES = {"head_dim": 16, "hidden_size": 64}
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3]


def assert_alike(path: Path) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        logits = [
            logits_of(
                load_native(open_model(path, in_torch=kind), NativeEngine(LIBRARY, 1), dtype),
                TOKENS,
            )
            for kind in (True, False)
        ]
        assert torch.equal(*logits)


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    assert_alike(write_family(family, tmp_path / family))


@pytest.mark.parametrize("form", FORMS)
def test_quantized_folders(form: str, tmp_path: Path) -> None:
    assert_alike(write_both(tmp_path, FORMS[form])[0].path)


@pytest.mark.parametrize("kind", [*GGML_TYPES, "MXFP4", "NVFP4", "Q4_0", "Q4_1", "Q8_0"])
def test_gguf_types(kind: str, tmp_path: Path) -> None:
    assert_alike(write_llama(tmp_path / "model.gguf", [kind]))


@pytest.mark.parametrize("name", [*EXPERTS, *RECURRENT])
def test_experts_latents_and_recurrent_layers(
    name: str, make_model: Callable[..., Any], tmp_path: Path
) -> None:
    model_type, settings = (EXPERTS | RECURRENT)[name]
    make_model(model_type, **SIZES | settings).save_pretrained(tmp_path)
    assert_alike(tmp_path)
