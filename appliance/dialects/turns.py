"""Prepares a conversation with tools for the model's chat template."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from appliance.dialects.dialect import Dialect

SHORT_ID = 9  # letters and digits
_ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz"
Turn = dict[str, Any]


def prepare(
    dialect: Dialect, turns: Sequence[Turn], tools: Sequence[Mapping[str, Any]] | None
) -> tuple[list[Turn], Sequence[Mapping[str, Any]] | None]:
    """Return messages and tools in the template's form.

    Args:
        turns: messages with calls in OpenAI's form, arguments as JSON text.
        tools: in OpenAI's form; None forbids calls.

    Returns:
        Turns, and tools if the template lists them.
    """
    prepared = [dict(turn) for turn in turns]
    if dialect.writes_calls:
        for turn in prepared:
            _adapt(turn, dialect)
    else:
        prepared = _as_text(dialect, prepared)
    if tools and not dialect.lists_tools:
        _add_system(dialect, prepared, _description(dialect, tools))
        tools = None
    if dialect.wants_parts:
        prepared = list(map(in_parts, prepared))
    return prepared, tools or None


def in_parts(turn: Mapping[str, Any]) -> Turn:
    """Return a message whose content is a list of parts."""
    content = turn["content"]
    return {**turn, "content": [_text_part(content)] if isinstance(content, str) else content}


def _text_part(text: str) -> dict[str, str]:
    return {"type": "text", "text": text}


def _joined(*contents: str | list[dict[str, Any]], between: str = "\n") -> Any:
    """Join contents, of which some may be lists of parts, as those of pictures."""
    if all(isinstance(content, str) for content in contents):
        return between.join(filter(None, map(str, contents)))
    parts: list[dict[str, Any]] = []
    for content in contents:
        parts += [_text_part(content + between)] if isinstance(content, str) else content
    return parts


def short_id(call_id: str) -> str:
    """Map an id to nine letters and digits, deterministically; keep ids that fit."""
    if len(call_id) == SHORT_ID and call_id.isascii() and call_id.isalnum():
        return call_id
    number = int.from_bytes(hashlib.sha256(call_id.encode("utf-8", "replace")).digest()[:8])
    return "".join(_ALPHABET[number // 36**place % 36] for place in range(SHORT_ID))


def _adapt(turn: Turn, dialect: Dialect) -> None:
    if dialect.form.short_ids and "tool_call_id" in turn:
        turn["tool_call_id"] = short_id(turn["tool_call_id"])
    if "tool_calls" not in turn:
        return
    calls = []
    for call in turn["tool_calls"]:
        function = call["function"]
        if not dialect.text_arguments:
            function = {**function, "arguments": _object(function["arguments"])}
        call_id = short_id(call["id"]) if dialect.form.short_ids else call["id"]
        calls.append({**call, "id": call_id, "function": function})
    turn["tool_calls"] = calls


def _object(arguments: str) -> Any:
    """Parse arguments as an object; return invalid ones as text for the model to read."""
    try:
        value = json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments


def _as_text(dialect: Dialect, turns: list[Turn]) -> list[Turn]:
    """Write calls and results as plain turns; join adjacent turns of one role."""
    plain: list[Turn] = []
    joined: list[Any] = []  # contents of the last turn, if a result ended it

    def join() -> None:
        if joined:
            plain[-1]["content"] = _joined(*joined)
            joined.clear()

    for turn in turns:
        turn.pop("tool_call_id", None)
        calls = turn.pop("tool_calls", ())
        written = [
            dialect.form.write(c["function"]["name"], c["function"]["arguments"]) for c in calls
        ]
        if written:
            turn["content"] = _joined(turn["content"], *written)
        if turn["role"] == "tool":
            text = _joined("<tool_response>", turn["content"], "</tool_response>")
            turn = {"role": "user", "content": text}
            if plain and plain[-1]["role"] == "user":
                if not joined:
                    joined.append(plain[-1]["content"])
                joined.append(text)
                continue
        join()
        plain.append(turn)
    join()
    return plain


def _description(dialect: Dialect, tools: Sequence[Mapping[str, Any]]) -> str:
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in tools)
    example = dialect.form.write("name_of_the_tool", '{"argument": "value"}')
    return (
        "You can call tools. Each line describes one, with a JSON schema of its arguments:\n"
        f"{listed}\n"
        "To call a tool, write this, with its name and arguments, and nothing after it:\n"
        f"{example}\n"
        "The result then comes in the next message. Answer without a call if you need none."
    )


def _add_system(dialect: Dialect, turns: list[Turn], text: str) -> None:
    role = "system" if dialect.takes_system else "user"
    if turns and turns[0]["role"] == role:
        first = turns[0]["content"]
        both = (first, text) if dialect.takes_system else (text, first)
        turns[0]["content"] = _joined(*both, between="\n\n")
    else:
        turns.insert(0, {"role": role, "content": text})
