"""A drafting model or head is found by its name; a model with another vocabulary is refused."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from support.echo.byte_tokenizer import save_byte_tokenizer

from appliance.config import EngineConfig
from appliance.errors import ConfigError, ModelError
from appliance.hub.found_model import resolve_draft

if TYPE_CHECKING:
    from pathlib import Path


def resolve(speculate: str, model: Path) -> str:
    engine = EngineConfig(speculate=speculate)
    return resolve_draft(engine, model, progress=lambda *_: None).speculate


def test_nothing_is_looked_for_where_no_other_model_drafts(tmp_path: Path) -> None:
    for speculate in ("auto", "off", "suffix", "draft=self"):
        assert resolve(speculate, tmp_path / "missing") == speculate


@pytest.mark.parametrize("method", ["draft", "eagle"])
def test_what_is_not_there_is_refused(method: str, tmp_path: Path) -> None:
    with pytest.raises(ModelError):
        resolve(f"{method}={tmp_path / 'missing.gguf'}", tmp_path)


def test_a_head_is_a_folder(tmp_path: Path) -> None:
    """A head has no tokenizer to compare; a hub's repository becomes its folder here."""
    (tmp_path / "config.json").write_text("{}")
    assert resolve(f"eagle={tmp_path}", tmp_path / "missing") == f"eagle={tmp_path}"


@pytest.mark.model
def test_the_vocabulary_is_compared_token_by_token(smollm2_gguf: Path, tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    assert resolve(f"draft={smollm2_gguf}", smollm2_gguf) == f"draft={smollm2_gguf}"
    with pytest.raises(
        ConfigError, match=r"its token \d+ is '.*', and the model's is '.*'; a draft"
    ):
        resolve(f"draft={smollm2_gguf}", tmp_path)
