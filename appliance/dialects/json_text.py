"""Reads JSON from streamed text and passes values on unchanged."""

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
