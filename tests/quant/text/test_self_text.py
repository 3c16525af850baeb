"""Text that a model writes itself: reproducible, and never a reason to stop."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from support.echo.byte_tokenizer import save_byte_tokenizer
from support.runs.waiting import LIMIT

from appliance.errors import QuantizeError
from appliance.quant.text import calibration
from appliance.quant.text.calibration import CalibrationText, WrittenRows, sample_rows
from appliance.quant.text.row_writer import MIB, first_words, sample_here
from appliance.tokenizer import Tokenizer

WATCHED = """
import sys, threading, time
from appliance.quant.text.row_writer import _watch

most, taken = map(int, sys.argv[1:])
threading.Thread(target=_watch, args=(most,), daemon=True).start()
print("watched", flush=True)
kept = b"1" * taken
time.sleep(600)
"""


@pytest.mark.model
def test_the_same_seed_writes_the_same_rows(smollm2_gguf: Path) -> None:
    written = sample_rows(smollm2_gguf, 3, 24, seed=1)
    first = written.rows
    assert [len(row) for row in first] == [24] * 3
    assert sample_here(str(smollm2_gguf), "cpu", 3, 24, 1) == first, "in another process too"
    weights = smollm2_gguf.stat().st_size
    assert written.peak_ram > psutil.Process().memory_info().rss / 2 + weights
    words = first_words(Tokenizer.from_path(smollm2_gguf), 3, seed=1)
    assert all(word in row[:2] for word, row in zip(words, first, strict=True))


def test_a_vocabulary_without_words_begins_with_any_token(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    found = first_words(tokenizer, 12, seed=1)
    assert len(found) == 12
    assert all(0 <= token < tokenizer.vocab_size for token in found)
    assert found == first_words(tokenizer, 12, seed=1) != first_words(tokenizer, 12, seed=2)


def test_a_model_that_cannot_run_is_named_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="--calibration"):
        sample_rows(tmp_path / "none.gguf", 1, 8, seed=0)


@pytest.mark.model
def test_help_topics_are_the_rest_and_stand_in_for_all(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)

    def written(model: Path, count: int, row_tokens: int, seed: int, **_: Any) -> WrittenRows:
        return WrittenRows([[7] * row_tokens] * count, 123)

    def refused(*_: Any, **__: Any) -> list[list[int]]:
        raise QuantizeError("too large")

    text = CalibrationText(num_tokens=512, row_tokens=64)
    monkeypatch.setattr(calibration, "sample_rows", written)
    rows = calibration.default_rows(smollm2_gguf, tokenizer, text)
    assert rows.rows.shape == (8, 64)
    assert int((rows.rows == 7).all(1).sum()) == 6
    assert "own making" in rows.source
    assert rows.peak_ram == 123
    few = calibration.default_rows(smollm2_gguf, tokenizer, CalibrationText(None, 128, 64))
    assert few.rows.shape == (2, 64)
    assert few.rows.dtype == torch.int64, "also where no row is of help topics"
    monkeypatch.setattr(calibration, "sample_rows", refused)
    rows = calibration.default_rows(smollm2_gguf, tokenizer, text)
    assert rows.rows.shape == (8, 64)
    assert "too large" in rows.source


@pytest.mark.model
def test_a_ceiling_below_which_the_model_does_not_fit_is_kept(smollm2_gguf: Path) -> None:
    used = psutil.Process().memory_info().rss
    with pytest.raises(QuantizeError, match=r"takes (at least|more than) \d+ MiB.*--max-ram"):
        sample_rows(smollm2_gguf, 1, 16, seed=0, max_ram=used + 200 * MIB)


def child(*arguments: str) -> subprocess.Popen[bytes]:
    command = [sys.executable, "-c", WATCHED, *arguments]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )


def test_what_takes_more_than_it_may_is_ended_at_once() -> None:
    with child(str(200 * MIB), str(400 * MIB)) as process:
        assert process.wait(LIMIT) == 1
        assert process.stderr is not None
        errors = process.stderr.read()
    assert b"more than 200 MiB of memory" in errors


def test_it_ends_with_the_process_that_began_it() -> None:
    with child("0", "0") as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stdout.readline() == b"watched\n"
        assert process.poll() is None
        process.stdin.close()
        assert process.wait(LIMIT) == 1
