from __future__ import annotations

import json
from pathlib import Path

import jsonschema
import pytest

from appliance.errors import ConfigError, QuantizeError
from appliance.quant.text.documents import default_documents
from appliance.quant.text.held_out import KIND_WINDOWS, HeldOutText, Windows, windows_of_kinds
from appliance.quant.text.samples import chats, openings, tool_openings, tool_tasks
from appliance.tokenizer import Tokenizer


class Words:
    """A tokenizer with one id per character."""

    def __init__(self, bos: list[int]) -> None:
        self._bos = bos

    def encode(
        self, text: str, *, add_special_tokens: bool, allow_special: bool = True
    ) -> list[int]:
        return (self._bos if add_special_tokens else []) + [ord(letter) for letter in text]


def windows_of(text: HeldOutText, bos: list[int] | None = None) -> Windows:
    tokenizer: Tokenizer = Words(bos or [])  # type: ignore[assignment]
    return text.windows_of(tokenizer)


@pytest.fixture
def numbers(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.txt"
    path.write_text("".join(chr(40 + i) for i in range(70)))
    return path


def test_windows_follow_each_other_and_a_rest_is_left(numbers: Path) -> None:
    windows = windows_of(HeldOutText(numbers, None, 16))
    assert windows.tokens.tolist() == [list(range(40 + i, 56 + i)) for i in range(0, 64, 16)]
    assert [windows.scored(i) for i in (0, 1)] == [slice(0, 15)] * 2


def test_a_stride_scores_each_token_once(numbers: Path) -> None:
    windows = windows_of(HeldOutText(numbers, None, 16, stride=6))
    followed = [
        int(token)
        for i, window in enumerate(windows.tokens)
        for token in window[windows.scored(i).start + 1 : windows.scored(i).stop + 1]
    ]
    assert followed == list(range(41, 40 + 16 + 6 * (len(windows.tokens) - 1)))


def test_windows_begin_with_bos_where_the_model_wants_it(numbers: Path) -> None:
    windows = windows_of(HeldOutText(numbers, None, 16), bos=[7])
    assert windows.tokens[:, 0].tolist() == [7] * 4
    assert windows.tokens[1, 1] == 40 + 15


def test_fewer_tokens_are_spread_over_the_text(numbers: Path) -> None:
    windows = windows_of(HeldOutText(numbers, 32, 16))
    assert windows.tokens[:, 0].tolist() == [40, 40 + 32]


def test_every_token_counts_in_the_fingerprint(numbers: Path) -> None:
    first = windows_of(HeldOutText(numbers, None, 16)).fingerprint
    numbers.write_text(numbers.read_text().replace("0", "1"))
    assert windows_of(HeldOutText(numbers, None, 16)).fingerprint != first


def test_the_default_text_is_none_of_calibration() -> None:
    calibrated = {name for name, _ in default_documents(held_out=False)}
    assert calibrated.isdisjoint(name for name, _ in default_documents(held_out=True))
    text = "\n\n".join(text for _, text in default_documents(held_out=True))
    first = windows_of(HeldOutText(None, 64, 32)).tokens[0].tolist()
    assert "".join(map(chr, first)) == text[:32]


def test_what_cannot_be_measured_is_one_clear_line(numbers: Path, tmp_path: Path) -> None:
    with pytest.raises(QuantizeError, match="has 70 tokens, which do not fill a window of 512"):
        windows_of(HeldOutText(numbers))
    with pytest.raises(QuantizeError, match="there is no text at"):
        windows_of(HeldOutText(tmp_path / "nothing.txt"))
    with pytest.raises(ConfigError, match="between 1 and the window"):
        HeldOutText(window=64, stride=65)
    with pytest.raises(ConfigError, match="do not fill a window of 512"):
        HeldOutText(num_tokens=100)


@pytest.mark.model
def test_passages_of_every_kind_end_where_they_end(smollm2_gguf: Path) -> None:
    tokenizer = Tokenizer.from_path(smollm2_gguf)
    windows = windows_of_kinds(tokenizer, 512)
    assert len(windows.kinds) <= KIND_WINDOWS
    assert {*windows.kinds} == {"prose", "code", "other languages", "chat", "tool calls"}
    scored = [
        tokenizer.decode(tokens[where.start + 1 : where.stop + 1].tolist(), with_control=True)
        for tokens, where in zip(
            windows.tokens, map(windows.scored, range(len(windows.kinds))), strict=True
        )
    ]
    for kind, text in zip(windows.kinds, scored, strict=True):
        if kind == "tool calls":
            assert text.startswith("<tool_call>")
            call = json.loads(text.partition("\n")[2].partition("\n")[0])
            assert call.keys() == {"name", "arguments"}
        if kind == "chat":
            assert text.rstrip().endswith("<|im_end|>")
            assert text.count("<|im_end|>") == 1
    short = windows_of_kinds(tokenizer, 64)
    assert short.tokens.shape[1] == 64
    assert "tool calls" not in short.kinds, "nothing of a call is left"
    tokenizer.close()


def test_no_passage_is_an_opening_of_calibration() -> None:
    asked = {question for kind in ("chat", "code", "languages") for question in openings(kind)}
    tools = {name for task in tool_openings() for name in task.schemas}
    assert asked.isdisjoint(turn["content"] for chat in chats() for turn in chat)
    assert len([name for task in tool_tasks() for name in task.schemas if name not in tools]) > 10
    assert not {task.question for task in tool_tasks()} & {t.question for t in tool_openings()}


def test_packaged_calls_obey_their_schemas() -> None:
    for task in (*tool_tasks(), *tool_openings()):
        jsonschema.validate(task.arguments, task.schemas[task.name])
