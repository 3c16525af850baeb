"""Answers are judged by their calls, in the form of the model's own template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from appliance.errors import QuantizeError
from appliance.quant.quality import tool_calls
from appliance.quant.quality.tool_calls import call_in, compare_calls
from appliance.quant.text.samples import ToolTask, tool_tasks
from appliance.tokenizer import Tokenizer

pytestmark = pytest.mark.model


@pytest.fixture(scope="module")
def tokenizer(smollm2_gguf: Path) -> Tokenizer:
    return Tokenizer.from_path(smollm2_gguf)


def written(tokenizer: Tokenizer, name: str, arguments: Any) -> list[int]:
    """Encode a call as Qwen and Hermes models write it."""
    call = json.dumps({"name": name, "arguments": arguments})
    return tokenizer.encode(f"<tool_call>\n{call}\n</tool_call>", add_special_tokens=False)


def judged(tokenizer: Tokenizer, task: ToolTask, ids: list[int]) -> Any:
    return call_in(tokenizer, task, task.prompt(tokenizer), ids)


def test_a_call_is_valid_if_its_schema_allows_it(tokenizer: Tokenizer) -> None:
    task = tool_tasks()[2]  # set_light(room, on), set_temperature(room, celsius)
    right = {"room": "study", "celsius": 21.5}
    assert judged(tokenizer, task, written(tokenizer, "set_temperature", right)) == (
        "set_temperature",
        right,
    )
    other = {"room": "study", "on": True}
    assert judged(tokenizer, task, written(tokenizer, "set_light", other)) == ("set_light", other)
    for name, arguments in (
        ("set_light", right),
        ("set_temperature", {"room": "study", "celsius": "21.5"}),
        ("set_temperature", {"room": "study", "celsius": True}),
        ("set_temperature", {"room": "study"}),
        ("open_door", {"room": "study"}),
        ("set_temperature", []),
    ):
        assert judged(tokenizer, task, written(tokenizer, name, arguments)) is None, arguments


def test_a_text_or_two_calls_are_no_call(tokenizer: Tokenizer) -> None:
    task = tool_tasks()[1]
    call = written(tokenizer, "get_time", {"city": "Nairobi"})
    assert (
        judged(tokenizer, task, tokenizer.encode("It is noon.", add_special_tokens=False)) is None
    )
    assert judged(tokenizer, task, [*call, *call]) is None
    assert judged(tokenizer, task, call[:-8]) is None, "cut off"


def test_base_and_result_are_counted(
    tokenizer: Tokenizer, smollm2_gguf: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tasks = tool_tasks()
    right = [written(tokenizer, task.name, task.arguments) for task in tasks]
    wrong = tokenizer.encode("I do not know.", add_special_tokens=False)
    changed = dict(tasks[1].arguments, city="Mombasa")
    answers = {
        "base": [*right[:-1], wrong],
        "model": [wrong, written(tokenizer, tasks[1].name, changed), *right[2:]],
    }

    def answer(path: Path, *_: Any, **__: Any) -> list[list[int]]:
        return answers[path.name]

    monkeypatch.setattr(tool_calls, "answer", answer)
    found = compare_calls(Path("model"), Path("base"), tokenizer)
    count = len(tasks)
    assert (found.asked, found.base_right, found.right) == (count, count - 1, count - 1)
    assert found.same == count - 3
    assert not found.in_template, "SmolLM2's lists none"

    def refuse(*_: Any, **__: Any) -> list[list[int]]:
        raise QuantizeError("7 MiB are needed")

    monkeypatch.setattr(tool_calls, "answer", refuse)
    found = compare_calls(Path("model"), Path("base"), tokenizer)
    assert (found.asked, found.reason) == (0, "7 MiB are needed")
