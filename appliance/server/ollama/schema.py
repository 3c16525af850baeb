"""Requests of Ollama's API."""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.engine.nouns.sampling_params import MAX_LOGPROBS, MAX_STOP_STRINGS
from appliance.server.requests.schema import (
    MAX_TOKENS,
    Effort,
    NamedTool,
    Penalty,
    Share,
    StopString,
)
from appliance.server.requests.unsupported import NOTHING, Table, foreign

# Without effect: prompts are never cut.
HARMLESS = {"shift", "truncate"}
HARMLESS_FOR_VECTORS = HARMLESS | {"options"}  # for sampling


# Some clients write 8192.0; as in Ollama, the fraction is dropped.
Most = Annotated[int, Meta(ge=-2, le=MAX_TOKENS)] | Annotated[float, Meta(ge=-2, le=MAX_TOKENS)]


KeepAlive = str | float | None  # seconds, or a duration such as 5m
# Nothing is given back (`++`): otherwise each zero would double the ways to read them.
_ZERO = re.compile(r"[+-]?(?:0++(?:\.0*+)?+(?:ns|us|µs|ms|s|m|h)?+)++")


def unloads(keep_alive: KeepAlive) -> bool:
    """Return True if a model is to be unloaded after the request."""
    if isinstance(keep_alive, str):
        return _ZERO.fullmatch(keep_alive) is not None
    return keep_alive == 0


class Options(msgspec.Struct, kw_only=True):
    """Sampling options; an unsupported one is an error if it would change the answer."""

    num_predict: Most | None = None  # below 1: as many as fit
    temperature: Annotated[float, Meta(ge=0.0, le=2.0)] | None = None
    top_k: Most | None = None  # below 1: all
    top_p: Annotated[float, Meta(ge=0.0, le=1.0)] | None = None
    min_p: Share | None = None
    seed: (
        Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
        | Annotated[float, Meta(ge=-(2**62), le=2**62)]
        | None
    ) = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    # 0 is off, too: LiteLLM sends OpenAI's frequency_penalty by this name, which is 0 by default.
    repeat_penalty: Annotated[float, Meta(ge=0.0, le=100.0)] | None = None
    repeat_last_n: Most | None = None  # tokens that penalties count: all (-1), or none (0)
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    mirostat: int | float | None = None
    typical_p: float | None = None
    tfs_z: float | None = None
    num_ctx: float | None = None  # no effect: the context is the server's


class OllamaRequest(Options, kw_only=True):
    """The fields that chat and generate share.

    Some clients, among them a provider of Vercel's AI SDK, write sampling options beside `options`.
    """

    model: str
    stream: bool | None = None
    format: Literal["", "json"] | dict[str, Any] | None = None
    options: Options | None = None
    think: bool | Effort | None = None
    keep_alive: KeepAlive = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LOGPROBS)] | None = None
    max_tokens: Most | None = None  # this and the next two: other names of `num_predict`
    max_output_tokens: Most | None = None
    max_completion_tokens: Most | None = None

    @property
    def sampling_options(self) -> Options:
        """The options of `options`, else those beside it."""
        given = self.options or Options()
        limits = (self.max_tokens, self.max_output_tokens, self.max_completion_tokens)
        beside = {name: getattr(self, name) for name in Options.__struct_fields__}
        if self.num_predict is None:
            beside["num_predict"] = next((limit for limit in limits if limit is not None), None)
        for name, other in beside.items():
            if getattr(given, name) is None:
                setattr(given, name, other)
        return given

    @property
    def reported(self) -> int | None:
        """Alternatives per token; None reports nothing."""
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def unloads(self) -> bool:
        return unloads(self.keep_alive)


class CalledByName(msgspec.Struct, kw_only=True):
    """The called tool and its arguments."""

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
    """Name, purpose and parameters of a tool."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None


class OllamaTool(msgspec.Struct, kw_only=True):
    """A tool that the model may call."""

    function: OllamaFunction
    type: str | None = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/chat; without messages it only loads the model."""

    messages: list[OllamaTurn] | None = None
    tools: list[OllamaTool] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None


class GenerateRequest(OllamaRequest, kw_only=True):
    """Body of POST /api/generate; without a prompt it only loads the model."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None  # the raw prompt, without the chat template
    suffix: str | None = None  # text after the answer
    images: list[str] | None = None


class EmbedRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/embed; without input it only loads the model."""

    model: str
    input: str | list[str] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    keep_alive: KeepAlive = None


class EmbeddingsRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/embeddings, the older form for one text."""

    model: str
    prompt: str | None = None
    keep_alive: KeepAlive = None


class ShowRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/show."""

    model: str | None = None
    name: str | None = None  # its older name
    verbose: bool | None = None


class PullRequest(msgspec.Struct, kw_only=True):
    """Body of POST /api/pull."""

    model: str | None = None
    name: str | None = None  # its older name
    stream: bool | None = None


_HERE = {
    "limit": "options.num_predict",
    "stop": "options.stop",
    "format": "format",
    "system": "messages, with a turn of the role system",
    "conversation": "messages",
    "past": "messages, with the whole conversation",
    "thinking": "think",
    "tools": "tools",
    "repetition": "options.repeat_penalty",
    **{name: f"options.{name}" for name in Options.__struct_fields__},
}
_OPTIONS: Table = {
    f"options.{name}": instead
    for name, instead in foreign({*Options.__struct_fields__, "options"}, _HERE).items()
}
_CHAT: Table = {"template": NOTHING}
UNSUPPORTED: Table = (
    _CHAT | foreign({*OllamaChatRequest.__struct_fields__, *_CHAT, *HARMLESS}, _HERE) | _OPTIONS
)
_GENERATE: Table = _CHAT | {
    "context": NOTHING,
    "height": (None, 0),
    "steps": (None, 0),
    "width": (None, 0),
}
UNSUPPORTED_GENERATE: Table = (
    _GENERATE
    | foreign(
        {*GenerateRequest.__struct_fields__, *_GENERATE, *HARMLESS},
        _HERE | {"system": "system", "conversation": "prompt"},
    )
    | _OPTIONS
)
