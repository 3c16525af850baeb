"""Fixtures for the tests of `/v1/responses`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from support.echo.echo_templates import TOOLS

from appliance.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tokenizer_with: Callable[[str], Tokenizer]) -> Tokenizer:
    return tokenizer_with(TOOLS)


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The turns, tools and options that reach the template."""
    found: list[Any] = []
    encode_chat = Tokenizer.encode_chat

    def noted(self: Tokenizer, messages: Any, **options: Any) -> list[int]:
        found.append((messages, options["tools"], options["options"]))
        return encode_chat(self, messages, **options)

    monkeypatch.setattr(Tokenizer, "encode_chat", noted)
    return found
