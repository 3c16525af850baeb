"""Checks messages and tools of an OpenAI chat and converts them for chat templates."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.pictures import content_of, detail_of, of_url
from appliance.server.requests.schema import (
    ROLES,
    CalledFunction,
    ChosenTools,
    FunctionName,
    ImageUrl,
)
from appliance.server.requests.tools import (
    Fields,
    Offer,
    Tools,
    allowed,
    arguments_with,
    custom_offer,
)
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from appliance.server.requests.schema import (
        AllowedTool,
        ChatRequest,
        ContentPart,
        Function,
        Message,
        Tool,
        ToolCall,
    )
    from appliance.server.requests.tools import Choice

_ROLES = {"developer": "system", "function": "tool"}  # OpenAI's newest and oldest names
_OLD = Fields(tools="functions", choice="function_call")


def turns_of(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Return the turns, with calls' arguments as JSON text.

    Raises:
        RequestError: a message is unsupported.
    """
    names: dict[str, str] = {}  # a tool's name by call id
    latest: dict[str | None, str] = {}  # a tool's last call id by name
    turns = []
    for number, message in enumerate(messages):
        turn = _turn(message, f"messages[{number}]")
        if message.role == "function":  # its result has no id, and belongs to the latest call
            turn["tool_call_id"] = latest.get(message.name, f"call_{number}")
        for place, call in enumerate(turn.get("tool_calls", ())):
            call["id"] = call["id"] or f"call_{number}_{place}"
            names[call["id"]] = call["function"]["name"]
            latest[call["function"]["name"]] = call["id"]
        if message.role == "tool" and turn["tool_call_id"] in names:
            turn.setdefault("name", names[turn["tool_call_id"]])
        turns.append(turn)
    return turns


def ending_of(begins: bool | None, continues: bool | None) -> tuple[bool, bool | None]:
    """Return how a chat's prompt ends: `Conversation.begins_answer` and `continues`.

    Args:
        begins: the body's `add_generation_prompt`.
        continues: the body's `continue_final_message`.

    Raises:
        RequestError: the prompt would both continue the last turn and begin another.
    """
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
    one_call = body.parallel_tool_calls is False
    choice = body.tool_choice
    if body.functions or isinstance(body.function_call, FunctionName):
        if body.tools:
            raise RequestError(
                "functions and function_call are the older form of tools and tool_choice; leave "
                "one of the two out",
                param="functions",
            )
        return _old_tools(body.functions or (), body.function_call)
    offers = [_offer(tool, f"tools[{number}]") for number, tool in enumerate(body.tools or ())]
    if not isinstance(choice, ChosenTools):
        return Tools.of(offers, choice=choice, one_call=one_call)
    if choice.type == "allowed_tools" and (subset := choice.allowed_tools) is not None:
        kept = allowed(offers, [_named(tool, "tool_choice") for tool in subset.tools])
        return Tools.of(kept, choice=subset.mode, one_call=one_call)
    return Tools.of(offers, named=_named(choice, "tool_choice"))


def _old_tools(functions: Sequence[Function], choice: FunctionName | Choice | None) -> Tools:
    """Return the tools of a chat in the form that has one call in an answer."""
    offers = [_function(one, f"functions[{place}]") for place, one in enumerate(functions)]
    if isinstance(choice, FunctionName):
        return Tools.of(offers, named=choice.name, fields=_OLD)
    return Tools.of(offers, choice=choice, one_call=True, fields=_OLD)


def _named(tool: AllowedTool | ChosenTools, where: str) -> str:
    """Return the name of a chosen tool."""
    if tool.type not in ("function", "custom", "allowed_tools"):
        raise RequestError(
            f"{where} has the type {tool.type[:40]!r}; supported are function, custom and "
            "allowed_tools",
            param=where,
        )
    found = {"function": tool.function, "custom": tool.custom}.get(tool.type)
    if found is None:
        raise RequestError(
            f"{where} is of type {tool.type} and needs the field {tool.type}", param=where
        )
    return found.name


