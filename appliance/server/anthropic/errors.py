"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Literal

import msgspec

PATH = "/v1/messages"
# A client that gets it sends the whole conversation, if it may.
NO_THREADS = "thread_unsupported_request"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


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


def error_body(status: int, message: str, code: str | None, request_id: str) -> AnthropicErrorBody:
    """Build an error body; the status determines its type."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    details = ErrorDetails(NO_THREADS, ["thread"]) if code == NO_THREADS else None
    return AnthropicErrorBody(error=AnthropicError(kind, message, details), request_id=request_id)
