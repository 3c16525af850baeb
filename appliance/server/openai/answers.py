"""Answers of the OpenAI routes, as structs in OpenAI's order of fields."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType

from appliance.server.requests.exchange import Usage


class TopLogprob(msgspec.Struct):
    """A candidate for a token; `bytes` are exact where `token` cannot be."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(TopLogprob):
    """The chosen token and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct):
    """Log probabilities in the form of chat completions."""

    content: list[TokenLogprob]
    refusal: None = None


class CalledFunctionText(msgspec.Struct):
    """The called tool and its arguments as JSON, or a piece of them in a stream."""

    arguments: str
    name: str | UnsetType = UNSET  # only at the beginning of a call


class CalledCustomText(msgspec.Struct):
    """The called custom tool and its input."""

    input: str
    name: str | UnsetType = UNSET  # only at the beginning of a call


class AnsweredCall(msgspec.Struct, tag_field="type", tag="function"):
    """A call of a function in a whole answer."""

    id: str
    function: CalledFunctionText


class AnsweredCustomCall(msgspec.Struct, tag_field="type", tag="custom"):
    """A call of a custom tool in a whole answer."""

    id: str
    custom: CalledCustomText


class AssistantMessage(msgspec.Struct):
    """A whole answer; `content` is null if it has only thoughts and calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    # The thought under both names in use, and calls, if any.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall | AnsweredCustomCall] | UnsetType = UNSET
    function_call: CalledFunctionText | UnsetType = UNSET  # if the request has `functions`


class ChatChoice(msgspec.Struct):
    """One whole answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    cumulative_logprob: float | UnsetType = UNSET  # with best_of or beam search


class PromptLogprob(msgspec.Struct):
    """A token's probability at one place of a prompt."""

    logprob: float
    rank: int | None  # 1 is the likeliest; known only among the reported alternatives
    decoded_token: str


# Per position, by token id: the prompt's token and the likeliest. None at the first.
PromptLogprobs = list[dict[str, PromptLogprob] | None]


class ChatCompletion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    system_fingerprint: str
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # if requested


class CallDelta(msgspec.Struct):
    """The beginning of a call, with id, type and name, or a piece of its arguments."""

    index: int
    function: CalledFunctionText | UnsetType = UNSET
    id: str | UnsetType = UNSET
    type: Literal["function", "custom"] | UnsetType = UNSET
    custom: CalledCustomText | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """A chunk's addition; an empty one accompanies the finish reason."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # same text as `reasoning_content`
    tool_calls: list[CallDelta] | UnsetType = UNSET  # one per chunk
    function_call: CalledFunctionText | UnsetType = UNSET


class ChatChunkChoice(msgspec.Struct):
    """One choice in a chunk."""

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None


class ChatChunk(msgspec.Struct, kw_only=True):
    """One frame of a streamed chat."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET  # null until the last chunk, if requested


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the form of text completions."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None for a first token, which has no context
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters before each token


class CompletionChoice(msgspec.Struct):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    cumulative_logprob: float | UnsetType = UNSET  # with best_of or beam search
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # if requested


class Completion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions, and each frame of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class Modalities(msgspec.Struct, kw_only=True):
    """Kinds of input and output of a model, in the form of OpenRouter."""

    input_modalities: list[Literal["text", "image"]]
    output_modalities: list[Literal["text"]]


class ModelCard(msgspec.Struct, kw_only=True):
    """A served model."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "appliance"
    parent: str | None = None  # an adapter's base model
    max_model_len: int | None  # null until first loaded
    default_parameters: dict[str, float]  # default sampling
    state: str  # ready, asleep (the next request loads it), loading, waking, restarting or failed
    aliases: list[str]  # other names that requests may use
    architecture: Modalities | None  # null until first loaded
    # Anthropic's names of the same.
    type: Literal["model"] = "model"
    display_name: str
    created_at: str
    max_input_tokens: int | None
    lifecycle: Literal["active"] = "active"


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
    # Anthropic's pages; all models are on the first.
    first_id: str | None
    last_id: str | None
    has_more: bool = False


class GenerationParams(msgspec.Struct, kw_only=True):
    """Sampling of a request that says nothing of it, under llama-server's names."""

    n_predict: int = -1  # the rest of the context
    temperature: float
    top_k: int
    top_p: float
    min_p: float
    repeat_penalty: float
    repeat_last_n: int = -1  # tokens that penalties count: all
    presence_penalty: float
    frequency_penalty: float


class GenerationSettings(msgspec.Struct, kw_only=True):
    """Settings of llama-server's slots; `n_ctx` is the context length in tokens."""

    n_ctx: int
    params: GenerationParams


class PropsModalities(msgspec.Struct, kw_only=True):
    """Kinds of input beside texts."""

    vision: bool
    audio: Literal[False] = False


class Props(msgspec.Struct, kw_only=True):
    """Answer of GET /props: those properties of llama-server that this server has, too.

    Source: tools/server/README.md of llama.cpp.
    """

    default_generation_settings: GenerationSettings
    total_slots: int  # requests that may run at once
    model_alias: str
    model_path: str  # the model's name again: folders of the machine are nobody's business
    chat_template: str  # empty if the model has none
    modalities: PropsModalities
    build_info: str
    is_sleeping: bool
