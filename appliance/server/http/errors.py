"""Maps errors to statuses and error bodies by one table, each in its path's protocol."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.responses import Response

from appliance.errors import (
    ChatTemplateError,
    EngineDiedError,
    EngineError,
    EngineUnavailableError,
    QuarantinedError,
    RequestError,
)
from appliance.server.http.protocols import ErrorBody, ErrorDetail, protocol_of

if TYPE_CHECKING:
    from starlette.types import Scope

logger = logging.getLogger(__name__)

RETRY_AFTER = 2  # seconds, while the engine loads or restarts
REQUEST_ID = "request_id"  # key in a request's state
ENGINE_DIED = "x-engine-died"  # header for a cluster's front: the engine died with this request


class ForbiddenError(RequestError):
    """A request forged through a browser, by its Host or Origin header."""

    status = 403
    type = "permission_error"


class BodyTimeoutError(RequestError):
    """The body did not arrive in time."""

    status = 408


class BodyTooLargeError(RequestError):
    """The body exceeds the limit."""

    status = 413


class MediaTypeError(RequestError):
    """The body is not plain JSON."""

    status = 415


class FramingError(RequestError):
    """The request's end is ambiguous; closes its connection."""


class TooManyWrongKeysError(RequestError):
    """An address tried too many keys; `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, retry_after: float) -> None:
        super().__init__(
            "too many wrong API keys came from this address; try again later",
            code="too_many_wrong_keys",
        )
        self.retry_after = retry_after


class RateLimitError(RequestError):
    """The API key has reached a limit; `retry_after` is in seconds."""

    status = 429
    type = "rate_limit_error"

    def __init__(self, message: str, retry_after: float) -> None:
        super().__init__(f"{message}; try again later", code="rate_limit_exceeded")
        self.retry_after = retry_after


class TooManyConnectionsError(RequestError):
    """The server has too many connections; `retry_after` is in seconds."""

    status = 503
    type = "server_error"
    retry_after = 2

    def __init__(self, message: str) -> None:
        super().__init__(f"{message}; try again in a moment", code="too_many_connections")


def describe(error: Exception) -> tuple[int, ErrorBody, dict[str, str]]:
    match error:
        case RequestError():
            headers = {}
            if (seconds := getattr(error, "retry_after", None)) is not None:
                headers["retry-after"] = str(math.ceil(seconds))
            if isinstance(error, QuarantinedError):
                headers["x-should-retry"] = "false"  # OpenAI's clients retry after any 500
            if isinstance(error, FramingError):
                headers["connection"] = "close"
            if error.status == 401:
                headers["www-authenticate"] = "Bearer"
            return error.status, _body(error.message, error.type, error.param, error.code), headers
        case ChatTemplateError():
            body = _body(str(error), "invalid_request_error", "messages", "chat_template_failed")
            return 400, body, {}
        case EngineDiedError() | EngineUnavailableError():
            body = _body(str(error), "server_error", None, "engine_unavailable")
            seconds = RETRY_AFTER + (getattr(error, "retry_after", None) or 0.0)
            headers = {"retry-after": str(math.ceil(seconds))}
            if isinstance(error, EngineDiedError):
                headers[ENGINE_DIED] = "true"
            return 503, body, headers
        case HTTPException():
            code = {404: "not_found", 405: "method_not_allowed"}.get(error.status_code)
            body = _body(str(error.detail), "invalid_request_error", None, code)
            return error.status_code, body, dict(error.headers or {})
        case _:
            # An EngineError's message is for users; a bug's is not.
            text = str(error) if isinstance(error, EngineError) else "internal error; see the log"
            return 500, _body(text, "server_error", None, "internal_error"), {}


def error_body(error: Exception, scope: Scope) -> msgspec.Struct:
    """Return an error's body in the path's protocol."""
    status, body, _ = describe(error)
    return protocol_of(scope).make_error(status, body.error, request_id_of(scope))


def error_response(error: Exception, scope: Scope) -> Response:
    status, _, headers = describe(error)
    if status >= 500 and scope["method"] == "POST":  # health probes are frequent
        request_id, path = request_id_of(scope), scope["path"]
        logger.info("x-request-id %s: POST %s failed with %d", request_id or "-", path, status)
    return json_response(error_body(error, scope), status=status, headers=headers)


def request_id_of(scope: Scope) -> str:
    """Return the request id that the door assigned; "" before that."""
    name: str = scope.get("state", {}).get(REQUEST_ID, "")
    return name


def json_response(
    content: Any, *, status: int = 200, headers: dict[str, str] | None = None
) -> Response:
    return Response(
        msgspec.json.encode(content),
        status_code=status,
        headers=headers,
        media_type="application/json",
    )


def _body(message: str, kind: str, param: str | None, code: str | None) -> ErrorBody:
    return ErrorBody(ErrorDetail(message, kind, param, code))
