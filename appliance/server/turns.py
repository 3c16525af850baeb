"""Checks messages and tools of an OpenAI chat and converts them for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.server.schema import ROLES, ChosenTools
from appliance.server.tools import Offer, Tools, allowed
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from appliance.server.retrieval.schema import TokenizeRequest
    from appliance.server.schema import ChatRequest, ContentPart, Message, ToolCall


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the turns, with calls' arguments as JSON text.

    Raises:
        RequestError: a message is unsupported.
    """
    names: dict[str, str] = {}  # a tool's name by call id
    turns = []
    for number, message in enumerate(messages):
        turn = _turn(message, f"messages[{number}]")
        for call in turn.get("tool_calls", ()):
            names[call["id"]] = call["function"]["name"]
        if message.role == "tool" and turn["tool_call_id"] in names:
            turn.setdefault("name", names[turn["tool_call_id"]])
        turns.append(turn)
    return turns


def ending_of(body: ChatRequest | TokenizeRequest) -> tuple[bool, bool | None]:
    """Return how a chat's prompt ends: `Conversation.begins_answer` and `continues`.

    Raises:
        RequestError: the prompt would both continue the last turn and begin another.
    """
    begins, continues = body.add_generation_prompt, body.continue_final_message
    if begins and continues:
        raise RequestError(
            "continue_final_message continues the last turn, and add_generation_prompt begins "
            "another; leave one out",
            param="continue_final_message",
        )
    if continues is None and begins is not None:
        continues = False
    return begins is not False, continues


def tools_of(body: ChatRequest) -> Tools:
    """Return the tools of a chat.

    Raises:
        RequestError: a definition is invalid, or the choice names none of them.
    """
    offers = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise RequestError(
                f"tools[{number}] is of type {tool.type[:40]!r}; only function tools are supported "
                "here",
                param="tools",
            )
        function = tool.function
        offers.append(
            Offer(
                name=function.name,
                parameters=function.parameters,
                place=f"tools[{number}].function.parameters",
                description=function.description,
                strict=bool(function.strict),
            )
        )
    one_call = body.parallel_tool_calls is False
    choice = body.tool_choice
    if not isinstance(choice, ChosenTools):
        return Tools.of(offers, choice=choice, one_call=one_call)
    if choice.type == "function" and choice.function is not None:
        return Tools.of(offers, named=choice.function.name)
    if choice.type == "allowed_tools" and (subset := choice.allowed_tools) is not None:
        kept = allowed(offers, [tool.function.name for tool in subset.tools])
        return Tools.of(kept, choice=subset.mode, one_call=one_call)
    if choice.type in ("function", "allowed_tools"):
        message = f"tool_choice is of type {choice.type} and needs the field {choice.type}"
    else:
        message = (
            f"tool_choice has the type {choice.type[:40]!r}; supported are function and "
            "allowed_tools"
        )
    raise RequestError(message, param="tool_choice")


def _turn(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:40]!r}; known roles: {', '.join(sorted(ROLES))}",
            param="messages",
        )
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(f"{where} is of role tool and needs a tool_call_id", param="messages")
    turn: dict[str, Any] = {
        # Templates know system; developer is OpenAI's newer name for it.
        "role": "system" if message.role == "developer" else message.role,
        "content": _text(message.content, where),
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if message.role != "assistant":
            raise RequestError(
                f"{where} is of role {message.role} and has tool_calls; only an assistant calls",
                param="messages",
            )
        turn["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]", place)
            for place, call in enumerate(message.tool_calls)
        ]
    thought = message.reasoning_content or message.reasoning
    if thought and message.role == "assistant":
        turn["reasoning_content"] = thought
    return turn


def _call(call: ToolCall, where: str, place: int) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise RequestError(
            f"{where} is of type {call.type[:40]!r}; only function is supported", param="messages"
        )
    arguments = call.function.arguments
    if not isinstance(arguments, str):
        check_nesting(arguments, "messages")
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    function = {"name": call.function.name, "arguments": arguments or "{}"}
    return {"id": call.id or f"call_{place}", "type": "function", "function": function}


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    if content is None or isinstance(content, str):
        return content or ""
    texts = []
    for part in content:
        text = part.refusal if part.type == "refusal" else part.text
        if text is None or part.type not in ("text", "refusal"):
            raise RequestError(
                f"{where} has a content part of type {part.type[:40]!r}; only text is supported",
                param="messages",
                code="unsupported_content",
            )
        texts.append(text)
    return "\n".join(texts)