def _offer(tool: Tool, where: str) -> Offer:
    if tool.type == "function" and tool.function is not None:
        return _function(tool.function, f"{where}.function")
    if tool.type == "custom" and (custom := tool.custom) is not None:
        form, place = custom.format, f"{where}.custom.format"
        return custom_offer(
            custom.name,
            custom.description,
            None if form is None else form.type,
            None if form is None else form.grammar,
            place,
            f"{place}.grammar",
        )
    if tool.type in ("function", "custom"):
        message = f"{where} is of type {tool.type} and needs the field {tool.type}"
    else:
        message = (
            f"{where} is of type {tool.type[:40]!r}; supported here are function and custom tools"
        )
    raise RequestError(message, param="tools")


def _function(function: Function, where: str) -> Offer:
    return Offer(
        name=function.name,
        parameters=function.parameters,
        place=f"{where}.parameters",
        description=function.description,
        strict=bool(function.strict),
    )


def _turn(message: Message, where: str) -> dict[str, Any]:
    if message.role not in ROLES:
        raise RequestError(
            f"{where}.role is {message.role[:40]!r}; known roles: {', '.join(sorted(ROLES))}",
            param="messages",
        )
    if message.role == "tool" and not message.tool_call_id:
        raise RequestError(f"{where} is of role tool and needs a tool_call_id", param="messages")
    if message.role == "function" and not message.name:
        raise RequestError(f"{where} is of role function and needs a name", param="messages")
    turn: dict[str, Any] = {
        "role": _ROLES.get(message.role, message.role),
        "content": _content(message.content, where),
    }
    if message.name is not None:
        turn["name"] = message.name
    if message.role == "tool":
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls or message.function_call:
        field = "tool_calls" if message.tool_calls else "function_call"
        if message.role != "assistant":
            raise RequestError(
                f"{where} is of role {message.role} and has {field}; only an assistant calls",
                param="messages",
            )
        turn["tool_calls"] = [
            _call(call, f"{where}.tool_calls[{place}]")
            for place, call in enumerate(message.tool_calls or ())
        ]
        if message.function_call and not message.tool_calls:
            turn["tool_calls"].append(_called(message.function_call, None))
    thought = message.reasoning_content or message.reasoning
    if thought and message.role == "assistant":
        turn["reasoning_content"] = thought
    return turn


def _call(call: ToolCall, where: str) -> dict[str, Any]:
    kind = call.type or "function"
    if kind == "custom" and call.custom is not None:
        arguments = arguments_with(call.custom.input)
        return _called(CalledFunction(name=call.custom.name, arguments=arguments), call.id)
    if kind == "function" and call.function is not None:
        return _called(call.function, call.id)
    if kind in ("function", "custom"):
        message = f"{where} is of type {kind} and needs the field {kind}"
    else:
        message = f"{where} is of type {kind[:40]!r}; supported are function and custom"
    raise RequestError(message, param="messages")


def _called(function: CalledFunction, call_id: str | None) -> dict[str, Any]:
    """Return a call in OpenAI's form; an id that is missing is given later."""
    arguments = function.arguments
    if not isinstance(arguments, str):
        check_nesting(arguments, "messages")
        arguments = json.dumps(arguments or {}, ensure_ascii=False)
    named = {"name": function.name, "arguments": arguments or "{}"}
    return {"id": call_id, "type": "function", "function": named}


def _content(content: str | list[ContentPart] | None, where: str) -> str | list[dict[str, Any]]:
    """Return a message's text, or its parts if pictures are among them."""
    if content is None or isinstance(content, str):
        return content or ""
    return content_of(
        [_part(part, f"{where}.content[{place}]") for place, part in enumerate(content)]
    )


def _part(part: ContentPart, where: str) -> dict[str, Any]:
    if part.type == "image_url":
        given = part.image_url
        image = given if isinstance(given, ImageUrl) else ImageUrl(url=given)
        return of_url(image.url, f"{where}.image_url", detail_of(image.detail, where)).part
    text = part.refusal if part.type == "refusal" else part.text
    if text is None or part.type not in ("text", "refusal"):
        raise RequestError(
            f"{where} is of type {part.type[:40]!r}; supported are text and image_url",
            param="messages",
            code="unsupported_content",
        )
    return {"type": "text", "text": text}
