"""Fixtures that several test folders share: the packaged models, if they were fetched."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

_DEFAULT_MODELS_DIR = Path(__file__).parent.parent / ".cache" / "models"


def _model_file(name: str) -> Path:
    path = Path(os.environ.get("APPLIANCE_MODELS_DIR", _DEFAULT_MODELS_DIR)) / name
    if not path.is_file():
        pytest.fail(f"{path} is missing; scripts/test fetches it")
    return path


@pytest.fixture(scope="session")
def smollm2_gguf() -> Path:
    return _model_file("SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="session")
def gemma3_gguf() -> Path:
    return _model_file("gemma-3-270m-q4_k_m.gguf")
