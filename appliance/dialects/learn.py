"""Learns a model's dialect from the way its template renders a known call."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from appliance.dialects.dialect import Dialect
from appliance.dialects.formats.deepseek import DeepSeek
from appliance.dialects.formats.gemma import Gemma
from appliance.dialects.formats.glm import Glm
from appliance.dialects.formats.harmony import Harmony
from appliance.dialects.formats.hermes import Hermes
from appliance.dialects.formats.llama import Llama
from appliance.dialects.formats.mistral import Mistral
from appliance.dialects.formats.pythonic import Pythonic
from appliance.dialects.formats.qwen_coder import QwenCoder
from appliance.dialects.thoughts import find_marks
from appliance.dialects.turns import in_parts
from appliance.errors import ChatTemplateError

if TYPE_CHECKING:
    from appliance.dialects.formats.form import CallForm

logger = logging.getLogger(__name__)

Chat = Sequence[Mapping[str, Any]]
Render = Callable[[Chat, Chat | None], str]

# The first match wins, so special forms come first.
FORMS: tuple[CallForm, ...] = (
    Harmony(),
    Gemma("gemma 4", "<|tool_call>", "<tool_call|>", '<|"|>'),
    Gemma("function gemma", "<start_function_call>", "<end_function_call>", "<escape>"),
    DeepSeek(fenced=False),
    DeepSeek(fenced=True),
    Mistral(named=True),
    Mistral(named=False),
    QwenCoder(),
    Glm(),
    Hermes(),
    Pythonic("pythonic", "<|tool_call_start|>", "<|tool_call_end|>", bare=False),
    Pythonic("pythonic (bare)", "<|python_start|>", "<|python_end|>", bare=True),
    Llama(),
)
GENERIC: CallForm = Hermes()  # for templates without calls

_NAME, _ARGUMENTS = "probe_tool", {"probe_key": "probe value"}
_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": _NAME,
        "description": "Probe.",
        "parameters": {
            "type": "object",
            "properties": {"probe_key": {"type": "string", "description": "A key."}},
            "required": ["probe_key"],
        },
    },
}
_SYSTEM: dict[str, Any] = {"role": "system", "content": "probe system"}
_USER: dict[str, Any] = {"role": "user", "content": "probe question"}
_RESULT: dict[str, Any] = {
    "role": "tool",
    "tool_call_id": "probecall",
    "name": _NAME,
    "content": "probe result",
}


def learn_dialect(render: Render, template: str) -> Dialect:
    """Learn a model's dialect from its chat template.

    Args:
        render: renders messages and tools by the template.
    """
    wants_parts = _wants_parts(render)
    if wants_parts:
        of_parts = render

        def render(messages: Chat, tools: Chat | None) -> str:
            return of_parts([in_parts(message) for message in messages], tools)

    found = _probe_calls(render)
    lists_tools = found is not None and _NAME in _try(render, [_USER], [_TOOL])
    form, text_arguments = found or (GENERIC, False)
    dialect = Dialect(
        form=form,
        lists_tools=lists_tools,
        writes_calls=found is not None,
        text_arguments=text_arguments,
        takes_system=str(_SYSTEM["content"]) in _try(render, [_SYSTEM, _USER], None),
        thought_marks=None if form.framed else find_marks(template),
        wants_parts=wants_parts,
    )
    whose = "its template says" if dialect.writes_calls else "a system message tells it"
    logger.info("tool calls are in the form %s, as %s", form.name, whose)
    return dialect


def _wants_parts(render: Render) -> bool:
    """Return True if a template loses a content that is a text, and shows one that is a part."""
    asked = str(_USER["content"])
    if asked in _try(render, [_USER], None):
        return False
    return asked in _try(render, [in_parts(_USER)], None)


def _probe_calls(render: Render) -> tuple[CallForm, bool] | None:
    """Find the form of a template's calls, and return True if it takes arguments as text."""
    for text_arguments in (False, True):
        arguments = json.dumps(_ARGUMENTS) if text_arguments else _ARGUMENTS
        call = {
            "id": "probecall",
            "type": "function",
            "function": {"name": _NAME, "arguments": arguments},
        }
        turn: dict[str, Any] = {"role": "assistant", "content": "", "tool_calls": [call]}
        for chat in ([_USER, turn, _RESULT], [_USER, turn, _RESULT, _USER], [_USER, turn]):
            text = _try(render, chat, [_TOOL])
            written = text.partition(str(_USER["content"]))[2]
            written = written.partition(str(_RESULT["content"]))[0]
            # Python syntax or doubly encoded JSON: the template wants the other type.
            if "{'probe_key'" in written or '{\\"probe_key' in written:
                break
            for form in FORMS:
                if form.recognises(written, _NAME):
                    return form, text_arguments
    return None


def _try(render: Render, messages: Chat, tools: Chat | None) -> str:
    try:
        return render(messages, tools)
    except ChatTemplateError:
        return ""
