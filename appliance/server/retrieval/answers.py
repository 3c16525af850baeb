"""Answers of the routes about texts."""

from __future__ import annotations

from typing import Literal

import msgspec
from msgspec import UNSET, UnsetType


class ReadUsage(msgspec.Struct):
    """Token counts of a request that generates nothing."""

    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0


class EmbeddingRow(msgspec.Struct, kw_only=True):
    """The vector of one input."""

    object: Literal["embedding"] = "embedding"
    index: int
    embedding: list[float] | str  # base64 of little-endian float32


class EmbeddingList(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/embeddings."""

    object: Literal["list"] = "list"
    data: list[EmbeddingRow]
    model: str
    usage: ReadUsage


class FoundDocument(msgspec.Struct):
    """A document as given."""

    text: str


class Ranked(msgspec.Struct, kw_only=True):
    """A document and its relevance."""

    index: int
    relevance_score: float
    document: FoundDocument | UnsetType = UNSET


class RerankAnswer(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/rerank, most relevant first."""

    id: str
    model: str
    usage: ReadUsage
    results: list[Ranked]
    scorer: str  # the kind of score


class Score(msgspec.Struct, kw_only=True):
    """The relevance of one pair of texts."""

    index: int
    object: Literal["score"] = "score"
    score: float


class ScoreList(msgspec.Struct, kw_only=True):
    """Answer of POST /v1/score."""

    id: str
    object: Literal["list"] = "list"
    created: int
    model: str
    data: list[Score]
    usage: ReadUsage
    scorer: str  # the kind of score


class Tokenized(msgspec.Struct, kw_only=True):
    """Answer of POST /tokenize."""

    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None


class TokenizerInfo(msgspec.Struct, kw_only=True):
    """Answer of GET /tokenizer_info, for clients without a tokenizer."""

    tokenizer_class: str = "PreTrainedTokenizerFast"
    vocab_size: int
    model_max_length: int
    add_bos_token: bool
    bos_token: str | None
    eos_token: str | None
    pad_token: None = None  # nothing is padded
    chat_template: str | None


class Detokenized(msgspec.Struct):
    """Answer of POST /detokenize."""

    prompt: str
