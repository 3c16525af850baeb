"""A draft model is found by its name, and refused if it has another vocabulary."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from appliance.config import EngineConfig
from appliance.draft_names import resolve_draft
from appliance.errors import ConfigError, ModelError

if TYPE_CHECKING:
    from pathlib import Path


def resolve(speculate: str, model: Path) -> str:
    engine = EngineConfig(speculate=speculate)
    return resolve_draft(engine, model, progress=lambda *_: None).speculate


def test_nothing_is_looked_for_where_no_other_model_drafts(tmp_path: Path) -> None:
    for speculate in ("auto", "off", "suffix", "draft=self"):
        assert resolve(speculate, tmp_path / "missing") == speculate


def test_a_model_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        resolve(f"draft={tmp_path / 'missing.gguf'}", tmp_path)


@pytest.mark.model
def test_the_vocabulary_is_compared_token_by_token(smollm2_gguf: Path, gemma3_gguf: Path) -> None:
    assert resolve(f"draft={smollm2_gguf}", smollm2_gguf) == f"draft={smollm2_gguf}"
    with pytest.raises(
        ConfigError, match=r"its token \d+ is '.*', and the model's is '.*'; a draft"
    ):
        resolve(f"draft={smollm2_gguf}", gemma3_gguf)
