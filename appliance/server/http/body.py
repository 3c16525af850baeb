"""Reads request bodies within limits and decodes them strictly."""

from __future__ import annotations

import asyncio
import json
import logging
import math
import re
from collections.abc import Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, NoReturn, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from appliance.errors import RequestError
from appliance.server.http.errors import (
    BodyTimeoutError,
    BodyTooLargeError,
    MediaTypeError,
)
from appliance.server.http.protocols import protocol_of

if TYPE_CHECKING:
    from starlette.types import Scope

BODY_SECONDS = 30.0
OFF_LOOP_BYTES = 64 * 1024  # a thread decodes larger bodies
BODY_BYTES = "body_bytes"  # key in a request's state
_MAX_NAMES_LOGGED = 100
_MAX_DIGITS = 400

StructT = TypeVar("StructT", bound=msgspec.Struct)

logger = logging.getLogger(__name__)
names_logged: set[str] = set()


async def read_json(
    request: Request, kind: type[StructT], *, max_bytes: int
) -> tuple[StructT, dict[str, Any]]:
    """Read and decode a body.

    Returns:
        The struct, and the raw object with any other fields.

    Raises:
        RequestError: the body is too large, too slow, not JSON, or does not fit the struct.
    """
    body = await read_body(request, max_bytes=max_bytes)
    request.scope.setdefault("state", {})[BODY_BYTES] = len(body)
    decoder_of(kind)
    if len(body) < OFF_LOOP_BYTES:
        return decode_json(body, kind)
    return await asyncio.to_thread(decode_json, body, kind)


def body_size(scope: Scope) -> int:
    """Return the bytes of a request's body; 0 before it has been read."""
    size: int = scope.get("state", {}).get(BODY_BYTES, 0)
    return size


async def read_body(request: Request, *, max_bytes: int) -> bytes:
    """Read a JSON body of at most `max_bytes`."""
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not _may_lack_type(request):
        raise MediaTypeError(f"the content type must be application/json, not {media_type!r}")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise MediaTypeError("compressed bodies are not accepted")
    return await read_bytes(request, max_bytes=max_bytes)


def _may_lack_type(request: Request) -> bool:
    """Return True if a body may have any content type.

    A browser needs no preflight to send such a body for a foreign page, so its requests, which
    these headers show, must name JSON in every protocol.
    """
    if protocol_of(request.scope).needs_type:
        return False
    return "origin" not in request.headers and "sec-fetch-site" not in request.headers


async def read_bytes(request: Request, *, max_bytes: int) -> bytes:
    """Read a body of at most `max_bytes`.

    Raises:
        RequestError: it is too large or too slow.
    """
    too_large = BodyTooLargeError(f"the body must have at most {max_bytes} bytes")
    length = request.headers.get("content-length")
    if length is not None and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_SECONDS):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        raise BodyTimeoutError(f"the body did not arrive within {BODY_SECONDS:.0f} s") from None
    except ClientDisconnect:
        raise BodyTimeoutError("the client went away before its body had arrived") from None
    return bytes(body)


@cache
def decoder_of(kind: type[StructT]) -> msgspec.json.Decoder[StructT]:
    """Return the decoder of a struct.

    Call it first on the event loop: msgspec learns a struct's fields when it is first decoded, and
    two threads that do so at once crash the process.
    """
    return msgspec.json.Decoder(kind)


def decode_json(body: bytes, kind: type[StructT]) -> tuple[StructT, dict[str, Any]]:
    """Decode strictly: exact types, no NaN, no number out of range, no repeated key.

    Raises:
        RequestError: the body breaks a rule; `param` names the field at fault.
    """
    try:
        decoded = decoder_of(kind).decode(body)
        plain = json.loads(
            body.decode("utf-8"),
            object_pairs_hook=refuse_duplicates,
            parse_float=_finite_float,
            parse_int=_bounded_int,
        )
    except msgspec.ValidationError as error:
        raise _wrong_field(str(error)) from None
    except RecursionError:
        raise RequestError("the body is nested too deeply") from None
    except ValueError as error:  # base of msgspec.DecodeError, UnicodeDecodeError and json's error
        raise RequestError(f"the body is not valid JSON: {error}") from None
    assert isinstance(plain, dict)
    return decoded, plain


def note_ignored(fields: Mapping[str, Any], known: set[str]) -> None:
    """Log the names of ignored fields, each once."""
    for name in fields.keys() - known - names_logged:
        if len(names_logged) < _MAX_NAMES_LOGGED:
            names_logged.add(name)
            logger.info("field %.100r of a request is not known and ignored", name)


def _wrong_field(text: str) -> RequestError:
    """Parse msgspec's message, such as "Expected `int`, got `str` - at `$.max_tokens`"."""
    what, _, where = text.partition(" - at `$")
    path = where.rstrip("`").removeprefix(".")
    name = re.match(r"\w+", path) or re.search(r"(?<=required field `)\w+", what)
    message = f"{path}: {what}" if path else what
    return RequestError(message, param=name.group() if name else None)


def refuse_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object's fields; raise RequestError if a key stands twice."""
    fields: dict[str, Any] = {}
    for name, value in pairs:
        if name in fields:
            _refuse(f"the key {name[:100]!r} stands twice in one object")
        fields[name] = value
    return fields


def _finite_float(text: str) -> float:
    number = float(text)
    if not math.isfinite(number):
        _refuse(f"the number {text:.40} is out of range")
    return number


def _bounded_int(text: str) -> int:
    if len(text) > _MAX_DIGITS:
        _refuse(f"a number of {len(text)} digits is out of range")
    return int(text)


def _refuse(message: str) -> NoReturn:
    raise RequestError(f"the body is not acceptable JSON: {message}")
