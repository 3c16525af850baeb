"""Checks messages and tools of Anthropic's API and converts them for chat templates."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from appliance.errors import RequestError
from appliance.pictures import content_of, of_base64, of_url
from appliance.server.anthropic.schema import BlockSource, ContentBlock
from appliance.server.requests.tools import Offer, Tools
from appliance.tokenizer.chat_template import check_nesting

if TYPE_CHECKING:
    from collections.abc import Iterable

    from appliance.dialects.turns import Turn
    from appliance.server.anthropic.schema import AnthropicTurn, CountRequest

_CALLS = ("tool_use", "server_tool_use", "mcp_tool_use")
MAX_NAME = 128  # characters of a tool's name, at Anthropic
# Of no use to a model: kinds of objects, and what only Anthropic can read.
_DROPPED = ("type", "encrypted_content", "encrypted_index", "encrypted_stdout", "cache_control")


def turns_of(body: CountRequest) -> list[Turn]:
    """Return the turns; the system prompt and each tool result become separate turns.

    Raises:
        RequestError: a message has unsupported content.
    """
    turns: list[Turn] = []
    if body.system:
        turns.append({"role": "system", "content": _text_of(body.system, "system")})
    names: dict[str, str] = {}  # a tool's name by call id
    for number, message in enumerate(body.messages):
        where = f"messages.{number}"
        if message.role == "assistant":
            turns += _assistant(message, where, names)
        else:
            turns += _others(message, where, names)
    if body.messages[-1].role == "assistant":
        _check_prefill(body, turns[-1])
    return turns


def _check_prefill(body: CountRequest, last: Turn) -> None:
    """Refuse a last turn of the assistant that Anthropic's API would not continue."""
    thinks = body.thinking is not None and body.thinking.type != "disabled"
    config = body.output_config
    if "tool_calls" in last:
        why = "the last message has a tool_use without its tool_result after it"
    elif last["content"] != last["content"].rstrip():
        why = "the text of a last message of the assistant must not end with white space"
    elif thinks and "reasoning_content" not in last:
        why = (
            "with thinking, a last message of the assistant must begin with a thinking block; "
            "leave thinking out, or end with a message of the user"
        )
    elif body.output_format is not None or (config is not None and config.format is not None):
        why = "a last message of the assistant is not continued in a format; leave one out"
    else:
        return
    raise RequestError(why, param="messages")


def tools_of(body: CountRequest) -> Tools:
    """Return the tools of a request.

    Raises:
        RequestError: a tool runs on Anthropic's servers, or the choice matches none.
    """
    offers = []
    for number, tool in enumerate(body.tools or ()):
        description, schema = tool.description, tool.input_schema
        known = None if tool.type in (None, "custom") else client_tool(tool.type)
        if known is not None:
            description, schema = known
        elif tool.type not in (None, "custom"):
            raise RequestError(
                f"tools.{number} is of type {tool.type[:60]!r}, which only Anthropic runs; describe"
                " a tool of your own with input_schema, or leave it out",
                param="tools",
                code="unsupported_tool",
            )
        place = f"tools.{number}.input_schema"
        offers.append(
            Offer(
                tool.name,
                schema,
                place,
                description,
                bool(tool.strict),
                max_name=MAX_NAME,
            )
        )
    choice = body.tool_choice
    if choice is None:
        return Tools.of(offers)
    one_call = bool(choice.disable_parallel_tool_use)
    match choice.type:
        case "tool":
            return Tools.of(offers, named=choice.name or "", one_call=one_call)
        case "any":
            return Tools.of(offers, choice="required", one_call=one_call)
        case other:
            return Tools.of(offers, choice=other, one_call=one_call)


