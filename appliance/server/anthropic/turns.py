"""Checks messages and tools of Anthropic's API and converts them for chat templates."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import RequestError
from appliance.server.anthropic.schema import ContentBlock
from appliance.server.tools import Offer, Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.dialects.turns import Turn
    from appliance.server.anthropic.schema import AnthropicTurn, CountRequest


def turns_of(body: CountRequest) -> list[Turn]:
    """Return the turns; the system prompt and each tool result become separate turns.

    Raises:
        RequestError: a message has unsupported content.
    """
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": _text(body.system, "system")})
    names: dict[str, str] = {}  # a tool's name by call id
    for number, message in enumerate(body.messages):
        where = f"messages.{number}"
        if message.role == "assistant":
            turns.append(_assistant(message, where, names))
        else:
            turns += _others(message, where, names)
    if body.messages[-1].role == "assistant":
        raise RequestError(
            "messages end with a turn of the assistant, and going on from there is not supported; "
            "end with a turn of the user",
            param="messages",
        )
    return turns


def tools_of(body: CountRequest) -> Tools:
    """Return the tools of a request.

    Raises:
        RequestError: a tool runs on Anthropic's servers, or the choice matches none.
    """
    offers = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "custom"):
            raise RequestError(
                f"tools.{number} is of type {tool.type[:60]!r}, which only Anthropic runs; describe"
                " a tool of your own with input_schema, or leave it out",
                param="tools",
                code="unsupported_tool",
            )
        place = f"tools.{number}.input_schema"
        offers.append(
            Offer(tool.name, tool.input_schema, place, tool.description, bool(tool.strict))
        )
    choice = body.tool_choice
    if choice is None:
        return Tools.of(offers)
    one_call = bool(choice.disable_parallel_tool_use)
    match choice.type:
        case "tool":
            return Tools.of(offers, named=choice.name or "", one_call=one_call)
        case "any":
            return Tools.of(offers, choice="required", one_call=one_call)
        case other:
            return Tools.of(offers, choice=other, one_call=one_call)


def _assistant(message: AnthropicTurn, where: str, names: dict[str, str]) -> Turn:
    texts, thoughts, calls = [], [], []
    for place, block in enumerate(_blocks(message.content)):
        match block:
            case ContentBlock(type="text", text=str(text)):
                texts.append(text)
            case ContentBlock(type="thinking", thinking=str(thinking)):
                thoughts.append(thinking)
            case ContentBlock(type="redacted_thinking"):
                pass  # only its author can read it
            case ContentBlock(type="tool_use", id=str(call_id), name=str(name)):
                check_nesting(block.input, "messages")
                names[call_id] = name
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case _:
                raise _refused(block, f"{where}.content.{place}")
    turn: Turn = {"role": "assistant", "content": "\n".join(texts)}
    if thoughts:
        turn["reasoning_content"] = "\n".join(thoughts)
    if calls:
        turn["tool_calls"] = calls
    return turn


def _others(message: AnthropicTurn, where: str, names: dict[str, str]) -> list[Turn]:
    """Split a user's turn: each tool result becomes a separate turn, in order."""
    turns: list[Turn] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            turns.append({"role": message.role, "content": "\n".join(texts)})
            texts.clear()

    for place, block in enumerate(_blocks(message.content)):
        match block:
            case ContentBlock(type="text", text=str(text)):
                texts.append(text)
            case ContentBlock(type="tool_result", tool_use_id=str(call_id)):
                flush()
                content = _text(_result(block, where), f"{where}.content.{place}.content")
                turn = {
                    "role": "tool",
                    "tool_call_id": call_id,
                    # Templates have no other place for an error.
                    "content": f"Error: {content}" if block.is_error else content,
                }
                if call_id in names:
                    turn["name"] = names[call_id]
                turns.append(turn)
            case _:
                raise _refused(block, f"{where}.content.{place}")
    flush()
    return turns or [{"role": message.role, "content": ""}]


def _result(block: ContentBlock, where: str) -> str | list[ContentBlock]:
    try:
        return msgspec.convert(block.content or "", str | list[ContentBlock])
    except msgspec.ValidationError:
        raise RequestError(
            f"{where} has a tool_result whose content is neither text nor blocks", param="messages"
        ) from None


def _text(content: str | Sequence[ContentBlock], where: str) -> str:
    texts = []
    for place, block in enumerate(_blocks(content)):
        if block.type != "text" or block.text is None:
            raise _refused(block, f"{where}.{place}")
        texts.append(block.text)
    return "\n".join(texts)


def _blocks(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _refused(block: Any, where: str) -> RequestError:
    known = "text, thinking, tool_use and tool_result, with their fields, where they belong"
    return RequestError(
        f"{where}: a block of type {block.type[:40]!r} is not supported here; what is: {known}",
        param="messages",
        code="unsupported_content",
    )
