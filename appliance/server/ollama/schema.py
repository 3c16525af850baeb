"""What clients of Ollama's API may send."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine.request import MAX_STOP_STRINGS
from appliance.server.schema import MAX_TOKENS, Effort, Penalty, Share, StopString

# The model stays loaded, and a prompt is never cut, whatever these say.
HARMLESS = {"keep_alive", "shift", "truncate"}
_NOTHING: tuple[Any, ...] = (None, False, "", [], {})
UNSUPPORTED: dict[str, tuple[Any, ...]] = {"logprobs": _NOTHING, "top_logprobs": (None, 0)}
UNSUPPORTED_GENERATE = UNSUPPORTED | {
    "context": _NOTHING,
    "height": (None, 0),
    "images": _NOTHING,
    "steps": (None, 0),
    "suffix": _NOTHING,
    "template": _NOTHING,
    "width": (None, 0),
}


class Options(msgspec.Struct, kw_only=True):
    """How tokens are chosen; of the rest, those that would change an answer are refused."""

    num_predict: Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | None = None  # below 1: as fits
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_TOKENS)] | None = None
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    repeat_penalty: Annotated[float, Meta(ge=0.01, le=100.0)] | None = None
    repeat_last_n: int | None = None  # all of it (-1), or none (0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: int | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    num_ctx: Annotated[int, Meta(ge=0)] | None = None  # no effect: the context is the server's


class OllamaRequest(msgspec.Struct, kw_only=True):
    """What chat and generate have in common."""

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Effort | None = None


class CalledByName(msgspec.Struct, kw_only=True):
    """Which tool a model called, and how."""

    name: str
    arguments: dict[str, Any] | None = None


class OllamaCall(msgspec.Struct, kw_only=True):
    """A call of an earlier turn."""

    function: CalledByName
    id: str | None = None


class OllamaTurn(msgspec.Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = None
    images: list[str] | None = None
    tool_calls: list[OllamaCall] | None = None
    tool_name: str | None = None
    tool_call_id: str | None = None


class OllamaFunction(msgspec.Struct, kw_only=True):
    """What a tool is called, does and takes."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """Something that a model may call."""

    function: OllamaFunction
    type: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/chat; without messages it only asks whether the model is loaded."""

    messages: list[OllamaTurn] | None = None
    tools: list[OllamaTool] | None = None


class GenerateRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/generate; without a prompt it only asks whether the model is loaded."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the prompt as it is, without the chat template


class ShowRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None  # the same by its older name
    verbose: bool | None = None
