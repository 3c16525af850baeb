"""Requests of the routes about texts, in the words of OpenAI, Jina, Cohere and vLLM."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from appliance.server.requests.schema import MAX_TOKENS, Message, Prompt, TermsFields, TokenId, Tool
from appliance.server.requests.unsupported import NOTHING, Table

# Without effect: texts are never cut.
_CUTTING: Table = {
    "max_chunks_per_doc": (None,),
    "max_tokens_per_doc": (None,),
    "truncate": (*NOTHING, "NONE"),
    "truncate_prompt_tokens": (None, -1),
}
EMBEDDINGS: Table = _CUTTING | {
    "embed_dtype": (None, "float32"),
    "endianness": (None, "native", "little"),
    "messages": NOTHING,
    "embedding_types": (None, [], ["float"]),
    "prompt_embeds": NOTHING,
}
RELEVANCE: Table = _CUTTING | {"rank_fields": NOTHING, "mm_processor_kwargs": NOTHING}
TOKENS: Table = {
    "chat_template": NOTHING,
    "mm_processor_kwargs": NOTHING,
}
HARMLESS = {"add_special_tokens", "input_type", "use_activation"}


class EmbeddingRequest(TermsFields, kw_only=True):
    """Body of POST /v1/embeddings."""

    input: Prompt
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=MAX_TOKENS)] | None = None
    prompt_name: str | None = None  # the checkpoint's prompt, such as query


class TextDocument(msgspec.Struct, kw_only=True):
    """A document as an object."""

    text: str


class RerankRequest(TermsFields, kw_only=True):
    """Body of POST /v1/rerank."""

    query: str
    documents: Annotated[list[str | TextDocument], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=0, le=MAX_TOKENS)] | None = None  # 0 is all of them
    return_documents: bool | None = None
    instruction: str | None = None


Texts = str | Annotated[list[str], Meta(min_length=1)]


class ScoreRequest(TermsFields, kw_only=True):
    """Body of POST /v1/score: one text against each of several, or pairs, by either name."""

    text_1: Texts | None = None
    text_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    instruction: str | None = None


class TokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    tools: list[Tool] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    return_token_strs: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None


class DetokenizeRequest(msgspec.Struct, kw_only=True):
    """Body of POST /detokenize."""

    tokens: list[TokenId]
    model: str | None = None
