"""Asks a checkpoint and its base to call tools, and counts the right calls."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from appliance.dialects import CallArguments, CallBegin
from appliance.errors import ApplianceError
from appliance.quant.quality.card import ToolCalls
from appliance.quant.text.answers import answer
from appliance.quant.text.samples import tool_tasks

if TYPE_CHECKING:
    from pathlib import Path

    from appliance.dialects import Dialect, Part
    from appliance.quant.text.samples import ToolTask
    from appliance.tokenizer import Tokenizer

MOST_TOKENS = 128  # of an answer
PROMPT_END = 16  # tokens at a prompt's end that may begin a thought
_TYPES: dict[str, type | tuple[type, ...]] = {
    "string": str, "number": (int, float), "integer": int, "boolean": bool, "array": list,
}  # fmt: skip


def compare_calls(
    model: Path,
    base: Path,
    tokenizer: Tokenizer,
    *,
    device: str = "cpu",
    max_ram: int | None = None,
) -> ToolCalls:
    """Ask both models the packaged questions; say why not if one of them cannot run here.

    Args:
        max_ram: limit in bytes of this process and a model's; None takes what is free.
    """
    if tokenizer.chat_template is None:
        return ToolCalls(0, reason="the model has no chat template")
    tasks = tool_tasks()
    tokenizer.isolate_template()
    try:
        prompts = [task.prompt(tokenizer) for task in tasks]
        answers = [
            answer(path, prompts, MOST_TOKENS, device=device, max_ram=max_ram)
            for path in (base, model)
        ]
    except ApplianceError as error:
        return ToolCalls(0, reason=str(error))
    before, after = (
        [
            call_in(tokenizer, task, prompt, ids)
            for task, prompt, ids in zip(tasks, prompts, found, strict=True)
        ]
        for found in answers
    )
    return ToolCalls(
        asked=len(tasks),
        in_template=tokenizer.dialect.lists_tools,
        base_right=_right(tasks, before),
        right=_right(tasks, after),
        same=sum(
            one is not None and one == other for one, other in zip(before, after, strict=True)
        ),
    )


def call_in(
    tokenizer: Tokenizer, task: ToolTask, prompt: list[int], ids: list[int]
) -> tuple[str, dict[str, Any]] | None:
    """Return name and arguments of the only call in an answer; None if it is not valid."""
    ends = tokenizer.eos_token_ids
    text = _text(tokenizer, [token for token in ids if token not in ends])
    dialect: Dialect = tokenizer.dialect
    thinking = dialect.begins_thinking(_text(tokenizer, prompt[-PROMPT_END:]))
    reader = dialect.reader(task.schemas, thinking=thinking)
    parts: list[Part] = [*reader.push(text), *reader.finish(cut=len(ids) >= MOST_TOKENS)]
    names = [part.name for part in parts if isinstance(part, CallBegin)]
    written = "".join(part.text for part in parts if isinstance(part, CallArguments))
    try:
        arguments = json.loads(written)
    except ValueError:
        return None
    if len(names) != 1 or not isinstance(arguments, dict):
        return None
    return (names[0], arguments) if _obeys(arguments, task.schemas.get(names[0])) else None


def _obeys(arguments: dict[str, Any], schema: dict[str, Any] | None) -> bool:
    """Return True if arguments have exactly the properties of a packaged schema."""
    if schema is None or arguments.keys() != schema["properties"].keys():
        return False
    for name, described in schema["properties"].items():
        value = arguments[name]
        if not isinstance(value, _TYPES[described["type"]]):
            return False
        if isinstance(value, bool) != (described["type"] == "boolean"):
            return False
    return True


def _right(tasks: list[ToolTask], calls: list[tuple[str, dict[str, Any]] | None]) -> int:
    return sum(
        call is not None and call[0] == task.name for task, call in zip(tasks, calls, strict=True)
    )


def _text(tokenizer: Tokenizer, ids: list[int]) -> str:
    return b"".join(map(tokenizer.token_bytes, ids)).decode("utf-8", errors="replace")
