"""A client's set-up: steps with text to copy, and values quoted for its language."""

from __future__ import annotations

import json
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

NO_KEY = "none"  # clients require some key


@dataclass(frozen=True, slots=True)
class Connection:
    """Values that a client needs.

    Attributes:
        url: the server's, without `/v1`.
        model: its id in the API.
        key: to send; None if the server needs none.
        context_length: tokens; None if unknown.
    """

    url: str
    model: str
    key: str | None = None
    context_length: int | None = None

    @property
    def api(self) -> str:
        """Base URL of the OpenAI API."""
        return f"{self.url}/v1"

    @property
    def key_to_send(self) -> str:
        return self.key or NO_KEY


@dataclass(frozen=True, slots=True)
class SetupStep:
    """One step of a set-up.

    Attributes:
        code: text to copy, or empty.
        language: the code's: bash, json, yaml, toml, python or javascript.
        file: the code's destination; empty for a command.
    """

    text: str
    code: str = ""
    language: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class Recipe:
    """The set-up of one client.

    Attributes:
        steps: writes the steps for a connection.
        is_elsewhere: the client usually runs on another machine.
        least_context: tokens that its prompts fill soon.
    """

    title: str
    steps: Callable[[Connection], tuple[SetupStep, ...]]
    is_elsewhere: bool = False
    least_context: int = 0

    def code(self, connection: Connection) -> str:
        """Return the text for a file, or else the first command; empty if there is neither."""
        steps = [step for step in self.steps(connection) if step.code]
        steps.sort(key=lambda step: not step.file)
        return steps[0].code if steps else ""


def as_json(value: Any) -> str:
    return json.dumps(value, indent=2, ensure_ascii=False)


def as_literal(text: str) -> str:
    """Quote a text as TOML, YAML, Python and JavaScript all read it."""
    return json.dumps(text, ensure_ascii=False)


def with_variables(command: str, **variables: str) -> str:
    """Write a shell command after its environment variables, one per line."""
    lines = [f"{name}={shlex.quote(value)}" for name, value in variables.items()]
    return " \\\n".join([*lines, command])
