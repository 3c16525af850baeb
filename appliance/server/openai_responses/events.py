"""Events of a streamed response; the sequence number is each one's last field."""

from __future__ import annotations

import msgspec

from appliance.server.openai.answers import TokenLogprob
from appliance.server.openai_responses.answers import (
    OutputItem,
    OutputText,
    ReasoningText,
    ResponseObject,
)


class ResponseEvent(msgspec.Struct, kw_only=True):
    """The response so far: created, in_progress, completed, incomplete or failed."""

    type: str
    response: ResponseObject
    sequence_number: int


class ItemEvent(msgspec.Struct, kw_only=True):
    """An item begins or is done."""

    type: str
    output_index: int
    item: OutputItem
    sequence_number: int


class PartEvent(msgspec.Struct, kw_only=True):
    """A part of an item begins or is done."""

    type: str
    item_id: str
    output_index: int
    content_index: int = 0
    part: OutputText | ReasoningText
    sequence_number: int


class TextDelta(msgspec.Struct, kw_only=True):
    """More text."""

    type: str = "response.output_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    logprobs: list[TokenLogprob] = []
    sequence_number: int = 0


class TextDone(msgspec.Struct, kw_only=True):
    """All of a text."""

    type: str = "response.output_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    logprobs: list[TokenLogprob] = []
    sequence_number: int = 0


class ReasoningDelta(msgspec.Struct, kw_only=True):
    """More of a thought."""

    type: str = "response.reasoning_text.delta"
    item_id: str
    output_index: int
    content_index: int = 0
    delta: str
    sequence_number: int = 0


class ReasoningDone(msgspec.Struct, kw_only=True):
    """All of a thought."""

    type: str = "response.reasoning_text.done"
    item_id: str
    output_index: int
    content_index: int = 0
    text: str
    sequence_number: int = 0


class CustomInputDelta(msgspec.Struct, kw_only=True):
    """More of a custom tool's input."""

    type: str = "response.custom_tool_call_input.delta"
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class CustomInputDone(msgspec.Struct, kw_only=True):
    """All input of a custom tool."""

    type: str = "response.custom_tool_call_input.done"
    item_id: str
    output_index: int
    input: str
    sequence_number: int = 0


class ShellCommand(msgspec.Struct, kw_only=True):
    """A shell's command begins, or is complete."""

    type: str
    output_index: int
    command_index: int
    command: str
    sequence_number: int = 0


class ShellCommandDelta(msgspec.Struct, kw_only=True):
    """More of a shell's command."""

    type: str = "response.shell_call_command.delta"
    output_index: int
    command_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDelta(msgspec.Struct, kw_only=True):
    """More of a call's arguments."""

    type: str = "response.function_call_arguments.delta"
    item_id: str
    output_index: int
    delta: str
    sequence_number: int = 0


class ArgumentsDone(msgspec.Struct, kw_only=True):
    """All arguments of a call."""

    type: str = "response.function_call_arguments.done"
    item_id: str
    output_index: int
    name: str
    arguments: str
    sequence_number: int = 0
