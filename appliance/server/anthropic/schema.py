"""Requests of Anthropic's API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine.nouns.sampling_params import MAX_STOP_STRINGS
from appliance.server.requests.schema import MAX_TOKENS, Count, Effort, StopString
from appliance.server.requests.unsupported import Table, foreign

# Accepted without effect: prompts are always cached and never edited.
HARMLESS = {
    "cache_control",
    "context_management",
    "diagnostics",
    "inference_geo",
    "metadata",
    "service_tier",
    "speed",
    "user_profile_id",
    "workspace_id",
}


class ContentBlock(msgspec.Struct, kw_only=True):
    """A part of a message; `type` determines the used fields."""

    type: str
    text: str | None = None
    thinking: str | None = None
    id: str | None = None
    name: str | None = None
    input: dict[str, Any] | None = None
    tool_use_id: str | None = None
    content: Any = None  # a tool's result: text or blocks, or an object of Anthropic's tools
    is_error: bool | None = None
    source: Any = None  # of a document, image or search result
    title: str | None = None
    context: str | None = None
    citations: Any = None
    tool_name: str | None = None


class BlockSource(msgspec.Struct, kw_only=True):
    """The text of a document, or a picture's bytes or address."""

    type: str
    media_type: str | None = None
    data: str | None = None
    url: str | None = None
    content: Any = None


class AnthropicTurn(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["user", "assistant", "system"]
    content: str | list[ContentBlock]


class AnthropicTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    name: str
    type: str | None = None
    description: str | None = None
    input_schema: dict[str, Any] | None = None
    strict: bool | None = None


class AnthropicChoice(msgspec.Struct, kw_only=True):
    """The choice among the tools."""

    type: Literal["auto", "any", "tool", "none"]
    name: str | None = None
    disable_parallel_tool_use: bool | None = None


class Thinking(msgspec.Struct, kw_only=True):
    """Switch and budget of thinking."""

    type: Literal["enabled", "adaptive", "disabled"]
    budget_tokens: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None


class OutputFormat(msgspec.Struct, kw_only=True):
    """A schema that the answer obeys."""

    type: Literal["json_schema"]
    schema: dict[str, Any]


class OutputConfig(msgspec.Struct, kw_only=True):
    """Effort and format of the answer."""

    effort: Effort | None = None
    format: OutputFormat | None = None


class CountRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/messages/count_tokens."""

    messages: Annotated[list[AnthropicTurn], Meta(min_length=1)]
    model: str | None = None
    system: str | list[ContentBlock] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: AnthropicChoice | None = None
    thinking: Thinking | None = None
    output_config: OutputConfig | None = None
    output_format: OutputFormat | None = None  # the beta's name of `output_config.format`
    thread: dict[str, Any] | None = None  # of a conversation that the server would hold


class MessagesRequest(CountRequest, kw_only=True):
    """Body of POST /v1/messages."""

    max_tokens: Count
    stream: bool | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    top_k: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # 0 keeps all


_UNSUPPORTED: Table = {
    "compaction": (None, {}),
    "container": (None,),
    "mcp_servers": (None, []),
}
UNSUPPORTED: Table = _UNSUPPORTED | foreign(
    {*MessagesRequest.__struct_fields__, *_UNSUPPORTED, *HARMLESS},
    {
        "limit": "max_tokens",
        "stop": "stop_sequences",
        "format": "output_config.format",
        "system": "system",
        "conversation": "messages",
        "past": "messages, with the whole conversation",
        "thinking": "thinking",
        "tools": "tools and tool_choice",
    },
)
