"""Checks messages, tools and options of Ollama's API and converts them."""

from __future__ import annotations

import json
from collections import OrderedDict, defaultdict, deque
from typing import TYPE_CHECKING, Any

from appliance.errors import RequestError
from appliance.pictures import content_of, of_base64
from appliance.server.requests.schema import LEAST_MULTIPLIER, NamedTool, SamplingFields
from appliance.server.requests.tools import Offer, Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.dialects.turns import Turn
    from appliance.server.ollama.schema import OllamaChatRequest, OllamaTurn, Options


LAST_TOKENS = 64  # that penalties count by default, at Ollama
MAX_NAME = 128  # characters of a tool's name; Ollama has no limit


def turns_of(messages: Sequence[OllamaTurn]) -> list[Turn]:
    """Return the turns; calls and results without an id get one, in order.

    Raises:
        RequestError: a message has unsupported content.
    """
    open_calls = _OpenCalls()
    turns: list[Turn] = []
    count = 0
    for number, message in enumerate(messages):
        where = f"messages[{number}].images"
        content = with_images(message.content or "", message.images, where)
        turn: Turn = {"role": message.role, "content": content}
        if message.thinking and message.role == "assistant":
            turn["reasoning_content"] = message.thinking
        for call in message.tool_calls or ():
            check_nesting(call.function.arguments, "messages")
            arguments = json.dumps(call.function.arguments or {}, ensure_ascii=False)
            call_id, name = call.id or f"call_{count}", call.function.name
            count += 1
            open_calls.add(call_id, name)
            turn.setdefault("tool_calls", []).append(
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": name, "arguments": arguments},
                }
            )
        if message.role == "tool":
            answered = open_calls.answer(message.tool_call_id or message.tool_name)
            call_id, name = answered or ("call", message.tool_name or "")
            turn["tool_call_id"] = message.tool_call_id or call_id
            if name:
                turn["name"] = name
        turns.append(turn)
    return turns


def with_images(text: str, images: Sequence[str] | None, where: str) -> str | list[dict[str, Any]]:
    """Return a content in which pictures, in base64, come before the text.

    Raises:
        ImageError: one is no base64.
    """
    parts = [of_base64(one, f"{where}[{place}]").part for place, one in enumerate(images or ())]
    return content_of([*parts, {"type": "text", "text": text}] if text or not parts else parts)


class _OpenCalls:
    """Calls without a result, found by id or name in the same time among any number."""

    def __init__(self) -> None:
        self._open: OrderedDict[int, tuple[str, str]] = OrderedDict()  # id and name, by number
        self._numbers: defaultdict[str, deque[int]] = defaultdict(deque)  # by id or name
        self._count = 0

    def add(self, call_id: str, name: str) -> None:
        self._open[self._count] = (call_id, name)
        for key in {call_id, name}:
            self._numbers[key].append(self._count)
        self._count += 1

    def answer(self, wanted: str | None) -> tuple[str, str] | None:
        """Close and return the first call of an id or name, or the first of all."""
        if wanted is None:
            return self._open.popitem(last=False)[1] if self._open else None
        numbers = self._numbers.get(wanted, deque())
        while numbers:
            call = self._open.pop(numbers.popleft(), None)
            if call is not None:  # its other key has not closed it
                return call
        return None


def tools_of(body: OllamaChatRequest) -> Tools:
    """Return the tools of a chat.

    Raises:
        RequestError: a definition is invalid, or the choice names none of them.
    """
    offers = []
    for number, tool in enumerate(body.tools or ()):
        if tool.type not in (None, "function"):
            raise RequestError(
                f"tools[{number}] is of type {tool.type[:40]!r}; only functions are supported",
                param="tools",
                code="unsupported_tool",
            )
        place = f"tools[{number}].function.parameters"
        function = tool.function
        offers.append(
            Offer(
                function.name,
                function.parameters,
                place,
                function.description,
                max_name=MAX_NAME,
            )
        )
    choice = body.tool_choice
    if isinstance(choice, NamedTool):
        return Tools.of(offers, named=choice.function.name)
    return Tools.of(offers, choice=choice)


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
    if 0 < (options.repeat_penalty or 0) < LEAST_MULTIPLIER:
        raise _refused("repeat_penalty", f"0 is off, or it is {LEAST_MULTIPLIER} to 100")
    penalties = (options.repeat_penalty, options.presence_penalty, options.frequency_penalty)
    window = None if options.repeat_last_n is None else int(options.repeat_last_n)
    if window is None and any(penalty is not None for penalty in penalties):
        window = LAST_TOKENS
    return SamplingFields(
        stream=stream,
        temperature=options.temperature,
        top_k=None if options.top_k is None else max(-1, int(options.top_k)),
        top_p=options.top_p or None,  # 0 keeps all, as in Ollama
        min_p=options.min_p,
        seed=None if options.seed is None else int(options.seed),
        stop=options.stop,
        repetition_penalty=options.repeat_penalty or None,
        repeat_last_n=window,
        presence_penalty=options.presence_penalty,
        frequency_penalty=options.frequency_penalty,
    )


def _refused(name: str, what: str) -> RequestError:
    return RequestError(
        f"options.{name} is not supported as it stands; {what}",
        param=f"options.{name}",
        code="unsupported_parameter",
    )
