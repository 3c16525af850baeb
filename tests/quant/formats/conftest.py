"""Folders of a few tensors."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from appliance.model_files.checkpoint import SafetensorsFolder, write_safetensors


@pytest.fixture
def folder_of(tmp_path: Path) -> Callable[[dict[str, Tensor], object], SafetensorsFolder]:
    """Write tensors and a quantization_config, and open the folder."""

    def write(tensors: dict[str, Tensor], quantization: object) -> SafetensorsFolder:
        (tmp_path / "config.json").write_text(json.dumps({"quantization_config": quantization}))
        write_safetensors(tmp_path / "model.safetensors", tensors)
        return SafetensorsFolder(tmp_path)

    return write
