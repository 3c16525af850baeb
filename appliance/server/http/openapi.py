"""Generates /openapi.json from the request and answer structs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from fastapi.openapi.utils import get_openapi

from appliance.server.http.protocols import OPENAI, ClientProtocol, ErrorBody

if TYPE_CHECKING:
    from fastapi import FastAPI

_TEMPLATE = "#/components/schemas/{name}"
_POST_ERRORS = {
    400: "The request is wrong; `param` names the field.",
    404: "The model is not served here.",
    408: "The body did not arrive in time.",
    413: "The body is too large.",
    415: "The body is not plain JSON.",
    429: "Too many requests wait.",
}
_ANY_ERRORS = {
    401: "The API key is missing or wrong.",
    403: "Host or Origin is not allowed, or it belongs to another key.",
    500: "The server failed.",
    503: "The engine is not ready.",
}

# One event of a stream.
_EVENT = {
    "type": "object",
    "properties": {"event": {"type": "string"}, "data": {"type": "string"}},
    "required": ["data"],
}

_described: set[type[msgspec.Struct]] = {ErrorBody}


def describes(
    takes: type[msgspec.Struct] | None,
    gives: type[msgspec.Struct] | None,
    *,
    streams: bool = False,
    path: tuple[str, ...] = (),
    query: tuple[str, ...] = (),
    media_types: tuple[str, ...] = ("application/json",),
    protocol: ClientProtocol = OPENAI,
) -> dict[str, Any]:
    """Return keyword arguments that document a route.

    Args:
        takes: struct of the body.
        gives: struct of the answer; None means one of `media_types`.
        path: names of the path parameters.
        query: names of optional query parameters.
        media_types: of an answer without a struct.
    """
    if gives is not None:
        content: dict[str, Any] = {"application/json": {"schema": _reference(gives)}}
    else:
        content = {media_type: _pieces(media_type) for media_type in media_types}
    if streams:
        media_type = protocol.wire.media_type
        content[media_type] = _pieces(media_type)
    responses: dict[int | str, dict[str, Any]] = {
        200: {"description": "Success.", "content": content}
    }
    errors = {**(_POST_ERRORS if takes else {404: "There is no such thing."}), **_ANY_ERRORS}
    for status, text in errors.items():
        schema = {"application/json": {"schema": _reference(protocol.error_type)}}
        responses[status] = {"description": text, "content": schema}
    extra: dict[str, Any] = {}
    if takes is not None:
        body = {"application/json": {"schema": _reference(takes)}}
        extra["requestBody"] = {"required": True, "content": body}
    if path or query:
        extra["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for place, names in (("path", path), ("query", query))
            for name in names
        ]
    return {"responses": responses, "openapi_extra": extra, "response_model": None}


def install(app: FastAPI, *, key_required: bool, root_path: str) -> None:
    """Make the app describe itself by the structs' schemas.

    Args:
        root_path: prefix behind a reverse proxy, or empty.
    """

    def openapi() -> dict[str, Any]:
        if app.openapi_schema is None:
            document = get_openapi(title=app.title, version=app.version, routes=app.routes)
            kinds = sorted(_described, key=lambda kind: kind.__name__)
            _, schemas = msgspec.json.schema_components(kinds, ref_template=_TEMPLATE)
            components = document.setdefault("components", {})
            components["schemas"] = {**components.get("schemas", {}), **schemas}
            if root_path:
                document["servers"] = [{"url": root_path}]
            if key_required:
                components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
                document["security"] = [{"key": []}]
            app.openapi_schema = document
        return app.openapi_schema

    app.openapi = openapi  # type: ignore[method-assign]


def _pieces(media_type: str) -> dict[str, Any]:
    """Return the content of answers without a struct."""
    if media_type == "application/json":
        return {}
    return {"schema": _EVENT if media_type == "text/event-stream" else {"type": "string"}}


def _reference(kind: type[msgspec.Struct]) -> dict[str, str]:
    _described.add(kind)
    return {"$ref": _TEMPLATE.format(name=kind.__name__)}
