from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.engine.adapter_requests import ALL
from support.models.checkpoint_forms import FORMS, write_both
from support.models.lora import write_adapter

if TYPE_CHECKING:
    from pathlib import Path


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    quantized, _ = write_both(tmp_path_factory.mktemp("model"), FORMS["awq"])
    return quantized.path


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("adapters")
    return [write_adapter(root / f"a{i}", ALL, rank=4 + i, seed=i, spread=0.08) for i in range(4)]
