"""Checks messages, tools and options of Ollama's API and converts them."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

from appliance.errors import RequestError
from appliance.server.schema import SamplingFields
from appliance.server.tools import Offer, Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.dialects.turns import Turn
    from appliance.server.ollama.schema import OllamaTool, OllamaTurn, Options


def turns_of(messages: Sequence[OllamaTurn]) -> list[Turn]:
    """Return the turns; calls and results without an id get one, in order.

    Raises:
        RequestError: a message has unsupported content.
    """
    open_calls: list[tuple[str, str]] = []  # id and name of calls without a result
    turns: list[Turn] = []
    count = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.images:
            raise RequestError(
                f"{where} has images; this server takes text only",
                param="messages",
                code="unsupported_content",
            )
        turn: Turn = {"role": message.role, "content": message.content or ""}
        if message.thinking and message.role == "assistant":
            turn["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            check_nesting(call.function.arguments, "messages")
            arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
            call_id, name = call.id or f"call_{count}", call.function.name
            count += 1
            open_calls.append((call_id, name))
            turn.setdefault("tool_calls", []).append(
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
        if message.role == "tool":
            call_id, name = _answered(message, open_calls) or ("call", message.tool_name or "")
            turn["tool_call_id"] = message.tool_call_id or call_id
            if name:
                turn["name"] = name
        turns.append(turn)
    return turns


def _answered(message: OllamaTurn, open_calls: list[tuple[str, str]]) -> tuple[str, str] | None:
    """Find the call that a result answers: by id, else the first of its name, else the first."""
    for call in open_calls:
        wanted = message.tool_call_id or message.tool_name
        if wanted in (None, call[0], call[1]):
            open_calls.remove(call)
            return call
    return None


def tools_of(tools: Sequence[OllamaTool]) -> Tools:
    """Return the tools of a chat.

    Raises:
        RequestError: a definition is invalid.
    """
    offers = []
    for number, tool in enumerate(tools):
        if tool.type not in (None, "function"):
            raise RequestError(
                f"tools[{number}] is of type {tool.type[:40]!r}; only functions are supported",
                param="tools",
                code="unsupported_tool",
            )
        place = f"tools[{number}].function.parameters"
        function = tool.function
        offers.append(Offer(function.name, function.parameters, place, function.description))
    return Tools.of(offers)


def sampling_of(options: Options, *, stream: bool) -> SamplingFields:
    """Translate the sampling options.

    Raises:
        RequestError: an unsupported option would change the answer.
    """
    if options.mirostat:
        raise _refused("mirostat", "leave it out, or 0")
    for name in ("typical_p", "tfs_z"):
        if getattr(options, name) not in (None, 1.0):
            raise _refused(name, "leave it out, or 1")
    penalty = options.repeat_penalty
    if options.repeat_last_n == 0:
        penalty = None
    elif penalty not in (None, 1.0) and options.repeat_last_n not in (None, -1):
        raise _refused(
            "repeat_last_n", "repeat_penalty counts the whole prompt and answer: -1, or 0 for none"
        )
    return SamplingFields(
        stream=stream,
        temperature=options.temperature,
        top_k=None if options.top_k is None else max(-1, int(options.top_k)),
        top_p=options.top_p or None,  # 0 keeps all, as in Ollama
        min_p=options.min_p,
        seed=None if options.seed is None else int(options.seed),
        stop=options.stop,
        repetition_penalty=penalty,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _refused(name: str, what: str) -> RequestError:
    return RequestError(
        f"options.{name} is not supported as it stands; {what}",
        param=f"options.{name}",
        code="unsupported_parameter",
    )
