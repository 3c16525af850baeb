"""Checks items and tools of the Responses API and converts them for chat templates."""

from __future__ import annotations

import base64
import binascii
import logging
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import RequestError
from appliance.log import RepeatedWarningFilter
from appliance.pictures import content_of, detail_of, of_url
from appliance.server.openai_responses.built_in import BUILT_IN, CUSTOM, call_of, offer_of
from appliance.server.openai_responses.schema import SKIPPED_TOOLS, ChoiceTool, InputPart, Item
from appliance.server.requests.tools import MAX_NAME, Offer, Tools, allowed

if TYPE_CHECKING:
    from collections.abc import Sequence

    from appliance.dialects.turns import Turn
    from appliance.server.openai_responses.schema import OutputPart, ResponsesRequest, ResponsesTool

_MARK = "appliance-1:"

logger = logging.getLogger(__name__)
logger.addFilter(RepeatedWarningFilter(3600.0))

_OUTPUTS = {
    "function_call_output", "custom_tool_call_output",
    "local_shell_call_output", "shell_call_output", "apply_patch_call_output",
}  # fmt: skip


def items_of(given: str | list[Item] | None) -> list[Item]:
    """Return an input's items, each with its type."""
    if given is None:
        return []
    if isinstance(given, str):
        return [
            Item(type="message", role="user", content=[InputPart(type="input_text", text=given)])
        ]
    return [
        msgspec.structs.replace(item, type="message") if item.type is None else item
        for item in given
    ]


def turns_of(instructions: str | None, before: Sequence[Item], items: Sequence[Item]) -> list[Turn]:
    """Return the turns of a conversation.

    Args:
        before: earlier items.

    Raises:
        RequestError: an item has unsupported content.
    """
    turns = _Turns()
    if instructions:
        turns.add({"role": "system", "content": instructions})
    for item in before:
        turns.take(item, "previous_response_id")
    for number, item in enumerate(items):
        turns.take(item, f"input[{number}]")
    turns.close()
    if not turns.found:
        raise RequestError("input has no items; send a text or a list of items", param="input")
    return turns.found


class _Turns:
    """Makes turns from items; adjacent thoughts, text and calls form one turn."""

    def __init__(self) -> None:
        self.found: list[Turn] = []
        self._thoughts: list[str] = []  # of the last turn
        self._names: dict[str, str] = {}  # a tool's name by call id

    def add(self, turn: Turn) -> None:
        self.close()
        self.found.append(turn)

    def close(self) -> None:
        """Join the thoughts of the last turn."""
        if self._thoughts:
            self.found[-1]["reasoning_content"] = "\n".join(self._thoughts)
            self._thoughts.clear()

    def take(self, item: Item, where: str) -> None:
        match item:
            case Item(type="message", role="assistant"):
                self._own("content", "tool_calls")["content"] = _text(item.content, where)
            case Item(type="message", role=str(role)):
                name = "system" if role == "developer" else role
                content = _content(item.content, f"{where}.content")
                self.add({"role": name, "content": content})
            case Item(type="reasoning"):
                thought = _text(item.content or item.summary, where)
                if not thought and item.encrypted_content:
                    thought = thought_of(item.encrypted_content, where)
                if thought:
                    turn = self._own("content", "tool_calls")
                    self._thoughts.append(thought)
                    turn["reasoning_content"] = thought
            case Item(type="function_call", call_id=str(call_id), name=str(name)):
                self._call(call_id, flat_name(item.namespace, name), item.arguments or "{}")
            case Item() if (call := call_of(item)) is not None and (item.call_id or item.id):
                self._call(item.call_id or item.id or "", *call)
            case Item(type="web_search_call" | "image_generation_call" | "tool_search_call"):
                pass  # of a tool that OpenAI ran; its results are in the text after it
            case Item(type=str(kind)) if kind in _OUTPUTS and (item.call_id or item.id):
                call_id = item.call_id or item.id or ""
                turn = {
                    "role": "tool",
                    "tool_call_id": call_id,
                    "content": _output(item, where),
                }
                if call_id in self._names:
                    turn["name"] = self._names[call_id]
                self.add(turn)
            case _:
                raise RequestError(
                    f"{where} is of type {str(item.type)[:40]!r}, or lacks a field of it; supported"
                    " are message (role, content), reasoning, item_reference (id), function_call "
                    "and custom_tool_call (call_id, name), local_shell_call, shell_call and "
                    "apply_patch_call (call_id), and the outputs of these (call_id)",
                    param="input",
                    code="unsupported_content",
                )

    def _call(self, call_id: str, name: str, arguments: str) -> None:
        self._names[call_id] = name
        function = {"name": name, "arguments": arguments}
        call = {"id": call_id, "type": "function", "function": function}
        self._own().setdefault("tool_calls", []).append(call)

    def _own(self, *ends: str) -> Turn:
        """Return the assistant's last turn; a new one if it already has one of these fields."""
        latest = self.found[-1] if self.found else {"role": ""}
        if latest["role"] == "assistant" and not any(latest.get(field) for field in ends):
            return latest
        turn: Turn = {"role": "assistant", "content": ""}
        self.add(turn)
        return turn


def _output(item: Item, where: str) -> str | list[dict[str, Any]]:
    output = item.output
    if isinstance(output, dict):  # older agents' form of a failure
        return str(output.get("content", ""))
    if item.type == "shell_call_output" and isinstance(output, list):
        return "\n".join(map(_printed, output))
    return _content(output, f"{where}.output") or item.status or ""


