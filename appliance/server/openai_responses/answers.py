"""Answers of the Responses API and events of its streams, as structs in OpenAI's order of fields.

An event's sequence number is its last field.
"""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from appliance.server.openai.answers import TokenLogprob
from appliance.server.openai_responses.schema import ChoiceTool, ResponsesTool, TextConfig

Status = Literal["in_progress", "completed", "incomplete", "failed"]


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    """Text for the user."""

    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    """Text of a thought."""

    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    """A message of the model."""

    id: str
    status: Status = "in_progress"
    role: Literal["assistant"] = "assistant"
    content: list[OutputText]


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    """A thought of the model."""

    id: str
    status: Status = "in_progress"
    summary: list[Any] = []
    content: list[ReasoningText]
    encrypted_content: str | UnsetType = UNSET


class CallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    """A call of a tool."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    arguments: str = ""
    namespace: str | UnsetType = UNSET


class CustomCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="custom_tool_call"):
    """A call of a custom tool."""

    id: str
    status: Status = "in_progress"
    call_id: str
    name: str
    input: str = ""


class ExecAction(msgspec.Struct, kw_only=True, tag_field="type", tag="exec"):
    """A command for the client's shell."""

    command: list[str] = []
    env: dict[str, str] = {}
    timeout_ms: int | None = None
    user: str | None = None
    working_directory: str | None = None


class LocalShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="local_shell_call"):
    """A call of the client's shell."""

    id: str
    status: Status = "in_progress"
    call_id: str
    action: ExecAction = msgspec.field(default_factory=ExecAction)


class ShellAction(msgspec.Struct, kw_only=True):
    """Commands for the client's shell, and limits of all of them."""

    commands: list[str] = []
    timeout_ms: int | None = None
    max_output_length: int | None = None  # characters


class LocalEnvironment(msgspec.Struct, kw_only=True, frozen=True, tag_field="type", tag="local"):
    """The client's machine."""


class ShellCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="shell_call"):
    """A call of the client's shell, with several commands."""

    id: str
    status: Status = "in_progress"
    call_id: str
    action: ShellAction = msgspec.field(default_factory=ShellAction)
    environment: LocalEnvironment = LocalEnvironment()


class PatchOperation(msgspec.Struct, kw_only=True):
    """A change of a file."""

    type: str = "update_file"
    path: str = ""
    diff: str | UnsetType = ""


class ApplyPatchCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="apply_patch_call"):
    """A change of a file by the client."""

    id: str
    status: Status = "in_progress"
    call_id: str
    operation: PatchOperation = msgspec.field(default_factory=PatchOperation)


BuiltInCall = CustomCallItem | LocalShellCallItem | ShellCallItem | ApplyPatchCallItem
BUILT_IN_CALLS = (CustomCallItem, LocalShellCallItem, ShellCallItem, ApplyPatchCallItem)
OutputItem = MessageItem | ReasoningItem | CallItem | BuiltInCall


class InputTokensDetails(msgspec.Struct):
    """Prompt tokens by source."""

    cached_tokens: int
    cache_write_tokens: int = 0


class ReasoningTokensDetails(msgspec.Struct):
    """Output tokens by purpose."""

    reasoning_tokens: int


class ResponseUsage(msgspec.Struct):
    """Token counts."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: ReasoningTokensDetails
    total_tokens: int


class ResponseFailure(msgspec.Struct):
    """The reason for a failure."""

    code: str
    message: str


class IncompleteDetails(msgspec.Struct):
    """The reason for an incomplete answer."""

    reason: str


class ReasoningEffort(msgspec.Struct):
    """The requested effort of thinking."""

    effort: str | None
    summary: str | None


class ResponseObject(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses, as sent and stored."""

    id: str
    object: Literal["response"] = "response"
    created_at: int  # Unix seconds
    status: Status
    background: bool = False
    error: ResponseFailure | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: ReasoningEffort
    store: bool
    temperature: float
    text: TextConfig
    tool_choice: str | ChoiceTool
    tools: list[ResponsesTool]
    top_logprobs: int = 0
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponseUsage | None = None
    metadata: dict[str, str]


class ResponseInputTokens(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/responses/input_tokens."""

    object: Literal["response.input_tokens"] = "response.input_tokens"
    input_tokens: int


class DeletedResponse(msgspec.Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    object: Literal["response"] = "response"
    deleted: bool = True


class InputItems(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/responses/{id}/input_items."""

    object: Literal["list"] = "list"
    data: list[msgspec.Raw]
    first_id: str | None
    last_id: str | None
    has_more: bool


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
