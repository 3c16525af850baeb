"""Checks messages and tools of Anthropic's API and converts them for chat templates."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.server.anthropic.blocks import (
    block_text,
    blocks_of,
    refused,
    result_text,
    server_result_text,
    text_of,
)
from appliance.server.anthropic.client_tools import client_tool
from appliance.server.anthropic.schema import ContentBlock
from appliance.server.requests.tools import Offer, Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from appliance.dialects.turns import Turn
    from appliance.server.anthropic.schema import AnthropicTurn, CountRequest


_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
MAX_NAME = 128  # characters of a tool's name, at Anthropic


def turns_of(body: CountRequest) -> list[Turn]:
    """Return the turns; the system prompt and each tool result become separate turns.

    Raises:
        RequestError: a message has unsupported content.
    """
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": text_of(body.system, "system")})
    names: dict[str, str] = {}  # a tool's name by call id
    for number, message in enumerate(body.messages):
        where = f"messages.{number}"
        if message.role == "assistant":
            turns += _assistant(message, where, names)
        else:
            turns += _others(message, where, names)
    if body.messages[-1].role == "assistant":
        _check_prefill(body, turns[-1])
    return turns


def _check_prefill(body: CountRequest, last: Turn) -> None:
    """Refuse a last turn of the assistant that Anthropic's API would not continue."""
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    config = body.output_config
    if "tool_calls" in last:
        why = "the last message has a tool_use without its tool_result after it"
    elif last["content"] != last["content"].rstrip():
        why = "the text of a last message of the assistant must not end with white space"
    elif thinks and "reasoning_content" not in last:
        why = (
            "with thinking, a last message of the assistant must begin with a thinking block; "
            "leave thinking out, or end with a message of the user"
        )
    elif body.output_format is not None or (config is not None and config.format is not None):
        why = "a last message of the assistant is not continued in a format; leave one out"
    else:
        return
    raise RequestError(why, param="messages")


def tools_of(body: CountRequest) -> Tools:
    """Return the tools of a request.

    Raises:
        RequestError: a tool runs on Anthropic's servers, or the choice matches none.
    """
    offers = []
    for number, tool in enumerate(body.tools or ()):
        description, schema = tool.description, tool.input_schema
        known = None if tool.type in (None, "custom") else client_tool(tool.type)
        if known is not None:
            description, schema = known
        elif tool.type not in (None, "custom"):
            raise RequestError(
                f"tools.{number} is of type {tool.type[:60]!r}, which only Anthropic runs; describe"
                " a tool of your own with input_schema, or leave it out",
                param="tools",
                code="unsupported_tool",
            )
        place = f"tools.{number}.input_schema"
        offers.append(
            Offer(
                tool.name,
                schema,
                place,
                description,
                bool(tool.strict),
                max_name=MAX_NAME,
            )
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


def _assistant(message: AnthropicTurn, where: str, names: dict[str, str]) -> list[Turn]:
    """Return a turn; a result of Anthropic's own tools ends one, and is a turn itself."""
    turns: list[Turn] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def flush() -> None:
        turn: Turn = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        if calls:
            turn["tool_calls"] = [*calls]
        turns.append(turn)
        for found in (texts, thoughts, calls):
            found.clear()

    for place, block in enumerate(blocks_of(message.content)):
        match block:
            case ContentBlock(type="text", text=str(text)):
                texts.append(text)
            case ContentBlock(type="thinking", thinking=str(thinking)):
                thoughts.append(thinking)
            case ContentBlock(type="redacted_thinking"):
                pass  # only its author can read it
            case ContentBlock(type=kind, id=str(call_id), name=str(name)) if kind in _CALLS:
                check_nesting(block.input, "messages")
                names[call_id] = name
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ContentBlock(type=str(kind), tool_use_id=str(call_id)) if kind.endswith(
                "_tool_result"
            ):
                if texts or thoughts or calls:
                    flush()
                turns.append(_result(call_id, server_result_text(block), names))
            case _:
                raise refused(block, f"{where}.content.{place}")
    if texts or thoughts or calls or not turns:
        flush()
    return turns


def _others(message: AnthropicTurn, where: str, names: dict[str, str]) -> list[Turn]:
    """Split a user's turn: each tool result becomes a separate turn, in order."""
    turns: list[Turn] = []
    texts: list[str] = []

    def flush() -> None:
        if texts:
            turns.append({"role": message.role, "content": "\n".join(texts)})
            texts.clear()

    for place, block in enumerate(blocks_of(message.content)):
        here = f"{where}.content.{place}"
        if block.type == "tool_result" and block.tool_use_id is not None:
            flush()
            content = result_text(block, here)
            # Templates have no other place for an error.
            content = f"Error: {content}" if block.is_error else content
            turns.append(_result(block.tool_use_id, content, names))
        elif (text := block_text(block, here)) is not None:
            texts.append(text)
        else:
            raise refused(block, here)
    flush()
    return turns or [{"role": message.role, "content": ""}]


def _result(call_id: str, content: str, names: dict[str, str]) -> Turn:
    turn: Turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    if call_id in names:
        turn["name"] = names[call_id]
    return turn