def _printed(part: OutputPart) -> str:
    """Return what a shell's command printed, and how it ended if it failed."""
    outcome = part.outcome or {}
    end = ""
    if outcome.get("type") == "timeout":
        end = "[timed out]"
    elif outcome.get("exit_code"):
        end = f"[exit code {outcome['exit_code']}]"
    texts = (part.text, part.stdout, part.stderr, end)
    return "\n".join(text.removesuffix("\n") for text in texts if text)


def _text(content: str | Sequence[InputPart] | None, where: str) -> str:
    """Return a text of parts; an assistant's have no pictures."""
    if content is None or isinstance(content, str):
        return content or ""
    return "\n".join(_text_of(part, f"{where} has a content part", "text") for part in content)


def _content(content: str | Sequence[InputPart] | None, where: str) -> str | list[dict[str, Any]]:
    """Return a message's text, or its parts if pictures are among them."""
    if content is None or isinstance(content, str):
        return content or ""
    return content_of([_part(part, f"{where}[{place}]") for place, part in enumerate(content)])


def _part(part: InputPart, where: str) -> dict[str, Any]:
    if part.type != "input_image":
        known = "text and input_image (image_url)"
        return {"type": "text", "text": _text_of(part, f"{where} is", known)}
    if part.image_url is None and part.file_id is not None:
        raise RequestError(
            f"{where} names a file, and files are not kept; send the picture itself as a data: URL"
            " in image_url",
            param="input",
            code="unsupported_content",
        )
    return of_url(part.image_url, f"{where}.image_url", detail_of(part.detail, where)).part


def _text_of(part: InputPart, found: str, known: str) -> str:
    text = part.refusal if part.type == "refusal" else part.text
    if text is None or part.type in ("input_image", "input_audio", "input_file"):
        raise RequestError(
            f"{found} of type {part.type[:40]!r}; supported here: {known}",
            param="input",
            code="unsupported_content",
        )
    return text


def tools_of(body: ResponsesRequest) -> Tools:
    """Return the tools of a request.

    Raises:
        RequestError: a tool runs only at OpenAI, or the choice names none.
    """
    offers = list(_offers(body.tools or (), "tools", None))
    one_call = body.parallel_tool_calls is False
    choice = body.tool_choice
    if not isinstance(choice, ChoiceTool):
        return Tools.of(offers, choice=choice, one_call=one_call)
    if choice.type in ("function", CUSTOM, *BUILT_IN):
        named = choice.type if choice.type in BUILT_IN else choice.name or ""
        return Tools.of(offers, named=named, one_call=one_call)
    if choice.type != "allowed_tools":
        raise RequestError(
            f"tool_choice has the type {choice.type[:40]!r}; supported are function, custom, "
            "local_shell, shell, apply_patch and allowed_tools",
            param="tool_choice",
        )
    kept = allowed(offers, [tool.name or tool.type for tool in choice.tools or ()])
    return Tools.of(kept, choice=choice.mode, one_call=one_call)


def _offers(tools: Sequence[ResponsesTool], where: str, namespace: str | None) -> list[Offer]:
    offers: list[Offer] = []
    for number, tool in enumerate(tools):
        place = f"{where}[{number}]"
        if tool.type == "namespace" and namespace is None:
            offers += _offers(tool.tools or (), f"{place}.tools", tool.name)
        elif tool.type in SKIPPED_TOOLS:
            logger.info("a tool of type %s was offered; it is never called", tool.type)
        elif tool.type == CUSTOM or tool.type in BUILT_IN:
            offers.append(offer_of(tool, place))
        elif tool.type == "function":
            name = flat_name(namespace, tool.name or "")
            offers.append(
                Offer(
                    name,
                    tool.parameters,
                    f"{place}.parameters",
                    tool.description,
                    bool(tool.strict),
                    max_name=MAX_NAME + len(name) - len(tool.name or ""),
                )
            )
        else:
            raise RequestError(
                f"{place} is of type {tool.type[:40]!r}, which does not run here; describe a "
                "function or custom tool of your own, or leave it out",
                param="tools",
                code="unsupported_tool",
            )
    return offers


def flat_name(namespace: str | None, name: str) -> str:
    """Return the model's name for a tool."""
    return f"{namespace.rstrip('_')}__{name}" if namespace else name


def full_names(tools: Sequence[ResponsesTool] | None) -> dict[str, tuple[str, str]]:
    """Map each name that the model calls to the tool's namespace and name."""
    return {
        flat_name(outer.name, inner.name): (outer.name, inner.name)
        for outer in tools or ()
        if outer.type == "namespace" and outer.name
        for inner in outer.tools or ()
        if inner.name
    }


def kinds_of(tools: Sequence[ResponsesTool] | None) -> dict[str, str]:
    """Map the model's name of each tool that is no function to the tool's type."""
    return {
        tool.type if tool.type in BUILT_IN else tool.name or "": tool.type
        for tool in tools or ()
        if tool.type == CUSTOM or tool.type in BUILT_IN
    }


def carried(thought: str) -> str:
    """Encode a thought as `encrypted_content`, which stateless clients send back unchanged.

    Hides nothing: the answer has the thought as text too, which some clients drop.
    """
    return _MARK + base64.b64encode(thought.encode()).decode()


def thought_of(content: str, where: str) -> str:
    """Decode a thought from `carried`.

    Args:
        content: the client's text.
        where: its place in the body.

    Raises:
        RequestError: another server encoded it.
    """
    try:
        if content.startswith(_MARK):
            return base64.b64decode(content.removeprefix(_MARK), validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        pass
    raise RequestError(
        f"{where}.encrypted_content was not made by this server; leave the item out",
        param="input",
        code="invalid_encrypted_content",
    )
