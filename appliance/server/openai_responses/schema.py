"""Requests of the Responses API."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine.nouns.sampling_params import MAX_LOGPROBS
from appliance.server.requests.schema import Count, Effort, ToolGrammar
from appliance.server.requests.unsupported import NOTHING, Table, foreign

# Accepted without effect: prompts are never cut, and no tool runs here.
HARMLESS = {
    "client_metadata",
    "max_tool_calls",
    "prompt_cache_key",
    "prompt_cache_options",
    "prompt_cache_retention",
    "safety_identifier",
    "service_tier",
    "stream_options",
    "user",
    "verbosity",
}
ENCRYPTED = "reasoning.encrypted_content"  # in `include`
LOGPROBS = "message.output_text.logprobs"
# Tools that coding agents offer to any model; the server omits them, as if never called.
SKIPPED_TOOLS = {
    "image_generation", "tool_search", "web_search", "web_search_2025_08_26",
    "web_search_preview", "web_search_preview_2025_03_11",
}  # fmt: skip


class InputPart(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A part of an item: a text, or a picture."""

    type: str
    text: str | None = None
    refusal: str | None = None
    image_url: str | None = None
    detail: str | None = None  # of the picture
    file_id: str | None = None  # of a file that the server would hold


class OutputPart(InputPart, kw_only=True, omit_defaults=True):
    """A part of a tool's output; of a shell's, the output of its commands, without a type."""

    type: str = ""
    stdout: str | None = None
    stderr: str | None = None
    outcome: dict[str, Any] | None = None


class Item(msgspec.Struct, kw_only=True, omit_defaults=True):
    """An item of a conversation; `type` determines the used fields."""

    type: str | None = None  # a message by default
    id: str | None = None
    status: str | None = None
    role: Literal["user", "assistant", "system", "developer"] | None = None
    content: str | list[InputPart] | None = None
    summary: list[InputPart] | None = None
    encrypted_content: str | None = None
    call_id: str | None = None
    name: str | None = None
    namespace: str | None = None
    arguments: str | None = None
    input: str | None = None  # of a custom tool
    action: dict[str, Any] | None = None  # of a shell
    operation: dict[str, Any] | None = None  # of a patch
    output: str | list[OutputPart] | dict[str, Any] | None = None


class CustomFormat(ToolGrammar, kw_only=True, omit_defaults=True):
    """Format of a custom tool's input: text, or a grammar."""

    type: str


class ResponsesTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """A tool that the model may call; a namespace holds several."""

    type: str
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None
    format: CustomFormat | None = None
    environment: dict[str, Any] | None = None  # of a shell
    tools: list[ResponsesTool] | None = None


class ChoiceTool(msgspec.Struct, kw_only=True, omit_defaults=True):
    """The tool that the model must call, or the tools that it may call."""

    type: str
    name: str | None = None
    mode: Literal["auto", "required"] | None = None
    tools: list[ChoiceTool] | None = None


class TextFormat(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Format of the answer."""

    type: Literal["text", "json_object", "json_schema"]
    name: str | None = None
    description: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class TextConfig(msgspec.Struct, kw_only=True, omit_defaults=True):
    """Format and verbosity of the answer."""

    format: TextFormat | None = None
    verbosity: str | None = None


class Reasoning(msgspec.Struct, kw_only=True):
    """Effort of thinking; thoughts are shown whole, never as a summary."""

    effort: Effort | None = None
    summary: str | None = None


class ResponsesRequest(msgspec.Struct, kw_only=True):
    """Body of POST /v1/responses."""

    input: str | list[Item] | None = None  # needed, unless a kept response goes before
    model: str | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    tools: list[ResponsesTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | ChoiceTool | None = None
    parallel_tool_calls: bool | None = None
    text: TextConfig | None = None
    reasoning: Reasoning | None = None
    max_output_tokens: Count | None = None
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None
    stream: bool | None = None
    include: list[str] | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    truncation: Literal["auto", "disabled"] | None = None

    @property
    def logprobs(self) -> int | None:
        """Alternatives per token; None reports nothing."""
        wanted = LOGPROBS in (self.include or ()) or bool(self.top_logprobs)
        return self.top_logprobs or 0 if wanted else None


_UNSUPPORTED: Table = {
    "background": NOTHING,
    "context_management": NOTHING,
    "conversation": NOTHING,
    "moderation": NOTHING,
    "prompt": NOTHING,
}
UNSUPPORTED: Table = _UNSUPPORTED | foreign(
    {*ResponsesRequest.__struct_fields__, *_UNSUPPORTED, *HARMLESS},
    {
        "limit": "max_output_tokens",
        "format": "text.format",
        "system": "instructions",
        "conversation": "input",
        "thinking": "reasoning.effort",
        "logprobs": "include, with message.output_text.logprobs",
        "tools": "tools",
    },
)
