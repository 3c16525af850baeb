from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.server.quality import card_path, quality_facts

MODEL = {"name": "small", "parameters": 1000, "stored_bytes": 500, "architecture": "llama"}
FIGURE = {"value": 11.5, "error": 0.1}
CARD: dict[str, Any] = {
    "schema": 1,
    "model": MODEL,
    "perplexity": FIGURE,
    "base": {**MODEL, "name": "base", "stored_bytes": 2000},
    "comparison": {
        "perplexity_ratio": {"value": 1.02, "error": 0.0},
        "kld_mean": {"value": 0.013, "error": 0.001},
        "kld_p99": 0.2,
        "same_top_percent": {"value": 93.0, "error": 0.5},
        "places": 9,
    },
}


def test_what_a_card_says_of_a_folder_and_of_a_file(tmp_path: Path) -> None:
    weights = tmp_path / "tiny.gguf"
    weights.touch()
    for model in (tmp_path, weights):
        assert quality_facts(model) == ()
        card_path(model).write_text(json.dumps(CARD))
        facts = {fact.name: fact.value for fact in quality_facts(model)}
        assert facts == {
            "bits_per_weight": 4.0, "perplexity": 11.5, "kld_mean": 0.013, "kld_p99": 0.2,
            "same_top_share": 0.93, "perplexity_ratio": 1.02,
        }  # fmt: skip
        assert quality_facts(model)[2].note == "against base"
    assert card_path(weights) == tmp_path / "tiny.quality.json"


def test_a_card_without_a_base(tmp_path: Path) -> None:
    card_path(tmp_path).write_text(json.dumps({"model": MODEL, "perplexity": FIGURE}))
    assert [fact.name for fact in quality_facts(tmp_path)] == ["bits_per_weight", "perplexity"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"model": 1}', "\0", '{"model": {}}'])
def test_a_broken_card_is_a_warning_and_no_more(
    tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    card_path(tmp_path).write_text(content)
    assert quality_facts(tmp_path) == ()
    assert "is not shown" in caplog.text
