"""A server whose engine follows a script, for clients that need more than a small model can do.

The server, its protocols, the chat template, the parsing of calls, and the client with its tools
are real; each test writes down what the model says.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from support.echo.echo_templates import TOOLS

if TYPE_CHECKING:
    from appliance.tokenizer import Tokenizer
    from tests.server.conftest import Running, Serve

CONTEXT = 400_000  # bytes are tokens here, and agents send long prompts
Rules = list[dict[str, Any]]
Play = Callable[[Rules], Any]


def call(name: str, **arguments: object) -> str:
    """A tool call in the form in which a model writes it."""
    content = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{content}\n</tool_call>"


@pytest.fixture
def play(serve: Serve, tokenizer_with: Callable[[str], Tokenizer], tmp_path: Path) -> Play:
    """A server whose engine follows a script."""

    @asynccontextmanager
    async def start(rules: Rules) -> AsyncIterator[Running]:
        script = tmp_path / "script.json"
        script.write_text(json.dumps(rules))
        async with serve(
            f"script={script} num_blocks={CONTEXT // 4}",
            tokenizer=tokenizer_with(TOOLS),
            max_model_len=CONTEXT,
            max_num_batched_tokens=CONTEXT,
        ) as running:
            yield running

    return start


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """A home folder in which an agent finds only our settings."""
    folder = tmp_path / "home"
    folder.mkdir()
    return folder
