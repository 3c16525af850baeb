"""Text that a model writes by itself: reproducible, and never a reason to stop."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.errors import QuantizeError
from appliance.quant.text import calibration
from appliance.quant.text.self_text import first_words, sample_rows
from appliance.tokenizer import Tokenizer


@pytest.mark.model
def test_the_same_seed_writes_the_same_rows(smollm2_gguf: Path) -> None:
    first = sample_rows(smollm2_gguf, 3, 24, seed=1)
    assert [len(row) for row in first] == [24] * 3
    assert sample_rows(smollm2_gguf, 3, 24, seed=1) == first
    words = first_words(Tokenizer.from_path(smollm2_gguf), 3, seed=1)
    assert all(word in row[:2] for word, row in zip(words, first, strict=True))


def test_a_model_that_cannot_run_is_named_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="--calibration"):
        sample_rows(tmp_path / "none.gguf", 1, 8, seed=0)


@pytest.mark.model
def test_help_topics_are_the_rest_and_stand_in_for_all(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)

    def written(model: Path, count: int, row_tokens: int, seed: int) -> list[list[int]]:
        return [[7] * row_tokens] * count

    def refused(model: Path, count: int, row_tokens: int, seed: int) -> list[list[int]]:
        raise QuantizeError("too large")

    monkeypatch.setattr(calibration, "sample_rows", written)
    rows = calibration.default_rows(smollm2_gguf, tokenizer, 512, 64, 0)
    assert rows.rows.shape == (8, 64)
    assert int((rows.rows == 7).all(1).sum()) == 6
    assert "own making" in rows.source
    monkeypatch.setattr(calibration, "sample_rows", refused)
    rows = calibration.default_rows(smollm2_gguf, tokenizer, 512, 64, 0)
    assert rows.rows.shape == (8, 64)
    assert "too large" in rows.source
