"""Errors in the shape of Ollama's API."""

from __future__ import annotations

import msgspec

PREFIX = "/api/"


class OllamaErrorBody(msgspec.Struct):
    """Error body of the routes below /api."""

    error: str


def error_body(message: str) -> OllamaErrorBody:
    return OllamaErrorBody(message)
