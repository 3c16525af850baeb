"""Describes each protocol's own ways at the door: its paths, its errors, its streams.

`PROTOCOLS` has an entry for each one that differs from OpenAI's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal

import msgspec

from appliance.server.http.frames import SERVER_SENT_EVENTS, Wire, event_frame, line_frame

if TYPE_CHECKING:
    from starlette.types import Scope

# A client of Anthropic's that gets it sends the whole conversation, if it may.
NO_THREADS = "thread_unsupported_request"


class ErrorDetail(msgspec.Struct, frozen=True):
    """The inside of an error body."""

    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(msgspec.Struct, frozen=True):
    """Error body of the OpenAI routes."""

    error: ErrorDetail


class ErrorDetails(msgspec.Struct):
    """The reason of a failure from which Anthropic's clients recover."""

    error_code: str
    unsupported: list[str]


class AnthropicError(msgspec.Struct, omit_defaults=True):
    """The inside of an error body."""

    type: str
    message: str
    details: ErrorDetails | None = None


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Error body of /v1/messages."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str


class OllamaErrorBody(msgspec.Struct):
    """Error body of the routes below /api."""

    error: str


@dataclass(frozen=True, slots=True)
class ClientProtocol:
    """The manners of one protocol on the paths that begin with `prefix`.

    Attributes:
        error_type: struct of an error's body.
        make_error: makes it from a status, the error and the request's id.
        wire: form of its streams.
        id_header: where its clients look for the request's id; empty for x-request-id.
        needs_type: a body must be declared as JSON.
    """

    prefix: str
    error_type: type[msgspec.Struct]
    make_error: Callable[[int, ErrorDetail, str], msgspec.Struct]
    wire: Wire = SERVER_SENT_EVENTS
    id_header: str = ""
    needs_type: bool = True


# Anthropic's types of errors by status.
_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


def _openai_error(status: int, error: ErrorDetail, request_id: str) -> ErrorBody:
    return ErrorBody(error)


def _anthropic_error(status: int, error: ErrorDetail, request_id: str) -> AnthropicErrorBody:
    kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = ErrorDetails(NO_THREADS, ["thread"]) if error.code == NO_THREADS else None
    inside = AnthropicError(kind, error.message, details)
    return AnthropicErrorBody(error=inside, request_id=request_id)


def _ollama_error(status: int, error: ErrorDetail, request_id: str) -> OllamaErrorBody:
    return OllamaErrorBody(error.message)


OPENAI = ClientProtocol("/", ErrorBody, _openai_error)
ANTHROPIC = ClientProtocol(
    "/v1/messages",
    AnthropicErrorBody,
    _anthropic_error,
    Wire(keep_alive=event_frame("ping", {"type": "ping"}), frame=partial(event_frame, "error")),
    id_header="request-id",
)
OLLAMA = ClientProtocol(
    "/api/",
    OllamaErrorBody,
    _ollama_error,
    # White space before a line is part of its JSON, and keeps the connection alive.
    Wire("application/x-ndjson", keep_alive=b" ", frame=line_frame, frame_end=b"\n"),
    needs_type=False,  # Ollama ignores the header, and its clients send none, or curl's for forms
)
PROTOCOLS = (ANTHROPIC, OLLAMA)


def protocol_of(scope: Scope) -> ClientProtocol:
    """Return the protocol of a request's path."""
    path: str = scope.get("path", "")
    return next((one for one in PROTOCOLS if path.startswith(one.prefix)), OPENAI)
