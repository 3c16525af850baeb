"""Answers of the OpenAI routes, as structs in OpenAI's order of fields."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class PromptTokensDetails(msgspec.Struct):
    """Prompt tokens by source."""

    cached_tokens: int


class CompletionTokensDetails(msgspec.Struct):
    """Output tokens by purpose, and proposed ones by what became of them."""

    reasoning_tokens: int | UnsetType = UNSET  # in thoughts; where the model can think or call
    # Of speculative decoding, where there was any.
    accepted_prediction_tokens: int | UnsetType = UNSET
    rejected_prediction_tokens: int | UnsetType = UNSET


class Usage(msgspec.Struct):
    """Token counts of one request; prompts count once, whatever `n` is."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: CompletionTokensDetails | UnsetType = UNSET


class TopLogprob(msgspec.Struct):
    """One candidate for a token; `bytes` are exact where `token` cannot be."""

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
    """The called tool and its arguments as JSON; a stream sends pieces of that."""

    arguments: str
    name: str | UnsetType = UNSET  # where a call begins


class AnsweredCall(msgspec.Struct):
    """A call of a tool in a whole answer."""

    id: str
    function: CalledFunctionText
    type: Literal["function"] = "function"


class AssistantMessage(msgspec.Struct):
    """A whole answer; `content` is null if it is all thoughts and calls."""

    content: str | None
    role: Literal["assistant"] = "assistant"
    refusal: None = None
    # The thought under both names that clients look for, and calls, where there are some.
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET
    tool_calls: list[AnsweredCall] | UnsetType = UNSET


class ChatChoice(msgspec.Struct):
    """One whole answer of a chat."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None
    finish_reason: str
    cumulative_logprob: float | UnsetType = UNSET  # with best_of or beam search


class PromptLogprob(msgspec.Struct):
    """The probability of one token at one place of a prompt."""

    logprob: float
    rank: int | None  # 1 is the likeliest; known of the reported alternatives only
    decoded_token: str


# By token id, of each place: the token that is there, and the likeliest. None of the first.
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
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # where it was asked for


class CallDelta(msgspec.Struct):
    """The beginning of a call, with id, type and name, or a piece of its arguments."""

    index: int
    function: CalledFunctionText
    id: str | UnsetType = UNSET
    type: Literal["function"] | UnsetType = UNSET


class ChatDelta(msgspec.Struct):
    """The addition of a chunk; an empty one accompanies the finish reason."""

    role: Literal["assistant"] | UnsetType = UNSET
    content: str | UnsetType = UNSET
    reasoning_content: str | UnsetType = UNSET
    reasoning: str | UnsetType = UNSET  # the same
    tool_calls: list[CallDelta] | UnsetType = UNSET  # one at a time


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
    usage: Usage | UnsetType | None = UNSET  # null until the last chunk, if it was asked for


class CompletionLogprobs(msgspec.Struct):
    """Log probabilities in the form of text completions."""

    tokens: list[str]
    token_logprobs: list[float | None]  # None of a first token, which nothing precedes
    top_logprobs: list[dict[str, float] | None]
    text_offset: list[int]  # characters before each token


class CompletionChoice(msgspec.Struct):
    """One answer, or a piece of it."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None
    finish_reason: str | None
    cumulative_logprob: float | UnsetType = UNSET  # with best_of or beam search
    prompt_logprobs: PromptLogprobs | UnsetType = UNSET  # where it was asked for


class Completion(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/completions, and each frame of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    system_fingerprint: str
    usage: Usage | UnsetType | None = UNSET


class ModelCard(msgspec.Struct, kw_only=True):
    """A model that is served."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "appliance"
    parent: str | None = None  # of an adapter, the model that it changes
    max_model_len: int | None  # null until it is loaded for the first time
    default_parameters: dict[str, float]  # of sampling, where a request says nothing
    state: str  # ready, asleep (the next request loads it), loading, waking, restarting or failed
    aliases: list[str]  # that requests may name as well


class ModelList(msgspec.Struct, kw_only=True):
    """Answer of GET /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
