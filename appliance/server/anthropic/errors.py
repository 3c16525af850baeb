"""Errors in the shape of Anthropic's API."""

from __future__ import annotations

from typing import Literal

import msgspec

PATH = "/v1/messages"
_KINDS = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
}


class AnthropicError(msgspec.Struct):
    """The inside of an error body."""

    type: str
    message: str


class AnthropicErrorBody(msgspec.Struct, kw_only=True):
    """Error body of /v1/messages."""

    type: Literal["error"] = "error"
    error: AnthropicError
    request_id: str


def error_body(status: int, message: str, request_id: str) -> AnthropicErrorBody:
    """Build an error body; the status determines its type."""
    kind = _KINDS.get(status, "invalid_request_error" if status < 500 else "api_error")
    return AnthropicErrorBody(error=AnthropicError(kind, message), request_id=request_id)