def _assistant(message: AnthropicTurn, where: str, names: dict[str, str]) -> list[Turn]:
    """Return a turn; a result of Anthropic's own tools ends one, and is a turn itself."""
    turns: list[Turn] = []
    texts: list[str] = []
    thoughts: list[str] = []
    calls: list[dict[str, Any]] = []

    def flush() -> None:
        turn: Turn = {"role": "assistant", "content": "\n".join(texts)}
        if thoughts:
            turn["reasoning_content"] = "\n".join(thoughts)
        if calls:
            turn["tool_calls"] = [*calls]
        turns.append(turn)
        for found in (texts, thoughts, calls):
            found.clear()

    for place, block in enumerate(_blocks_of(message.content)):
        match block:
            case ContentBlock(type="text", text=str(text)):
                texts.append(text)
            case ContentBlock(type="thinking", thinking=str(thinking)):
                thoughts.append(thinking)
            case ContentBlock(type="redacted_thinking"):
                pass  # only its author can read it
            case ContentBlock(type=kind, id=str(call_id), name=str(name)) if kind in _CALLS:
                check_nesting(block.input, "messages")
                names[call_id] = name
                arguments = json.dumps(block.input or {}, ensure_ascii=False)
                function = {"name": name, "arguments": arguments}
                calls.append({"id": call_id, "type": "function", "function": function})
            case ContentBlock(type=str(kind), tool_use_id=str(call_id)) if kind.endswith(
                "_tool_result"
            ):
                if texts or thoughts or calls:
                    flush()
                turns.append(_result(call_id, _server_result_text(block), names))
            case _:
                raise refused(block, f"{where}.content.{place}")
    if texts or thoughts or calls or not turns:
        flush()
    return turns


def _others(message: AnthropicTurn, where: str, names: dict[str, str]) -> list[Turn]:
    """Split a user's turn: each tool result becomes a separate turn, in order."""
    turns: list[Turn] = []
    parts: list[dict[str, Any]] = []

    def flush() -> None:
        if parts:
            turns.append({"role": message.role, "content": content_of([*parts])})
            parts.clear()

    for place, block in enumerate(_blocks_of(message.content)):
        here = f"{where}.content.{place}"
        if block.type == "tool_result" and block.tool_use_id is not None:
            flush()
            turns.append(_result(block.tool_use_id, _result_content(block, here), names))
        else:
            parts.append(_part(block, here))
    flush()
    return turns or [{"role": message.role, "content": ""}]


def _result(call_id: str, content: Any, names: dict[str, str]) -> Turn:
    turn: Turn = {"role": "tool", "tool_call_id": call_id, "content": content}
    if call_id in names:
        turn["name"] = names[call_id]
    return turn


def _text_of(content: str | Sequence[ContentBlock], where: str) -> str:
    """Return the text of blocks; raises RequestError for another kind of block."""
    blocks = enumerate(_blocks_of(content))
    return "\n".join(_text_in(block, f"{where}.{place}") for place, block in blocks)


def _text_in(block: ContentBlock, where: str) -> str:
    if (text := _block_text(block, where)) is None:
        raise refused(block, where)
    return text


def _part(block: ContentBlock, where: str) -> dict[str, Any]:
    """Return a part of a turn: a text, or a picture."""
    if block.type != "image":
        return {"type": "text", "text": _text_in(block, where)}
    source = _source(block, where)
    if source.type == "base64":
        here = f"{where}.source.data"
        return of_base64(source.data or "", here, media_type=source.media_type or "").part
    if source.type == "url":
        return of_url(source.url, f"{where}.source.url").part
    raise RequestError(
        f"{where} has a source of type {source.type[:40]!r}; send the picture itself, as a source"
        " of type base64 (media_type, data): files are not kept",
        param="messages",
        code="unsupported_content",
    )


def _blocks_of(content: str | Sequence[ContentBlock]) -> Sequence[ContentBlock]:
    return [ContentBlock(type="text", text=content)] if isinstance(content, str) else content


def _block_text(block: ContentBlock, where: str) -> str | None:
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
            text = _text_of(_inner(block.content, where), f"{where}.content")
            return _element("search_result", [("source", source), ("title", block.title)], text)
        case ContentBlock(type="tool_reference", tool_name=str(name)):
            return f"The tool {name} is there."
    return None


