"""Answers of /v1/messages, as structs in Anthropic's order of fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    """Text for the user."""

    text: str = ""


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    """Text of a thought."""

    thinking: str = ""
    signature: str = ""  # a digest; the server ignores it when the block comes back


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    """A call of a tool."""

    id: str
    name: str
    input: dict[str, Any]


AnswerBlock = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct):
    """Output tokens by purpose."""

    thinking_tokens: int


class AnthropicUsage(msgspec.Struct, kw_only=True):
    """Token counts; cached prompt tokens count separately."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: OutputTokensDetails


class AnthropicMessage(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/messages."""

    id: str
    type: Literal["message"] = "message"
    role: Literal["assistant"] = "assistant"
    model: str
    content: list[AnswerBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class InputTokens(msgspec.Struct):
    """Answer of POST /v1/messages/count_tokens."""

    input_tokens: int


class MessageStart(msgspec.Struct, tag_field="type", tag="message_start"):
    """The first event: a message without content."""

    message: AnthropicMessage


class BlockStart(msgspec.Struct, tag_field="type", tag="content_block_start"):
    """An empty block begins."""

    index: int
    content_block: AnswerBlock


class TextDelta(msgspec.Struct, tag_field="type", tag="text_delta"):
    """More text."""

    text: str


class ThinkingDelta(msgspec.Struct, tag_field="type", tag="thinking_delta"):
    """More of a thought."""

    thinking: str


class SignatureDelta(msgspec.Struct, tag_field="type", tag="signature_delta"):
    """The signature of a thought that has ended."""

    signature: str


class InputDelta(msgspec.Struct, tag_field="type", tag="input_json_delta"):
    """More of a call's input; all pieces together are JSON."""

    partial_json: str


class BlockDelta(msgspec.Struct, tag_field="type", tag="content_block_delta"):
    """More of a block."""

    index: int
    delta: TextDelta | ThinkingDelta | SignatureDelta | InputDelta


class BlockStop(msgspec.Struct, tag_field="type", tag="content_block_stop"):
    """A block has ended."""

    index: int


class StopDelta(msgspec.Struct):
    """The end of a message, with its reason."""

    stop_reason: str
    stop_sequence: str | None


class MessageDelta(msgspec.Struct, tag_field="type", tag="message_delta"):
    """The last event but one."""

    delta: StopDelta
    usage: AnthropicUsage


class MessageStop(msgspec.Struct, tag_field="type", tag="message_stop"):
    """The last event."""
