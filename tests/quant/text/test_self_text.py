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
from appliance.quant.text import default_rows
from appliance.quant.text.answerer import MIB, AnswerJob, WrittenRows, work_here
from appliance.quant.text.answers import Openings, answer, sample_rows
from appliance.quant.text.calibration import CalibrationText
from appliance.quant.text.default_rows import first_words, openings_of, rows_of_kinds
from appliance.tokenizer import Tokenizer

WATCHED = """
import sys, threading, time
from appliance.quant.text.answerer import _watch

most, taken = map(int, sys.argv[1:])
threading.Thread(target=_watch, args=(most,), daemon=True).start()
print("watched", flush=True)
kept = b"1" * taken
time.sleep(600)
"""


@pytest.mark.model
def test_the_same_seed_writes_the_same_rows(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    openings = [
        *openings_of(default_rows.FREE, tokenizer, 2, seed=1),
        *openings_of(default_rows.CHATS, tokenizer, 2, seed=1),
    ]
    written = sample_rows(smollm2_gguf, openings, 96, seed=1)
    assert [len(row) for row in written.rows] == [96] * 4
    for prompts, row in zip(openings, written.rows, strict=True):
        assert row[: len(prompts[0])] == prompts[0]
    job = AnswerJob(model=str(smollm2_gguf), device="cpu", openings=openings, length=96, seed=1)
    assert work_here(job) == written.rows, "in another process too"
    weights = smollm2_gguf.stat().st_size
    assert written.peak_ram > psutil.Process().memory_info().rss / 2 + weights
    words = first_words(tokenizer, 3, seed=1)
    assert all(len(tokenizer.decode([word]).strip()) > 2 for word in words)
    tokenizer.close()


@pytest.mark.model
def test_the_next_question_follows_where_an_answer_ends(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    asked = [
        tokenizer.encode_chat([{"role": "user", "content": f"Say only the word {word}."}])
        for word in ("yes", "no")
    ]
    (row,) = sample_rows(smollm2_gguf, [asked], 400, seed=0).rows
    text = tokenizer.decode(row, with_control=True)
    assert text.count("Say only the word yes.<|im_end|>") >= 1
    assert text.count("Say only the word no.<|im_end|>") >= 1
    assert len(row) == 400


@pytest.mark.model
def test_prompts_are_answered_greedily(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    question = "What is the capital of Japan?"
    prompt = tokenizer.encode_chat([{"role": "user", "content": question}])
    first, second = answer(smollm2_gguf, [prompt, prompt], 24)
    assert first == second
    assert "Tokyo" in tokenizer.decode(first)
    assert len(first) <= 24


def test_rows_are_divided_by_their_shares() -> None:
    for count in (1, 2, 7, 16, 64, 200):
        found = rows_of_kinds(count)
        assert sum(found.values()) == count
        for kind, share in default_rows.SHARES.items():
            assert abs(found[kind] - share * count) < 1


def test_a_vocabulary_without_words_begins_with_any_token(tmp_path: Path) -> None:
    save_byte_tokenizer(tmp_path)
    tokenizer = Tokenizer.from_path(tmp_path)
    found = first_words(tokenizer, 12, seed=1)
    assert len(found) == 12
    assert all(0 <= token < tokenizer.vocab_size for token in found)
    assert found == first_words(tokenizer, 12, seed=1) != first_words(tokenizer, 12, seed=2)


def test_a_model_that_cannot_run_is_named_with_what_helps(tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="--calibration"):
        sample_rows(tmp_path / "none.gguf", [[[1]]], 8, seed=0)


@pytest.mark.model
def test_every_kind_is_there_and_sources_stand_in_for_all(
    smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)

    def written(
        _: Path, openings: list[Openings], row_tokens: int, *__: Any, **___: Any
    ) -> WrittenRows:
        assert all(prompts for prompts in openings)
        return WrittenRows([[7] * row_tokens] * len(openings), 123)

    def refused(*_: Any, **__: Any) -> WrittenRows:
        raise QuantizeError("too large")

    text = CalibrationText(num_tokens=1280, row_tokens=64)
    monkeypatch.setattr(default_rows, "sample_rows", written)
    rows = default_rows.default_rows(smollm2_gguf, tokenizer, text)
    assert rows.rows.shape == (20, 64)
    library = rows_of_kinds(20)[default_rows.LIBRARY]
    assert int((rows.rows == 7).all(1).sum()) == 20 - library
    for kind in default_rows.SHARES:
        assert kind in rows.source
    assert rows.peak_ram == 123
    again = default_rows.default_rows(smollm2_gguf, tokenizer, text)
    assert torch.equal(again.rows, rows.rows)
    few = default_rows.default_rows(smollm2_gguf, tokenizer, CalibrationText(None, 128, 64))
    assert few.rows.shape == (2, 64)
    assert few.rows.dtype == torch.int64
    monkeypatch.setattr(default_rows, "sample_rows", refused)
    rows = default_rows.default_rows(smollm2_gguf, tokenizer, text)
    assert rows.rows.shape == (20, 64)
    assert "too large" in rows.source
    tokenizer.close()


@pytest.mark.model
def test_a_ceiling_below_which_the_model_does_not_fit_is_kept(smollm2_gguf: Path) -> None:
    used = psutil.Process().memory_info().rss
    with pytest.raises(QuantizeError, match=r"takes (at least|more than) \d+ MiB.*--max-ram"):
        sample_rows(smollm2_gguf, [[[1]]], 16, seed=0, max_ram=used + 200 * MIB)


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