def _result_content(block: ContentBlock, where: str) -> str | list[dict[str, Any]]:
    """Return a client's tool result; templates have no other place for an error."""
    blocks = enumerate(_blocks_of(_inner(block.content, where)))
    content = content_of([_part(one, f"{where}.content.{place}") for place, one in blocks])
    if not block.is_error:
        return content
    failed = "Error: "
    if isinstance(content, str):
        return failed + content
    return [{"type": "text", "text": failed}, *content]


def _server_result_text(block: ContentBlock) -> str:
    """Return the result of a tool that Anthropic ran, as JSON without what only it can read."""
    check_nesting(block.content, "messages")
    content = _readable(block.content)
    return content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)


def refused(block: ContentBlock, where: str) -> RequestError:
    if block.type == "image":
        return RequestError(
            f"{where} is an image; put it into a message of the user, or into a tool_result",
            param="messages",
            code="unsupported_content",
        )
    known = (
        "text, image, document (of text), search_result, thinking, tool_use, tool_result and the "
        "blocks of Anthropic's tools, with their fields, where they belong"
    )
    return RequestError(
        f"{where}: a block of type {block.type[:40]!r} is not supported here; what is: {known}",
        param="messages",
        code="unsupported_content",
    )


def _source(block: ContentBlock, where: str) -> BlockSource:
    try:
        return msgspec.convert(block.source, BlockSource)
    except msgspec.ValidationError as error:
        raise RequestError(
            f"{where}.source: {error}; send an object with the type, such as base64 (media_type,"
            " data) for an image and text (data) for a document",
            param="messages",
        ) from None


def _document(block: ContentBlock, where: str) -> str:
    source = _source(block, where)
    match source:
        case BlockSource(type="text", data=str(data)):
            return data
        case BlockSource(type="content", content=str() | list()):
            return _text_of(_inner(source.content, where), f"{where}.source.content")
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


# Tools that Anthropic defines and the client runs. The inputs are those that Anthropic's documents
# give for each; a version is the date in its type. One flat object holds the arguments of all
# commands, since some forms of calls, and templates, know no alternatives.
_TEXT: dict[str, Any] = {"type": "string"}
_EDIT = "view create str_replace insert"
_LINES = {"type": "array", "items": {"type": "integer"}, "description": "First and last, to view."}
_FILE = {
    "path": _TEXT,
    "view_range": _LINES,
    "file_text": {"type": "string", "description": "Of the created file."},
    "old_str": {"type": "string", "description": "The text to replace, which is there once."},
    "new_str": {"type": "string", "description": "The text instead."},
    "insert_line": {"type": "integer", "description": "The line to insert after, or 0."},
}
_INSERTED = {"insert_text": {"type": "string", "description": "The text to insert."}}


def _commands(names: str, arguments: dict[str, Any]) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"command": {"type": "string", "enum": names.split()}, **arguments},
        "required": ["command"],
    }


_BASH = {"type": "object", "properties": {"command": _TEXT, "restart": {"type": "boolean"}}}
_EDITOR = "Shows, creates and changes text files on the user's machine, by commands."
_KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    r"bash_\d+": ("Runs a command in a shell on the user's machine, or restarts it.", _BASH),
    r"text_editor_(20250429|20250728)": (_EDITOR, _commands(_EDIT, {**_FILE, **_INSERTED})),
    # These insert `new_str`.
    r"text_editor_\d+": (_EDITOR, _commands(f"{_EDIT} undo_edit", _FILE)),
    r"memory_\d+": (
        "Keeps notes in text files below /memories, from one conversation to the next.",
        _commands(
            f"{_EDIT} delete rename", {**_FILE, **_INSERTED, "old_path": _TEXT, "new_path": _TEXT}
        ),
    ),
}


def client_tool(kind: str) -> tuple[str, dict[str, Any]] | None:
    """Return description and schema of a tool by its type; None if the client cannot run it."""
    return next((tool for name, tool in _KINDS.items() if re.fullmatch(name, kind)), None)
