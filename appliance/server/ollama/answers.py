"""Answers of the routes below /api, as structs in Ollama's order of fields."""

from __future__ import annotations

from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from appliance.server.openai.answers import TokenLogprob


class AnsweredFunction(msgspec.Struct, kw_only=True):
    """The tool's name, and its arguments as an object."""

    index: int
    name: str
    arguments: dict[str, Any]


class OllamaAnsweredCall(msgspec.Struct, kw_only=True):
    """A call of a tool."""

    id: str
    function: AnsweredFunction


class OllamaMessage(msgspec.Struct, kw_only=True):
    """An answer, or a part of one."""

    role: Literal["assistant"] = "assistant"
    content: str = ""
    thinking: str | UnsetType = UNSET
    tool_calls: list[OllamaAnsweredCall] | UnsetType = UNSET


class AnswerLine(msgspec.Struct, kw_only=True):
    """Fields of every line; the last one adds the reason and durations in nanoseconds."""

    model: str
    created_at: str
    done: bool = False
    done_reason: str | UnsetType = UNSET
    logprobs: list[TokenLogprob] | UnsetType = UNSET
    total_duration: int | UnsetType = UNSET
    load_duration: int | UnsetType = UNSET
    prompt_eval_count: int | UnsetType = UNSET
    prompt_eval_duration: int | UnsetType = UNSET
    eval_count: int | UnsetType = UNSET
    eval_duration: int | UnsetType = UNSET


class ChatLine(AnswerLine, kw_only=True):
    """Answer of POST /api/chat, and each line of its stream."""

    message: OllamaMessage


class GenerateLine(AnswerLine, kw_only=True):
    """Answer of POST /api/generate, and each line of its stream."""

    response: str = ""
    thinking: str | UnsetType = UNSET


class Embedded(msgspec.Struct, kw_only=True):
    """Answer of POST /api/embed; durations in nanoseconds."""

    model: str
    embeddings: list[list[float]]
    total_duration: int = 0
    load_duration: int = 0
    prompt_eval_count: int = 0


class OneEmbedded(msgspec.Struct):
    """Answer of POST /api/embeddings."""

    embedding: list[float]


class Details(msgspec.Struct, kw_only=True):
    """Facts about a model; empty if unknown."""

    parent_model: str = ""
    format: str = ""
    family: str = ""
    families: list[str] = []
    parameter_size: str = ""
    quantization_level: str = ""


class Tag(msgspec.Struct, kw_only=True):
    """A served model."""

    name: str
    model: str
    modified_at: str
    size: int  # bytes of its weights
    digest: str
    details: Details


class Tags(msgspec.Struct):
    """Answer of GET /api/tags."""

    models: list[Tag]


class RunningModel(msgspec.Struct, kw_only=True):
    """A model that is loaded."""

    name: str
    model: str
    size: int  # bytes, with its cache
    digest: str
    details: Details
    expires_at: str
    size_vram: int  # of the size, on a GPU
    context_length: int


class RunningModels(msgspec.Struct):
    """Answer of GET /api/ps."""

    models: list[RunningModel]


class Shown(msgspec.Struct, kw_only=True):
    """Answer of POST /api/show."""

    parameters: str
    template: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]
    modified_at: str


class PullStatus(msgspec.Struct):
    """Answer of POST /api/pull, as its only line."""

    status: str = "success"


class OllamaVersion(msgspec.Struct):
    """Answer of GET /api/version."""

    version: str
