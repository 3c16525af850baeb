"""Reads JSON from streamed text, and calls that are JSON objects; several forms share it."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import TYPE_CHECKING

from appliance.dialects.source import MalformedCallError

if TYPE_CHECKING:
    from appliance.dialects.source import Source, Steps

_BOUNDS = ('"', "{", "[", "}", "]")
_IN_STRING = ("\\", '"')
_SCALAR = re.compile(r"true|false|null|-?\d[\d.eE+-]*")
_ARGUMENTS = ("arguments", "parameters")


def read_string(source: Source) -> Steps[str]:
    """Read and decode a string.

    Raises:
        MalformedCallError: it is not a string.
    """
    pieces: list[str] = []
    yield from read_value(source, pieces.append)
    try:
        value = json.loads("".join(pieces), strict=False)
    except ValueError:
        raise MalformedCallError from None
    if not isinstance(value, str):
        raise MalformedCallError
    return value


def read_value(source: Source, emit: Callable[[str], None]) -> Steps[bool]:
    """Pass on one value unchanged.

    Follows only brackets and strings, and passes on errors inside them.

    Returns:
        True if it is complete.

    Raises:
        MalformedCallError: no value begins here.
    """
    first = yield from source.peek()
    if first not in _BOUNDS[:3]:
        text = yield from source.scalar(" \t\r\n,]}")
        if not _SCALAR.fullmatch(text):
            raise MalformedCallError
        emit(text)
        return True
    depth = 0
    while True:
        bound = yield from source.until(_BOUNDS, emit)
        if bound is None:
            return False
        emit(bound)
        if bound == '"':
            if not (yield from _rest_of_string(source, emit)):
                return False
        else:
            depth += 1 if bound in "{[" else -1
        if depth <= 0:
            return True


def _rest_of_string(source: Source, emit: Callable[[str], None]) -> Steps[bool]:
    while (bound := (yield from source.until(_IN_STRING, emit))) is not None:
        emit(bound)
        if bound == '"':
            return True
        if not (yield from source.peek()):
            return False
        emit(source.advance())
    return False


def read_call_object(
    source: Source, accepts: Callable[[str], bool] = lambda name: True
) -> Steps[None]:
    """Read one call, its name first; an error after the name ends the call.

    Args:
        source: positioned at the object.
        accepts: returns True if a name may be a tool's.

    Raises:
        MalformedCallError: there is no name, or not a tool's name.
    """
    begun = False
    try:
        name, held, has_arguments = "", "", False
        if not (yield from source.literal("{")):
            raise MalformedCallError
        while True:
            yield from source.skip_space()
            key = yield from read_string(source)
            yield from source.skip_space()
            if not (yield from source.literal(":")):
                raise MalformedCallError
            yield from source.skip_space()
            if key == "name" and not name:
                name = yield from read_string(source)
                if not name or not accepts(name):
                    raise MalformedCallError
                begun = True
                source.begin_call(name)
                source.output.arguments(held)
            elif key in _ARGUMENTS and not has_arguments:
                has_arguments = True
                pieces: list[str] = []
                yield from read_arguments(
                    source, source.output.arguments if name else pieces.append
                )
                held = "".join(pieces)
            else:
                yield from read_value(source, lambda text: None)
            yield from source.skip_space()
            if not (yield from source.literal(",")):
                break
        complete = yield from source.literal("}")
        if not begun:
            raise MalformedCallError
        if complete and not has_arguments:
            source.output.arguments("{}")
    except MalformedCallError:
        if not begun:
            raise
    source.output.end_call()


def read_arguments(source: Source, emit: Callable[[str], None]) -> Steps[None]:
    """Pass on an object, or one encoded as a JSON string.

    Raises:
        MalformedCallError: it is neither.
    """
    first = yield from source.peek()
    if first == "{":
        yield from read_value(source, emit)
    elif first == '"':
        emit((yield from read_string(source)))
    elif first == "n" and (yield from source.literal("null")):
        emit("{}")
    else:
        raise MalformedCallError


def call_object(name: str, arguments: str, key: str = "arguments") -> str:
    """Write a call as models do; `key` names the field of the arguments."""
    return f'{{"name": {json.dumps(name, ensure_ascii=False)}, "{key}": {arguments}}}'
