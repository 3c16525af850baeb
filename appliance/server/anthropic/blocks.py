"""Writes documents, search results and the results of Anthropic's own tools as text."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import RequestError
from appliance.server.anthropic.schema import ContentBlock, DocumentSource
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Iterable

# Of no use to a model: kinds of objects, and what only Anthropic can read.
_DROPPED = ("type", "encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control")


def text_of(content: str | Sequence[ContentBlock], where: str) -> str:
    """Return the text of blocks; raises RequestError for another kind of block."""
    texts = []
    for place, block in enumerate(blocks_of(content)):
        if (text := block_text(block, f"{where}.{place}")) is None:
            raise refused(block, f"{where}.{place}")
        texts.append(text)
    return "\n".join(texts)


def blocks_of(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def block_text(block: ContentBlock, where: str) -> str | None:
    """Return what a block says to the model; None if it is of another kind.

    Raises:
        RequestError: it is a document of bytes or by address, or asks for citations.
    """
    match block:
        case ContentBlock(type="text", text=str(text)):
            return text
        case ContentBlock(type="document"):
            _check_citations(block, where)
            text = _document(block, where)
            return _element("document", [("title", block.title), ("context", block.context)], text)
        case ContentBlock(type="search_result", source=str(source)):
            _check_citations(block, where)
            text = text_of(_inner(block.content, where), f"{where}.content")
            return _element("search_result", [("source", source), ("title", block.title)], text)
        case ContentBlock(type="tool_reference", tool_name=str(name)):
            return f"The tool {name} is there."
    return None


def result_text(block: ContentBlock, where: str) -> str:
    """Return the text of a client's tool result."""
    return text_of(_inner(block.content, where), f"{where}.content")


def server_result_text(block: ContentBlock) -> str:
    """Return the result of a tool that Anthropic ran, as JSON without what only it can read."""
    check_nesting(block.content, "messages")
    content = _readable(block.content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def refused(block: ContentBlock, where: str) -> RequestError:
    known = (
        "text, document (of text), search_result, thinking, tool_use, tool_result and the blocks "
        "of Anthropic's tools, with their fields, where they belong"
    )
    return RequestError(
        f"{where}: a block of type {block.type[:40]!r} is not supported here; what is: {known}",
        param="messages",
        code="unsupported_content",
    )


def _document(block: ContentBlock, where: str) -> str:
    try:
        source = msgspec.convert(block.source, DocumentSource)
    except msgspec.ValidationError as error:
        raise RequestError(f"{where}.source: {error}", param="messages") from None
    match source:
        case DocumentSource(type="text", data=str(data)):
            return data
        case DocumentSource(type="content", content=str() | list()):
            return text_of(_inner(source.content, where), f"{where}.source.content")
    raise RequestError(
        f"{where} has a source of type {source.type[:40]!r}; supported are text (data) and content",
        param="messages",
        code="unsupported_content",
    )


def _inner(content: Any, where: str) -> str | list[ContentBlock]:
    try:
        return msgspec.convert(content or "", str | list[ContentBlock])
    except msgspec.ValidationError:
        raise RequestError(
            f"{where} has content that is neither text nor blocks", param="messages"
        ) from None


def _check_citations(block: ContentBlock, where: str) -> None:
    if isinstance(block.citations, Mapping) and block.citations.get("enabled"):
        raise RequestError(
            f"{where} asks for citations, which this server does not make; leave them out",
            param="messages",
            code="unsupported_content",
        )


def _element(name: str, facts: Iterable[tuple[str, str | None]], text: str) -> str:
    lines = [f"<{fact}>{value}</{fact}>" for fact, value in facts if value]
    return "\n".join([f"<{name}>", *lines, text, f"</{name}>"])


def _readable(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            name: _readable(inner)
            for name, inner in value.items()
            if name not in _DROPPED and inner is not None
        }
    return [_readable(inner) for inner in value] if isinstance(value, list) else value
